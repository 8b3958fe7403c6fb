//! Cross-Controller Reset: a controller that is reset through another controller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::Span;
use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::fabrics::CNTLID_DYNAMIC;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, Completion, IoOpcode, Layout, Status, TypedCommand};

use super::test_target::{
    BLOCKS, ENABLED, TestTarget, admin_config, admin_connect, connect_data, pattern,
    read_or_write_command, service_limits,
};
use crate::tcp::{DisconnectReason, GatewayGroupView, InjectedBugs, ServiceLimits, TargetEvent};

/// CIU, CIRN and controller ID of the controller at the end of a connection, as Identify reports
/// them.
pub(super) fn identify_for_reset(rig: &mut TestTarget, admin: usize) -> CrossControllerReset {
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, page) = rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::parse(&page).unwrap();
    assert!(page.ccrl() > 0 && page.ciu() > 0);
    CrossControllerReset { icid: page.cntlid(), ciu: page.ciu(), cirn: page.cirn() }
}

pub(super) fn execute_reset(
    rig: &mut TestTarget,
    by: usize,
    whom: CrossControllerReset,
) -> Completion {
    let tag = submit_reset(rig, by, whom);
    (0..5).for_each(|_| rig.advance_time(Span::from_ms(1)));
    rig.lines[by].done.remove(&tag).expect("it has ended").0
}

pub(super) fn submit_reset(rig: &mut TestTarget, by: usize, whom: CrossControllerReset) -> u16 {
    let tag = rig.lines[by].submit(&whom.to_command(), DataDirection::None, &[]);
    rig.run_until_idle();
    tag
}

#[test]
fn controller_is_reset_only_by_another_controller_of_its_host() {
    let mut rig = TestTarget::new();
    let (one, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    let (two, _) = rig.connect_admin_queue();
    let (first, second) = (identify_for_reset(&mut rig, one), identify_for_reset(&mut rig, two));
    assert_ne!((first.ciu, first.cirn), (second.ciu, second.cirn));

    let stranger = rig.open_connection(admin_config());
    let data = connect_data(CNTLID_DYNAMIC).with(|data| data.hostid([8; 16]));
    assert_eq!(rig.execute_connect(stranger, &admin_connect(), &data).status(), Status::SUCCESS);
    rig.set_property(stranger, offset::CC, ENABLED);
    let refused = execute_reset(&mut rig, stranger, first);
    assert_eq!(refused.status(), Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
    let itself = execute_reset(&mut rig, two, second);
    assert_eq!(itself.status(), Status::INVALID_FIELD.with_dnr());
    assert_eq!(rig.service.association_count(), 3);

    let done = execute_reset(&mut rig, two, first);
    assert_eq!((done.status(), done.dw0()), (Status::SUCCESS, 1));
    assert_eq!(rig.service.association_count(), 2);
    let is_reset = |new_events: &TargetEvent| {
        matches!(new_events, TargetEvent::Disconnected { reason: DisconnectReason::Reset, .. })
    };
    assert!(rig.new_events.iter().any(is_reset), "{:?}", rig.new_events);
    // A reset of a controller that is gone succeeds, however often and by whichever host it is
    // sent.
    for by in [two, stranger] {
        let again = execute_reset(&mut rig, by, first);
        assert_eq!((again.status(), again.dw0()), (Status::SUCCESS, 1));
    }
    // Another instance of that ID is of another process, also after this one has ended.
    for other in [
        CrossControllerReset { ciu: first.ciu.wrapping_add(1), ..first },
        CrossControllerReset { cirn: first.cirn ^ 1 << 63, ..first },
    ] {
        let refused = execute_reset(&mut rig, two, other).status();
        assert_eq!(refused, Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr(), "{other:?}");
    }
    assert_eq!(rig.service.association_count(), 2);
}

/// The ID may belong to a controller of another process that serves the same subsystem, whose
/// writes are not fenced here.
#[test]
fn reset_of_an_unknown_controller_fails() {
    let mut rig = TestTarget::new();
    let (one, _) = rig.connect_admin_queue();
    let (two, _) = rig.connect_admin_queue();
    let whom = identify_for_reset(&mut rig, one);
    for before in [
        CrossControllerReset { ciu: whom.ciu.wrapping_add(1), ..whom },
        CrossControllerReset { cirn: whom.cirn ^ 1 << 63, ..whom },
        CrossControllerReset { icid: 77, ..whom },
    ] {
        let refused = execute_reset(&mut rig, two, before);
        let expected = Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr();
        assert_eq!(refused.status(), expected, "{before:?}");
        assert_eq!(rig.service.association_count(), 2, "{before:?}");
    }
}

/// A controller of another gateway of the group is reset once its lease has ended, and not before.
#[test]
fn reset_of_a_controller_of_another_gateway_waits_for_the_end_of_its_lease() {
    let mut rig = TestTarget::new();
    let has_ended = Arc::new(AtomicBool::new(false));
    let of_group = Arc::clone(&has_ended);
    rig.service.set_gateway_group(GatewayGroupView {
        controller_ids: Some((100, 199)),
        addresses: Vec::new(),
        has_ended: Arc::new(move |_, cntlid| cntlid < 100 && of_group.load(Ordering::Relaxed)),
    });
    let (one, cntlid) = rig.connect_admin_queue();
    assert_eq!(cntlid, 100, "the first of the range");
    let foreign = CrossControllerReset { icid: 7, ciu: 1, cirn: 5 };
    let tag = submit_reset(&mut rig, one, foreign);
    (0..50).for_each(|_| rig.advance_time(Span::from_ms(100)));
    assert!(!rig.lines[one].done.contains_key(&tag), "its lease may be in force");
    has_ended.store(true, Ordering::Relaxed);
    (0..5).for_each(|_| rig.advance_time(Span::from_ms(1)));
    let completion = rig.lines[one].done.remove(&tag).expect("it has ended").0;
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1));
    // One of this gateway that it does not know is of an earlier run.
    let own = execute_reset(&mut rig, one, CrossControllerReset { icid: 150, ciu: 1, cirn: 5 });
    assert_eq!(own.status(), Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
}

/// Another gateway may have the identifiers by then.
#[test]
fn associations_end_when_the_controller_identifiers_change() {
    let mut rig = TestTarget::new();
    let group = |controller_ids| GatewayGroupView {
        controller_ids,
        addresses: Vec::new(),
        has_ended: Arc::new(|_, _| false),
    };
    rig.service.set_gateway_group(group(Some((100, 101))));
    let (_, first) = rig.connect_admin_queue();
    let (_, second) = rig.connect_admin_queue();
    assert_eq!((first, second), (100, 101));
    rig.service.set_gateway_group(group(Some((100, 101))));
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 2, "they are the same");
    rig.service.set_gateway_group(group(None));
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    let waiting = rig.open_connection(admin_config());
    let tag = rig.submit_connect(waiting, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    assert!(!rig.lines[waiting].done.contains_key(&tag), "it waits for the gateway to join");
    rig.service.set_gateway_group(group(Some((300, 399))));
    (0..5).for_each(|_| rig.advance_time(Span::from_ms(100)));
    let completion = rig.lines[waiting].done.remove(&tag).expect("it has joined").0;
    assert_eq!((completion.status(), completion.dw0() & 0xffff), (Status::SUCCESS, 300));
}

/// Completion of a Cross-Controller Reset while a write of this latency is outstanding, and the
/// time that the reset takes.
fn reset_during_slow_write(latency: Span) -> (Completion, Span) {
    let (mut rig, subsystem) = TestTarget::with_subsystem();
    assert!(subsystem.remove_namespace(1));
    let ram = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
    let slow = LatencySpec { mean: latency, p99: None };
    let medium =
        Arc::new(DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap());
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(medium) };
    subsystem.add_namespace(namespace).unwrap();
    let (one, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let (two, _) = rig.connect_admin_queue();
    let whom = identify_for_reset(&mut rig, one);
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 1);
    rig.lines[io].submit(&write, DataDirection::FromHost(512), &pattern(1, 512));
    rig.run_until_idle();
    let (begun, tag) = (rig.now, submit_reset(&mut rig, two, whom));
    for _ in 0..5000 {
        if let Some((completion, _)) = rig.lines[two].done.remove(&tag) {
            return (completion, rig.now.since(begun));
        }
        rig.advance_time(Span::from_ms(1));
    }
    panic!("it never ends");
}

#[test]
fn reset_completes_after_the_device_has_completed_all_commands() {
    let (done, waited) = reset_during_slow_write(Span::from_ms(300));
    assert_eq!((done.status(), done.dw0()), (Status::SUCCESS, 1));
    assert!((290..=320).contains(&(waited.ns / 1_000_000)), "{waited}");
    // A completion after the quiesce time: the reset has failed already.
    let (late, waited) = reset_during_slow_write(Span::from_secs(3));
    assert_eq!(late.status(), Status::INTERNAL_ERROR);
    assert!((990..=1010).contains(&(waited.ns / 1_000_000)), "{waited}");
}

#[test]
fn injected_bug_of_unknown_resets_is_detected() {
    let injected_bugs = InjectedBugs { unknown_resets_done: true, ..InjectedBugs::default() };
    let mut rig =
        TestTarget::with_options(ServiceLimits { injected_bugs, ..service_limits() }, |config| {
            config
        });
    let (two, _) = rig.connect_admin_queue();
    let stranger = CrossControllerReset { icid: 77, ciu: 1, cirn: 5 };
    assert_eq!(execute_reset(&mut rig, two, stranger).dw0(), 1);
}
