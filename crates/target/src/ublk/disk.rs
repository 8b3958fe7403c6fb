//! What a medium looks like as a disk of Linux, and which requests for it make sense.

use base::{Durability, Flags, Limits, Operation};
use wire::ublk::{Attributes, Descriptor, Discard, IoFlags, IoOp, Parameters, SECTOR_BYTES};

/// A disk. What the kernel asks of it is not believed.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    limits: Limits,
    is_read_only: bool,
    io_bytes_max: u32,
    /// Sectors in a block, as a power of two.
    shift: u32,
    /// What the memory of requests is aligned to, if that matters: more than the kernel's own 4 bytes.
    memory_alignment: Option<u32>,
}

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) operation: Operation,
    pub(super) flags: Flags,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Bytes that move.
    pub(super) len_bytes: u32,
}

/// Larger requests win nothing: Linux itself seldom makes them.
const IO_BYTES_MAX: u32 = 512 << 10;
/// Linux asks for whole pages of this size, and its disks have no larger blocks.
const PAGE_BYTES: u32 = 4096;
/// What the memory of requests is aligned to if nothing is said (`blk_set_default_limits`).
const KERNEL_ALIGNMENT: u32 = 4;
/// As much is deallocated at once.
const DISCARD_BYTES_MAX: u32 = 64 << 20;

/// Error numbers of `asm-generic/errno-base.h` and `errno.h`, as the kernel's block layer tells them
/// apart (`blk_errors`).
pub(super) const EIO: i32 = 5;
const EINVAL: i32 = 22;
const EROFS: i32 = 30;
const EOPNOTSUPP: i32 = 95;

impl Disk {
    /// A medium of these limits as a disk.
    ///
    /// # Errors
    ///
    /// If it cannot be one.
    pub(super) fn new(limits: Limits, is_read_only: bool) -> Result<Self, String> {
        let Limits { block_size, metadata_size, block_count, .. } = limits;
        if metadata_size != 0 {
            return Err(format!(
                "its blocks have {metadata_size} bytes of metadata, expected none"
            ));
        }
        if !(SECTOR_BYTES..=PAGE_BYTES).contains(&block_size) || !block_size.is_power_of_two() {
            return Err(format!(
                "its blocks have {block_size} bytes, expected a power of two from {SECTOR_BYTES} to \
                 {PAGE_BYTES}"
            ));
        }
        if block_count == 0 {
            return Err("it has no blocks, expected some".to_owned());
        }
        let by_blocks = limits.request_blocks_max.saturating_mul(block_size);
        let io_bytes_max = by_blocks.min(IO_BYTES_MAX) / PAGE_BYTES * PAGE_BYTES;
        if io_bytes_max == 0 {
            return Err(format!(
                "its requests have {by_blocks} bytes at most, expected {PAGE_BYTES} or more"
            ));
        }
        let shift = (block_size / SECTOR_BYTES).ilog2();
        Ok(Self { limits, is_read_only, io_bytes_max, shift, memory_alignment: None })
    }

    /// The same, whose requests have memory that is aligned so: a power of two, less than a page.
    #[must_use]
    pub(super) fn aligned(self, alignment: u32) -> Self {
        let is_more = alignment > KERNEL_ALIGNMENT && alignment < PAGE_BYTES;
        Self { memory_alignment: is_more.then_some(alignment), ..self }
    }

    /// The most that a request moves: whole pages.
    pub(super) fn io_bytes_max(&self) -> u32 {
        self.io_bytes_max
    }

    pub(super) fn sectors(&self) -> u64 {
        self.limits.block_count << self.shift
    }

    /// Whether a process that takes over finds what the one before has left.
    pub(super) fn outlives_process(&self) -> bool {
        self.limits.durability != Durability::None
    }

    /// What the kernel is told. A medium without a cache has nothing to flush, and where nothing
    /// survives, no flush would help.
    pub(super) fn parameters(&self) -> Parameters {
        let sectors_max = self.io_bytes_max / SECTOR_BYTES;
        let block_shift = self.limits.block_size.trailing_zeros();
        let shift = |shift: u32| u8::try_from(shift).unwrap_or(u8::MAX);
        let mut attributes = Attributes::NONE;
        if self.is_read_only {
            attributes = attributes.and(Attributes::READ_ONLY);
        }
        if self.limits.durability == Durability::VolatileCache && self.has(Operation::Flush) {
            attributes = attributes.and(Attributes::VOLATILE_CACHE).and(Attributes::FUA);
        }
        let may = |operation| !self.is_read_only && self.has(operation);
        let most = |operation, sectors| if may(operation) { sectors } else { 0 };
        let discard = Discard {
            granularity: self.limits.block_size,
            discard_sectors_max: most(Operation::Deallocate, DISCARD_BYTES_MAX / SECTOR_BYTES),
            zero_sectors_max: most(Operation::WriteZeroes, sectors_max),
        };
        let has_any = discard.discard_sectors_max > 0 || discard.zero_sectors_max > 0;
        Parameters {
            attributes,
            block_shift: shift(block_shift),
            physical_shift: shift(block_shift.max(PAGE_BYTES.trailing_zeros())),
            sectors_max,
            sectors: self.sectors(),
            discard: has_any.then_some(discard),
            memory_alignment: self.memory_alignment,
        }
    }

    /// What a request comes to, or the error number that it is answered with.
    #[inline]
    pub(super) fn admit(&self, asked: &Descriptor) -> Result<Ask, i32> {
        let (operation, moves) = match asked.op {
            IoOp::Read => (Operation::Read, true),
            IoOp::Write => (Operation::Write, true),
            IoOp::Flush => (Operation::Flush, false),
            IoOp::Discard => (Operation::Deallocate, false),
            IoOp::WriteZeroes => (Operation::WriteZeroes, false),
            IoOp::Other(_) => return Err(EOPNOTSUPP),
        };
        if !self.has(operation) {
            return Err(EOPNOTSUPP);
        }
        if operation == Operation::Flush {
            let flags = Flags::NONE;
            return Ok(Ask { operation, flags, lba: 0, blocks: 0, len_bytes: 0 });
        }
        if self.is_read_only && operation != Operation::Read {
            return Err(EROFS);
        }
        let Descriptor { sectors, first_sector, .. } = *asked;
        let end = first_sector.checked_add(u64::from(sectors)).ok_or(EINVAL)?;
        let mask = (1 << self.shift) - 1;
        let is_whole = (first_sector | u64::from(sectors)) & mask == 0;
        if sectors == 0 || end > self.sectors() || !is_whole {
            return Err(EINVAL);
        }
        if moves && sectors > self.io_bytes_max / SECTOR_BYTES {
            return Err(EINVAL);
        }
        Ok(Ask {
            operation,
            flags: flags(asked, operation),
            lba: first_sector >> self.shift,
            blocks: sectors >> self.shift,
            len_bytes: if moves { sectors * SECTOR_BYTES } else { 0 },
        })
    }

    fn has(&self, operation: Operation) -> bool {
        self.limits.support.has(operation)
    }
}

#[inline]
fn flags(asked: &Descriptor, operation: Operation) -> Flags {
    let mut flags = Flags::NONE;
    if asked.flags.has(IoFlags::FUA) {
        flags = flags.and(Flags::FUA);
    }
    if operation == Operation::WriteZeroes && !asked.flags.has(IoFlags::NO_UNMAP) {
        flags = flags.and(Flags::DEALLOCATE);
    }
    flags
}
