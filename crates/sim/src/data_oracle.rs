//! Model of the valid contents of every block, derived from requests and completions.
//!
//! Each block has a list of versions, oldest first:
//!
//! ```text
//!   floor             newest completed or read
//!   |                 |
//!   v1      v2        v3        v4
//!   '---- after a power cut ----'
//!                     '- now ---'           v4: its write is pending, or has failed
//! ```
//!
//! A read may return any version from the newest one that was completed or read before it. After a
//! power cut it may return any version from the floor on. The floor is the newest version that a
//! later flush, FUA, or a medium without a volatile cache has made persistent.

use core::fmt;
use core::ops::Range;
use std::collections::{BTreeMap, BTreeSet};

use crate::block_stamp::{BlockContent, BlockStamp};

/// Expected contents of all blocks.
#[derive(Debug)]
pub struct DataOracle {
    seed: u64,
    block_size: usize,
    /// Number of completions so far, which orders writes and flushes.
    sequence: u64,
    /// Completed writes may be lost until a flush.
    is_volatile: bool,
    blocks: BTreeMap<u64, BlockHistory>,
    writes: BTreeMap<u64, SubmittedWrite>,
    /// Flushes in flight, with the sequence number at their submission.
    flushes: BTreeMap<u64, u64>,
    /// Reads in flight, with the oldest version that each block may return.
    reads: BTreeMap<u64, SubmittedRead>,
    distrusted: BTreeSet<u64>,
}

/// Wrong contents of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataMismatch {
    /// An older version than one that was completed or read before.
    Stale {
        /// Block.
        lba: u64,
        /// Version found. Zero if the block was empty.
        found: u64,
        /// Oldest valid version.
        oldest: u64,
    },
    /// Contents of another block.
    Misplaced {
        /// Block.
        lba: u64,
        /// Stamp found.
        found: BlockStamp,
    },
    /// Contents of more than one write.
    Torn {
        /// Block.
        lba: u64,
    },
    /// Bytes that are not a stamp.
    Garbage {
        /// Block.
        lba: u64,
        /// First invalid part.
        part: usize,
    },
    /// A version that was never written, or one of another run.
    UnknownVersion {
        /// Block.
        lba: u64,
        /// Stamp found.
        found: BlockStamp,
    },
}

#[derive(Debug)]
struct SubmittedWrite {
    blocks: Range<u64>,
    is_durable: bool,
}

#[derive(Debug)]
struct SubmittedRead {
    first: u64,
    /// Oldest valid version of each block.
    oldest: Vec<u64>,
}

/// Effect of a write on its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteEffect {
    /// A stamp in each block.
    Stamps,
    /// Zeroes.
    Zeroes,
    /// Zeroes or the previous contents.
    Anything,
}

#[derive(Debug)]
struct BlockHistory {
    /// All versions, oldest first. A read that was submitted long ago may return any of them.
    versions: Vec<BlockVersion>,
    /// Oldest version that may remain after a power cut.
    floor: u64,
}

#[derive(Clone, Copy, Debug)]
struct BlockVersion {
    number: u64,
    token: u64,
    leaves: WriteEffect,
    /// Sequence number of the successful completion of its write.
    completed: Option<u64>,
    /// It was read, so later reads must not return an older version.
    is_seen: bool,
}

impl DataOracle {
    /// Creates the model of an empty medium.
    pub fn new(seed: u64, block_size: usize, is_volatile: bool) -> Self {
        Self {
            seed,
            block_size,
            sequence: 0,
            is_volatile,
            blocks: BTreeMap::new(),
            writes: BTreeMap::new(),
            flushes: BTreeMap::new(),
            reads: BTreeMap::new(),
            distrusted: BTreeSet::new(),
        }
    }

    /// Whether a write in flight overlaps `blocks`. The workload never has two writes to the same
    /// block in flight, so that the order of versions is known.
    pub fn is_being_written(&self, blocks: &Range<u64>) -> bool {
        self.writes
            .values()
            .any(|write| write.blocks.start < blocks.end && blocks.start < write.blocks.end)
    }

    /// Records a submitted write. If it writes stamps, [`fill_with_stamps`](Self::fill_with_stamps) fills its buffer.
    pub fn record_write_submitted(
        &mut self,
        token: u64,
        blocks: Range<u64>,
        leaves: WriteEffect,
        force_unit_access: bool,
    ) {
        for lba in blocks.clone() {
            let versions = &mut self.blocks.entry(lba).or_default().versions;
            let number = versions.last().map_or(0, |last| last.number) + 1;
            versions.push(BlockVersion { number, token, leaves, completed: None, is_seen: false });
        }
        let is_durable = force_unit_access || !self.is_volatile;
        self.writes.insert(token, SubmittedWrite { blocks, is_durable });
    }

    /// Fills `bytes` with the stamps of the write `token`.
    pub fn fill_with_stamps(&self, token: u64, bytes: &mut [u8]) {
        let Some(write) = self.writes.get(&token) else { return };
        for (lba, block) in write.blocks.clone().zip(bytes.chunks_exact_mut(self.block_size)) {
            let newest = self.blocks.get(&lba).and_then(|history| history.versions.last());
            let version = newest.map_or(0, |newest| newest.number);
            BlockStamp { seed: self.seed, lba, token, version }.write_block(block);
        }
    }

    /// Records a completed write.
    pub fn record_write_ended(&mut self, token: u64, is_success: bool) {
        let Some(write) = self.writes.remove(&token) else { return };
        if !is_success {
            return;
        }
        self.sequence += 1;
        for lba in write.blocks {
            let Some(history) = self.blocks.get_mut(&lba) else { continue };
            for version in history.versions.iter_mut().filter(|version| version.token == token) {
                version.completed = Some(self.sequence);
                // A write whose effect is undefined does not make earlier versions invalid.
                version.is_seen = version.leaves != WriteEffect::Anything;
            }
            if write.is_durable {
                history.raise_persistent_version(self.sequence);
            }
        }
    }

    /// Records a submitted flush.
    pub fn record_flush_submitted(&mut self, token: u64) {
        self.flushes.insert(token, self.sequence);
    }

    /// Records a completed flush.
    pub fn record_flush_ended(&mut self, token: u64, is_success: bool) {
        let Some(sequence) = self.flushes.remove(&token) else { return };
        if is_success {
            self.blocks.values_mut().for_each(|history| history.raise_persistent_version(sequence));
        }
    }

    /// Records a submitted read.
    pub fn record_read_submitted(&mut self, token: u64, blocks: Range<u64>) {
        let oldest = |lba| self.blocks.get(&lba).map_or(0, BlockHistory::oldest_allowed);
        let read = SubmittedRead { first: blocks.start, oldest: blocks.map(oldest).collect() };
        self.reads.insert(token, read);
    }

    /// Verifies the data of a completed read. `None` if it failed.
    pub fn verify_read_data(
        &mut self,
        token: u64,
        bytes: Option<&[u8]>,
    ) -> Result<(), DataMismatch> {
        let Some(read) = self.reads.remove(&token) else { return Ok(()) };
        let Some(bytes) = bytes else { return Ok(()) };
        let blocks = bytes.chunks_exact(self.block_size);
        for ((lba, oldest), block) in (read.first..).zip(read.oldest).zip(blocks) {
            self.check_observed(lba, oldest, block)?;
        }
        Ok(())
    }

    /// Records a power cut: requests in flight never complete, and completed writes that were not
    /// flushed may be lost.
    pub fn record_power_cut(&mut self) {
        self.writes.clear();
        self.flushes.clear();
        self.reads.clear();
        for history in self.blocks.values_mut() {
            let floor = history.floor;
            for version in &mut history.versions {
                let is_floor = version.number <= floor;
                version.completed = version.completed.filter(|_| is_floor);
                version.is_seen &= is_floor;
            }
        }
    }

    /// Removes a write or read that was not accepted.
    pub fn withdraw_write(&mut self, token: u64, is_read: bool) {
        if is_read {
            self.reads.remove(&token);
        }
        self.flushes.remove(&token);
        let Some(write) = self.writes.remove(&token) else { return };
        for lba in write.blocks {
            if let Some(history) = self.blocks.get_mut(&lba) {
                history.versions.retain(|version| version.token != token || version.number == 0);
            }
        }
    }

    /// Removes a request whose completion will never be delivered. Its write may or may not take
    /// effect.
    pub fn withdraw_uncertain(&mut self, token: u64) {
        self.writes.remove(&token);
        self.flushes.remove(&token);
        self.reads.remove(&token);
    }

    /// Stops checking these blocks, because a fault has falsified the completion of `token`.
    pub fn stop_checking(&mut self, token: u64, blocks: Range<u64>) {
        self.writes.remove(&token);
        self.reads.remove(&token);
        self.flushes.remove(&token);
        for lba in blocks {
            self.blocks.remove(&lba);
            self.distrusted.insert(lba);
        }
    }

    /// Blocks that were ever written and are still checked.
    pub fn blocks_written(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.keys().copied().filter(|lba| !self.distrusted.contains(lba))
    }

    fn check_observed(&mut self, lba: u64, oldest: u64, block: &[u8]) -> Result<(), DataMismatch> {
        if self.distrusted.contains(&lba) {
            return Ok(());
        }
        let content = BlockStamp::decode_block(block);
        let found = match content {
            BlockContent::Garbage { part } => return Err(DataMismatch::Garbage { lba, part }),
            BlockContent::Torn { .. } => return Err(DataMismatch::Torn { lba }),
            BlockContent::Stamped(found) if found.lba != lba => {
                return Err(DataMismatch::Misplaced { lba, found });
            }
            BlockContent::Stamped(found) if found.seed != self.seed => {
                return Err(DataMismatch::UnknownVersion { lba, found });
            }
            BlockContent::Stamped(found) => Some(found),
            BlockContent::Zeroes => None,
        };
        let history = self.blocks.entry(lba).or_default();
        history.accept_observed(lba, oldest, found)
    }
}

impl Default for BlockHistory {
    /// A block that was never written: version 0, zeroes.
    fn default() -> Self {
        let empty = BlockVersion {
            number: 0,
            token: 0,
            leaves: WriteEffect::Zeroes,
            completed: Some(0),
            is_seen: true,
        };
        Self { versions: vec![empty], floor: 0 }
    }
}

impl BlockHistory {
    /// Oldest version that a read may return now.
    fn oldest_allowed(&self) -> u64 {
        let seen = self.versions.iter().rev().find(|version| version.is_seen);
        seen.map_or(self.floor, |version| version.number.max(self.floor))
    }

    /// Makes the newest version that was completed by `sequence` persistent.
    fn raise_persistent_version(&mut self, sequence: u64) {
        let is_stable = |version: &BlockVersion| {
            version.leaves != WriteEffect::Anything
                && version.completed.is_some_and(|completed| completed <= sequence)
        };
        if let Some(stable) = self.versions.iter().rev().find(|version| is_stable(version)) {
            self.floor = self.floor.max(stable.number);
        }
    }

    /// Accepts a version that was read, or returns the mismatch. `found` is `None` for zeroes.
    fn accept_observed(
        &mut self,
        lba: u64,
        oldest: u64,
        found: Option<BlockStamp>,
    ) -> Result<(), DataMismatch> {
        let matches = |version: &BlockVersion| match found {
            None => version.leaves != WriteEffect::Stamps,
            Some(stamp) => {
                version.leaves == WriteEffect::Stamps
                    && (version.number, version.token) == (stamp.version, stamp.token)
            }
        };
        match self.versions.iter_mut().rev().find(|version| matches(version)) {
            Some(version) if version.number >= oldest => {
                version.is_seen = true;
                Ok(())
            }
            Some(version) => Err(DataMismatch::Stale { lba, found: version.number, oldest }),
            None => match found {
                Some(stamp) if stamp.version >= oldest => {
                    Err(DataMismatch::UnknownVersion { lba, found: stamp })
                }
                Some(stamp) => Err(DataMismatch::Stale { lba, found: stamp.version, oldest }),
                None => Err(DataMismatch::Stale { lba, found: 0, oldest }),
            },
        }
    }
}

impl fmt::Display for DataMismatch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale { lba, found, oldest } => {
                write!(out, "block {lba} is stale: version {found}, expected at least {oldest}")
            }
            Self::Misplaced { lba, found } => {
                write!(out, "block {lba} holds block {}: {found:?}", found.lba)
            }
            Self::Torn { lba } => write!(out, "block {lba} is torn"),
            Self::Garbage { lba, part } => {
                write!(out, "block {lba} is garbage from part {part} on")
            }
            Self::UnknownVersion { lba, found } => {
                write!(out, "block {lba} holds what was never written: {found:?}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DataMismatch, DataOracle, WriteEffect};
    use crate::block_stamp::{BlockStamp, PART};

    const SEED: u64 = 9;

    fn test_oracle(is_volatile: bool) -> DataOracle {
        DataOracle::new(SEED, PART, is_volatile)
    }

    /// Writes block 7 and returns its contents.
    fn complete_write(oracle: &mut DataOracle, token: u64, completion: Option<bool>) -> Vec<u8> {
        oracle.record_write_submitted(token, 7..8, WriteEffect::Stamps, false);
        let mut bytes = vec![0; PART];
        oracle.fill_with_stamps(token, &mut bytes);
        if let Some(is_success) = completion {
            oracle.record_write_ended(token, is_success);
        }
        bytes
    }

    fn check_read(oracle: &mut DataOracle, bytes: &[u8]) -> Result<(), DataMismatch> {
        oracle.record_read_submitted(0, 7..8);
        oracle.verify_read_data(0, Some(bytes))
    }

    #[test]
    fn read_returns_the_last_completed_write_and_nothing_older() {
        let mut oracle = test_oracle(true);
        assert_eq!(check_read(&mut oracle, &[0; PART]), Ok(()));
        let first = complete_write(&mut oracle, 1, Some(true));
        let second = complete_write(&mut oracle, 2, Some(true));
        let stale = |found| Err(DataMismatch::Stale { lba: 7, found, oldest: 2 });
        assert_eq!(check_read(&mut oracle, &[0; PART]), stale(0));
        assert_eq!(check_read(&mut oracle, &first), stale(1));
        assert_eq!(check_read(&mut oracle, &second), Ok(()));
    }

    #[test]
    fn failed_or_outstanding_write_may_be_visible_until_observed() {
        for completion in [None, Some(false)] {
            let mut oracle = test_oracle(true);
            let first = complete_write(&mut oracle, 1, Some(true));
            let second = complete_write(&mut oracle, 2, completion);
            assert_eq!(check_read(&mut oracle, &first), Ok(()));
            assert_eq!(check_read(&mut oracle, &second), Ok(()));
            assert!(check_read(&mut oracle, &first).is_err(), "no way back");
        }
    }

    #[test]
    fn read_that_began_before_a_completion_may_return_older_data() {
        let mut oracle = test_oracle(true);
        let first = complete_write(&mut oracle, 1, Some(true));
        oracle.record_read_submitted(5, 7..8);
        complete_write(&mut oracle, 2, Some(true));
        assert_eq!(oracle.verify_read_data(5, Some(&first)), Ok(()));
        assert!(check_read(&mut oracle, &first).is_err());
    }

    #[test]
    fn power_cut_may_undo_only_unflushed_writes() {
        let mut oracle = test_oracle(true);
        let lost = complete_write(&mut oracle, 1, Some(true));
        let floor = complete_write(&mut oracle, 2, Some(true));
        oracle.record_flush_submitted(3);
        let later = complete_write(&mut oracle, 4, Some(true));
        oracle.record_flush_ended(3, true);
        oracle.record_power_cut();
        assert!(check_read(&mut oracle, &lost).is_err());
        assert_eq!(check_read(&mut oracle, &floor), Ok(()));
        assert_eq!(check_read(&mut oracle, &later), Ok(()));
    }

    #[test]
    fn without_volatile_cache_completed_writes_are_persistent() {
        let mut oracle = test_oracle(false);
        let lost = complete_write(&mut oracle, 1, Some(true));
        let kept = complete_write(&mut oracle, 2, Some(true));
        oracle.record_power_cut();
        assert!(check_read(&mut oracle, &lost).is_err());
        assert_eq!(check_read(&mut oracle, &kept), Ok(()));
    }

    #[test]
    fn torn_misplaced_foreign_and_garbage_blocks_are_distinguished() {
        let mut oracle = DataOracle::new(SEED, 2 * PART, true);
        oracle.record_write_submitted(1, 7..8, WriteEffect::Stamps, false);
        let mut whole = vec![0; 2 * PART];
        oracle.fill_with_stamps(1, &mut whole);
        oracle.record_write_ended(1, true);
        let mut torn = whole.clone();
        torn[PART..].fill(0);
        assert_eq!(check_read(&mut oracle, &torn), Err(DataMismatch::Torn { lba: 7 }));
        let mut garbage = whole.clone();
        garbage[700] ^= 1;
        assert_eq!(
            check_read(&mut oracle, &garbage),
            Err(DataMismatch::Garbage { lba: 7, part: 1 })
        );
        for (stamp, is_misplaced) in [
            (BlockStamp { seed: SEED, lba: 8, token: 1, version: 1 }, true),
            (BlockStamp { seed: SEED, lba: 7, token: 3, version: 1 }, false),
            (BlockStamp { seed: SEED + 1, lba: 7, token: 1, version: 1 }, false),
        ] {
            stamp.write_block(&mut whole);
            let expected = if is_misplaced {
                DataMismatch::Misplaced { lba: 7, found: stamp }
            } else {
                DataMismatch::UnknownVersion { lba: 7, found: stamp }
            };
            assert_eq!(check_read(&mut oracle, &whole), Err(expected));
        }
    }

    #[test]
    fn deallocated_blocks_read_as_before_or_as_zeroes() {
        let mut oracle = test_oracle(true);
        let first = complete_write(&mut oracle, 1, Some(true));
        oracle.record_write_submitted(2, 7..8, WriteEffect::Anything, false);
        oracle.record_write_ended(2, true);
        assert_eq!(check_read(&mut oracle, &first), Ok(()));
        assert_eq!(check_read(&mut oracle, &[0; PART]), Ok(()));
        assert!(check_read(&mut oracle, &first).is_err(), "once it is gone it is gone");
    }
}
