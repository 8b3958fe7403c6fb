//! Structures of an I/O and its completion.

use std::ffi::c_void;

use tenmil_base::{Operation, RequestFlags};

/// Device to memory.
pub const TENMIL_OP_READ: u8 = 0;
/// Memory to device.
pub const TENMIL_OP_WRITE: u8 = 1;
/// Makes every write that completed before the submission persistent. No blocks, no memory.
pub const TENMIL_OP_FLUSH: u8 = 2;
/// The blocks are not needed any more; what they read as is up to the device. No memory.
pub const TENMIL_OP_DEALLOCATE: u8 = 3;
/// The blocks read as zeroes afterwards. No memory.
pub const TENMIL_OP_WRITE_ZEROES: u8 = 4;
/// Compares memory and device; a difference completes with the class TENMIL_STATUS_CLASS_COMPARE.
pub const TENMIL_OP_COMPARE: u8 = 5;
/// Reads of the blocks fail until they are written again. No memory.
pub const TENMIL_OP_WRITE_UNCORRECTABLE: u8 = 6;
/// Checks that the blocks can be read. No memory.
pub const TENMIL_OP_VERIFY: u8 = 7;
/// Device to device, from `source_lba`. No memory.
pub const TENMIL_OP_COPY: u8 = 8;
/// Atomic compare and write. The memory holds first the expected bytes, then the new ones, each as long as
/// the blocks.
pub const TENMIL_OP_COMPARE_AND_WRITE: u8 = 9;

/// Flag of a write: at its completion the data are on stable media (force unit access).
pub const TENMIL_IO_FUA: u8 = 1;
/// Flag of write zeroes: the blocks may be deallocated, as long as they read as zeroes.
pub const TENMIL_IO_DEALLOCATE: u8 = 2;

const _: () = assert!(
    TENMIL_IO_FUA == RequestFlags::FUA.0 && TENMIL_IO_DEALLOCATE == RequestFlags::DEALLOCATE.0
);

/// Piece of the memory of an I/O.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoSegment {
    /// First byte.
    pub data: *mut c_void,
    /// Length in bytes.
    pub len: u64,
}

/// I/O to submit. Set all bytes to zero first: fields that an operation does not use must be zero.
///
/// The structure and the array of segments belong to the caller, and are read only during tenmil_submit().
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// Any number; its completion has the same. The library does not interpret it: several I/Os may have one
    /// token.
    pub token: u64,
    /// First block.
    pub lba: u64,
    /// First source block of a copy.
    pub source_lba: u64,
    /// Memory, as long as the blocks, if `segment_count` is zero: a part of a buffer of the library or of
    /// registered memory.
    pub data: *mut c_void,
    /// Memory in pieces, in order, together as long as the blocks. Each piece is a part of a buffer of the
    /// library or of registered memory.
    pub segments: *const IoSegment,
    /// Number of blocks.
    pub blocks: u32,
    /// Number of segments, or zero.
    pub segment_count: u16,
    /// Operation, TENMIL_OP_...
    pub operation: u8,
    /// Flags, TENMIL_IO_...
    pub flags: u8,
}

const _: () = assert!(size_of::<Io>() == 48, "without padding");

/// Completion of an I/O.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Token of the I/O.
    pub token: u64,
    /// Result of the operation (dword 0 of the NVMe completion); zero for most.
    pub result: u32,
    /// NVMe status field without the phase: zero for success, or status code type and status code.
    pub status: u16,
    /// Class of the status, TENMIL_STATUS_CLASS_...
    pub status_class: u16,
}

const _: () = assert!(size_of::<Completion>() == 16, "without padding");

/// Operation of its number.
#[inline]
pub(crate) fn operation_of(number: u8) -> Option<Operation> {
    // By the numbers of the constants above; a test compares them.
    Operation::ALL.get(usize::from(number)).copied()
}

/// How many times the memory of an operation holds its blocks.
#[inline]
pub(crate) const fn data_copies(operation: Operation) -> u64 {
    match operation {
        Operation::Read | Operation::Write | Operation::Compare => 1,
        Operation::CompareAndWrite => 2,
        Operation::Flush
        | Operation::Deallocate
        | Operation::WriteZeroes
        | Operation::WriteUncorrectable
        | Operation::Verify
        | Operation::Copy => 0,
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Operation;

    use super::*;

    #[test]
    fn numbers_of_operations_are_those_of_the_header() {
        for (number, operation) in [
            (TENMIL_OP_READ, Operation::Read),
            (TENMIL_OP_WRITE, Operation::Write),
            (TENMIL_OP_FLUSH, Operation::Flush),
            (TENMIL_OP_DEALLOCATE, Operation::Deallocate),
            (TENMIL_OP_WRITE_ZEROES, Operation::WriteZeroes),
            (TENMIL_OP_COMPARE, Operation::Compare),
            (TENMIL_OP_WRITE_UNCORRECTABLE, Operation::WriteUncorrectable),
            (TENMIL_OP_VERIFY, Operation::Verify),
            (TENMIL_OP_COPY, Operation::Copy),
            (TENMIL_OP_COMPARE_AND_WRITE, Operation::CompareAndWrite),
        ] {
            assert_eq!(operation_of(number), Some(operation));
        }
        assert_eq!(operation_of(10), None);
    }
}
