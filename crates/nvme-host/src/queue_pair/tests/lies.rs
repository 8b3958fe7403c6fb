//! Invalid completions.

use std::sync::atomic::Ordering;

use tenmil_base::{IoStatus, Memory};

use super::World;
use crate::queue_link::ResetReason;
use crate::slot::InvalidCompletion;

#[test]
fn an_identifier_that_is_not_in_flight_is_reported_and_skipped() {
    let mut world = World::plain(8);
    let first = world.send(1);
    world.send(2);
    world.device.complete_next(0);
    world.device.post(first, 0);
    world.device.post(7, 0);
    world.device.post(6, 0);
    world.device.complete_next(0);
    let tokens: Vec<u64> = world.poll().iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [1, 2], "what is right among it still counts");
    assert_eq!(world.stats().nonsense, 3);
    assert_eq!(
        world.queue.last_invalid_completion(),
        Some(InvalidCompletion::NotInFlight { cid: 6 })
    );
    let wanted = world.controller.take_reset_request();
    let duplicate = InvalidCompletion::NotInFlight { cid: first };
    assert_eq!(
        wanted,
        Some(ResetReason::InvalidCompletion(duplicate)),
        "the first one is reported"
    );
}

#[test]
fn an_identifier_beyond_the_table_is_unknown() {
    let mut world = World::plain(8);
    world.send(1);
    world.device.post(7, 0);
    assert_eq!(world.poll(), []);
    assert_eq!(
        world.queue.last_invalid_completion(),
        Some(InvalidCompletion::UnknownIdentifier { cid: 7 })
    );
}

#[test]
fn a_duplicate_does_not_end_the_command_that_has_the_slot_now() {
    let mut world = World::plain(2);
    let old = world.send(1);
    world.device.complete_next(0);
    assert_eq!(world.poll().len(), 1);
    world.send(2);
    world.device.post(old, 0);
    assert_eq!(world.poll(), [], "token 2 is still in the device's hands");
    assert_eq!(world.poll(), [], "and the device hears that there is room again");
    world.device.complete_next(0);
    assert_eq!(world.poll(), [(2, IoStatus::SUCCESS)]);
}

#[test]
fn an_entry_of_the_wrong_phase_is_not_there() {
    let mut world = World::plain(4);
    let cid = world.send(1);
    // As `post` would write it, but with the phase of the previous pass.
    let memory = world.queue.transport().memory();
    let entry = tenmil_wire::Completion([0, 0, 1, u32::from(cid)]).to_bytes();
    world.queue.transport().dma().store(memory.completion.slice(0, 16).unwrap(), &entry).unwrap();
    assert_eq!(world.poll(), []);
    assert_eq!((world.stats().nonsense, world.stats().idle_polls), (0, 1));
}

#[test]
fn every_submission_head_outside_what_was_sent_is_reported() {
    for sent_before in 0..8 {
        for sent in 1..8_u32 {
            for head in 0..20_u32 {
                let mut world = World::plain(8);
                for token in 0..sent_before {
                    world.send(token);
                    world.device.complete_next(0);
                    world.poll();
                }
                let cids: Vec<u16> = (0..sent).map(|token| world.send(u64::from(token))).collect();
                world.device.post_entry([0, 0, head, u32::from(cids[0])]);
                assert_eq!(world.poll().len(), 1, "the identifier was right");

                let start = u32::try_from(sent_before).unwrap();
                let believable = (start..=start + sent).any(|at| at % 8 == head);
                let nonsense =
                    InvalidCompletion::SubmissionHead { head: u16::try_from(head).unwrap() };
                let expected = (!believable).then_some(nonsense);
                assert_eq!(
                    world.queue.last_invalid_completion(),
                    expected,
                    "{start} {sent} {head}"
                );
            }
        }
    }
}

#[test]
fn a_submission_head_does_not_go_back() {
    let mut world = World::plain(8);
    let cids: Vec<u16> = (0..5).map(|token| world.send(token)).collect();
    for (cid, head) in cids.iter().zip([3_u32, 2, 3, 5, 4]) {
        world.device.post_entry([0, 0, head, u32::from(*cid)]);
        assert_eq!(world.poll().len(), 1);
    }
    assert_eq!(world.stats().nonsense, 2, "two and four were behind what had been said before");
}

#[test]
fn a_device_that_posts_nothing_but_nonsense_does_not_keep_a_poll_for_ever() {
    let mut world = World::plain(8);
    world.send(1);
    world.queue.transport().dma().is_endless.store(true, Ordering::Relaxed);
    for poll in 1..4 {
        assert_eq!(world.poll(), []);
        assert_eq!(world.queue.cold.nonsense_count, 8 * poll, "as many as the ring has");
    }
}
