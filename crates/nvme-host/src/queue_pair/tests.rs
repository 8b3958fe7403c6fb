mod deadlines;
mod invalid_completions;
mod queue_states;

use core::convert::Infallible;
use std::collections::BTreeSet;

use tenmil_base::{CompletionBatch, Dma, Doorbell, Instant, IoStatus, Memory, Random, Span};
use tenmil_wire::{Command, Fuse};

use super::{
    Injection, InjectionSide, QueueDoorbell, QueueFull, QueueMemory, QueuePair, QueueSetup,
    QueueStats, RingTransport, ShadowSlot,
};
use crate::fake_device::{FakeDma, FakeDoorbell, FakeQueue};
use crate::fast_path_options::{CompletionDoorbell, FastPathOptions};
use crate::queue_link::{ControllerLinkEnd, QueueState, create_link};

const READ: u8 = 0x02;
const WRITE: u8 = 0x01;
const NOW: Instant = Instant { ns: 5 };

pub(super) struct QueuePairHarness {
    queue: QueuePair<RingTransport<FakeDma, FakeDoorbell>>,
    device: FakeQueue,
    controller: ControllerLinkEnd<Infallible>,
    completions: CompletionBatch,
}

impl QueuePairHarness {
    pub(super) fn new(
        submission_depth: u32,
        completion_depth: u32,
        techniques: FastPathOptions,
    ) -> Self {
        let dma = FakeDma::new(16);
        let memory = QueueMemory::allocate(&dma, submission_depth, completion_depth).unwrap();
        let device = FakeQueue::new(&dma, memory);
        let (controller, queue_end) = create_link(1);
        let setup = QueueSetup {
            memory,
            submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
            completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
            link: queue_end,
            timeout: Span::from_ms(800),
            techniques,
        };
        let queue = QueuePair::new(&dma, setup);
        controller.run(None);
        Self { queue, device, controller, completions: CompletionBatch::with_capacity(1024) }
    }

    fn plain(depth: u32) -> Self {
        Self::new(depth, depth, FastPathOptions::default())
    }

    fn submit(&mut self, token: u64) -> Result<u16, QueueFull> {
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

    fn complete_commands(&mut self, count: usize) {
        for _ in 0..count {
            self.device.complete_next(0);
        }
    }

    fn poll_at(&mut self, now: Instant) -> Vec<(u64, IoStatus)> {
        self.queue.poll(now, &mut self.completions);
        self.completions.drain().map(|answer| (answer.token, answer.status)).collect()
    }

    fn poll(&mut self) -> Vec<(u64, IoStatus)> {
        self.poll_at(NOW)
    }

    fn stats(&self) -> QueueStats {
        self.queue.stats()
    }
}

fn all_fast_path_options() -> impl Iterator<Item = FastPathOptions> {
    let doorbells =
        [CompletionDoorbell::Each, CompletionDoorbell::Poll, CompletionDoorbell::Deferred];
    [false, true].into_iter().flat_map(move |doorbell_batching| {
        doorbells
            .map(|completion_doorbell| FastPathOptions { doorbell_batching, completion_doorbell })
    })
}

/// Wraps with every batch size over rings of several depths, so that both wrap at every position, for
/// every fast-path option. The fake device fails the test if its completion ring overruns.
#[test]
fn tokens_complete_once_in_order_across_wraps_with_all_options() {
    for techniques in all_fast_path_options() {
        for (depth, completion_depth) in [(2, 2), (5, 5), (8, 8), (5, 8), (8, 5)] {
            for batch in 1..depth.min(completion_depth) {
                let mut harness = QueuePairHarness::new(depth, completion_depth, techniques);
                let mut next = 0_u64;
                for _turn in 0..5 * depth {
                    let expected: Vec<u64> = (next..next + u64::from(batch)).collect();
                    next += u64::from(batch);
                    for token in &expected {
                        harness.submit(*token).unwrap();
                    }
                    harness.queue.flush();
                    assert_eq!(harness.poll(), []);
                    assert_eq!(harness.device.fetch(), batch as usize);
                    for _ in 0..batch {
                        harness.device.complete_next(0);
                    }
                    let tokens: Vec<u64> = harness.poll().iter().map(|(token, _)| *token).collect();
                    assert_eq!(tokens, expected, "{techniques:?} {depth} {batch}");
                }
                assert_eq!(harness.stats().invalid_completions, 0);
                assert_eq!(harness.stats().completed, next);
            }
        }
    }
}

/// A device that completes late and in any order never runs out of completion entries, by whichever way
/// the host reports free ones.
#[test]
fn random_traffic_never_overruns_the_completion_ring() {
    for (seed, techniques) in (1..).zip(all_fast_path_options()) {
        let mut random = Random::new(seed);
        let mut harness = QueuePairHarness::new(16, 16, techniques);
        let (mut next, mut owed) = (0, BTreeSet::new());
        for _ in 0..600 {
            while random.chance(2, 3) && harness.submit(next).is_ok() {
                owed.insert(next);
                next += 1;
            }
            if random.chance(1, 2) {
                harness.queue.flush();
            }
            harness.device.fetch();
            while random.chance(2, 3) && !harness.device.fetched.is_empty() {
                let count = harness.device.fetched.len() as u64;
                let chosen = usize::try_from(random.below(count)).unwrap();
                harness.device.fetched.swap(0, chosen);
                harness.device.complete_next(0);
            }
            if random.chance(1, 2) {
                for (token, status) in harness.poll() {
                    assert!(owed.remove(&token), "seed {seed}: {token} came back twice");
                    assert!(status.is_success());
                }
            }
        }
        harness.queue.flush();
        harness.device.fetch();
        while !harness.device.fetched.is_empty() {
            harness.device.complete_next(0);
        }
        harness.poll().iter().for_each(|(token, _)| assert!(owed.remove(token)));
        assert!(owed.is_empty(), "seed {seed}: {owed:?}");
        assert_eq!(harness.stats().invalid_completions, 0);
        assert!(next > 300);
    }
}

#[test]
fn full_queue_returns_the_command_until_one_completes() {
    for depth in 2..9 {
        let mut harness = QueuePairHarness::plain(depth);
        for token in 1..u64::from(depth) {
            harness.submit(token).unwrap();
        }
        assert_eq!(harness.submit(99), Err(QueueFull), "a ring of {depth} holds one less");
        assert_eq!(harness.queue.in_flight(), depth - 1);
        harness.queue.flush();
        harness.device.fetch();
        harness.device.complete_next(0);
        assert_eq!(harness.poll().len(), 1);
        assert!(harness.submit(99).is_ok());
    }
}

#[test]
fn doorbell_writes_match_the_fast_path_options() {
    let rings = |techniques: FastPathOptions, completion_depth| {
        let mut harness = QueuePairHarness::new(16, completion_depth, techniques);
        for _ in 0..4 {
            for token in 0..10 {
                harness.submit(token).unwrap();
            }
            harness.queue.flush();
            harness.queue.flush();
            harness.device.fetch();
            harness.complete_commands(10);
            assert_eq!(harness.poll().len(), 10);
        }
        assert_eq!(harness.poll(), [], "the last head goes with this one: nothing was submitted");
        let stats = harness.stats();
        assert_eq!(
            stats.submission_doorbells,
            u64::from(harness.device.tail_doorbell.write_count())
        );
        assert_eq!(
            stats.completion_doorbells,
            u64::from(harness.device.head_doorbell.write_count())
        );
        let rung = stats.submission_doorbells + stats.completion_doorbells;
        assert_eq!(stats.doorbell_registers, rung, "without shadows all go to a register");
        (stats.submission_doorbells, stats.completion_doorbells)
    };
    let fast = FastPathOptions::default();
    assert_eq!(rings(fast, 16), (4, 4));
    assert_eq!(rings(FastPathOptions { doorbell_batching: false, ..fast }, 16), (40, 4));
    let each = CompletionDoorbell::Each;
    assert_eq!(rings(FastPathOptions { completion_doorbell: each, ..fast }, 16), (4, 40));
    let deferred = FastPathOptions { completion_doorbell: CompletionDoorbell::Deferred, ..fast };
    assert_eq!(rings(deferred, 16), (4, 3), "ten and ten do not fit into fifteen");
    assert_eq!(rings(deferred, 32), (4, 1), "thirty and ten do not fit into thirty-one");
}

#[test]
fn poll_is_bounded_by_the_batch_capacity() {
    let mut harness = QueuePairHarness::plain(16);
    harness.completions = CompletionBatch::with_capacity(3);
    harness.send_all(0..10);
    harness.complete_commands(10);
    let counts: Vec<usize> = (0..5).map(|_| harness.poll().len()).collect();
    assert_eq!(counts, [3, 3, 3, 1, 0]);
}

#[test]
fn failed_command_returns_status_and_result() {
    let mut harness = QueuePairHarness::plain(8);
    let cid = harness.send(7);
    harness.device.complete_next(0x4281);
    assert_eq!(harness.queue.poll(NOW, &mut harness.completions), 1);
    let answer = harness.completions.as_slice()[0];
    assert_eq!((answer.token, answer.status), (7, IoStatus(0x4281)));
    assert_eq!(answer.result, u32::from(cid) ^ 0xabcd);
}

#[test]
fn fused_halves_are_adjacent_and_announced_together() {
    let batched = FastPathOptions::default();
    for techniques in [batched, FastPathOptions { doorbell_batching: false, ..batched }] {
        for before in 0..8 {
            let mut harness = QueuePairHarness::new(8, 8, techniques);
            for token in 0..before {
                harness.send(token);
                harness.device.complete_next(0);
                harness.poll();
            }
            let rings = harness.device.tail_doorbell.write_count();
            let halves = [(1, Command::new(0x05)), (2, Command::new(WRITE))];
            harness.queue.submit_fused(NOW, halves[0], halves[1]).unwrap();
            harness.queue.flush();
            assert_eq!(harness.device.tail_doorbell.write_count(), rings + 1);
            assert_eq!(harness.device.fetch(), 2);
            let fuses: Vec<_> =
                harness.device.fetched.iter().map(|it| (it.opcode(), it.fuse())).collect();
            assert_eq!(fuses, [(0x05, Fuse::First), (WRITE, Fuse::Second)]);
            harness.device.complete_next(0);
            harness.device.complete_next(0);
            assert_eq!(harness.poll().len(), 2);
        }
    }
}

#[test]
fn half_a_fused_pair_is_never_sent() {
    let mut harness = QueuePairHarness::plain(4);
    let pair = |harness: &mut QueuePairHarness| {
        harness.queue.submit_fused(NOW, (8, Command::new(0x05)), (9, Command::new(WRITE)))
    };
    harness.send(1);
    harness.send(2);
    assert_eq!(pair(&mut harness), Err(QueueFull), "one slot is not enough");
    harness.device.complete_next(0);
    harness.poll();
    assert!(pair(&mut harness).is_ok());
    harness.controller.set_state(QueueState::Quiescing);
    assert_eq!(pair(&mut harness), Err(QueueFull));
}

#[test]
fn injected_error_hits_its_opcode_the_given_number_of_times() {
    for side in [InjectionSide::Submission, InjectionSide::Completion] {
        let mut harness = QueuePairHarness::plain(8);
        let status = IoStatus::UNRECOVERED_READ;
        harness.queue.arm_injection(Injection { opcode: READ, side, status, count: 2 });
        let mut seen = Vec::new();
        for token in 0..6 {
            let opcode = if token == 1 { WRITE } else { READ };
            harness.queue.submit(NOW, token, Command::new(opcode)).unwrap();
            harness.queue.flush();
            let fetched = harness.device.fetch();
            let unsent = side == InjectionSide::Submission && [0, 2].contains(&token);
            assert_eq!(fetched, usize::from(!unsent), "{side:?} {token}");
            harness.complete_commands(fetched);
            seen.extend(harness.poll());
        }
        let hit = |token| if [0, 2].contains(&token) { status } else { IoStatus::SUCCESS };
        let expected: Vec<_> = (0..6).map(|token| (token, hit(token))).collect();
        assert_eq!(seen, expected, "{side:?}");
        assert_eq!((harness.stats().injected, harness.stats().invalid_completions), (2, 0));
    }
}

#[test]
fn injections_are_cleared_on_request_and_by_reset() {
    let mut harness = QueuePairHarness::plain(4);
    let (opcode, status) = (READ, IoStatus::INTERNAL_ERROR);
    let side = InjectionSide::Submission;
    harness.queue.arm_injection(Injection { opcode, side, status, count: 100 });
    for token in 0..3 {
        harness.submit(token).unwrap();
    }
    assert_eq!(harness.submit(3), Err(QueueFull), "backpressure is as it was");
    assert_eq!(harness.queue.wake_at(), Instant::default());
    harness.queue.clear_injections();
    harness.controller.set_state(QueueState::Released);
    assert_eq!(harness.poll().len(), 3);
    assert_eq!(harness.poll(), [], "each token once");
    assert!(
        harness.queue.wake_at() > NOW,
        "nothing is left of them but to wait for the next order"
    );
    harness.device.reset();
    harness.controller.run(None);
    harness.send(4);
    harness.device.complete_next(0);
    assert_eq!(harness.poll(), [(4, IoStatus::SUCCESS)]);
}

#[test]
fn queue_arms_only_without_pending_completions() {
    let deferred = CompletionDoorbell::Deferred;
    let mut harness = QueuePairHarness::new(
        8,
        8,
        FastPathOptions { completion_doorbell: deferred, ..FastPathOptions::default() },
    );
    harness.poll();
    assert!(harness.queue.arm());
    harness.submit(1).unwrap();
    assert!(harness.queue.arm());
    assert_eq!(harness.device.fetch(), 1, "what was submitted is announced before sleeping");
    harness.device.complete_next(0);
    assert!(!harness.queue.arm(), "there is something to take");
    harness.poll();
    assert_eq!(harness.device.head_doorbell.value(), 0);
    assert!(harness.queue.arm());
    assert_eq!(harness.device.head_doorbell.value(), 1, "and what was taken is announced as well");
    harness.controller.set_state(QueueState::Quiescing);
    assert!(!harness.queue.arm(), "there is an order to follow");
}

#[test]
fn shadow_doorbells_serve_a_queue_like_registers_do() {
    let dma = FakeDma::new(8);
    let memory = QueueMemory::allocate(&dma, 8, 8).unwrap();
    let mut device = FakeQueue::new(&dma, memory);
    let [shadows, events] = [dma.allocate(4096).unwrap(), dma.allocate(4096).unwrap()];
    let place = |side| ShadowSlot::of(shadows, events, 1, side, 0).unwrap();
    let (tail, head) =
        (place(super::DoorbellSide::Submission), place(super::DoorbellSide::Completion));
    let register = FakeDoorbell::default();
    let (controller, queue_end) = create_link(1);
    let setup = QueueSetup {
        memory,
        submission_doorbell: QueueDoorbell::shadow(&dma, register.clone(), tail),
        completion_doorbell: QueueDoorbell::shadow(&dma, FakeDoorbell::default(), head),
        link: queue_end,
        timeout: Span::from_secs(1),
        techniques: FastPathOptions::default(),
    };
    let mut queue = QueuePair::new(&dma, setup);
    controller.run(None);
    let mut completions = CompletionBatch::with_capacity(8);
    for token in 0..50_u32 {
        queue.submit(NOW, u64::from(token), Command::new(READ)).unwrap();
        queue.flush();
        // The device reads the shadow, and stays awake for three commands out of four.
        device.tail_doorbell.ring(dma.load_u32(tail.doorbell).unwrap());
        assert_eq!(device.fetch(), 1);
        let seen = device.tail_doorbell.value();
        dma.store_u32(tail.event_index, (seen + token % 4) % 8).unwrap();
        device.complete_next(0);
        assert_eq!(queue.poll(NOW, &mut completions), 1);
        completions.clear();
        device.head_doorbell.ring(dma.load_u32(head.doorbell).unwrap());
    }
    assert_eq!(queue.stats().submission_doorbells, 50);
    assert!(
        (5..30).contains(&register.write_count()),
        "{} writes to the register",
        register.write_count()
    );
}

#[test]
fn queue_pair_without_memory_is_not_created() {
    let dma = FakeDma::new(2);
    assert_eq!(QueueMemory::allocate(&dma, 64, 512), None, "one page and then two");
    let memory = QueueMemory::allocate(&FakeDma::new(3), 64, 512).unwrap();
    assert_eq!(memory.in_flight_max(), 63);
    memory.release(&dma);
}
