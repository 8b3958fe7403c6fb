//! Copy command (NVM 1.1 §3.3.2): up to 256 source ranges, written consecutively.
//!
//! Every range is checked before the first block moves. A block device that supports copy executes it;
//! otherwise the blocks pass through a bounce buffer. If a range fails, dword 0 reports the first range
//! that was not copied.

use tenmil_base::{Operation, RequestFlags};
use tenmil_wire::{Command, Status};

use super::{CommandExtent, DataLocation, JobEvent, JobStep, SubRequest};
use crate::data_pointer_walk::Direction;
use crate::namespace::CopyLimits;

/// Copy in progress.
#[derive(Debug)]
pub(crate) struct CopyJob {
    /// Destination: `lba` is in blocks of the block device.
    extent: CommandExtent,
    count: u32,
    range_bytes: u32,
    block_count: u64,
    device_shift: u8,
    limits: CopyLimits,
    flags: RequestFlags,
    /// The block device supports copy.
    device_copies: bool,
    /// Current range, and its blocks (of the block device) already copied.
    index: u32,
    done: u32,
    part: u32,
    buffer_len_bytes: u32,
    is_writing: bool,
}

/// Length of a Source Range Entry in copy descriptor formats 0h and 1h (NVM 1.1 §3.3.2, Figures 39 and
/// 40).
pub(crate) const RANGE_BYTES: [u32; 2] = [32, 40];

impl CopyJob {
    /// Creates a copy of `count` ranges of `range_bytes` each to `extent.lba`.
    pub(crate) fn new(
        extent: CommandExtent,
        (count, range_bytes): (u32, u32),
        (block_count, device_shift): (u64, u8),
        limits: CopyLimits,
        flags: RequestFlags,
        device_copies: bool,
    ) -> Self {
        let (index, done, part, buffer_len_bytes, is_writing) = (0, 0, 0, u32::MAX, false);
        Self {
            extent,
            count,
            range_bytes,
            block_count,
            device_shift,
            limits,
            flags,
            device_copies,
            index,
            done,
            part,
            buffer_len_bytes,
            is_writing,
        }
    }

    pub(super) fn next_step(
        &mut self,
        event: JobEvent,
        command: &Command,
        bytes: &[u8],
    ) -> JobStep {
        let len_bytes = self.count * self.range_bytes;
        match event {
            JobEvent::Begin => JobStep::Walk { len_bytes, direction: Direction::FromHost },
            JobEvent::Walked => JobStep::ReadParameters(len_bytes),
            JobEvent::Copied { .. } => match self.check_ranges(destination_lba(command), bytes) {
                Err(status) => JobStep::rejected(status.with_dnr()),
                Ok(()) if self.device_copies => self.next_part_step(bytes),
                Ok(()) => JobStep::TakeBuffer { is_zeroed: false },
            },
            JobEvent::BufferAllocated(len_bytes) => {
                self.buffer_len_bytes = len_bytes;
                self.next_part_step(bytes)
            }
            JobEvent::RequestCompleted(status) if !status.is_success() => {
                JobStep::End(Status(status.0), self.index)
            }
            JobEvent::RequestCompleted(_) if !self.device_copies && !self.is_writing => {
                self.is_writing = true;
                self.submit_step(Operation::Write, self.extent.lba, 0)
            }
            JobEvent::RequestCompleted(_) => {
                self.done += self.part;
                self.extent.lba += u64::from(self.part);
                self.next_part_step(bytes)
            }
            _ => JobStep::unexpected_event(),
        }
    }

    /// Checks limits, bounds and overlaps of all ranges (NVM 1.1 §3.3.2).
    fn check_ranges(&self, destination: u64, bytes: &[u8]) -> Result<(), Status> {
        let mut total = 0_u64;
        for index in 0..self.count {
            let (lba, blocks) = self.source_range(bytes, index).ok_or(Status::INVALID_FIELD)?;
            if blocks > u32::from(self.limits.range_blocks_max) {
                return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED);
            }
            total += u64::from(blocks);
            let end = lba.checked_add(blocks.into()).filter(|end| *end <= self.block_count);
            end.ok_or(Status::LBA_OUT_OF_RANGE)?;
        }
        if total > u64::from(self.limits.blocks_max) {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED);
        }
        let end = destination.checked_add(total).filter(|end| *end <= self.block_count);
        let end = end.ok_or(Status::LBA_OUT_OF_RANGE)?;
        for index in 0..self.count {
            let (lba, blocks) = self.source_range(bytes, index).ok_or(Status::INVALID_FIELD)?;
            if lba < end && destination < lba + u64::from(blocks) {
                return Err(Status::OVERLAPPING_IO_RANGE);
            }
        }
        Ok(())
    }

    /// Starts the next part of this range, or of the next one.
    fn next_part_step(&mut self, bytes: &[u8]) -> JobStep {
        self.is_writing = false;
        while self.index < self.count {
            let (lba, blocks) = self.source_range(bytes, self.index).unwrap_or((0, 0));
            let blocks = blocks << self.device_shift;
            if self.done < blocks {
                self.part = self.extent.next_part_blocks(blocks - self.done, self.buffer_len_bytes);
                let source = (lba << self.device_shift) + u64::from(self.done);
                return match self.device_copies {
                    _ if self.part == 0 => JobStep::End(Status::INTERNAL_ERROR, self.index),
                    true => self.submit_step(Operation::Copy, self.extent.lba, source),
                    false => self.submit_step(Operation::Read, source, 0),
                };
            }
            (self.index, self.done) = (self.index + 1, 0);
        }
        JobStep::OK
    }

    fn submit_step(&self, operation: Operation, lba: u64, operand: u64) -> JobStep {
        let flags = if operation == Operation::Read { RequestFlags::NONE } else { self.flags };
        let data = match operation {
            Operation::Copy => DataLocation::None,
            _ => DataLocation::Buffer { len_bytes: self.extent.len_bytes(self.part) },
        };
        JobStep::Submit(SubRequest { operation, flags, lba, operand, blocks: self.part, data })
    }

    /// First block and block count of a source range: bytes 8 to 15, and bytes 16 and 17 (0's based).
    fn source_range(&self, bytes: &[u8], index: u32) -> Option<(u64, u32)> {
        let range = bytes.get((index * self.range_bytes) as usize..)?;
        let blocks = u16::from_le_bytes(*range.get(16..)?.first_chunk()?);
        Some((u64::from_le_bytes(*range.get(8..)?.first_chunk()?), u32::from(blocks) + 1))
    }
}

/// SDLBA: dwords 10 and 11.
fn destination_lba(command: &Command) -> u64 {
    u64::from(command.cdw11()) << 32 | u64::from(command.cdw10())
}
