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
pub enum Expected {
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
    pub fn begin(&mut self, operation: Operation, lba: u64, blocks: u32) -> bool {
        let words = self.words_of(lba, blocks);
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

    /// Ends an operation that [`begin`](Self::begin) began. A successful write sets the version.
    /// After a failed write, and after a deallocation, the contents are unknown.
    pub fn end(&mut self, operation: Operation, lba: u64, blocks: u32, good: bool) {
        for word in self.words_of(lba, blocks) {
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
        next_version(self.words[self.index_of(lba)])
    }

    /// Expected contents of this block.
    pub fn expected(&self, lba: u64) -> Expected {
        match self.words[self.index_of(lba)] {
            word if word & UNKNOWN != 0 => Expected::Anything,
            word => Expected::Version(word & VERSION),
        }
    }

    fn words_of(&mut self, lba: u64, blocks: u32) -> &mut [u32] {
        let first = self.index_of(lba);
        &mut self.words[first..][..blocks as usize]
    }

    #[expect(clippy::cast_possible_truncation, reason = "the length of a vector fits")]
    fn index_of(&self, lba: u64) -> usize {
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

    use super::{Expected, UNKNOWN, VERSION, VersionMap, next_version};

    #[test]
    fn a_block_is_expected_to_hold_what_was_last_written_well() {
        let mut ledger = VersionMap::new(100, 10);
        assert_eq!(ledger.expected(103), Expected::Anything);
        assert!(ledger.begin(Write, 103, 2));
        assert_eq!(ledger.version_to_write(103), 1);
        ledger.end(Write, 103, 2, true);
        assert_eq!(ledger.expected(104), Expected::Version(1));
        assert_eq!(ledger.expected(105), Expected::Anything);

        assert!(ledger.begin(Write, 104, 1));
        ledger.end(Write, 104, 1, false);
        assert_eq!(ledger.expected(104), Expected::Anything, "it may have got there");
        assert_eq!(ledger.version_to_write(104), 3, "and must not be mistaken for the next");

        assert!(ledger.begin(Deallocate, 103, 1));
        ledger.end(Deallocate, 103, 1, true);
        assert_eq!(ledger.expected(103), Expected::Anything);
    }

    #[test]
    fn whoever_changes_a_block_is_alone_with_it() {
        let mut ledger = VersionMap::new(0, 8);
        assert!(ledger.begin(Write, 2, 2));
        assert!(!ledger.begin(Read, 0, 3));
        assert!(!ledger.begin(Write, 3, 1));
        assert!(ledger.begin(Read, 0, 2), "a refusal has left nothing behind");
        ledger.end(Write, 2, 2, true);
        assert!(ledger.begin(Read, 0, 3));
        assert!(!ledger.begin(Write, 1, 1), "two reads are at it");
        ledger.end(Read, 0, 2, true);
        assert!(!ledger.begin(Write, 1, 1), "one read is at it");
        ledger.end(Read, 0, 3, true);
        assert!(ledger.begin(Write, 1, 1));
    }

    #[test]
    fn readers_are_counted_up_to_a_limit() {
        let mut ledger = VersionMap::new(0, 1);
        assert_eq!((0..1000).filter(|_| ledger.begin(Read, 0, 1)).count(), 254);
        (0..254).for_each(|_| ledger.end(Read, 0, 1, true));
        assert!(ledger.begin(Write, 0, 1));
    }

    #[test]
    fn versions_wrap_past_none() {
        assert_eq!(next_version(VERSION), 1);
        assert_eq!(next_version(VERSION | UNKNOWN), 1);
        assert_eq!(next_version(0), 1);
    }
}
