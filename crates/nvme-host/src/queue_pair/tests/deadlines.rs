//! Timed-out commands.

use std::collections::BTreeSet;

use tenmil_base::{Instant, IoStatus, Span};
use tenmil_wire::Command;

use super::{NOW, READ, World};
use crate::fake::at_ms;
use crate::queue_link::ResetReason;
use crate::queue_pair::QueueFull;

#[test]
fn a_late_command_is_posted_once_and_asks_for_a_reset_if_an_abort_does_not_help() {
    let mut world = World::plain(8);
    let cid = world.send(1);
    for ms in 0..800 {
        world.poll_at(at_ms(ms));
        assert_eq!(world.controller.next_timeout(), None, "at {ms} ms of 800");
    }
    let found = (800..).find_map(|ms| {
        world.poll_at(at_ms(ms));
        world.controller.next_timeout().map(|overdue| (ms, overdue))
    });
    let (ms, overdue) = found.unwrap();
    assert!(ms <= 901, "found at {ms}: an eighth late at most");
    assert_eq!((overdue.cid, world.stats().overdue), (cid, 1));

    world.controller.abort_ended(overdue);
    for later in ms..ms + 800 {
        world.poll_at(at_ms(later));
        assert_eq!(world.controller.next_timeout(), None, "once is enough");
        assert_eq!(world.controller.take_reset_request(), None);
    }
    world.poll_at(at_ms(ms + 901));
    assert_eq!(world.controller.take_reset_request(), Some(ResetReason::CommandTimeout { cid }));
}

#[test]
fn an_aborted_command_frees_its_identifier_once_the_abort_has_ended() {
    let mut world = World::plain(2);
    world.send(1);
    world.poll_at(at_ms(1000));
    let overdue = world.controller.next_timeout().unwrap();
    world.device.complete_next(0x07);
    assert_eq!(world.poll_at(at_ms(1000)), [(1, IoStatus::ABORTED)]);
    assert_eq!(world.submit(2), Err(QueueFull), "the abort could still hit this identifier");
    let wake = world.queue.wake_at();
    assert!(at_ms(1000) < wake && wake <= at_ms(1126), "its owner sleeps until {wake:?}");
    world.poll_at(wake);
    assert_eq!(world.submit(2), Err(QueueFull), "it still could");
    world.controller.abort_ended(overdue);
    world.poll_at(world.queue.wake_at());
    assert!(world.submit(2).is_ok());
}

#[test]
fn deadlines_of_ones_own_are_kept_or_waived() {
    let mut world = World::plain(8);
    world.poll();
    let never = Span { ns: u64::MAX };
    world.queue.submit_within(NOW, never, 1, Command::new(0x0c)).unwrap();
    let soon = world.queue.submit_within(NOW, Span::from_ms(16), 2, Command::new(READ)).unwrap();
    assert!(world.queue.wake_at() <= at_ms(3), "an eighth of sixteen, and a tick");
    let found = (1..).find(|ms| {
        world.poll_at(at_ms(*ms));
        world.controller.next_timeout().is_some_and(|overdue| overdue.cid == soon)
    });
    assert!((16..=19).contains(&found.unwrap()), "{found:?}");
    for hour in 1..100 {
        world.poll_at(at_ms(hour * 3_600_000));
        assert_eq!(world.controller.next_timeout(), None);
    }
}

#[test]
fn every_late_command_is_posted_in_its_turn() {
    let mut world = World::plain(16);
    let mut late: BTreeSet<u16> = (0..12).map(|token| world.send(token)).collect();
    for turn in 0..3 {
        world.poll_at(at_ms(1000 + 200 * turn));
        for _ in 0..4 {
            let overdue = world.controller.next_timeout().unwrap();
            assert!(late.remove(&overdue.cid));
            world.controller.abort_ended(overdue);
        }
    }
    assert!(late.is_empty());
}

#[test]
fn an_idle_queue_has_no_reason_to_wake() {
    let mut world = World::plain(8);
    assert_eq!(world.queue.wake_at(), Instant::default(), "there is an order to be adopted");
    world.poll();
    assert_eq!(world.queue.wake_at(), Instant::NEVER);
    world.send(1);
    assert!(world.queue.wake_at() < Instant::NEVER);
    world.device.complete_next(0);
    world.poll();
    assert_eq!(world.queue.wake_at(), Instant::NEVER);
}
