//! Read, write and compare: data between host and medium, in place or through a buffer.

use base::{Flags, Operation, Outcome};
use wire::Status;

use super::{Event, Extent, Place, Step, Work};
use crate::transfer::Direction;

/// A read, write or compare under way.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(super) operation: Operation,
    flags: Flags,
    extent: Extent,
    segments_max: usize,
    /// The medium cannot compare: it reads, and the controller compares.
    compares_here: bool,
    done: u32,
    part: u32,
    /// Length of the bounce buffer, if the data goes through one.
    buffer_len_bytes: Option<u32>,
}

impl Transfer {
    /// `operation` on `extent`.
    pub(crate) fn new(
        operation: Operation,
        flags: Flags,
        extent: Extent,
        segments_max: usize,
        compares_here: bool,
    ) -> Self {
        let (done, part, buffer_len_bytes) = (0, 0, None);
        Self { operation, flags, extent, segments_max, compares_here, done, part, buffer_len_bytes }
    }

    pub(super) fn next(&mut self, event: Event) -> Step {
        match (event, self.buffer_len_bytes) {
            (Event::Begin, _) => Step::Walk {
                len_bytes: self.extent.bytes(self.extent.blocks),
                direction: self.direction(),
            },
            (Event::Walked, _) if self.compares_here => Step::TakeBuffer { is_zeroed: false },
            (Event::Walked, _) => Step::Reach,
            (Event::Reached(Some(count)), _) if count <= self.segments_max => self.more(),
            (Event::Reached(_), _) => Step::TakeBuffer { is_zeroed: false },
            (Event::Buffered(len_bytes), _) => {
                self.buffer_len_bytes = Some(len_bytes);
                self.more()
            }
            (Event::Answered(outcome), _) if !outcome.is_success() => {
                Step::End(Status(outcome.0), 0)
            }
            (Event::Answered(_), Some(_)) if self.compares_here => {
                Step::Check(self.extent.bytes(self.part))
            }
            (Event::Answered(_), Some(_)) if self.operation == Operation::Read => {
                Step::ToHost(self.extent.bytes(self.part))
            }
            (Event::Moved { differs: true }, _) => Step::End(Status(Outcome::COMPARE_FAILURE.0), 0),
            (Event::Moved { .. }, Some(_)) if !self.reads_first() => self.submit(),
            (Event::Answered(_) | Event::Moved { .. }, _) => {
                self.done += self.part;
                if self.done == self.extent.blocks { Step::OK } else { self.more() }
            }
            _ => Step::confused(),
        }
    }

    /// Begins the next part.
    fn more(&mut self) -> Step {
        let left = self.extent.blocks - self.done;
        self.part = self.extent.part(left, self.buffer_len_bytes.unwrap_or(u32::MAX));
        match self.part {
            0 => Step::refused(Status::INTERNAL_ERROR),
            _ if self.buffer_len_bytes.is_none() || self.reads_first() => self.submit(),
            part => Step::FromHost(self.extent.bytes(part)),
        }
    }

    fn submit(&self) -> Step {
        let len_bytes = self.extent.bytes(self.part);
        let data = match self.buffer_len_bytes {
            None => Place::Reached { at_bytes: self.extent.bytes(self.done), len_bytes },
            Some(_) => Place::Buffer { len_bytes },
        };
        Step::Submit(Work {
            operation: if self.compares_here { Operation::Read } else { self.operation },
            flags: self.flags,
            lba: self.extent.lba + u64::from(self.done),
            operand: 0,
            blocks: self.part,
            data,
        })
    }

    /// Whether the medium comes before the host.
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
