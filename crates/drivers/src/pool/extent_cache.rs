//! Extent cache: map runs of a volume that a channel has looked up, to map reads without the pool.
//!
//! Two direct-mapped tables with one run per entry: one indexed by long ranges for long runs, which
//! covers the whole volume, and one indexed by short ranges for all others. A new run replaces the
//! previous one of its entry.

use tenmil_volume::VolumeRun;

/// Cached runs of one volume.
#[derive(Debug)]
pub(super) struct ExtentCache {
    long: ExtentTable,
    short: ExtentTable,
}

#[derive(Debug)]
struct ExtentTable {
    runs: Box<[VolumeRun]>,
    /// Blocks of the range of an entry, as a power of two.
    shift: u32,
}

/// Entries for long and for short runs: 24 KiB and 192 KiB per channel.
const LONG: usize = 1 << 10;
const SHORT: usize = 1 << 13;
/// Blocks of a short range, as a power of two: the largest cluster.
const SHORT_SHIFT: u32 = 4;
/// A run without blocks.
const NOTHING: VolumeRun = VolumeRun { block: 0, blocks: 0, at: 0 };

impl ExtentCache {
    /// An empty cache for a volume of so many blocks.
    pub(super) fn new(blocks: u64) -> Self {
        let stretch = blocks.div_ceil(LONG as u64).next_power_of_two();
        let long = ExtentTable::new(LONG, stretch.trailing_zeros().max(SHORT_SHIFT));
        Self { long, short: ExtentTable::new(SHORT, SHORT_SHIFT) }
    }

    /// The location of blocks, if all of them are in one cached run.
    #[inline]
    pub(super) fn find_run(&self, block: u64, blocks: u64) -> Option<u64> {
        self.long.find_run(block, blocks).or_else(|| self.short.find_run(block, blocks))
    }

    /// Caches a run in the entries of `block`.
    pub(super) fn cache_run(&mut self, block: u64, run: VolumeRun) {
        if run.blocks >> self.long.shift > 0 {
            self.long.cache_run(block, run);
        }
        self.short.cache_run(block, run);
    }

    /// Removes all runs.
    pub(super) fn clear(&mut self) {
        self.long.runs.fill(NOTHING);
        self.short.runs.fill(NOTHING);
    }
}

impl ExtentTable {
    fn new(count: usize, shift: u32) -> Self {
        Self { runs: vec![NOTHING; count].into(), shift }
    }

    #[inline]
    fn find_run(&self, block: u64, blocks: u64) -> Option<u64> {
        let VolumeRun { block: first, blocks: len, at } = self.runs[self.entry_index(block)];
        // For a block before the run, the subtraction wraps to a value past its end.
        let skip = block.wrapping_sub(first);
        (skip < len && blocks <= len - skip).then(|| at + skip)
    }

    fn cache_run(&mut self, block: u64, run: VolumeRun) {
        let index_of = self.entry_index(block);
        self.runs[index_of] = run;
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the count of places")]
    fn entry_index(&self, block: u64) -> usize {
        (block >> self.shift) as usize & (self.runs.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;
    use tenmil_volume::VolumeRun;

    use super::ExtentCache;

    #[test]
    fn extent_cache_finds_exactly_the_cached_blocks() {
        let mut random = Random::new(1);
        for blocks in [1_u64, 100, 1 << 14, 1 << 28] {
            let mut extents = ExtentCache::new(blocks);
            assert_eq!(extents.find_run(0, 1), None);
            for _ in 0..2_000 {
                let block = random.below(blocks);
                let first = block - random.below(block.min(40_000) + 1);
                let len = block - first + 1 + random.below((blocks - block).min(40_000));
                let run = VolumeRun { block: first, blocks: len, at: first + 7_000 };
                extents.cache_run(block, run);
                let end = first + len;
                assert_eq!(extents.find_run(block, 1), Some(block + 7_000));
                assert_eq!(extents.find_run(block, end - block), Some(block + 7_000));
                let behind = extents.find_run(block, end - block + 1);
                assert!(behind.is_none_or(|at| at == block + 7_000));
                let other = random.below(blocks);
                assert!(extents.find_run(other, 1).is_none_or(|at| at == other + 7_000));
            }
            extents.clear();
            assert!((0..blocks.min(50_000)).all(|block| extents.find_run(block, 1).is_none()));
        }
    }

    #[test]
    fn cached_run_is_bounded() {
        let mut extents = ExtentCache::new(1 << 20);
        extents.cache_run(10, VolumeRun { block: 8, blocks: 4, at: 100 });
        let found = (0..16_u64).map(|block| extents.find_run(block, 1));
        let expected = (0..16_u64).map(|block| (8..12).contains(&block).then(|| block - 8 + 100));
        assert!(found.eq(expected));
        assert_eq!((extents.find_run(9, 3), extents.find_run(9, 4)), (Some(101), None));
    }
}
