//! Emulation of Write Zeroes and Verify for a block device without them: a buffer of zeroes is written
//! repeatedly, or all blocks are read and discarded.

use tenmil_base::{Operation, RequestFlags};
use tenmil_wire::Status;

use super::{CommandExtent, DataLocation, JobEvent, JobStep, SubRequest};

/// Emulation in progress.
#[derive(Debug)]
pub(crate) struct EmulatedZeroesVerifyJob {
    /// Write or Read.
    operation: Operation,
    flags: RequestFlags,
    extent: CommandExtent,
    done: u32,
    part: u32,
    buffer_len_bytes: u32,
}

impl EmulatedZeroesVerifyJob {
    /// Creates a job that writes zeroes to `extent`, or reads it.
    pub(crate) fn new(operation: Operation, flags: RequestFlags, extent: CommandExtent) -> Self {
        Self { operation, flags, extent, done: 0, part: 0, buffer_len_bytes: 0 }
    }

    pub(super) fn next_step(&mut self, event: JobEvent) -> JobStep {
        match event {
            JobEvent::Begin => {
                JobStep::TakeBuffer { is_zeroed: self.operation == Operation::Write }
            }
            JobEvent::BufferAllocated(len_bytes) => {
                self.buffer_len_bytes = len_bytes;
                self.next_part_step()
            }
            JobEvent::RequestCompleted(status) if !status.is_success() => {
                JobStep::End(Status(status.0), 0)
            }
            JobEvent::RequestCompleted(_) => {
                self.done += self.part;
                if self.done == self.extent.blocks { JobStep::OK } else { self.next_part_step() }
            }
            _ => JobStep::unexpected_event(),
        }
    }

    fn next_part_step(&mut self) -> JobStep {
        self.part =
            self.extent.next_part_blocks(self.extent.blocks - self.done, self.buffer_len_bytes);
        if self.part == 0 {
            return JobStep::rejected(Status::INTERNAL_ERROR);
        }
        JobStep::Submit(SubRequest {
            operation: self.operation,
            flags: self.flags,
            lba: self.extent.lba + u64::from(self.done),
            operand: 0,
            blocks: self.part,
            data: DataLocation::Buffer { len_bytes: self.extent.len_bytes(self.part) },
        })
    }
}
