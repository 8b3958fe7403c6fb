//! Reactions of a queue to commands of its controller.

use tenmil_base::{CompletionBatch, Instant, IoStatus, Span};

use super::{NOW, QueuePairHarness};
use crate::fake_device::instant_at_ms;
use crate::queue_link::QueueState;
use crate::queue_pair::QueueFull;

#[test]
fn nothing_is_submitted_before_state_running() {
    let mut harness = QueuePairHarness::plain(4);
    harness.controller.set_state(QueueState::Frozen);
    assert_eq!(harness.submit(1), Err(QueueFull));
    assert_eq!(harness.queue.state(), QueueState::Frozen);
    assert_eq!(harness.stats().submitted, 0);
}

#[test]
fn quiesced_queue_drains_and_reports_in_flight_count() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send_all(0..3);
    harness.submit(3).unwrap();
    harness.controller.set_state(QueueState::Quiescing);
    assert_eq!(harness.submit(4), Err(QueueFull));
    harness.queue.flush();
    assert_eq!(harness.device.fetch(), 1, "what was taken before the order is still announced");
    assert!(harness.controller.has_acknowledged());
    assert_eq!(harness.controller.in_flight(), 4);
    harness.complete_commands(4);
    assert_eq!(harness.poll().len(), 4);
    assert_eq!(harness.controller.in_flight(), 0);
    assert_eq!(harness.poll(), []);
    assert_eq!(harness.device.head_doorbell.value(), 4, "it rings for what it has taken");
    harness.controller.set_state(QueueState::Running);
    harness.send(5);
    harness.device.complete_next(0);
    assert_eq!(harness.poll(), [(5, IoStatus::SUCCESS)]);
}

#[test]
fn frozen_queue_does_not_ring_doorbells() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send(1);
    harness.submit(2).unwrap();
    harness.device.complete_next(0);
    harness.controller.set_state(QueueState::Frozen);
    assert_eq!(harness.poll(), [], "not even what has completed meanwhile");
    let rings = harness.device.tail_doorbell.write_count();
    harness.queue.flush();
    assert!(harness.queue.arm());
    assert_eq!(harness.device.tail_doorbell.write_count(), rings);
    assert_eq!(harness.device.head_doorbell.write_count(), 0);
}

/// The core of a reset: tokens are parked while the device may still write, and are returned exactly
/// once, after it cannot.
#[test]
fn parked_tokens_complete_exactly_once_after_release() {
    for room in [1, 3, 100] {
        let mut harness = QueuePairHarness::plain(8);
        harness.completions = CompletionBatch::with_capacity(room);
        harness.send_all(0..5);
        harness.submit(5).unwrap();
        harness.device.complete_next(0);
        harness.controller.set_state(QueueState::Frozen);
        harness.queue.flush();
        for hour in 1..5 {
            assert_eq!(
                harness.poll_at(instant_at_ms(hour * 3_600_000)),
                [],
                "not before the release"
            );
        }
        harness.queue.flush();
        assert_eq!(harness.device.fetch(), 1, "the flush before the first poll, and none after");
        assert_eq!(
            (harness.controller.has_acknowledged(), harness.controller.in_flight()),
            (true, 6)
        );

        harness.controller.set_state(QueueState::Released);
        let mut returned = Vec::new();
        for _ in 0..7 {
            let part = harness.poll();
            assert!(harness.controller.has_acknowledged() && part.len() <= room);
            returned.extend(part);
        }
        returned.sort_unstable_by_key(|(token, _)| *token);
        let expected: Vec<_> = (0..6).map(|token| (token, IoStatus::ABORTED_BY_HOST)).collect();
        assert_eq!(returned, expected);
        assert_eq!(harness.controller.in_flight(), 0);

        harness.device.reset();
        harness.controller.run(None);
        for token in 100..120 {
            harness.send(token);
            harness.device.complete_next(0);
            assert_eq!(harness.poll(), [(token, IoStatus::SUCCESS)]);
        }
        assert_eq!(harness.stats().invalid_completions, 0);
    }
}

#[test]
fn queue_resumes_once_all_parked_commands_complete() {
    let mut harness = QueuePairHarness::plain(8);
    harness.completions = CompletionBatch::with_capacity(2);
    harness.send_all(0..5);
    harness.controller.set_state(QueueState::Released);
    assert_eq!(harness.poll().len(), 2);
    harness.device.reset();
    harness.controller.run(None);
    assert_eq!(harness.submit(9), Err(QueueFull));
    assert_eq!(harness.queue.wake_at(), Instant::default(), "it wants to be polled at once");
    assert_eq!((harness.poll().len(), harness.poll().len()), (2, 1));
    assert!(!harness.controller.has_acknowledged());
    assert!(harness.submit(9).is_ok());
    assert!(harness.controller.has_acknowledged());
}

/// A queue without outstanding work need not be polled.
#[test]
fn idle_queue_resumes_without_being_polled() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send(1);
    harness.device.complete_next(0);
    assert_eq!(harness.poll().len(), 1);
    for order in [QueueState::Frozen, QueueState::Released] {
        harness.controller.set_state(order);
        assert_eq!(harness.submit(2), Err(QueueFull));
        assert!(harness.controller.has_acknowledged(), "{order:?}");
    }
    harness.device.reset();
    harness.controller.run(None);
    assert!(harness.submit(2).is_ok() && harness.controller.has_acknowledged());
}

/// However late the next timeout check is.
#[test]
fn state_change_is_polled_sooner_than_a_timeout() {
    for is_polled in [true, false] {
        let mut harness = QueuePairHarness::plain(8);
        if is_polled {
            harness.send(1);
        }
        harness.poll();
        for order in [QueueState::Quiescing, QueueState::Frozen, QueueState::Released] {
            harness.controller.set_state(order);
            if is_polled {
                harness.poll();
            } else {
                assert_eq!(harness.submit(2), Err(QueueFull));
            }
            assert!(harness.controller.has_acknowledged());
            let wake = harness.queue.wake_at();
            assert!(wake <= NOW.after(Span::from_ms(1)), "{order:?}, {is_polled}: {wake:?}");
        }
    }
}

#[test]
fn a_completion_from_before_a_reset_is_not_seen_after_it() {
    let mut harness = QueuePairHarness::plain(8);
    let old = harness.send(1);
    harness.device.post(old, 0);
    harness.controller.set_state(QueueState::Released);
    assert_eq!(harness.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    harness.device.reset();
    harness.controller.run(None);
    harness.send(2);
    assert_eq!(harness.poll(), [], "the ring was zeroed");
    harness.device.post(old, 0);
    assert_eq!(harness.poll(), [], "and the old identifier does not fit any more");
    assert_eq!(harness.stats().invalid_completions, 1);
}

#[test]
fn dead_queue_completes_its_commands_and_rejects_new_ones() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send(1);
    harness.controller.set_state(QueueState::Dead);
    assert_eq!(harness.submit(2), Err(QueueFull));
    assert_eq!(harness.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(
        (harness.queue.state(), harness.queue.wake_at()),
        (QueueState::Dead, Instant::NEVER)
    );
}

#[test]
fn queue_awaiting_a_state_change_is_polled_periodically() {
    for (order, has_commands) in
        [(QueueState::Frozen, true), (QueueState::Frozen, false), (QueueState::Released, false)]
    {
        let mut harness = QueuePairHarness::plain(8);
        if has_commands {
            harness.send(1);
        }
        harness.controller.set_state(order);
        for ms in [1, 5_000, 3_600_000] {
            assert_eq!(harness.poll_at(instant_at_ms(ms)), []);
            let wake = harness.queue.wake_at();
            let soon = instant_at_ms(ms).ns < wake.ns && wake <= instant_at_ms(ms + 1);
            assert!(soon, "{order:?}, {has_commands}: at {ms} ms it wants {wake:?}");
        }
        harness.controller.set_state(QueueState::Dead);
        harness.poll_at(instant_at_ms(3_600_001));
        assert_eq!(harness.queue.wake_at(), Instant::NEVER);
    }
}
