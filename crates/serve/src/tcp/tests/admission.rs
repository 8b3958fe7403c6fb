//! Admission of new hosts while others have many connections.

use tenmil_base::Span;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, nqn};

use super::test_target::{
    ENABLED, HOST, TestTarget, admin_config, admin_connect, connect_data, io_config, io_connect,
    read_or_write_command, service_limits,
};
use crate::tcp::{
    AdmissionLimits, AllowedHosts, DisconnectReason, ServiceLimits, SubsystemExportConfig,
    TargetEvent,
};

fn discovery_connect_data() -> ConnectData {
    connect_data(CNTLID_DYNAMIC).with(|data| data.subnqn(Ascii::nul_padded(nqn::DISCOVERY)))
}

fn try_connect(rig: &mut TestTarget, connect: &Connect, data: &ConnectData) -> Status {
    let line = rig.open_connection(admin_config());
    rig.execute_connect(line, connect, data).status()
}

#[test]
fn idle_discovery_connections_do_not_exhaust_the_limit() {
    let limits = ServiceLimits { connections_max: 40, memory_bytes: 32 << 20, ..service_limits() };
    let mut rig = TestTarget::with_options(limits, |config| config);
    let asked = Connect { kato: 600_000, ..admin_connect() };
    for count in 0..30 {
        let expected = if count < 10 { Status::SUCCESS } else { Status::CONNECT_CONTROLLER_BUSY };
        assert_eq!(try_connect(&mut rig, &asked, &discovery_connect_data()), expected, "{count}");
    }
    assert_eq!(rig.service.rejected_connections(), 20);
    let reported = |new_events: &TargetEvent| matches!(new_events, TargetEvent::Rejected { why, .. } if why.contains("discovery"));
    let count = rig.new_events.iter().filter(|new_events| reported(new_events)).count();
    assert_eq!(count, 16, "of one address, so many are reported");
    rig.connect_admin_queue();
    // The rejected connection is closed after its time limit, and idle ones after theirs.
    rig.advance_time(Span::from_secs(11));
    assert_eq!(rig.service.connection_count(), 11);
    rig.advance_time(Span::from_secs(600));
    rig.advance_time(Span::from_secs(600));
    let expired = DisconnectReason::KeepAliveExpired;
    let is_it = |new_events: &&TargetEvent| matches!(new_events, TargetEvent::Disconnected { reason, .. } if *reason == expired);
    // Including the host without keep-alive timeout that was idle.
    assert_eq!(rig.new_events.iter().filter(is_it).count(), 11);
}

#[test]
fn keep_alive_timeout_of_connect_is_bounded() {
    let mut rig = TestTarget::new();
    for (kato, expected) in [
        (600_000, Status::SUCCESS),
        (600_001, Status::CONNECT_INVALID_PARAMETERS.with_dnr()),
        (u32::MAX, Status::CONNECT_INVALID_PARAMETERS.with_dnr()),
    ] {
        for data in [discovery_connect_data(), connect_data(CNTLID_DYNAMIC)] {
            let asked = Connect { kato, ..admin_connect() };
            assert_eq!(try_connect(&mut rig, &asked, &data), expected, "{kato}");
        }
    }
}

/// Set Features has the same limit as Connect.
#[test]
fn keep_alive_timeout_of_set_features_is_bounded() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    let visitor = rig.open_connection(admin_config());
    rig.execute_connect(visitor, &admin_connect(), &discovery_connect_data());
    rig.set_property(visitor, offset::CC, ENABLED);
    let set = |timeout_ms| {
        Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0f).with_cdw11(timeout_ms)
    };
    for (kato, expected) in [
        (600_000, Status::SUCCESS),
        (600_001, Status::KEEP_ALIVE_TIMEOUT_INVALID),
        (u32::MAX, Status::KEEP_ALIVE_TIMEOUT_INVALID),
    ] {
        for line in [admin, visitor] {
            let (completion, _) = rig.execute_command(line, &set(kato), DataDirection::None, &[]);
            assert_eq!(
                completion.status().without_crd_more_dnr(),
                expected,
                "{kato} over connection {line}"
            );
        }
    }
}

/// KATO 0 disables the timer; a limit still applies where any host name is accepted.
#[test]
fn silent_host_without_keep_alive_stays_connected_only_if_listed() {
    for (is_listed, left) in [(false, 0), (true, 2)] {
        let mut rig = TestTarget::with_options(service_limits(), |config| match is_listed {
            true => SubsystemExportConfig {
                hosts: AllowedHosts::Listed([HOST.to_owned()].into()),
                ..config
            },
            false => config,
        });
        let (admin, cntlid) = rig.connect_admin_queue();
        let io = rig.connect_io_queue(cntlid, 1);
        for _ in 0..3 {
            rig.advance_time(Span::from_secs(500));
            let read = read_or_write_command(IoOpcode::Read.code(), 0, 1);
            assert_eq!(
                rig.execute_command(io, &read, DataDirection::ToHost(512), &[]).0.status(),
                Status::SUCCESS
            );
        }
        assert_eq!(rig.service.connection_count(), 2, "a host that reads is not silent");
        let get = Command::new(AdminOpcode::GetFeatures.code()).with_cdw10(0x0f);
        assert_eq!(rig.execute_command(admin, &get, DataDirection::None, &[]).0.dw0(), 0);
        rig.advance_time(Span::from_secs(601));
        rig.advance_time(Span::from_secs(601));
        assert_eq!(rig.service.connection_count(), left);
    }
}

/// Host NQNs can be invented: without an access list, the limit of registrants of a namespace
/// applies per address. A listed host has its place whatever its address is.
#[test]
fn hosts_of_one_address_leave_registrants_to_others() {
    let admission =
        AdmissionLimits { registrants_per_address_max: 2, ..AdmissionLimits::default_for(64) };
    let limits =
        ServiceLimits { admission: Some(admission), connections_max: 64, ..service_limits() };
    let name = |number: u8| format!("nqn.2014-08.org.example:{number}");
    for is_listed in [false, true] {
        let mut rig = TestTarget::with_options(
            ServiceLimits { memory_bytes: 16 << 20, ..limits },
            |config| match is_listed {
                true => SubsystemExportConfig {
                    hosts: AllowedHosts::Listed((0..9).map(name).collect()),
                    ..config
                },
                false => config,
            },
        );
        let mut register = |number: u8, peer: &str| {
            rig.traits.peer = Some(peer.parse().unwrap());
            let name = Ascii::nul_padded(&name(number));
            let data =
                |cntlid| connect_data(cntlid).with(|data| data.hostnqn(name).hostid([number; 16]));
            let admin = rig.open_connection(admin_config());
            let connected = rig.execute_connect(admin, &admin_connect(), &data(CNTLID_DYNAMIC));
            let cntlid = u16::try_from(connected.dw0()).unwrap();
            rig.set_property(admin, offset::CC, ENABLED);
            let io = rig.open_connection(io_config());
            rig.execute_connect(io, &io_connect(1), &data(cntlid));
            let keys = [[0; 8], [7; 8]].concat();
            let command = Command::new(IoOpcode::ReservationRegister.code()).with_nsid(1);
            rig.execute_command(io, &command, DataDirection::FromHost(16), &keys)
                .0
                .status()
                .without_crd_more_dnr()
        };
        for number in 1..=2 {
            assert_eq!(register(number, "192.0.2.1:1000"), Status::SUCCESS);
        }
        let third = if is_listed { Status::SUCCESS } else { Status::NOT_ENOUGH_RESOURCES };
        assert_eq!(register(3, "192.0.2.1:2000"), third);
        assert_eq!(register(4, "192.0.2.2:1000"), Status::SUCCESS);
    }
}

#[test]
fn one_host_cannot_use_all_connections() {
    let admission = Some(AdmissionLimits { per_host_max: 2, ..AdmissionLimits::default_for(16) });
    let mut rig =
        TestTarget::with_options(ServiceLimits { admission, ..service_limits() }, |config| config);
    let (_, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    let mine = connect_data(CNTLID_DYNAMIC);
    assert_eq!(try_connect(&mut rig, &admin_connect(), &mine), Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(rig.service.association_count(), 1, "what was refused is not kept");
    let name = Ascii::nul_padded("nqn.2014-08.org.example:other");
    let other = connect_data(CNTLID_DYNAMIC).with(|data| data.hostnqn(name).hostid([9; 16]));
    assert_eq!(try_connect(&mut rig, &admin_connect(), &other), Status::SUCCESS);
    // After a connection has ended, another one is accepted.
    rig.lines[1].pipe = None;
    rig.run_until_idle();
    rig.connect_io_queue(cntlid, 1);
}
