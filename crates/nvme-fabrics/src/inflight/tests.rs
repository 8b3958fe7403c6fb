//! Requests in flight, and the search for the cause of resets.

use tenmil_base::{Instant, Operation, Request, Segment, Span};

use super::{
    CAUSED_RESETS_MAX, ConnectionFailure, ConnectionLossInfo, InflightRequests, LossVerdict,
    may_be_repeated,
};

const NOW: Instant = Instant { ns: 5_000_000_000 };
const LIMIT: Span = Span::from_secs(30);
const RESET: ConnectionLossInfo = ConnectionLossInfo { at: NOW, broken: ConnectionFailure::No };

fn request(token: u64, first: u32, count: u16) -> Request {
    Request { token, segment_first: first, segment_count: count, ..Request::PLACEHOLDER }
}

#[test]
fn what_is_sent_again_is_what_was_kept() {
    let mut kept = InflightRequests::new(2);
    let table: Vec<Segment> =
        (0..5).map(|at| Segment { offset: at, ..Segment::default() }).collect();
    let one = kept.insert(NOW, &request(70, 3, 1), &table).unwrap();
    let three = kept.insert(NOW, &request(71, 1, 3), &table).unwrap();
    assert_eq!(kept.insert(NOW, &request(72, 0, 0), &table), None, "there are two places");
    assert!(kept.requeue(three.token, LossVerdict::Unrelated));
    assert!(kept.requeue(one.token, LossVerdict::Unrelated));
    for (expected, token, slot) in [(&table[1..4], 71, three), (&table[3..4], 70, one)] {
        let (again, segments) = kept.next_again(0).unwrap();
        assert_eq!((again.token, again.segment_first), (slot.token, 0));
        assert_eq!(segments, expected);
        kept.sent_again(NOW, 0);
        assert_eq!(kept.forget(slot.token), token);
    }
    assert!(!kept.has_again() && kept.free.len() == 2);
}

#[test]
fn only_what_does_the_same_twice_is_repeated() {
    for operation in Operation::ALL {
        let request =
            Request { operation, lba: 100, operand: 200, blocks: 100, ..Request::PLACEHOLDER };
        assert_eq!(may_be_repeated(&request), operation != Operation::CompareAndWrite);
        let overlapping = Request { operand: 199, ..request };
        let copies = matches!(operation, Operation::Copy | Operation::CompareAndWrite);
        assert_eq!(may_be_repeated(&overlapping), !copies, "{operation:?}");
    }
}

/// Whether a reset has a cause among the requests.
#[test]
fn who_was_alone_or_late_is_guilty_and_who_had_company_is_a_suspect() {
    let late = NOW.after(Span::from_secs(32));
    for (at, broken, expected) in [
        (NOW, ConnectionFailure::No, LossVerdict::Unrelated),
        (late, ConnectionFailure::No, LossVerdict::Cause),
        (NOW, ConnectionFailure::UnderMany, LossVerdict::Suspect),
        (late, ConnectionFailure::UnderMany, LossVerdict::Suspect),
        (NOW, ConnectionFailure::UnderOne, LossVerdict::Cause),
    ] {
        let mut kept = InflightRequests::new(2);
        let slot = kept.insert(NOW, &request(7, 0, 0), &[]).unwrap().token;
        assert_eq!(
            kept.ending(ConnectionLossInfo { at, broken }, slot, LIMIT),
            expected,
            "{broken:?}"
        );
    }
}

#[test]
fn no_number_of_resets_of_others_is_held_against_a_request() {
    let mut kept = InflightRequests::new(2);
    let slot = kept.insert(NOW, &request(7, 0, 0), &[]).unwrap().token;
    for _ in 0..1000 {
        assert!(kept.requeue(slot, LossVerdict::Unrelated));
        kept.sent_again(NOW, 0);
        assert!(!kept.is_isolating());
    }
}

#[test]
fn a_suspect_goes_alone_until_it_is_answered_or_found_guilty() {
    let mut kept = InflightRequests::new(3);
    let slots = [1, 2].map(|token| kept.insert(NOW, &request(token, 0, 0), &[]).unwrap().token);
    slots.iter().for_each(|slot| assert!(kept.requeue(*slot, LossVerdict::Suspect)));
    assert!(kept.next_again(1).is_none(), "not while others are there");
    for guilt in 1..=CAUSED_RESETS_MAX {
        assert_eq!(kept.next_again(0).unwrap().0.token, slots[0]);
        kept.sent_again(NOW, 0);
        assert!(kept.is_isolating() && kept.next_again(0).is_none(), "nor others with it");
        let ending = kept.ending(
            ConnectionLossInfo { broken: ConnectionFailure::UnderMany, ..RESET },
            slots[0],
            LIMIT,
        );
        assert_eq!(ending, LossVerdict::Cause);
        assert_eq!(kept.requeue(slots[0], ending), guilt < CAUSED_RESETS_MAX);
        // The other request completes in between.
        if guilt == 1 {
            kept.sent_again(NOW, 0);
            kept.clear_suspect(slots[1]);
            kept.forget(slots[1]);
        }
    }
    kept.forget(slots[0]);
    assert!(!kept.is_isolating() && kept.in_flight() == 0);
}

/// A request that a path has no free entry for belongs to no path: it waits once, whatever becomes of the
/// path.
#[test]
fn what_was_not_sent_again_is_not_left_with_the_path_that_had_no_room() {
    let mut kept = InflightRequests::new(2);
    let slot = kept.insert(NOW, &request(7, 0, 0), &[]).unwrap().token;
    kept.send_to(slot, 0);
    assert_eq!(kept.requeue_path(0, RESET, LIMIT, |_| true), (1, Vec::new()));
    let (again, _) = kept.next_again(0).unwrap();
    assert!(kept.is_awaited(again.token), "under its later name");
    assert_eq!(kept.requeue_path(0, RESET, LIMIT, |_| true), (0, Vec::new()), "no path has it");
    kept.sent_again(NOW, 1);
    assert!(!kept.has_again() && kept.in_flight() == 1);
    assert_eq!(kept.requeue_path(0, RESET, LIMIT, |_| true).0, 0);
    assert_eq!(kept.requeue_path(1, RESET, LIMIT, |_| true).0, 1);
}

#[test]
fn what_hangs_on_every_path_is_given_up_and_not_sent_round_for_ever() {
    let mut kept = InflightRequests::new(2);
    let slot = kept.insert(NOW, &request(7, 0, 0), &[]).unwrap().token;
    kept.send_to(slot, 0);
    let mut now = NOW;
    for guilt in 1..=CAUSED_RESETS_MAX {
        now = now.after(Span::from_secs(32));
        let path = usize::from(guilt - 1) % 2;
        let (count, guilty) =
            kept.requeue_path(path, ConnectionLossInfo { at: now, ..RESET }, LIMIT, |_| true);
        let expected = if guilt < CAUSED_RESETS_MAX { vec![] } else { vec![slot] };
        assert_eq!((count, guilty), (1, expected), "reset {guilt}");
        kept.sent_again(now, usize::from(guilt) % 2);
    }
}

#[test]
fn a_suspect_on_a_path_that_is_cut_holds_nobody_up_while_it_waits() {
    let mut kept = InflightRequests::new(3);
    let slots = [1, 2].map(|token| kept.insert(NOW, &request(token, 0, 0), &[]).unwrap().token);
    slots.iter().for_each(|slot| assert!(kept.requeue(*slot, LossVerdict::Suspect)));
    kept.sent_again(NOW, 0);
    assert!(kept.next_again(0).is_none(), "it is out");
    let cut = ConnectionLossInfo { broken: ConnectionFailure::UnderOne, ..RESET };
    assert_eq!(kept.requeue_path(0, cut, LIMIT, |_| false), (0, vec![]), "it may go nowhere yet");
    assert_eq!(kept.next_again(0).unwrap().0.token, slots[1]);
    assert_eq!(kept.ending(cut, slots[0], LIMIT), LossVerdict::Cause, "all the same");
}

#[test]
fn a_copy_that_one_of_its_parts_was_refused_is_repeated_only_if_it_does_the_same() {
    for (operand, may) in [(200, true), (150, false)] {
        let copy = Request {
            operation: Operation::Copy,
            lba: 100,
            operand,
            blocks: 100,
            ..request(7, 0, 0)
        };
        let mut kept = InflightRequests::new(1);
        let slot = kept.insert(NOW, &copy, &[]).unwrap().token;
        assert_eq!(kept.requeue_rejected(slot, true), may, "from {operand}");
    }
}
