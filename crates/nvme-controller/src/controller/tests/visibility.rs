//! A namespace hidden from a controller does not exist for its host.

use tenmil_wire::admin::NamespaceAttachment;
use tenmil_wire::admin::{AttachmentSelect, DeviceSelfTest, SelfTestCode};
use tenmil_wire::identify::Cns;
use tenmil_wire::log::LogPage;
use tenmil_wire::{AdminOpcode, Command, Status, TypedCommand};

use super::fixture::{ControllerFixture, FakeBlockDevice, FakePool, submit_to_controller};
use crate::controller::transport_interface::{AdminDataTransfer, AdminOutcome, QueueCommandId};
use crate::controller::{ControllerConfig, NamespaceConfig};

/// Namespaces 1 and 3 of a subsystem with all features; and 2, which is hidden from its controller, or
/// does not exist.
fn fixture_with_hidden_namespace(has_hidden: bool) -> ControllerFixture {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.ana_groups = 2;
        config.pool = Some(Box::new(FakePool(1 << 20)));
        for (namespace, nsid) in config.namespaces.iter_mut().zip([1, 3, 2]) {
            namespace.nsid = Some(nsid);
            namespace.ana_group = 2;
        }
    };
    let shelves = (0..if has_hidden { 3 } else { 2 }).map(|_| FakeBlockDevice::new()).collect();
    let mut bench = ControllerFixture::with_config(shelves, change, ControllerConfig::default());
    bench.subsystem.hide_new_namespace(1, 2);
    bench.poll_times(1);
    bench
}

/// Runs the same command in both subsystems.
fn run_in_both_subsystems(
    benches: &mut [ControllerFixture; 2],
    command: &Command,
) -> [(AdminOutcome, Vec<u8>); 2] {
    benches
        .each_mut()
        .map(|bench| submit_to_controller(&mut bench.controller, bench.now, command, &[]))
}

const NSIDS: [u32; 7] = [0, 1, 2, 3, 4, u32::MAX - 1, u32::MAX];

#[test]
fn identify_does_not_reveal_a_hidden_namespace() {
    let mut benches = [fixture_with_hidden_namespace(true), fixture_with_hidden_namespace(false)];
    for cns in 0..=255_u32 {
        // Unallocated capacity and the like belong to the subsystem.
        if Cns::from_code(cns.to_le_bytes()[0]) == Cns::Controller {
            continue;
        }
        for nsid in NSIDS {
            for cntid in [0, 1] {
                let identify = Command::new(AdminOpcode::Identify.code()).with_nsid(nsid);
                let identify = identify.with_cdw10(cntid << 16 | cns);
                let [hidden, none] = run_in_both_subsystems(&mut benches, &identify);
                assert_eq!(hidden, none, "CNS {cns:#x}, namespace {nsid:#x}");
            }
        }
    }
}

#[test]
fn log_pages_do_not_reveal_a_hidden_namespace() {
    for &lid in LogPage::ALL {
        let mut benches =
            [fixture_with_hidden_namespace(true), fixture_with_hidden_namespace(false)];
        let get = Command::new(AdminOpcode::GetLogPage.code()).with_nsid(u32::MAX);
        let lsp = u32::from(lid == LogPage::TelemetryHost) << 8;
        let get = get.with_cdw10(1023 << 16 | lsp | u32::from(lid.code()));
        let [hidden, none] = run_in_both_subsystems(&mut benches, &get);
        assert_eq!(hidden, none, "{lid:?}");
    }
}

#[test]
fn admin_commands_do_not_reach_a_hidden_namespace() {
    for opcode in 0..=255 {
        if opcode == AdminOpcode::Identify.code() {
            continue;
        }
        for select in 0..=255 {
            for value in [0, 1] {
                let mut benches =
                    [fixture_with_hidden_namespace(true), fixture_with_hidden_namespace(false)];
                let command = Command::new(opcode).with_nsid(2);
                let command = command.with_cdw10(select).with_cdw11(value);
                let [hidden, none] = run_in_both_subsystems(&mut benches, &command);
                assert_eq!(hidden, none, "opcode {opcode:#x}, dword 10 {select:#x}");
            }
            if ![AdminOpcode::GetFeatures.code(), AdminOpcode::SetFeatures.code()].contains(&opcode)
                && select > 16
            {
                break;
            }
        }
    }
}

#[test]
fn broadcast_commands_skip_a_hidden_namespace() {
    let mut bench = fixture_with_hidden_namespace(true);
    let format = Command::new(AdminOpcode::FormatNvm.code()).with_nsid(u32::MAX).with_cid(7);
    let (ended, _) = bench.submit(&format, &[]);
    assert_eq!(ended, AdminOutcome::Deferred);
    assert!(bench.poll_until_deferred_completion().1.is_ok());
    let unerased: Vec<usize> = bench.shelves.iter().map(FakeBlockDevice::nonzero_blocks).collect();
    assert_eq!(unerased, [0, 0, 2048]);
    let delete = Command::new(AdminOpcode::NamespaceManagement.code()).with_cdw10(1);
    bench.submit(&delete.with_nsid(u32::MAX), &[]);
    let other = bench.open_second_controller(2);
    let left: Vec<u32> = other.namespaces().reader().get().iter().map(|it| it.nsid).collect();
    assert_eq!(left, [2]);
}

#[test]
fn reservation_commands_to_a_hidden_namespace_are_rejected_as_invalid() {
    let ended = [true, false].map(|has_hidden| {
        let mut bench = fixture_with_hidden_namespace(has_hidden);
        [0x0d, 0x0e, 0x11, 0x15].map(|opcode| {
            let command = Command::new(opcode).with_nsid(2).with_cdw10(63);
            let mut data = match bench.controller.reservation_data_length(&command) {
                Ok(AdminDataTransfer::FromHost(len_bytes)) => vec![1; len_bytes as usize],
                _ => Vec::new(),
            };
            let from = QueueCommandId { queue: 1, ticket: 0 };
            bench.controller.execute_reservation_command(bench.now, from, &command, &mut data)
        })
    });
    assert_eq!(ended[0], ended[1]);
}

#[test]
fn hidden_namespace_cannot_be_attached_by_a_host() {
    let mut bench = fixture_with_hidden_namespace(true);
    let mut other = bench.open_second_controller(2);
    let attach = NamespaceAttachment { nsid: 2, sel: AttachmentSelect::Attach };
    let mut list = vec![1, 0, 1, 0];
    list.resize(4096, 0);
    assert_eq!(bench.run_with_data(attach, &list), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
    // A host that sees it must not attach it to a controller from which it is hidden.
    let (ended, _) = submit_to_controller(&mut other, bench.now, &attach.to_command(), &list);
    assert_eq!(super::fixture::completed_result(ended), Err(Status::CONTROLLER_LIST_INVALID));
    let nsids = |bench: &ControllerFixture| -> Vec<u32> {
        bench.controller.namespaces().reader().get().iter().map(|it| it.nsid).collect()
    };
    assert_eq!(nsids(&bench), [1, 3]);
    bench.subsystem.set_namespace_visible(1, 2, true);
    assert_eq!(nsids(&bench), [1, 2, 3]);
    bench.subsystem.set_namespace_visible(1, 2, false);
    assert_eq!(nsids(&bench), [1, 3]);
    assert_eq!(bench.run_with_data(attach, &list), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn namespace_added_for_other_controllers_is_hidden() {
    let mut benches = [fixture_with_hidden_namespace(false), fixture_with_hidden_namespace(false)];
    let config = NamespaceConfig {
        nsid: Some(2),
        ..NamespaceConfig::new(std::sync::Arc::new(FakeBlockDevice::new()))
    };
    benches[0].subsystem.add_namespace_visible_to(config, |cntlid| cntlid != 1).unwrap();
    for cns in [Cns::AllocatedNamespaces, Cns::AllocatedNamespace, Cns::NamespaceControllers] {
        let nsid = if cns == Cns::AllocatedNamespaces { 0 } else { 2 };
        let identify = Command::new(AdminOpcode::Identify.code()).with_nsid(nsid);
        let [hidden, none] =
            run_in_both_subsystems(&mut benches, &identify.with_cdw10(cns.code().into()));
        assert_eq!(hidden, none, "{cns:?}");
    }
}

#[test]
fn hiding_a_namespace_ends_its_self_test() {
    let mut bench = fixture_with_hidden_namespace(true);
    bench.subsystem.set_namespace_visible(1, 2, true);
    let test = DeviceSelfTest { nsid: 2, stc: SelfTestCode::Extended, ..DeviceSelfTest::default() };
    bench.run_without_data(test).unwrap();
    bench.subsystem.set_namespace_visible(1, 2, false);
    bench.poll_times(2);
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_nsid(u32::MAX);
    let (_, page) = bench.submit(&get.with_cdw10(140 << 16 | 6), &[]);
    assert_eq!((page[0], page[4] & 0xf), (0, 3), "aborted since its namespace was removed");
}
