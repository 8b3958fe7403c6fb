//! Full scan: one operation over a range of blocks of a block device, in bounded steps; used by formats
//! and self-tests.

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Operation, Request, RequestFlags,
};
use tenmil_wire::Status;

/// Scan in progress.
pub(super) struct RangeOperation {
    backend: Box<dyn IoChannel>,
    operation: Operation,
    /// Next block to submit.
    next: u64,
    /// Block after the last.
    end: u64,
    /// Blocks per request.
    request_blocks: u32,
    /// Whether a flush is still to follow.
    flushes: bool,
    outstanding: u32,
    failed: Option<RangeOperationFailure>,
    completions: CompletionBatch,
}

/// Status and location of a failed scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeOperationFailure {
    /// Status of the failed request.
    pub(super) status: IoStatus,
    /// First block of the failed request.
    pub(super) lba: u64,
}

/// Maximum requests in flight.
const DEPTH: u32 = 16;

impl RangeOperation {
    /// Starts a scan of `first..end`, in blocks of the block device. A scan that writes ends with a flush
    /// if the block device supports it; a scan with [`Operation::Flush`] is a single flush.
    pub(super) fn start(
        device: &dyn BlockDevice,
        operation: Operation,
        first: u64,
        end: u64,
    ) -> Result<Self, Status> {
        let backend = device.channel().map_err(|_| Status::INTERNAL_ERROR)?;
        let limits = backend.limits();
        let flushes = matches!(operation, Operation::WriteZeroes | Operation::Flush)
            && limits.operations.has(Operation::Flush);
        Ok(Self {
            operation,
            next: first,
            end: end.min(limits.block_count),
            request_blocks: limits.request_blocks_max.max(1),
            flushes,
            outstanding: 0,
            failed: None,
            completions: CompletionBatch::with_capacity(DEPTH as usize),
            backend,
        })
    }

    /// Performs a bounded amount of work. Returns the result once all requests have completed.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Result<(), RangeOperationFailure>> {
        self.submit(now);
        self.backend.flush_submissions();
        self.backend.poll(now, &mut self.completions);
        for completion in self.completions.drain() {
            self.outstanding -= 1;
            if !completion.status.is_success() && self.failed.is_none() {
                self.failed = Some(RangeOperationFailure {
                    status: completion.status,
                    lba: completion.token,
                });
            }
        }
        if self.outstanding > 0 || (self.failed.is_none() && self.has_work_left()) {
            return None;
        }
        Some(self.failed.map_or(Ok(()), Err))
    }

    /// Blocks not yet submitted.
    pub(super) const fn unsubmitted_blocks(&self) -> u64 {
        self.end.saturating_sub(self.next)
    }

    /// Time of the next poll.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match self.backend.wake_at() {
            Instant::NEVER => now,
            at => at,
        }
    }

    fn has_work_left(&self) -> bool {
        self.next < self.end || self.flushes
    }

    fn submit(&mut self, now: Instant) {
        while self.failed.is_none() && self.outstanding < DEPTH {
            let left = self.unsubmitted_blocks();
            let is_flush = left == 0;
            if is_flush && (!self.flushes || self.outstanding > 0) {
                return;
            }
            let blocks = u32::try_from(left).unwrap_or(u32::MAX).min(self.request_blocks);
            let request = Request {
                token: self.next,
                lba: if is_flush { 0 } else { self.next },
                operand: 0,
                blocks,
                segment_first: 0,
                segment_count: 0,
                metadata_count: 0,
                operation: if is_flush { Operation::Flush } else { self.operation },
                flags: if self.operation == Operation::WriteZeroes && !is_flush {
                    RequestFlags::DEALLOCATE
                } else {
                    RequestFlags::NONE
                },
            };
            if self.backend.submit(now, &[request], &[]) == 0 {
                return;
            }
            self.outstanding += 1;
            self.flushes &= !is_flush;
            self.next += u64::from(blocks);
        }
    }
}
