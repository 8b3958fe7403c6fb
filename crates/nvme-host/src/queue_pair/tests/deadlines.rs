//! Timed-out commands.

use std::collections::BTreeSet;

use tenmil_base::{Instant, IoStatus, Span};
use tenmil_wire::Command;

use super::{NOW, QueuePairHarness, READ};
use crate::fake_device::instant_at_ms;
use crate::queue_link::ResetReason;
use crate::queue_pair::QueueFull;

#[test]
fn overdue_command_is_posted_once_and_requests_a_reset_if_not_aborted() {
    let mut harness = QueuePairHarness::plain(8);
    let cid = harness.send(1);
    for ms in 0..800 {
        harness.poll_at(instant_at_ms(ms));
        assert_eq!(harness.controller.next_timeout(), None, "at {ms} ms of 800");
    }
    let found = (800..).find_map(|ms| {
        harness.poll_at(instant_at_ms(ms));
        harness.controller.next_timeout().map(|overdue| (ms, overdue))
    });
    let (ms, overdue) = found.unwrap();
    assert!(ms <= 901, "found at {ms}: an eighth late at most");
    assert_eq!((overdue.cid, harness.stats().overdue), (cid, 1));

    harness.controller.note_abort_completed(overdue);
    for later in ms..ms + 800 {
        harness.poll_at(instant_at_ms(later));
        assert_eq!(harness.controller.next_timeout(), None, "once is enough");
        assert_eq!(harness.controller.take_reset_request(), None);
    }
    harness.poll_at(instant_at_ms(ms + 901));
    assert_eq!(harness.controller.take_reset_request(), Some(ResetReason::CommandTimeout { cid }));
}

#[test]
fn aborted_command_releases_its_cid_once_the_abort_completes() {
    let mut harness = QueuePairHarness::plain(2);
    harness.send(1);
    harness.poll_at(instant_at_ms(1000));
    let overdue = harness.controller.next_timeout().unwrap();
    harness.device.complete_next(0x07);
    assert_eq!(harness.poll_at(instant_at_ms(1000)), [(1, IoStatus::ABORTED)]);
    assert_eq!(harness.submit(2), Err(QueueFull), "the abort could still hit this identifier");
    let wake = harness.queue.wake_at();
    assert!(
        instant_at_ms(1000) < wake && wake <= instant_at_ms(1126),
        "its owner sleeps until {wake:?}"
    );
    harness.poll_at(wake);
    assert_eq!(harness.submit(2), Err(QueueFull), "it still could");
    harness.controller.note_abort_completed(overdue);
    harness.poll_at(harness.queue.wake_at());
    assert!(harness.submit(2).is_ok());
}

#[test]
fn individual_deadlines_apply_or_are_disabled() {
    let mut harness = QueuePairHarness::plain(8);
    harness.poll();
    let never = Span { ns: u64::MAX };
    harness.queue.submit_within(NOW, never, 1, Command::new(0x0c)).unwrap();
    let soon = harness.queue.submit_within(NOW, Span::from_ms(16), 2, Command::new(READ)).unwrap();
    assert!(harness.queue.wake_at() <= instant_at_ms(3), "an eighth of sixteen, and a tick");
    let found = (1..).find(|ms| {
        harness.poll_at(instant_at_ms(*ms));
        harness.controller.next_timeout().is_some_and(|overdue| overdue.cid == soon)
    });
    assert!((16..=19).contains(&found.unwrap()), "{found:?}");
    for hour in 1..100 {
        harness.poll_at(instant_at_ms(hour * 3_600_000));
        assert_eq!(harness.controller.next_timeout(), None);
    }
}

#[test]
fn every_overdue_command_is_posted_in_order() {
    let mut harness = QueuePairHarness::plain(16);
    let mut late: BTreeSet<u16> = (0..12).map(|token| harness.send(token)).collect();
    for turn in 0..3 {
        harness.poll_at(instant_at_ms(1000 + 200 * turn));
        for _ in 0..4 {
            let overdue = harness.controller.next_timeout().unwrap();
            assert!(late.remove(&overdue.cid));
            harness.controller.note_abort_completed(overdue);
        }
    }
    assert!(late.is_empty());
}

#[test]
fn idle_queue_has_no_wake_time() {
    let mut harness = QueuePairHarness::plain(8);
    assert_eq!(harness.queue.wake_at(), Instant::default(), "there is an order to be adopted");
    harness.poll();
    assert_eq!(harness.queue.wake_at(), Instant::NEVER);
    harness.send(1);
    assert!(harness.queue.wake_at() < Instant::NEVER);
    harness.device.complete_next(0);
    harness.poll();
    assert_eq!(harness.queue.wake_at(), Instant::NEVER);
}
