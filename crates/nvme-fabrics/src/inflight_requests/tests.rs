//! Requests in flight, and the search for the cause of resets.

use tenmil_base::{Instant, Operation, Request, Segment, Span};

use super::{
    CAUSED_RESETS_MAX, ConnectionFailure, ConnectionLossSnapshot, InflightRequests, LossVerdict,
    is_repeatable,
};

const NOW: Instant = Instant { ns: 5_000_000_000 };
const LIMIT: Span = Span::from_secs(30);
const RESET: ConnectionLossSnapshot =
    ConnectionLossSnapshot { at: NOW, failure: ConnectionFailure::NotBroken };

fn request(token: u64, first: u32, count: u16) -> Request {
    Request { token, segment_first: first, segment_count: count, ..Request::PLACEHOLDER }
}

#[test]
fn retried_request_equals_the_stored_request() {
    let mut inflight = InflightRequests::new(2);
    let table: Vec<Segment> =
        (0..5).map(|at| Segment { offset: at, ..Segment::default() }).collect();
    let one = inflight.insert(NOW, &request(70, 3, 1), &table, 0).unwrap();
    let three = inflight.insert(NOW, &request(71, 1, 3), &table, 0).unwrap();
    assert_eq!(inflight.insert(NOW, &request(72, 0, 0), &table, 0), None, "there are two places");
    assert!(inflight.requeue_after_loss(three.token, LossVerdict::Unrelated));
    assert!(inflight.requeue_after_loss(one.token, LossVerdict::Unrelated));
    for (expected, token, slot) in [(&table[1..4], 71, three), (&table[3..4], 70, one)] {
        let (retries, segments) = inflight.next_retry(0).unwrap();
        assert_eq!((retries.token, retries.segment_first), (slot.token, 0));
        assert_eq!(segments, expected);
        inflight.record_retry(NOW, 0);
        assert_eq!(inflight.remove(slot.token), token);
    }
    assert!(!inflight.has_retries() && inflight.free.len() == 2);
}

#[test]
fn only_idempotent_requests_are_retried() {
    for operation in Operation::ALL {
        let request =
            Request { operation, lba: 100, operand: 200, blocks: 100, ..Request::PLACEHOLDER };
        assert_eq!(is_repeatable(&request), operation != Operation::CompareAndWrite);
        let overlapping = Request { operand: 199, ..request };
        let copies = matches!(operation, Operation::Copy | Operation::CompareAndWrite);
        assert_eq!(is_repeatable(&overlapping), !copies, "{operation:?}");
    }
}

/// Whether a reset has a cause among the requests.
#[test]
fn request_alone_or_overdue_at_a_loss_is_failed_and_others_are_suspects() {
    let late = NOW.after(Span::from_secs(32));
    for (at, failure, expected) in [
        (NOW, ConnectionFailure::NotBroken, LossVerdict::Unrelated),
        (late, ConnectionFailure::NotBroken, LossVerdict::Cause),
        (NOW, ConnectionFailure::ManyInFlight, LossVerdict::Suspect),
        (late, ConnectionFailure::ManyInFlight, LossVerdict::Suspect),
        (NOW, ConnectionFailure::OneInFlight, LossVerdict::Cause),
    ] {
        let mut inflight = InflightRequests::new(2);
        let slot = inflight.insert(NOW, &request(7, 0, 0), &[], 0).unwrap().token;
        assert_eq!(
            inflight.loss_verdict(ConnectionLossSnapshot { at, failure }, slot, LIMIT),
            expected,
            "{failure:?}"
        );
    }
}

#[test]
fn resets_caused_by_other_requests_do_not_fail_a_request() {
    let mut inflight = InflightRequests::new(2);
    let slot = inflight.insert(NOW, &request(7, 0, 0), &[], 0).unwrap().token;
    for _ in 0..1000 {
        assert!(inflight.requeue_after_loss(slot, LossVerdict::Unrelated));
        inflight.record_retry(NOW, 0);
        assert!(!inflight.is_isolating());
    }
}

#[test]
fn suspect_is_sent_alone_until_it_completes_or_fails() {
    let mut inflight = InflightRequests::new(3);
    let slots =
        [1, 2].map(|token| inflight.insert(NOW, &request(token, 0, 0), &[], 0).unwrap().token);
    slots.iter().for_each(|slot| assert!(inflight.requeue_after_loss(*slot, LossVerdict::Suspect)));
    assert!(inflight.next_retry(1).is_none(), "not while others are there");
    for guilt in 1..=CAUSED_RESETS_MAX {
        assert_eq!(inflight.next_retry(0).unwrap().0.token, slots[0]);
        inflight.record_retry(NOW, 0);
        assert!(inflight.is_isolating() && inflight.next_retry(0).is_none(), "nor others with it");
        let loss_verdict = inflight.loss_verdict(
            ConnectionLossSnapshot { failure: ConnectionFailure::ManyInFlight, ..RESET },
            slots[0],
            LIMIT,
        );
        assert_eq!(loss_verdict, LossVerdict::Cause);
        assert_eq!(inflight.requeue_after_loss(slots[0], loss_verdict), guilt < CAUSED_RESETS_MAX);
        // The other request completes in between.
        if guilt == 1 {
            inflight.record_retry(NOW, 0);
            inflight.clear_suspect(slots[1]);
            inflight.remove(slots[1]);
        }
    }
    inflight.remove(slots[0]);
    assert!(!inflight.is_isolating() && inflight.is_empty());
}

/// A request that a path has no free entry for belongs to no path: it waits once, whatever becomes of the
/// path.
#[test]
fn request_rejected_by_a_full_path_is_requeued_without_a_path() {
    let mut inflight = InflightRequests::new(2);
    inflight.insert(NOW, &request(7, 0, 0), &[], 0).unwrap();
    assert_eq!(inflight.requeue_path(0, RESET, LIMIT, |_| true), (1, Vec::new()));
    let (retries, _) = inflight.next_retry(0).unwrap();
    assert!(inflight.is_awaited(retries.token), "under its later name");
    assert_eq!(inflight.requeue_path(0, RESET, LIMIT, |_| true), (0, Vec::new()), "no path has it");
    inflight.record_retry(NOW, 1);
    assert!(!inflight.has_retries() && !inflight.is_empty());
    assert_eq!(inflight.requeue_path(0, RESET, LIMIT, |_| true).0, 0);
    assert_eq!(inflight.requeue_path(1, RESET, LIMIT, |_| true).0, 1);
}

#[test]
fn request_that_hangs_on_every_path_fails_after_limited_retries() {
    let mut inflight = InflightRequests::new(2);
    let slot = inflight.insert(NOW, &request(7, 0, 0), &[], 0).unwrap().token;
    let mut now = NOW;
    for guilt in 1..=CAUSED_RESETS_MAX {
        now = now.after(Span::from_secs(32));
        let path = (guilt - 1) % 2;
        let (count, not_retried) =
            inflight
                .requeue_path(path, ConnectionLossSnapshot { at: now, ..RESET }, LIMIT, |_| true);
        let expected = if guilt < CAUSED_RESETS_MAX { vec![] } else { vec![slot] };
        assert_eq!((count, not_retried), (1, expected), "reset {guilt}");
        inflight.record_retry(now, guilt % 2);
    }
}

#[test]
fn suspect_on_a_lost_path_does_not_delay_other_requests() {
    let mut inflight = InflightRequests::new(3);
    let slots =
        [1, 2].map(|token| inflight.insert(NOW, &request(token, 0, 0), &[], 0).unwrap().token);
    slots.iter().for_each(|slot| assert!(inflight.requeue_after_loss(*slot, LossVerdict::Suspect)));
    inflight.record_retry(NOW, 0);
    assert!(inflight.next_retry(0).is_none(), "it is out");
    let loss = ConnectionLossSnapshot { failure: ConnectionFailure::OneInFlight, ..RESET };
    assert_eq!(
        inflight.requeue_path(0, loss, LIMIT, |_| false),
        (0, vec![]),
        "it may go nowhere yet"
    );
    assert_eq!(inflight.next_retry(0).unwrap().0.token, slots[1]);
    assert_eq!(inflight.loss_verdict(loss, slots[0], LIMIT), LossVerdict::Cause, "all the same");
}

#[test]
fn copy_with_a_rejected_part_is_retried_only_if_idempotent() {
    for (operand, is_permitted) in [(200, true), (150, false)] {
        let copy = Request {
            operation: Operation::Copy,
            lba: 100,
            operand,
            blocks: 100,
            ..request(7, 0, 0)
        };
        let mut inflight = InflightRequests::new(1);
        let slot = inflight.insert(NOW, &copy, &[], 0).unwrap().token;
        assert_eq!(inflight.requeue_rejected(slot, true), is_permitted, "from {operand}");
    }
}
