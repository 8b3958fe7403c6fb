//! Get and Set Features: capabilities, values, rejected commands, and the effects on the transport.

use tenmil_base::{Durability, Span};
use tenmil_wire::admin::{FeatureSelect, GetFeatures, Identify, SetFeatures};
use tenmil_wire::feature::Feature;
use tenmil_wire::{Status, TypedCommand};

use super::fixture::{ControllerFixture, EVERYTHING, FakeBlockDevice, completed_result};
use crate::controller::features::FEATURES;
use crate::controller::transport_interface::{AdminOutcome, Arbitration, IoQueueCoalescing};
use crate::controller::{ControllerConfig, HostIdentity, TransportModel};

const INVALID: Status = Status::INVALID_FIELD;

fn set_feature_command(feature: Feature, cdw11: u32) -> SetFeatures {
    SetFeatures { fid: feature.code(), cdw11, ..SetFeatures::default() }
}

fn get_feature_command(feature: Feature, sel: FeatureSelect) -> GetFeatures {
    GetFeatures { fid: feature.code(), sel, ..GetFeatures::default() }
}

/// DW0 and data of a Get Features command.
fn read_feature_data(
    bench: &mut ControllerFixture,
    get: GetFeatures,
) -> Result<(u32, Vec<u8>), Status> {
    let (step, data) = bench.submit(&get.to_command(), &[]);
    completed_result(step).map(|dword| (dword, data))
}

fn current_feature_dword(bench: &mut ControllerFixture, feature: Feature) -> u32 {
    read_feature_data(bench, get_feature_command(feature, FeatureSelect::Current)).unwrap().0
}

#[test]
fn feature_capabilities_match_set_features_results() {
    for rule in FEATURES {
        let mut bench = ControllerFixture::new();
        let nsid = u32::from(rule.is_per_namespace);
        let ask = GetFeatures {
            nsid,
            ..get_feature_command(rule.feature, FeatureSelect::SupportedCapabilities)
        };
        let (dword, data) = read_feature_data(&mut bench, ask).unwrap();
        assert!(data.is_empty(), "{:?}", rule.feature);
        assert_eq!(dword & 0b100, 0b100, "changeable");
        assert_eq!(dword & 0b010 != 0, rule.is_per_namespace);

        let save = SetFeatures { sv: true, nsid, ..set_feature_command(rule.feature, 0) };
        let saved = bench.run_with_data(save, &[]);
        if dword & 1 != 0 {
            assert_eq!(saved, Ok(0), "{:?}", rule.feature);
        } else {
            assert_eq!(saved, Err(Status::FEATURE_NOT_SAVEABLE), "{:?}", rule.feature);
        }
        let wrong = if rule.is_per_namespace { 0 } else { 1 };
        let expected = if rule.is_per_namespace {
            Status::INVALID_NAMESPACE_OR_FORMAT
        } else {
            Status::FEATURE_NOT_NAMESPACE_SPECIFIC
        };
        let misplaced = SetFeatures { nsid: wrong, ..set_feature_command(rule.feature, 0) };
        assert_eq!(bench.run_with_data(misplaced, &[]), Err(expected), "{:?}", rule.feature);
    }
}

/// Behavior of tools that are given a block device: they name its namespace with every feature.
#[test]
fn nsid_is_ignored_for_controller_features() {
    for rule in FEATURES.into_iter().filter(|rule| !rule.is_per_namespace) {
        let mut bench = ControllerFixture::new();
        for sel in [FeatureSelect::Current, FeatureSelect::Default, FeatureSelect::Saved] {
            let of_all =
                read_feature_data(&mut bench, get_feature_command(rule.feature, sel)).unwrap();
            for nsid in [1, 77, u32::MAX] {
                let of_one = GetFeatures { nsid, ..get_feature_command(rule.feature, sel) };
                assert_eq!(
                    read_feature_data(&mut bench, of_one).unwrap(),
                    of_all,
                    "{:?}",
                    rule.feature
                );
            }
        }
    }
}

#[test]
fn unsupported_feature_is_an_invalid_field() {
    let mut bench = ControllerFixture::new();
    for fid in 0..=255 {
        let known = FEATURES.iter().any(|rule| rule.feature.code() == fid);
        let sel = FeatureSelect::SupportedCapabilities;
        let ask = GetFeatures { fid, sel, nsid: 0, ..GetFeatures::default() };
        let answer = bench.run_for_data(ask);
        if !known {
            assert_eq!(answer, Err(INVALID), "{fid:#04x}");
            let set = SetFeatures { fid, ..SetFeatures::default() };
            assert_eq!(bench.run_with_data(set, &[]), Err(INVALID), "{fid:#04x}");
        }
    }
    let stable = FakeBlockDevice::with_block_size(512, &EVERYTHING, Durability::Persistent);
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 64,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench =
        ControllerFixture::with_config(vec![stable], |config| config.reservations = false, config);
    for feature in [
        Feature::VolatileWriteCache,
        Feature::InterruptCoalescing,
        Feature::InterruptVectorConfiguration,
        Feature::ReservationNotificationMask,
        Feature::ReservationPersistence,
    ] {
        assert_eq!(
            bench.run_without_data(set_feature_command(feature, 0)),
            Err(INVALID),
            "{feature:?}"
        );
    }
}

#[test]
fn reserved_feature_selector_is_rejected() {
    let mut bench = ControllerFixture::new();
    for code in 4..8 {
        let sel = FeatureSelect::Reserved(code);
        assert_eq!(
            bench.run_for_data(get_feature_command(Feature::Arbitration, sel)),
            Err(INVALID)
        );
    }
}

/// Current, default and saved value are separate, and a reset restores the saved one.
#[test]
fn saved_feature_values_survive_a_reset() {
    let cases = [
        (Feature::Arbitration, 7, 0x0102_0303, 0x0908_0702),
        (Feature::TemperatureThreshold, 343, 300, 301),
        (Feature::VolatileWriteCache, 1, 0, 1),
        (Feature::InterruptCoalescing, 0, 0x0102, 0x0304),
        (Feature::WriteAtomicity, 0, 1, 0),
        (Feature::AsynchronousEventConfiguration, 0, 0x30f, 0x100),
        (Feature::SoftwareProgressMarker, 0, 3, 4),
        (Feature::PowerManagement, 0, 1, 2),
    ];
    for (feature, default, first, second) in cases {
        let mut bench = ControllerFixture::new();
        let read = |bench: &mut ControllerFixture, sel| {
            read_feature_data(bench, get_feature_command(feature, sel)).unwrap().0
        };
        assert_eq!(read(&mut bench, FeatureSelect::Current), default, "{feature:?}");
        bench
            .run_without_data(SetFeatures { sv: true, ..set_feature_command(feature, first) })
            .unwrap();
        bench.run_without_data(set_feature_command(feature, second)).unwrap();
        assert_eq!(read(&mut bench, FeatureSelect::Current), second, "{feature:?}");
        assert_eq!(read(&mut bench, FeatureSelect::Saved), first, "{feature:?}");
        assert_eq!(read(&mut bench, FeatureSelect::Default), default, "{feature:?}");
        bench.controller.reset(bench.now);
        assert_eq!(read(&mut bench, FeatureSelect::Current), first, "{feature:?}");
        assert_eq!(read(&mut bench, FeatureSelect::Saved), first, "{feature:?}");
    }
}

#[test]
fn invalid_feature_value_is_rejected_and_changes_nothing() {
    let cases = [
        (Feature::Arbitration, 0x08),
        (Feature::PowerManagement, 3),
        (Feature::PowerManagement, 0x100),
        (Feature::TemperatureThreshold, 1 << 16),
        (Feature::TemperatureThreshold, 2 << 20),
        (Feature::TemperatureThreshold, 1 << 22),
        (Feature::VolatileWriteCache, 2),
        (Feature::InterruptCoalescing, 0x1_0000),
        (Feature::InterruptVectorConfiguration, 129),
        (Feature::InterruptVectorConfiguration, 0x2_0000),
        (Feature::WriteAtomicity, 2),
        (Feature::AsynchronousEventConfiguration, 1 << 11),
        (Feature::AsynchronousEventConfiguration, 1 << 12),
        (Feature::AsynchronousEventConfiguration, 1 << 31),
        (Feature::SoftwareProgressMarker, 0x100),
        (Feature::AutonomousPowerStateTransition, 2),
        (Feature::HostIdentifier, 2),
    ];
    let mut bench = ControllerFixture::new();
    for (feature, dword) in cases {
        let before =
            read_feature_data(&mut bench, get_feature_command(feature, FeatureSelect::Current));
        assert_eq!(
            bench.run_without_data(set_feature_command(feature, dword)),
            Err(INVALID),
            "{feature:?} {dword:#x}"
        );
        assert_eq!(
            read_feature_data(&mut bench, get_feature_command(feature, FeatureSelect::Current)),
            before
        );
    }
    let per_namespace = [
        (Feature::ErrorRecovery, 1 << 16),
        (Feature::ReservationNotificationMask, 1),
        (Feature::ReservationNotificationMask, 1 << 4),
        (Feature::ReservationPersistence, 2),
        (Feature::NamespaceWriteProtection, 4),
        (Feature::NamespaceWriteProtection, 8),
    ];
    for (feature, dword) in per_namespace {
        let set = SetFeatures { nsid: 1, ..set_feature_command(feature, dword) };
        assert_eq!(bench.run_without_data(set), Err(INVALID), "{feature:?} {dword:#x}");
    }
}

#[test]
fn event_configuration_accepts_all_warnings_and_telemetry_notices() {
    let mut bench = ControllerFixture::new();
    let page = bench.run_for_data(Identify { cns: 1, ..Identify::default() }).unwrap();
    let oaes = u32::from_le_bytes(page[92..96].try_into().unwrap());
    assert_eq!(oaes, 0x0300, "and nothing that only the feature has");
    // The values that SPDK sends: five warnings, and telemetry since LPA announces it.
    for asked in [0x1f | 1 << 10 | oaes, 0xff | oaes] {
        bench
            .run_without_data(set_feature_command(Feature::AsynchronousEventConfiguration, asked))
            .unwrap();
        let get =
            get_feature_command(Feature::AsynchronousEventConfiguration, FeatureSelect::Current);
        assert_eq!(read_feature_data(&mut bench, get).unwrap().0, asked);
    }
}

#[test]
fn transport_reads_the_feature_values_that_were_set() {
    let mut bench = ControllerFixture::new();
    assert!(bench.controller.write_cache_enabled());
    bench.run_without_data(set_feature_command(Feature::VolatileWriteCache, 0)).unwrap();
    assert!(!bench.controller.write_cache_enabled());

    let coalescing = |us, threshold| IoQueueCoalescing { time: Span::from_us(us), threshold };
    assert_eq!(bench.controller.coalescing(), coalescing(0, 1));
    bench.run_without_data(set_feature_command(Feature::InterruptCoalescing, 0x0307)).unwrap();
    assert_eq!(bench.controller.coalescing(), coalescing(300, 8));

    bench
        .run_without_data(set_feature_command(Feature::InterruptVectorConfiguration, 5 | 1 << 16))
        .unwrap();
    assert!(bench.controller.is_coalescing_disabled(5));
    assert!(!bench.controller.is_coalescing_disabled(4));
    let vector = GetFeatures {
        cdw11: 5,
        ..get_feature_command(Feature::InterruptVectorConfiguration, FeatureSelect::Current)
    };
    assert_eq!(read_feature_data(&mut bench, vector).unwrap().0, 5 | 1 << 16);

    assert_eq!(bench.controller.arbitration().burst, None);
    bench.run_without_data(set_feature_command(Feature::Arbitration, 0x0302_0003)).unwrap();
    let expected = Arbitration { burst: Some(8), low_weight: 1, medium_weight: 3, high_weight: 4 };
    assert_eq!(bench.controller.arbitration(), expected);
}

#[test]
fn temperature_thresholds_are_set_per_sensor_or_for_all() {
    let mut bench = ControllerFixture::new();
    let threshold = |bench: &mut ControllerFixture, cdw11| {
        let get = get_feature_command(Feature::TemperatureThreshold, FeatureSelect::Current);
        read_feature_data(bench, GetFeatures { cdw11, ..get }).map(|(dword, _)| dword)
    };
    bench.run_without_data(set_feature_command(Feature::TemperatureThreshold, 350)).unwrap();
    bench
        .run_without_data(set_feature_command(Feature::TemperatureThreshold, 280 | 1 << 20))
        .unwrap();
    assert_eq!(threshold(&mut bench, 0), Ok(350));
    assert_eq!(threshold(&mut bench, 1 << 20), Ok(280));
    bench
        .run_without_data(set_feature_command(Feature::TemperatureThreshold, 360 | 0xf << 16))
        .unwrap();
    assert_eq!(threshold(&mut bench, 0), Ok(360));
    assert_eq!(threshold(&mut bench, 0xf << 16), Err(INVALID), "of all of them cannot be read");
    assert_eq!(threshold(&mut bench, 2 << 20), Err(INVALID));
}

#[test]
fn timestamp_advances_and_reports_its_origin() {
    let mut bench = ControllerFixture::new();
    let stamp = |bench: &mut ControllerFixture| {
        let get = get_feature_command(Feature::Timestamp, FeatureSelect::Current);
        let bytes: [u8; 8] = read_feature_data(bench, get).unwrap().1.try_into().unwrap();
        let word = u64::from_le_bytes(bytes);
        (word & 0xffff_ffff_ffff, word >> 49 & 7)
    };
    assert_eq!(stamp(&mut bench).1, 0, "never set");
    let ms = 1_700_000_000_000_u64;
    bench.run_with_data(set_feature_command(Feature::Timestamp, 0), &ms.to_le_bytes()).unwrap();
    assert_eq!(stamp(&mut bench), (ms, 1));
    bench.advance_time(Span::from_ms(1500));
    assert_eq!(stamp(&mut bench), (ms + 1500, 1));
}

#[test]
fn host_identifier_can_be_set_once() {
    for (extended, bytes) in [(0, 8), (1, 16)] {
        let mut bench = ControllerFixture::new();
        let id: Vec<u8> = (1..=bytes).collect();
        let other: Vec<u8> = (2..=bytes + 1).collect();
        let ask = GetFeatures {
            cdw11: extended,
            ..get_feature_command(Feature::HostIdentifier, FeatureSelect::Current)
        };
        assert_eq!(read_feature_data(&mut bench, ask).unwrap().1, vec![0; bytes.into()]);
        bench.run_with_data(set_feature_command(Feature::HostIdentifier, extended), &id).unwrap();
        assert_eq!(read_feature_data(&mut bench, ask), Ok((extended, id.clone())));
        assert_eq!(
            bench.run_with_data(set_feature_command(Feature::HostIdentifier, extended), &id),
            Ok(0),
            "the same"
        );
        let sequence = Err(Status::COMMAND_SEQUENCE_ERROR);
        assert_eq!(
            bench.run_with_data(set_feature_command(Feature::HostIdentifier, extended), &other),
            sequence
        );
        let short = GetFeatures { cdw11: 1 - extended, ..ask };
        let inconsistent = Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
        assert_eq!(read_feature_data(&mut bench, short), inconsistent);
        bench.controller.reset(bench.now);
        assert_eq!(
            bench.run_with_data(set_feature_command(Feature::HostIdentifier, extended), &other),
            Ok(0)
        );
    }
}

#[test]
fn host_identifier_lengths_cannot_be_mixed_and_fabrics_hosts_cannot_set_one() {
    let mut bench = ControllerFixture::new();
    let mut other = bench.open_second_controller(2);
    other.set_host(HostIdentity::Extended(5));
    let inconsistent = Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
    assert_eq!(
        bench.run_with_data(set_feature_command(Feature::HostIdentifier, 0), &[1; 8]),
        inconsistent
    );
    assert_eq!(
        bench.run_with_data(set_feature_command(Feature::HostIdentifier, 1), &[1; 16]),
        Ok(0)
    );

    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 64,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![FakeBlockDevice::new()], |_| {}, config);
    let sequence = Err(Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(
        bench.run_with_data(set_feature_command(Feature::HostIdentifier, 1), &[1; 16]),
        sequence
    );
}

#[test]
fn host_behavior_support_accepts_only_acre() {
    let mut bench = ControllerFixture::new();
    let ask = get_feature_command(Feature::HostBehaviorSupport, FeatureSelect::Current);
    bench.run_with_data(set_feature_command(Feature::HostBehaviorSupport, 0), &[1]).unwrap();
    let (_, data) = read_feature_data(&mut bench, ask).unwrap();
    assert_eq!((data.len(), data[0], &data[1..]), (512, 1, &[0; 511][..]));
    for byte in 0..6 {
        let mut page = [0; 512];
        page[byte] = 2;
        assert_eq!(
            bench.run_with_data(set_feature_command(Feature::HostBehaviorSupport, 0), &page),
            Err(INVALID)
        );
    }
    assert_eq!(read_feature_data(&mut bench, ask).unwrap().1[0], 1);
    bench.controller.reset(bench.now);
    assert_eq!(read_feature_data(&mut bench, ask).unwrap().1[0], 0);
}

#[test]
fn idle_controller_changes_power_state_and_activity_restores_it() {
    let mut bench = ControllerFixture::new();
    let mut table = [0; 256];
    table[..8].copy_from_slice(&(2_u64 << 3 | 100 << 8).to_le_bytes());
    bench
        .run_with_data(set_feature_command(Feature::AutonomousPowerStateTransition, 1), &table)
        .unwrap();
    let ask = get_feature_command(Feature::AutonomousPowerStateTransition, FeatureSelect::Current);
    assert_eq!(read_feature_data(&mut bench, ask), Ok((1, table.to_vec())));
    bench.advance_time(Span::from_ms(99));
    assert_eq!(current_feature_dword(&mut bench, Feature::PowerManagement), 0);
    bench.advance_time(Span::from_ms(1));
    assert_eq!(current_feature_dword(&mut bench, Feature::PowerManagement), 2);
    bench.controller.note_io_activity(bench.now);
    assert_eq!(current_feature_dword(&mut bench, Feature::PowerManagement), 0);

    table[..8].copy_from_slice(&(1_u64 << 3 | 100 << 8).to_le_bytes());
    let operational = bench
        .run_with_data(set_feature_command(Feature::AutonomousPowerStateTransition, 1), &table);
    assert_eq!(operational, Err(INVALID), "one does not rest in an operational state");
}

#[test]
fn namespace_feature_is_set_for_one_or_all_namespaces() {
    let mut bench =
        ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
    let feature = Feature::ErrorRecovery;
    let of = |bench: &mut ControllerFixture, nsid| {
        let get = GetFeatures { nsid, ..get_feature_command(feature, FeatureSelect::Current) };
        read_feature_data(bench, get).map(|(dword, _)| dword)
    };
    bench.run_without_data(SetFeatures { nsid: 2, ..set_feature_command(feature, 7) }).unwrap();
    assert_eq!((of(&mut bench, 1), of(&mut bench, 2)), (Ok(0), Ok(7)));
    bench
        .run_without_data(SetFeatures { nsid: u32::MAX, ..set_feature_command(feature, 9) })
        .unwrap();
    assert_eq!((of(&mut bench, 1), of(&mut bench, 2)), (Ok(9), Ok(9)));
    assert_eq!(of(&mut bench, u32::MAX), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
    assert_eq!(of(&mut bench, 3), Err(INVALID), "not attached");
    assert_eq!(of(&mut bench, 1025), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn write_protection_applies_to_io_queues_and_two_states_are_permanent() {
    let protect = |state| SetFeatures {
        nsid: 1,
        ..set_feature_command(Feature::NamespaceWriteProtection, state)
    };
    let is_protected = |bench: &ControllerFixture| {
        bench.controller.namespaces().reader().get().get(1).unwrap().is_write_protected
    };
    let mut bench = ControllerFixture::new();
    assert!(!is_protected(&bench));
    for (state, expected) in [(1, true), (0, false), (1, true)] {
        bench.run_without_data(protect(state)).unwrap();
        assert_eq!(is_protected(&bench), expected);
    }
    bench.run_without_data(protect(2)).unwrap();
    assert_eq!(bench.run_without_data(protect(2)), Ok(0));
    for state in [0, 1, 3] {
        assert_eq!(bench.run_without_data(protect(state)), Err(Status::FEATURE_NOT_CHANGEABLE));
    }
    bench.controller.reset(bench.now);
    assert!(is_protected(&bench), "a reset is no power cycle");
    bench.subsystem.emulate_power_cycle();
    assert!(!is_protected(&bench));

    bench.run_without_data(protect(3)).unwrap();
    bench.subsystem.emulate_power_cycle();
    assert_eq!(bench.run_without_data(protect(0)), Err(Status::FEATURE_NOT_CHANGEABLE));
    let ask = GetFeatures {
        nsid: 1,
        ..get_feature_command(Feature::NamespaceWriteProtection, FeatureSelect::Current)
    };
    assert_eq!(read_feature_data(&mut bench, ask).unwrap().0, 3);
}

#[test]
fn keep_alive_timeout_is_returned_as_rounded() {
    let mut bench = ControllerFixture::new();
    bench.run_without_data(set_feature_command(Feature::KeepAliveTimer, 10_050)).unwrap();
    assert_eq!(current_feature_dword(&mut bench, Feature::KeepAliveTimer), 10_100);
    let invalid = Err(Status::KEEP_ALIVE_TIMEOUT_INVALID);
    assert_eq!(
        bench.run_without_data(set_feature_command(Feature::KeepAliveTimer, u32::MAX)),
        invalid
    );
    let step =
        bench.submit(&set_feature_command(Feature::KeepAliveTimer, u32::MAX).to_command(), &[]).0;
    assert!(matches!(step, AdminOutcome::Done(end) if end.status.dnr()), "it will never do");
}
