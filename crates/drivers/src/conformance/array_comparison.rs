//! Random operations on random stacks of devices, compared with a plain array.
//!
//! proptest draws a case: the stack of devices and the operations. A failing case is shrunk, and its seed
//! is kept in `proptest-regressions`, from which it is tried first in the next run. `PROPTEST_CASES` sets
//! the number of cases.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::Config;
use tenmil_base::{
    BlockDevice, BlockExtent, CompletionBatch, ExtentKind, Instant, IoChannel, IoCompletion,
    IoStatus, Memory, Operation, Random, Request, RequestFlags, Segment,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;

use super::partial_accept_device::PartialAcceptDeviceType;
use super::zeroed_crypt_device::ZeroedCryptType;
use crate::mirror::tests::CreatedMirrorType;
use crate::pool::tests::PoolVolumeType;
use tenmil_block::Opener;

/// An operation. Numbers are reduced to their ranges once the ranges are known.
#[derive(Clone, Copy, Debug)]
struct OperationStep {
    what: StepKind,
    channel: u8,
    first: u16,
    other: u16,
    blocks: u8,
    forced: bool,
    /// Seed of the segments of the memory and of the time until the next step.
    seed: u32,
}

#[derive(Clone, Copy, Debug)]
enum StepKind {
    Do(Operation),
    /// A compare, or compare and write, that must find a difference.
    Differ(Operation),
    WriteZeroesAway,
}

/// Contents of a block, as far as they are determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArrayBlockState {
    Holds(u64),
    /// Deallocated: zeroes, or still this.
    Free(u64),
    Lost,
    /// Readable, and one of two versions.
    Unknown,
}

/// A request in flight, and its permitted results.
struct PendingRequest {
    request: Request,
    memory: Vec<Segment>,
    /// The states of its blocks when it was submitted.
    found: Vec<ArrayBlockState>,
    expected: BTreeSet<u16>,
}

struct ChannelWithOwnBlocks {
    backend: Box<dyn IoChannel>,
    /// The blocks reserved for this channel.
    blocks: std::ops::Range<usize>,
}

/// A stack, its load, and the array.
struct ArrayFixture {
    medium: Arc<dyn BlockDevice>,
    regions: RegionTable,
    memory: Region,
    block_size: u32,
    /// Whether the contents of zeroes below are unknown.
    is_ciphered: bool,
    /// Whether a mirror may have background work.
    is_busy: bool,
    channels: Vec<ChannelWithOwnBlocks>,
    array: Vec<ArrayBlockState>,
    under_way: Vec<Option<PendingRequest>>,
    now: Instant,
    /// For a stack with a thread, which uses the clock of the machine: latency models and mirrors compare
    /// the times passed to their channels.
    clock: Option<Clock>,
    random: Random,
    stamp: u64,
}

const DEPTH: usize = 12;
const BLOCKS_MAX: u32 = 20;
/// Memory of one request: twice its blocks, and gaps.
const MEMORY: u32 = 2 * BLOCKS_MAX * 4096 + 4096;
/// Faults of one leg of a mirror, while another leg has none. There are no faults during its creation.
const FAULTS: &str = "error:read+8~20;tear:write+8~30;error:write+8~20;error:flush~4";
/// Blocks of each channel: few, so that requests often overlap.
const BLOCKS: usize = 160;
/// Cases of a run without `PROPTEST_CASES`: a few seconds.
const CASES: u32 = 64;

fn leaf_uri_strategy() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("ram:6m?block=BLOCK".to_owned()),
        2 => Just("model:p4800x?size=6m&block=BLOCK".to_owned()),
        1 => Just("file:DISK?size=6m&block=BLOCK&engine=threads&direct=no".to_owned()),
        1 => Just("file:DISK?size=6m&block=BLOCK".to_owned()),
    ]
}

fn stack_uri_strategy() -> impl Strategy<Value = String> {
    leaf_uri_strategy().prop_recursive(3, 10, 3, |below| {
        prop_oneof![
            below.clone().prop_map(|uri| format!("delay:[{uri}]?read=3us&read-p99=20us&write=5us")),
            below.clone().prop_map(|uri| format!("fault:[{uri}]")),
            below.clone().prop_map(|uri| format!("reluctant:[{uri}]")),
            (below.clone(), 0..2).prop_map(|(uri, n)| format!("split:[{uri}]?part={n}&parts=2")),
            below.clone().prop_map(|uri| format!("split:[{uri}]?offset=16k")),
            below.clone().prop_map(|uri| format!("crypt:[{uri}]")),
            below.clone().prop_map(|uri| format!("stored:[{uri}]")),
            prop::collection::vec(below.clone(), 2..=3)
                .prop_map(|legs| format!("made:[{}]", legs.join("],["))),
            (below.clone(), below.clone(), any::<u16>()).prop_map(|(sound, sick, seed)| format!(
                "made:[{sound}],[fault:[{sick}]?rule={FAULTS}&seed={seed}]"
            )),
            (prop::collection::vec(below, 1..=3), 0..3).prop_map(|(legs, n)| format!(
                "stripe:[{}]?chunk={}k",
                legs.join("],["),
                4 << n
            )),
        ]
    })
}

fn step_strategy() -> impl Strategy<Value = OperationStep> {
    let what = prop_oneof![
        6 => Just(StepKind::Do(Operation::Read)),
        6 => Just(StepKind::Do(Operation::Write)),
        2 => Just(StepKind::Do(Operation::Compare)),
        1 => Just(StepKind::Differ(Operation::Compare)),
        2 => Just(StepKind::Do(Operation::CompareAndWrite)),
        1 => Just(StepKind::Differ(Operation::CompareAndWrite)),
        2 => Just(StepKind::Do(Operation::Copy)),
        1 => Just(StepKind::Do(Operation::Flush)),
        1 => Just(StepKind::Do(Operation::Deallocate)),
        1 => Just(StepKind::Do(Operation::WriteZeroes)),
        1 => Just(StepKind::WriteZeroesAway),
        1 => Just(StepKind::Do(Operation::WriteUncorrectable)),
        1 => Just(StepKind::Do(Operation::Verify)),
    ];
    (what, any::<u8>(), any::<u16>(), any::<u16>(), any::<u8>(), any::<bool>(), any::<u32>())
        .prop_map(|(what, channel, first, other, blocks, forced, seed)| OperationStep {
            what,
            channel,
            first,
            other,
            blocks,
            forced,
            seed,
        })
}

fn proptest_config() -> Config {
    let drawn = Config::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { drawn.cases } else { CASES };
    Config { cases, ..drawn }
}

proptest! {
    #![proptest_config(proptest_config())]

    #[test]
    fn random_device_stack_matches_an_array(
        uri in stack_uri_strategy(),
        block_size in prop_oneof![Just(512_u32), Just(1024), Just(4096)],
        steps in prop::collection::vec(step_strategy(), 1..250),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut bench = ArrayFixture::new(&uri, block_size, directory.path());
        for step in &steps {
            bench.submit_step_when_possible(step);
        }
        bench.wait_for_all();
    }
}

impl ArrayFixture {
    fn new(uri: &str, block_size: u32, directory: &std::path::Path) -> Self {
        let regions = RegionTable::new(1_000);
        // Volumes have their own block size, and legs must be equal.
        let block_size = if uri.contains("stored:") { 4096 } else { block_size };
        let mut uri = uri.replace("BLOCK", &block_size.to_string());
        // Each occurrence is another file.
        for number in 0.. {
            let path = directory.join(number.to_string());
            let next = uri.replacen("DISK", &path.display().to_string(), 1);
            if next == uri {
                break;
            }
            uri = next;
        }
        let crypt = ZeroedCryptType::new();
        // Blocks that were not written before may hold anything.
        crypt.stop_zeroing_on_open();
        let more: [(&str, &dyn tenmil_block::DeviceType); 4] = [
            ("reluctant", &PartialAcceptDeviceType),
            ("made", &CreatedMirrorType),
            ("crypt", &crypt),
            ("stored", &PoolVolumeType::ORDERLY),
        ];
        let clock = Clock::start();
        let opener = Opener {
            regions: &regions,
            clock,
            seed: 3,
            kinds: &crate::tests::device_types_with(&more),
        };
        let opened = opener.open(&uri.parse().unwrap()).unwrap();
        let count = usize::try_from(opened.medium.limits().block_count).unwrap();
        let channel = |number: usize| ChannelWithOwnBlocks {
            backend: opened.medium.channel().unwrap(),
            blocks: count * number / 3..(count * number / 3 + BLOCKS).min(count * (number + 1) / 3),
        };
        let is_ciphered = uri.contains("crypt:");
        let first = if is_ciphered { ArrayBlockState::Unknown } else { ArrayBlockState::Holds(0) };
        Self {
            channels: (0..3).map(channel).collect(),
            memory: regions.allocate_region(DEPTH * MEMORY as usize).unwrap(),
            medium: opened.medium,
            regions,
            block_size,
            array: vec![first; count],
            is_ciphered,
            is_busy: uri.contains("made:"),
            under_way: (0..DEPTH).map(|_| None).collect(),
            // Latency models record when they were busy while the stack was opened.
            now: clock.now(),
            clock: uri.contains("stored:").then_some(clock),
            random: Random::new(1),
            stamp: 1,
        }
    }

    /// Submits one request once there is a free slot and its blocks are free, and then advances the time
    /// or not.
    fn submit_step_when_possible(&mut self, step: &OperationStep) {
        self.random = Random::new(step.seed.into());
        let (request, differ) = self.build_request(step);
        while !self.has_free_slot_and_blocks(&request) {
            self.poll_once();
        }
        let token = self.under_way.iter().position(Option::is_none).unwrap();
        let request = Request { token: token as u64, ..request };
        self.start_request(step, request, differ);
        for _ in 0..self.random.below(3) {
            self.poll_once();
        }
    }

    fn build_request(&self, step: &OperationStep) -> (Request, bool) {
        let own = &self.channels[usize::from(step.channel) % 3].blocks;
        let within = |number: u16, count: usize| {
            let most = own.len() - count;
            (own.start + usize::from(number) % (most + 1)) as u64
        };
        let blocks =
            (u32::from(step.blocks) % BLOCKS_MAX + 1).min(u32::try_from(own.len()).unwrap());
        let (operation, differ, mut flags) = match step.what {
            StepKind::Do(operation) => (operation, false, RequestFlags::NONE),
            StepKind::Differ(operation) => (operation, true, RequestFlags::NONE),
            StepKind::WriteZeroesAway => (Operation::WriteZeroes, false, RequestFlags::DEALLOCATE),
        };
        if step.forced {
            flags = flags.union(RequestFlags::FUA);
        }
        let is_flush = operation == Operation::Flush;
        let is_copy = operation == Operation::Copy;
        let request = Request {
            token: 0,
            lba: if is_flush { 0 } else { within(step.first, blocks as usize) },
            operand: if is_copy { within(step.other, blocks as usize) } else { 0 },
            segment_first: 0,
            blocks: if is_flush { 0 } else { blocks },
            segment_count: 0,
            metadata_count: 0,
            operation,
            flags,
        };
        (request, differ)
    }

    /// Whether there is a free slot and the blocks are not in use.
    fn has_free_slot_and_blocks(&self, request: &Request) -> bool {
        let busy = |range: std::ops::Range<usize>| {
            let others = self.under_way.iter().flatten();
            others
                .flat_map(|other| accessed_ranges(&other.request))
                .any(|other| range.start < other.end && other.start < range.end)
        };
        self.under_way.iter().any(Option::is_none)
            && !accessed_ranges(request).into_iter().any(busy)
    }

    /// Fills the memory, submits, and changes the array as the request changes the device.
    fn start_request(&mut self, step: &OperationStep, request: Request, differ: bool) {
        let Request { operation, blocks, token, .. } = request;
        let range = block_range(request.lba, blocks);
        let found = self.array[range].to_vec();
        let bytes = self.initial_memory_contents(&request, &found, differ);
        let memory =
            if bytes.is_empty() { Vec::new() } else { self.random_segments(token, bytes.len()) };
        self.store_to_segments(&memory, &bytes);
        let segment_count = u16::try_from(memory.len()).unwrap();
        let request = Request { segment_count, ..request };
        let channel = &mut self.channels[usize::from(step.channel) % 3].backend;
        let support = channel.limits().operations;
        while channel.submit(self.now, &[request], &memory) == 0 {
            // Full, or reluctant. No request that completes meanwhile overlaps these blocks.
            self.now = next_time(self.now, 500, self.clock);
            channel.flush_submissions();
            let mut completions = CompletionBatch::with_capacity(DEPTH);
            channel.poll(self.now, &mut completions);
            for completion in completions.drain() {
                check_completion(&mut self.under_way, &self.regions, self.block_size, completion);
            }
        }
        let status = match support.has(operation) {
            true => self.apply_to_array(&request, &found, differ),
            false => vec![IoStatus::INVALID_OPCODE],
        };
        let expected = status.into_iter().map(|status| status.0).collect();
        let pending = PendingRequest { request, memory, found, expected };
        self.under_way[usize::try_from(token).unwrap()] = Some(pending);
    }

    /// Initial contents of the memory of a request.
    fn initial_memory_contents(
        &mut self,
        request: &Request,
        found: &[ArrayBlockState],
        differ: bool,
    ) -> Vec<u8> {
        let size = self.block_size;
        let stamps = |from: u64| (0..u64::from(request.blocks)).map(move |block| from + block);
        let fill = |stamps: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
            stamps.flat_map(|stamp| stamped_contents(stamp, size)).collect()
        };
        let mut held = found.iter().map(|state| match state {
            ArrayBlockState::Holds(stamp) | ArrayBlockState::Free(stamp) => *stamp,
            ArrayBlockState::Lost | ArrayBlockState::Unknown => 0,
        });
        let fresh = self.stamp;
        self.stamp += u64::from(request.blocks);
        let mut expected = fill(&mut held);
        if differ {
            let wrong = usize::try_from(self.random.below(expected.len() as u64)).unwrap();
            expected[wrong] ^= 1 << self.random.below(8);
        }
        match request.operation {
            Operation::Read => vec![0xee; expected.len()],
            Operation::Write => fill(&mut stamps(fresh)),
            Operation::Compare => expected,
            Operation::CompareAndWrite => [expected, fill(&mut stamps(fresh))].concat(),
            _ => Vec::new(),
        }
    }

    /// Executes the request on the array and returns its permitted results.
    fn apply_to_array(
        &mut self,
        request: &Request,
        found: &[ArrayBlockState],
        differ: bool,
    ) -> Vec<IoStatus> {
        let fresh = self.stamp - u64::from(request.blocks);
        let is_lost = |states: &[ArrayBlockState]| states.contains(&ArrayBlockState::Lost);
        let is_free = found
            .iter()
            .any(|state| matches!(state, ArrayBlockState::Free(_) | ArrayBlockState::Unknown));
        let target = &mut self.array[block_range(request.lba, request.blocks)];
        let written = (fresh..).map(ArrayBlockState::Holds).take(target.len());
        let mut status = vec![IoStatus::SUCCESS];
        match request.operation {
            Operation::Flush => {}
            Operation::Write => target.iter_mut().zip(written).for_each(|(to, state)| *to = state),
            Operation::WriteZeroes => target.fill(ArrayBlockState::Holds(0)),
            Operation::WriteUncorrectable => target.fill(ArrayBlockState::Lost),
            Operation::Deallocate => target.iter_mut().for_each(|state| {
                if let ArrayBlockState::Holds(stamp) = *state {
                    let free = ArrayBlockState::Free(stamp);
                    *state = if self.is_ciphered { ArrayBlockState::Unknown } else { free };
                }
            }),
            Operation::Read | Operation::Verify if is_lost(found) => {
                status = vec![IoStatus::UNRECOVERED_READ];
            }
            Operation::Read | Operation::Verify => {}
            Operation::Copy => {
                let from = self.array[block_range(request.operand, request.blocks)].to_vec();
                if is_lost(&from) {
                    status = vec![IoStatus::UNRECOVERED_READ];
                } else {
                    self.array[block_range(request.lba, request.blocks)].copy_from_slice(&from);
                }
            }
            Operation::Compare | Operation::CompareAndWrite => {
                let writes = request.operation == Operation::CompareAndWrite;
                status = match (is_lost(found), is_free || differ) {
                    // On several legs, either may be detected first.
                    (true, true) => vec![IoStatus::UNRECOVERED_READ, IoStatus::COMPARE_FAILURE],
                    (true, false) => vec![IoStatus::UNRECOVERED_READ],
                    (false, _) if differ && !is_free => vec![IoStatus::COMPARE_FAILURE],
                    (false, true) => vec![IoStatus::SUCCESS, IoStatus::COMPARE_FAILURE],
                    (false, false) => vec![IoStatus::SUCCESS],
                };
                if writes && status == [IoStatus::SUCCESS] {
                    target.iter_mut().zip(written).for_each(|(to, state)| *to = state);
                } else if writes && status.contains(&IoStatus::SUCCESS) {
                    // Unknown until the next write.
                    target.fill(ArrayBlockState::Unknown);
                }
            }
        }
        status
    }

    /// Memory for `len` bytes, cut at random into up to six segments with gaps between them.
    fn random_segments(&mut self, token: u64, len: usize) -> Vec<Segment> {
        let mut at = u32::try_from(token).unwrap() * MEMORY;
        let mut left = u32::try_from(len).unwrap();
        let mut segments = Vec::new();
        while left > 0 {
            let most = if segments.len() == 5 { left } else { left.min(9_000) };
            let cut = u32::try_from(self.random.below(u64::from(most) + 1)).unwrap();
            let len = if segments.len() == 5 || self.random.chance(1, 4) { left } else { cut };
            segments.push(self.memory.segment().slice(at, len).unwrap());
            at += len + u32::try_from(self.random.below(5)).unwrap() * 4;
            left -= len;
        }
        segments
    }

    fn store_to_segments(&self, memory: &[Segment], mut bytes: &[u8]) {
        for segment in memory {
            let (part, rest) = bytes.split_at(segment.len_bytes as usize);
            self.regions.store(*segment, part).unwrap();
            bytes = rest;
        }
    }

    /// Advances the time and processes completions of every channel.
    fn poll_once(&mut self) {
        self.now = next_time(self.now, 1_000, self.clock);
        for channel in &mut self.channels {
            let wake_at = channel.backend.wake_at();
            if self.clock.is_none() && wake_at != Instant::NEVER && self.random.chance(1, 2) {
                self.now = self.now.max(wake_at);
            }
            channel.backend.flush_submissions();
            let mut completions = CompletionBatch::with_capacity(1 + DEPTH / 4);
            let count = channel.backend.poll(self.now, &mut completions);
            assert_eq!(count, completions.as_slice().len());
            for completion in completions.drain() {
                check_completion(&mut self.under_way, &self.regions, self.block_size, completion);
            }
        }
    }

    /// Waits for all requests in flight, and reads all blocks.
    fn wait_for_all(&mut self) {
        while self.under_way.iter().any(Option::is_some) {
            self.poll_once();
        }
        for channel in 0..3_u8 {
            let own = self.channels[usize::from(channel)].blocks.clone();
            for first in (0..own.len()).step_by(BLOCKS_MAX as usize) {
                let step = OperationStep {
                    what: StepKind::Do(Operation::Read),
                    channel,
                    first: u16::try_from(first).unwrap(),
                    other: 0,
                    blocks: u8::try_from(BLOCKS_MAX - 1).unwrap(),
                    forced: false,
                    seed: 7,
                };
                self.submit_step_when_possible(&step);
            }
        }
        while self.under_way.iter().any(Option::is_some) {
            self.poll_once();
        }
        let is_idle = |channel: &ChannelWithOwnBlocks| channel.backend.wake_at() == Instant::NEVER;
        assert!(self.is_busy || self.channels.iter().all(is_idle));
        self.check_extents();
    }

    /// Extents reported as zeroes must be zeroes.
    fn check_extents(&self) {
        let mut at = 0;
        while at < self.array.len() {
            let BlockExtent { blocks, kind: holds } = self.medium.block_status(at as u64).unwrap();
            let end = at + usize::try_from(blocks).unwrap();
            assert!(blocks > 0 && end <= self.array.len(), "{blocks} blocks from {at} on");
            let may_be_zeroes = |state: &ArrayBlockState| {
                !matches!(state, ArrayBlockState::Lost)
                    && !matches!(state, ArrayBlockState::Holds(1..))
            };
            let reported_values = &self.array[at..end];
            assert!(
                holds == ExtentKind::Data || reported_values.iter().all(may_be_zeroes),
                "{holds:?}: {reported_values:?}"
            );
            at = end;
        }
    }
}

/// Some nanoseconds later, or the time of the clock.
fn next_time(now: Instant, ns: u64, clock: Option<Clock>) -> Instant {
    clock.map_or(Instant { ns: now.ns + ns }, |clock| clock.now())
}

fn block_range(first: u64, blocks: u32) -> std::ops::Range<usize> {
    let first = usize::try_from(first).unwrap();
    first..first + blocks as usize
}

/// The blocks that a request reads or changes.
fn accessed_ranges(request: &Request) -> Vec<std::ops::Range<usize>> {
    let mut spans = vec![block_range(request.lba, request.blocks)];
    if request.operation == Operation::Copy {
        spans.push(block_range(request.operand, request.blocks));
    }
    spans
}

/// Contents of a block with this stamp; only zeroes if it is zero.
fn stamped_contents(stamp: u64, size: u32) -> impl Iterator<Item = u8> {
    let words = (0..u64::from(size) / 8).map(move |word| stamp.wrapping_mul(word | 1));
    words.flat_map(u64::to_le_bytes)
}

/// Checks a completion against its permitted results.
fn check_completion(
    under_way: &mut [Option<PendingRequest>],
    regions: &RegionTable,
    block_size: u32,
    completion: IoCompletion,
) {
    let Some(pending) = under_way[usize::try_from(completion.token).unwrap()].take() else {
        panic!("{completion:?} was not asked for")
    };
    let PendingRequest { request, memory, found, expected } = pending;
    assert!(
        expected.contains(&completion.status.0),
        "{request:?}: {completion:?}, expected {expected:x?}"
    );
    if request.operation != Operation::Read || !completion.status.is_success() {
        return;
    }
    let mut bytes = Vec::new();
    for segment in memory {
        let from = bytes.len();
        bytes.resize(from + segment.len_bytes as usize, 0);
        regions.load(segment, &mut bytes[from..]).unwrap();
    }
    for ((state, block), lba) in
        found.iter().zip(bytes.chunks(block_size as usize)).zip(request.lba..)
    {
        let is = |stamp| block.iter().copied().eq(stamped_contents(stamp, block_size));
        let good = match state {
            ArrayBlockState::Holds(stamp) => is(*stamp),
            ArrayBlockState::Free(stamp) => is(*stamp) || is(0),
            ArrayBlockState::Unknown => true,
            ArrayBlockState::Lost => false,
        };
        assert!(good, "{request:?}: block {lba} is {state:?}, found {:?}…", &block[..16]);
    }
}
