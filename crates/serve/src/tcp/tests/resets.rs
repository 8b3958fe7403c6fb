//! Cross-Controller Reset: a controller that is reset through another controller.

use std::sync::Arc;

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
    BLOCKS, ENABLED, Rig, admin_config, admin_connect, connect_data, limits, pattern, transfer,
};
use crate::tcp::{DisconnectReason, InjectedBugs, Limits, TargetEvent};

/// CIU, CIRN and controller ID of the controller at the end of a connection, as Identify reports
/// them.
pub(super) fn named(rig: &mut Rig, admin: usize) -> CrossControllerReset {
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, page) = rig.command(admin, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::parse(&page).unwrap();
    assert!(page.ccrl() > 0 && page.ciu() > 0);
    CrossControllerReset { icid: page.cntlid(), ciu: page.ciu(), cirn: page.cirn() }
}

pub(super) fn reset(rig: &mut Rig, by: usize, whom: CrossControllerReset) -> Completion {
    let tag = submit(rig, by, whom);
    (0..5).for_each(|_| rig.pass(Span::from_ms(1)));
    rig.lines[by].done.remove(&tag).expect("it has ended").0
}

pub(super) fn submit(rig: &mut Rig, by: usize, whom: CrossControllerReset) -> u16 {
    let tag = rig.lines[by].submit(&whom.to_command(), DataDirection::None, &[]);
    rig.run();
    tag
}

#[test]
fn a_controller_is_reset_only_by_another_controller_of_its_host() {
    let mut rig = Rig::new();
    let (one, cntlid) = rig.admin();
    rig.io(cntlid, 1);
    let (two, _) = rig.admin();
    let (first, second) = (named(&mut rig, one), named(&mut rig, two));
    assert_ne!((first.ciu, first.cirn), (second.ciu, second.cirn));

    let stranger = rig.dial(admin_config());
    let data = connect_data(CNTLID_DYNAMIC).with(|data| data.hostid([8; 16]));
    assert_eq!(rig.connect(stranger, &admin_connect(), &data).status(), Status::SUCCESS);
    rig.set_property(stranger, offset::CC, ENABLED);
    let refused = reset(&mut rig, stranger, first);
    assert_eq!(refused.status(), Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
    let itself = reset(&mut rig, two, second);
    assert_eq!(itself.status(), Status::INVALID_FIELD.with_dnr());
    assert_eq!(rig.service.associations(), 3);

    let done = reset(&mut rig, two, first);
    assert_eq!((done.status(), done.dw0()), (Status::SUCCESS, 1));
    assert_eq!(rig.service.associations(), 2);
    let is_reset = |new_events: &TargetEvent| {
        matches!(new_events, TargetEvent::Disconnected { reason: DisconnectReason::Reset, .. })
    };
    assert!(rig.new_events.iter().any(is_reset), "{:?}", rig.new_events);
    // A reset of a controller that is gone succeeds, however often and by whichever host it is
    // sent.
    for by in [two, stranger] {
        let again = reset(&mut rig, by, first);
        assert_eq!((again.status(), again.dw0()), (Status::SUCCESS, 1));
    }
    // Another instance of that ID is of another process, also after this one has ended.
    for other in [
        CrossControllerReset { ciu: first.ciu.wrapping_add(1), ..first },
        CrossControllerReset { cirn: first.cirn ^ 1 << 63, ..first },
    ] {
        let refused = reset(&mut rig, two, other).status();
        assert_eq!(refused, Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr(), "{other:?}");
    }
    assert_eq!(rig.service.associations(), 2);
}

/// The ID may belong to a controller of another process that serves the same subsystem, whose
/// writes are not fenced here.
#[test]
fn a_reset_of_an_unknown_controller_fails() {
    let mut rig = Rig::new();
    let (one, _) = rig.admin();
    let (two, _) = rig.admin();
    let whom = named(&mut rig, one);
    for before in [
        CrossControllerReset { ciu: whom.ciu.wrapping_add(1), ..whom },
        CrossControllerReset { cirn: whom.cirn ^ 1 << 63, ..whom },
        CrossControllerReset { icid: 77, ..whom },
    ] {
        let refused = reset(&mut rig, two, before);
        let expected = Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr();
        assert_eq!(refused.status(), expected, "{before:?}");
        assert_eq!(rig.service.associations(), 2, "{before:?}");
    }
}

/// Completion of a Cross-Controller Reset while a write of this latency is outstanding, and the
/// time that the reset takes.
fn reset_over_medium(latency: Span) -> (Completion, Span) {
    let (mut rig, subsystem) = Rig::with_subsystem();
    assert!(subsystem.remove_namespace(1));
    let ram = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
    let slow = LatencySpec { mean: latency, p99: None };
    let medium =
        Arc::new(DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap());
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(medium) };
    subsystem.add_namespace(namespace).unwrap();
    let (one, cntlid) = rig.admin();
    let io = rig.io(cntlid, 1);
    let (two, _) = rig.admin();
    let whom = named(&mut rig, one);
    let write = transfer(IoOpcode::Write.code(), 0, 1);
    rig.lines[io].submit(&write, DataDirection::FromHost(512), &pattern(1, 512));
    rig.run();
    let (begun, tag) = (rig.now, submit(&mut rig, two, whom));
    for _ in 0..5000 {
        if let Some((completion, _)) = rig.lines[two].done.remove(&tag) {
            return (completion, rig.now.since(begun));
        }
        rig.pass(Span::from_ms(1));
    }
    panic!("it never ends");
}

#[test]
fn a_reset_completes_after_the_device_has_completed_all_commands() {
    let (done, waited) = reset_over_medium(Span::from_ms(300));
    assert_eq!((done.status(), done.dw0()), (Status::SUCCESS, 1));
    assert!((290..=320).contains(&(waited.ns / 1_000_000)), "{waited}");
    // A completion after the quiesce time: the reset has failed already.
    let (late, waited) = reset_over_medium(Span::from_secs(3));
    assert_eq!(late.status(), Status::INTERNAL_ERROR);
    assert!((990..=1010).contains(&(waited.ns / 1_000_000)), "{waited}");
}

#[test]
fn the_injected_bug_of_unknown_resets_is_one() {
    let injected_bugs = InjectedBugs { unknown_resets_done: true, ..InjectedBugs::default() };
    let mut rig = Rig::with(Limits { injected_bugs, ..limits() }, |plan| plan);
    let (two, _) = rig.admin();
    let stranger = CrossControllerReset { icid: 77, ciu: 1, cirn: 5 };
    assert_eq!(reset(&mut rig, two, stranger).dw0(), 1);
}
