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

use super::fixture::{ControllerFixture, FakeBlockDevice, completed_result, submit_to_controller};
use crate::controller::ControllerConfig;

const CREATE: NamespaceManagement =
    NamespaceManagement { nsid: 0, sel: ManagementSelect::Create, csi: 0 };

fn requested_namespace(blocks: u64) -> IdentifyNamespace {
    IdentifyNamespace::zeroed().with(|it| it.nsze(blocks).ncap(blocks))
}

fn create_namespace(
    bench: &mut ControllerFixture,
    wish: &IdentifyNamespace,
) -> Result<u32, Status> {
    bench.run_with_data(CREATE, wish.as_bytes())
}

fn delete_command(nsid: u32) -> NamespaceManagement {
    NamespaceManagement { nsid, sel: ManagementSelect::Delete, csi: 0 }
}

fn attach_namespace(
    bench: &mut ControllerFixture,
    nsid: u32,
    cntlids: &[u16],
) -> Result<u32, Status> {
    let command = NamespaceAttachment { nsid, sel: AttachmentSelect::Attach };
    bench.run_with_data(command, ControllerList::new(cntlids.iter().copied()).as_bytes())
}

fn detach_namespace(
    bench: &mut ControllerFixture,
    nsid: u32,
    cntlids: &[u16],
) -> Result<u32, Status> {
    let command = NamespaceAttachment { nsid, sel: AttachmentSelect::Detach };
    bench.run_with_data(command, ControllerList::new(cntlids.iter().copied()).as_bytes())
}

fn unallocated_capacity(bench: &mut ControllerFixture) -> u128 {
    let identify = Identify { cns: Cns::Controller.code(), ..Identify::default() };
    IdentifyController::parse(&bench.run_for_data(identify).unwrap()).unwrap().unvmcap()
}

fn is_attached(bench: &ControllerFixture, nsid: u32) -> bool {
    bench.controller.namespaces().reader().get().get(nsid).is_some()
}

#[test]
fn namespace_management_requires_a_pool() {
    let mut bench = ControllerFixture::new();
    for command in [CREATE.to_command(), delete_command(1).to_command()] {
        assert_eq!(completed_result(bench.submit(&command, &[]).0), Err(Status::INVALID_OPCODE));
    }
    assert_eq!(attach_namespace(&mut bench, 1, &[1]), Err(Status::INVALID_OPCODE));
}

#[test]
fn a_namespace_is_created_attached_detached_and_deleted() {
    let mut bench = ControllerFixture::with_pool(vec![FakeBlockDevice::new()], 1 << 20);
    assert_eq!(create_namespace(&mut bench, &requested_namespace(1024)), Ok(2));
    assert_eq!(unallocated_capacity(&mut bench), (1 << 20) - 1024 * 512);
    assert!(!is_attached(&bench, 2), "created is not attached");
    attach_namespace(&mut bench, 2, &[1]).unwrap();
    assert!(is_attached(&bench, 2));
    detach_namespace(&mut bench, 2, &[1]).unwrap();
    assert!(!is_attached(&bench, 2));
    bench.run_without_data(delete_command(2)).unwrap();
    assert_eq!(unallocated_capacity(&mut bench), 1 << 20);
    assert_eq!(bench.run_without_data(delete_command(2)), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn namespace_capacity_accounting_is_exact() {
    let mut bench = ControllerFixture::with_pool(vec![], 1 << 20);
    let full = create_namespace(&mut bench, &requested_namespace(2049));
    assert_eq!(full, Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
    assert_eq!(create_namespace(&mut bench, &requested_namespace(2040)), Ok(1));
    let large = |blocks| requested_namespace(blocks).with(|it| it.fidxl(1));
    assert_eq!(
        create_namespace(&mut bench, &large(2)),
        Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY)
    );
    assert_eq!(create_namespace(&mut bench, &large(1)), Ok(2));
    assert_eq!(unallocated_capacity(&mut bench), 0);
    let huge = create_namespace(&mut bench, &requested_namespace(u64::MAX));
    assert_eq!(huge, Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY), "no sum overflows");
    bench.run_without_data(delete_command(u32::MAX)).unwrap();
    assert_eq!(unallocated_capacity(&mut bench), 1 << 20);
}

#[test]
fn created_namespace_has_the_requested_properties() {
    let mut bench = ControllerFixture::with_pool(vec![], 1 << 30);
    let nsid =
        create_namespace(&mut bench, &requested_namespace(64).with(|it| it.fidxl(1).shrns(true)))
            .unwrap();
    attach_namespace(&mut bench, nsid, &[1]).unwrap();
    let identify = Identify { nsid, ..Identify::default() };
    let id = IdentifyNamespace::parse(&bench.run_for_data(identify).unwrap()).unwrap();
    assert_eq!((id.nsze(), id.block_bytes(), id.shrns()), (64, Some(4096), true));
    assert_eq!(id.current_format(), LbaFormat::new(12, 0));
}

#[test]
fn invalid_namespace_create_request_is_rejected() {
    let cases = [
        (requested_namespace(0), Status::INVALID_FIELD),
        (requested_namespace(64).with(|it| it.ncap(63)), Status::THIN_PROVISIONING_NOT_SUPPORTED),
        (requested_namespace(64).with(|it| it.fidxl(2)), Status::INVALID_FORMAT),
        (requested_namespace(64).with(|it| it.fidxu(1)), Status::INVALID_FORMAT),
        (requested_namespace(64).with(|it| it.metadata_extended(true)), Status::INVALID_FORMAT),
        (requested_namespace(64).with(|it| it.pit(1)), Status::INVALID_FORMAT),
        (requested_namespace(64).with(|it| it.disns(true)), Status::INVALID_FIELD),
        (requested_namespace(64).with(|it| it.nvmsetid(1)), Status::INVALID_FIELD),
        (requested_namespace(64).with(|it| it.endgid(1)), Status::INVALID_FIELD),
        (requested_namespace(64).with(|it| it.anagrpid(1)), Status::ANA_GROUP_IDENTIFIER_INVALID),
    ];
    let mut bench = ControllerFixture::with_pool(vec![], 1 << 20);
    for (wish, status) in cases {
        assert_eq!(create_namespace(&mut bench, &wish), Err(status), "{wish:?}");
    }
    let page = *requested_namespace(64).as_bytes();
    let named = NamespaceManagement { nsid: 1, ..CREATE };
    assert_eq!(bench.run_with_data(named, &page), Err(Status::INVALID_FIELD));
    let zoned = NamespaceManagement { csi: 2, ..CREATE };
    assert_eq!(bench.run_with_data(zoned, &page), Err(Status::COMMAND_SET_NOT_SUPPORTED));
    let strange = NamespaceManagement { sel: ManagementSelect::Reserved(2), ..CREATE };
    assert_eq!(bench.run_with_data(strange, &page), Err(Status::INVALID_FIELD));
    assert_eq!(unallocated_capacity(&mut bench), 1 << 20);
}

#[test]
fn nsids_are_exhausted_and_reused() {
    let config = ControllerConfig::default();
    let mut bench = ControllerFixture::with_config(
        vec![],
        |config| {
            config.nsid_max = 2;
            config.pool = Some(Box::new(super::fixture::FakePool(1 << 20)));
        },
        config,
    );
    assert_eq!(
        (
            create_namespace(&mut bench, &requested_namespace(8)),
            create_namespace(&mut bench, &requested_namespace(8))
        ),
        (Ok(1), Ok(2))
    );
    let third = create_namespace(&mut bench, &requested_namespace(8));
    assert_eq!(third, Err(Status::NAMESPACE_IDENTIFIER_UNAVAILABLE));
    bench.run_without_data(delete_command(1)).unwrap();
    assert_eq!(create_namespace(&mut bench, &requested_namespace(8)), Ok(1));
}

#[test]
fn invalid_namespace_attachment_is_rejected() {
    let mut bench = ControllerFixture::with_pool(vec![], 1 << 20);
    let _others = [bench.open_second_controller(2), bench.open_second_controller(3)];
    create_namespace(&mut bench, &requested_namespace(8)).unwrap();
    let invalid = Err(Status::CONTROLLER_LIST_INVALID);
    for list in [&[][..], &[9], &[2, 1], &[1, 1], &[1, 9]] {
        assert_eq!(attach_namespace(&mut bench, 1, list), invalid, "{list:?}");
    }
    let liar = ControllerList::new([1]).with(|list| list.count(2048));
    let command = NamespaceAttachment { nsid: 1, sel: AttachmentSelect::Attach };
    assert_eq!(bench.run_with_data(command, liar.as_bytes()), invalid);
    for nsid in [0, 2, u32::MAX] {
        let status = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(attach_namespace(&mut bench, nsid, &[1]), status);
        assert_eq!(detach_namespace(&mut bench, nsid, &[1]), status);
    }
    assert_eq!(attach_namespace(&mut bench, 1, &[1, 2]), Err(Status::NAMESPACE_IS_PRIVATE));
    assert_eq!(detach_namespace(&mut bench, 1, &[1]), Err(Status::NAMESPACE_NOT_ATTACHED));
    attach_namespace(&mut bench, 1, &[2]).unwrap();
    assert_eq!(attach_namespace(&mut bench, 1, &[2]), Err(Status::NAMESPACE_ALREADY_ATTACHED));
    assert_eq!(attach_namespace(&mut bench, 1, &[1]), Err(Status::NAMESPACE_IS_PRIVATE));
    assert_eq!(detach_namespace(&mut bench, 1, &[1, 2]), Err(Status::NAMESPACE_NOT_ATTACHED));
    let strange = NamespaceAttachment { nsid: 1, sel: AttachmentSelect::Reserved(2) };
    let list = ControllerList::new([1]);
    assert_eq!(bench.run_with_data(strange, list.as_bytes()), Err(Status::INVALID_FIELD));
}

#[test]
fn write_protected_or_formatting_namespace_is_not_deleted() {
    let mut bench =
        ControllerFixture::with_pool(vec![FakeBlockDevice::new(), FakeBlockDevice::new()], 1 << 20);
    let protect = SetFeatures {
        nsid: 1,
        fid: Feature::NamespaceWriteProtection.code(),
        cdw11: 1,
        ..SetFeatures::default()
    };
    bench.run_without_data(protect).unwrap();
    assert_eq!(bench.run_without_data(delete_command(1)), Err(Status::NAMESPACE_WRITE_PROTECTED));
    let everything = bench.run_without_data(delete_command(u32::MAX));
    assert_eq!(everything, Err(Status::NAMESPACE_WRITE_PROTECTED), "all or none");
    assert!(is_attached(&bench, 2));
    let format = FormatNvm { nsid: 2, ..FormatNvm::default() };
    bench.submit(&format.to_command(), &[]);
    assert_eq!(bench.run_without_data(delete_command(2)), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(detach_namespace(&mut bench, 2, &[1]), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(bench.poll_until_deferred_completion().1, Ok(0));
    bench.run_without_data(delete_command(2)).unwrap();
}

#[test]
fn attach_and_detach_update_the_changed_namespace_list() {
    let mut bench = ControllerFixture::with_pool(vec![FakeBlockDevice::new()], 1 << 20);
    let mut other = bench.open_second_controller(2);
    let shared = requested_namespace(8).with(|it| it.shrns(true));
    create_namespace(&mut bench, &shared).unwrap();
    attach_namespace(&mut bench, 2, &[1, 2]).unwrap();
    let page = GetLogPage::new(LogPage::ChangedNamespaces.code(), 4096).to_command();
    let now = bench.now;
    let mut changed = |bench: &mut ControllerFixture| {
        bench.poll_times(1);
        other.poll(now);
        let lists =
            [bench.submit(&page, &[]).1, submit_to_controller(&mut other, now, &page, &[]).1];
        lists.map(|list| (list[0], list[4]))
    };
    assert_eq!(changed(&mut bench), [(2, 0), (2, 0)]);
    assert_eq!(changed(&mut bench), [(0, 0), (0, 0)], "reading clears it");
    detach_namespace(&mut bench, 2, &[2]).unwrap();
    assert_eq!(changed(&mut bench), [(2, 0), (2, 0)]);
    bench.run_without_data(delete_command(2)).unwrap();
    assert_eq!(changed(&mut bench), [(2, 0), (0, 0)]);
}
