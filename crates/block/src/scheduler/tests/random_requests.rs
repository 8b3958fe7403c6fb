//! Random requests through a scheduler, and a backend that checks what arrives.
//!
//! The memory of a request identifies by its offset the request and the block. The backend applies a
//! request at once and completes it later, so it knows for every block the request that changed it last,
//! and for every read what it saw. The same is computed in advance in the order of submission.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Operation, OperationSet, Random, RegionId, Request, RequestFlags, Segment, Span, WakeSource,
};

use crate::IoScheduler;

const BLOCKS: u64 = 40;
const BLOCK: u64 = 512;
/// Each request has its own megabyte of the region.
const PLACE_BITS: u32 = 20;
const DEPTH: u32 = 24;

/// The last request that changed each block, and what reads saw, by their number and block.
#[derive(Default)]
struct BlockHistory {
    blocks: Vec<u64>,
    seen: BTreeMap<(u64, u64), u64>,
}

#[derive(Default)]
struct OrderCheckState {
    world: BlockHistory,
    /// Number of executions of each request.
    applied: BTreeMap<u64, usize>,
    /// Requests that were part of a failed merged request: they may have been sent again.
    spoiled: BTreeSet<u64>,
    /// For each flush, the requests executed before it.
    before_flush: BTreeMap<u64, BTreeSet<u64>>,
    due: Vec<(Instant, IoCompletion)>,
    under_way: usize,
}

#[derive(Clone)]
struct OrderCheckingChannel {
    limits: Limits,
    shared: Arc<Mutex<OrderCheckState>>,
    random: Random,
}

impl BlockHistory {
    fn new() -> Self {
        Self { blocks: vec![0; usize::try_from(BLOCKS).unwrap()], seen: BTreeMap::new() }
    }

    /// Executes a request on one of its blocks.
    fn execute(&mut self, operation: Operation, number: u64, index: u64, block: u64) {
        let block = &mut self.blocks[usize::try_from(block).unwrap()];
        match operation {
            Operation::Read => {
                self.seen.insert((number, index), *block);
            }
            _ => *block = number,
        }
    }
}

impl OrderCheckState {
    /// Executes one request, which may be a merge of several, and returns their numbers.
    fn execute_request(&mut self, request: &Request, segments: &[Segment]) -> Vec<u64> {
        let first = request.segment_first as usize;
        let own = &segments[first..first + usize::from(request.segment_count)];
        let mut numbers = Vec::new();
        let mut block = request.lba;
        for segment in own {
            let number = segment.offset >> PLACE_BITS;
            let from = (segment.offset & ((1 << PLACE_BITS) - 1)) / BLOCK;
            for index in from..from + u64::from(segment.len_bytes) / BLOCK {
                self.world.execute(request.operation, number, index, block);
                block += 1;
            }
            if from == 0 {
                numbers.push(number);
            }
        }
        if own.is_empty() {
            numbers.push(request.token);
            for index in 0..u64::from(request.blocks) {
                self.world.execute(request.operation, request.token, index, request.lba + index);
            }
        } else {
            assert_eq!(block, request.lba + u64::from(request.blocks), "memory for each block");
        }
        if request.operation == Operation::Flush {
            self.before_flush.insert(request.token, self.applied.keys().copied().collect());
        }
        for number in &numbers {
            *self.applied.entry(*number).or_default() += 1;
        }
        numbers
    }
}

impl IoChannel for OrderCheckingChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut shared = self.shared.lock().unwrap();
        let room = (DEPTH as usize - shared.under_way).min(requests.len());
        let count = usize::try_from(self.random.below(room as u64 + 1)).unwrap();
        for request in &requests[..count] {
            assert!(request.blocks <= self.limits.request_blocks_max);
            assert!(request.segment_count <= self.limits.segments_max);
            let numbers = shared.execute_request(request, segments);
            let mut status = IoStatus::SUCCESS;
            if request.operation == Operation::Read && self.random.chance(1, 6) {
                status = IoStatus::UNRECOVERED_READ;
                shared.spoiled.extend(numbers);
            }
            let due = now.after(Span::from_us(self.random.below(30)));
            shared.due.push((due, IoCompletion { token: request.token, status, result: 0 }));
        }
        shared.under_way += count;
        count
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut shared = self.shared.lock().unwrap();
        let mut count = 0;
        while completions.remaining() > 0
            && let Some(at) = shared.due.iter().position(|(due, _)| *due <= now)
        {
            completions.push(shared.due.swap_remove(at).1);
            count += 1;
        }
        shared.under_way -= count;
        count
    }
}

impl ChannelWakeup for OrderCheckingChannel {
    fn wake_at(&self) -> Instant {
        let shared = self.shared.lock().unwrap();
        shared.due.iter().map(|(due, _)| *due).min().unwrap_or(Instant::NEVER)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        false
    }
}

fn limits() -> Limits {
    Limits {
        block_size: 512,
        metadata_size: 0,
        block_count: BLOCKS,
        request_blocks_max: 12,
        segments_max: 6,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: DEPTH,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&Operation::ALL),
    }
}

/// A random request, often adjacent to the previous one, and its memory.
fn draw_request(
    random: &mut Random,
    number: u64,
    before: Option<&Request>,
) -> (Request, Vec<Segment>) {
    let operation = match random.below(12) {
        0 => Operation::Flush,
        1 => Operation::WriteZeroes,
        2 => Operation::Deallocate,
        3..=7 => Operation::Read,
        _ => Operation::Write,
    };
    let mut request = Request {
        token: number,
        lba: random.below(BLOCKS - 4),
        operand: 0,
        segment_first: 0,
        blocks: u32::try_from(random.below(4) + 1).unwrap(),
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags(u8::try_from(random.below(5) / 4).unwrap()),
    };
    if let Some(before) = before.filter(|_| random.chance(2, 3)) {
        let next = before.lba + u64::from(before.blocks);
        if next + u64::from(request.blocks) <= BLOCKS {
            (request.lba, request.operation) = (next, before.operation);
            request.flags = before.flags;
        }
    }
    if request.operation == Operation::Flush {
        (request.lba, request.blocks) = (0, 0);
    }
    let mut segments = Vec::new();
    if matches!(request.operation, Operation::Read | Operation::Write) {
        let cut = u32::try_from(random.below(request.blocks.into())).unwrap();
        for (from, to) in [(0, cut), (cut, request.blocks)] {
            if from < to {
                let offset = (number << PLACE_BITS) + u64::from(from) * BLOCK;
                let len_bytes = (to - from) * 512;
                segments.push(Segment { region: RegionId(0), offset, len_bytes });
            }
        }
        request.segment_count = u16::try_from(segments.len()).unwrap();
    }
    (request, segments)
}

/// A client with random requests.
struct RandomClient {
    random: Random,
    now: Instant,
    next_number: u64,
    waiting: Vec<(Request, Vec<Segment>)>,
    /// Expected result, in the order of submission.
    world: BlockHistory,
    completed: BTreeMap<u64, usize>,
    /// For each flush, the requests completed before its submission.
    covered: BTreeMap<u64, BTreeSet<u64>>,
}

const REQUESTS: u64 = 400;

impl RandomClient {
    fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            now: Instant { ns: 1 },
            next_number: 1,
            waiting: Vec::new(),
            world: BlockHistory::new(),
            completed: BTreeMap::new(),
            covered: BTreeMap::new(),
        }
    }

    fn is_done(&self) -> bool {
        self.next_number > REQUESTS && self.completed.len() as u64 == self.next_number - 1
    }

    fn draw_requests(&mut self) {
        if !self.waiting.is_empty() || self.next_number > REQUESTS || self.random.chance(1, 3) {
            return;
        }
        for _ in 0..=self.random.below(10) {
            let before = self.waiting.last().map(|(before, _)| before);
            let drawn = draw_request(&mut self.random, self.next_number, before);
            self.waiting.push(drawn);
            self.next_number += 1;
        }
    }

    fn submit(&mut self, channel: &mut dyn IoChannel) {
        let mut table = Vec::new();
        let place = |(request, segments): &(Request, Vec<Segment>)| {
            let segment_first = u32::try_from(table.len()).unwrap();
            table.extend_from_slice(segments);
            Request { segment_first, ..*request }
        };
        let batch: Vec<Request> = self.waiting.iter().map(place).collect();
        let taken = channel.submit(self.now, &batch, &table);
        for (request, _) in self.waiting.drain(..taken) {
            for index in 0..u64::from(request.blocks) {
                let block = request.lba + index;
                self.world.execute(request.operation, request.token, index, block);
            }
            if request.operation == Operation::Flush {
                self.covered.insert(request.token, self.completed.keys().copied().collect());
            }
        }
    }

    fn poll_and_submit(&mut self, channel: &mut dyn IoChannel) {
        self.draw_requests();
        self.submit(channel);
        if self.random.chance(1, 2) {
            channel.flush_submissions();
        }
        let room = usize::try_from(self.random.below(5)).unwrap();
        let mut completions = CompletionBatch::with_capacity(room);
        channel.poll(self.now, &mut completions);
        for completion in completions.drain() {
            *self.completed.entry(completion.token).or_default() += 1;
        }
        self.now = self.now.after(Span::from_us(self.random.below(8)));
    }
}

fn check_random_requests(scheduler: IoScheduler, seed: u64) {
    let shared = OrderCheckState { world: BlockHistory::new(), ..OrderCheckState::default() };
    let shared = Arc::new(Mutex::new(shared));
    let judge = OrderCheckingChannel {
        limits: limits(),
        shared: shared.clone(),
        random: Random::new(!seed),
    };
    let mut channel = scheduler.wrap_channel(Box::new(judge));
    let mut program = RandomClient::new(seed);
    while !program.is_done() {
        program.poll_and_submit(&mut *channel);
        let RandomClient { now, completed, next_number, .. } = &program;
        assert!(now.ns < 1_000_000_000, "{scheduler} {seed}: {} of {next_number}", completed.len());
    }
    let OrderCheckState { world, applied, spoiled, before_flush, .. } = &*shared.lock().unwrap();
    let name = format!("{scheduler} {seed}");
    assert!(program.completed.values().all(|count| *count == 1), "{name}: answered once");
    for (number, count) in applied {
        assert!(
            *count == 1 || spoiled.contains(number),
            "{name}: {number} went down {count} times"
        );
    }
    assert_eq!(world.blocks, program.world.blocks, "{name}: who wrote last");
    for (read, expected) in &program.world.seen {
        let found = &world.seen[read];
        assert!(found == expected || spoiled.contains(&read.0), "{name}: {read:?} saw {found}");
    }
    assert!(program.covered.len() > 5);
    for (flush, covered) in &program.covered {
        assert!(covered.is_subset(&before_flush[flush]), "{name}: flush {flush}");
    }
}

#[test]
fn requests_complete_once_and_conflicting_ones_keep_their_order() {
    for text in [
        "none",
        "merge",
        "deadline?read=20us&write=50us&batch=3&depth=2",
        "deadline",
        "deadline?depth=24",
        "stream-batch?count=6&time=10us",
        "stream-batch?bytes=2k&time=40us",
    ] {
        let scheduler = text.parse().unwrap();
        (0..60).for_each(|seed| check_random_requests(scheduler, seed));
    }
}
