//! What a queue is told on `/dev/ublkcN`, and what the kernel asks it for.
//!
//! For each of its tags a queue has a command with the kernel, which ends when there is a request
//! with that tag; what it is lies in a table that the kernel shares. The next command hands in how
//! the request has ended and asks for another.

use super::{DEPTH_MAX, READ_WRITE, code, put, take};

/// ```text
///   0       2     4        8         16
///   | queue | tag | result | address |
/// ```
///
/// `struct ublksrv_io_cmd`, in the command area of a submission entry of 64 bytes. With user copy
/// there is no address; where the data of a request are lent, it is the place of their buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCommand {
    /// Which queue.
    pub queue: u16,
    /// Which request.
    pub tag: u16,
    /// How it has ended: bytes moved, or an error number below zero.
    pub result: i32,
    /// Which buffer of the ring its data are, for [`QueueOp::Lend`] and [`QueueOp::TakeBack`]; else
    /// zero.
    pub buffer: u16,
}

/// What is told (`UBLK_U_IO_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOp {
    /// A request with this tag is waited for.
    Fetch,
    /// The request has ended, and the next one is waited for.
    CommitAndFetch,
    /// The data of the request become a buffer of the ring that this is said on (Linux 6.15).
    Lend,
    /// The buffer is one no more. The request ends once that is said, and it was committed.
    TakeBack,
}

/// A command ended so: there is a request (`UBLK_IO_RES_OK`).
pub const ARRIVED: i32 = 0;
/// A command ended so: there will be none any more (`UBLK_IO_RES_ABORT`, `-ENODEV`).
pub const ABORTED: i32 = -19;

impl QueueOp {
    /// Its code.
    pub const fn code(self) -> u32 {
        let number = match self {
            Self::Fetch => 0x20,
            Self::CommitAndFetch => 0x21,
            Self::Lend => 0x23,
            Self::TakeBack => 0x24,
        };
        code(READ_WRITE, QueueCommand::SIZE, number)
    }
}

impl QueueCommand {
    /// How long it is.
    pub const BYTES: usize = Self::SIZE as usize;
    const SIZE: u16 = 16;

    /// It as bytes.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &self.queue.to_ne_bytes());
        put(&mut bytes, 2, &self.tag.to_ne_bytes());
        put(&mut bytes, 4, &self.result.to_ne_bytes());
        put(&mut bytes, 8, &u64::from(self.buffer).to_ne_bytes());
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
pub struct Descriptor {
    /// What is asked for.
    pub op: IoOp,
    /// How.
    pub flags: IoFlags,
    /// How many sectors.
    pub sectors: u32,
    /// The first of them.
    pub first_sector: u64,
}

/// What is asked for (`UBLK_IO_OP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Disk to request.
    Read,
    /// Request to disk.
    Write,
    /// What was written before is to survive a loss of power.
    Flush,
    /// The sectors are not needed.
    Discard,
    /// The sectors are to read as zeroes.
    WriteZeroes,
    /// Something else, by its number.
    Other(u8),
}

impl IoOp {
    const fn of(number: u8) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Flush,
            3 => Self::Discard,
            5 => Self::WriteZeroes,
            number => Self::Other(number),
        }
    }

    /// Its number.
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

/// How it is asked for (`UBLK_IO_F_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoFlags(pub u32);

impl IoFlags {
    /// Nothing special.
    pub const NONE: Self = Self(0);
    /// It is to survive a loss of power once it is answered.
    pub const FUA: Self = Self(1 << 13);
    /// Zeroed sectors are to keep their room.
    pub const NO_UNMAP: Self = Self(1 << 15);

    /// Whether all of `other` are in it.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl Descriptor {
    /// How long it is.
    pub const BYTES: usize = 24;

    /// What `bytes` say.
    #[inline]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = u32::from_ne_bytes(take(bytes, 0));
        Self {
            op: IoOp::of((word & 0xff) as u8),
            flags: IoFlags(word & !0xff),
            sectors: u32::from_ne_bytes(take(bytes, 4)),
            first_sector: u64::from_ne_bytes(take(bytes, 8)),
        }
    }

    /// It as bytes: what a kernel writes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &(u32::from(self.op.number()) | self.flags.0).to_ne_bytes());
        put(&mut bytes, 4, &self.sectors.to_ne_bytes());
        put(&mut bytes, 8, &self.first_sector.to_ne_bytes());
        bytes
    }
}

/// Where the tables of descriptors begin (`UBLKSRV_CMD_BUF_OFFSET`), and the data of requests
/// (`UBLKSRV_IO_BUF_OFFSET`).
const TABLES: u64 = 0;
const DATA: u64 = 0x8000_0000;
/// Bits of a place in the data of a request, and of a tag (`UBLK_IO_BUF_BITS`, `UBLK_TAG_BITS`).
const BYTE_BITS: u32 = 25;
const TAG_BITS: u32 = 16;
/// The most that a request may move, so that a place in it can be told.
pub const IO_BYTES_MAX: u32 = 1 << BYTE_BITS;

/// Where in `/dev/ublkcN` the table of a queue lies: each has room for the deepest.
pub fn table_at(queue: u16, page_bytes: usize) -> u64 {
    TABLES + u64::from(queue) * table_bytes(DEPTH_MAX, page_bytes) as u64
}

/// How long the table of a queue is that has so many requests: whole pages. The kernel maps all of it
/// or nothing.
pub fn table_bytes(depth: u16, page_bytes: usize) -> usize {
    (usize::from(depth) * Descriptor::BYTES).next_multiple_of(page_bytes)
}

/// Where in `/dev/ublkcN` byte `byte` of the data of a request lies.
#[inline]
pub fn data_at(queue: u16, tag: u16, byte: u32) -> u64 {
    let queue = u64::from(queue) << (BYTE_BITS + TAG_BITS);
    DATA + (queue | u64::from(tag) << BYTE_BITS | u64::from(byte & (IO_BYTES_MAX - 1)))
}
