//! Conversion of requests to commands, within all limits of the controller.
//!
//! This is the slow path: it handles every operation, any memory and any part of a request. The fast path
//! in the parent module handles the common reads and writes.

use tenmil_base::{IoStatus, Operation, Request, RequestFlags, Segment};
use tenmil_wire::io::copy::CopyRange;
use tenmil_wire::io::dataset::DatasetRange;
use tenmil_wire::{Command, IoOpcode};

use super::view::NamespaceView;
use crate::data_pointer::{BuiltDataPointer, DataPointerError, SegmentListCursor};
use crate::queue_pair::DataPointers;

/// Builds commands for one namespace.
#[derive(Debug)]
pub(super) struct CommandBuilder<L> {
    pub(super) view: NamespaceView,
    pub(super) lists: L,
    /// Maximum blocks of a command that transfers data.
    transfer_blocks_max: u32,
}

/// NLB has sixteen bits and is 0's based (NVM 1.1 §3.3.4).
const NLB_MAX: u32 = 1 << 16;
/// FUA and LR of CDW12 (NVM 1.1 §3.3.4).
const FUA: u32 = 1 << 30;
const LIMITED_RETRY: u32 = 1 << 31;
/// DEAC of CDW12 (NVM 1.1 §3.3.8).
const DEALLOCATE: u32 = 1 << 25;
/// PRINFO of CDW12 (NVM 1.1 §3.3.4), and PRINFOR of Copy (NVM 1.1 §3.3.2).
pub(super) const PRINFO_SHIFT: u32 = 26;
const COPY_READ_PRINFO_SHIFT: u32 = 12;
/// AD, attribute deallocate, of CDW11 (NVM 1.1 §3.3.3).
const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;

/// Range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// Flags of a request in CDW12.
#[inline]
pub(super) const fn cdw12_flags(flags: RequestFlags) -> u32 {
    let fua = if flags.has(RequestFlags::FUA) { FUA } else { 0 };
    let retry = if flags.has(RequestFlags::LIMITED_RETRY) { LIMITED_RETRY } else { 0 };
    fua | retry
}

const fn transfers_data(operation: Operation) -> bool {
    matches!(operation, Operation::Read | Operation::Write | Operation::Compare)
}

impl<L: DataPointers> CommandBuilder<L> {
    /// Creates the builder for `view`.
    pub(super) fn new(view: NamespaceView, lists: L) -> Self {
        let most = match view.transfer_bytes_max {
            0 => lists.transfer_bytes_max(),
            limit => limit.min(lists.transfer_bytes_max()),
        };
        let transfer_blocks_max = (most / view.block_bytes()).clamp(1, NLB_MAX);
        Self { view, lists, transfer_blocks_max }
    }

    /// Maximum blocks of a command that transfers data.
    pub(super) fn transfer_blocks_max(&self) -> u32 {
        self.transfer_blocks_max
    }

    /// Validates a request before any command is built for it. `segments` are those of the request, data
    /// first.
    pub(super) fn check_request(
        &self,
        request: &Request,
        segments: &[Segment],
    ) -> Result<(), IoStatus> {
        let Request { operation, blocks, .. } = *request;
        if operation == Operation::Flush {
            return Ok(());
        }
        if !self.view.support.has(operation) {
            return Err(IoStatus::INVALID_OPCODE);
        }
        let end = request.lba.checked_add(u64::from(blocks));
        if blocks == 0 || end.is_none() {
            return Err(IoStatus::INVALID_FIELD);
        }
        if transfers_data(operation) {
            let (data, metadata) = segments.split_at(usize::from(request.segment_count));
            let wanted = |bytes: u32| u64::from(blocks) * u64::from(bytes);
            let metadata_bytes = u32::from(self.view.metadata_bytes());
            if len_bytes_of(data) != wanted(self.view.block_bytes())
                || len_bytes_of(metadata) != wanted(metadata_bytes)
            {
                return Err(IoStatus::INVALID_FIELD);
            }
        }
        Ok(())
    }

    /// Next command of a request of which `done` blocks are already covered, and the number of blocks it
    /// covers. Lists are stored in the memory of slot `index`.
    pub(super) fn next_command(
        &mut self,
        index: usize,
        request: &Request,
        segments: &[Segment],
        done: u32,
    ) -> Result<((Command, L::Pointer), u32), IoStatus> {
        let stretch = self.next_range(request, done);
        let made = match request.operation {
            Operation::Flush => {
                let entry = (self.base_command(IoOpcode::Flush), L::Pointer::default());
                return Ok((entry, request.blocks));
            }
            Operation::Read => {
                self.transfer_command(index, IoOpcode::Read, request, segments, stretch)
            }
            Operation::Write => {
                self.transfer_command(index, IoOpcode::Write, request, segments, stretch)
            }
            Operation::Compare => {
                self.transfer_command(index, IoOpcode::Compare, request, segments, stretch)
            }
            Operation::Deallocate => self.deallocate_command(index, stretch),
            Operation::Copy => self.copy_command(index, request, stretch),
            Operation::WriteZeroes => Ok(without_data(self.write_zeroes_command(request, stretch))),
            Operation::Verify => {
                Ok(without_data(self.protected_command(IoOpcode::Verify, stretch)))
            }
            Operation::WriteUncorrectable => {
                Ok(without_data(self.range_command(IoOpcode::WriteUncorrectable, stretch)))
            }
            // A fused pair needs adjacent slots, which this path does not guarantee.
            Operation::CompareAndWrite => return Err(IoStatus::INVALID_OPCODE),
        };
        // The data pointer may have shortened the transfer.
        let (command, pointer) = made.map_err(DataPointerError::status)?;
        let blocks = match request.operation {
            Operation::Read | Operation::Write | Operation::Compare => {
                (command.cdw12() & 0xffff) + 1
            }
            _ => stretch.blocks,
        };
        Ok(((with_flags(command, request), pointer), blocks))
    }

    /// Next blocks of a request that one command may cover.
    fn next_range(&self, request: &Request, done: u32) -> BlockRange {
        let lba = request.lba + u64::from(done);
        let limit =
            |reported: u32, field: u32| if reported == 0 { field } else { reported.min(field) };
        let blocks_max = &self.view.blocks_max;
        let most = match request.operation {
            Operation::Read | Operation::Write | Operation::Compare => {
                self.transfer_blocks_max.min(self.blocks_to_boundary(lba))
            }
            Operation::WriteZeroes => limit(blocks_max.write_zeroes, NLB_MAX),
            Operation::Verify => limit(blocks_max.verify, NLB_MAX),
            Operation::WriteUncorrectable => limit(blocks_max.write_uncorrectable, NLB_MAX),
            Operation::Copy => limit(blocks_max.copy, NLB_MAX),
            Operation::Deallocate => limit(blocks_max.deallocate, u32::MAX),
            Operation::Flush | Operation::CompareAndWrite => u32::MAX,
        };
        BlockRange { lba, blocks: most.min(request.blocks - done) }
    }

    /// Blocks from `lba` to the next optimal boundary.
    fn blocks_to_boundary(&self, lba: u64) -> u32 {
        match u64::from(self.view.optimal_boundary_blocks) {
            0 => u32::MAX,
            boundary => u32::try_from(boundary - lba % boundary).unwrap_or(u32::MAX),
        }
    }

    /// Command that transfers data: as many blocks of the range as its data pointer can describe.
    fn transfer_command(
        &mut self,
        index: usize,
        opcode: IoOpcode,
        request: &Request,
        segments: &[Segment],
        stretch: BlockRange,
    ) -> Result<(Command, L::Pointer), DataPointerError> {
        let block_bytes = self.view.block_bytes();
        let metadata_bytes = u32::from(self.view.metadata_bytes());
        let done = stretch.lba - request.lba;
        let (data, metadata) = segments.split_at(usize::from(request.segment_count));

        let (mut blocks, mut mptr) = (stretch.blocks, 0);
        if metadata_bytes > 0 {
            let cursor = SegmentListCursor::at(metadata, done * u64::from(metadata_bytes));
            let (iova, len_bytes) =
                self.lists.metadata_address(cursor, blocks.saturating_mul(metadata_bytes))?;
            (blocks, mptr) = (len_bytes / metadata_bytes, iova);
            if blocks == 0 {
                return Err(DataPointerError::Alignment);
            }
        }
        let cursor = SegmentListCursor::at(data, done * u64::from(block_bytes));
        let BuiltDataPointer { pointer, len_bytes } =
            self.lists.build(index, cursor, blocks * block_bytes, block_bytes)?;
        let stretch = BlockRange { blocks: len_bytes / block_bytes, ..stretch };
        Ok((self.protected_command(opcode, stretch).with_mptr(mptr), pointer))
    }

    /// Dataset Management with one range, stored in the slot's memory.
    fn deallocate_command(
        &self,
        index: usize,
        stretch: BlockRange,
    ) -> Result<(Command, L::Pointer), DataPointerError> {
        let range = DatasetRange::new(stretch.lba, stretch.blocks);
        let pointer = self.lists.store_data(index, range.as_bytes())?;
        let command = self.base_command(IoOpcode::DatasetManagement);
        Ok((command.with_cdw10(0).with_cdw11(ATTRIBUTE_DEALLOCATE), pointer))
    }

    /// Copy with one source range of format 0h, stored in the slot's memory.
    fn copy_command(
        &self,
        index: usize,
        request: &Request,
        stretch: BlockRange,
    ) -> Result<(Command, L::Pointer), DataPointerError> {
        let source = request.operand.wrapping_add(stretch.lba - request.lba);
        let nlb = u16::try_from(stretch.blocks - 1).unwrap_or(u16::MAX);
        let range = CopyRange::zeroed()
            .with(|range| range.slba(source).nlb(nlb).elbt(self.reference_tag(source)));
        let pointer = self.lists.store_data(index, range.as_bytes())?;
        let prinfo = self.view.protection.prinfo();
        let cdw12 = prinfo << PRINFO_SHIFT | prinfo << COPY_READ_PRINFO_SHIFT;
        let command = self.range_command(IoOpcode::Copy, stretch).with_cdw12(cdw12);
        Ok((command.with_cdw14(self.reference_tag(stretch.lba)), pointer))
    }

    fn write_zeroes_command(&self, request: &Request, stretch: BlockRange) -> Command {
        let command = self.protected_command(IoOpcode::WriteZeroes, stretch);
        let deallocate = if request.flags.has(RequestFlags::DEALLOCATE) { DEALLOCATE } else { 0 };
        command.with_cdw12(command.cdw12() | deallocate)
    }

    /// Command with a block range and the protection information fields.
    fn protected_command(&self, opcode: IoOpcode, stretch: BlockRange) -> Command {
        let command = self.range_command(opcode, stretch);
        let prinfo = self.view.protection.prinfo() << PRINFO_SHIFT;
        let tag = self.reference_tag(stretch.lba);
        command.with_cdw12(command.cdw12() | prinfo).with_cdw14(tag)
    }

    /// Command with a block range in SLBA and NLB.
    fn range_command(&self, opcode: IoOpcode, stretch: BlockRange) -> Command {
        let mut command = self.base_command(opcode);
        command.0[5] = stretch.lba;
        command.with_cdw12(stretch.blocks - 1)
    }

    fn base_command(&self, opcode: IoOpcode) -> Command {
        Command::new(opcode.code()).with_nsid(self.view.nsid)
    }

    #[expect(clippy::cast_possible_truncation, reason = "a reference tag is the low half")]
    fn reference_tag(&self, lba: u64) -> u32 {
        if self.view.protection.reference_is_lba { lba as u32 } else { 0 }
    }
}

fn without_data<P: Default>(command: Command) -> (Command, P) {
    (command, P::default())
}

/// Sets FUA and LR in commands that have them.
fn with_flags(command: Command, request: &Request) -> Command {
    let bits = match request.operation {
        Operation::Flush | Operation::Deallocate | Operation::WriteUncorrectable => 0,
        _ => cdw12_flags(request.flags),
    };
    command.with_cdw12(command.cdw12() | bits)
}

fn len_bytes_of(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len_bytes)).sum()
}
