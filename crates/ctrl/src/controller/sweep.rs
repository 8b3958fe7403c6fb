//! One operation over all the blocks of a medium, a bounded piece per turn: what formats and
//! self-tests are made of.

use base::{Answers, Backend, Flags, Instant, Medium, Operation, Outcome, Request};
use wire::Status;

/// A sweep under way.
pub(super) struct Sweep {
    backend: Box<dyn Backend>,
    operation: Operation,
    /// The next block to ask for.
    next: u64,
    /// The block after the last.
    end: u64,
    /// Blocks per request.
    chunk: u32,
    /// Whether a flush ends it.
    flushes: bool,
    outstanding: u32,
    failed: Option<Failure>,
    answers: Answers,
}

/// Why a sweep failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// How the request ended.
    pub(super) outcome: Outcome,
    /// The first block of the request.
    pub(super) lba: u64,
}

/// Requests outstanding at once.
const DEPTH: u32 = 16;

impl Sweep {
    /// Opens a channel to sweep `first..end` in the medium's blocks. A sweep that writes ends with
    /// a flush where the medium has one; a sweep of flushes is one flush.
    pub(super) fn over(
        medium: &dyn Medium,
        operation: Operation,
        first: u64,
        end: u64,
    ) -> Result<Self, Status> {
        let backend = medium.channel().map_err(|_| Status::INTERNAL_ERROR)?;
        let limits = backend.limits();
        let flushes = matches!(operation, Operation::WriteZeroes | Operation::Flush)
            && limits.support.has(Operation::Flush);
        Ok(Self {
            operation,
            next: first,
            end: end.min(limits.block_count),
            chunk: limits.request_blocks_max.max(1),
            flushes,
            outstanding: 0,
            failed: None,
            answers: Answers::with_capacity(DEPTH as usize),
            backend,
        })
    }

    /// Does a bounded amount of work. `Some` when all has been answered.
    pub(super) fn turn(&mut self, now: Instant) -> Option<Result<(), Failure>> {
        self.submit(now);
        self.backend.flush();
        self.backend.poll(now, &mut self.answers);
        for answer in self.answers.drain() {
            self.outstanding -= 1;
            if !answer.outcome.is_success() && self.failed.is_none() {
                self.failed = Some(Failure { outcome: answer.outcome, lba: answer.token });
            }
        }
        if self.outstanding > 0 || (self.failed.is_none() && self.is_owed()) {
            return None;
        }
        Some(self.failed.map_or(Ok(()), Err))
    }

    /// Blocks that have not been asked for yet.
    pub(super) const fn blocks_left(&self) -> u64 {
        self.end.saturating_sub(self.next)
    }

    /// When the medium wants to be looked at.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match self.backend.wake_at() {
            Instant::NEVER => now,
            at => at,
        }
    }

    fn is_owed(&self) -> bool {
        self.next < self.end || self.flushes
    }

    fn submit(&mut self, now: Instant) {
        while self.failed.is_none() && self.outstanding < DEPTH {
            let left = self.blocks_left();
            let is_flush = left == 0;
            if is_flush && (!self.flushes || self.outstanding > 0) {
                return;
            }
            let blocks = u32::try_from(left).unwrap_or(u32::MAX).min(self.chunk);
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
                    Flags::DEALLOCATE
                } else {
                    Flags::NONE
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
