//! Read, Write and Compare: data transfer between host and block device, in place or through a buffer.

use tenmil_base::{IoStatus, Operation, RequestFlags};
use tenmil_wire::Status;

use super::{CommandExtent, DataLocation, JobEvent, JobStep, SubRequest};
use crate::transfer::Direction;

/// Read, Write or Compare in progress.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(super) operation: Operation,
    flags: RequestFlags,
    extent: CommandExtent,
    segments_max: usize,
    /// The block device does not support compare: it reads, and the controller compares.
    compares_here: bool,
    done: u32,
    part: u32,
    /// Length of the bounce buffer, if the data passes through one.
    buffer_len_bytes: Option<u32>,
}

impl Transfer {
    /// Creates a job for `operation` on `extent`.
    pub(crate) fn new(
        operation: Operation,
        flags: RequestFlags,
        extent: CommandExtent,
        segments_max: usize,
        compares_here: bool,
    ) -> Self {
        let (done, part, buffer_len_bytes) = (0, 0, None);
        Self { operation, flags, extent, segments_max, compares_here, done, part, buffer_len_bytes }
    }

    pub(super) fn next(&mut self, event: JobEvent) -> JobStep {
        match (event, self.buffer_len_bytes) {
            (JobEvent::Begin, _) => JobStep::Walk {
                len_bytes: self.extent.bytes(self.extent.blocks),
                direction: self.direction(),
            },
            (JobEvent::Walked, _) if self.compares_here => JobStep::TakeBuffer { is_zeroed: false },
            (JobEvent::Walked, _) => JobStep::ResolveDirect,
            // Data in at most `segments_max` segments that the block device can access are transferred
            // directly, otherwise through a bounce buffer.
            (JobEvent::Reached(Some(count)), _) if count <= self.segments_max => self.more(),
            (JobEvent::Reached(_), _) => JobStep::TakeBuffer { is_zeroed: false },
            (JobEvent::Buffered(len_bytes), _) => {
                self.buffer_len_bytes = Some(len_bytes);
                self.more()
            }
            (JobEvent::Answered(outcome), _) if !outcome.is_success() => {
                JobStep::End(Status(outcome.0), 0)
            }
            (JobEvent::Answered(_), Some(_)) if self.compares_here => {
                JobStep::Check(self.extent.bytes(self.part))
            }
            (JobEvent::Answered(_), Some(_)) if self.operation == Operation::Read => {
                JobStep::ToHost(self.extent.bytes(self.part))
            }
            (JobEvent::Moved { differs: true }, _) => {
                JobStep::End(Status(IoStatus::COMPARE_FAILURE.0), 0)
            }
            (JobEvent::Moved { .. }, Some(_)) if !self.reads_first() => self.submit(),
            (JobEvent::Answered(_) | JobEvent::Moved { .. }, _) => {
                self.done += self.part;
                if self.done == self.extent.blocks { JobStep::OK } else { self.more() }
            }
            _ => JobStep::confused(),
        }
    }

    /// Starts the next part.
    fn more(&mut self) -> JobStep {
        let left = self.extent.blocks - self.done;
        self.part = self.extent.part(left, self.buffer_len_bytes.unwrap_or(u32::MAX));
        match self.part {
            0 => JobStep::refused(Status::INTERNAL_ERROR),
            _ if self.buffer_len_bytes.is_none() || self.reads_first() => self.submit(),
            part => JobStep::FromHost(self.extent.bytes(part)),
        }
    }

    fn submit(&self) -> JobStep {
        let len_bytes = self.extent.bytes(self.part);
        let data = match self.buffer_len_bytes {
            None => DataLocation::Reached { at_bytes: self.extent.bytes(self.done), len_bytes },
            Some(_) => DataLocation::Buffer { len_bytes },
        };
        JobStep::Submit(SubRequest {
            operation: if self.compares_here { Operation::Read } else { self.operation },
            flags: self.flags,
            lba: self.extent.lba + u64::from(self.done),
            operand: 0,
            blocks: self.part,
            data,
        })
    }

    /// Whether the block device is accessed before the host.
    fn reads_first(&self) -> bool {
        self.operation == Operation::Read || self.compares_here
    }

    fn direction(&self) -> Direction {
        match self.operation {
            Operation::Read => Direction::ToHost,
            _ => Direction::FromHost,
        }
    }
}
