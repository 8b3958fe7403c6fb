//! A mirror used by two threads of the machine: their interleaving varies, unlike in simulated time. The
//! time itself is a counter that both advance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Memory, Operation, Random, Request, RequestFlags, Segment, Span, WakeSource,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::{Clock, NamedThread, Sleeper};

use super::block_model::{parse_version, versioned_contents};
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::{Mirror, MirrorLegDevice, MirrorOptions};
use tenmil_block::Opener;

/// A leg that fails and returns on command.
struct FailingLeg {
    inner: Arc<dyn BlockDevice>,
    is_failing: Arc<AtomicBool>,
}

struct FailingLegChannel {
    inner: Box<dyn IoChannel>,
    is_failing: Arc<AtomicBool>,
}

/// State shared by both threads.
struct SharedTestState {
    mirror: Mirror,
    regions: RegionTable,
    now: AtomicU64,
    failing: [Arc<AtomicBool>; 2],
    blocks: Vec<BlockVersions>,
    is_over: AtomicBool,
}

/// Versions of a block, and whether it is being written.
#[derive(Default)]
struct BlockVersions {
    latest: AtomicU32,
    completed: AtomicU32,
    is_busy: AtomicBool,
}

/// A request in flight.
struct OpenRequest {
    operation: Operation,
    first: usize,
    /// The version of each block that was complete at the submission, or that is written.
    versions: Vec<u32>,
}

struct ClientThread {
    board: Arc<SharedTestState>,
    channel: Box<dyn IoChannel>,
    memory: Region,
    slots: Vec<Option<OpenRequest>>,
    random: Random,
}

/// Next event for the legs.
#[derive(Debug)]
enum LegFault {
    Fail { leg: usize, at: u64 },
    ComeBack { leg: usize, at: u64 },
    InSync { leg: usize },
}

const BLOCK: usize = 512;
/// Used blocks: four regions of the mirror, so that both threads meet in each.
const BLOCKS: usize = 512;
const BLOCKS_MAX: u64 = 8;
const SLOTS: usize = 4;
/// Number of failures and returns of a leg.
const ROUNDS: u64 = 30;
/// A mirror that has not made progress after this many iterations never will.
const TURNS_MAX: u64 = 20_000_000;
const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_us(300),
    probe_every: Span::from_us(50),
    copy_rate: 8 << 30,
};

#[test]
fn io_of_two_threads_stays_consistent_while_legs_fail() {
    let board = Arc::new(SharedTestState::new());
    let players = [1, 2].map(|number| {
        let player = ClientThread::new(&board, number);
        NamedThread::spawn(&format!("player-{number}"), None, move |_| player.run(number == 1))
            .unwrap()
    });
    for player in players {
        player.join();
    }
    board.check_legs_equal_and_current();
}

#[test]
fn closing_channel_wakes_a_sleeping_one_for_remaining_work() {
    let board = Arc::new(SharedTestState::new());
    let (mut one, mut two) = (ClientThread::new(&board, 1), ClientThread::new(&board, 2));
    board.failing[1].store(true, Ordering::SeqCst);
    one.submit_request(Operation::Write, 0, 0, 8);
    while one.slots[0].is_some() {
        one.poll_once();
    }
    assert_eq!(board.mirror.in_sync_mask_and_remaining_regions(), (0b01, 0), "a leg has missed it");
    two.poll_once();
    let mut sleeper = Sleeper::new().unwrap();
    if let WakeSource::Descriptor(descriptor) = two.channel.wake_source() {
        sleeper.sources().add_source(descriptor, 0).unwrap();
    }
    assert!(!two.channel.arm(), "it has nothing to do");
    board.failing[1].store(false, Ordering::SeqCst);
    while board.mirror.in_sync_mask_and_remaining_regions().1 == 0 {
        one.poll_once();
    }
    let mut ready = Vec::new();
    sleeper.sleep_until_ready(Span::default(), &mut ready);
    assert_eq!(ready, [], "the first one does it");
    drop(one);
    sleeper.sleep_until_ready(Span::from_secs(10), &mut ready);
    assert_eq!(ready, [0], "now there is only the second");
    two.channel.disarm();
    for _ in 0..TURNS_MAX {
        two.poll_once();
        if board.mirror.in_sync_mask_and_remaining_regions() == (0b11, 0) {
            return;
        }
    }
    panic!("{:?}", board.mirror.in_sync_mask_and_remaining_regions());
}

impl SharedTestState {
    fn new() -> Self {
        let regions = RegionTable::new(32);
        let clock = Clock::start();
        let opener = Opener { regions: &regions, clock, seed: 1, kinds: crate::KINDS };
        let failing = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let legs = failing.clone().map(|is_failing| {
            let inner = opener.open(&"ram:2m".parse().unwrap()).unwrap().medium;
            MirrorLegDevice {
                name: "shaky".into(),
                medium: Ok(Arc::new(FailingLeg { inner, is_failing })),
            }
        });
        let mut now = || clock.now();
        format_mirror(&regions, &legs, 7, &mut now).unwrap();
        let mirror =
            Mirror::open(&regions, &legs, &MirrorOptions::with_resync_policy(POLICY), &mut now)
                .unwrap();
        let blocks = (0..BLOCKS).map(|_| BlockVersions::default()).collect();
        let (now, is_over) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { mirror, regions, now, failing, blocks, is_over }
    }

    /// After all threads have ended: legs become equal, and hold the last writes.
    fn check_legs_equal_and_current(self: Arc<Self>) {
        let mut player = ClientThread::new(&self, 3);
        let mut turns = 0;
        while self.mirror.in_sync_mask_and_remaining_regions() != (0b11, 0) {
            player.poll_once();
            turns += 1;
            assert!(turns < TURNS_MAX, "{:?}", self.mirror.in_sync_mask_and_remaining_regions());
        }
        for first in (0..BLOCKS).step_by(8) {
            player.submit_request(Operation::Read, 0, first, 8);
            while player.slots[0].is_some() {
                player.poll_once();
            }
        }
        let media = self.mirror.shared.media.iter().flatten();
        let held: Vec<Vec<u8>> = media.map(|leg| player.read_leg(&**leg)).collect();
        assert!(held[0] == held[1], "legs differ at rest");
    }
}

impl ClientThread {
    fn new(board: &Arc<SharedTestState>, seed: u64) -> Self {
        Self {
            channel: board.mirror.channel().unwrap(),
            memory: board.regions.allocate_region(BLOCKS * BLOCK).unwrap(),
            board: Arc::clone(board),
            slots: (0..SLOTS).map(|_| None).collect(),
            random: Random::new(seed),
        }
    }

    fn run(mut self, makes_mishaps: bool) {
        let board = Arc::clone(&self.board);
        let (mut mishap, mut rounds) = (LegFault::Fail { leg: 0, at: 50 }, 0);
        for turn in 0.. {
            assert!(
                turn < TURNS_MAX,
                "{mishap:?} in round {rounds}: {:?}",
                board.mirror.in_sync_mask_and_remaining_regions()
            );
            if board.is_over.load(Ordering::SeqCst) {
                break;
            }
            if makes_mishaps && mishap.step(&board, turn) {
                rounds += 1;
                board.is_over.store(rounds == ROUNDS, Ordering::SeqCst);
            }
            self.submit_random();
            self.poll_once();
        }
        while self.slots.iter().any(Option::is_some) {
            self.poll_once();
        }
    }

    fn poll_once(&mut self) {
        let now = Instant { ns: self.board.now.fetch_add(1_000, Ordering::SeqCst) };
        let mut completions = CompletionBatch::with_capacity(SLOTS);
        self.channel.flush_submissions();
        self.channel.poll(now, &mut completions);
        completions.drain().for_each(|completion| self.handle_completion(&completion));
    }

    fn submit_random(&mut self) {
        let Some(slot) = self.slots.iter().position(Option::is_none) else { return };
        let count = usize::try_from(self.random.below(BLOCKS_MAX)).unwrap() + 1;
        let first = usize::try_from(self.random.below((BLOCKS - count) as u64)).unwrap();
        match self.random.below(20) {
            0 => self.submit_request(Operation::Flush, slot, 0, 0),
            1..=9 if self.claim_blocks(first, count) => {
                self.submit_request(Operation::Write, slot, first, count)
            }
            _ => self.submit_request(Operation::Read, slot, first, count),
        }
    }

    /// Claims blocks that no other request writes: the order of two concurrent writes is unknown.
    fn claim_blocks(&self, first: usize, count: usize) -> bool {
        let blocks = &self.board.blocks[first..first + count];
        let taken = blocks.iter().take_while(|block| !block.is_busy.swap(true, Ordering::SeqCst));
        let taken = taken.count();
        if taken < count {
            blocks[..taken].iter().for_each(|block| block.is_busy.store(false, Ordering::SeqCst));
        }
        taken == count
    }

    fn submit_request(&mut self, operation: Operation, slot: usize, first: usize, count: usize) {
        let blocks = &self.board.blocks[first..first + count];
        let is_write = operation == Operation::Write;
        let versions: Vec<u32> = match is_write {
            true => blocks.iter().map(|it| it.latest.fetch_add(1, Ordering::SeqCst) + 1).collect(),
            false => blocks.iter().map(|it| it.completed.load(Ordering::SeqCst)).collect(),
        };
        let memory = self.slot_memory(slot, count);
        if is_write {
            let stamps = (first as u64..).zip(&versions);
            let bytes: Vec<u8> =
                stamps.flat_map(|(lba, version)| versioned_contents(lba, *version)).collect();
            self.board.regions.store(memory, &bytes).unwrap();
        }
        let request = Request {
            token: slot as u64,
            lba: first as u64,
            blocks: u32::try_from(count).unwrap(),
            segment_count: u16::from(count > 0),
            operation,
            flags: if self.random.chance(1, 4) { RequestFlags::FUA } else { RequestFlags::NONE },
            ..Request::PLACEHOLDER
        };
        let now = Instant { ns: self.board.now.load(Ordering::SeqCst) };
        assert_eq!(self.channel.submit(now, &[request], &[memory]), 1, "there is room");
        self.slots[slot] = Some(OpenRequest { operation, first, versions });
    }

    fn slot_memory(&self, slot: usize, count: usize) -> Segment {
        let len_bytes = u32::try_from(count * BLOCK).unwrap();
        let at = u32::try_from(slot).unwrap() * u32::try_from(BLOCKS_MAX).unwrap() * 512;
        self.memory.segment().slice(at, len_bytes).unwrap()
    }

    fn handle_completion(&mut self, completion: &IoCompletion) {
        let slot = usize::try_from(completion.token).unwrap();
        let OpenRequest { operation, first, versions } = self.slots[slot].take().unwrap();
        assert_eq!(completion.status, IoStatus::SUCCESS, "{operation:?} at {first}: a leg is well");
        let memory = self.slot_memory(slot, versions.len());
        let mut bytes = vec![0; memory.len_bytes as usize];
        self.board.regions.load(memory, &mut bytes).unwrap();
        let blocks = self.board.blocks[first..].iter().zip(bytes.chunks(BLOCK));
        for (((block, bytes), before), lba) in blocks.zip(versions).zip(first as u64..) {
            if operation == Operation::Write {
                block.completed.store(before, Ordering::SeqCst);
                block.is_busy.store(false, Ordering::SeqCst);
                continue;
            }
            let latest = block.latest.load(Ordering::SeqCst);
            match parse_version(lba, bytes) {
                Ok(found) => assert!(
                    (before..=latest).contains(&found),
                    "block {lba}: version {found}, expected {before} to {latest}"
                ),
                // Memory has no sectors: a read during a write may return some of both.
                Err(problem) => assert!(before < latest, "block {lba}: {problem}"),
            }
        }
    }

    fn read_leg(&self, leg: &dyn BlockDevice) -> Vec<u8> {
        let memory = self.memory.segment();
        let mut channel = leg.channel().unwrap();
        let most = channel.limits().request_blocks_max.min(64) as usize;
        let mut held = Vec::new();
        for first in (0..BLOCKS).step_by(most) {
            let blocks = u32::try_from(most.min(BLOCKS - first)).unwrap();
            let segment = memory.slice(0, blocks * 512).unwrap();
            let lba = self.board.mirror.shared.geometry.first + first as u64;
            let operation = Operation::Read;
            let request =
                Request { lba, blocks, segment_count: 1, operation, ..Request::PLACEHOLDER };
            assert_eq!(channel.submit(Instant::default(), &[request], &[segment]), 1);
            let mut completions = CompletionBatch::with_capacity(1);
            while channel.poll(Instant::default(), &mut completions) == 0 {}
            let mut bytes = vec![0; segment.len_bytes as usize];
            self.board.regions.load(segment, &mut bytes).unwrap();
            held.extend(bytes);
        }
        held
    }
}

impl LegFault {
    /// Advances the sequence of events. True at the end of a round.
    fn step(&mut self, board: &SharedTestState, turn: u64) -> bool {
        let (in_sync, todo) = board.mirror.in_sync_mask_and_remaining_regions();
        match *self {
            Self::Fail { leg, at } if turn >= at && (in_sync, todo) == (0b11, 0) => {
                board.failing[leg].store(true, Ordering::SeqCst);
                *self = Self::ComeBack { leg, at: turn + 100 };
            }
            Self::ComeBack { leg, at } if turn >= at && in_sync & (1 << leg) == 0 => {
                board.failing[leg].store(false, Ordering::SeqCst);
                *self = Self::InSync { leg };
            }
            Self::InSync { leg } if (in_sync, todo) == (0b11, 0) => {
                *self = Self::Fail { leg: 1 - leg, at: turn + 200 };
                return true;
            }
            _ => {}
        }
        false
    }
}

impl BlockDevice for FailingLeg {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (inner, is_failing) = (self.inner.channel()?, Arc::clone(&self.is_failing));
        Ok(Box::new(FailingLegChannel { inner, is_failing }))
    }

    fn block_status(&self, lba: u64) -> Result<tenmil_base::BlockExtent, Error> {
        self.inner.block_status(lba)
    }
}

impl IoChannel for FailingLegChannel {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.inner.submit(now, requests, segments)
    }

    /// A failed request has been executed, but its completion is not delivered.
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut below = CompletionBatch::with_capacity(completions.remaining());
        let count = self.inner.poll(now, &mut below);
        let is_failing = self.is_failing.load(Ordering::SeqCst);
        for completion in below.drain() {
            let failed = IoCompletion { status: IoStatus::INTERNAL_ERROR, ..completion };
            completions.push(if is_failing { failed } else { completion });
        }
        count
    }
}

impl ChannelWakeup for FailingLegChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }
}
