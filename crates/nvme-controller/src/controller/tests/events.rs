//! Asynchronous events: their recipients, and the effect of the masks.

use std::sync::Arc;

use tenmil_base::Durability;
use tenmil_wire::admin::{AsynchronousEventRequest, FirmwareCommit, GetLogPage, SetFeatures};
use tenmil_wire::admin::{CommitAction, FirmwareImageDownload};
use tenmil_wire::feature::Feature;
use tenmil_wire::log::LogPage;
use tenmil_wire::{Status, TypedCommand};

use super::fixture::{ControllerFixture, EVERYTHING, FakeBlockDevice, completed_result};
use crate::controller::transport_interface::{AdminOutcome, InvalidDoorbell};
use crate::controller::{
    AnaState, ControllerConfig, NamespaceConfig, SensorReadings, firmware_image,
};

fn fixture_with_event_request(bits: u32) -> ControllerFixture {
    let mut bench = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        |config| config.ana_groups = 2,
        ControllerConfig::default(),
    );
    enable_events(&mut bench, bits);
    submit_event_request(&mut bench);
    bench
}

fn enable_events(bench: &mut ControllerFixture, bits: u32) {
    let fid = Feature::AsynchronousEventConfiguration.code();
    bench.run_without_data(SetFeatures { fid, cdw11: bits, ..SetFeatures::default() }).unwrap();
}

fn submit_event_request(bench: &mut ControllerFixture) {
    let step = bench.submit(&AsynchronousEventRequest {}.to_command(), &[]).0;
    assert_eq!(step, AdminOutcome::AsyncEvent);
}

fn next_event_dword(bench: &mut ControllerFixture) -> Option<u32> {
    bench.poll_times(1);
    bench.controller.next_async_event_dword0()
}

/// Reads the whole page; the caller chooses whether the event is retained.
fn read_log_page(bench: &mut ControllerFixture, page: LogPage, rae: bool) {
    bench.run_for_data(GetLogPage { rae, ..GetLogPage::new(page.code(), 4096) }).unwrap();
}

const WELL: SensorReadings = SensorReadings {
    temperature_kelvin: 310,
    spare_percent: 100,
    used_percent: 0,
    is_unreliable: false,
    is_read_only: false,
};

#[test]
fn event_requests_are_held_up_to_the_limit() {
    let mut bench = ControllerFixture::new();
    for _ in 0..4 {
        submit_event_request(&mut bench);
    }
    let fifth = bench.submit(&AsynchronousEventRequest {}.to_command(), &[]).0;
    assert_eq!(completed_result(fifth), Err(Status::AER_LIMIT_EXCEEDED));
    bench.controller.note_event_request_aborted();
    submit_event_request(&mut bench);
    bench.controller.reset(bench.now);
    for _ in 0..4 {
        submit_event_request(&mut bench);
    }
}

#[test]
fn health_warning_is_reported_only_if_enabled() {
    let warnings = [
        (1 << 0, SensorReadings { spare_percent: 9, ..WELL }, 0x2_0201),
        (1 << 1, SensorReadings { temperature_kelvin: 343, ..WELL }, 0x2_0101),
        (1 << 2, SensorReadings { is_unreliable: true, ..WELL }, 0x2_0001),
        (1 << 3, SensorReadings { is_read_only: true, ..WELL }, 0x2_0001),
    ];
    for (bit, sensors, expected) in warnings {
        for configured in [1 << 0, 1 << 1, 1 << 2, 1 << 3] {
            let mut bench = fixture_with_event_request(configured);
            bench.controller.set_sensor_readings(bench.now, sensors);
            let reported = (configured == bit).then_some(expected);
            assert_eq!(next_event_dword(&mut bench), reported, "{sensors:?} with {configured:#x}");
        }
    }
}

#[test]
fn lowering_the_temperature_threshold_warns_immediately() {
    let mut bench = fixture_with_event_request(1 << 1);
    let fid = Feature::TemperatureThreshold.code();
    bench.run_without_data(SetFeatures { fid, cdw11: 310, ..SetFeatures::default() }).unwrap();
    assert_eq!(next_event_dword(&mut bench), Some(0x2_0101));
}

#[test]
fn error_events_cannot_be_disabled() {
    for (doorbell, expected) in
        [(InvalidDoorbell::Register, 0x1_0000), (InvalidDoorbell::Value, 0x1_0100)]
    {
        let mut bench = fixture_with_event_request(0);
        bench.controller.record_invalid_doorbell(bench.now, doorbell);
        assert_eq!(next_event_dword(&mut bench), Some(expected));
    }
}

#[test]
fn namespace_change_notifies_attached_controllers_that_enabled_it() {
    for (bits, expected) in [(1 << 8, Some(0x4_0002)), (0, None)] {
        let mut bench = fixture_with_event_request(bits);
        let more = NamespaceConfig::new(Arc::new(FakeBlockDevice::new()));
        bench.subsystem.add_namespace(more).unwrap();
        assert_eq!(next_event_dword(&mut bench), expected);
    }
    let mut bench = fixture_with_event_request(1 << 8);
    let hidden = NamespaceConfig {
        is_attached: false,
        ..NamespaceConfig::new(Arc::new(FakeBlockDevice::new()))
    };
    bench.subsystem.add_namespace(hidden).unwrap();
    assert_eq!(next_event_dword(&mut bench), None, "it is not attached");
    bench.subsystem.remove_namespace(1);
    assert_eq!(next_event_dword(&mut bench), Some(0x4_0002));
}

/// A host that scans meanwhile finds the namespace all the time.
#[test]
fn replaced_device_is_announced_only_if_the_size_changes() {
    let mut bench = fixture_with_event_request(1 << 8);
    let same = Arc::new(FakeBlockDevice::new());
    assert!(bench.subsystem.replace_namespace_device(1, same));
    assert_eq!(next_event_dword(&mut bench), None);
    let smaller =
        Arc::new(FakeBlockDevice::with_geometry(512, 8, &EVERYTHING, Durability::VolatileCache));
    let before = bench.subsystem.lock_state().records[&1].identity;
    assert!(bench.subsystem.replace_namespace_device(1, smaller));
    assert_eq!(next_event_dword(&mut bench), Some(0x4_0002));
    let state = bench.subsystem.lock_state();
    assert_eq!((state.records[&1].identity, state.records[&1].block_count()), (before, 8));
    drop(state);
    assert!(!bench.subsystem.replace_namespace_device(9, Arc::new(FakeBlockDevice::new())));
}

#[test]
fn ana_and_firmware_changes_have_their_own_notices() {
    for (bits, expected) in [(1 << 11, Some(0xc_0302)), (0, None)] {
        let mut bench = fixture_with_event_request(bits);
        bench.subsystem.set_ana_state(1, 1, AnaState::Inaccessible);
        assert_eq!(next_event_dword(&mut bench), expected);
    }
    for (bits, expected) in [(1 << 9, Some(0x3_0102)), (0, None)] {
        let mut bench = fixture_with_event_request(bits);
        let image = firmware_image("2.0");
        let download = FirmwareImageDownload { numd: 1023, ofst: 0 };
        bench.run_with_data(download, &image).unwrap();
        let commit =
            FirmwareCommit { fs: 2, ca: CommitAction::ActivateNow, ..FirmwareCommit::default() };
        bench.run_without_data(commit).unwrap();
        assert_eq!(next_event_dword(&mut bench), expected);
    }
}

#[test]
fn event_is_reported_once_until_its_log_page_is_read() {
    let mut bench = fixture_with_event_request(1 << 8);
    let change = |bench: &ControllerFixture| {
        let more = NamespaceConfig::new(Arc::new(FakeBlockDevice::new()));
        bench.subsystem.add_namespace(more).unwrap();
    };
    change(&bench);
    assert!(next_event_dword(&mut bench).is_some());
    submit_event_request(&mut bench);
    change(&bench);
    assert_eq!(next_event_dword(&mut bench), None, "masked");
    read_log_page(&mut bench, LogPage::ChangedNamespaces, true);
    assert_eq!(next_event_dword(&mut bench), None, "retained");
    read_log_page(&mut bench, LogPage::Health, false);
    assert_eq!(next_event_dword(&mut bench), None, "another page");
    read_log_page(&mut bench, LogPage::ChangedNamespaces, false);
    assert_eq!(next_event_dword(&mut bench), None, "it was read of, too");
    change(&bench);
    assert!(next_event_dword(&mut bench).is_some(), "armed again");
}
