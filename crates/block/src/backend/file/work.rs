//! One request on its way through a file: what it waits for, and what comes after that.
//!
//! ```text
//!   read          [Synced] ─ Moved, or Fetched and handed on
//!   write         Moved, or Stored from a buffer
//!   compare       Fetched, then compared
//!   verify        Fetched, chunk by chunk
//!   copy          Fetched ─ Stored, chunk by chunk ─ [Settled]
//!   write zeroes  Zeroed or Holed, or Stored chunk by chunk ─ [Settled]
//!   deallocate    Holed ─ [Settled]
//!   flush         Settled
//! ```
//!
//! In brackets: only if forced unit access is asked for.

use base::{Flags, Operation, Outcome, Request, Segment};
use host::Errno;
use host::engine::Job;

/// One request under way. At any time it has exactly one job with the engine.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) request: Request,
    /// The memory of the request; the table it was named in is gone.
    pub(super) segments: Vec<Segment>,
    /// The buffer this work has borrowed.
    pub(super) buffer: Option<u16>,
    /// The part of a buffer, or of the zeroes, that the current job moves.
    pub(super) own: Segment,
    /// Blocks that earlier chunks have dealt with.
    pub(super) done: u32,
    pub(super) awaits: Awaits,
}

/// What a work waits for, in the past tense of when it has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaits {
    /// What was written before is on stable storage, so that a forced read may begin.
    Synced,
    /// Data has moved between the file and the memory of the request.
    Moved,
    /// A chunk is in a buffer of the channel.
    Fetched,
    /// A chunk has gone to the file, from a buffer or from the zeroes.
    Stored,
    /// The range has become a hole.
    Holed,
    /// The range has been zeroed.
    Zeroed,
    /// All of it is on stable storage.
    Settled,
}

impl Work {
    /// A place for a work with room for `segments_max` segments.
    pub(super) fn idle(segments_max: u16) -> Self {
        Self {
            request: Request {
                token: 0,
                lba: 0,
                operand: 0,
                blocks: 0,
                segment_first: 0,
                segment_count: 0,
                metadata_count: 0,
                operation: Operation::Flush,
                flags: Flags::NONE,
            },
            segments: Vec::with_capacity(usize::from(segments_max)),
            buffer: None,
            own: Segment::default(),
            done: 0,
            awaits: Awaits::Settled,
        }
    }

    /// What to ask the engine for, in the current state.
    pub(super) fn job(&self, block_size: u64) -> Job<'_> {
        let Request { lba, operand, operation, flags, .. } = self.request;
        let offset = lba * block_size;
        let len_bytes = u64::from(self.request.blocks) * block_size;
        let own = std::slice::from_ref(&self.own);
        let chunk = || self.chunk_first(block_size);
        let write = operation == Operation::Write;
        match self.awaits {
            Awaits::Synced | Awaits::Settled => Job::Sync,
            Awaits::Moved if write => {
                Job::Write { offset, from: &self.segments, stable: flags.has(Flags::FUA) }
            }
            Awaits::Moved => Job::Read { offset, into: &self.segments },
            Awaits::Fetched => {
                let from = if operation == Operation::Copy { operand } else { lba };
                Job::Read { offset: (from + chunk()) * block_size, into: own }
            }
            Awaits::Stored => {
                let stable = write && flags.has(Flags::FUA);
                Job::Write { offset: (lba + chunk()) * block_size, from: own, stable }
            }
            Awaits::Holed => Job::PunchHole { offset, len_bytes },
            Awaits::Zeroed => Job::ZeroRange { offset, len_bytes },
        }
    }

    /// Chooses the next chunk of what is left: as much of `whole` as it takes.
    pub(super) fn next_chunk(&mut self, whole: Segment, block_size: u32) {
        let blocks = (self.request.blocks - self.done).min(whole.len_bytes / block_size);
        self.own = Segment { len_bytes: blocks * block_size, ..whole };
    }

    /// Counts the current chunk as dealt with. Returns whether anything is left.
    pub(super) fn finish_chunk(&mut self, block_size: u32) -> bool {
        self.done += self.own.len_bytes / block_size;
        self.done < self.request.blocks
    }

    /// The first block of the current chunk, counted from the first of the request. A copy to higher
    /// blocks begins at the end, so that an overlap is read before it is overwritten.
    fn chunk_first(&self, block_size: u64) -> u64 {
        let Request { lba, operand, blocks, operation, .. } = self.request;
        if operation == Operation::Copy && operand < lba {
            let chunk = u64::from(self.own.len_bytes) / block_size;
            u64::from(blocks) - u64::from(self.done) - chunk
        } else {
            u64::from(self.done)
        }
    }

    /// How to answer when the kernel has refused the current job.
    pub(super) fn outcome(&self, errno: Errno) -> Outcome {
        let reads = match self.awaits {
            Awaits::Fetched => true,
            Awaits::Moved => self.request.operation == Operation::Read,
            _ => false,
        };
        match errno {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Outcome::CAPACITY_EXCEEDED,
            Errno::FAULT => Outcome::DATA_TRANSFER_ERROR,
            Errno::NOMEM | Errno::INVAL => Outcome::INTERNAL_ERROR,
            _ if reads => Outcome::UNRECOVERED_READ,
            _ => Outcome::WRITE_FAULT,
        }
    }
}

/// Whether the kernel says that this file cannot do such a thing at all.
pub(super) fn is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV)
}

#[cfg(test)]
mod tests {
    use base::{Flags, Operation, Outcome, Segment};
    use host::Errno;
    use host::engine::Job;

    use super::{Awaits, Work};

    #[test]
    fn a_copy_upwards_goes_from_the_end_and_one_downwards_from_the_start() {
        let buffer = Segment { len_bytes: 4 * 512, ..Segment::default() };
        for (source, target, expected) in
            [(0, 3, [(6, 9), (2, 5), (0, 3)]), (3, 0, [(3, 0), (7, 4), (11, 8)])]
        {
            let mut work = Work::idle(1);
            work.request.operation = Operation::Copy;
            (work.request.operand, work.request.lba, work.request.blocks) = (source, target, 10);
            let mut seen = Vec::new();
            loop {
                work.next_chunk(buffer, 512);
                let offset = |work: &Work| match work.job(512) {
                    Job::Read { offset, .. } | Job::Write { offset, .. } => offset / 512,
                    job => panic!("{job:?}"),
                };
                work.awaits = Awaits::Fetched;
                let from = offset(&work);
                work.awaits = Awaits::Stored;
                seen.push((from, offset(&work)));
                if !work.finish_chunk(512) {
                    break;
                }
            }
            assert_eq!(seen, expected);
            work.awaits = Awaits::Settled;
            assert!(matches!(work.job(512), Job::Sync), "a forced copy ends with that");
        }
    }

    #[test]
    fn a_forced_write_is_a_stable_one_whichever_way_it_goes() {
        let mut work = Work::idle(1);
        work.request.operation = Operation::Write;
        for flags in [Flags::NONE, Flags::FUA] {
            work.request.flags = flags;
            for awaits in [Awaits::Moved, Awaits::Stored] {
                work.awaits = awaits;
                let Job::Write { stable, .. } = work.job(512) else { panic!("{awaits:?}") };
                assert_eq!(stable, flags == Flags::FUA, "{awaits:?}");
            }
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_answered_in_the_words_of_nvme() {
        let mut work = Work::idle(1);
        for (operation, awaits, errno, outcome) in [
            (Operation::Read, Awaits::Moved, Errno::IO, Outcome::UNRECOVERED_READ),
            (Operation::Compare, Awaits::Fetched, Errno::IO, Outcome::UNRECOVERED_READ),
            (Operation::Write, Awaits::Moved, Errno::IO, Outcome::WRITE_FAULT),
            (Operation::Write, Awaits::Stored, Errno::NOSPC, Outcome::CAPACITY_EXCEEDED),
            (Operation::Write, Awaits::Moved, Errno::FAULT, Outcome::DATA_TRANSFER_ERROR),
            (Operation::Flush, Awaits::Settled, Errno::IO, Outcome::WRITE_FAULT),
            (Operation::Read, Awaits::Moved, Errno::INVAL, Outcome::INTERNAL_ERROR),
        ] {
            (work.request.operation, work.awaits) = (operation, awaits);
            assert_eq!(work.outcome(errno), outcome, "{operation:?} {errno:?}");
        }
    }
}
