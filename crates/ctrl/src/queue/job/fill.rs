//! Write zeroes and verify for a medium that has none: a buffer of zeroes is written again and
//! again, or everything is read and thrown away.

use base::{Flags, Operation};
use wire::Status;

use super::{Event, Extent, Place, Step, Work};

/// A fill under way.
#[derive(Debug)]
pub(crate) struct Fill {
    /// Write, or read.
    operation: Operation,
    flags: Flags,
    extent: Extent,
    done: u32,
    part: u32,
    buffer_len_bytes: u32,
}

impl Fill {
    /// Writes zeroes to `extent`, or reads it.
    pub(crate) fn new(operation: Operation, flags: Flags, extent: Extent) -> Self {
        Self { operation, flags, extent, done: 0, part: 0, buffer_len_bytes: 0 }
    }

    pub(super) fn next(&mut self, event: Event) -> Step {
        match event {
            Event::Begin => Step::TakeBuffer { is_zeroed: self.operation == Operation::Write },
            Event::Buffered(len_bytes) => {
                self.buffer_len_bytes = len_bytes;
                self.more()
            }
            Event::Answered(outcome) if !outcome.is_success() => Step::End(Status(outcome.0), 0),
            Event::Answered(_) => {
                self.done += self.part;
                if self.done == self.extent.blocks { Step::OK } else { self.more() }
            }
            _ => Step::confused(),
        }
    }

    fn more(&mut self) -> Step {
        self.part = self.extent.part(self.extent.blocks - self.done, self.buffer_len_bytes);
        if self.part == 0 {
            return Step::refused(Status::INTERNAL_ERROR);
        }
        Step::Submit(Work {
            operation: self.operation,
            flags: self.flags,
            lba: self.extent.lba + u64::from(self.done),
            operand: 0,
            blocks: self.part,
            data: Place::Buffer { len_bytes: self.extent.bytes(self.part) },
        })
    }
}
