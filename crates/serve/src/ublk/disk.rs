//! Block device parameters as the Linux block layer sees them, and validation of requests.

use tenmil_base::{Durability, Error, Limits, Operation, RequestFlags};
use tenmil_wire::ublk::{
    Discard, DiskAttributes, IoDescriptor, IoFlags, IoOp, Parameters, SECTOR_BYTES,
};

/// Disk parameters. Requests of the kernel are validated against them.
#[derive(Clone, Debug)]
pub(super) struct UblkDisk {
    limits: Limits,
    is_read_only: bool,
    io_bytes_max: u32,
    /// log2 of the sectors per block.
    shift: u32,
    /// Required alignment of request memory, if it exceeds the kernel's default of 4 bytes.
    memory_alignment: Option<u32>,
}

/// Validated request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskRequest {
    pub(super) operation: Operation,
    pub(super) flags: RequestFlags,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Bytes of data.
    pub(super) len_bytes: u32,
}

/// Largest request. Linux rarely issues larger ones, and they gain nothing.
const IO_BYTES_MAX: u32 = 512 << 10;
/// Page size, to which requests are rounded; also the largest block size of a Linux disk.
const PAGE_BYTES: u32 = 4096;
/// Default alignment of request memory (`blk_set_default_limits`).
const KERNEL_ALIGNMENT: u32 = 4;
/// Largest discard, in bytes.
const DISCARD_BYTES_MAX: u32 = 64 << 20;

/// Error numbers of `asm-generic/errno-base.h` and `errno.h` that the block layer distinguishes
/// (`blk_errors`).
pub(super) const EIO: i32 = 5;
const EINVAL: i32 = 22;
const EROFS: i32 = 30;
const EOPNOTSUPP: i32 = 95;

impl UblkDisk {
    /// Creates disk parameters from device limits.
    ///
    /// # Errors
    ///
    /// If Linux cannot use such a device.
    pub(super) fn new(limits: Limits, is_read_only: bool) -> Result<Self, Error> {
        let Limits { block_size, metadata_size, block_count, .. } = limits;
        if metadata_size != 0 {
            return Err(Error::environment(format!(
                "its blocks have {metadata_size} bytes of metadata, expected none"
            )));
        }
        if !(SECTOR_BYTES..=PAGE_BYTES).contains(&block_size) || !block_size.is_power_of_two() {
            return Err(Error::environment(format!(
                "its blocks have {block_size} bytes, expected a power of two from {SECTOR_BYTES} to \
                 {PAGE_BYTES}"
            )));
        }
        if block_count == 0 {
            return Err(Error::environment("it has no blocks, expected some".to_owned()));
        }
        let by_blocks = limits.request_blocks_max.saturating_mul(block_size);
        let io_bytes_max = by_blocks.min(IO_BYTES_MAX) / PAGE_BYTES * PAGE_BYTES;
        if io_bytes_max == 0 {
            return Err(Error::environment(format!(
                "its requests have {by_blocks} bytes at most, expected {PAGE_BYTES} or more"
            )));
        }
        let shift = (block_size / SECTOR_BYTES).ilog2();
        Ok(Self { limits, is_read_only, io_bytes_max, shift, memory_alignment: None })
    }

    /// Sets the alignment of request memory: a power of two below the page size.
    #[must_use]
    pub(super) fn with_alignment(self, alignment: u32) -> Self {
        let is_more = alignment > KERNEL_ALIGNMENT && alignment < PAGE_BYTES;
        Self { memory_alignment: is_more.then_some(alignment), ..self }
    }

    /// Largest request in bytes, a multiple of the page size.
    pub(super) fn io_bytes_max(&self) -> u32 {
        self.io_bytes_max
    }

    pub(super) fn sector_count(&self) -> u64 {
        self.limits.block_count << self.shift
    }

    /// Whether a process that takes over finds the data of its predecessor.
    pub(super) fn is_persistent_across_processes(&self) -> bool {
        self.limits.durability != Durability::NonPersistent
    }

    /// Parameters for the kernel. Flush is not advertised for a device without a write cache, nor
    /// for volatile storage, where a flush would not help.
    pub(super) fn parameters(&self) -> Parameters {
        let sectors_max = self.io_bytes_max / SECTOR_BYTES;
        let block_shift = self.limits.block_size.trailing_zeros();
        let shift = |shift: u32| u8::try_from(shift).unwrap_or(u8::MAX);
        let mut attributes = DiskAttributes::NONE;
        if self.is_read_only {
            attributes = attributes.union(DiskAttributes::READ_ONLY);
        }
        if self.limits.durability == Durability::VolatileCache && self.supports(Operation::Flush) {
            attributes =
                attributes.union(DiskAttributes::VOLATILE_CACHE).union(DiskAttributes::FUA);
        }
        let may = |operation| !self.is_read_only && self.supports(operation);
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
            sectors: self.sector_count(),
            discard: has_any.then_some(discard),
            memory_alignment: self.memory_alignment,
        }
    }

    /// Validates a request. The error is the errno to complete it with.
    #[inline]
    pub(super) fn validate_request(&self, descriptor: &IoDescriptor) -> Result<DiskRequest, i32> {
        let (operation, moves) = match descriptor.op {
            IoOp::Read => (Operation::Read, true),
            IoOp::Write => (Operation::Write, true),
            IoOp::Flush => (Operation::Flush, false),
            IoOp::Discard => (Operation::Deallocate, false),
            IoOp::WriteZeroes => (Operation::WriteZeroes, false),
            IoOp::Other(_) => return Err(EOPNOTSUPP),
        };
        if !self.supports(operation) {
            return Err(EOPNOTSUPP);
        }
        if operation == Operation::Flush {
            let flags = RequestFlags::NONE;
            return Ok(DiskRequest { operation, flags, lba: 0, blocks: 0, len_bytes: 0 });
        }
        if self.is_read_only && operation != Operation::Read {
            return Err(EROFS);
        }
        let IoDescriptor { sectors, first_sector, .. } = *descriptor;
        let end = first_sector.checked_add(u64::from(sectors)).ok_or(EINVAL)?;
        let mask = (1 << self.shift) - 1;
        let is_whole = (first_sector | u64::from(sectors)) & mask == 0;
        if sectors == 0 || end > self.sector_count() || !is_whole {
            return Err(EINVAL);
        }
        if moves && sectors > self.io_bytes_max / SECTOR_BYTES {
            return Err(EINVAL);
        }
        Ok(DiskRequest {
            operation,
            flags: request_flags(descriptor, operation),
            lba: first_sector >> self.shift,
            blocks: sectors >> self.shift,
            len_bytes: if moves { sectors * SECTOR_BYTES } else { 0 },
        })
    }

    fn supports(&self, operation: Operation) -> bool {
        self.limits.operations.has(operation)
    }
}

#[inline]
fn request_flags(descriptor: &IoDescriptor, operation: Operation) -> RequestFlags {
    let mut flags = RequestFlags::NONE;
    if descriptor.flags.has(IoFlags::FUA) {
        flags = flags.union(RequestFlags::FUA);
    }
    if operation == Operation::WriteZeroes && !descriptor.flags.has(IoFlags::NO_UNMAP) {
        flags = flags.union(RequestFlags::DEALLOCATE);
    }
    flags
}
