//! Read, Write and Compare: data transfer between host and block device, in place or through a buffer.

use tenmil_base::{IoStatus, Operation, RequestFlags};
use tenmil_wire::Status;

use super::{CommandExtent, DataLocation, JobEvent, JobStep, SubRequest};
use crate::data_pointer_walk::Direction;

/// Read, Write or Compare in progress.
#[derive(Debug)]
pub(crate) struct TransferJob {
    pub(super) operation: Operation,
    flags: RequestFlags,
    extent: CommandExtent,
    segments_max: usize,
    /// The block device does not support compare: it reads, and the controller compares.
    compares_in_controller: bool,
    done: u32,
    part: u32,
    /// Length of the bounce buffer, if the data passes through one.
    buffer_len_bytes: Option<u32>,
}

impl TransferJob {
    /// Creates a job for `operation` on `extent`.
    pub(crate) fn new(
        operation: Operation,
        flags: RequestFlags,
        extent: CommandExtent,
        segments_max: usize,
        compares_in_controller: bool,
    ) -> Self {
        let (done, part, buffer_len_bytes) = (0, 0, None);
        Self {
            operation,
            flags,
            extent,
            segments_max,
            compares_in_controller,
            done,
            part,
            buffer_len_bytes,
        }
    }

    pub(super) fn next_step(&mut self, event: JobEvent) -> JobStep {
        match (event, self.buffer_len_bytes) {
            (JobEvent::Begin, _) => JobStep::Walk {
                len_bytes: self.extent.len_bytes(self.extent.blocks),
                direction: self.direction(),
            },
            (JobEvent::Walked, _) if self.compares_in_controller => {
                JobStep::TakeBuffer { is_zeroed: false }
            }
            (JobEvent::Walked, _) => JobStep::ResolveDirect,
            // Data in at most `segments_max` segments that the block device can access are transferred
            // directly, otherwise through a bounce buffer.
            (JobEvent::Resolved(Some(count)), _) if count <= self.segments_max => {
                self.next_part_step()
            }
            (JobEvent::Resolved(_), _) => JobStep::TakeBuffer { is_zeroed: false },
            (JobEvent::BufferAllocated(len_bytes), _) => {
                self.buffer_len_bytes = Some(len_bytes);
                self.next_part_step()
            }
            (JobEvent::RequestCompleted(status), _) if !status.is_success() => {
                JobStep::End(Status(status.0), 0)
            }
            (JobEvent::RequestCompleted(_), Some(_)) if self.compares_in_controller => {
                JobStep::Compare(self.extent.len_bytes(self.part))
            }
            (JobEvent::RequestCompleted(_), Some(_)) if self.operation == Operation::Read => {
                JobStep::ToHost(self.extent.len_bytes(self.part))
            }
            (JobEvent::Copied { differs: true }, _) => {
                JobStep::End(Status(IoStatus::COMPARE_FAILURE.0), 0)
            }
            (JobEvent::Copied { .. }, Some(_)) if !self.reads_device_first() => self.submit_step(),
            (JobEvent::RequestCompleted(_) | JobEvent::Copied { .. }, _) => {
                self.done += self.part;
                if self.done == self.extent.blocks { JobStep::OK } else { self.next_part_step() }
            }
            _ => JobStep::unexpected_event(),
        }
    }

    /// Starts the next part.
    fn next_part_step(&mut self) -> JobStep {
        let left = self.extent.blocks - self.done;
        self.part = self.extent.next_part_blocks(left, self.buffer_len_bytes.unwrap_or(u32::MAX));
        match self.part {
            0 => JobStep::rejected(Status::INTERNAL_ERROR),
            _ if self.buffer_len_bytes.is_none() || self.reads_device_first() => self.submit_step(),
            part => JobStep::FromHost(self.extent.len_bytes(part)),
        }
    }

    fn submit_step(&self) -> JobStep {
        let len_bytes = self.extent.len_bytes(self.part);
        let data = match self.buffer_len_bytes {
            None => {
                DataLocation::HostMemory { at_bytes: self.extent.len_bytes(self.done), len_bytes }
            }
            Some(_) => DataLocation::Buffer { len_bytes },
        };
        JobStep::Submit(SubRequest {
            operation: if self.compares_in_controller { Operation::Read } else { self.operation },
            flags: self.flags,
            lba: self.extent.lba + u64::from(self.done),
            operand: 0,
            blocks: self.part,
            data,
        })
    }

    /// Whether the block device is accessed before the host.
    fn reads_device_first(&self) -> bool {
        self.operation == Operation::Read || self.compares_in_controller
    }

    fn direction(&self) -> Direction {
        match self.operation {
            Operation::Read => Direction::ToHost,
            _ => Direction::FromHost,
        }
    }
}
