//! What a host does that means well.

use tcp::Data;
use wire::fabrics::PropertySize;
use wire::identify::IdentifyController;
use wire::register::{Capabilities, offset};
use wire::{AdminOpcode, Command, IoOpcode, Status};

use super::rig::{NQN, Rig, pattern, transfer};

fn identify() -> Command {
    Command::new(AdminOpcode::Identify.code()).with_cdw10(1)
}

#[test]
fn a_host_connects_enables_identifies_writes_and_reads() {
    let mut rig = Rig::new();
    let (admin, cntlid) = rig.admin();
    let cap = Capabilities(rig.property(admin, offset::CAP, PropertySize::Eight).result());
    assert_eq!((cap.mqes(), cap.css_nvm(), cap.mpsmin()), (128, true, 0));
    let (completion, page) = rig.command(admin, &identify(), Data::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let page = IdentifyController::from_bytes(page.first_chunk().unwrap());
    assert_eq!(page.subnqn().trimmed(), NQN.as_bytes());
    assert_eq!((page.cntlid(), page.ioccsz(), page.cqt()), (cntlid, 516, 1000));

    let io = rig.io(cntlid, 1);
    for (index, blocks) in (0_u32..).zip([1, 8, 16, 17, 100, 256]) {
        let bytes = pattern(index, blocks as usize * 512);
        let len = u32::try_from(bytes.len()).unwrap();
        let lba = u64::from(index) * 300;
        let write = transfer(IoOpcode::Write.code(), lba, blocks);
        let (completion, _) = rig.command(io, &write, Data::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS, "write {blocks}");
        let read = transfer(IoOpcode::Read.code(), lba, blocks);
        let (completion, back) = rig.command(io, &read, Data::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS, "read {blocks}");
        assert!(back == bytes, "{blocks} blocks are those that were written");
    }
    rig.lines.clear();
    rig.assert_empty();
}
