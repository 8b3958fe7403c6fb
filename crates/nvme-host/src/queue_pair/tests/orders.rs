//! Reactions of a queue to commands of its controller.

use tenmil_base::{CompletionBatch, Instant, IoStatus, Span};

use super::{NOW, World};
use crate::fake::at_ms;
use crate::queue_link::QueueState;
use crate::queue_pair::QueueFull;

#[test]
fn nothing_is_submitted_before_the_order_to_run() {
    let mut world = World::plain(4);
    world.controller.set_state(QueueState::Frozen);
    assert_eq!(world.submit(1), Err(QueueFull));
    assert_eq!(world.queue.state(), QueueState::Frozen);
    assert_eq!(world.stats().submitted, 0);
}

#[test]
fn a_quiesced_queue_runs_dry_and_says_how_far_it_is() {
    let mut world = World::plain(8);
    world.send_all(0..3);
    world.submit(3).unwrap();
    world.controller.set_state(QueueState::Quiescing);
    assert_eq!(world.submit(4), Err(QueueFull));
    world.queue.flush();
    assert_eq!(world.device.fetch(), 1, "what was taken before the order is still announced");
    assert!(world.controller.has_acknowledged());
    assert_eq!(world.controller.in_flight(), 4);
    world.complete(4);
    assert_eq!(world.poll().len(), 4);
    assert_eq!(world.controller.in_flight(), 0);
    assert_eq!(world.poll(), []);
    assert_eq!(world.device.head_doorbell.value(), 4, "it rings for what it has taken");
    world.controller.set_state(QueueState::Running);
    world.send(5);
    world.device.complete_next(0);
    assert_eq!(world.poll(), [(5, IoStatus::SUCCESS)]);
}

#[test]
fn what_was_not_announced_before_a_freeze_stays_so() {
    let mut world = World::plain(8);
    world.send(1);
    world.submit(2).unwrap();
    world.device.complete_next(0);
    world.controller.set_state(QueueState::Frozen);
    assert_eq!(world.poll(), [], "not even what has completed meanwhile");
    let rings = world.device.tail_doorbell.rings();
    world.queue.flush();
    assert!(world.queue.arm());
    assert_eq!(world.device.tail_doorbell.rings(), rings);
    assert_eq!(world.device.head_doorbell.rings(), 0);
}

/// The core of a reset: tokens are parked while the device may still write, and are returned exactly
/// once, after it cannot.
#[test]
fn parked_tokens_come_back_exactly_once_and_never_early() {
    for room in [1, 3, 100] {
        let mut world = World::plain(8);
        world.completions = CompletionBatch::with_capacity(room);
        world.send_all(0..5);
        world.submit(5).unwrap();
        world.device.complete_next(0);
        world.controller.set_state(QueueState::Frozen);
        world.queue.flush();
        for hour in 1..5 {
            assert_eq!(world.poll_at(at_ms(hour * 3_600_000)), [], "not before the release");
        }
        world.queue.flush();
        assert_eq!(world.device.fetch(), 1, "the flush before the first poll, and none after");
        assert_eq!((world.controller.has_acknowledged(), world.controller.in_flight()), (true, 6));

        world.controller.set_state(QueueState::Released);
        let mut returned = Vec::new();
        for _ in 0..7 {
            let part = world.poll();
            assert!(world.controller.has_acknowledged() && part.len() <= room);
            returned.extend(part);
        }
        returned.sort_unstable_by_key(|(token, _)| *token);
        let expected: Vec<_> = (0..6).map(|token| (token, IoStatus::ABORTED_BY_HOST)).collect();
        assert_eq!(returned, expected);
        assert_eq!(world.controller.in_flight(), 0);

        world.device.reset();
        world.controller.set_state(QueueState::Running);
        for token in 100..120 {
            world.send(token);
            world.device.complete_next(0);
            assert_eq!(world.poll(), [(token, IoStatus::SUCCESS)]);
        }
        assert_eq!(world.stats().nonsense, 0);
    }
}

#[test]
fn a_queue_runs_again_only_when_everything_parked_is_answered() {
    let mut world = World::plain(8);
    world.completions = CompletionBatch::with_capacity(2);
    world.send_all(0..5);
    world.controller.set_state(QueueState::Released);
    assert_eq!(world.poll().len(), 2);
    world.device.reset();
    world.controller.set_state(QueueState::Running);
    assert_eq!(world.submit(9), Err(QueueFull));
    assert_eq!(world.queue.wake_at(), Instant::default(), "it wants to be polled at once");
    assert_eq!((world.poll().len(), world.poll().len()), (2, 1));
    assert!(!world.controller.has_acknowledged());
    assert!(world.submit(9).is_ok());
    assert!(world.controller.has_acknowledged());
}

/// A queue without outstanding work need not be polled.
#[test]
fn a_queue_that_owes_nothing_runs_again_without_being_polled() {
    let mut world = World::plain(8);
    world.send(1);
    world.device.complete_next(0);
    assert_eq!(world.poll().len(), 1);
    for order in [QueueState::Frozen, QueueState::Released] {
        world.controller.set_state(order);
        assert_eq!(world.submit(2), Err(QueueFull));
        assert!(world.controller.has_acknowledged(), "{order:?}");
    }
    world.device.reset();
    world.controller.set_state(QueueState::Running);
    assert!(world.submit(2).is_ok() && world.controller.has_acknowledged());
}

/// However late the next timeout check is.
#[test]
fn the_next_order_is_not_waited_for_as_long_as_a_late_command() {
    for is_polled in [true, false] {
        let mut world = World::plain(8);
        if is_polled {
            world.send(1);
        }
        world.poll();
        for order in [QueueState::Quiescing, QueueState::Frozen, QueueState::Released] {
            world.controller.set_state(order);
            if is_polled {
                world.poll();
            } else {
                assert_eq!(world.submit(2), Err(QueueFull));
            }
            assert!(world.controller.has_acknowledged());
            let wake = world.queue.wake_at();
            assert!(wake <= NOW.after(Span::from_ms(1)), "{order:?}, {is_polled}: {wake:?}");
        }
    }
}

#[test]
fn a_completion_from_before_a_reset_is_not_seen_after_it() {
    let mut world = World::plain(8);
    let old = world.send(1);
    world.device.post(old, 0);
    world.controller.set_state(QueueState::Released);
    assert_eq!(world.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    world.device.reset();
    world.controller.set_state(QueueState::Running);
    world.send(2);
    assert_eq!(world.poll(), [], "the ring was zeroed");
    world.device.post(old, 0);
    assert_eq!(world.poll(), [], "and the old identifier does not fit any more");
    assert_eq!(world.stats().nonsense, 1);
}

#[test]
fn a_dead_queue_answers_what_it_has_and_takes_nothing() {
    let mut world = World::plain(8);
    world.send(1);
    world.controller.set_state(QueueState::Dead);
    assert_eq!(world.submit(2), Err(QueueFull));
    assert_eq!(world.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!((world.queue.state(), world.queue.wake_at()), (QueueState::Dead, Instant::NEVER));
}

#[test]
fn a_queue_that_waits_for_an_order_is_polled_now_and_then() {
    for (order, has_commands) in
        [(QueueState::Frozen, true), (QueueState::Frozen, false), (QueueState::Released, false)]
    {
        let mut world = World::plain(8);
        if has_commands {
            world.send(1);
        }
        world.controller.set_state(order);
        for ms in [1, 5_000, 3_600_000] {
            assert_eq!(world.poll_at(at_ms(ms)), []);
            let wake = world.queue.wake_at();
            let soon = at_ms(ms).ns < wake.ns && wake <= at_ms(ms + 1);
            assert!(soon, "{order:?}, {has_commands}: at {ms} ms it wants {wake:?}");
        }
        world.controller.set_state(QueueState::Dead);
        world.poll_at(at_ms(3_600_001));
        assert_eq!(world.queue.wake_at(), Instant::NEVER);
    }
}
