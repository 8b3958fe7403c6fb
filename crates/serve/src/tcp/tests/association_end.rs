//! Ends of connections and associations; everything is released afterwards.

use tenmil_base::Span;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, Disconnect, PropertySet, PropertySize};
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{
    ENABLED, TestTarget, admin_config, admin_connect, connect_data, pattern, read_or_write_command,
};
use crate::tcp::{DisconnectReason, TargetEvent};

fn disconnect_reasons(rig: &TestTarget) -> Vec<DisconnectReason> {
    let reason = |new_events: &TargetEvent| match new_events {
        TargetEvent::Disconnected { reason, .. } => Some(reason.clone()),
        _ => None,
    };
    rig.new_events.iter().filter_map(reason).collect()
}

#[test]
fn admin_connection_end_ends_only_its_association() {
    let mut rig = TestTarget::new();
    let (_, first) = rig.connect_admin_queue();
    let one = rig.connect_io_queue(first, 1);
    let (_, second) = rig.connect_admin_queue();
    let two = rig.connect_io_queue(second, 1);
    rig.lines[0].pipe = None;
    rig.run_until_idle();
    let reasons = disconnect_reasons(&rig);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(
        reasons.contains(&DisconnectReason::AssociationEnded)
            && reasons.contains(&DisconnectReason::Closed)
    );
    assert_eq!(rig.service.association_count(), 1);
    rig.lines[one].pipe = None;
    let bytes = pattern(1, 512);
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 1);
    let (completion, _) = rig.execute_command(two, &write, DataDirection::FromHost(512), &bytes);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn io_connection_can_disconnect_and_reconnect() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    for _ in 0..3 {
        let io = rig.connect_io_queue(cntlid, 1);
        rig.lines[io].pipe = None;
        rig.run_until_idle();
    }
    assert_eq!((rig.service.association_count(), rig.guests.len()), (1, 1));
}

#[test]
fn disconnect_command_completes_before_the_connection_closes() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let disconnect = Disconnect::default().to_command();
    let (completion, _) = rig.execute_command(io, &disconnect, DataDirection::None, &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(disconnect_reasons(&rig), [DisconnectReason::HostDisconnect]);
    let (completion, _) = rig.execute_command(admin, &disconnect, DataDirection::None, &[]);
    assert_eq!(completion.status(), Status::INVALID_QUEUE_TYPE.with_dnr());
    rig.connect_io_queue(cntlid, 1);
}

#[test]
fn silent_host_loses_its_association_at_the_timeout_and_traffic_counts() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    let completion = rig.execute_connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    let io = rig.connect_io_queue(u16::try_from(completion.dw0()).unwrap(), 1);
    for _ in 0..10 {
        rig.advance_time(Span::from_ms(800));
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 1);
        let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(512), &[]);
        assert_eq!(completion.status(), Status::SUCCESS, "its I/O keeps it alive");
    }
    rig.advance_time(Span::from_ms(1000));
    // The interval of the last command has ended, and another one has begun.
    rig.advance_time(Span::from_ms(999));
    assert_eq!(rig.service.association_count(), 1);
    rig.advance_time(Span::from_ms(1));
    assert!(
        disconnect_reasons(&rig).contains(&DisconnectReason::KeepAliveExpired),
        "{:?}",
        rig.new_events
    );
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn keep_alive_commands_keep_a_host_alive() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    rig.execute_connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    for _ in 0..10 {
        rig.advance_time(Span::from_ms(800));
        let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
        let (completion, _) = rig.execute_command(line, &keep_alive, DataDirection::None, &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    rig.advance_time(Span::from_ms(1000));
    rig.advance_time(Span::from_ms(999));
    assert_eq!(rig.service.association_count(), 1);
    rig.advance_time(Span::from_ms(1));
    assert_eq!(rig.service.association_count(), 0);
}

/// Connect sets the keep-alive timeout for the duration of the association.
#[test]
fn controller_reset_keeps_the_keep_alive_timeout() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    rig.execute_connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    rig.set_property(line, offset::CC, 0);
    rig.advance_time(Span::from_secs(60));
    assert_eq!(rig.service.association_count(), 1, "it counts while the controller is ready");
    rig.set_property(line, offset::CC, ENABLED);
    rig.advance_time(Span::from_ms(1000));
    rig.advance_time(Span::from_ms(999));
    assert_eq!(rig.service.association_count(), 1);
    rig.advance_time(Span::from_ms(1));
    assert!(
        disconnect_reasons(&rig).contains(&DisconnectReason::KeepAliveExpired),
        "{:?}",
        rig.new_events
    );
}

#[test]
fn reset_ends_io_queues_without_completing_outstanding_commands() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    // More requests than the limit of outstanding event requests.
    for _ in 0..5 {
        rig.connect_io_queue(cntlid, 1);
        rig.connect_io_queue(cntlid, 2);
        rig.new_events.clear();
        let tag = rig.lines[admin].submit(&event, DataDirection::None, &[]);
        rig.run_until_idle();
        assert_eq!(rig.set_property(admin, offset::CC, 0).status(), Status::SUCCESS);
        rig.run_until_idle();
        let csts = rig.get_property(admin, offset::CSTS, PropertySize::Four);
        assert_eq!(csts.result(), 0, "it is no longer ready");
        assert_eq!(
            disconnect_reasons(&rig),
            [DisconnectReason::AssociationEnded, DisconnectReason::AssociationEnded]
        );
        assert!(!rig.lines[admin].done.contains_key(&tag), "its host has forgotten it");
        rig.set_property(admin, offset::CC, ENABLED);
    }
    rig.lines.clear();
    rig.assert_all_released();
}

/// Commands that completed before the reset but whose response was not sent are discarded, too.
#[test]
fn reset_with_abort_leaves_aborted_command_uncompleted() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let event_requests = rig.lines[admin].submit(&event, DataDirection::None, &[]);
    rig.run_until_idle();
    let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(event_requests) << 16);
    let ofst = u32::try_from(offset::CC).unwrap();
    let disable = PropertySet { size: PropertySize::Four, ofst, value: 0 }.to_command();
    let both = [&abort, &disable].map(|it| rig.lines[admin].submit(it, DataDirection::None, &[]));
    rig.run_until_idle();
    assert!(both.iter().all(|tag| rig.lines[admin].done.contains_key(tag)));
    assert!(!rig.lines[admin].done.contains_key(&event_requests), "its host has forgotten it");
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn controller_shutdown_is_reported_complete() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    rig.set_property(admin, offset::CC, ENABLED | 1 << 14);
    rig.run_until_idle();
    let csts = rig.get_property(admin, offset::CSTS, PropertySize::Four).result();
    assert_eq!(csts, 0b1001, "ready, and shut down");
}

#[test]
fn host_without_connect_or_enable_is_disconnected() {
    let mut rig = TestTarget::new();
    rig.open_connection(admin_config());
    rig.advance_time(Span::from_secs(11));
    assert_eq!(disconnect_reasons(&rig), [DisconnectReason::Timeout("connect")]);
    rig.new_events.clear();
    let line = rig.open_connection(admin_config());
    rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    rig.advance_time(Span::from_secs(121));
    assert_eq!(disconnect_reasons(&rig), [DisconnectReason::NotEnabled]);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn abort_works_for_commands_of_admin_and_io_queues() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let event_requests = rig.lines[admin].submit(&event, DataDirection::None, &[]);
    rig.run_until_idle();
    let abort = |sqid: u32, cid: u16| {
        Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(cid) << 16 | sqid)
    };
    let (completion, _) = rig.execute_command(admin, &abort(1, 7), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "there is none");
    let (completion, _) = rig.execute_command(admin, &abort(9, 7), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "no such queue");
    assert!(!rig.lines[admin].done.contains_key(&event_requests));
}

/// A command is identified by the host's CID, which differs from the tag that it has in the target.
#[test]
fn abort_and_error_log_use_the_cids_of_the_host() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    let event = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    // The command has completed, but the host has not received the response and still uses its CID.
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
    rig.lines[admin].is_deaf = true;
    rig.lines[admin].submit(&keep_alive, DataDirection::None, &[]);
    rig.run_until_idle();
    let event_requests = [0; 3].map(|_| rig.lines[admin].submit(&event, DataDirection::None, &[]));
    rig.lines[admin].is_deaf = false;
    rig.run_until_idle();
    let abort = |cid: u16| Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(cid) << 16);
    let (completion, _) =
        rig.execute_command(admin, &abort(event_requests[1]), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 0));
    rig.run_until_idle();
    let (ended, _) = rig.lines[admin].done.remove(&event_requests[1]).unwrap();
    assert_eq!(ended.status(), Status::ABORT_REQUESTED);
    assert!(event_requests.iter().all(|tag| !rig.lines[admin].done.contains_key(tag)), "no other");
    let (completion, _) =
        rig.execute_command(admin, &abort(event_requests[1]), DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1), "it has ended");

    let unknown = Command::new(AdminOpcode::Identify.code()).with_cdw10(0xff);
    let cid = rig.lines[admin].submit(&unknown, DataDirection::ToHost(4096), &[]);
    rig.run_until_idle();
    assert!(!rig.lines[admin].done.remove(&cid).unwrap().0.status().is_success());
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(15 << 16 | 1);
    let (completion, entry) = rig.execute_command(admin, &get, DataDirection::ToHost(64), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(u16::from_le_bytes([entry[10], entry[11]]), cid);
}
