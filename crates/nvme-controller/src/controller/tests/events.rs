//! Asynchronous events: their recipients, and the effect of the masks.

use std::sync::Arc;

use tenmil_wire::admin::{AsynchronousEventRequest, FirmwareCommit, GetLogPage, SetFeatures};
use tenmil_wire::admin::{CommitAction, FirmwareImageDownload};
use tenmil_wire::feature::Feature;
use tenmil_wire::log::LogPage;
use tenmil_wire::{Status, TypedCommand};

use super::bench::{Bench, Shelf, ended};
use crate::controller::interface::{AdminOutcome, InvalidDoorbell};
use crate::controller::{
    AnaState, ControllerConfig, NamespaceConfig, SensorReadings, firmware_image,
};

fn listening(bits: u32) -> Bench {
    let mut bench = Bench::with(
        vec![Shelf::new()],
        |config| config.ana_groups = 2,
        ControllerConfig::default(),
    );
    configure(&mut bench, bits);
    park(&mut bench);
    bench
}

fn configure(bench: &mut Bench, bits: u32) {
    let fid = Feature::AsynchronousEventConfiguration.code();
    bench.run(SetFeatures { fid, cdw11: bits, ..SetFeatures::default() }).unwrap();
}

fn park(bench: &mut Bench) {
    let step = bench.step(&AsynchronousEventRequest {}.to_command(), &[]).0;
    assert_eq!(step, AdminOutcome::AsyncEvent);
}

fn next(bench: &mut Bench) -> Option<u32> {
    bench.turns(1);
    bench.controller.next_event()
}

/// Reads the whole page; the caller chooses whether the event is retained.
fn read(bench: &mut Bench, page: LogPage, rae: bool) {
    bench.get(GetLogPage { rae, ..GetLogPage::new(page.code(), 4096) }).unwrap();
}

const WELL: SensorReadings = SensorReadings {
    temperature_kelvin: 310,
    spare_percent: 100,
    used_percent: 0,
    is_unreliable: false,
    is_read_only: false,
};

#[test]
fn requests_are_parked_up_to_the_limit() {
    let mut bench = Bench::new();
    for _ in 0..4 {
        park(&mut bench);
    }
    let fifth = bench.step(&AsynchronousEventRequest {}.to_command(), &[]).0;
    assert_eq!(ended(fifth), Err(Status::AER_LIMIT_EXCEEDED));
    bench.controller.event_request_aborted();
    park(&mut bench);
    bench.controller.reset(bench.now);
    for _ in 0..4 {
        park(&mut bench);
    }
}

#[test]
fn each_warning_is_told_if_its_bit_is_set_and_only_then() {
    let warnings = [
        (1 << 0, SensorReadings { spare_percent: 9, ..WELL }, 0x2_0201),
        (1 << 1, SensorReadings { temperature_kelvin: 343, ..WELL }, 0x2_0101),
        (1 << 2, SensorReadings { is_unreliable: true, ..WELL }, 0x2_0001),
        (1 << 3, SensorReadings { is_read_only: true, ..WELL }, 0x2_0001),
    ];
    for (bit, sensors, expected) in warnings {
        for configured in [1 << 0, 1 << 1, 1 << 2, 1 << 3] {
            let mut bench = listening(configured);
            bench.controller.set_sensor_readings(bench.now, sensors);
            let told = (configured == bit).then_some(expected);
            assert_eq!(next(&mut bench), told, "{sensors:?} with {configured:#x}");
        }
    }
}

#[test]
fn a_threshold_moved_below_the_temperature_warns_at_once() {
    let mut bench = listening(1 << 1);
    let fid = Feature::TemperatureThreshold.code();
    bench.run(SetFeatures { fid, cdw11: 310, ..SetFeatures::default() }).unwrap();
    assert_eq!(next(&mut bench), Some(0x2_0101));
}

#[test]
fn errors_cannot_be_masked_by_configuration() {
    for (doorbell, expected) in
        [(InvalidDoorbell::Register, 0x1_0000), (InvalidDoorbell::Value, 0x1_0100)]
    {
        let mut bench = listening(0);
        bench.controller.invalid_doorbell(bench.now, doorbell);
        assert_eq!(next(&mut bench), Some(expected));
    }
}

#[test]
fn a_change_of_a_namespace_is_told_to_those_who_have_it_and_want_to_hear() {
    for (bits, expected) in [(1 << 8, Some(0x4_0002)), (0, None)] {
        let mut bench = listening(bits);
        let more = NamespaceConfig::new(Arc::new(Shelf::new()));
        bench.subsystem.add_namespace(more).unwrap();
        assert_eq!(next(&mut bench), expected);
    }
    let mut bench = listening(1 << 8);
    let hidden =
        NamespaceConfig { is_attached: false, ..NamespaceConfig::new(Arc::new(Shelf::new())) };
    bench.subsystem.add_namespace(hidden).unwrap();
    assert_eq!(next(&mut bench), None, "it is not attached");
    bench.subsystem.remove_namespace(1);
    assert_eq!(next(&mut bench), Some(0x4_0002));
}

#[test]
fn access_states_and_firmware_have_notices_of_their_own() {
    for (bits, expected) in [(1 << 11, Some(0xc_0302)), (0, None)] {
        let mut bench = listening(bits);
        bench.subsystem.set_ana_state(1, 1, AnaState::Inaccessible);
        assert_eq!(next(&mut bench), expected);
    }
    for (bits, expected) in [(1 << 9, Some(0x3_0102)), (0, None)] {
        let mut bench = listening(bits);
        let image = firmware_image("2.0");
        let download = FirmwareImageDownload { numd: 1023, ofst: 0 };
        bench.send(download, &image).unwrap();
        let commit =
            FirmwareCommit { fs: 2, ca: CommitAction::ActivateNow, ..FirmwareCommit::default() };
        bench.run(commit).unwrap();
        assert_eq!(next(&mut bench), expected);
    }
}

#[test]
fn an_event_is_told_once_until_its_page_is_read_without_retaining_it() {
    let mut bench = listening(1 << 8);
    let change = |bench: &Bench| {
        let more = NamespaceConfig::new(Arc::new(Shelf::new()));
        bench.subsystem.add_namespace(more).unwrap();
    };
    change(&bench);
    assert!(next(&mut bench).is_some());
    park(&mut bench);
    change(&bench);
    assert_eq!(next(&mut bench), None, "masked");
    read(&mut bench, LogPage::ChangedNamespaces, true);
    assert_eq!(next(&mut bench), None, "retained");
    read(&mut bench, LogPage::Health, false);
    assert_eq!(next(&mut bench), None, "another page");
    read(&mut bench, LogPage::ChangedNamespaces, false);
    assert_eq!(next(&mut bench), None, "it was read of, too");
    change(&bench);
    assert!(next(&mut bench).is_some(), "armed again");
}
