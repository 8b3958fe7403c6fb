//! What a host does that means well.

use tcp::{Data, DigestUse, HostConfig};
use wire::fabrics::PropertySize;
use wire::identify::IdentifyController;
use wire::register::{Capabilities, offset};
use wire::{AdminOpcode, Command, IoOpcode, Status};

use super::rig::{NQN, Rig, connect_data, io_config, io_connect, pattern, transfer};

fn identify() -> Command {
    Command::new(AdminOpcode::Identify.code()).with_cdw10(1)
}

/// Whatever goes with a digest comes back as it went.
#[test]
fn both_digests_change_nothing_but_the_bytes_on_the_wire() {
    let mut rig = Rig::new();
    let (_, cntlid) = rig.admin();
    let digests = HostConfig {
        header_digest: DigestUse::Required,
        data_digest: DigestUse::Required,
        ..io_config()
    };
    let io = rig.dial(digests);
    assert!(rig.lines[io].terms.is_some_and(|terms| terms.header_digest && terms.data_digest));
    let completion = rig.connect(io, &io_connect(1), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    for blocks in [1, 9, 256] {
        let len = blocks * 512;
        let bytes = pattern(blocks, len as usize);
        let write = transfer(IoOpcode::Write.code(), 5, blocks);
        let (completion, _) = rig.command(io, &write, Data::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let read = transfer(IoOpcode::Read.code(), 5, blocks);
        let (completion, back) = rig.command(io, &read, Data::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(back == bytes);
    }
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

/// The controller ends these, and not the queue: one at a time, with nothing else under way that
/// would bring their ends along.
#[test]
fn reservation_commands_end_when_nothing_else_is_under_way() {
    let mut rig = Rig::new();
    let (_, cntlid) = rig.admin();
    let io = rig.io(cntlid, 1);
    let keys = [[0; 8], [7; 8]].concat();
    let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
    let (completion, _) = rig.command(io, &register, Data::FromHost(16), &keys);
    assert_eq!(completion.status(), Status::SUCCESS);
    // Thirty-two dwords, in the form for long host identifiers.
    let report = Command::new(IoOpcode::ReservationReport.code()).with_nsid(1);
    let report = report.with_cdw10(31).with_cdw11(1);
    let (completion, bytes) = rig.command(io, &report, Data::ToHost(128), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(bytes[5], 1, "one has registered");
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn everybody_who_is_connected_is_shown_with_what_he_has() {
    let mut rig = Rig::new();
    let stranger = rig.dial(io_config());
    let (_, cntlid) = rig.admin();
    let digests = HostConfig { data_digest: DigestUse::Required, ..io_config() };
    let io = rig.dial(digests);
    rig.connect(io, &io_connect(1), &connect_data(cntlid));
    let shown = rig.service.connections();
    let queues: Vec<_> = shown.iter().map(|one| (one.cntlid, one.queue)).collect();
    assert_eq!(queues, [(None, None), (Some(cntlid), Some(0)), (Some(cntlid), Some(1))]);
    let named = |host: &str| Some(host.to_owned());
    assert_eq!((&shown[0].host, &shown[2].host), (&None, &named(super::rig::HOST)));
    assert_eq!((&shown[2].subsystem, shown[2].peer.as_str()), (&named(NQN), "pipe"));
    assert_eq!((shown[2].header_digest, shown[2].data_digest), (false, true));
    assert_eq!((shown[0].memory_bytes, shown[2].memory_bytes), (8192, 8192 + 16384));
    // Memory that lies idle, and memory that is used.
    let read = transfer(IoOpcode::Read.code(), 0, 256);
    rig.lines[io].is_deaf = true;
    rig.lines[io].submit(&read, Data::ToHost(128 << 10), &[]);
    rig.run();
    let held: u64 = rig.service.connections().iter().map(|one| one.memory_bytes).sum();
    let budget = rig.service.budget();
    assert_eq!(held, budget.bytes() - budget.free_bytes());
    rig.lines[stranger].pipe = None;
    rig.run();
    assert_eq!(rig.service.connections().len(), 2);
}
