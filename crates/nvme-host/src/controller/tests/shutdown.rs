//! Shutdown, removal, and drop.

use tenmil_base::{IoStatus, Span};

use super::{ControllerHarness, short_timeout_options};
use crate::queue_link::QueueState;
use crate::{
    Controller, ControllerOptions, ControllerState, Event, Quirks, RequestError,
    ShutdownNotification,
};

fn run_until_ended(harness: &mut ControllerHarness) -> Span {
    harness.run_until(|event| matches!(event, Event::ShutDown { .. } | Event::Removed))
}

#[test]
fn shutdown_drains_deletes_queues_notifies_and_disables() {
    let mut harness = ControllerHarness::with_pairs(2);
    for token in 0..5 {
        harness.submit_io(0, token);
    }
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    harness.assert_state(ControllerState::ShuttingDown);
    run_until_ended(&mut harness);
    assert_eq!(harness.events_without_times().pop(), Some(Event::ShutDown { is_clean: true }));
    harness.assert_state(ControllerState::ShutDown);
    let fetched = harness.device.state().fetched.clone();
    let last: Vec<u8> = fetched.iter().rev().take(4).map(|(opcode, _)| *opcode).collect();
    assert_eq!(last, [4, 4, 0, 0], "submission queues before completion queues");
    assert_eq!(harness.device.state().notified, Some(1));
    assert!(!harness.device.state().is_enabled());
    harness.run_for(Span::from_ms(20));
    let completions: Vec<_> = harness.pairs[0].1.iter().map(|answer| answer.status).collect();
    assert_eq!(completions, [IoStatus::SUCCESS; 5]);
    harness.assert_queue_state(0, QueueState::Dead);
    assert_eq!(harness.device.state().faults, []);
}

#[test]
fn abrupt_shutdown_does_not_wait_for_commands() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().answers_io = false;
    harness.submit_io(0, 7);
    harness.submit_admin(5, 0x0a);
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Abrupt).unwrap();
    let took = run_until_ended(&mut harness);
    assert!(took < Span::from_ms(20), "{took}");
    assert_eq!(harness.device.state().notified, Some(2));
    harness.run_for(Span::from_ms(20));
    assert_eq!(harness.pairs[0].1[0].status, IoStatus::ABORTED_BY_HOST);
    let parked = harness.events_without_times().into_iter().find_map(|event| match event {
        Event::AdminCompleted(answer) => Some(answer.status),
        _ => None,
    });
    assert_eq!(parked, Some(IoStatus::ABORTED_BY_HOST));
}

/// In time is clean, late is not, and both end soon.
#[test]
fn shutdown_is_awaited_for_rtd3e_or_the_timeout() {
    for (lag_ms, rtd3e_ms) in [(490, 0), (510, 0), (700, 800), (900, 800)] {
        let mut harness = ControllerHarness::ready_with(short_timeout_options(), |state| {
            state.shutdown_lag = Span::from_ms(lag_ms);
            state.identity.push((88, (rtd3e_ms * 1000_u32).to_le_bytes().to_vec()));
        });
        harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
        let took = run_until_ended(&mut harness);
        let allowed = u64::from(rtd3e_ms).max(500);
        let is_clean = lag_ms <= allowed;
        assert_eq!(
            harness.events_without_times().pop(),
            Some(Event::ShutDown { is_clean }),
            "{lag_ms}"
        );
        assert!(took < Span::from_ms(allowed + 20), "{took}");
        assert!(!harness.device.state().is_enabled());
    }
}

#[test]
fn shutdown_with_never_completes_quirk_counts_as_clean() {
    let quirks = Quirks { shutdown_never_completes: true, ..Quirks::default() };
    let asked = ControllerOptions { quirks, ..short_timeout_options() };
    let mut harness =
        ControllerHarness::ready_with(asked, |state| state.shutdown_lag = Span::from_secs(1_000));
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    run_until_ended(&mut harness);
    assert_eq!(harness.events_without_times().pop(), Some(Event::ShutDown { is_clean: true }));
}

#[test]
fn controller_that_does_not_disable_has_its_dma_revoked() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().disable_lag = Span::from_secs(1_000);
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    run_until_ended(&mut harness);
    assert_eq!(harness.events_without_times().pop(), Some(Event::ShutDown { is_clean: false }));
    assert!(harness.memory.is_dma_revoked());
}

#[test]
fn failed_queue_deletion_does_not_delay_shutdown() {
    let mut harness = ControllerHarness::with_pairs(2);
    harness.device.state().unanswered_opcodes.extend([0x00, 0x08]);
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    let took = run_until_ended(&mut harness);
    assert!(took < Span::from_ms(600), "{took}");
    assert_eq!(harness.events_without_times().pop(), Some(Event::ShutDown { is_clean: true }));
}

#[test]
fn unpolled_queue_pair_does_not_delay_shutdown() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.polls_pairs = false;
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    let took = run_until_ended(&mut harness);
    assert!(took < Span::from_ms(100), "{took}");
}

#[test]
fn shutdown_during_queue_creation_completes() {
    for moments in 0..30 {
        let mut harness = ControllerHarness::ready();
        let wanted = crate::QueuePairOptions {
            depth: 4,
            vector: None,
            techniques: crate::FastPathOptions::default(),
        };
        for _ in 0..3 {
            harness.controller.create_queue_pair(harness.now, wanted).unwrap();
        }
        for _ in 0..moments {
            harness.step(tenmil_base::Instant::NEVER);
        }
        harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
        let took = run_until_ended(&mut harness);
        assert!(took < Span::from_ms(100), "{moments}: {took}");
        assert_eq!(harness.events_without_times().pop(), Some(Event::ShutDown { is_clean: true }));
    }
}

#[test]
fn controller_in_shutdown_rejects_requests() {
    let mut harness = ControllerHarness::ready();
    harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
    let now = harness.now;
    let again = harness.controller.start_shutdown(now, ShutdownNotification::Normal);
    assert_eq!(again, Err(RequestError::NotReady));
    assert_eq!(harness.controller.reset(now), Err(RequestError::NotReady));
    assert_eq!(harness.controller.delete_queue_pair(now, 1), Err(RequestError::NotReady));
}

/// Unplugs the device at each register read of its idle phase and of its shutdown.
#[test]
fn unplug_at_any_later_read_is_removal() {
    for later in 1.. {
        let mut harness = ControllerHarness::with_pairs(1);
        harness.device.state().answers_io = false;
        harness.submit_io(0, 7);
        harness.controller.start_shutdown(harness.now, ShutdownNotification::Normal).unwrap();
        {
            let mut state = harness.device.state();
            state.unplugged_at_read = state.reads + later;
        }
        run_until_ended(&mut harness);
        harness.run_for(Span::from_ms(20));
        assert_eq!(harness.pairs[0].1.len(), 1, "answered once");
        if harness.controller.state() == ControllerState::ShutDown {
            assert!(later > 6, "{later}");
            break;
        }
        harness.assert_state(ControllerState::Removed);
        harness.assert_queue_state(0, QueueState::Dead);
        assert!(harness.memory.is_dma_revoked());
    }
}

#[test]
fn unplug_of_an_idle_controller_is_detected() {
    let mut harness = ControllerHarness::ready();
    harness.run_for(Span::from_secs(1));
    harness.device.state().unplugged_at_read = 0;
    let took = harness.run_until(|event| *event == Event::Removed);
    assert!(took <= Span::from_ms(101), "{took}");
}

#[test]
fn dropped_controller_has_its_dma_revoked_and_memory_released() {
    let harness = ControllerHarness::with_pairs(2);
    let ControllerHarness { controller, memory, mut pairs, now, .. } = harness;
    drop(controller);
    assert!(memory.is_dma_revoked());
    assert!(memory.allocation_count() > 0, "two owners have not noticed yet");
    let mut completions = tenmil_base::CompletionBatch::with_capacity(4);
    for (pair, _) in &mut pairs {
        pair.poll(now, &mut completions);
        assert_eq!(pair.state(), QueueState::Dead);
    }

    let harness = ControllerHarness::ready();
    let ControllerHarness { controller, memory, .. } = harness;
    drop(controller);
    assert_eq!(memory.allocation_count(), 0);
}

#[test]
fn controller_dropped_with_dma_in_flight_keeps_its_memory() {
    let ControllerHarness { controller, memory, mut pairs, now, .. } =
        ControllerHarness::with_pairs(1);
    let allocations = memory.allocation_count();
    memory.set_dma_in_flight(true);
    drop(controller);
    let mut completions = tenmil_base::CompletionBatch::with_capacity(4);
    pairs[0].0.poll(now, &mut completions);
    assert_eq!(pairs[0].0.state(), QueueState::Frozen);
    drop(pairs);
    assert_eq!(memory.allocation_count(), allocations);
}

#[test]
fn dropped_controller_can_be_attached_by_a_new_driver() {
    let ControllerHarness { controller, memory, device, now, .. } = ControllerHarness::ready();
    drop(controller);
    assert!(memory.is_dma_revoked());
    let controller =
        Controller::new(device.clone(), memory.clone(), short_timeout_options()).unwrap();
    let (events, pairs) = (Vec::new(), Vec::new());
    let mut harness =
        ControllerHarness { now, device, memory, controller, events, pairs, polls_pairs: true };
    harness.run_until(|event| *event == Event::Ready);
    assert!(!harness.memory.is_dma_revoked());
    assert_eq!(harness.device.state().faults, [], "reconnected only once it was disabled");
}
