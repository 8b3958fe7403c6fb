use std::collections::BTreeSet;

use base::{Answers, Dma, Doorbell, Instant, Memory, Outcome, Random, Span};
use wire::{Command, Fuse};

use super::{
    Full, Injection, InjectionSide, QueueDoorbell, QueueMemory, QueuePair, QueueSetup, QueueStats,
    ShadowPlace,
};
use crate::fake::{FakeDma, FakeDoorbell, FakeQueue, at_ms};
use crate::link::{ControllerEnd, Order, ResetReason, link};
use crate::slot::Nonsense;
use crate::techniques::{CompletionCopy, CompletionDoorbell, Techniques};

const READ: u8 = 0x02;
const WRITE: u8 = 0x01;
const NOW: Instant = Instant { ns: 5 };

struct World {
    queue: QueuePair<FakeDma, FakeDoorbell>,
    device: FakeQueue,
    controller: ControllerEnd,
    answers: Answers,
}

impl World {
    fn new(submission_depth: u32, completion_depth: u32, techniques: Techniques) -> Self {
        let dma = FakeDma::new(16);
        let memory = QueueMemory::allocate(&dma, submission_depth, completion_depth).unwrap();
        let device = FakeQueue::new(&dma, memory);
        let (controller, queue_end) = link(1);
        let setup = QueueSetup {
            memory,
            submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
            completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
            link: queue_end,
            timeout: Span::from_ms(800),
            techniques,
        };
        let queue = QueuePair::new(&dma, setup);
        controller.give(Order::Run);
        Self { queue, device, controller, answers: Answers::with_capacity(1024) }
    }

    fn plain(depth: u32) -> Self {
        Self::new(depth, depth, Techniques::default())
    }

    fn submit(&mut self, token: u64) -> Result<u16, Full> {
        self.queue.submit(NOW, token, Command::new(READ))
    }

    /// Submits a command and lets the device fetch it.
    fn send(&mut self, token: u64) -> u16 {
        let cid = self.submit(token).unwrap();
        self.queue.flush();
        self.device.fetch();
        cid
    }

    fn send_all(&mut self, tokens: core::ops::Range<u64>) {
        for token in tokens {
            self.send(token);
        }
    }

    fn complete(&mut self, count: usize) {
        for _ in 0..count {
            self.device.complete_next(0);
        }
    }

    fn poll_at(&mut self, now: Instant) -> Vec<(u64, Outcome)> {
        self.queue.poll(now, &mut self.answers);
        self.answers.drain().map(|answer| (answer.token, answer.outcome)).collect()
    }

    fn poll(&mut self) -> Vec<(u64, Outcome)> {
        self.poll_at(NOW)
    }

    fn stats(&self) -> QueueStats {
        self.queue.stats()
    }
}

fn all_techniques() -> impl Iterator<Item = Techniques> {
    let doorbells =
        [CompletionDoorbell::Each, CompletionDoorbell::Poll, CompletionDoorbell::Deferred];
    (0..2_u32.pow(5)).flat_map(move |bits| {
        doorbells.map(|completion_doorbell| Techniques {
            doorbell_batching: bits & 1 != 0,
            completion_doorbell,
            completion_copy: if bits & 2 != 0 {
                CompletionCopy::Line
            } else {
                CompletionCopy::Each
            },
            slot_lookahead: bits & 4 != 0,
            submission_prefetch: if bits & 8 != 0 { 3 } else { 0 },
            completion_prefetch: bits & 16 != 0,
        })
    })
}

/// Laps of every batch size over rings of several depths, so that both wrap in every position,
/// under every technique. The fake device fails the test if its completion ring overruns.
#[test]
fn tokens_come_back_once_and_in_order_across_wraps_under_every_technique() {
    for techniques in all_techniques() {
        for (depth, completion_depth) in [(2, 2), (5, 5), (8, 8), (5, 8), (8, 5)] {
            for batch in 1..depth.min(completion_depth) {
                let mut world = World::new(depth, completion_depth, techniques);
                let mut next = 0_u64;
                for _turn in 0..5 * depth {
                    let expected: Vec<u64> = (next..next + u64::from(batch)).collect();
                    next += u64::from(batch);
                    for token in &expected {
                        world.submit(*token).unwrap();
                    }
                    world.queue.flush();
                    assert_eq!(world.poll(), []);
                    assert_eq!(world.device.fetch(), batch as usize);
                    for _ in 0..batch {
                        world.device.complete_next(0);
                    }
                    let tokens: Vec<u64> = world.poll().iter().map(|(token, _)| *token).collect();
                    assert_eq!(tokens, expected, "{techniques:?} {depth} {batch}");
                }
                assert_eq!(world.stats().nonsense, 0);
                assert_eq!(world.stats().completed, next);
            }
        }
    }
}

/// A device that completes late and in any order never runs out of completion entries, whichever
/// way the host tells it of free ones.
#[test]
fn random_traffic_never_overruns_the_completion_ring() {
    for (seed, techniques) in (1..).zip(all_techniques()) {
        let mut random = Random::new(seed);
        let mut world = World::new(16, 16, techniques);
        let (mut next, mut owed) = (0, BTreeSet::new());
        for _ in 0..600 {
            while random.chance(2, 3) && world.submit(next).is_ok() {
                owed.insert(next);
                next += 1;
            }
            if random.chance(1, 2) {
                world.queue.flush();
            }
            world.device.fetch();
            while random.chance(2, 3) && !world.device.fetched.is_empty() {
                let count = world.device.fetched.len() as u64;
                let chosen = usize::try_from(random.below(count)).unwrap();
                world.device.fetched.swap(0, chosen);
                world.device.complete_next(0);
            }
            if random.chance(1, 2) {
                for (token, outcome) in world.poll() {
                    assert!(owed.remove(&token), "seed {seed}: {token} came back twice");
                    assert!(outcome.is_success());
                }
            }
        }
        world.queue.flush();
        world.device.fetch();
        while !world.device.fetched.is_empty() {
            world.device.complete_next(0);
        }
        world.poll().iter().for_each(|(token, _)| assert!(owed.remove(token)));
        assert!(owed.is_empty(), "seed {seed}: {owed:?}");
        assert_eq!(world.stats().nonsense, 0);
        assert!(next > 300);
    }
}

#[test]
fn a_full_queue_gives_the_command_back_until_one_has_completed() {
    for depth in 2..9 {
        let mut world = World::plain(depth);
        for token in 1..u64::from(depth) {
            world.submit(token).unwrap();
        }
        assert_eq!(world.submit(99), Err(Full), "a ring of {depth} holds one less");
        assert_eq!(world.queue.in_flight(), depth - 1);
        world.queue.flush();
        world.device.fetch();
        world.device.complete_next(0);
        assert_eq!(world.poll().len(), 1);
        assert!(world.submit(99).is_ok());
    }
}

#[test]
fn doorbells_are_rung_as_seldom_as_the_technique_says() {
    let rings = |techniques: Techniques, completion_depth| {
        let mut world = World::new(16, completion_depth, techniques);
        for _ in 0..4 {
            for token in 0..10 {
                world.submit(token).unwrap();
            }
            world.queue.flush();
            world.queue.flush();
            world.device.fetch();
            world.complete(10);
            assert_eq!(world.poll().len(), 10);
        }
        let stats = world.stats();
        assert_eq!(stats.submission_doorbells, u64::from(world.device.tail_doorbell.rings()));
        assert_eq!(stats.completion_doorbells, u64::from(world.device.head_doorbell.rings()));
        (stats.submission_doorbells, stats.completion_doorbells)
    };
    let fast = Techniques::default();
    assert_eq!(rings(fast, 16), (4, 4));
    assert_eq!(rings(Techniques { doorbell_batching: false, ..fast }, 16), (40, 4));
    let each = CompletionDoorbell::Each;
    let single = CompletionCopy::Each;
    let one_by_one = Techniques { completion_doorbell: each, completion_copy: single, ..fast };
    assert_eq!(rings(one_by_one, 16), (4, 40));
    let each_of_a_line = Techniques { completion_doorbell: each, ..fast };
    assert_eq!(rings(each_of_a_line, 16), (4, 40), "a copied line does not change that");
    let deferred = Techniques { completion_doorbell: CompletionDoorbell::Deferred, ..fast };
    assert_eq!(rings(deferred, 16), (4, 3), "ten and ten do not fit into fifteen");
    assert_eq!(rings(deferred, 32), (4, 1), "thirty and ten do not fit into thirty-one");
}

#[test]
fn a_poll_takes_no_more_than_there_is_room_for() {
    let mut world = World::plain(16);
    world.answers = Answers::with_capacity(3);
    world.send_all(0..10);
    world.complete(10);
    let counts: Vec<usize> = (0..5).map(|_| world.poll().len()).collect();
    assert_eq!(counts, [3, 3, 3, 1, 0]);
}

#[test]
fn a_failed_command_brings_its_status_and_result() {
    let mut world = World::plain(8);
    let cid = world.send(7);
    world.device.complete_next(0x4281);
    assert_eq!(world.queue.poll(NOW, &mut world.answers), 1);
    let answer = world.answers.as_slice()[0];
    assert_eq!((answer.token, answer.outcome), (7, Outcome(0x4281)));
    assert_eq!(answer.result, u32::from(cid) ^ 0xabcd);
}

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
    assert_eq!(world.queue.last_nonsense(), Some(Nonsense::NotInFlight { cid: 6 }));
    let wanted = world.controller.take_wanted_reset();
    let duplicate = Nonsense::NotInFlight { cid: first };
    assert_eq!(wanted, Some(ResetReason::Nonsense(duplicate)), "the first one is reported");
}

#[test]
fn an_identifier_beyond_the_table_is_unknown() {
    let mut world = World::plain(8);
    world.send(1);
    world.device.post(7, 0);
    assert_eq!(world.poll(), []);
    assert_eq!(world.queue.last_nonsense(), Some(Nonsense::UnknownIdentifier { cid: 7 }));
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
    world.device.complete_next(0);
    assert_eq!(world.poll(), [(2, Outcome::SUCCESS)]);
}

#[test]
fn an_entry_of_the_wrong_phase_is_not_there() {
    let mut world = World::plain(4);
    let cid = world.send(1);
    // As `post` would write it, but with the phase of the lap before.
    let memory = world.queue.memory();
    let entry = wire::Completion([0, 0, 1, u32::from(cid)]).to_bytes();
    world.queue.cold.dma.store(memory.completion.slice(0, 16).unwrap(), &entry).unwrap();
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
                let nonsense = Nonsense::SubmissionHead { head: u16::try_from(head).unwrap() };
                let expected = (!believable).then_some(nonsense);
                assert_eq!(world.queue.last_nonsense(), expected, "{start} {sent} {head}");
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
    // Every entry of the ring carries the new phase, as if there were no end.
    let memory = world.queue.memory();
    for lap in [1_u32, 0] {
        for index in 0..8 {
            let entry = wire::Completion([0, 0, 0, lap << 16 | 0xffff]).to_bytes();
            let place = memory.completion.slice(index * 16, 16).unwrap();
            world.queue.cold.dma.store(place, &entry).unwrap();
        }
        assert_eq!(world.poll(), []);
    }
    assert_eq!(world.stats().nonsense, 16);
}

#[test]
fn fused_halves_are_adjacent_and_announced_together() {
    let batched = Techniques::default();
    for techniques in [batched, Techniques { doorbell_batching: false, ..batched }] {
        for before in 0..8 {
            let mut world = World::new(8, 8, techniques);
            for token in 0..before {
                world.send(token);
                world.device.complete_next(0);
                world.poll();
            }
            let rings = world.device.tail_doorbell.rings();
            let halves = [(1, Command::new(0x05)), (2, Command::new(WRITE))];
            world.queue.submit_fused(NOW, halves[0], halves[1]).unwrap();
            world.queue.flush();
            assert_eq!(world.device.tail_doorbell.rings(), rings + 1);
            assert_eq!(world.device.fetch(), 2);
            let fuses: Vec<_> =
                world.device.fetched.iter().map(|it| (it.opcode(), it.fuse())).collect();
            assert_eq!(fuses, [(0x05, Fuse::First), (WRITE, Fuse::Second)]);
            world.device.complete_next(0);
            world.device.complete_next(0);
            assert_eq!(world.poll().len(), 2);
        }
    }
}

#[test]
fn half_a_fused_pair_is_never_sent() {
    let mut world = World::plain(4);
    let pair = |world: &mut World| {
        world.queue.submit_fused(NOW, (8, Command::new(0x05)), (9, Command::new(WRITE)))
    };
    world.send(1);
    world.send(2);
    assert_eq!(pair(&mut world), Err(Full), "one slot is not enough");
    world.device.complete_next(0);
    world.poll();
    assert!(pair(&mut world).is_ok());
    world.controller.give(Order::Quiesce);
    assert_eq!(pair(&mut world), Err(Full));
}

#[test]
fn nothing_is_submitted_before_the_order_to_run() {
    let mut world = World::plain(4);
    world.controller.give(Order::Freeze);
    assert_eq!(world.submit(1), Err(Full));
    assert_eq!(world.queue.standing(), Order::Freeze);
    assert_eq!(world.stats().submitted, 0);
}

#[test]
fn a_quiesced_queue_runs_dry_and_says_how_far_it_is() {
    let mut world = World::plain(8);
    world.send_all(0..3);
    world.submit(3).unwrap();
    world.controller.give(Order::Quiesce);
    assert_eq!(world.submit(4), Err(Full));
    world.queue.flush();
    assert_eq!(world.device.fetch(), 1, "what was taken before the order is still announced");
    assert!(world.controller.has_adopted());
    assert_eq!(world.controller.in_flight(), 4);
    world.complete(4);
    assert_eq!(world.poll().len(), 4);
    assert_eq!(world.controller.in_flight(), 0);
    assert_eq!(world.device.head_doorbell.value(), 4);
    world.controller.give(Order::Run);
    world.send(5);
    world.device.complete_next(0);
    assert_eq!(world.poll(), [(5, Outcome::SUCCESS)]);
}

/// The heart of a reset: tokens are parked while the device may still write, and come back exactly
/// once, after it cannot.
#[test]
fn parked_tokens_come_back_exactly_once_and_never_early() {
    for room in [1, 3, 100] {
        let mut world = World::plain(8);
        world.answers = Answers::with_capacity(room);
        world.send_all(0..5);
        world.submit(5).unwrap();
        world.device.complete_next(0);
        world.controller.give(Order::Freeze);
        world.queue.flush();
        for hour in 1..5 {
            assert_eq!(world.poll_at(at_ms(hour * 3_600_000)), [], "not before the release");
        }
        world.queue.flush();
        assert_eq!(world.device.fetch(), 1, "the flush before the first poll, and none after");
        assert_eq!((world.controller.has_adopted(), world.controller.in_flight()), (true, 6));

        world.controller.give(Order::Release);
        let mut returned = Vec::new();
        for _ in 0..7 {
            let part = world.poll();
            assert!(world.controller.has_adopted() && part.len() <= room);
            returned.extend(part);
        }
        returned.sort_unstable_by_key(|(token, _)| *token);
        let expected: Vec<_> = (0..6).map(|token| (token, Outcome::ABORTED_BY_HOST)).collect();
        assert_eq!(returned, expected);
        assert_eq!(world.controller.in_flight(), 0);

        world.device.reset();
        world.controller.give(Order::Run);
        for token in 100..120 {
            world.send(token);
            world.device.complete_next(0);
            assert_eq!(world.poll(), [(token, Outcome::SUCCESS)]);
        }
        assert_eq!(world.stats().nonsense, 0);
    }
}

#[test]
fn a_queue_runs_again_only_when_everything_parked_is_answered() {
    let mut world = World::plain(8);
    world.answers = Answers::with_capacity(2);
    world.send_all(0..5);
    world.controller.give(Order::Release);
    assert_eq!(world.poll().len(), 2);
    world.device.reset();
    world.controller.give(Order::Run);
    assert_eq!(world.submit(9), Err(Full));
    assert_eq!(world.queue.wake_at(), Instant::default(), "it wants to be polled at once");
    assert_eq!((world.poll().len(), world.poll().len()), (2, 1));
    assert!(!world.controller.has_adopted());
    assert!(world.submit(9).is_ok());
    assert!(world.controller.has_adopted());
}

#[test]
fn a_completion_from_before_a_reset_is_not_seen_after_it() {
    let mut world = World::plain(8);
    let old = world.send(1);
    world.device.post(old, 0);
    world.controller.give(Order::Release);
    assert_eq!(world.poll(), [(1, Outcome::ABORTED_BY_HOST)]);
    world.device.reset();
    world.controller.give(Order::Run);
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
    world.controller.give(Order::Dead);
    assert_eq!(world.submit(2), Err(Full));
    assert_eq!(world.poll(), [(1, Outcome::ABORTED_BY_HOST)]);
    assert_eq!((world.queue.standing(), world.queue.wake_at()), (Order::Dead, Instant::NEVER));
}

#[test]
fn a_late_command_is_posted_once_and_asks_for_a_reset_if_an_abort_does_not_help() {
    let mut world = World::plain(8);
    let cid = world.send(1);
    for ms in 0..800 {
        world.poll_at(at_ms(ms));
        assert_eq!(world.controller.next_overdue(), None, "at {ms} ms of 800");
    }
    let found = (800..).find_map(|ms| {
        world.poll_at(at_ms(ms));
        world.controller.next_overdue().map(|overdue| (ms, overdue))
    });
    let (ms, overdue) = found.unwrap();
    assert!(ms <= 901, "found at {ms}: an eighth late at most");
    assert_eq!((overdue.cid, world.stats().overdue), (cid, 1));

    world.controller.abort_ended(overdue);
    for later in ms..ms + 800 {
        world.poll_at(at_ms(later));
        assert_eq!(world.controller.next_overdue(), None, "once is enough");
        assert_eq!(world.controller.take_wanted_reset(), None);
    }
    world.poll_at(at_ms(ms + 901));
    assert_eq!(world.controller.take_wanted_reset(), Some(ResetReason::Stuck { cid }));
}

#[test]
fn an_aborted_command_frees_its_identifier_once_the_abort_has_ended() {
    let mut world = World::plain(2);
    world.send(1);
    world.poll_at(at_ms(1000));
    let overdue = world.controller.next_overdue().unwrap();
    world.device.complete_next(0x07);
    assert_eq!(world.poll_at(at_ms(1000)), [(1, Outcome::ABORTED)]);
    assert_eq!(world.submit(2), Err(Full), "the abort could still hit this identifier");
    world.controller.abort_ended(overdue);
    world.poll_at(at_ms(2000));
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
        world.controller.next_overdue().is_some_and(|overdue| overdue.cid == soon)
    });
    assert!((16..=19).contains(&found.unwrap()), "{found:?}");
    for hour in 1..100 {
        world.poll_at(at_ms(hour * 3_600_000));
        assert_eq!(world.controller.next_overdue(), None);
    }
}

#[test]
fn every_late_command_is_posted_in_its_turn() {
    let mut world = World::plain(16);
    let mut late: BTreeSet<u16> = (0..12).map(|token| world.send(token)).collect();
    for turn in 0..3 {
        world.poll_at(at_ms(1000 + 200 * turn));
        for _ in 0..4 {
            let overdue = world.controller.next_overdue().unwrap();
            assert!(late.remove(&overdue.cid));
            world.controller.abort_ended(overdue);
        }
    }
    assert!(late.is_empty());
}

#[test]
fn an_idle_queue_has_no_reason_to_wake() {
    let mut world = World::plain(8);
    assert_eq!(world.queue.wake_at(), Instant::NEVER);
    world.send(1);
    assert!(world.queue.wake_at() < Instant::NEVER);
    world.device.complete_next(0);
    world.poll();
    assert_eq!(world.queue.wake_at(), Instant::NEVER);
}

#[test]
fn an_injected_error_hits_its_opcode_as_often_as_it_says() {
    for side in [InjectionSide::Submission, InjectionSide::Completion] {
        let mut world = World::plain(8);
        let outcome = Outcome::UNRECOVERED_READ;
        world.queue.inject(Injection { opcode: READ, side, outcome, count: 2 });
        let mut seen = Vec::new();
        for token in 0..6 {
            let opcode = if token == 1 { WRITE } else { READ };
            world.queue.submit(NOW, token, Command::new(opcode)).unwrap();
            world.queue.flush();
            let fetched = world.device.fetch();
            let unsent = side == InjectionSide::Submission && [0, 2].contains(&token);
            assert_eq!(fetched, usize::from(!unsent), "{side:?} {token}");
            world.complete(fetched);
            seen.extend(world.poll());
        }
        let hit = |token| if [0, 2].contains(&token) { outcome } else { Outcome::SUCCESS };
        let expected: Vec<_> = (0..6).map(|token| (token, hit(token))).collect();
        assert_eq!(seen, expected, "{side:?}");
        assert_eq!((world.stats().injected, world.stats().nonsense), (2, 0));
    }
}

#[test]
fn injections_can_be_called_off_and_do_not_survive_a_reset_half_done() {
    let mut world = World::plain(4);
    let (opcode, outcome) = (READ, Outcome::INTERNAL_ERROR);
    let side = InjectionSide::Submission;
    world.queue.inject(Injection { opcode, side, outcome, count: 100 });
    for token in 0..3 {
        world.submit(token).unwrap();
    }
    assert_eq!(world.submit(3), Err(Full), "backpressure is as it was");
    assert_eq!(world.queue.wake_at(), Instant::default());
    world.queue.clear_injections();
    world.controller.give(Order::Release);
    assert_eq!(world.poll().len(), 3);
    assert_eq!(world.poll(), [], "each token once");
    world.device.reset();
    world.controller.give(Order::Run);
    world.send(4);
    world.device.complete_next(0);
    assert_eq!(world.poll(), [(4, Outcome::SUCCESS)]);
}

#[test]
fn a_queue_sleeps_only_after_it_has_looked_again() {
    let deferred = CompletionDoorbell::Deferred;
    let mut world =
        World::new(8, 8, Techniques { completion_doorbell: deferred, ..Techniques::default() });
    world.poll();
    assert!(world.queue.arm());
    world.submit(1).unwrap();
    assert!(world.queue.arm());
    assert_eq!(world.device.fetch(), 1, "what was submitted is announced before sleeping");
    world.device.complete_next(0);
    assert!(!world.queue.arm(), "there is something to take");
    world.poll();
    assert_eq!(world.device.head_doorbell.value(), 0);
    assert!(world.queue.arm());
    assert_eq!(world.device.head_doorbell.value(), 1, "and what was taken is announced as well");
    world.controller.give(Order::Quiesce);
    assert!(!world.queue.arm(), "there is an order to follow");
}

#[test]
fn shadow_doorbells_serve_a_queue_like_registers_do() {
    let dma = FakeDma::new(8);
    let memory = QueueMemory::allocate(&dma, 8, 8).unwrap();
    let mut device = FakeQueue::new(&dma, memory);
    let [shadows, events] = [dma.allocate(4096).unwrap(), dma.allocate(4096).unwrap()];
    let place = |side| ShadowPlace::of(shadows, events, 1, side, 0).unwrap();
    let (tail, head) = (place(super::Side::Submission), place(super::Side::Completion));
    let register = FakeDoorbell::default();
    let (controller, queue_end) = link(1);
    let setup = QueueSetup {
        memory,
        submission_doorbell: QueueDoorbell::shadow(&dma, register.clone(), tail),
        completion_doorbell: QueueDoorbell::shadow(&dma, FakeDoorbell::default(), head),
        link: queue_end,
        timeout: Span::from_secs(1),
        techniques: Techniques::default(),
    };
    let mut queue = QueuePair::new(&dma, setup);
    controller.give(Order::Run);
    let mut answers = Answers::with_capacity(8);
    for token in 0..50_u32 {
        queue.submit(NOW, u64::from(token), Command::new(READ)).unwrap();
        queue.flush();
        // The device looks at the shadow, and stays awake for three commands out of four.
        device.tail_doorbell.ring(dma.load_u32(tail.doorbell).unwrap());
        assert_eq!(device.fetch(), 1);
        let seen = device.tail_doorbell.value();
        dma.store_u32(tail.event_index, (seen + token % 4) % 8).unwrap();
        device.complete_next(0);
        assert_eq!(queue.poll(NOW, &mut answers), 1);
        answers.clear();
        device.head_doorbell.ring(dma.load_u32(head.doorbell).unwrap());
    }
    assert_eq!(queue.stats().submission_doorbells, 50);
    assert!((5..30).contains(&register.rings()), "{} writes to the register", register.rings());
}

#[test]
fn a_queue_pair_without_memory_is_not_made() {
    let dma = FakeDma::new(2);
    assert_eq!(QueueMemory::allocate(&dma, 64, 512), None, "one page and then two");
    let memory = QueueMemory::allocate(&FakeDma::new(3), 64, 512).unwrap();
    assert_eq!(memory.in_flight_max(), 63);
    memory.release(&dma);
}
