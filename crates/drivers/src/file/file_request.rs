//! State machine of one file request.
//!
//! ```text
//!   read          [PriorWritesSynced] ─ Moved, or Fetched and copied out
//!   write         Moved, or Stored from a buffer ─ [AllSynced, through the page cache]
//!   compare       Fetched, then compared
//!   verify        Fetched, chunk by chunk
//!   copy          Fetched ─ Stored, chunk by chunk ─ [AllSynced]
//!   write zeroes  Zeroed or Holed, or Stored chunk by chunk ─ [AllSynced]
//!   deallocate    Holed ─ [AllSynced]
//!   flush         AllSynced
//! ```
//!
//! States in brackets occur only with FUA.

use tenmil_base::{IoStatus, Operation, Request, RequestFlags, Segment};
use tenmil_linux::Errno;
use tenmil_linux::file_engine::FileOp;

/// A request in flight. It has exactly one job with the engine at any time.
#[derive(Debug)]
pub(super) struct FileRequest {
    pub(super) request: Request,
    /// The segments of the request. Copied, because the caller's table is only valid during submit.
    pub(super) segments: Vec<Segment>,
    /// The buffer that this request uses.
    pub(super) buffer: Option<u16>,
    /// The part of a buffer, or of the zeroes, that the current job transfers.
    pub(super) own: Segment,
    /// Blocks processed by earlier chunks.
    pub(super) done: u32,
    pub(super) awaits: AwaitedJob,
}

/// The job that a request waits for, named by its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AwaitedJob {
    /// Earlier writes are on stable storage, so that a FUA read may begin.
    PriorWritesSynced,
    /// Data has been transferred between the file and the memory of the request.
    Transferred,
    /// A chunk has been read into a buffer of the channel.
    Fetched,
    /// A chunk has been written to the file, from a buffer or from the zeroes.
    Stored,
    /// The range has become a hole.
    Holed,
    /// The range has been zeroed.
    Zeroed,
    /// All data is on stable storage.
    AllSynced,
}

impl FileRequest {
    /// A free entry with capacity for `segments_max` segments.
    pub(super) fn free_entry(segments_max: u16) -> Self {
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
                flags: RequestFlags::NONE,
            },
            segments: Vec::with_capacity(usize::from(segments_max)),
            buffer: None,
            own: Segment::default(),
            done: 0,
            awaits: AwaitedJob::AllSynced,
        }
    }

    /// Whether this is a FUA write.
    pub(super) fn is_fua_write(&self) -> bool {
        self.request.operation == Operation::Write && self.request.flags.has(RequestFlags::FUA)
    }

    /// The engine job of the current state. A FUA write of a direct file is stable when its job ends.
    pub(super) fn engine_job(&self, block_size: u64, is_direct: bool) -> FileOp<'_> {
        let Request { lba, operand, operation, .. } = self.request;
        let offset = lba * block_size;
        let len_bytes = u64::from(self.request.blocks) * block_size;
        let own = std::slice::from_ref(&self.own);
        let chunk = || self.chunk_offset_blocks(block_size);
        let write = operation == Operation::Write;
        let fua = is_direct && self.is_fua_write();
        match self.awaits {
            AwaitedJob::PriorWritesSynced | AwaitedJob::AllSynced => FileOp::Sync,
            AwaitedJob::Transferred if write => FileOp::Write { offset, from: &self.segments, fua },
            AwaitedJob::Transferred => FileOp::Read { offset, into: &self.segments },
            AwaitedJob::Fetched => {
                let from = if operation == Operation::Copy { operand } else { lba };
                FileOp::Read { offset: (from + chunk()) * block_size, into: own }
            }
            AwaitedJob::Stored => {
                FileOp::Write { offset: (lba + chunk()) * block_size, from: own, fua }
            }
            AwaitedJob::Holed => FileOp::PunchHole { offset, len_bytes },
            AwaitedJob::Zeroed => FileOp::ZeroRange { offset, len_bytes },
        }
    }

    /// Selects the next chunk of the remaining blocks: as much as fits into `whole`.
    pub(super) fn select_next_chunk(&mut self, whole: Segment, block_size: u32) {
        let blocks = (self.request.blocks - self.done).min(whole.len_bytes / block_size);
        self.own = Segment { len_bytes: blocks * block_size, ..whole };
    }

    /// Counts the current chunk as done. Returns whether blocks remain.
    pub(super) fn finish_chunk_has_more(&mut self, block_size: u32) -> bool {
        self.done += self.own.len_bytes / block_size;
        self.done < self.request.blocks
    }

    /// The first block of the current chunk, relative to the first of the request. A copy to higher
    /// blocks starts at the end, so that overlapping blocks are read before they are overwritten.
    fn chunk_offset_blocks(&self, block_size: u64) -> u64 {
        let Request { lba, operand, blocks, operation, .. } = self.request;
        if operation == Operation::Copy && operand < lba {
            let chunk = u64::from(self.own.len_bytes) / block_size;
            u64::from(blocks) - u64::from(self.done) - chunk
        } else {
            u64::from(self.done)
        }
    }

    /// The status for a kernel error of the current job.
    pub(super) fn status_of_errno(&self, errno: Errno) -> IoStatus {
        let reads = match self.awaits {
            AwaitedJob::Fetched => true,
            AwaitedJob::Transferred => self.request.operation == Operation::Read,
            _ => false,
        };
        match errno {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => IoStatus::CAPACITY_EXCEEDED,
            Errno::FAULT => IoStatus::DATA_TRANSFER_ERROR,
            Errno::NOMEM | Errno::INVAL => IoStatus::INTERNAL_ERROR,
            _ if reads => IoStatus::UNRECOVERED_READ,
            _ => IoStatus::WRITE_FAULT,
        }
    }
}

/// Whether the kernel reports that the file does not support the operation at all.
pub(super) fn is_unsupported_errno(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV)
}

#[cfg(test)]
mod tests {
    use tenmil_base::{IoStatus, Operation, RequestFlags, Segment};
    use tenmil_linux::Errno;
    use tenmil_linux::file_engine::FileOp;

    use super::{AwaitedJob, FileRequest};

    #[test]
    fn overlapping_copy_to_higher_blocks_starts_at_the_end() {
        let buffer = Segment { len_bytes: 4 * 512, ..Segment::default() };
        for (source, target, expected) in
            [(0, 3, [(6, 9), (2, 5), (0, 3)]), (3, 0, [(3, 0), (7, 4), (11, 8)])]
        {
            let mut work = FileRequest::free_entry(1);
            work.request.operation = Operation::Copy;
            (work.request.operand, work.request.lba, work.request.blocks) = (source, target, 10);
            let mut seen = Vec::new();
            loop {
                work.select_next_chunk(buffer, 512);
                let offset = |work: &FileRequest| match work.engine_job(512, true) {
                    FileOp::Read { offset, .. } | FileOp::Write { offset, .. } => offset / 512,
                    job => panic!("{job:?}"),
                };
                work.awaits = AwaitedJob::Fetched;
                let from = offset(&work);
                work.awaits = AwaitedJob::Stored;
                seen.push((from, offset(&work)));
                if !work.finish_chunk_has_more(512) {
                    break;
                }
            }
            assert_eq!(seen, expected);
            work.awaits = AwaitedJob::AllSynced;
            assert!(
                matches!(work.engine_job(512, true), FileOp::Sync),
                "a forced copy ends with that"
            );
        }
    }

    #[test]
    fn fua_write_of_a_direct_file_uses_a_stable_write() {
        let mut work = FileRequest::free_entry(1);
        work.request.operation = Operation::Write;
        for flags in [RequestFlags::NONE, RequestFlags::FUA] {
            work.request.flags = flags;
            for awaits in [AwaitedJob::Transferred, AwaitedJob::Stored] {
                work.awaits = awaits;
                for is_direct in [true, false] {
                    let FileOp::Write { fua, .. } = work.engine_job(512, is_direct) else {
                        panic!("{awaits:?}")
                    };
                    assert_eq!(fua, is_direct && flags == RequestFlags::FUA, "{awaits:?}");
                }
            }
        }
    }

    #[test]
    fn errno_is_mapped_to_an_nvme_status() {
        let mut work = FileRequest::free_entry(1);
        for (operation, awaits, errno, status) in [
            (Operation::Read, AwaitedJob::Transferred, Errno::IO, IoStatus::UNRECOVERED_READ),
            (Operation::Compare, AwaitedJob::Fetched, Errno::IO, IoStatus::UNRECOVERED_READ),
            (Operation::Write, AwaitedJob::Transferred, Errno::IO, IoStatus::WRITE_FAULT),
            (Operation::Write, AwaitedJob::Stored, Errno::NOSPC, IoStatus::CAPACITY_EXCEEDED),
            (
                Operation::Write,
                AwaitedJob::Transferred,
                Errno::FAULT,
                IoStatus::DATA_TRANSFER_ERROR,
            ),
            (Operation::Flush, AwaitedJob::AllSynced, Errno::IO, IoStatus::WRITE_FAULT),
            (Operation::Read, AwaitedJob::Transferred, Errno::INVAL, IoStatus::INTERNAL_ERROR),
        ] {
            (work.request.operation, work.awaits) = (operation, awaits);
            assert_eq!(work.status_of_errno(errno), status, "{operation:?} {errno:?}");
        }
    }
}
