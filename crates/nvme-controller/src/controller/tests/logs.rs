//! Log pages: the supported ones, their contents, and all ways to read a part.

use std::sync::Arc;

use tenmil_base::Span;
use tenmil_wire::admin::{GetLogPage, Identify};
use tenmil_wire::identify::{Cns, IdentifyController};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::ana::{AnaState as ReportedState, parse_ana_groups};
use tenmil_wire::log::effects::{CommandsEffects, FeaturesEffects, SupportedLogPages};
use tenmil_wire::log::error_information::error_entries;
use tenmil_wire::log::firmware::{TelemetryController, TelemetryHost};
use tenmil_wire::log::health::HealthInformation;
use tenmil_wire::{Command, Layout, Status, TypedCommand};

use super::fixture::{ControllerFixture, FakeBlockDevice, completed_result};
use crate::controller::transport_interface::{ErrorReport, InvalidDoorbell, IoTotals};
use crate::controller::{
    AnaState, ControllerConfig, NamespaceConfig, SensorReadings, SubsystemConfig,
};

const INVALID: Status = Status::INVALID_FIELD;

fn fixture_with_two_namespaces_and_ana() -> ControllerFixture {
    let change = |config: &mut SubsystemConfig| config.ana_groups = 2;
    ControllerFixture::with_config(
        vec![FakeBlockDevice::new(), FakeBlockDevice::new()],
        change,
        ControllerConfig::default(),
    )
}

fn log_page(bench: &mut ControllerFixture, page: LogPage, len_bytes: u32) -> Vec<u8> {
    bench.run_for_data(GetLogPage { rae: true, ..GetLogPage::new(page.code(), len_bytes) }).unwrap()
}

fn error_report(status: Status) -> ErrorReport {
    ErrorReport { sqid: 1, cid: 5, opcode: 2, status, lba: 9, nsid: 1 }
}

#[test]
fn supported_log_pages_match_the_readable_pages() {
    let mut rich = fixture_with_two_namespaces_and_ana();
    let mut poor = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        |config| config.reservations = false,
        ControllerConfig::default(),
    );
    let common = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x12];
    for (bench, more) in [(&mut rich, &[0x0c, 0x80][..]), (&mut poor, &[])] {
        let bytes = log_page(bench, LogPage::SupportedLogPages, 1024);
        let listed = SupportedLogPages::parse(&bytes).unwrap();
        for lid in 0..=255_u8 {
            let expected = common.contains(&lid) || more.contains(&lid);
            assert_eq!(listed.lid(lid.into()).unwrap().lsupp(), expected, "{lid:#04x}");
            let read = bench.run_for_data(GetLogPage { rae: true, ..GetLogPage::new(lid, 512) });
            let refused = read.err();
            assert_eq!(refused, (!expected).then_some(Status::INVALID_LOG_PAGE), "{lid:#04x}");
        }
    }
}

/// Reads in pieces and at once return the same data, wherever the pieces begin.
#[test]
fn every_log_page_can_be_read_at_every_offset() {
    let mut bench = fixture_with_two_namespaces_and_ana();
    bench.controller.record_error_completion(bench.now, &error_report(Status::LBA_OUT_OF_RANGE));
    let lengths = [
        (LogPage::SupportedLogPages, 1024),
        (LogPage::ErrorInformation, 64 * 64),
        (LogPage::Health, 512),
        (LogPage::FirmwareSlot, 512),
        (LogPage::ChangedNamespaces, 4096),
        (LogPage::CommandEffects, 4096),
        (LogPage::SelfTest, 564),
        (LogPage::Ana, 16 + 2 * 32 + 1024 * 4),
        (LogPage::FeatureEffects, 1024),
        (LogPage::ReservationNotification, 64),
    ];
    for (lid, length) in lengths {
        let whole = log_page(&mut bench, lid, length);
        for offset in (0..=length).step_by(4) {
            let ask =
                GetLogPage { rae: true, lpo: offset.into(), ..GetLogPage::new(lid.code(), 68) };
            let part = bench.run_for_data(ask).unwrap();
            let inside = (length - offset).min(68) as usize;
            let expected = &whole[offset as usize..offset as usize + inside];
            assert_eq!(&part[..inside], expected, "{lid:?} at {offset}");
            assert!(part[inside..].iter().all(|&byte| byte == 0), "zeroes behind the end");
        }
        for lpo in [u64::from(length) + 4, u64::MAX - 3] {
            let ask = GetLogPage { lpo, ..GetLogPage::new(lid.code(), 4) };
            assert_eq!(bench.run_for_data(ask), Err(INVALID), "{lid:?} at {lpo:#x}");
        }
        for lpo in 1..4 {
            let ask = GetLogPage { lpo, ..GetLogPage::new(lid.code(), 4) };
            assert_eq!(bench.run_for_data(ask), Err(INVALID), "{lid:?}: dwords only");
        }
    }
}

#[test]
fn log_page_length_scope_and_offset_type_are_checked() {
    let mut bench = fixture_with_two_namespaces_and_ana();
    let health = LogPage::Health.code();
    let longest = GetLogPage::new(health, 1 << 20);
    assert_eq!(bench.run_for_data(longest).unwrap().len(), 1 << 20, "MDTS");
    let cases = [
        (GetLogPage::new(health, (1 << 20) + 4), INVALID),
        (GetLogPage { numd: u32::MAX, ..longest }, INVALID),
        (GetLogPage { ot: true, ..GetLogPage::new(health, 4) }, INVALID),
        (GetLogPage { nsid: 1, ..GetLogPage::new(health, 4) }, INVALID),
        (GetLogPage { csi: 1, ..GetLogPage::new(LogPage::CommandEffects.code(), 4) }, INVALID),
    ];
    for (ask, status) in cases {
        assert_eq!(bench.run_for_data(ask), Err(status), "{ask:?}");
    }
    let all = GetLogPage { nsid: u32::MAX, ..GetLogPage::new(health, 4) };
    assert!(bench.run_for_data(all).is_ok());
}

#[test]
fn error_log_is_newest_first_and_bounded() {
    let config = ControllerConfig { error_entries: 3, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![], |_| {}, config);
    assert_eq!(error_entries(&log_page(&mut bench, LogPage::ErrorInformation, 192)).count(), 0);
    let statuses = [Status::LBA_OUT_OF_RANGE, Status::WRITE_FAULT, INVALID.with_dnr()];
    for status in statuses {
        bench.controller.record_error_completion(bench.now, &error_report(status));
    }
    bench.controller.record_invalid_doorbell(bench.now, InvalidDoorbell::Value);
    let bytes = log_page(&mut bench, LogPage::ErrorInformation, 192);
    let found: Vec<_> = error_entries(&bytes).collect();
    let counts: Vec<u64> = found.iter().map(|entry| entry.error_count()).collect();
    assert_eq!(counts, [4, 3, 2]);
    assert_eq!((found[0].sqid(), found[0].cid()), (0xffff, 0xffff), "no command is to category");
    let third = &found[1];
    assert_eq!((third.sqid(), third.cid(), third.opcode()), (1, 5, 2));
    assert_eq!((third.status(), third.lba(), third.nsid()), (INVALID.with_dnr(), 9, 1));
}

#[test]
fn health_log_accumulates_transport_counters() {
    let mut bench = ControllerFixture::new();
    let traffic = IoTotals {
        read_bytes: 1 << 20,
        written_bytes: 512_000,
        read_commands: 3,
        write_commands: 4,
        busy: Span::from_secs(120),
    };
    bench.controller.add_io_totals(&traffic);
    bench
        .controller
        .record_error_completion(bench.now, &error_report(Status::UNRECOVERED_READ_ERROR));
    bench.controller.record_error_completion(bench.now, &error_report(INVALID));
    let sensors = SensorReadings {
        temperature_kelvin: 353,
        spare_percent: 5,
        used_percent: 7,
        is_unreliable: false,
        is_read_only: true,
    };
    bench.controller.set_sensor_readings(bench.now, sensors);
    bench.advance_time(Span::from_secs(7200));
    let health = HealthInformation::parse(&log_page(&mut bench, LogPage::Health, 512)).unwrap();
    assert_eq!((health.data_units_read(), health.data_units_written()), (3, 1));
    assert_eq!((health.host_read_commands(), health.host_write_commands()), (3, 4));
    assert_eq!((health.controller_busy_minutes(), health.power_on_hours()), (2, 2));
    assert_eq!((health.media_errors(), health.error_log_entries()), (1, 2));
    assert_eq!((health.composite_temperature(), health.available_spare()), (353, 5));
    assert_eq!((health.percentage_used(), health.critical_warning().0), (7, 0b1011));
    assert_eq!(health.warning_temperature_minutes(), 120);
    assert_eq!(health.critical_temperature_minutes(), 120);
    assert_eq!(health.power_cycles(), 1);
}

#[test]
fn unsafe_shutdowns_are_counted() {
    let mut bench = ControllerFixture::new();
    let health = |bench: &mut ControllerFixture| {
        let page = HealthInformation::parse(&log_page(bench, LogPage::Health, 512)).unwrap();
        (page.power_cycles(), page.unexpected_power_losses())
    };
    bench.subsystem.emulate_power_cycle();
    assert_eq!(health(&mut bench), (2, 0), "no controller was in use");
    bench.subsystem.emulate_power_cycle();
    assert_eq!(health(&mut bench), (3, 1));
    bench.controller.note_host_shutdown();
    bench.subsystem.emulate_power_cycle();
    assert_eq!(health(&mut bench), (4, 1));
}

#[test]
fn changed_namespace_list_overflow_is_ffffffff() {
    let change = |config: &mut SubsystemConfig| config.nsid_max = 2000;
    let mut bench = ControllerFixture::with_config(vec![], change, ControllerConfig::default());
    for _ in 0..1025 {
        let more = NamespaceConfig::new(Arc::new(FakeBlockDevice::new()));
        bench.subsystem.add_namespace(more).unwrap();
    }
    bench.poll_times(1);
    let bytes = log_page(&mut bench, LogPage::ChangedNamespaces, 4096);
    assert_eq!((&bytes[..4], &bytes[4..8]), (&[0xff; 4][..], &[0; 4][..]));
}

#[test]
fn command_effects_log_lists_exactly_the_supported_opcodes() {
    let mut bench = ControllerFixture::new();
    let bytes = log_page(&mut bench, LogPage::CommandEffects, 4096);
    let effects = CommandsEffects::parse(&bytes).unwrap();
    for opcode in 0..=255_u8 {
        let step = bench.submit(&Command::new(opcode), &[]).0;
        let unknown = matches!(step, super::super::transport_interface::AdminOutcome::Done(end)
            if end.status.has_same_code_as(Status::INVALID_OPCODE));
        assert_eq!(effects.acs(opcode.into()).unwrap().csupp(), !unknown, "{opcode:#04x}");
    }
    let io: Vec<usize> = (0..256).filter(|&opcode| effects.iocs(opcode).unwrap().csupp()).collect();
    assert_eq!(io, [0, 1, 2, 4, 5, 8, 9, 0x0c, 0x0d, 0x0e, 0x11, 0x15, 0x19]);
    let format = effects.acs(0x80).unwrap();
    assert!(format.lbcc() && format.ncc() && format.scope_namespace());
    assert!(effects.iocs(1).unwrap().lbcc() && !effects.iocs(2).unwrap().lbcc());
}

#[test]
fn feature_effects_log_reports_the_scope() {
    let mut bench = ControllerFixture::new();
    let effects =
        FeaturesEffects::parse(&log_page(&mut bench, LogPage::FeatureEffects, 1024)).unwrap();
    let of = |fid: usize| {
        let entry = effects.fid(fid).unwrap();
        (entry.fsupp(), entry.scope_namespace(), entry.scope_controller())
    };
    assert_eq!((of(0x01), of(0x84)), ((true, false, true), (true, true, false)));
    assert_eq!(of(0x03), (false, false, false));
}

#[test]
fn telemetry_data_is_stable_until_the_next_capture() {
    let mut bench = ControllerFixture::new();
    let host = LogPage::TelemetryHost.code();
    let ask = |lsp| GetLogPage { lsp, ..GetLogPage::new(host, 1024) };
    let header = |bytes: &[u8]| {
        let header = TelemetryHost::parse(bytes).unwrap();
        (header.da1lb(), header.da3lb(), header.thdgn())
    };
    assert_eq!(header(&bench.run_for_data(ask(0)).unwrap()), (0, 0, 0), "none yet");
    let first = bench.run_for_data(ask(1)).unwrap();
    assert_eq!(header(&first), (1, 1, 1));
    assert!(first[512..].starts_with(b"subsystem nqn.2026-01.org.tenmil:T1\nserial T1\n"));
    bench.controller.record_error_completion(bench.now, &error_report(INVALID));
    assert_eq!(bench.run_for_data(ask(0)).unwrap(), first, "the same picture");
    let second = bench.run_for_data(ask(1)).unwrap();
    assert_ne!(second[512..], first[512..]);
    let tail = GetLogPage { lpo: 512, ..GetLogPage::new(host, 512) };
    assert_eq!(bench.run_for_data(tail).unwrap(), second[512..]);
    for bad in [
        GetLogPage { lpo: 4, ..ask(0) },
        GetLogPage { lpo: 256, ..ask(0) },
        GetLogPage { lpo: 512, ..ask(1) },
    ] {
        assert_eq!(bench.run_for_data(bad), Err(INVALID), "{bad:?}");
    }
    let bytes = log_page(&mut bench, LogPage::TelemetryController, 512);
    let header = TelemetryController::parse(&bytes).unwrap();
    assert_eq!((header.lid(), header.da1lb(), header.tcda()), (8, 0, 0));
}

#[test]
fn ana_log_reports_states_per_group() {
    let mut bench = fixture_with_two_namespaces_and_ana();
    let reported_values = |bench: &mut ControllerFixture, lsp| {
        let ask = GetLogPage { lsp, ..GetLogPage::new(LogPage::Ana.code(), 4096) };
        let bytes = bench.run_for_data(ask).unwrap();
        parse_ana_groups(&bytes)
            .map(|(group, nsids)| (group.grpid(), group.state(), nsids.collect::<Vec<_>>()))
            .collect::<Vec<_>>()
    };
    let optimized = ReportedState::Optimized;
    // Group 2 has no namespace.
    assert_eq!(reported_values(&mut bench, 0), [(1, optimized, vec![1, 2])]);
    assert_eq!(reported_values(&mut bench, 1), [(1, optimized, vec![])]);
    let states = [
        (AnaState::NonOptimized, ReportedState::NonOptimized),
        (AnaState::Inaccessible, ReportedState::Inaccessible),
        (AnaState::PersistentLoss, ReportedState::PersistentLoss),
        (AnaState::Change, ReportedState::Change),
    ];
    for (set, reported) in states {
        bench.subsystem.set_ana_state(1, 1, set);
        assert_eq!(reported_values(&mut bench, 1), [(1, reported, vec![])]);
    }
}

#[test]
fn identify_controller_reports_the_error_log_length() {
    let config = ControllerConfig { error_entries: 5, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![], |_| {}, config);
    let identify = Identify { cns: Cns::Controller.code(), ..Identify::default() };
    let bytes = bench.run_for_data(identify).unwrap();
    assert_eq!(IdentifyController::parse(&bytes).unwrap().elpe(), 4);
    let beyond = GetLogPage { lpo: 5 * 64 + 4, ..GetLogPage::new(1, 4) };
    assert_eq!(completed_result(bench.submit(&beyond.to_command(), &[]).0), Err(INVALID));
}
