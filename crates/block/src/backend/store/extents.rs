//! What a channel remembers of a volume's map: runs of blocks that lie together, found without
//! asking the store.
//!
//! Two tables, each with a place for every stretch of the volume, and one run in a place: a table of
//! long stretches for long runs, which reaches over the whole volume, and one of short stretches for
//! all others. What is put into a place takes it from whatever was there.

use volume::Run;

/// Runs of one volume.
#[derive(Debug)]
pub(super) struct Extents {
    long: Table,
    short: Table,
}

#[derive(Debug)]
struct Table {
    places: Box<[Run]>,
    /// Blocks in a stretch, as a power of two.
    shift: u32,
}

/// Places for long runs and for short ones: 24 KiB and 192 KiB for each channel.
const LONG: usize = 1 << 10;
const SHORT: usize = 1 << 13;
/// Blocks in a short stretch, as a power of two: those of the largest unit.
const SHORT_SHIFT: u32 = 4;
/// No block is in it.
const NOTHING: Run = Run { block: 0, blocks: 0, at: 0 };

impl Extents {
    /// Nothing yet, of a volume of so many blocks.
    pub(super) fn of(blocks: u64) -> Self {
        let stretch = blocks.div_ceil(LONG as u64).next_power_of_two();
        let long = Table::new(LONG, stretch.trailing_zeros().max(SHORT_SHIFT));
        Self { long, short: Table::new(SHORT, SHORT_SHIFT) }
    }

    /// Where blocks lie, if that is known of all of them and they lie together.
    #[inline]
    pub(super) fn find(&self, block: u64, blocks: u64) -> Option<u64> {
        self.long.find(block, blocks).or_else(|| self.short.find(block, blocks))
    }

    /// Remembers a run, for the blocks about `block`.
    pub(super) fn keep(&mut self, block: u64, run: Run) {
        if run.blocks >> self.long.shift > 0 {
            self.long.keep(block, run);
        }
        self.short.keep(block, run);
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.long.places.fill(NOTHING);
        self.short.places.fill(NOTHING);
    }
}

impl Table {
    fn new(count: usize, shift: u32) -> Self {
        Self { places: vec![NOTHING; count].into(), shift }
    }

    #[inline]
    fn find(&self, block: u64, blocks: u64) -> Option<u64> {
        let Run { block: first, blocks: len, at } = self.places[self.place(block)];
        // A block before the run is far behind its end.
        let skip = block.wrapping_sub(first);
        (skip < len && blocks <= len - skip).then(|| at + skip)
    }

    fn keep(&mut self, block: u64, run: Run) {
        let place = self.place(block);
        self.places[place] = run;
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the count of places")]
    fn place(&self, block: u64) -> usize {
        (block >> self.shift) as usize & (self.places.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use base::Random;
    use volume::Run;

    use super::Extents;

    #[test]
    fn what_is_found_was_kept_and_nothing_is_found_beside_it() {
        let mut random = Random::new(1);
        for blocks in [1_u64, 100, 1 << 14, 1 << 28] {
            let mut extents = Extents::of(blocks);
            assert_eq!(extents.find(0, 1), None);
            for _ in 0..2_000 {
                let block = random.below(blocks);
                let first = block - random.below(block.min(40_000) + 1);
                let len = block - first + 1 + random.below((blocks - block).min(40_000));
                let run = Run { block: first, blocks: len, at: first + 7_000 };
                extents.keep(block, run);
                let end = first + len;
                assert_eq!(extents.find(block, 1), Some(block + 7_000));
                assert_eq!(extents.find(block, end - block), Some(block + 7_000));
                let behind = extents.find(block, end - block + 1);
                assert!(behind.is_none_or(|at| at == block + 7_000));
                let other = random.below(blocks);
                assert!(extents.find(other, 1).is_none_or(|at| at == other + 7_000));
            }
            extents.clear();
            assert!((0..blocks.min(50_000)).all(|block| extents.find(block, 1).is_none()));
        }
    }

    #[test]
    fn a_run_ends_where_it_ends() {
        let mut extents = Extents::of(1 << 20);
        extents.keep(10, Run { block: 8, blocks: 4, at: 100 });
        let found = (0..16_u64).map(|block| extents.find(block, 1));
        let expected = (0..16_u64).map(|block| (8..12).contains(&block).then(|| block - 8 + 100));
        assert!(found.eq(expected));
        assert_eq!((extents.find(9, 3), extents.find(9, 4)), (Some(101), None));
    }
}
