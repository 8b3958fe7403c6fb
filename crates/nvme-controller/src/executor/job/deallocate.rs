//! Dataset Management (NVM 1.1 §3.3.3): up to 256 ranges to deallocate.
//!
//! Every range is checked before the first is deallocated. Access pattern hints are accepted and ignored.

use tenmil_base::{Operation, RequestFlags};
use tenmil_wire::Status;

use super::{DataLocation, JobEvent, JobStep, SubRequest};
use crate::data_pointer_walk::Direction;

/// Dataset Management command in progress.
#[derive(Debug)]
pub(crate) struct DeallocateJob {
    count: u32,
    /// AD is set, and the block device supports deallocation.
    deallocates: bool,
    block_count: u64,
    device_shift: u8,
    /// Current range, and its blocks already deallocated.
    index: u32,
    done: u64,
    part: u32,
}

/// Length of a range in bytes: 16 (NVM 1.1 §3.3.3, Figure 45).
const RANGE_BYTES: u32 = 16;

impl DeallocateJob {
    /// Creates a job for `count` ranges of a namespace of `block_count` blocks.
    pub(crate) fn new(count: u32, deallocates: bool, block_count: u64, device_shift: u8) -> Self {
        Self { count, deallocates, block_count, device_shift, index: 0, done: 0, part: 0 }
    }

    pub(super) fn next_step(&mut self, event: JobEvent, bytes: &[u8]) -> JobStep {
        let len_bytes = self.count * RANGE_BYTES;
        match event {
            JobEvent::Begin => JobStep::Walk { len_bytes, direction: Direction::FromHost },
            JobEvent::Walked => JobStep::ReadParameters(len_bytes),
            JobEvent::Copied { .. } if !self.are_ranges_valid(bytes) => {
                JobStep::rejected(Status::LBA_OUT_OF_RANGE.with_dnr())
            }
            JobEvent::Copied { .. } if self.deallocates => self.next_range_step(bytes),
            JobEvent::Copied { .. } => JobStep::OK,
            JobEvent::RequestCompleted(status) if !status.is_success() => {
                JobStep::End(Status(status.0), 0)
            }
            JobEvent::RequestCompleted(_) => {
                self.done += u64::from(self.part);
                self.next_range_step(bytes)
            }
            _ => JobStep::unexpected_event(),
        }
    }

    fn are_ranges_valid(&self, bytes: &[u8]) -> bool {
        (0..self.count).all(|index| {
            parse_range(bytes, index).is_some_and(|(lba, blocks)| {
                lba.checked_add(blocks).is_some_and(|end| end <= self.block_count)
            })
        })
    }

    /// Next request: for this range, or for the next that is not empty.
    fn next_range_step(&mut self, bytes: &[u8]) -> JobStep {
        while self.index < self.count {
            let (lba, blocks) = parse_range(bytes, self.index).unwrap_or((0, 0));
            let (lba, blocks) = (lba << self.device_shift, blocks << self.device_shift);
            if self.done < blocks {
                self.part = u32::try_from(blocks - self.done).unwrap_or(u32::MAX);
                return JobStep::Submit(SubRequest {
                    operation: Operation::Deallocate,
                    flags: RequestFlags::NONE,
                    lba: lba + self.done,
                    operand: 0,
                    blocks: self.part,
                    data: DataLocation::None,
                });
            }
            (self.index, self.done) = (self.index + 1, 0);
        }
        JobStep::OK
    }
}

/// First block and block count of a range.
fn parse_range(bytes: &[u8], index: u32) -> Option<(u64, u64)> {
    let range = bytes.get((index * RANGE_BYTES) as usize..)?;
    let blocks = u32::from_le_bytes(*range.get(4..)?.first_chunk()?);
    Some((u64::from_le_bytes(*range.get(8..)?.first_chunk()?), blocks.into()))
}
