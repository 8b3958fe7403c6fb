//! Commands that take more than one request: what each does next.
//!
//! A job knows nothing of hosts, media or tickets. It is told what has happened and says what it
//! wants, one [`Step`] at a time, and the queue's driver sees to it, now or many turns later:
//!
//! ```text
//!   decoded ─▶ Walk ─▶ Reach ──────────────────▶ Submit … ─▶ End      data is reachable
//!                        └▶ TakeBuffer ─▶ FromHost ─▶ Submit … ─▶ End  it has to be copied
//!                                     └─▶ Submit ─▶ ToHost … ─▶ End
//! ```

use base::{Flags, Operation, Outcome};
use wire::{Command, Status};

use crate::transfer::Direction;

mod copy;
mod fill;
mod flush;
mod ranges;
mod reservation;
mod transfer;

pub(in crate::queue) use copy::{Copy, RANGE_BYTES};
pub(in crate::queue) use fill::Fill;
pub(in crate::queue) use flush::FlushAll;
pub(in crate::queue) use ranges::Ranges;
pub(in crate::queue) use reservation::Forwarded;
pub(in crate::queue) use transfer::Transfer;

/// What a work area is busy with.
#[derive(Debug)]
pub(super) enum Job {
    /// Nothing.
    Idle,
    /// A read, write or compare.
    Transfer(Transfer),
    /// A dataset management.
    Ranges(Ranges),
    /// A copy.
    Copy(Copy),
    /// A write zeroes or verify for a medium that has none.
    Fill(Fill),
    /// A flush of every namespace.
    FlushAll(FlushAll),
    /// A reservation command.
    Forwarded(Forwarded),
}

/// What a job wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// To know where the command's data lies.
    Walk { len_bytes: u32, direction: Direction },
    /// To know whether the medium can reach it there.
    Reach,
    /// A bounce buffer.
    TakeBuffer { is_zeroed: bool },
    /// The next bytes of the data in the buffer.
    FromHost(u32),
    /// The bytes of the buffer in the host.
    ToHost(u32),
    /// The bytes of the buffer compared with the next of the data.
    Check(u32),
    /// Bytes that are not blocks from the host.
    Fetch(u32),
    /// Bytes that are not blocks to the host.
    Return(u32),
    /// A request to the medium.
    Submit(Work),
    /// A flush of the first medium from this channel on, if there is one.
    FlushFrom(u16),
    /// The command, with what it brought, decided by the controller.
    Forward,
    /// The command to end.
    End(Status, u32),
}

/// A request as a job sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) operation: Operation,
    pub(super) flags: Flags,
    /// In the medium's blocks.
    pub(super) lba: u64,
    pub(super) operand: u64,
    pub(super) blocks: u32,
    pub(super) data: Place,
}

/// Where the data of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// There is none.
    Nowhere,
    /// In the host.
    Reached { at_bytes: u32, len_bytes: u32 },
    /// At the beginning of the buffer.
    Buffer { len_bytes: u32 },
}

/// What has happened.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// The job begins.
    Begin,
    /// It is known where the data lies.
    Walked,
    /// The medium can reach the data in so many segments, or it cannot.
    Reached(Option<usize>),
    /// There is a buffer of so many bytes.
    Buffered(u32),
    /// Bytes have been moved or compared.
    Moved { differs: bool },
    /// The medium has answered.
    Answered(Outcome),
    /// A flush went to this channel and was answered, or there was none left to flush.
    Flushed(Option<(u16, Outcome)>),
    /// The controller has decided.
    Decided(Status, u32),
}

/// The blocks of a command, in the medium's own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Bytes in a block, as a power of two.
    pub(super) shift: u8,
    /// Blocks of the largest request that moves data.
    pub(super) blocks_max: u32,
}

impl Job {
    /// What the job wants after `event`. `bytes` is what it fetched, or what the controller said.
    pub(super) fn next(&mut self, event: Event, command: &Command, bytes: &[u8]) -> Step {
        match self {
            Self::Idle => Step::End(Status::INTERNAL_ERROR, 0),
            Self::Transfer(job) => job.next(event),
            Self::Ranges(job) => job.next(event, bytes),
            Self::Copy(job) => job.next(event, command, bytes),
            Self::Fill(job) => job.next(event),
            Self::FlushAll(job) => job.next(event),
            Self::Forwarded(job) => job.next(event, bytes),
        }
    }
}

impl Step {
    const fn refused(status: Status) -> Self {
        Self::End(status, 0)
    }

    const OK: Self = Self::End(Status::SUCCESS, 0);

    /// An event that does not answer the last step: a mistake of the driver's, and never something
    /// a host or a medium can cause.
    fn confused() -> Self {
        debug_assert!(false, "an event that answers no step");
        Self::refused(Status::INTERNAL_ERROR)
    }
}

impl Extent {
    /// Blocks of the next request when so many are left and go through a buffer of this length.
    fn part(&self, left: u32, buffer_len_bytes: u32) -> u32 {
        left.min(self.blocks_max).min(buffer_len_bytes >> self.shift)
    }

    fn bytes(&self, blocks: u32) -> u32 {
        blocks << self.shift
    }
}
