//! Block contents, persistent and cached.

use core::ops::Range;
use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Random;

use crate::block_stamp::PART;

/// Blocks of a medium with all versions since the last flush.
#[derive(Debug)]
pub(super) struct VersionedBlocks {
    block_size: usize,
    /// Persistent contents. Missing blocks are zero.
    stable: BTreeMap<u64, Vec<u8>>,
    /// Versions written since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<Vec<u8>>>,
    unreadable: BTreeSet<u64>,
}

impl VersionedBlocks {
    pub(super) fn new(block_size: u32) -> Self {
        let (stable, cached, unreadable) = Default::default();
        Self { block_size: block_size as usize, stable, cached, unreadable }
    }

    /// Current contents of one block.
    pub(super) fn read_block(&self, lba: u64) -> Vec<u8> {
        let newest = self.cached.get(&lba).and_then(|versions| versions.last());
        newest.or_else(|| self.stable.get(&lba)).cloned().unwrap_or(vec![0; self.block_size])
    }

    /// Current contents of several blocks. `None` if one of them is unreadable.
    pub(super) fn read_range(&self, range: Range<u64>) -> Option<Vec<u8>> {
        if self.unreadable.range(range.clone()).next().is_some() {
            return None;
        }
        Some(range.flat_map(|lba| self.read_block(lba)).collect())
    }

    /// Writes blocks to the cache.
    pub(super) fn write_blocks(&mut self, first: u64, bytes: &[u8]) {
        for (lba, block) in (first..).zip(bytes.chunks_exact(self.block_size)) {
            self.unreadable.remove(&lba);
            self.cached.entry(lba).or_default().push(block.to_vec());
        }
    }

    /// Makes blocks unreadable until they are written.
    pub(super) fn make_unreadable(&mut self, range: Range<u64>) {
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

    use super::VersionedBlocks;
    use crate::block_stamp::PART;

    fn test_block(byte: u8) -> Vec<u8> {
        vec![byte; 2 * PART]
    }

    fn written_blocks() -> VersionedBlocks {
        let mut blocks = VersionedBlocks::new(2 * 512);
        blocks.write_blocks(5, &test_block(1));
        blocks.flush();
        blocks.write_blocks(5, &test_block(2));
        blocks.write_blocks(5, &test_block(3));
        blocks
    }

    #[test]
    fn any_version_since_the_last_flush_may_survive() {
        let mut survivors = [0; 4];
        for seed in 0..100 {
            let mut blocks = written_blocks();
            assert_eq!(blocks.read_block(5), test_block(3), "before the cut the newest is read");
            blocks.lose_power(&mut Random::new(seed), false);
            let byte = blocks.read_block(5)[0];
            assert_eq!(blocks.read_block(5), test_block(byte), "whole");
            survivors[usize::from(byte)] += 1;
        }
        assert!(survivors[1..].iter().all(|count| *count > 10), "{survivors:?}");
        assert_eq!(survivors[0], 0, "what was flushed is not lost");
    }

    #[test]
    fn torn_write_decides_per_part() {
        let torn = (0..100).filter(|seed| {
            let mut blocks = written_blocks();
            blocks.lose_power(&mut Random::new(*seed), true);
            let read = blocks.read_block(5);
            read[0] != read[PART]
        });
        assert!(torn.count() > 30);
    }

    #[test]
    fn flushed_data_survives_every_power_cut() {
        for flush in [
            |blocks: &mut VersionedBlocks| blocks.flush(),
            |blocks: &mut VersionedBlocks| {
                blocks.flush_range(4..6);
            },
        ] {
            let mut blocks = written_blocks();
            flush(&mut blocks);
            blocks.lose_power(&mut Random::new(1), true);
            assert_eq!(blocks.read_block(5), test_block(3));
        }
    }

    #[test]
    fn unreadable_block_is_readable_after_a_write() {
        let mut blocks = written_blocks();
        blocks.make_unreadable(5..7);
        assert_eq!(blocks.read_range(4..6), None);
        assert!(blocks.read_range(0..5).is_some());
        blocks.write_blocks(5, &test_block(9));
        assert_eq!(blocks.read_range(5..6), Some(test_block(9)));
        assert_eq!(blocks.read_range(5..7), None);
    }
}
