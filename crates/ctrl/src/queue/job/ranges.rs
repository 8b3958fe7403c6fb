//! Dataset Management (NVM 1.1 §3.3.3): up to 256 ranges that the host no longer needs.
//!
//! Every range is checked before the first is touched. Hints about access patterns are accepted and
//! mean nothing here.

use base::{Flags, Operation};
use wire::Status;

use super::{Event, Place, Step, Work};
use crate::transfer::Direction;

/// A dataset management under way.
#[derive(Debug)]
pub(crate) struct Ranges {
    count: u32,
    /// AD: the ranges are to be deallocated, and the medium can do it.
    deallocates: bool,
    block_count: u64,
    medium_shift: u8,
    /// The range at work, and how many of its blocks are done.
    index: u32,
    done: u64,
    part: u32,
}

/// A range is 16 bytes (NVM 1.1 §3.3.3, Figure 45).
const RANGE_BYTES: u32 = 16;

impl Ranges {
    /// `count` ranges of a namespace of `block_count` blocks.
    pub(crate) fn new(count: u32, deallocates: bool, block_count: u64, medium_shift: u8) -> Self {
        Self { count, deallocates, block_count, medium_shift, index: 0, done: 0, part: 0 }
    }

    pub(super) fn next(&mut self, event: Event, bytes: &[u8]) -> Step {
        let len_bytes = self.count * RANGE_BYTES;
        match event {
            Event::Begin => Step::Walk { len_bytes, direction: Direction::FromHost },
            Event::Walked => Step::Fetch(len_bytes),
            Event::Moved { .. } if !self.all_inside(bytes) => {
                Step::refused(Status::LBA_OUT_OF_RANGE.with_dnr())
            }
            Event::Moved { .. } if self.deallocates => self.more(bytes),
            Event::Moved { .. } => Step::OK,
            Event::Answered(outcome) if !outcome.is_success() => Step::End(Status(outcome.0), 0),
            Event::Answered(_) => {
                self.done += u64::from(self.part);
                self.more(bytes)
            }
            _ => Step::confused(),
        }
    }

    fn all_inside(&self, bytes: &[u8]) -> bool {
        (0..self.count).all(|index| {
            range(bytes, index).is_some_and(|(lba, blocks)| {
                lba.checked_add(blocks).is_some_and(|end| end <= self.block_count)
            })
        })
    }

    /// The next request: of this range, or of the next that is not empty.
    fn more(&mut self, bytes: &[u8]) -> Step {
        while self.index < self.count {
            let (lba, blocks) = range(bytes, self.index).unwrap_or((0, 0));
            let (lba, blocks) = (lba << self.medium_shift, blocks << self.medium_shift);
            if self.done < blocks {
                self.part = u32::try_from(blocks - self.done).unwrap_or(u32::MAX);
                return Step::Submit(Work {
                    operation: Operation::Deallocate,
                    flags: Flags::NONE,
                    lba: lba + self.done,
                    operand: 0,
                    blocks: self.part,
                    data: Place::Nowhere,
                });
            }
            (self.index, self.done) = (self.index + 1, 0);
        }
        Step::OK
    }
}

/// First block and number of blocks of a range.
fn range(bytes: &[u8], index: u32) -> Option<(u64, u64)> {
    let range = bytes.get((index * RANGE_BYTES) as usize..)?;
    let blocks = u32::from_le_bytes(*range.get(4..)?.first_chunk()?);
    Some((u64::from_le_bytes(*range.get(8..)?.first_chunk()?), blocks.into()))
}
