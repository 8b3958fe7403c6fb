//! Initialization from the start to ready, and all of its failures.

use tenmil_base::{ErrorCategory, Instant, Span};
use tenmil_wire::Status;

use super::scripted_device::ScriptedNamespace;
use super::shared_memory::SharedMemory;
use super::{ControllerHarness, ScriptedDevice, short_timeout_options};
use crate::bringup::BringupError;
use crate::{
    Controller, ControllerError, ControllerOptions, ControllerState, Event, InvalidValue,
    NamespaceError, ResetCause,
};

/// Runs until the controller is ready or has ended, and returns its last event.
fn run_to_outcome(harness: &mut ControllerHarness) -> Event {
    harness.run_until(|event| matches!(event, Event::Ready | Event::Dead(_) | Event::Removed));
    harness.events_without_times().pop().unwrap()
}

#[test]
fn conforming_controller_becomes_ready_with_its_namespaces() {
    let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
        state.namespaces.insert(7, ScriptedNamespace { blocks: 50, block_shift: 9 });
    });
    harness.assert_state(ControllerState::Starting);
    let took = harness.run_until(|event| *event == Event::Ready);
    assert!(took < Span::from_ms(20), "{took}");
    let attached = |id| Event::NamespaceAttached { id };
    assert_eq!(harness.events_without_times(), [attached(1), attached(7), Event::Ready]);
    harness.assert_state(ControllerState::Ready);

    let identity = harness.controller.identity().unwrap();
    assert_eq!(identity.serial, "SERIAL-1");
    assert_eq!(identity.model, "SCRIPTED SSD");
    assert_eq!(identity.limits.transfer_bytes_max, Some(131_072));
    assert_eq!(harness.controller.queue_pairs_max(), 8);
    let sizes = harness.controller.namespaces().map(|found| (found.id, found.block_count));
    assert_eq!(sizes.collect::<Vec<_>>(), [(1, 1000), (7, 50)]);
    assert_eq!(harness.controller.namespace(7).unwrap().block_size, 512);
    assert_eq!(harness.controller.namespace(1).unwrap().names.uuid, [1; 16]);
    assert_eq!(harness.device.state().faults, []);
}

#[test]
fn initialization_sends_applicable_commands_in_specification_order() {
    let harness = ControllerHarness::ready();
    let opcodes: Vec<(u8, u32)> = harness.device.state().fetched.clone();
    let events = opcodes.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(events, 4);
    let asked: Vec<_> = opcodes.iter().copied().filter(|(opcode, _)| *opcode != 0x0c).collect();
    let expected =
        [(6, 1), (9, 7), (9, 0x0b), (6, 2), (6, 3), (6, 0)].map(|(opcode, cdw10)| (opcode, cdw10));
    assert_eq!(asked, expected);
}

#[test]
fn optional_commands_are_sent_if_requested_and_supported() {
    let wanted = ControllerOptions {
        shadow_doorbells: true,
        keep_alive: Some(Span::from_ms(250)),
        ..short_timeout_options()
    };
    let harness = ControllerHarness::with_device(wanted, |state| {
        state.vs = 0x0002_0000;
        state.identity.push((256, vec![0, 1])); // OACS: doorbell buffer
        state.identity.push((320, vec![1, 0])); // KAS: 100 ms
        state.identity.push((97, vec![0x80])); // CTRATT: ELBAS
    });
    let mut harness = harness;
    assert_eq!(run_to_outcome(&mut harness), Event::Ready);
    let fetched = harness.device.state().fetched.clone();
    for (opcode, cdw10) in [(6, 6), (9, 0x16), (0x7c, 0), (9, 0x0f)] {
        assert!(fetched.contains(&(opcode, cdw10)), "{opcode:#x} {cdw10:#x}");
    }
    // The device supported none of them except the features, and none was needed.
    assert_eq!(harness.controller.queue_pairs_max(), 8);
}

#[test]
fn keep_alive_is_sent_twice_per_timeout() {
    let wanted =
        ControllerOptions { keep_alive: Some(Span::from_ms(250)), ..short_timeout_options() };
    let mut harness =
        ControllerHarness::ready_with(wanted, |state| state.identity.push((320, vec![1, 0])));
    let before = harness.device.state().fetched.len();
    harness.run_for(Span::from_secs(3));
    let fetched = harness.device.state().fetched[before..].to_vec();
    // 250 ms are three units of 100.
    assert_eq!(fetched.iter().filter(|(opcode, _)| *opcode == 0x18).count(), 20);
}

#[test]
fn fewer_granted_queues_limit_the_queue_pairs() {
    for (granted, expected) in [(1, 1), (8, 8), (300, 128)] {
        let harness =
            ControllerHarness::ready_with(short_timeout_options(), |state| state.granted = granted);
        assert_eq!(harness.controller.queue_pairs_max(), expected);
    }
}

/// Unplugs the device at its first register read, at its second, and so on, until initialization ends
/// before that.
#[test]
fn unplug_at_any_register_read_is_removal_and_revokes_dma() {
    let mut reads = 0;
    for unplugged_at_read in 1.. {
        let memory = SharedMemory::default();
        let device = ScriptedDevice::new(&memory);
        device.state().unplugged_at_read = unplugged_at_read;
        let made = Controller::new(device.clone(), memory.clone(), short_timeout_options());
        if unplugged_at_read == 1 {
            let error = made.err().unwrap();
            assert!(matches!(error, ControllerError::Bringup(BringupError::Removed { .. })));
            assert_eq!(memory.allocation_count(), 0, "nothing is kept");
            continue;
        }
        let mut harness = ControllerHarness::new();
        harness.device.state().unplugged_at_read = unplugged_at_read;
        match run_to_outcome(&mut harness) {
            Event::Removed => {
                harness.assert_state(ControllerState::Removed);
                assert!(harness.memory.is_dma_revoked());
            }
            Event::Ready => {
                reads = unplugged_at_read;
                break;
            }
            other => panic!("at read {unplugged_at_read}: {other:?}"),
        }
    }
    assert!(reads > 8, "CAP twice, VS, CC, CSTS before and after, and pauses: {reads}");
}

#[test]
fn a_controller_that_is_never_ready_is_dead_within_its_deadline() {
    for lag_ms in (480..=520).step_by(4) {
        let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
            state.enable_lag = Span::from_ms(lag_ms)
        });
        match run_to_outcome(&mut harness) {
            Event::Ready => assert!(lag_ms <= 500, "{lag_ms}"),
            Event::Dead(error) => {
                assert!(lag_ms > 500, "{lag_ms}");
                assert_eq!(error.category(), ErrorCategory::Remote);
                let text = error.to_string();
                assert_eq!(text, "bring up: CSTS is 0x00000000 after 500 ms, expected RDY=1");
                assert!(harness.now <= Instant { ns: 501_000_000 }, "{:?}", harness.now);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn controller_without_completions_is_dead_within_two_timeouts() {
    for opcode in [0x06, 0x09] {
        let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
            state.unanswered_opcodes.extend([opcode, 0x08]);
        });
        let Event::Dead(error) = run_to_outcome(&mut harness) else {
            panic!("{:?}", harness.events_without_times())
        };
        assert!(matches!(error, ControllerError::StartupFailed { .. }), "{error}");
        assert_eq!(error.category().exit_code(), 3);
        assert!(harness.now <= Instant { ns: 500_000_000 }, "{:?}", harness.now);
        assert!(harness.memory.is_dma_revoked());
    }
}

#[test]
fn fatal_status_during_initialization_is_fatal() {
    let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
        state.unanswered_opcodes.extend([0x06])
    });
    harness.run_for(Span::from_ms(20));
    harness.device.state().fatal = true;
    let expected = ControllerError::StartupFailed { cause: ResetCause::Fatal { csts: 3 } };
    assert_eq!(run_to_outcome(&mut harness), Event::Dead(expected));
    assert!(expected.hint().unwrap().contains("power-cycle"));
}

#[test]
fn only_a_rejected_mandatory_command_fails_initialization() {
    let fatal = |change: fn(&mut super::scripted_device::DeviceState)| {
        let mut harness = ControllerHarness::with_device(short_timeout_options(), change);
        run_to_outcome(&mut harness)
    };
    let refused = |command| {
        Event::Dead(ControllerError::CommandFailed { command, status: Status::INVALID_FIELD })
    };
    let identify = fatal(|state| state.refuse = [(6, Status::INVALID_FIELD)].into());
    assert_eq!(identify, refused("identify controller"));
    let queues = fatal(|state| state.refuse_features = [7].into());
    assert_eq!(queues, refused("set number of queues"));
    let events = fatal(|state| state.refuse_features = [0x0b].into());
    assert_eq!(events, Event::Ready);
}

#[test]
fn discovery_controller_without_cntrltype_receives_only_identify() {
    let discovery = ControllerOptions { is_discovery: true, ..short_timeout_options() };
    let mut harness = ControllerHarness::with_device(discovery, |state| {
        state.identity.push((512, vec![0; 2]));
        state.refuse_features = [7].into();
        state.vs = 0x0002_0000;
    });
    assert_eq!(run_to_outcome(&mut harness), Event::Ready);
    let state = harness.device.state();
    let low = |cdw10: u32| cdw10 & 0xff;
    let asked = |opcode| {
        let of_it = state.fetched.iter().filter(move |(of, _)| *of == opcode);
        of_it.map(|(_, cdw10)| low(*cdw10)).collect::<Vec<u32>>()
    };
    assert_eq!((asked(0x06), asked(0x09)), (vec![1], vec![0x0b]));
}

#[test]
fn invalid_data_is_reported_by_field_name() {
    let lie = |change: fn(&mut super::scripted_device::DeviceState)| {
        let mut harness = ControllerHarness::with_device(short_timeout_options(), change);
        match run_to_outcome(&mut harness) {
            Event::Dead(ControllerError::InvalidData(InvalidValue { field, found, .. })) => {
                (field, found)
            }
            other => panic!("{other:?}"),
        }
    };
    let entries = lie(|state| state.identity.push((512, vec![0x55])));
    assert_eq!(entries, ("identify controller: SQES", 0x55));
    let list = lie(|state| state.active_list = Some(vec![3, 2]));
    assert_eq!(list, ("active namespace list", 2));
    let past = lie(|state| state.active_list = Some(vec![257]));
    assert_eq!(past, ("active namespace list", 257));
}

#[test]
fn invalid_namespace_leaves_others_usable() {
    let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
        state.namespaces.insert(2, ScriptedNamespace { blocks: 10, block_shift: 3 });
    });
    assert_eq!(run_to_outcome(&mut harness), Event::Ready);
    let reported = harness.events_without_times();
    assert_eq!(reported[0], Event::NamespaceAttached { id: 1 });
    assert!(
        matches!(reported[1], Event::NamespaceUnusable { id: 2, why: NamespaceError::InvalidData(lie) }
            if lie.field == "identify namespace: LBADS")
    );
    assert!(harness.controller.namespace(2).is_none());
}

#[test]
fn unwritten_identify_data_does_not_reuse_older_data() {
    let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
        state.namespaces.insert(2, ScriptedNamespace { blocks: 10, block_shift: 9 });
        state.identify_without_data.insert(2);
    });
    assert_eq!(run_to_outcome(&mut harness), Event::Ready);
    assert_eq!(harness.events_without_times(), [Event::NamespaceAttached { id: 1 }, Event::Ready]);
}

#[test]
fn without_memory_controller_creation_fails_and_leaks_nothing() {
    let enough = {
        let harness = ControllerHarness::new();
        harness.memory.allocation_count()
    };
    assert!(enough >= 4);
    for pages in 0..40 {
        let memory = SharedMemory::with_limit(pages * 4096);
        let device = ScriptedDevice::new(&memory);
        match Controller::new(device, memory.clone(), short_timeout_options()) {
            Ok(controller) => {
                drop(controller);
                assert_eq!(memory.allocation_count(), 0, "{pages} pages");
                assert!(pages >= enough);
                return;
            }
            Err(error) => {
                assert_eq!(error.category(), ErrorCategory::Environment);
                assert_eq!(memory.allocation_count(), 0, "{pages} pages");
            }
        }
    }
    panic!("forty pages are enough for anybody");
}
