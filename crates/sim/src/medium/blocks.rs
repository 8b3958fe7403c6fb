//! Block contents, persistent and cached.

use core::ops::Range;
use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Random;

use crate::stamp::PART;

/// Blocks of a medium with all versions since the last flush.
#[derive(Debug)]
pub(super) struct Blocks {
    block_size: usize,
    /// Persistent contents. Missing blocks are zero.
    stable: BTreeMap<u64, Vec<u8>>,
    /// Versions written since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<Vec<u8>>>,
    unreadable: BTreeSet<u64>,
}

impl Blocks {
    pub(super) fn new(block_size: u32) -> Self {
        let (stable, cached, unreadable) = Default::default();
        Self { block_size: block_size as usize, stable, cached, unreadable }
    }

    /// Current contents of one block.
    pub(super) fn read(&self, lba: u64) -> Vec<u8> {
        let newest = self.cached.get(&lba).and_then(|versions| versions.last());
        newest.or_else(|| self.stable.get(&lba)).cloned().unwrap_or(vec![0; self.block_size])
    }

    /// Current contents of several blocks. `None` if one of them is unreadable.
    pub(super) fn read_range(&self, range: Range<u64>) -> Option<Vec<u8>> {
        if self.unreadable.range(range.clone()).next().is_some() {
            return None;
        }
        Some(range.flat_map(|lba| self.read(lba)).collect())
    }

    /// Writes blocks to the cache.
    pub(super) fn write(&mut self, first: u64, bytes: &[u8]) {
        for (lba, block) in (first..).zip(bytes.chunks_exact(self.block_size)) {
            self.unreadable.remove(&lba);
            self.cached.entry(lba).or_default().push(block.to_vec());
        }
    }

    /// Makes blocks unreadable until they are written.
    pub(super) fn spoil(&mut self, range: Range<u64>) {
        self.unreadable.extend(range);
    }

    /// Makes all blocks persistent.
    pub(super) fn flush(&mut self) {
        for (lba, mut versions) in std::mem::take(&mut self.cached) {
            if let Some(newest) = versions.pop() {
                self.stable.insert(lba, newest);
            }
        }
    }

    /// Makes some blocks persistent.
    pub(super) fn flush_range(&mut self, range: Range<u64>) {
        for lba in range {
            if let Some(newest) = self.cached.remove(&lba).and_then(|mut versions| versions.pop()) {
                self.stable.insert(lba, newest);
            }
        }
    }

    /// For each unflushed block any version may survive, from the persistent one to the newest.
    /// With torn writes this applies to each part of a block.
    pub(super) fn lose_power(&mut self, random: &mut Random, tears: bool) {
        for (lba, versions) in std::mem::take(&mut self.cached) {
            let stable = self.stable.entry(lba).or_insert_with(|| vec![0; self.block_size]);
            let part = if tears { PART } else { self.block_size };
            for at in (0..self.block_size).step_by(part) {
                let drawn = random.below(versions.len() as u64 + 1);
                let survivor = usize::try_from(drawn).ok().and_then(|index| versions.get(index));
                if let Some(survivor) = survivor {
                    stable[at..at + part].copy_from_slice(&survivor[at..at + part]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::Blocks;
    use crate::stamp::PART;

    fn block(byte: u8) -> Vec<u8> {
        vec![byte; 2 * PART]
    }

    fn written() -> Blocks {
        let mut blocks = Blocks::new(2 * 512);
        blocks.write(5, &block(1));
        blocks.flush();
        blocks.write(5, &block(2));
        blocks.write(5, &block(3));
        blocks
    }

    #[test]
    fn without_a_flush_any_version_since_the_last_one_may_survive() {
        let mut survivors = [0; 4];
        for seed in 0..100 {
            let mut blocks = written();
            assert_eq!(blocks.read(5), block(3), "before the cut the newest is read");
            blocks.lose_power(&mut Random::new(seed), false);
            let byte = blocks.read(5)[0];
            assert_eq!(blocks.read(5), block(byte), "whole");
            survivors[usize::from(byte)] += 1;
        }
        assert!(survivors[1..].iter().all(|count| *count > 10), "{survivors:?}");
        assert_eq!(survivors[0], 0, "what was flushed is not lost");
    }

    #[test]
    fn a_medium_that_tears_decides_for_each_part() {
        let torn = (0..100).filter(|seed| {
            let mut blocks = written();
            blocks.lose_power(&mut Random::new(*seed), true);
            let read = blocks.read(5);
            read[0] != read[PART]
        });
        assert!(torn.count() > 30);
    }

    #[test]
    fn what_was_flushed_survives_every_cut() {
        for flush in [
            |blocks: &mut Blocks| blocks.flush(),
            |blocks: &mut Blocks| {
                blocks.flush_range(4..6);
            },
        ] {
            let mut blocks = written();
            flush(&mut blocks);
            blocks.lose_power(&mut Random::new(1), true);
            assert_eq!(blocks.read(5), block(3));
        }
    }

    #[test]
    fn a_spoiled_block_cannot_be_read_until_it_is_written() {
        let mut blocks = written();
        blocks.spoil(5..7);
        assert_eq!(blocks.read_range(4..6), None);
        assert!(blocks.read_range(0..5).is_some());
        blocks.write(5, &block(9));
        assert_eq!(blocks.read_range(5..6), Some(block(9)));
        assert_eq!(blocks.read_range(5..7), None);
    }
}
