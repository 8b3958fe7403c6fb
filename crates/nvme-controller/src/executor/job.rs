//! State machines of commands that need more than one request.
//!
//! A job is independent of hosts, block devices and access identifiers. It receives an event and returns
//! the next [`JobStep`]; the queue's driver executes the step, at once or over many polls:
//!
//! ```text
//!   decoded ─▶ Walk ─▶ ResolveDirect ──────────▶ Submit … ─▶ End        data is accessible in place
//!                        └▶ TakeBuffer ─▶ FromHost ─▶ Submit … ─▶ End  data is copied
//!                                     └─▶ Submit ─▶ ToHost … ─▶ End
//! ```

use tenmil_base::{IoStatus, Operation, RequestFlags};
use tenmil_wire::{Command, Status};

use crate::data_pointer_walk::Direction;

mod copy;
mod deallocate;
mod flush;
mod reservation;
mod transfer;
mod write_zeroes_verify;

pub(in crate::executor) use copy::{CopyJob, RANGE_BYTES};
pub(in crate::executor) use deallocate::DeallocateJob;
pub(in crate::executor) use flush::FlushAllJob;
pub(in crate::executor) use reservation::ReservationJob;
pub(in crate::executor) use transfer::TransferJob;
pub(in crate::executor) use write_zeroes_verify::EmulatedZeroesVerifyJob;

/// Job of a command context.
#[derive(Debug)]
pub(super) enum CommandJob {
    /// None.
    Idle,
    /// Read, Write or Compare.
    Transfer(TransferJob),
    /// Dataset Management.
    Ranges(DeallocateJob),
    /// Copy.
    Copy(CopyJob),
    /// Write Zeroes or Verify, emulated for a block device without it.
    Emulated(EmulatedZeroesVerifyJob),
    /// Flush of every namespace.
    FlushAll(FlushAllJob),
    /// Reservation command.
    Reservation(ReservationJob),
}

/// Next operation that a job requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobStep {
    /// The host ranges of the command's data.
    Walk { len_bytes: u32, direction: Direction },
    /// Whether the block device can access the data in host memory.
    ResolveDirect,
    /// A bounce buffer.
    TakeBuffer { is_zeroed: bool },
    /// The next bytes of the data, copied to the buffer.
    FromHost(u32),
    /// The bytes of the buffer, copied to the host.
    ToHost(u32),
    /// The bytes of the buffer, compared with the next bytes of the data.
    Compare(u32),
    /// Non-block data from the host.
    ReadParameters(u32),
    /// Non-block data to the host.
    WriteResult(u32),
    /// A request to the block device.
    Submit(SubRequest),
    /// A flush of the first block device from this channel on, if there is one.
    FlushFrom(u16),
    /// Execution of the command and its data by the controller.
    Forward,
    /// Completion of the command.
    End(Status, u32),
}

/// Block-device request of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SubRequest {
    pub(super) operation: Operation,
    pub(super) flags: RequestFlags,
    /// In blocks of the block device.
    pub(super) lba: u64,
    pub(super) operand: u64,
    pub(super) blocks: u32,
    pub(super) data: DataLocation,
}

/// Location of a request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataLocation {
    /// No data.
    None,
    /// In host memory.
    HostMemory { at_bytes: u32, len_bytes: u32 },
    /// At the start of the bounce buffer.
    Buffer { len_bytes: u32 },
}

/// Input of the job state machine.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobEvent {
    /// The job starts.
    Begin,
    /// The host ranges are known.
    Walked,
    /// The block device can access the data in this many segments, or cannot.
    Resolved(Option<usize>),
    /// A buffer of this many bytes is allocated.
    BufferAllocated(u32),
    /// Bytes have been copied or compared.
    Copied { differs: bool },
    /// The request has completed.
    RequestCompleted(IoStatus),
    /// A flush of this channel has completed, or no channel is left.
    Flushed(Option<(u16, IoStatus)>),
    /// The controller has returned the result.
    ControllerCompleted(Status, u32),
}

/// Block range of a command, in blocks of the block device.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandExtent {
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Block size in bytes, as a power of two.
    pub(super) shift: u8,
    /// Maximum blocks of a request that moves data.
    pub(super) blocks_max: u32,
}

impl CommandJob {
    /// Next step after `event`. `bytes` is the fetched parameter data, or the report from the controller.
    pub(super) fn next_step(
        &mut self,
        event: JobEvent,
        command: &Command,
        bytes: &[u8],
    ) -> JobStep {
        match self {
            Self::Idle => JobStep::End(Status::INTERNAL_ERROR, 0),
            Self::Transfer(job) => job.next_step(event),
            Self::Ranges(job) => job.next_step(event, bytes),
            Self::Copy(job) => job.next_step(event, command, bytes),
            Self::Emulated(job) => job.next_step(event),
            Self::FlushAll(job) => job.next_step(event),
            Self::Reservation(job) => job.next_step(event, bytes),
        }
    }
}

impl JobStep {
    const fn rejected(status: Status) -> Self {
        Self::End(status, 0)
    }

    const OK: Self = Self::End(Status::SUCCESS, 0);

    /// Result for an event that does not match the last step. This is a bug in the driver; a host or a
    /// block device cannot cause it.
    fn unexpected_event() -> Self {
        debug_assert!(false, "an event that does not match the last step");
        Self::rejected(Status::INTERNAL_ERROR)
    }
}

impl CommandExtent {
    /// Blocks of the next request when `left` blocks remain and pass through a buffer of this length.
    fn next_part_blocks(&self, left: u32, buffer_len_bytes: u32) -> u32 {
        left.min(self.blocks_max).min(buffer_len_bytes >> self.shift)
    }

    fn len_bytes(&self, blocks: u32) -> u32 {
        blocks << self.shift
    }
}
