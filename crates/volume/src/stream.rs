//! A snapshot as a stream of bytes, whole or what differs from another one; docs/volume-format.md
//! draws it.
//!
//! ```text
//!   | StreamHead | StreamRecord, data | StreamRecord | … | StreamRecord: the end |
//! ```
//!
//! [`Sender`] makes what stands around the data; [`Receiver`] is given bytes as it wants them and
//! believes none of them. It never wants more at once than a record has at most.

mod error;
mod receive;

use crc_fast::{CrcAlgorithm, Digest};

pub use self::error::{StreamError, Wrong};
pub use self::receive::{Event, Receiver};
use crate::format::{BLOCK_BYTES, unpadded};
use crate::layout::{Layout, layout};

layout! {
    /// What a stream begins with.
    pub struct StreamHead[384] {
        /// CRC-32C of all that follows in the head.
        checksum: u32,
        /// [`VERSION`].
        version: u32,
        /// [`MAGIC`].
        magic: [u8; 8],
        /// Who does not know one of these bits must not receive the stream.
        incompatible: u64,
        /// The store from which it came.
        store: u128,
        /// What the snapshot is known by.
        uuid: u128,
        /// What the snapshot is known by that it differs from; zero if nothing is left out.
        base: u128,
        /// How many blocks the snapshot has.
        blocks: u64,
        /// Blocks in its unit of allocation, as a power of two.
        unit_shift: u32,
        /// Bit 0: its data have checksums in the store from which it came.
        flags: u32,
        /// The snapshot's name, UTF-8, padded with zeroes.
        name: [u8; 128],
        /// The name of the snapshot that it differs from, in the same way.
        base_name: [u8; 128],
        /// Zero.
        reserved: [u8; 40],
    }
}

layout! {
    /// What stands before data, says that there are none, or ends the stream.
    pub struct StreamRecord[32] {
        /// CRC-32C of all that follows in the record, and of the data behind it.
        checksum: u32,
        /// 1: data, 2: a hole, 3: the end.
        kind: u32,
        /// How many records stand before it.
        sequence: u64,
        /// The first block of the snapshot; at the end, how many blocks of data there were.
        block: u64,
        /// How many blocks; at the end, CRC-32C of the checksums of the head and of all records.
        blocks: u64,
    }
}

/// Eight bytes that a stream has at its byte 8.
pub const MAGIC: [u8; 8] = *b"tenmilST";
/// The version of streams.
pub const VERSION: u32 = 1;
/// Blocks of data behind one record at most.
pub const DATA_BLOCKS_MAX: u64 = 256;

/// The bit of [`StreamHead::flags`] for a snapshot with checksums.
const CHECKSUMS: u32 = 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Data = 1,
    Hole = 2,
    End = 3,
}

/// What a stream holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The store from which it came.
    pub store: u128,
    /// What the snapshot is known by.
    pub uuid: u128,
    /// Its name.
    pub name: String,
    /// How many blocks it has.
    pub blocks: u64,
    /// Blocks in its unit of allocation.
    pub unit: u64,
    /// Whether its data have checksums in the store from which it came.
    pub has_checksums: bool,
    /// What the snapshot is known by that it differs from, and its name; `None` if nothing is left
    /// out.
    pub base: Option<(u128, String)>,
}

/// Makes a stream.
#[derive(Debug)]
pub struct Sender {
    records: u64,
    data_blocks: u64,
    sums: Digest,
}

impl Kind {
    fn from_code(code: u32) -> Option<Self> {
        [Self::Data, Self::Hole, Self::End].into_iter().find(|kind| *kind as u32 == code)
    }
}

impl Contents {
    fn of(head: &StreamHead) -> Self {
        let base = (head.base != 0).then(|| (head.base, unpadded(&head.base_name)));
        Self {
            store: head.store,
            uuid: head.uuid,
            name: unpadded(&head.name),
            blocks: head.blocks,
            unit: 1 << head.unit_shift.min(u64::BITS - 1),
            has_checksums: head.flags & CHECKSUMS != 0,
            base,
        }
    }

    fn head(&self) -> StreamHead {
        let name = |name: &str| {
            let mut bytes = [0; 128];
            let len = name.len().min(bytes.len());
            bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
            bytes
        };
        let (base, base_name) = match &self.base {
            Some((uuid, base)) => (*uuid, name(base)),
            None => (0, [0; 128]),
        };
        StreamHead {
            checksum: 0,
            version: VERSION,
            magic: MAGIC,
            incompatible: 0,
            store: self.store,
            uuid: self.uuid,
            base,
            blocks: self.blocks,
            unit_shift: self.unit.trailing_zeros(),
            flags: u32::from(self.has_checksums) * CHECKSUMS,
            name: name(&self.name),
            base_name,
            reserved: [0; 40],
        }
    }
}

impl Sender {
    /// A stream, and the bytes that it begins with.
    pub fn begin(contents: &Contents) -> (Self, Vec<u8>) {
        let mut bytes = vec![0; StreamHead::BYTES];
        contents.head().encode(&mut bytes);
        let checksum = head_sum(&bytes);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        let mut sums = digest();
        sums.update(&checksum.to_le_bytes());
        (Self { records: 0, data_blocks: 0, sums }, bytes)
    }

    /// What stands before these data, [`DATA_BLOCKS_MAX`] blocks at most, of the blocks from `block`
    /// on.
    pub fn data(&mut self, block: u64, data: &[u8]) -> [u8; StreamRecord::BYTES] {
        let blocks = (data.len() / BLOCK_BYTES) as u64;
        self.data_blocks += blocks;
        self.record(Kind::Data, block, blocks, data)
    }

    /// What says that blocks read as zeroes.
    pub fn hole(&mut self, block: u64, blocks: u64) -> [u8; StreamRecord::BYTES] {
        self.record(Kind::Hole, block, blocks, &[])
    }

    /// What the stream ends with.
    pub fn end(mut self) -> [u8; StreamRecord::BYTES] {
        let sums = self.sums.finalize();
        self.record(Kind::End, self.data_blocks, sums, &[])
    }

    fn record(
        &mut self,
        kind: Kind,
        block: u64,
        blocks: u64,
        data: &[u8],
    ) -> [u8; StreamRecord::BYTES] {
        let sequence = self.records;
        let record = StreamRecord { checksum: 0, kind: kind as u32, sequence, block, blocks };
        let mut bytes = [0; StreamRecord::BYTES];
        record.encode(&mut bytes);
        let checksum = record_sum(&bytes, data);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        self.records += 1;
        self.sums.update(&checksum.to_le_bytes());
        bytes
    }
}

/// Makes the checksums of the head and of all records right, as far as they can be followed.
pub(crate) fn reseal(stream: &mut [u8]) {
    let Some((head, mut rest)) = stream.split_at_mut_checked(StreamHead::BYTES) else { return };
    let sum = head_sum(head);
    head[..4].copy_from_slice(&sum.to_le_bytes());
    while let Some((record, behind)) = rest.split_at_mut_checked(StreamRecord::BYTES) {
        let StreamRecord { kind, blocks, .. } = StreamRecord::decode(record);
        let has_data = Kind::from_code(kind) == Some(Kind::Data);
        let blocks = if has_data { blocks.min(DATA_BLOCKS_MAX) } else { 0 };
        let len = usize::try_from(blocks).unwrap_or(0) * BLOCK_BYTES;
        let Some((data, behind)) = behind.split_at_mut_checked(len) else { return };
        let sum = record_sum(record, data);
        record[..4].copy_from_slice(&sum.to_le_bytes());
        rest = behind;
    }
}

fn digest() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

fn head_sum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes.get(size_of::<u32>()..StreamHead::BYTES).unwrap_or_default())
}

#[expect(clippy::cast_possible_truncation, reason = "a checksum of 32 bits")]
fn record_sum(record: &[u8], data: &[u8]) -> u32 {
    let mut sum = digest();
    sum.update(record.get(size_of::<u32>()..StreamRecord::BYTES).unwrap_or_default());
    sum.update(data);
    sum.finalize() as u32
}
