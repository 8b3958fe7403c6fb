//! State of one request of a mirror.

use tenmil_base::{IoStatus, Operation, Request};

/// An entry of a channel's request table.
#[derive(Clone, Copy, Debug)]
pub(super) struct MirrorRequest {
    /// The request, with its segments in the channel's table.
    pub(super) request: Request,
    /// Legs that have not completed yet.
    pub(super) awaited: u8,
    /// Legs that have succeeded.
    pub(super) done: u8,
    /// Legs that have failed.
    pub(super) failed: u8,
    /// Legs that have lost completed writes, according to their flush status.
    pub(super) lost: u8,
    /// The status if it fails.
    pub(super) status: IoStatus,
    /// Dword 0 of the completion.
    pub(super) result: u32,
    pub(super) stage: RequestStage,
    /// The count of failed commits when this request began to wait.
    pub(super) failures: u64,
    /// The losses reported on its channel before a flush was submitted.
    pub(super) losses: u64,
}

/// What a request waits for, and which counters it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestStage {
    /// The entry is free.
    Idle,
    /// One leg.
    Read,
    /// The repair of blocks that one leg could not read, from another.
    Repaired,
    /// One leg, after a repair.
    ReadAgain,
    /// Permission to write.
    Admitted,
    /// The legs, counted in this bucket of write epochs.
    Written { bucket: u8 },
    /// The legs, as a tracked write in the region being copied.
    WrittenUnderCopy,
    /// A commit; the write stays counted as before.
    Recorded { bucket: Option<u8> },
}

impl MirrorRequest {
    pub(super) fn free_entry() -> Self {
        Self::new(Request::PLACEHOLDER)
    }

    pub(super) fn new(request: Request) -> Self {
        Self {
            request,
            awaited: 0,
            done: 0,
            failed: 0,
            lost: 0,
            status: IoStatus::SUCCESS,
            result: 0,
            stage: RequestStage::Idle,
            failures: 0,
            losses: 0,
        }
    }

    /// Whether some legs may have executed it and others not.
    pub(super) fn may_have_partly_executed(&self) -> bool {
        let sent = matches!(
            self.stage,
            RequestStage::Written { .. }
                | RequestStage::WrittenUnderCopy
                | RequestStage::Recorded { .. }
        );
        sent && self.request.operation != Operation::Flush
    }
}

/// Whether a leg's flush status reports the loss of completed writes. Other errors say nothing about them
/// (docs/operator/durability.md).
pub(super) fn reports_write_loss(operation: Operation, status: IoStatus) -> bool {
    operation == Operation::Flush && status == IoStatus::WRITE_FAULT
}

/// Whether the request is invalid, rather than the leg faulty.
pub(super) fn is_invalid_request_status(status: IoStatus) -> bool {
    matches!(
        status,
        IoStatus::INVALID_OPCODE
            | IoStatus::INVALID_FIELD
            | IoStatus::DATA_TRANSFER_ERROR
            | IoStatus::LBA_OUT_OF_RANGE
    )
}
