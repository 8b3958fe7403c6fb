//! Rights of hosts: peer networks, read-only namespaces, reservations, connections and memory; and the
//! audit of what was accepted and refused.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Span;
use tenmil_nvme_auth::HostConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::CNTLID_DYNAMIC;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::authenticating_host::{
    ExchangeResult, OF_HOST, host_config, secret, secured_target, security,
};
use super::test_target::{
    HOST, NQN, TestStream, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, read_or_write_command,
};
use crate::tcp::{
    ConnectionAudit, HostRights, NamespaceSelection, Port, RefusalReason, SubsystemSecurity,
    TargetEvent,
};

fn with_rights(rights: HostRights) -> SubsystemSecurity {
    SubsystemSecurity {
        rights: BTreeMap::from([(HOST.to_owned(), rights)]),
        ..SubsystemSecurity::default()
    }
}

fn connect_from(rig: &mut TestTarget, peer: &str) -> Status {
    rig.traits.peer = Some(peer.parse().unwrap());
    let line = rig.open_connection(admin_config());
    rig.traits.peer = None;
    let status =
        rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC)).status();
    rig.lines[line].pipe = None;
    rig.run_until_idle();
    status
}

fn refusals(rig: &TestTarget) -> Vec<(RefusalReason, ConnectionAudit)> {
    let refusal = |event: &TargetEvent| match event {
        TargetEvent::Rejected { audit, reason, .. } => Some((*reason, (**audit).clone())),
        _ => None,
    };
    rig.new_events.iter().filter_map(refusal).collect()
}

#[test]
fn subsystem_is_used_from_its_networks_only() {
    let networks = vec!["192.0.2.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
    let mut rig = secured_target(SubsystemSecurity { networks, ..SubsystemSecurity::default() });
    assert_eq!(connect_from(&mut rig, "192.0.2.9:1"), Status::SUCCESS);
    assert_eq!(connect_from(&mut rig, "[2001:db8::1]:1"), Status::SUCCESS);
    let refused = Status::CONNECT_INVALID_HOST.with_dnr();
    assert_eq!(connect_from(&mut rig, "192.0.3.9:1"), refused);
    assert_eq!(connect_from(&mut rig, "[2001:db9::1]:1"), refused);
    let (reason, audit) = refusals(&rig).remove(0);
    assert_eq!(reason, RefusalReason::AddressNotPermitted);
    assert_eq!((audit.peer.as_str(), audit.host.as_str()), ("192.0.3.9:1", HOST));
    assert_eq!((audit.subsystem.as_str(), audit.queue, audit.port), (NQN, Some(0), 1));
    // A change of the networks ends the associations of others.
    rig.traits.peer = Some("192.0.2.9:1".parse().unwrap());
    rig.connect_admin_queue();
    let networks = vec!["198.51.100.0/24".parse().unwrap()];
    rig.set_security(SubsystemSecurity { networks, ..SubsystemSecurity::default() });
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

#[test]
fn port_accepts_its_networks_only() {
    let mut rig = TestTarget::new();
    let networks = vec!["192.0.2.0/24".parse().unwrap()];
    rig.service.add_port(1, Port { networks, ..Port::default() });
    assert_eq!(connect_from(&mut rig, "192.0.2.9:1"), Status::SUCCESS);
    assert!(rig.service.permits_peer(1, "192.0.2.9:1"));
    assert!(!rig.service.permits_peer(1, "192.0.3.9:1"));
    rig.traits.peer = Some("192.0.3.9:1".parse().unwrap());
    let (_, far) = TestStream::pair(&rig.regions);
    let refused = rig.service.accept_stream(Box::new(far.with_traits(&rig.traits)), 1, rig.now);
    assert!(refused.is_err());
    rig.run_until_idle();
    let (reason, audit) = refusals(&rig).remove(0);
    assert_eq!((reason, audit.connection), (RefusalReason::AddressNotPermitted, None));
    rig.end_all();
}

fn write_status(rig: &mut TestTarget, io: usize, opcode: IoOpcode) -> Status {
    let command = read_or_write_command(opcode.code(), 0, 8);
    let (data, bytes) = match opcode {
        IoOpcode::Read => (DataDirection::ToHost(4096), Vec::new()),
        IoOpcode::Write | IoOpcode::Compare => (DataDirection::FromHost(4096), vec![0; 4096]),
        IoOpcode::ReservationRegister => (DataDirection::FromHost(16), vec![0; 16]),
        IoOpcode::DatasetManagement => (DataDirection::FromHost(16), vec![0; 16]),
        _ => (DataDirection::None, Vec::new()),
    };
    let command = match opcode {
        IoOpcode::DatasetManagement => Command::new(opcode.code()).with_nsid(1).with_cdw11(4),
        IoOpcode::ReservationRegister => Command::new(opcode.code()).with_nsid(1),
        _ => command,
    };
    rig.execute_command(io, &command, data, &bytes).0.status()
}

#[test]
fn read_only_host_reads_and_changes_nothing() {
    let selections = [NamespaceSelection::All, NamespaceSelection::Listed(BTreeSet::from([1, 9]))];
    for read_only in selections {
        let mut rig = secured_target(with_rights(HostRights { read_only, ..Default::default() }));
        let (admin, cntlid) = rig.connect_admin_queue();
        let io = rig.connect_io_queue(cntlid, 1);
        let protected = Status::NAMESPACE_WRITE_PROTECTED.with_dnr();
        for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes, IoOpcode::DatasetManagement] {
            assert_eq!(write_status(&mut rig, io, opcode), protected, "{opcode:?}");
        }
        for opcode in [IoOpcode::Read, IoOpcode::Compare, IoOpcode::Flush] {
            assert_eq!(write_status(&mut rig, io, opcode), Status::SUCCESS, "{opcode:?}");
        }
        assert_eq!(
            write_status(&mut rig, io, IoOpcode::ReservationRegister),
            Status::OPERATION_DENIED.with_dnr()
        );
        let identify = Command::new(AdminOpcode::Identify.code()).with_nsid(1);
        let (_, page) = rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
        assert_eq!(page[99] & 1, 1, "NSATTR shows it");
        for opcode in [
            AdminOpcode::FormatNvm,
            AdminOpcode::Sanitize,
            AdminOpcode::NamespaceManagement,
            AdminOpcode::FirmwareCommit,
        ] {
            let command = Command::new(opcode.code()).with_nsid(1);
            let (completion, _) = rig.execute_command(admin, &command, DataDirection::None, &[]);
            assert_eq!(completion.status(), protected, "{opcode:?}");
        }
        // Another namespace, and then all rights.
        let other = NamespaceSelection::Listed(BTreeSet::from([2]));
        rig.set_security(with_rights(HostRights { read_only: other, ..Default::default() }));
        assert_eq!(write_status(&mut rig, io, IoOpcode::Write), Status::SUCCESS);
        let all = NamespaceSelection::All;
        rig.set_security(with_rights(HostRights { read_only: all, ..Default::default() }));
        assert_eq!(write_status(&mut rig, io, IoOpcode::Write), protected);
        rig.set_security(SubsystemSecurity::default());
        assert_eq!(write_status(&mut rig, io, IoOpcode::Write), Status::SUCCESS);
        rig.end_all();
    }
}

#[test]
fn rights_are_those_of_the_host_only() {
    const OTHER: &str = "nqn.2026-01.org.tenmil:other";
    let rights = HostRights { read_only: NamespaceSelection::All, ..Default::default() };
    let mut rig = secured_target(SubsystemSecurity {
        rights: BTreeMap::from([(OTHER.to_owned(), rights)]),
        ..SubsystemSecurity::default()
    });
    let (_, io) = rig.connect_host_with_io_queue(7);
    assert_eq!(write_status(&mut rig, io, IoOpcode::Write), Status::SUCCESS);
    rig.end_all();
}

#[test]
fn host_without_the_right_changes_no_reservation() {
    let mut rig =
        secured_target(with_rights(HostRights { reservations: false, ..Default::default() }));
    let (_, io) = rig.connect_host_with_io_queue(7);
    let denied = Status::OPERATION_DENIED.with_dnr();
    for (opcode, len) in [
        (IoOpcode::ReservationRegister, 16),
        (IoOpcode::ReservationAcquire, 16),
        (IoOpcode::ReservationRelease, 8),
    ] {
        let command = Command::new(opcode.code()).with_nsid(1);
        let data = DataDirection::FromHost(len);
        let (completion, _) = rig.execute_command(io, &command, data, &vec![0; len as usize]);
        assert_eq!(completion.status(), denied, "{opcode:?}");
    }
    let report =
        Command::new(IoOpcode::ReservationReport.code()).with_nsid(1).with_cdw10(15).with_cdw11(1);
    let (completion, _) = rig.execute_command(io, &report, DataDirection::ToHost(64), &[]);
    assert_eq!(completion.status(), Status::SUCCESS, "it may look");
    assert_eq!(write_status(&mut rig, io, IoOpcode::Write), Status::SUCCESS);
    rig.end_all();
}

#[test]
fn connections_of_a_host_are_limited_by_its_rights() {
    let mut rig =
        secured_target(with_rights(HostRights { connections_max: Some(2), ..Default::default() }));
    let (_, cntlid) = rig.connect_admin_queue();
    let first = rig.connect_io_queue(cntlid, 1);
    let line = rig.open_connection(io_config());
    let completion = rig.execute_connect(line, &io_connect(2), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(refusals(&rig)[0].0, RefusalReason::Limit);
    rig.lines[first].pipe = None;
    rig.run_until_idle();
    let completion = rig.execute_connect(line, &io_connect(2), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.end_all();
}

/// Commands of a host whose memory is limited wait for each other, and all complete.
#[test]
fn memory_of_a_host_is_limited_by_its_rights() {
    let limit = 64 << 10;
    let rights = HostRights { memory_bytes_max: Some(limit), ..Default::default() };
    for (security, expected) in
        [(with_rights(rights), limit), (SubsystemSecurity::default(), 16 * 32_768)]
    {
        let mut rig = secured_target(security);
        let (_, io) = rig.connect_host_with_io_queue(7);
        let free = rig.service.buffer_pool().free_bytes();
        let write = read_or_write_command(IoOpcode::Write.code(), 0, 64);
        rig.lines[io].mute_after = Some(rig.lines[io].sent.len() + 16 * 72);
        for _ in 0..16 {
            rig.lines[io].submit(&write, DataDirection::FromHost(32_768), &[1; 32_768]);
        }
        rig.run_until_idle();
        let held = free - rig.service.buffer_pool().free_bytes();
        assert_eq!(held, expected, "for the data that were requested");
        rig.lines[io].mute_after = None;
        rig.run_until_idle();
        let done = rig.lines[io].done.values();
        assert_eq!(done.filter(|(completion, _)| completion.status().is_success()).count(), 16);
        rig.end_all();
    }
}

#[test]
fn every_accepted_and_refused_queue_is_audited() {
    let mut rig = secured_target(security(&[7, OF_HOST]));
    rig.traits.peer = Some("192.0.2.1:5".parse().unwrap());
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    rig.connect_authenticated_io((cntlid, 1), host_config());
    rig.authenticate(admin, host_config()).outcome();
    let (line, _) = rig.connect_unauthenticated();
    let result = rig.authenticate(line, HostConfig { host_secret: secret(66), ..host_config() });
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.connect_unauthenticated();
    rig.advance_time(Span::from_secs(31));
    let audits = |is_kind: &dyn Fn(&TargetEvent) -> Option<ConnectionAudit>| {
        rig.new_events.iter().filter_map(is_kind).collect::<Vec<_>>()
    };
    let accepted = audits(&|event| match event {
        TargetEvent::Accepted(audit) => Some((**audit).clone()),
        _ => None,
    });
    assert_eq!(accepted.iter().map(|audit| audit.queue).collect::<Vec<_>>(), [Some(0), Some(1)]);
    for audit in &accepted {
        assert_eq!((audit.peer.as_str(), audit.port), ("192.0.2.1:5", 1));
        assert_eq!((audit.host.as_str(), audit.subsystem.as_str()), (HOST, NQN));
        assert_eq!((audit.cntlid, &audit.secure_channel), (Some(cntlid), &None));
        let authentication = audit.authentication.as_ref().unwrap();
        let expected = format!("DH-HMAC-CHAP of the host, SHA-256, null, key chap-{OF_HOST}");
        assert_eq!(authentication.to_string(), expected);
    }
    let again = audits(&|event| match event {
        TargetEvent::Authenticated(audit) => Some((**audit).clone()),
        _ => None,
    });
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].authentication, accepted[0].authentication);
    let refused: Vec<_> = refusals(&rig)
        .into_iter()
        .map(|(reason, audit)| {
            assert_eq!((audit.host.as_str(), audit.queue), (HOST, Some(0)));
            reason
        })
        .collect();
    assert_eq!(
        refused,
        [RefusalReason::AuthenticationFailed, RefusalReason::AuthenticationTimeout]
    );
    rig.end_all();
}

#[test]
fn refusals_of_one_address_are_reported_at_a_limited_rate() {
    let mut rig = secured_target(SubsystemSecurity {
        authentication_required: true,
        ..SubsystemSecurity::default()
    });
    for _ in 0..40 {
        connect_from(&mut rig, "192.0.2.1:5");
    }
    assert_eq!(refusals(&rig).len(), 16);
    connect_from(&mut rig, "192.0.2.2:5");
    assert_eq!(refusals(&rig).len(), 17, "another address");
    rig.advance_time(Span::from_secs(10));
    connect_from(&mut rig, "192.0.2.1:5");
    let last = rig.new_events.iter().rev().find_map(|event| match event {
        TargetEvent::Rejected { unreported, .. } => Some(*unreported),
        _ => None,
    });
    assert_eq!(last, Some(24));
    rig.end_all();
}
