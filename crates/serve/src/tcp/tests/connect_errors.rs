//! Status of requests that are rejected (Base 2.1 §6.3).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::Span;
use tenmil_nvme_controller::transport::fabrics::{AssociationEndReason, FabricsTransport};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, CNTLID_STATIC, Connect, ConnectData, PropertySize};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::memory_limits::target_with_never_completing_device;
use super::test_target::{
    HOST, TestTarget, admin_config, admin_connect, connect_data, io_config, io_connect,
    read_or_write_command, service_limits,
};
use crate::tcp::association::{AdminQueueProof, Association, HostIds};
use crate::tcp::subsystem_export::{ControllerError, RequestedCntlid};
use crate::tcp::{
    AllowedHosts, ControllerModel, DisconnectReason, SubsystemExportConfig, TargetEvent,
};

/// Completion of a Connect on a new connection: its status without DNR, and dword 0.
fn try_connect(rig: &mut TestTarget, connect: &Connect, data: &ConnectData) -> (Status, u32) {
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, connect, data);
    let status = completion.status();
    (Status(status.0 & 0x7ff), completion.dw0())
}

fn connect_data_of(subsystem: &str, host: &str) -> ConnectData {
    ConnectData::zeroed().with(|data| {
        data.hostid([7; 16])
            .cntlid(CNTLID_DYNAMIC)
            .subnqn(Ascii::nul_padded(subsystem))
            .hostnqn(Ascii::nul_padded(host))
    })
}

#[test]
fn invalid_connect_field_is_rejected_with_its_offset() {
    let mut rig = TestTarget::new();
    let good = || connect_data(CNTLID_DYNAMIC);
    let in_data = |offset: u32| (Status::CONNECT_INVALID_PARAMETERS, 1 << 16 | offset);
    let in_command = |offset: u32| (Status::CONNECT_INVALID_PARAMETERS, offset);
    let it = admin_connect;
    let cases = [
        (Connect { recfmt: 1, ..it() }, good(), (Status::CONNECT_INCOMPATIBLE_FORMAT, 40)),
        (Connect { sqsize: 0, ..it() }, good(), in_command(44)),
        (Connect { sqsize: 129, ..it() }, good(), in_command(44)),
        (Connect { sqsize: u16::MAX, ..it() }, good(), in_command(44)),
        (Connect { kato: u32::MAX, ..it() }, good(), in_command(48)),
        (it(), connect_data(0), in_data(16)),
        (it(), connect_data(CNTLID_STATIC), in_data(16)),
        (it(), connect_data_of("nqn.2026-01.org.tenmil:other", HOST), in_data(256)),
        (it(), connect_data_of("nonsense", HOST), in_data(256)),
        (it(), connect_data_of(super::test_target::NQN, " "), in_data(512)),
        (io_connect(1), connect_data(1), in_data(16)),
    ];
    let count = cases.len();
    for (connect, data, expected) in cases {
        assert_eq!(
            try_connect(&mut rig, &connect, &data),
            expected,
            "{connect:?} {:?}",
            data.subnqn()
        );
    }
    let refused = rig
        .new_events
        .iter()
        .filter(|new_events| matches!(new_events, TargetEvent::Rejected { .. }))
        .count();
    assert_eq!(refused, count, "one event for each");
    assert_eq!(rig.service.association_count(), 0);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn only_listed_hosts_connect() {
    let hosts = AllowedHosts::Listed(BTreeSet::from([HOST.to_owned()]));
    let mut rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        hosts,
        ..config
    });
    let stranger = connect_data_of(super::test_target::NQN, "nqn.2026-01.org.tenmil:stranger");
    let reported = try_connect(&mut rig, &admin_connect(), &stranger);
    assert_eq!(reported, (Status::CONNECT_INVALID_HOST, 1 << 16 | 512));
    assert!(
        rig.new_events
            .iter()
            .any(|new_events| new_events.to_string().contains("stranger is not among the hosts")),
        "{:?}",
        rig.new_events
    );
    rig.connect_admin_queue();
}

/// Hosts are identified by name, and access lists decide: a name of any form is accepted.
#[test]
fn any_valid_hostnqn_is_accepted() {
    let mut rig = TestTarget::new();
    for name in ["hostnqn", "nqn.2014-08.org.nvmexpress:uuid:me"] {
        let mut field: Ascii<256> = Ascii::nul_padded(name);
        field.0[255] = b'?';
        // Each host has its own identifier.
        let id = [name.as_bytes()[0] ^ name.as_bytes()[3]; 16];
        let unzeroed = connect_data_of(super::test_target::NQN, name)
            .with(|data| data.hostnqn(field).hostid(id));
        assert_eq!(try_connect(&mut rig, &admin_connect(), &unzeroed).0, Status::SUCCESS, "{name}");
        let reported = rig.new_events.iter().any(
            |new_events| matches!(new_events, TargetEvent::Associated { host, .. } if host == name),
        );
        assert!(reported, "{:?}", rig.new_events);
    }
    let noise = connect_data_of(super::test_target::NQN, "a host");
    assert_eq!(
        try_connect(&mut rig, &admin_connect(), &noise),
        (Status::CONNECT_INVALID_PARAMETERS, 1 << 16 | 512)
    );
}

#[test]
fn static_controller_connects_only_by_its_cntlid_within_range() {
    let model = ControllerModel::Static(2);
    let mut rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        model,
        ..config
    });
    let ask =
        |rig: &mut TestTarget, cntlid| try_connect(rig, &admin_connect(), &connect_data(cntlid));
    assert_eq!(ask(&mut rig, 2), (Status::SUCCESS, 2));
    assert_eq!(ask(&mut rig, 2).0, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(ask(&mut rig, 3), (Status::CONNECT_INVALID_PARAMETERS, 1 << 16 | 16));
    assert_eq!(ask(&mut rig, CNTLID_STATIC), (Status::SUCCESS, 1));
    assert_eq!(ask(&mut rig, CNTLID_DYNAMIC).0, Status::CONNECT_CONTROLLER_BUSY);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn io_queue_connects_only_for_the_host_of_its_controller_and_once() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    let cntlid = u16::try_from(completion.dw0()).unwrap();
    let ask =
        |rig: &mut TestTarget, qid| try_connect(rig, &io_connect(qid), &connect_data(cntlid)).0;
    let disabled = try_connect(&mut rig, &io_connect(1), &connect_data(cntlid));
    assert_eq!(disabled, (Status::CONNECT_INVALID_PARAMETERS, 42), "it is disabled");
    rig.set_property(line, offset::CC, 1);
    assert_eq!(ask(&mut rig, 1), Status::CONNECT_INVALID_PARAMETERS, "entries of no size");
    rig.set_property(line, offset::CC, 0);
    rig.set_property(line, offset::CC, super::test_target::ENABLED);
    assert_eq!(ask(&mut rig, 1), Status::SUCCESS);
    let again = rig.open_connection(io_config());
    let tag = rig.submit_connect(again, &io_connect(1), &connect_data(cntlid));
    rig.advance_time(Span::from_ms(999));
    assert!(!rig.lines[again].done.contains_key(&tag), "the other may be about to go");
    rig.advance_time(Span::from_ms(1));
    let (completion, _) = rig.lines[again].done.remove(&tag).unwrap();
    let sequence = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
    assert_eq!(completion.status(), sequence, "there is one");
    assert_eq!(ask(&mut rig, 4), Status::SUCCESS);
    assert_eq!(ask(&mut rig, 5), Status::CONNECT_INVALID_PARAMETERS, "four were granted");
    let stranger = "nqn.2026-01.org.tenmil:stranger";
    let other_name = connect_data(cntlid).with(|data| data.hostnqn(Ascii::nul_padded(stranger)));
    for (data, offset) in [
        (connect_data(cntlid).with(|data| data.hostid([8; 16])), 0),
        (other_name, 512),
        (connect_data(cntlid + 1), 16),
    ] {
        assert_eq!(
            try_connect(&mut rig, &io_connect(2), &data),
            (Status::CONNECT_INVALID_PARAMETERS, 1 << 16 | offset)
        );
    }
    let reported =
        |text: &str| rig.new_events.iter().any(|new_events| new_events.to_string().contains(text));
    assert!(reported(&format!("belongs to {HOST}, not to {stranger}")), "{:?}", rig.new_events);
    assert!(reported("expected 07070707-0707-0707-0707-070707070707 or 0"), "{:?}", rig.new_events);
    let unidentified = connect_data(cntlid).with(|data| data.hostid([0; 16]));
    assert_eq!(try_connect(&mut rig, &io_connect(2), &unidentified).0, Status::SUCCESS);
}

/// Base 2.1 §5.1.25.1.28: two controllers whose hosts gave host identifier 0 belong to different
/// hosts.
#[test]
fn hostid_of_zero_is_accepted_and_identifies_no_host() {
    let mut rig = TestTarget::new();
    let data = |cntlid| -> ConnectData { connect_data(cntlid).with(|data| data.hostid([0; 16])) };
    let mut connected = Vec::new();
    for _ in 0..2 {
        let admin = rig.open_connection(admin_config());
        let completion = rig.execute_connect(admin, &admin_connect(), &data(CNTLID_DYNAMIC));
        assert_eq!(completion.status(), Status::SUCCESS);
        let cntlid = u16::try_from(completion.dw0()).unwrap();
        rig.set_property(admin, offset::CC, super::test_target::ENABLED);
        let io = rig.open_connection(io_config());
        assert_eq!(
            rig.execute_connect(io, &io_connect(1), &data(cntlid)).status(),
            Status::SUCCESS
        );
        let identified = connect_data(cntlid);
        let refused = (Status::CONNECT_INVALID_PARAMETERS, 1 << 16);
        assert_eq!(
            try_connect(&mut rig, &io_connect(2), &identified),
            refused,
            "another identifier"
        );
        connected.push((admin, io, cntlid));
    }
    let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
    let keys = [0_u64.to_le_bytes(), 5_u64.to_le_bytes()].concat();
    for &(_, io, _) in &connected {
        let (completion, _) =
            rig.execute_command(io, &register, DataDirection::FromHost(16), &keys);
        assert_eq!(
            completion.status().without_crd_more_dnr(),
            Status::HOST_IDENTIFIER_NOT_INITIALIZED
        );
        let (completion, _) = rig.execute_command(
            io,
            &read_or_write_command(IoOpcode::Read.code(), 0, 1),
            DataDirection::ToHost(512),
            &[],
        );
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}

/// Reservations identify a host by its host identifier, and each registrant can read those of the
/// others.
#[test]
fn hostid_in_use_by_another_hostnqn_is_rejected() {
    const THIEF: &str = "nqn.2026-01.org.tenmil:thief";
    let mut rig = TestTarget::new();
    let (_, io) = rig.connect_host_with_io_queue(7);
    let thief = || connect_data_of(super::test_target::NQN, THIEF);
    let dial = |rig: &mut TestTarget| {
        let line = rig.open_connection(admin_config());
        rig.execute_connect(line, &admin_connect(), &thief())
    };
    let refused = dial(&mut rig);
    // Without Do Not Retry: the other host may disconnect.
    assert_eq!(refused.status(), Status::CONNECT_INVALID_PARAMETERS);
    assert_eq!(refused.dw0(), 1 << 16, "HOSTID of the data");
    let reported = rig
        .new_events
        .iter()
        .map(ToString::to_string)
        .find(|new_events| new_events.contains(THIEF))
        .unwrap();
    for part in [HOST, "07070707-0707-0707-0707-070707070707", "an identifier of its own"] {
        assert!(reported.contains(part), "{reported}");
    }
    let register = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
    let keys = [0_u64.to_le_bytes(), 5_u64.to_le_bytes()].concat();
    let (completion, _) = rig.execute_command(io, &register, DataDirection::FromHost(16), &keys);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
    let refused = dial(&mut rig);
    assert_eq!(refused.status(), Status::CONNECT_INVALID_PARAMETERS.with_dnr(), "it is registered");
    assert_eq!(rig.service.association_count(), 0, "the number is free again");
    rig.connect_host_with_io_queue(7);
    let own = thief().with(|data| data.hostid([8; 16]));
    assert_eq!(try_connect(&mut rig, &admin_connect(), &own).0, Status::SUCCESS);
}

/// A common benchmark leaves HOSTNQN empty.
#[test]
fn empty_hostnqn_connects_only_to_open_subsystems_and_is_reported() {
    let mut rig = TestTarget::new();
    let unnamed = || connect_data_of(super::test_target::NQN, "");
    let (status, cntlid) = try_connect(&mut rig, &admin_connect(), &unnamed());
    assert_eq!(status, Status::SUCCESS);
    let admin = rig.lines.len() - 1;
    rig.set_property(admin, offset::CC, super::test_target::ENABLED);
    let data = unnamed().with(|data| data.cntlid(u16::try_from(cntlid).unwrap()));
    assert_eq!(try_connect(&mut rig, &io_connect(1), &data).0, Status::SUCCESS);
    let reported = rig.new_events.iter().filter(
        |new_events| matches!(new_events, TargetEvent::Notice(text) if text.contains("connected without a host NQN")),
    );
    assert_eq!(reported.count(), 1, "{:?}", rig.new_events);
    let discovery = connect_data_of(tenmil_wire::nqn::DISCOVERY, "");
    assert_eq!(try_connect(&mut rig, &admin_connect(), &discovery).0, Status::SUCCESS);

    let hosts = AllowedHosts::Listed(BTreeSet::from([HOST.to_owned()]));
    let mut rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        hosts,
        ..config
    });
    let refused = (Status::CONNECT_INVALID_HOST, 1 << 16 | 512);
    assert_eq!(try_connect(&mut rig, &admin_connect(), &unnamed()), refused);
    assert!(
        rig.new_events
            .iter()
            .any(|new_events| new_events.to_string().contains("a host without an NQN")),
        "{:?}",
        rig.new_events
    );
    let masked = BTreeMap::from([(1, BTreeSet::from([HOST.to_owned()]))]);
    let mut rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        masks: masked,
        ..config
    });
    assert_eq!(try_connect(&mut rig, &admin_connect(), &unnamed()).0, Status::SUCCESS);
    let admin = rig.lines.len() - 1;
    rig.set_property(admin, offset::CC, super::test_target::ENABLED);
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(2);
    let (completion, bytes) =
        rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert!(bytes.iter().all(|byte| *byte == 0), "a masked namespace is for hosts with names");
}

/// TCP does not acknowledge a close: the next Connect of a host may be processed before the end of
/// the connection that had the queue, or while that connection waits for the device.
#[test]
fn connect_waits_for_a_closing_queue_of_the_same_id() {
    let (mut rig, is_stuck) = target_with_never_completing_device();
    let (_, cntlid) = rig.connect_admin_queue();
    let first = rig.connect_io_queue(cntlid, 1);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let reconnect = |rig: &mut TestTarget| {
        let line = rig.open_connection(io_config());
        (line, rig.submit_connect(line, &io_connect(1), &connect_data(cntlid)))
    };
    rig.lines[first].submit(&read, DataDirection::ToHost(4096), &[]);
    rig.run_until_idle();
    let (second, tag) = reconnect(&mut rig);
    rig.advance_time(Span::from_ms(5));
    rig.lines[first].pipe = None;
    rig.advance_time(Span::from_ms(500));
    assert!(!rig.lines[second].done.contains_key(&tag), "the medium has not answered");
    is_stuck.store(false, Ordering::Relaxed);
    rig.run_until_idle();
    rig.advance_time(Span::from_ms(2));
    let (completion, _) = rig.lines[second].done.remove(&tag).unwrap();
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, cntlid.into()));
    let (completion, _) = rig.execute_command(second, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);

    // The wait is limited, but the host may retry.
    is_stuck.store(true, Ordering::Relaxed);
    rig.lines[second].submit(&read, DataDirection::ToHost(4096), &[]);
    rig.run_until_idle();
    rig.lines[second].pipe = None;
    let (third, tag) = reconnect(&mut rig);
    let flush = Command::new(IoOpcode::Flush.code()).with_nsid(1);
    let too_soon = rig.lines[third].submit(&flush, DataDirection::None, &[]);
    rig.run_until_idle();
    let (completion, _) = rig.lines[third].done.remove(&too_soon).unwrap();
    assert_eq!(completion.status(), Status::COMMAND_SEQUENCE_ERROR.with_dnr());
    rig.advance_time(Span::from_ms(1001));
    let (completion, _) = rig.lines[third].done.remove(&tag).unwrap();
    assert_eq!(completion.status(), Status::COMMAND_SEQUENCE_ERROR, "without Do Not Retry");
    is_stuck.store(false, Ordering::Relaxed);
    rig.run_until_idle();
    let completion = rig.execute_connect(third, &io_connect(1), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
}

/// A waiting Connect is canceled with its connection, and its connection is subject to the time
/// limit of unconnected hosts.
#[test]
fn host_with_pending_connect_can_be_disconnected() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    let before = rig.guests.len();
    let line = rig.open_connection(io_config());
    rig.submit_connect(line, &io_connect(1), &connect_data(cntlid));
    rig.run_until_idle();
    rig.lines[line].pipe = None;
    rig.run_until_idle();
    assert_eq!(rig.guests.len(), before);
    let line = rig.open_connection(io_config());
    rig.submit_connect(line, &io_connect(1), &connect_data(cntlid));
    rig.run_until_idle();
    rig.advance_time(Span::from_secs(2));
    rig.advance_time(Span::from_secs(9));
    assert!(rig.new_events.iter().any(|new_events| matches!(
        new_events,
        TargetEvent::Disconnected { reason: DisconnectReason::Timeout("connect"), .. }
    )));
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn command_out_of_sequence_fails_with_command_sequence_error() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let status = |rig: &mut TestTarget, line| {
        rig.execute_command(line, &identify, DataDirection::ToHost(4096), &[]).0.status()
    };
    let sequence = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
    assert_eq!(status(&mut rig, line), sequence, "before Connect");
    rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    assert_eq!(status(&mut rig, line), sequence, "before it is enabled");
    let again = rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    assert_eq!(again.status(), sequence, "a second Connect");
}

#[test]
fn invalid_property_offset_or_length_fails_with_invalid_field() {
    let mut rig = TestTarget::new();
    let (line, _) = rig.connect_admin_queue();
    let invalid = Status::INVALID_FIELD.with_dnr();
    for (at, size) in [
        (offset::CAP, PropertySize::Four),
        (offset::VS, PropertySize::Eight),
        (offset::CC, PropertySize::Eight),
        (offset::AQA, PropertySize::Four),
        (0x4, PropertySize::Four),
        (0x1000, PropertySize::Four),
    ] {
        assert_eq!(rig.get_property(line, at, size).status(), invalid, "{at:#x}");
    }
    for at in [offset::CAP, offset::VS, offset::CSTS, offset::NSSR, 0x1300] {
        assert_eq!(rig.set_property(line, at, 0).status(), invalid, "{at:#x}");
    }
    assert_eq!(rig.get_property(line, offset::VS, PropertySize::Four).result(), 0x0002_0100);
}

#[test]
fn wrong_transfer_length_is_rejected_and_leaks_no_data() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let wrong = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    for (opcode, blocks, len) in [
        (IoOpcode::Read, 8, 512),
        (IoOpcode::Read, 1, 4096),
        (IoOpcode::Read, 256, 4096),
        (IoOpcode::Write, 8, 512),
        (IoOpcode::Write, 1, 4096),
        (IoOpcode::Write, 8, 16384),
        (IoOpcode::Compare, 8, 512),
        (IoOpcode::Compare, 1, 4096),
    ] {
        let command = read_or_write_command(opcode.code(), 0, blocks);
        let (data, bytes) = match opcode {
            IoOpcode::Read => (DataDirection::ToHost(len), Vec::new()),
            _ => (DataDirection::FromHost(len), vec![1; len as usize]),
        };
        let (completion, back) = rig.execute_command(io, &command, data, &bytes);
        assert_eq!(completion.status(), wrong, "{opcode:?} of {blocks} blocks, {len} bytes");
        assert!(opcode != IoOpcode::Read || back.iter().all(|byte| *byte == 0xa5));
    }
    // A command without data has none of the one that had its slot before.
    let (completion, _) =
        rig.execute_command(io, &read_or_write_command(2, 0, 1), DataDirection::ToHost(512), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let (completion, _) =
        rig.execute_command(io, &read_or_write_command(2, 0, 1), DataDirection::None, &[]);
    assert_eq!(completion.status(), wrong, "no data at all");
    let beyond = read_or_write_command(IoOpcode::Read.code(), super::test_target::BLOCKS, 1);
    let (completion, _) = rig.execute_command(io, &beyond, DataDirection::ToHost(512), &[]);
    assert_eq!(completion.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
    let _ = io_config();
}

/// The state that results if two threads process Connect commands at the same time.
#[test]
fn cntlid_is_reserved_during_connect_and_subsystem_removal_ends_controllers() {
    let model = ControllerModel::Static(2);
    let rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        model,
        ..config
    });
    let offer = rig.service.find_export(super::test_target::NQN, 1).unwrap();
    let host = HostIds { nqn: HOST.to_owned(), identifier: 7 };
    let open = |asked| {
        offer.create_controller(
            rig.now,
            RequestedCntlid::OfHost(asked),
            (1, &host, "pipe"),
            rig.service.limits(),
        )
    };
    let controller = open(2).unwrap();
    assert!(matches!(open(2), Err(ControllerError::Busy)));
    assert!(rig.service.remove_subsystem(super::test_target::NQN));
    let front = FabricsTransport::new(controller, rig.now);
    let association = Association::new(
        Arc::clone(&offer),
        2,
        (host.clone(), 1),
        AdminQueueProof::default(),
        front,
    );
    offer.add_association(&association).unwrap();
    assert_eq!(
        association.lock_transport().end_reason(),
        Some(AssociationEndReason::SubsystemRemoved)
    );
    drop(association);
    assert!(open(2).is_ok(), "its number is free again");
}
