//! Queue commands on `/dev/ublkcN`, and request descriptors.
//!
//! For each tag, a queue has one command outstanding in the kernel, which completes when a request
//! with that tag arrives; the request descriptor is in a mapped table. The next command returns the
//! result of the request and fetches another one.

use super::{DEPTH_MAX, READ_WRITE, bytes_at, ioctl_code, put_bytes};

/// ```text
///   0       2     4        8         16
///   | queue | tag | result | address |
/// ```
///
/// `struct ublksrv_io_cmd`, in the command area of a 64-byte submission entry. With user copy there
/// is no address; with zero copy the field is the index of the registered buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCommand {
    /// Queue number.
    pub queue: u16,
    /// Request tag.
    pub tag: u16,
    /// Result: bytes transferred, or a negative error number.
    pub result: i32,
    /// Index of the registered buffer, for [`QueueOp::RegisterBuffer`] and
    /// [`QueueOp::UnregisterBuffer`]; else zero.
    pub buffer: u16,
}

/// Queue operation (`UBLK_U_IO_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOp {
    /// Fetches the first request with this tag.
    Fetch,
    /// Commits the result of a request and fetches the next one.
    CommitAndFetch,
    /// Registers the data of the request as a buffer of the ring on which this is submitted (Linux
    /// 6.15).
    RegisterBuffer,
    /// Unregisters the buffer. The request ends after this and its commit.
    UnregisterBuffer,
}

/// Result of a fetch: a request is available (`UBLK_IO_RES_OK`).
pub const RES_OK: i32 = 0;
/// Result of a fetch: no further request will arrive (`UBLK_IO_RES_ABORT`, `-ENODEV`).
pub const RES_ABORT: i32 = -19;

impl QueueOp {
    /// Operation code.
    pub const fn code(self) -> u32 {
        let number = match self {
            Self::Fetch => 0x20,
            Self::CommitAndFetch => 0x21,
            Self::RegisterBuffer => 0x23,
            Self::UnregisterBuffer => 0x24,
        };
        ioctl_code(READ_WRITE, QueueCommand::SIZE, number)
    }
}

impl QueueCommand {
    /// Length in bytes.
    pub const BYTES: usize = Self::SIZE as usize;
    const SIZE: u16 = 16;

    /// Encodes to bytes.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put_bytes(&mut bytes, 0, &self.queue.to_ne_bytes());
        put_bytes(&mut bytes, 2, &self.tag.to_ne_bytes());
        put_bytes(&mut bytes, 4, &self.result.to_ne_bytes());
        put_bytes(&mut bytes, 8, &u64::from(self.buffer).to_ne_bytes());
        bytes
    }
}

/// ```text
///   0                    4         8              16        24
///   | op 0..8 · flags 8… | sectors | first sector | address |
/// ```
///
/// `struct ublksrv_io_desc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoDescriptor {
    /// Operation.
    pub op: IoOp,
    /// Flags.
    pub flags: IoFlags,
    /// Number of sectors.
    pub sectors: u32,
    /// First sector.
    pub first_sector: u64,
}

/// Request operation (`UBLK_IO_OP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Disk to request.
    Read,
    /// Request to disk.
    Write,
    /// Makes earlier writes persistent.
    Flush,
    /// Deallocates the sectors.
    Discard,
    /// Zeroes the sectors.
    WriteZeroes,
    /// Another operation, by number.
    Other(u8),
}

impl IoOp {
    const fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Flush,
            3 => Self::Discard,
            5 => Self::WriteZeroes,
            number => Self::Other(number),
        }
    }

    /// Operation number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Flush => 2,
            Self::Discard => 3,
            Self::WriteZeroes => 5,
            Self::Other(number) => number,
        }
    }
}

/// Request flags (`UBLK_IO_F_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoFlags(pub u32);

impl IoFlags {
    /// No flags.
    pub const NONE: Self = Self(0);
    /// Force unit access: persistent at completion.
    pub const FUA: Self = Self(1 << 13);
    /// Zeroed sectors stay allocated.
    pub const NO_UNMAP: Self = Self(1 << 15);

    /// Whether all flags of `other` are set.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl IoDescriptor {
    /// Length in bytes.
    pub const BYTES: usize = 24;

    /// Decodes bytes.
    #[inline]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = u32::from_ne_bytes(bytes_at(bytes, 0));
        Self {
            op: IoOp::from_number((word & 0xff) as u8),
            flags: IoFlags(word & !0xff),
            sectors: u32::from_ne_bytes(bytes_at(bytes, 4)),
            first_sector: u64::from_ne_bytes(bytes_at(bytes, 8)),
        }
    }

    /// Encodes to bytes, as the kernel does.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put_bytes(&mut bytes, 0, &(u32::from(self.op.number()) | self.flags.0).to_ne_bytes());
        put_bytes(&mut bytes, 4, &self.sectors.to_ne_bytes());
        put_bytes(&mut bytes, 8, &self.first_sector.to_ne_bytes());
        bytes
    }
}

/// Offsets of the descriptor tables (`UBLKSRV_CMD_BUF_OFFSET`) and of request data
/// (`UBLKSRV_IO_BUF_OFFSET`).
const CMD_BUF_OFFSET: u64 = 0;
const IO_BUF_OFFSET: u64 = 0x8000_0000;
/// Bits of an offset in request data, and of a tag (`UBLK_IO_BUF_BITS`, `UBLK_TAG_BITS`).
const BYTE_BITS: u32 = 25;
const TAG_BITS: u32 = 16;
/// Maximum length of a request, so that every offset in it is representable.
pub const IO_BYTES_MAX: u32 = 1 << BYTE_BITS;

/// Offset of a queue's table in `/dev/ublkcN`: each has space for the maximum depth.
pub fn descriptor_table_offset(queue: u16, page_bytes: usize) -> u64 {
    CMD_BUF_OFFSET + u64::from(queue) * descriptor_table_bytes(DEPTH_MAX, page_bytes) as u64
}

/// Length of the table of a queue of this depth, in whole pages. The kernel maps all of it or
/// nothing.
pub fn descriptor_table_bytes(depth: u16, page_bytes: usize) -> usize {
    (usize::from(depth) * IoDescriptor::BYTES).next_multiple_of(page_bytes)
}

/// Offset of byte `byte` of a request's data in `/dev/ublkcN`.
#[inline]
pub fn request_data_offset(queue: u16, tag: u16, byte: u32) -> u64 {
    let queue = u64::from(queue) << (BYTE_BITS + TAG_BITS);
    IO_BUF_OFFSET + (queue | u64::from(tag) << BYTE_BITS | u64::from(byte & (IO_BYTES_MAX - 1)))
}
