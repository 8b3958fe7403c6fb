//! I/O queue pairs: creation, use, resumption and deletion.

use tenmil_base::{IoStatus, Span};
use tenmil_wire::Status;

use super::{ControllerHarness, short_timeout_options};
use crate::fast_path_options::FastPathOptions;
use crate::queue_link::QueueState;
use crate::{ArmResult, Event, QueuePairOptions, RequestError, arm_interrupt};

fn queue_pair_options(depth: u32) -> QueuePairOptions {
    QueuePairOptions { depth, vector: None, techniques: FastPathOptions::default() }
}

fn io_completions(harness: &ControllerHarness, pair: usize) -> Vec<(u64, IoStatus)> {
    harness.pairs[pair].1.iter().map(|answer| (answer.token, answer.status)).collect()
}

#[test]
fn queue_pair_is_created_and_taken_once() {
    let mut harness = ControllerHarness::with_pairs(2);
    assert!(harness.device.state().has_queue_pair(1) && harness.device.state().has_queue_pair(2));
    assert!(harness.controller.take_queue_pair(1).is_none(), "it was taken");
    for round in 0..50 {
        for token in 0..10 {
            harness.submit_io(0, round * 10 + token);
        }
        harness.run_for(Span::from_ms(2));
    }
    let answered = io_completions(&harness, 0);
    assert!(answered.iter().copied().eq((0..500).map(|token| (token, IoStatus::SUCCESS))));
    assert_eq!(harness.pairs[0].0.stats().invalid_completions, 0);
}

#[test]
fn depths_and_numbers_outside_the_limits_are_refused_before_anything_is_sent() {
    let mut harness = ControllerHarness::ready();
    let fetched = harness.device.state().fetched.len();
    for depth in [0, 1, 257] {
        let refused = harness.controller.create_queue_pair(harness.now, queue_pair_options(depth));
        let (found, min, max) = (depth.into(), 2, 256);
        assert_eq!(refused, Err(RequestError::OutOfRange { what: "queue depth", found, min, max }));
    }
    assert_eq!(harness.device.state().fetched.len(), fetched);
    for id in 1..=8 {
        assert_eq!(harness.create_queue_pair(None), id);
    }
    let refused = harness.controller.create_queue_pair(harness.now, queue_pair_options(256));
    assert_eq!(refused, Err(RequestError::QueueLimit { granted: 8 }));
    assert_eq!(refused.unwrap_err().category().exit_code(), 2);
}

#[test]
fn rejected_queue_pair_leaks_nothing() {
    for opcode in [0x05, 0x01] {
        let mut harness = ControllerHarness::ready();
        let allocations = harness.memory.allocation_count();
        harness.device.state().refuse.insert(opcode, Status::INVALID_QUEUE_SIZE);
        let id = harness.controller.create_queue_pair(harness.now, queue_pair_options(16)).unwrap();
        let status = Status::INVALID_QUEUE_SIZE;
        harness.run_until(|event| *event == Event::QueuePairRefused { id, status });
        assert!(harness.controller.take_queue_pair(id).is_none());
        assert_eq!(harness.device.state().io_queue_pair_count(), 0);
        assert_eq!(harness.memory.allocation_count(), allocations);
        harness.device.state().refuse.clear();
        assert_eq!(harness.create_queue_pair(None), id, "the identifier is free again");
    }
}

#[test]
fn queue_pairs_requested_at_once_are_all_created() {
    let mut harness = ControllerHarness::ready();
    for id in 1..=8 {
        assert_eq!(
            harness.controller.create_queue_pair(harness.now, queue_pair_options(16)),
            Ok(id)
        );
        assert!(harness.controller.take_queue_pair(id).is_none(), "not yet");
    }
    harness.run_until(|event| *event == Event::QueuePairCreated { id: 8 });
    assert!((1..=8).all(|id| harness.controller.take_queue_pair(id).is_some()));
}

#[test]
fn queue_is_created_with_the_requested_vector() {
    let mut harness = ControllerHarness::ready();
    harness.create_queue_pair(None);
    harness.create_queue_pair(Some(3));
    let state = harness.device.state();
    assert_eq!(state.vectors.get(&1), Some(&None));
    assert_eq!(state.vectors.get(&2), Some(&Some(3)));
}

#[test]
fn deletion_waits_for_commands_in_flight() {
    let mut harness = ControllerHarness::with_pairs(1);
    let allocations = harness.memory.allocation_count();
    for token in 0..5 {
        harness.submit_io(0, token);
    }
    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    harness.run_for(Span::from_ms(20));
    assert!(
        io_completions(&harness, 0).into_iter().eq((0..5).map(|token| (token, IoStatus::SUCCESS)))
    );
    assert_eq!(harness.device.state().io_queue_pair_count(), 0);
    harness.assert_queue_state(0, QueueState::Dead);
    assert_eq!(harness.memory.allocation_count(), allocations - 2, "the rings are given back");
    assert_eq!(
        harness.controller.delete_queue_pair(harness.now, 1),
        Err(RequestError::NoSuchQueue { id: 1 })
    );
}

#[test]
fn deletion_proceeds_without_commands_that_do_not_complete() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().answers_io = false;
    harness.submit_io(0, 7);
    harness.run_for(Span::from_ms(1));
    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    let took = harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert!(took >= Span::from_ms(50) && took < Span::from_ms(70), "{took}");
    harness.run_for(Span::from_ms(20));
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
}

/// The device completes there what the deletion aborts.
#[test]
fn completions_are_processed_until_the_rings_are_deleted() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().answers_io = false;
    harness.submit_io(0, 7);
    harness.run_for(Span::from_ms(1));
    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    harness.now = harness.now.after(Span::from_ms(50));
    harness.polls_pairs = false;
    let sent = harness.device.state().fetched.len();
    for _ in 0..2 {
        harness.poll_all();
        harness.now = harness.now.after(Span::from_us(10));
    }
    assert_eq!(harness.device.state().fetched[sent..].len(), 1, "Delete I/O Submission Queue");
    harness.polls_pairs = true;
    harness.poll_all();
    harness.assert_queue_state(0, QueueState::Quiescing);
}

#[test]
fn rings_are_not_released_while_the_queue_exists() {
    let mut harness = ControllerHarness::with_pairs(1);
    let allocations = harness.memory.allocation_count();
    harness.polls_pairs = false;
    harness.controller.delete_queue_pair(harness.now, 1).unwrap();
    harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    harness.run_for(Span::from_ms(100));
    assert_eq!(harness.memory.allocation_count(), allocations);
    harness.polls_pairs = true;
    harness.run_for(Span::from_ms(20));
    assert_eq!(harness.memory.allocation_count(), allocations - 2);
}

#[test]
fn dropped_queue_pair_is_deleted_and_its_rings_released() {
    let mut harness = ControllerHarness::with_pairs(2);
    let allocations = harness.memory.allocation_count();
    harness.device.state().answers_io = false;
    harness.submit_io(0, 7);
    drop(harness.pairs.remove(0));
    harness.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert!(!harness.device.state().has_queue_pair(1) && harness.device.state().has_queue_pair(2));
    assert_eq!(harness.memory.allocation_count(), allocations - 2);

    drop(harness.pairs.remove(0));
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| *event == Event::Recovered);
    assert!(harness.events_without_times().contains(&Event::QueuePairDeleted { id: 2 }));
    assert_eq!(harness.device.state().io_queue_pair_count(), 0);
    assert_eq!(harness.memory.allocation_count(), allocations - 4);
}

#[test]
fn arming_clears_the_signal_before_it_checks_the_ring() {
    let mut harness = ControllerHarness::with_pairs(1);
    let mut cleared = 0;
    assert_eq!(arm_interrupt(&mut harness.pairs[0].0, || cleared += 1), ArmResult::Armed);
    harness.submit_io(0, 1);
    harness.polls_pairs = false;
    harness.run_for(Span::from_ms(5));
    assert_eq!(arm_interrupt(&mut harness.pairs[0].0, || cleared += 1), ArmResult::Pending);
    harness.polls_pairs = true;
    harness.run_for(Span::from_ms(5));
    assert_eq!(io_completions(&harness, 0).len(), 1);
    // A completion that arrives while the signals are disarmed is seen.
    harness.submit_io(0, 2);
    let now = harness.now.after(Span::from_ms(5));
    let device = harness.device.clone();
    let armed = arm_interrupt(&mut harness.pairs[0].0, || {
        device.state().step(now);
        device.state().step(now.after(Span::from_ms(1)));
    });
    assert_eq!(armed, ArmResult::Pending);
    assert_eq!(cleared, 2);
}

#[test]
fn shadow_doorbells_are_used_when_the_controller_takes_them() {
    let asked = crate::ControllerOptions { shadow_doorbells: true, ..short_timeout_options() };
    let mut harness = ControllerHarness::ready_with(asked, |state| {
        state.identity.push((256, vec![0, 1]));
        state.has_shadows = true;
    });
    harness.create_queue_pair(None);
    let buffers = harness.device.state().shadows.unwrap();
    harness.submit_io(0, 1);
    let mut tail = [0; 4];
    assert!(harness.memory.device_load(buffers.0 + 8, &mut tail));
    assert_eq!(u32::from_le_bytes(tail), 1, "queue 1's tail is in the shadow buffer");
    harness.run_for(Span::from_ms(5));
    assert_eq!(io_completions(&harness, 0), [(1, IoStatus::SUCCESS)]);
}

#[test]
fn shadow_doorbells_unsupported_after_a_reset_are_not_used() {
    let asked = crate::ControllerOptions { shadow_doorbells: true, ..short_timeout_options() };
    let mut harness = ControllerHarness::ready_with(asked, |state| {
        state.identity.push((256, vec![0, 1]));
        state.has_shadows = true;
    });
    harness.create_queue_pair(None);
    harness.device.state().has_shadows = false;
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(error)) = harness.events_without_times().pop() else { panic!() };
    assert!(error.to_string().contains("doorbell buffer config"), "{error}");
}
