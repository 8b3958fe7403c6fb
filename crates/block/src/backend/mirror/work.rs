//! A request under way through a mirror.

use base::{Operation, Outcome, Request};

/// One place of a channel's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// As it came, with its segments where the channel keeps them.
    pub(super) request: Request,
    /// Legs that have not answered yet.
    pub(super) awaited: u8,
    /// Legs that have done it.
    pub(super) done: u8,
    /// Legs that could not.
    pub(super) failed: u8,
    /// Legs that have lost completed writes, as their answer to a flush says.
    pub(super) lost: u8,
    /// The answer, if it is not done.
    pub(super) outcome: Outcome,
    /// Dword 0 of the answer.
    pub(super) result: u32,
    pub(super) stage: Stage,
    /// What a mirror that can write no superblocks had counted when this began to wait.
    pub(super) failures: u64,
    /// The losses that were reported on its channel before a flush was submitted.
    pub(super) losses: u64,
}

/// What is awaited, and who has to be told when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The place is free.
    Idle,
    /// One leg.
    Read,
    /// That what one leg could not read has been brought there from another.
    Repaired,
    /// One leg, after that.
    ReadAgain,
    /// The right to write.
    Admitted,
    /// The legs, as one of the writes of this bucket.
    Written { bucket: u8 },
    /// The legs, as a write in the region under copy.
    WrittenUnderCopy,
    /// Superblocks; what was written is counted as before.
    Recorded { bucket: Option<u8> },
}

impl Work {
    pub(super) fn idle() -> Self {
        Self::of(Request::NOTHING)
    }

    pub(super) fn of(request: Request) -> Self {
        Self {
            request,
            awaited: 0,
            done: 0,
            failed: 0,
            lost: 0,
            outcome: Outcome::SUCCESS,
            result: 0,
            stage: Stage::Idle,
            failures: 0,
            losses: 0,
        }
    }

    /// Whether legs may have carried it out and others not.
    pub(super) fn may_differ(&self) -> bool {
        let sent = matches!(
            self.stage,
            Stage::Written { .. } | Stage::WrittenUnderCopy | Stage::Recorded { .. }
        );
        sent && self.request.operation != Operation::Flush
    }
}

/// Whether a leg answers to a flush that completed writes are lost: any other error says nothing about
/// them (docs/durability.md).
pub(super) fn is_loss(operation: Operation, outcome: Outcome) -> bool {
    operation == Operation::Flush && outcome == Outcome::WRITE_FAULT
}

/// Whether it is the request that is at fault, and not the leg.
pub(super) fn is_the_callers(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::INVALID_OPCODE
            | Outcome::INVALID_FIELD
            | Outcome::DATA_TRANSFER_ERROR
            | Outcome::LBA_OUT_OF_RANGE
    )
}
