//! Expected version of each block, and the operations in progress on it.
//!
//! One word per block:
//!
//! ```text
//!   31        24   23        22                 0
//!   | readers    | unknown | version            |     255 readers mean one writer
//! ```
//!
//! A block that is being written may hold either version, so no other operation uses it until the
//! write has completed: a workload that draws such a block draws again.

use tenmil_base::Operation;

/// Expected contents of a range of blocks.
#[derive(Clone, Debug)]
pub struct VersionMap {
    first: u64,
    words: Vec<u32>,
}

/// Expected contents of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedContent {
    /// Unknown: this run has not written the block, or a write to it has failed.
    Anything,
    /// This version.
    Version(u32),
}

const VERSION: u32 = (1 << 23) - 1;
const UNKNOWN: u32 = 1 << 23;
const READER: u32 = 1 << 24;
const READERS: u32 = 0xff << 24;
const READERS_MAX: u32 = 0xfe << 24;

impl VersionMap {
    /// Creates a map of `count` blocks from `first` on, none of them written.
    pub fn new(first: u64, count: usize) -> Self {
        Self { first, words: vec![UNKNOWN; count] }
    }

    /// Size in bytes of a map of `count` blocks.
    pub const fn size_bytes(count: u64) -> u64 {
        count * size_of::<u32>() as u64
    }

    /// Begins an operation on some blocks, unless it conflicts with one in progress. Reads conflict
    /// with operations that change blocks, and those conflict with all others.
    pub fn begin_operation(&mut self, operation: Operation, lba: u64, blocks: u32) -> bool {
        let words = self.entries_of(lba, blocks);
        let free = |word: &u32| match operation {
            Operation::Read => *word & READERS < READERS_MAX,
            _ => *word & READERS == 0,
        };
        if !words.iter().all(free) {
            return false;
        }
        for word in words {
            match operation {
                Operation::Read => *word += READER,
                _ => *word |= READERS,
            }
        }
        true
    }

    /// Ends an operation that [`begin_operation`](Self::begin_operation) began. A successful write sets the version.
    /// After a failed write, and after a deallocation, the contents are unknown.
    pub fn end_operation(&mut self, operation: Operation, lba: u64, blocks: u32, good: bool) {
        for word in self.entries_of(lba, blocks) {
            match operation {
                Operation::Read => *word -= READER,
                Operation::Write if good => *word = next_version(*word),
                // The version advances anyway, so that the next write is distinguishable from this
                // one.
                _ => *word = next_version(*word) | UNKNOWN,
            }
        }
    }

    /// Version that a write of this block creates.
    pub fn version_to_write(&self, lba: u64) -> u32 {
        next_version(self.words[self.entry_index(lba)])
    }

    /// Expected contents of this block.
    pub fn expected_content(&self, lba: u64) -> ExpectedContent {
        match self.words[self.entry_index(lba)] {
            word if word & UNKNOWN != 0 => ExpectedContent::Anything,
            word => ExpectedContent::Version(word & VERSION),
        }
    }

    fn entries_of(&mut self, lba: u64, blocks: u32) -> &mut [u32] {
        let first = self.entry_index(lba);
        &mut self.words[first..][..blocks as usize]
    }

    #[expect(clippy::cast_possible_truncation, reason = "the length of a vector fits")]
    fn entry_index(&self, lba: u64) -> usize {
        (lba - self.first) as usize
    }
}

/// Version after that of `word`. Zero is not a version.
const fn next_version(word: u32) -> u32 {
    let next = (word + 1) & VERSION;
    if next == 0 { 1 } else { next }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Operation::{Deallocate, Read, Write};

    use super::{ExpectedContent, UNKNOWN, VERSION, VersionMap, next_version};

    #[test]
    fn block_is_expected_to_hold_the_last_successful_write() {
        let mut ledger = VersionMap::new(100, 10);
        assert_eq!(ledger.expected_content(103), ExpectedContent::Anything);
        assert!(ledger.begin_operation(Write, 103, 2));
        assert_eq!(ledger.version_to_write(103), 1);
        ledger.end_operation(Write, 103, 2, true);
        assert_eq!(ledger.expected_content(104), ExpectedContent::Version(1));
        assert_eq!(ledger.expected_content(105), ExpectedContent::Anything);

        assert!(ledger.begin_operation(Write, 104, 1));
        ledger.end_operation(Write, 104, 1, false);
        assert_eq!(
            ledger.expected_content(104),
            ExpectedContent::Anything,
            "it may have got there"
        );
        assert_eq!(ledger.version_to_write(104), 3, "and must not be mistaken for the next");

        assert!(ledger.begin_operation(Deallocate, 103, 1));
        ledger.end_operation(Deallocate, 103, 1, true);
        assert_eq!(ledger.expected_content(103), ExpectedContent::Anything);
    }

    #[test]
    fn write_excludes_all_other_operations_on_its_blocks() {
        let mut ledger = VersionMap::new(0, 8);
        assert!(ledger.begin_operation(Write, 2, 2));
        assert!(!ledger.begin_operation(Read, 0, 3));
        assert!(!ledger.begin_operation(Write, 3, 1));
        assert!(ledger.begin_operation(Read, 0, 2), "a refusal has left nothing behind");
        ledger.end_operation(Write, 2, 2, true);
        assert!(ledger.begin_operation(Read, 0, 3));
        assert!(!ledger.begin_operation(Write, 1, 1), "two reads are at it");
        ledger.end_operation(Read, 0, 2, true);
        assert!(!ledger.begin_operation(Write, 1, 1), "one read is at it");
        ledger.end_operation(Read, 0, 3, true);
        assert!(ledger.begin_operation(Write, 1, 1));
    }

    #[test]
    fn concurrent_readers_are_counted_up_to_a_limit() {
        let mut ledger = VersionMap::new(0, 1);
        assert_eq!((0..1000).filter(|_| ledger.begin_operation(Read, 0, 1)).count(), 254);
        (0..254).for_each(|_| ledger.end_operation(Read, 0, 1, true));
        assert!(ledger.begin_operation(Write, 0, 1));
    }

    #[test]
    fn version_wraps_past_zero() {
        assert_eq!(next_version(VERSION), 1);
        assert_eq!(next_version(VERSION | UNKNOWN), 1);
        assert_eq!(next_version(0), 1);
    }
}
