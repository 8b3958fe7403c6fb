//! An adapter over a device with narrow limits, compared with a plain array.

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation,
    Random, Request, RequestFlags, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::strict_device::{AdaptedStrictDevice, DeviceRequirements, StrictDevice};
use crate::conformance::PartialAcceptDevice;
use crate::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_block::{AdaptationOptions, BounceBufferAllocator, MemoryAlignment};

const BLOCK: usize = 512;
const BLOCKS: u64 = 96;
const PLACES: usize = 6;
/// Bytes of memory that a request may use.
const PLACE_BYTES: u32 = 128 << 10;

/// A request in flight, and its expected result.
#[derive(Clone, Debug)]
struct ExpectedResult {
    token: u64,
    request: Request,
    segments: Vec<Segment>,
    /// Expected data of a compare, or written data.
    bytes: Vec<u8>,
}

struct AdaptFixture {
    random: Random,
    regions: RegionTable,
    memory: Segment,
    channel: Box<dyn IoChannel>,
    /// A second channel to the blocks, without the adapter.
    medium: Box<dyn IoChannel>,
    now: Instant,
    /// Contents of the blocks; `None` if unreadable.
    blocks: Vec<Option<[u8; BLOCK]>>,
    places: [Option<ExpectedResult>; PLACES],
    next_token: u64,
    completed: u64,
}

fn random_requirements(random: &mut Random) -> DeviceRequirements {
    let align = [1, 1, 4, 512][usize::try_from(random.below(4)).unwrap()];
    DeviceRequirements {
        blocks_max: u32::try_from(random.below(5) + 1).unwrap(),
        segments_max: u16::try_from(random.below(3) + 1).unwrap(),
        boundary: [0, 4, 6][usize::try_from(random.below(3)).unwrap()],
        alignment: MemoryAlignment { address_bytes: align, len_bytes: align },
        forces: random.chance(1, 2),
        deallocates: random.chance(1, 2),
        takes: if random.chance(1, 2) { 1 } else { 5 },
    }
}

impl AdaptFixture {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let regions = RegionTable::new(8);
        let len = PLACE_BYTES as usize * PLACES + 4096;
        let memory =
            regions.add_mapping(MemoryMapping::new(len, MemoryBacking::Private).unwrap()).unwrap();
        let ram = RamDevice::new(&regions, u32::try_from(BLOCK).unwrap(), BLOCKS).unwrap();
        let medium = ram.channel().unwrap();
        let spread = LatencySpec { mean: Span::from_us(3), p99: Some(Span::from_us(40)) };
        let delays = DelaySettings { read: spread, write: spread };
        let slow = Arc::new(DelayDevice::new(Arc::new(ram), delays, seed).unwrap());
        let inner = Arc::new(PartialAcceptDevice::new(slow, seed));
        let demands = random_requirements(&mut random);
        let options = AdaptationOptions {
            parents_max: u16::try_from(random.below(4) + 1).unwrap(),
            children_max: u16::try_from(random.below(4) + 1).unwrap(),
            ..demands.adapt_options()
        };
        let buffers = u16::try_from(random.below(2) + 1).unwrap();
        let chunk = 512 << random.below(4);
        let memory_of_its_own = BounceBufferAllocator::new(&regions, chunk, buffers).unwrap();
        let below = StrictDevice { inner, demands };
        let shaped = AdaptedStrictDevice { below, memory: memory_of_its_own, options };
        Self {
            random,
            regions,
            memory,
            channel: shaped.channel().unwrap(),
            medium,
            now: Instant::default(),
            blocks: vec![Some([0; BLOCK]); usize::try_from(BLOCKS).unwrap()],
            places: [const { None }; PLACES],
            next_token: 0,
            completed: 0,
        }
    }

    fn expected_contents(&self, range: Range<u64>) -> Option<Vec<u8>> {
        let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        let blocks: Option<Vec<_>> = self.blocks[range].iter().copied().collect();
        blocks.map(|blocks| blocks.concat())
    }

    fn set_expected(&mut self, range: Range<u64>, bytes: Option<&[u8]>) {
        for (index, block) in range.enumerate() {
            self.blocks[usize::try_from(block).unwrap()] =
                bytes.map(|bytes| bytes[index * BLOCK..][..BLOCK].try_into().unwrap());
        }
    }

    /// Draws a request whose blocks do not overlap another one in flight.
    fn random_request(&mut self, place: usize) -> Option<ExpectedResult> {
        use Operation::*;
        let operations = [
            Read,
            Read,
            Write,
            Write,
            Flush,
            Deallocate,
            WriteZeroes,
            Compare,
            WriteUncorrectable,
            Verify,
            Copy,
            CompareAndWrite,
        ];
        let operation = operations[usize::try_from(self.random.below(12)).unwrap()];
        let blocks = if self.random.chance(1, 2) { 3 } else { 40 };
        let blocks = u32::try_from(self.random.below(blocks + 1)).unwrap();
        let lba = self.random.below(BLOCKS - u64::from(blocks) + 1);
        let flags = RequestFlags(u8::try_from(self.random.below(2)).unwrap());
        let mut request = Request {
            token: self.next_random_token(),
            lba,
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: 0,
            metadata_count: 0,
            operation,
            flags,
        };
        if operation == Flush {
            (request.lba, request.blocks) = (0, 0);
        }
        if operation == Copy {
            request.operand = self.random.below(BLOCKS - u64::from(blocks) + 1);
        }
        let clear = self.places.iter().flatten().all(|other| {
            !request_ranges(&request).iter().any(|mine| {
                request_ranges(&other.request).iter().any(|theirs| ranges_overlap(mine, theirs))
            })
        });
        clear.then(|| self.place_data_and_expected(place, request))
    }

    /// Some tokens are in the range that the adapter uses internally.
    fn next_random_token(&mut self) -> u64 {
        self.next_token += 1;
        if self.random.chance(1, 4) { u64::MAX - self.next_token } else { self.next_token }
    }

    /// Assigns memory and its contents to a request.
    fn place_data_and_expected(&mut self, place: usize, mut request: Request) -> ExpectedResult {
        let len = request.blocks as usize * BLOCK;
        let range = request.lba..request.lba + u64::from(request.blocks);
        let mut bytes: Vec<u8> =
            (0..len).map(|_| self.random.next_u64().to_le_bytes()[0]).collect();
        match request.operation {
            Operation::Compare | Operation::CompareAndWrite => {
                let mut expected = self.expected_contents(range).unwrap_or_else(|| bytes.clone());
                if len > 0 && self.random.chance(1, 3) {
                    expected[usize::try_from(self.random.below(len as u64)).unwrap()] ^= 1;
                }
                bytes.splice(0..0, expected);
                bytes.truncate(if request.operation == Operation::Compare { len } else { 2 * len });
            }
            Operation::Read | Operation::Write => {}
            _ => bytes.clear(),
        }
        let segments = self.random_segments(place, bytes.len());
        let mut rest = &bytes[..];
        for segment in &segments {
            let (part, more) = rest.split_at(segment.len_bytes as usize);
            self.regions.store(*segment, part).unwrap();
            rest = more;
        }
        request.segment_count = u16::try_from(segments.len()).unwrap();
        ExpectedResult { token: request.token, request, segments, bytes }
    }

    /// Memory for `len` bytes, in segments of any or full alignment.
    fn random_segments(&mut self, place: usize, len: usize) -> Vec<Segment> {
        let unit = [1, 4, 512][usize::try_from(self.random.below(3)).unwrap()];
        let first = u32::try_from(place).unwrap() * PLACE_BYTES;
        let (mut at, mut left, mut segments) = (0, u32::try_from(len).unwrap(), Vec::new());
        while left > 0 {
            let most = [600, 3000, 20_000][usize::try_from(self.random.below(3)).unwrap()];
            let len_bytes = u32::try_from(self.random.below(most) + 1).unwrap();
            let len_bytes = len_bytes.next_multiple_of(unit).min(left);
            let len_bytes = if segments.len() > 100 { left } else { len_bytes };
            segments.push(self.memory.slice(first + at, len_bytes).unwrap());
            at += len_bytes + u32::try_from(self.random.below(3)).unwrap() * unit;
            left -= len_bytes;
        }
        segments
    }

    fn read_segments(&self, segments: &[Segment]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for segment in segments {
            let from = bytes.len();
            bytes.resize(from + segment.len_bytes as usize, 0);
            self.regions.load(*segment, &mut bytes[from..]).unwrap();
        }
        bytes
    }

    fn submit(&mut self) {
        let Some(place) = self.places.iter().position(Option::is_none) else { return };
        let Some(wanted) = self.random_request(place) else { return };
        if self.channel.submit(self.now, &[wanted.request], &wanted.segments) == 1 {
            self.places[place] = Some(wanted);
        }
        self.channel.flush_submissions();
    }

    fn poll(&mut self) {
        self.now = self.now.after(Span::from_us(self.random.below(20)));
        let mut completions =
            CompletionBatch::with_capacity(usize::try_from(self.random.below(4) + 1).unwrap());
        let count = self.channel.poll(self.now, &mut completions);
        assert_eq!(count, completions.as_slice().len());
        for completion in completions.drain() {
            let is_it = |wanted: &Option<ExpectedResult>| {
                wanted.as_ref().is_some_and(|wanted| wanted.token == completion.token)
            };
            let place = self.places.iter().position(is_it).expect("answered once, and asked for");
            let wanted = self.places[place].take().unwrap();
            self.check_completion(&wanted, completion);
            self.completed += 1;
        }
    }

    /// Checks one completion, and executes the request on the array.
    fn check_completion(&mut self, wanted: &ExpectedResult, completion: IoCompletion) {
        let Request { lba, operand, operation, blocks, .. } = wanted.request;
        let count = u64::from(blocks);
        let range = lba..lba + count;
        let held = self.expected_contents(range.clone());
        let source = self.expected_contents(operand..operand + count);
        let expected = match operation {
            Operation::Read | Operation::Verify if held.is_none() => IoStatus::UNRECOVERED_READ,
            Operation::Copy if source.is_none() => IoStatus::UNRECOVERED_READ,
            Operation::Compare | Operation::CompareAndWrite => match &held {
                Some(held) if held[..] == wanted.bytes[..held.len()] => IoStatus::SUCCESS,
                Some(_) => IoStatus::COMPARE_FAILURE,
                // One part may differ before another turns out to be unreadable.
                None if completion.status == IoStatus::COMPARE_FAILURE => IoStatus::COMPARE_FAILURE,
                None => IoStatus::UNRECOVERED_READ,
            },
            _ => IoStatus::SUCCESS,
        };
        assert_eq!(completion.status, expected, "{:?}", wanted.request);
        match operation {
            Operation::Read if held.is_some() => {
                assert!(
                    self.read_segments(&wanted.segments) == held.unwrap(),
                    "{:?}",
                    wanted.request
                );
            }
            Operation::Write => self.set_expected(range, Some(&wanted.bytes)),
            Operation::CompareAndWrite if completion.status.is_success() => {
                let new = wanted.bytes[wanted.bytes.len() / 2..].to_vec();
                self.set_expected(range, Some(&new));
            }
            Operation::WriteZeroes => {
                self.set_expected(range, Some(&vec![0; blocks as usize * BLOCK]));
            }
            Operation::WriteUncorrectable => self.set_expected(range, None),
            Operation::Copy if source.is_some() => self.set_expected(range, source.as_deref()),
            // The result of a copy that failed midway, or of a deallocation, is unknown.
            Operation::Copy | Operation::Deallocate => self.set_expected_from_device(range),
            _ => {}
        }
    }

    /// Reads the contents of blocks from the device itself.
    fn set_expected_from_device(&mut self, range: Range<u64>) {
        for block in range {
            let held = self.read_block_below(block);
            self.set_expected(block..block + 1, held.as_deref());
        }
    }

    /// Contents of a block on the device.
    fn read_block_below(&mut self, block: u64) -> Option<Vec<u8>> {
        let places = u32::try_from(PLACES).unwrap();
        let segment = self.memory.slice(places * PLACE_BYTES, 512).unwrap();
        let request = Request {
            token: 0,
            lba: block,
            operand: 0,
            segment_first: 0,
            blocks: 1,
            segment_count: 1,
            metadata_count: 0,
            operation: Operation::Read,
            flags: RequestFlags::NONE,
        };
        let mut completions = CompletionBatch::with_capacity(1);
        assert_eq!(self.medium.submit(self.now, &[request], &[segment]), 1);
        assert_eq!(self.medium.poll(self.now, &mut completions), 1);
        let done = completions.as_slice()[0].status.is_success();
        done.then(|| self.read_segments(&[segment]))
    }
}

fn request_ranges(request: &Request) -> Vec<Range<u64>> {
    let of = |first| first..first + u64::from(request.blocks);
    match request.operation {
        Operation::Copy => vec![of(request.lba), of(request.operand)],
        _ => vec![of(request.lba)],
    }
}

fn ranges_overlap(left: &Range<u64>, right: &Range<u64>) -> bool {
    left.start < right.end && right.start < left.end
}

#[test]
fn adapted_device_matches_a_plain_array() {
    let mut completed = 0;
    for seed in 0..300 {
        let mut bench = AdaptFixture::new(seed);
        for _ in 0..800 {
            if bench.random.chance(2, 3) {
                bench.submit();
            } else {
                bench.poll();
            }
        }
        let mut turns = 0;
        while bench.places.iter().any(Option::is_some) {
            bench.poll();
            turns += 1;
            assert!(turns < 20_000, "seed {seed}: {:?}", bench.places);
        }
        for block in 0..BLOCKS {
            let held = bench.expected_contents(block..block + 1);
            assert_eq!(bench.read_block_below(block), held, "seed {seed} block {block}");
        }
        assert!(bench.completed > 3, "seed {seed}: {}", bench.completed);
        assert!(!bench.channel.arm(), "seed {seed}: nothing is owed");
        completed += bench.completed;
    }
    assert!(completed > 15_000, "{completed}");
}
