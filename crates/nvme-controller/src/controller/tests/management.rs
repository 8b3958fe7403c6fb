//! Namespace Management and Attachment, and the changes that other controllers see.

use tenmil_wire::admin::{
    AttachmentSelect, FormatNvm, GetLogPage, Identify, ManagementSelect, NamespaceAttachment,
    NamespaceManagement, SetFeatures,
};
use tenmil_wire::feature::Feature;
use tenmil_wire::identify::{
    Cns, ControllerList, IdentifyController, IdentifyNamespace, LbaFormat,
};
use tenmil_wire::log::LogPage;
use tenmil_wire::{Layout, Status, TypedCommand};

use super::bench::{Bench, Shelf, ended, step};
use crate::controller::ControllerConfig;

const CREATE: NamespaceManagement =
    NamespaceManagement { nsid: 0, sel: ManagementSelect::Create, csi: 0 };

fn wish(blocks: u64) -> IdentifyNamespace {
    IdentifyNamespace::zeroed().with(|it| it.nsze(blocks).ncap(blocks))
}

fn create(bench: &mut Bench, wish: &IdentifyNamespace) -> Result<u32, Status> {
    bench.send(CREATE, wish.as_bytes())
}

fn delete(nsid: u32) -> NamespaceManagement {
    NamespaceManagement { nsid, sel: ManagementSelect::Delete, csi: 0 }
}

fn attach(bench: &mut Bench, nsid: u32, cntlids: &[u16]) -> Result<u32, Status> {
    let command = NamespaceAttachment { nsid, sel: AttachmentSelect::Attach };
    bench.send(command, ControllerList::new(cntlids.iter().copied()).as_bytes())
}

fn detach(bench: &mut Bench, nsid: u32, cntlids: &[u16]) -> Result<u32, Status> {
    let command = NamespaceAttachment { nsid, sel: AttachmentSelect::Detach };
    bench.send(command, ControllerList::new(cntlids.iter().copied()).as_bytes())
}

fn unallocated(bench: &mut Bench) -> u128 {
    let identify = Identify { cns: Cns::Controller.code(), ..Identify::default() };
    IdentifyController::parse(&bench.get(identify).unwrap()).unwrap().unvmcap()
}

fn has(bench: &Bench, nsid: u32) -> bool {
    bench.controller.namespaces().reader().get().get(nsid).is_some()
}

#[test]
fn without_a_pool_there_is_nothing_to_manage() {
    let mut bench = Bench::new();
    for command in [CREATE.to_command(), delete(1).to_command()] {
        assert_eq!(ended(bench.step(&command, &[]).0), Err(Status::INVALID_OPCODE));
    }
    assert_eq!(attach(&mut bench, 1, &[1]), Err(Status::INVALID_OPCODE));
}

#[test]
fn a_namespace_is_created_attached_detached_and_deleted() {
    let mut bench = Bench::with_pool(vec![Shelf::new()], 1 << 20);
    assert_eq!(create(&mut bench, &wish(1024)), Ok(2));
    assert_eq!(unallocated(&mut bench), (1 << 20) - 1024 * 512);
    assert!(!has(&bench, 2), "created is not attached");
    attach(&mut bench, 2, &[1]).unwrap();
    assert!(has(&bench, 2));
    detach(&mut bench, 2, &[1]).unwrap();
    assert!(!has(&bench, 2));
    bench.run(delete(2)).unwrap();
    assert_eq!(unallocated(&mut bench), 1 << 20);
    assert_eq!(bench.run(delete(2)), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn capacity_is_counted_to_the_last_block() {
    let mut bench = Bench::with_pool(vec![], 1 << 20);
    let full = create(&mut bench, &wish(2049));
    assert_eq!(full, Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
    assert_eq!(create(&mut bench, &wish(2040)), Ok(1));
    let large = |blocks| wish(blocks).with(|it| it.fidxl(1));
    assert_eq!(create(&mut bench, &large(2)), Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
    assert_eq!(create(&mut bench, &large(1)), Ok(2));
    assert_eq!(unallocated(&mut bench), 0);
    let huge = create(&mut bench, &wish(u64::MAX));
    assert_eq!(huge, Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY), "no sum overflows");
    bench.run(delete(u32::MAX)).unwrap();
    assert_eq!(unallocated(&mut bench), 1 << 20);
}

#[test]
fn a_new_namespace_is_as_wished() {
    let mut bench = Bench::with_pool(vec![], 1 << 30);
    let nsid = create(&mut bench, &wish(64).with(|it| it.fidxl(1).shrns(true))).unwrap();
    attach(&mut bench, nsid, &[1]).unwrap();
    let identify = Identify { nsid, ..Identify::default() };
    let id = IdentifyNamespace::parse(&bench.get(identify).unwrap()).unwrap();
    assert_eq!((id.nsze(), id.block_bytes(), id.shrns()), (64, Some(4096), true));
    assert_eq!(id.format(), LbaFormat::new(12, 0));
}

#[test]
fn every_wish_that_cannot_be_is_refused() {
    let cases = [
        (wish(0), Status::INVALID_FIELD),
        (wish(64).with(|it| it.ncap(63)), Status::THIN_PROVISIONING_NOT_SUPPORTED),
        (wish(64).with(|it| it.fidxl(2)), Status::INVALID_FORMAT),
        (wish(64).with(|it| it.fidxu(1)), Status::INVALID_FORMAT),
        (wish(64).with(|it| it.metadata_extended(true)), Status::INVALID_FORMAT),
        (wish(64).with(|it| it.pit(1)), Status::INVALID_FORMAT),
        (wish(64).with(|it| it.disns(true)), Status::INVALID_FIELD),
        (wish(64).with(|it| it.nvmsetid(1)), Status::INVALID_FIELD),
        (wish(64).with(|it| it.endgid(1)), Status::INVALID_FIELD),
        (wish(64).with(|it| it.anagrpid(1)), Status::ANA_GROUP_IDENTIFIER_INVALID),
    ];
    let mut bench = Bench::with_pool(vec![], 1 << 20);
    for (wish, status) in cases {
        assert_eq!(create(&mut bench, &wish), Err(status), "{wish:?}");
    }
    let page = *wish(64).as_bytes();
    let named = NamespaceManagement { nsid: 1, ..CREATE };
    assert_eq!(bench.send(named, &page), Err(Status::INVALID_FIELD));
    let zoned = NamespaceManagement { csi: 2, ..CREATE };
    assert_eq!(bench.send(zoned, &page), Err(Status::COMMAND_SET_NOT_SUPPORTED));
    let strange = NamespaceManagement { sel: ManagementSelect::Reserved(2), ..CREATE };
    assert_eq!(bench.send(strange, &page), Err(Status::INVALID_FIELD));
    assert_eq!(unallocated(&mut bench), 1 << 20);
}

#[test]
fn identifiers_run_out_and_are_used_again() {
    let config = ControllerConfig::default();
    let mut bench = Bench::with(
        vec![],
        |config| {
            config.nsid_max = 2;
            config.pool = Some(Box::new(super::bench::Pool(1 << 20)));
        },
        config,
    );
    assert_eq!((create(&mut bench, &wish(8)), create(&mut bench, &wish(8))), (Ok(1), Ok(2)));
    let third = create(&mut bench, &wish(8));
    assert_eq!(third, Err(Status::NAMESPACE_IDENTIFIER_UNAVAILABLE));
    bench.run(delete(1)).unwrap();
    assert_eq!(create(&mut bench, &wish(8)), Ok(1));
}

#[test]
fn every_attachment_that_cannot_be_is_refused() {
    let mut bench = Bench::with_pool(vec![], 1 << 20);
    let _others = [bench.second(2), bench.second(3)];
    create(&mut bench, &wish(8)).unwrap();
    let invalid = Err(Status::CONTROLLER_LIST_INVALID);
    for list in [&[][..], &[9], &[2, 1], &[1, 1], &[1, 9]] {
        assert_eq!(attach(&mut bench, 1, list), invalid, "{list:?}");
    }
    let liar = ControllerList::new([1]).with(|list| list.count(2048));
    let command = NamespaceAttachment { nsid: 1, sel: AttachmentSelect::Attach };
    assert_eq!(bench.send(command, liar.as_bytes()), invalid);
    for nsid in [0, 2, u32::MAX] {
        let status = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(attach(&mut bench, nsid, &[1]), status);
        assert_eq!(detach(&mut bench, nsid, &[1]), status);
    }
    assert_eq!(attach(&mut bench, 1, &[1, 2]), Err(Status::NAMESPACE_IS_PRIVATE));
    assert_eq!(detach(&mut bench, 1, &[1]), Err(Status::NAMESPACE_NOT_ATTACHED));
    attach(&mut bench, 1, &[2]).unwrap();
    assert_eq!(attach(&mut bench, 1, &[2]), Err(Status::NAMESPACE_ALREADY_ATTACHED));
    assert_eq!(attach(&mut bench, 1, &[1]), Err(Status::NAMESPACE_IS_PRIVATE));
    assert_eq!(detach(&mut bench, 1, &[1, 2]), Err(Status::NAMESPACE_NOT_ATTACHED));
    let strange = NamespaceAttachment { nsid: 1, sel: AttachmentSelect::Reserved(2) };
    let list = ControllerList::new([1]);
    assert_eq!(bench.send(strange, list.as_bytes()), Err(Status::INVALID_FIELD));
}

#[test]
fn what_is_protected_or_being_formatted_is_not_deleted() {
    let mut bench = Bench::with_pool(vec![Shelf::new(), Shelf::new()], 1 << 20);
    let protect = SetFeatures {
        nsid: 1,
        fid: Feature::NamespaceWriteProtection.code(),
        cdw11: 1,
        ..SetFeatures::default()
    };
    bench.run(protect).unwrap();
    assert_eq!(bench.run(delete(1)), Err(Status::NAMESPACE_WRITE_PROTECTED));
    let everything = bench.run(delete(u32::MAX));
    assert_eq!(everything, Err(Status::NAMESPACE_WRITE_PROTECTED), "all or none");
    assert!(has(&bench, 2));
    let format = FormatNvm { nsid: 2, ..FormatNvm::default() };
    bench.step(&format.to_command(), &[]);
    assert_eq!(bench.run(delete(2)), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(detach(&mut bench, 2, &[1]), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(bench.wait().1, Ok(0));
    bench.run(delete(2)).unwrap();
}

#[test]
fn every_controller_that_had_or_gets_a_namespace_lists_it_as_changed() {
    let mut bench = Bench::with_pool(vec![Shelf::new()], 1 << 20);
    let mut other = bench.second(2);
    let shared = wish(8).with(|it| it.shrns(true));
    create(&mut bench, &shared).unwrap();
    attach(&mut bench, 2, &[1, 2]).unwrap();
    let page = GetLogPage::new(LogPage::ChangedNamespaces.code(), 4096).to_command();
    let now = bench.now;
    let mut changed = |bench: &mut Bench| {
        bench.turns(1);
        other.poll(now);
        let lists = [bench.step(&page, &[]).1, step(&mut other, now, &page, &[]).1];
        lists.map(|list| (list[0], list[4]))
    };
    assert_eq!(changed(&mut bench), [(2, 0), (2, 0)]);
    assert_eq!(changed(&mut bench), [(0, 0), (0, 0)], "reading clears it");
    detach(&mut bench, 2, &[2]).unwrap();
    assert_eq!(changed(&mut bench), [(2, 0), (2, 0)]);
    bench.run(delete(2)).unwrap();
    assert_eq!(changed(&mut bench), [(2, 0), (0, 0)]);
}
