//! Invalid completions.

use std::sync::atomic::Ordering;

use tenmil_base::{IoStatus, Memory};

use super::QueuePairHarness;
use crate::queue_link::ResetReason;
use crate::slot_table::InvalidCompletion;

#[test]
fn cid_not_in_flight_is_reported_and_skipped() {
    let mut harness = QueuePairHarness::plain(8);
    let first = harness.send(1);
    harness.send(2);
    harness.device.complete_next(0);
    harness.device.post(first, 0);
    harness.device.post(7, 0);
    harness.device.post(6, 0);
    harness.device.complete_next(0);
    let tokens: Vec<u64> = harness.poll().iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [1, 2], "what is right among it still counts");
    assert_eq!(harness.stats().invalid_completions, 3);
    assert_eq!(
        harness.queue.last_invalid_completion(),
        Some(InvalidCompletion::NotInFlight { cid: 6 })
    );
    let wanted = harness.controller.take_reset_request();
    let duplicate = InvalidCompletion::NotInFlight { cid: first };
    assert_eq!(
        wanted,
        Some(ResetReason::InvalidCompletion(duplicate)),
        "the first one is reported"
    );
}

#[test]
fn an_identifier_beyond_the_table_is_unknown() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send(1);
    harness.device.post(7, 0);
    assert_eq!(harness.poll(), []);
    assert_eq!(
        harness.queue.last_invalid_completion(),
        Some(InvalidCompletion::UnknownIdentifier { cid: 7 })
    );
}

#[test]
fn duplicate_completion_does_not_complete_the_next_command_in_its_slot() {
    let mut harness = QueuePairHarness::plain(2);
    let old = harness.send(1);
    harness.device.complete_next(0);
    assert_eq!(harness.poll().len(), 1);
    harness.send(2);
    harness.device.post(old, 0);
    assert_eq!(harness.poll(), [], "token 2 is still in the device's hands");
    assert_eq!(harness.poll(), [], "and the device hears that there is room again");
    harness.device.complete_next(0);
    assert_eq!(harness.poll(), [(2, IoStatus::SUCCESS)]);
}

#[test]
fn entry_with_wrong_phase_is_ignored() {
    let mut harness = QueuePairHarness::plain(4);
    let cid = harness.send(1);
    // As `post` would write it, but with the phase of the previous pass.
    let memory = harness.queue.transport().memory();
    let entry = tenmil_wire::Completion([0, 0, 1, u32::from(cid)]).to_bytes();
    harness.queue.transport().dma().store(memory.completion.slice(0, 16).unwrap(), &entry).unwrap();
    assert_eq!(harness.poll(), []);
    assert_eq!((harness.stats().invalid_completions, harness.stats().idle_polls), (0, 1));
}

#[test]
fn every_submission_head_outside_what_was_sent_is_reported() {
    for sent_before in 0..8 {
        for sent in 1..8_u32 {
            for head in 0..20_u32 {
                let mut harness = QueuePairHarness::plain(8);
                for token in 0..sent_before {
                    harness.send(token);
                    harness.device.complete_next(0);
                    harness.poll();
                }
                let cids: Vec<u16> =
                    (0..sent).map(|token| harness.send(u64::from(token))).collect();
                harness.device.post_raw_entry([0, 0, head, u32::from(cids[0])]);
                assert_eq!(harness.poll().len(), 1, "the identifier was right");

                let start = u32::try_from(sent_before).unwrap();
                let believable = (start..=start + sent).any(|at| at % 8 == head);
                let invalid_completion =
                    InvalidCompletion::SubmissionHead { head: u16::try_from(head).unwrap() };
                let expected = (!believable).then_some(invalid_completion);
                assert_eq!(
                    harness.queue.last_invalid_completion(),
                    expected,
                    "{start} {sent} {head}"
                );
            }
        }
    }
}

#[test]
fn submission_head_does_not_decrease() {
    let mut harness = QueuePairHarness::plain(8);
    let cids: Vec<u16> = (0..5).map(|token| harness.send(token)).collect();
    for (cid, head) in cids.iter().zip([3_u32, 2, 3, 5, 4]) {
        harness.device.post_raw_entry([0, 0, head, u32::from(*cid)]);
        assert_eq!(harness.poll().len(), 1);
    }
    assert_eq!(
        harness.stats().invalid_completions,
        2,
        "two and four were behind what had been said before"
    );
}

#[test]
fn invalid_completions_do_not_block_a_poll() {
    let mut harness = QueuePairHarness::plain(8);
    harness.send(1);
    harness.queue.transport().dma().is_endless.store(true, Ordering::Relaxed);
    for poll in 1..4 {
        assert_eq!(harness.poll(), []);
        assert_eq!(
            harness.queue.cold.invalid_completion_count,
            8 * poll,
            "as many as the ring has"
        );
    }
}
