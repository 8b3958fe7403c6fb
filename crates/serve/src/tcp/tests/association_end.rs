//! Ends of connections and associations; everything is released afterwards.

use tenmil_base::Span;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, Disconnect, PropertySet, PropertySize};
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{
    ENABLED, Rig, admin_config, admin_connect, connect_data, pattern, transfer,
};
use crate::tcp::{DisconnectReason, TargetEvent};

fn reasons(rig: &Rig) -> Vec<DisconnectReason> {
    let reason = |new_events: &TargetEvent| match new_events {
        TargetEvent::Disconnected { reason, .. } => Some(reason.clone()),
        _ => None,
    };
    rig.new_events.iter().filter_map(reason).collect()
}

#[test]
fn the_end_of_an_admin_connection_ends_its_association_and_no_other() {
    let mut rig = Rig::new();
    let (_, first) = rig.admin();
    let one = rig.io(first, 1);
    let (_, second) = rig.admin();
    let two = rig.io(second, 1);
    rig.lines[0].pipe = None;
    rig.run();
    let reasons = reasons(&rig);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(
        reasons.contains(&DisconnectReason::AssociationEnded)
            && reasons.contains(&DisconnectReason::Closed)
    );
    assert_eq!(rig.service.associations(), 1);
    rig.lines[one].pipe = None;
    let bytes = pattern(1, 512);
    let write = transfer(IoOpcode::Write.code(), 0, 1);
    let (completion, _) = rig.command(two, &write, DataDirection::FromHost(512), &bytes);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn an_io_connection_can_go_and_come_again() {
    let mut rig = Rig::new();
    let (_, cntlid) = rig.admin();
    for _ in 0..3 {
        let io = rig.io(cntlid, 1);
        rig.lines[io].pipe = None;
        rig.run();
    }
    assert_eq!((rig.service.associations(), rig.guests.len()), (1, 1));
}

#[test]
fn disconnect_is_answered_and_then_the_connection_closes() {
    let mut rig = Rig::new();
    let (admin, cntlid) = rig.admin();
    let io = rig.io(cntlid, 1);
    let disconnect = Disconnect::default().to_command();
    let (completion, _) = rig.command(io, &disconnect, DataDirection::None, &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(reasons(&rig), [DisconnectReason::HostDisconnect]);
    let (completion, _) = rig.command(admin, &disconnect, DataDirection::None, &[]);
    assert_eq!(completion.status(), Status::INVALID_QUEUE_TYPE.with_dnr());
    rig.io(cntlid, 1);
}

#[test]
fn a_silent_host_loses_its_association_at_its_time_out_and_traffic_counts() {
    let mut rig = Rig::new();
    let line = rig.dial(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    let completion = rig.connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    let io = rig.io(u16::try_from(completion.dw0()).unwrap(), 1);
    for _ in 0..10 {
        rig.pass(Span::from_ms(800));
        let read = transfer(IoOpcode::Read.code(), 0, 1);
        let (completion, _) = rig.command(io, &read, DataDirection::ToHost(512), &[]);
        assert_eq!(completion.status(), Status::SUCCESS, "its I/O keeps it alive");
    }
    rig.pass(Span::from_ms(1000));
    // The interval of the last command has ended, and another one has begun.
    rig.pass(Span::from_ms(999));
    assert_eq!(rig.service.associations(), 1);
    rig.pass(Span::from_ms(1));
    assert!(reasons(&rig).contains(&DisconnectReason::KeepAliveExpired), "{:?}", rig.new_events);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn keep_alive_commands_keep_a_host_alive() {
    let mut rig = Rig::new();
    let line = rig.dial(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    rig.connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    for _ in 0..10 {
        rig.pass(Span::from_ms(800));
        let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
        let (completion, _) = rig.command(line, &keep_alive, DataDirection::None, &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    rig.pass(Span::from_ms(1000));
    rig.pass(Span::from_ms(999));
    assert_eq!(rig.service.associations(), 1);
    rig.pass(Span::from_ms(1));
    assert_eq!(rig.service.associations(), 0);
}

/// Connect sets the keep-alive timeout for the duration of the association.
#[test]
fn a_controller_reset_keeps_the_keep_alive_timeout() {
    let mut rig = Rig::new();
    let line = rig.dial(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    rig.connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    rig.set_property(line, offset::CC, 0);
    rig.pass(Span::from_secs(60));
    assert_eq!(rig.service.associations(), 1, "it counts while the controller is ready");
    rig.set_property(line, offset::CC, ENABLED);
    rig.pass(Span::from_ms(1000));
    rig.pass(Span::from_ms(999));
    assert_eq!(rig.service.associations(), 1);
    rig.pass(Span::from_ms(1));
    assert!(reasons(&rig).contains(&DisconnectReason::KeepAliveExpired), "{:?}", rig.new_events);
}

#[test]
fn a_reset_ends_io_queues_and_leaves_what_was_parked_unanswered() {
    let mut rig = Rig::new();
    let (admin, cntlid) = rig.admin();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    // More requests than the limit of outstanding event requests.
    for _ in 0..5 {
        rig.io(cntlid, 1);
        rig.io(cntlid, 2);
        rig.new_events.clear();
        let tag = rig.lines[admin].submit(&event, DataDirection::None, &[]);
        rig.run();
        assert_eq!(rig.set_property(admin, offset::CC, 0).status(), Status::SUCCESS);
        rig.run();
        let csts = rig.property(admin, offset::CSTS, PropertySize::Four);
        assert_eq!(csts.result(), 0, "it is no longer ready");
        assert_eq!(
            reasons(&rig),
            [DisconnectReason::AssociationEnded, DisconnectReason::AssociationEnded]
        );
        assert!(!rig.lines[admin].done.contains_key(&tag), "its host has forgotten it");
        rig.set_property(admin, offset::CC, ENABLED);
    }
    rig.lines.clear();
    rig.assert_empty();
}

/// Commands that completed before the reset but whose response was not sent are discarded, too.
#[test]
fn a_reset_that_comes_with_an_abort_leaves_what_that_has_ended_unanswered() {
    let mut rig = Rig::new();
    let (admin, _) = rig.admin();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let event_requests = rig.lines[admin].submit(&event, DataDirection::None, &[]);
    rig.run();
    let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(event_requests) << 16);
    let ofst = u32::try_from(offset::CC).unwrap();
    let disable = PropertySet { size: PropertySize::Four, ofst, value: 0 }.to_command();
    let both = [&abort, &disable].map(|it| rig.lines[admin].submit(it, DataDirection::None, &[]));
    rig.run();
    assert!(both.iter().all(|tag| rig.lines[admin].done.contains_key(tag)));
    assert!(!rig.lines[admin].done.contains_key(&event_requests), "its host has forgotten it");
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn a_shutdown_is_reported_complete() {
    let mut rig = Rig::new();
    let (admin, _) = rig.admin();
    rig.set_property(admin, offset::CC, ENABLED | 1 << 14);
    rig.run();
    let csts = rig.property(admin, offset::CSTS, PropertySize::Four).result();
    assert_eq!(csts, 0b1001, "ready, and shut down");
}

#[test]
fn a_host_that_does_not_connect_or_enable_is_disconnected() {
    let mut rig = Rig::new();
    rig.dial(admin_config());
    rig.pass(Span::from_secs(11));
    assert_eq!(reasons(&rig), [DisconnectReason::Timeout("connect")]);
    rig.new_events.clear();
    let line = rig.dial(admin_config());
    rig.connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    rig.pass(Span::from_secs(121));
    assert_eq!(reasons(&rig), [DisconnectReason::NotEnabled]);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn aborts_reach_commands_of_both_queues() {
    let mut rig = Rig::new();
    let (admin, cntlid) = rig.admin();
    rig.io(cntlid, 1);
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let event_requests = rig.lines[admin].submit(&event, DataDirection::None, &[]);
    rig.run();
    let abort = |sqid: u32, cid: u16| {
        Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(cid) << 16 | sqid)
    };
    let (completion, _) = rig.command(admin, &abort(1, 7), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "there is none");
    let (completion, _) = rig.command(admin, &abort(9, 7), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "no such queue");
    assert!(!rig.lines[admin].done.contains_key(&event_requests));
}

/// A command is identified by the host's CID, which differs from the tag that it has in the target.
#[test]
fn abort_and_error_log_use_the_command_identifiers_of_the_host() {
    let mut rig = Rig::new();
    let (admin, _) = rig.admin();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    // The command has completed, but the host has not received the response and still uses its CID.
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
    rig.lines[admin].is_deaf = true;
    rig.lines[admin].submit(&keep_alive, DataDirection::None, &[]);
    rig.run();
    let event_requests = [0; 3].map(|_| rig.lines[admin].submit(&event, DataDirection::None, &[]));
    rig.lines[admin].is_deaf = false;
    rig.run();
    let abort = |cid: u16| Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(cid) << 16);
    let (completion, _) = rig.command(admin, &abort(event_requests[1]), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 0));
    rig.run();
    let (ended, _) = rig.lines[admin].done.remove(&event_requests[1]).unwrap();
    assert_eq!(ended.status(), Status::ABORT_REQUESTED);
    assert!(event_requests.iter().all(|tag| !rig.lines[admin].done.contains_key(tag)), "no other");
    let (completion, _) = rig.command(admin, &abort(event_requests[1]), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "it has ended");

    let unknown = Command::new(AdminOpcode::Identify.code()).with_cdw10(0xff);
    let cid = rig.lines[admin].submit(&unknown, DataDirection::ToHost(4096), &[]);
    rig.run();
    assert!(!rig.lines[admin].done.remove(&cid).unwrap().0.status().is_success());
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(15 << 16 | 1);
    let (completion, entry) = rig.command(admin, &get, DataDirection::ToHost(64), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(u16::from_le_bytes([entry[10], entry[11]]), cid);
}
