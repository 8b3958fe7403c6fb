//! Workload generator: operation, address and size of the next I/O.
//!
//! It is part of the path of every I/O, so it has no division and draws no random number that is
//! not needed: a run with one size draws no size, a run of reads draws no operation.

use tenmil_base::{Operation, Random};

use super::perf_options::{AccessPattern, FLUSH_EVERY, PerfOptions, SIZES_MAX, SizeMix};
use super::zipf::ZipfDistribution;

/// Generator of I/Os. Each submitting thread has one.
#[derive(Clone, Debug)]
pub struct Workload {
    random: Random,
    operations: OperationMix,
    sizes: SizeDistribution,
    order: AccessOrder,
    theta: Option<f64>,
    skews: Vec<ZipfDistribution>,
}

/// Addresses of one queue pair: its range of blocks and the position in it.
#[derive(Clone, Debug)]
pub struct AddressStream {
    /// First block of the range.
    first: u64,
    /// Random order: number of slots to choose from. Sequential order: number of blocks in the
    /// range.
    slots: u64,
    /// Sequential order: next block, relative to `first`.
    next: u64,
    /// Blocks per slot.
    slot_blocks: u32,
    largest_blocks: u32,
    block_shift: u32,
    /// Index into the Zipf tables of the workload.
    skew: u32,
}

/// One I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoSpec {
    /// Operation.
    pub operation: Operation,
    /// First block. Zero for a flush.
    pub lba: u64,
    /// Number of blocks. Zero for a flush.
    pub blocks: u32,
    /// Number of bytes.
    pub len_bytes: u32,
}

/// Range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
}

#[derive(Clone, Copy, Debug)]
enum AccessOrder {
    Sequential,
    Uniform,
    Skewed,
}

/// Operations of a workload. A random number below `flush_below` selects a flush, below
/// `read_below` a read, and a write otherwise.
#[derive(Clone, Copy, Debug)]
enum OperationMix {
    Always(Operation),
    Mixed { flush_below: u64, read_below: u64 },
}

/// Sizes of a workload. The number of `bounds` that a random number reaches is the index of the
/// size.
#[derive(Clone, Debug)]
struct SizeDistribution {
    bounds: [u64; SIZES_MAX],
    len_bytes: [u32; SIZES_MAX],
    count: usize,
    smallest: u32,
    largest: u32,
}

impl Workload {
    /// Creates the workload of `options` with this seed.
    pub fn new(options: &PerfOptions, seed: u64) -> Self {
        let order = match (options.pattern.is_random(), options.zipf) {
            (false, _) => AccessOrder::Sequential,
            (true, None) => AccessOrder::Uniform,
            (true, Some(_)) => AccessOrder::Skewed,
        };
        Self {
            random: Random::new(seed),
            operations: OperationMix::new(options.pattern, options.read_percent),
            sizes: SizeDistribution::new(&options.sizes),
            order,
            theta: options.zipf,
            skews: Vec::new(),
        }
    }

    /// Creates an address stream over `range` of a device with `block_size`-byte blocks.
    ///
    /// # Panics
    ///
    /// If the range is smaller than the largest size, or the block size is no power of two, which
    /// the check of the options excludes.
    pub fn new_address_stream(&mut self, range: BlockRange, block_size: u32) -> AddressStream {
        assert!(block_size.is_power_of_two(), "a block of {block_size} bytes");
        let block_shift = block_size.trailing_zeros();
        let largest_blocks = self.sizes.largest >> block_shift;
        let slot_blocks = self.sizes.smallest >> block_shift;
        assert!(range.count >= u64::from(largest_blocks), "a range of {} blocks", range.count);
        let slots = match self.order {
            AccessOrder::Sequential => range.count,
            AccessOrder::Uniform | AccessOrder::Skewed => {
                (range.count - u64::from(largest_blocks)) / u64::from(slot_blocks) + 1
            }
        };
        let skew = self.zipf_table_index(slots);
        let (first, next) = (range.first, 0);
        AddressStream { first, slots, next, slot_blocks, largest_blocks, block_shift, skew }
    }

    /// Operation and size of all I/Os, if there is only one of each.
    pub fn fixed_operation_and_size(&self) -> Option<(Operation, u32)> {
        match self.operations {
            OperationMix::Always(operation) if self.sizes.count == 1 => {
                Some((operation, self.sizes.largest))
            }
            _ => None,
        }
    }

    /// Draws the first block of the next I/O of `queue`, which has `blocks` blocks.
    #[inline]
    pub fn draw_address(&mut self, queue: &mut AddressStream, blocks: u32) -> u64 {
        let offset = match self.order {
            AccessOrder::Uniform => return queue.draw_uniform(&mut self.random),
            AccessOrder::Sequential => queue.next_sequential(blocks),
            AccessOrder::Skewed => {
                let place = self.skews[queue.skew as usize].draw_slot(&mut self.random);
                place * u64::from(queue.slot_blocks)
            }
        };
        queue.first + offset
    }

    /// Random generator of uniform addresses, if the order is uniform. A loop that draws many
    /// addresses by [`AddressStream::draw_uniform`] may work on a copy and must store it back.
    #[inline]
    pub(super) fn uniform_address_generator(&mut self) -> Option<&mut Random> {
        matches!(self.order, AccessOrder::Uniform).then_some(&mut self.random)
    }

    /// Draws the next I/O of `queue`.
    #[inline]
    pub fn draw_io(&mut self, queue: &mut AddressStream) -> IoSpec {
        let operation = self.operations.draw_operation(&mut self.random);
        if operation == Operation::Flush {
            return IoSpec { operation, lba: 0, blocks: 0, len_bytes: 0 };
        }
        let len_bytes = self.sizes.draw_size(&mut self.random);
        let blocks = len_bytes >> queue.block_shift;
        IoSpec { operation, lba: self.draw_address(queue, blocks), blocks, len_bytes }
    }

    /// Index of the Zipf table over `slots` slots, which is created on first use.
    fn zipf_table_index(&mut self, slots: u64) -> u32 {
        let Some(theta) = self.theta else { return 0 };
        let known = self.skews.iter().position(|skew| skew.slot_count() == slots);
        let index = known.unwrap_or_else(|| {
            self.skews.push(ZipfDistribution::new(slots, theta));
            self.skews.len() - 1
        });
        u32::try_from(index).expect("fewer skews than devices")
    }
}

impl AddressStream {
    /// Draws the first block of a uniformly distributed slot.
    #[inline(always)]
    pub(super) fn draw_uniform(&self, random: &mut Random) -> u64 {
        self.first + random.below(self.slots) * u64::from(self.slot_blocks)
    }

    /// Advances the sequential order. A rest at the end of the range that is too short for the
    /// largest size is never accessed.
    #[inline]
    fn next_sequential(&mut self, blocks: u32) -> u64 {
        let at = self.next;
        let after = at + u64::from(blocks);
        let fits = after + u64::from(self.largest_blocks) <= self.slots;
        self.next = if fits { after } else { 0 };
        at
    }
}

impl BlockRange {
    /// Part `index` of `parts` equal parts.
    #[must_use]
    pub fn nth_part(self, index: u64, parts: u64) -> Self {
        let count = self.count / parts;
        Self { first: self.first + count * index, count }
    }
}

impl OperationMix {
    fn new(pattern: AccessPattern, read_percent: u8) -> Self {
        let share = |of: u64| of / 100 * u64::from(read_percent);
        let flush_below = match pattern {
            AccessPattern::Read | AccessPattern::RandRead => return Self::Always(Operation::Read),
            AccessPattern::Write | AccessPattern::RandWrite => {
                return Self::Always(Operation::Write);
            }
            AccessPattern::Trim => return Self::Always(Operation::Deallocate),
            AccessPattern::Rw | AccessPattern::RandRw if read_percent == 100 => {
                return Self::Always(Operation::Read);
            }
            AccessPattern::Rw | AccessPattern::RandRw => 0,
            AccessPattern::FlushMix => u64::MAX / u64::from(FLUSH_EVERY),
        };
        Self::Mixed { flush_below, read_below: flush_below + share(u64::MAX - flush_below) }
    }

    #[inline]
    fn draw_operation(self, random: &mut Random) -> Operation {
        match self {
            Self::Always(operation) => operation,
            Self::Mixed { flush_below, read_below } => {
                let number = random.next_u64();
                if number < flush_below {
                    Operation::Flush
                } else if number < read_below {
                    Operation::Read
                } else {
                    Operation::Write
                }
            }
        }
    }
}

impl SizeDistribution {
    fn new(mix: &SizeMix) -> Self {
        let total: u64 = mix.shares.iter().map(|share| u64::from(share.weight)).sum();
        let mut bounds = [u64::MAX; SIZES_MAX];
        let mut len_bytes = [0; SIZES_MAX];
        let mut weight = 0;
        for (index, share) in mix.shares.iter().enumerate() {
            weight += u64::from(share.weight);
            let bound = (u128::from(u64::MAX) + 1) * u128::from(weight) / u128::from(total);
            bounds[index] = u64::try_from(bound).unwrap_or(u64::MAX);
            len_bytes[index] = share.len_bytes;
        }
        let smallest = mix.shares.iter().map(|share| share.len_bytes).min().unwrap_or(0);
        Self { bounds, len_bytes, count: mix.shares.len(), smallest, largest: mix.largest_bytes() }
    }

    #[inline]
    fn draw_size(&self, random: &mut Random) -> u32 {
        if self.count == 1 {
            return self.largest;
        }
        let number = random.next_u64();
        // The bound of the last size is not compared, so the index stays below `count`.
        let passed = self.bounds[..self.count - 1].iter().filter(|bound| number >= **bound);
        self.len_bytes[passed.count()]
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Operation;

    use super::{BlockRange, Workload};
    use crate::perf::perf_options::{AccessPattern, PerfOptions, SizeMix};

    const RANGE: BlockRange = BlockRange { first: 1000, count: 803 };

    fn test_workload(pattern: AccessPattern, sizes: &str) -> Workload {
        let sizes = SizeMix::parse(sizes).unwrap();
        Workload::new(&PerfOptions { pattern, sizes, ..PerfOptions::default() }, 7)
    }

    #[test]
    fn random_addresses_are_aligned_to_the_size_and_cover_the_range() {
        let mut workload = test_workload(AccessPattern::RandRead, "4k");
        let mut queue = workload.new_address_stream(RANGE, 512);
        let mut hits = [0_u32; 100];
        for _ in 0..100_000 {
            let draw = workload.draw_io(&mut queue);
            assert_eq!((draw.operation, draw.blocks, draw.len_bytes), (Operation::Read, 8, 4096));
            assert_eq!((draw.lba - 1000) % 8, 0);
            assert!(draw.lba + 8 <= 1000 + 803);
            hits[usize::try_from((draw.lba - 1000) / 8).unwrap()] += 1;
        }
        assert!(hits.iter().all(|count| (850..1150).contains(count)), "{hits:?}");
    }

    #[test]
    fn sequential_stream_wraps_at_the_end_of_its_range() {
        let mut workload = test_workload(AccessPattern::Write, "4k");
        let mut queue = workload.new_address_stream(RANGE, 512);
        let mut other = workload.new_address_stream(RANGE.nth_part(1, 2), 512);
        for turn in 0..250 {
            let draw = workload.draw_io(&mut queue);
            assert_eq!(draw.lba, 1000 + turn % 100 * 8);
            assert_eq!(draw.operation, Operation::Write);
        }
        assert_eq!(workload.draw_io(&mut other).lba, 1401, "each lane has a place of its own");
    }

    #[test]
    fn sizes_are_drawn_in_proportion_to_their_weights() {
        for pattern in [AccessPattern::RandRead, AccessPattern::Read] {
            let mut workload = test_workload(pattern, "4k:70,64k:20,512:10");
            let mut queue = workload.new_address_stream(RANGE, 512);
            let mut counts = [0_u32; 3];
            for _ in 0..100_000 {
                let draw = workload.draw_io(&mut queue);
                assert!(draw.lba >= 1000 && draw.lba + u64::from(draw.blocks) <= 1803);
                counts[match draw.blocks {
                    8 => 0,
                    128 => 1,
                    1 => 2,
                    blocks => panic!("{blocks} blocks were never asked for"),
                }] += 1;
            }
            for (count, expected) in counts.into_iter().zip([70_000_u32, 20_000, 10_000]) {
                assert!(count.abs_diff(expected) < 800, "{pattern:?} {counts:?}");
            }
        }
    }

    #[test]
    fn operations_are_drawn_in_proportion_to_the_read_percentage() {
        let shares = |pattern, read_percent| {
            let options = PerfOptions { pattern, read_percent, ..PerfOptions::default() };
            let mut workload = Workload::new(&options, 3);
            let mut queue = workload.new_address_stream(RANGE, 512);
            let mut counts = [0_u32; 9];
            for _ in 0..100_000 {
                counts[workload.draw_io(&mut queue).operation as usize] += 1;
            }
            let of = |operation| counts[operation as usize];
            let [read, write, flush, trim] = [
                of(Operation::Read),
                of(Operation::Write),
                of(Operation::Flush),
                of(Operation::Deallocate),
            ];
            assert_eq!(read + write + flush + trim, 100_000);
            [read, write, flush, trim]
        };
        assert_eq!(shares(AccessPattern::RandRw, 100), [100_000, 0, 0, 0]);
        assert_eq!(shares(AccessPattern::RandRw, 0), [0, 100_000, 0, 0]);
        assert_eq!(shares(AccessPattern::Trim, 50), [0, 0, 0, 100_000]);
        assert_eq!(shares(AccessPattern::RandWrite, 50), [0, 100_000, 0, 0]);
        let [read, ..] = shares(AccessPattern::Rw, 70);
        assert!(read.abs_diff(70_000) < 800, "{read}");
        let [read, write, flush, _] = shares(AccessPattern::FlushMix, 50);
        assert!(flush.abs_diff(6_250) < 400, "{flush}");
        assert!(read.abs_diff(write) < 1_500, "{read} {write}");
    }

    #[test]
    fn parts_of_a_range_do_not_overlap() {
        let parts: Vec<BlockRange> = (0..3).map(|index| RANGE.nth_part(index, 3)).collect();
        assert_eq!(parts[0], BlockRange { first: 1000, count: 267 });
        assert!(parts.windows(2).all(|pair| pair[0].first + pair[0].count == pair[1].first));
        assert!(parts[2].first + parts[2].count <= 1803);
    }
}
