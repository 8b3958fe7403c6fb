//! Snapshot as a byte stream, complete or as the difference from another snapshot; drawn in
//! docs/developer/volume-format.md.
//!
//! ```text
//!   | StreamHead | StreamRecord, data | StreamRecord | … | StreamRecord: the end |
//! ```
//!
//! [`StreamEncoder`] creates the framing of the data. [`StreamParser`] requests bytes in the sizes it needs and
//! trusts none of them. It never needs more at once than the maximum size of a record.

mod error;
mod parser;

use tenmil_crc::{Crc32c, crc32c};

pub use self::error::{StreamError, StreamErrorKind};
pub use self::parser::{StreamEvent, StreamParser};
use crate::format::{BLOCK_BYTES, decode_name};
use crate::on_disk_layout::{Layout, layout};

layout! {
    /// Head of a stream.
    pub struct StreamHead[384] {
        /// CRC-32C of the rest of the head.
        checksum: u32,
        /// [`VERSION`].
        version: u32,
        /// [`MAGIC`].
        magic: [u8; 8],
        /// Incompatible feature bits: a receiver that does not know one of them must reject the stream.
        incompatible: u64,
        /// UUID of the source pool.
        store: u128,
        /// UUID of the snapshot.
        uuid: u128,
        /// UUID of the base snapshot; zero for a complete stream.
        base: u128,
        /// Number of blocks of the snapshot.
        blocks: u64,
        /// Cluster size in blocks, as a power of two.
        unit_shift: u32,
        /// Bit 0: the data have checksums in the source pool.
        flags: u32,
        /// Name of the snapshot, UTF-8, padded with zeroes.
        name: [u8; 128],
        /// Name of the base snapshot, in the same form.
        base_name: [u8; 128],
        /// Zero.
        reserved: [u8; 40],
    }
}

layout! {
    /// Record before data, for a hole, or for the end of the stream.
    pub struct StreamRecord[32] {
        /// CRC-32C of the rest of the record, and of the data after it.
        checksum: u32,
        /// 1: data, 2: a hole, 3: the end.
        kind: u32,
        /// Number of records before it.
        sequence: u64,
        /// First block of the snapshot; at the end, the number of data blocks.
        block: u64,
        /// Number of blocks; at the end, CRC-32C of the checksums of the head and of all records.
        blocks: u64,
    }
}

/// Magic number of a stream, at byte 8.
pub const MAGIC: [u8; 8] = *b"tenmilST";
/// Version of the stream format.
pub const VERSION: u32 = 1;
/// Maximum number of data blocks after one record.
pub const DATA_BLOCKS_MAX: u64 = 256;

/// Bit of [`StreamHead::flags`] for a snapshot with checksums.
const CHECKSUMS: u32 = 1;

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    Data = 1,
    Hole = 2,
    End = 3,
}

/// Contents of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// UUID of the source pool.
    pub store: u128,
    /// UUID of the snapshot.
    pub uuid: u128,
    /// Its name.
    pub name: String,
    /// Its number of blocks.
    pub blocks: u64,
    /// Blocks per cluster.
    pub unit: u64,
    /// Whether its data have checksums in the source pool.
    pub has_checksums: bool,
    /// UUID and name of the base snapshot; `None` for a complete stream.
    pub base: Option<(u128, String)>,
}

/// Encoder of a stream.
#[derive(Debug)]
pub struct StreamEncoder {
    records: u64,
    data_blocks: u64,
    sums: Crc32c,
}

impl RecordKind {
    fn from_code(code: u32) -> Option<Self> {
        [Self::Data, Self::Hole, Self::End].into_iter().find(|kind| *kind as u32 == code)
    }
}

impl StreamInfo {
    fn from_head(head: &StreamHead) -> Self {
        let base = (head.base != 0).then(|| (head.base, decode_name(&head.base_name)));
        Self {
            store: head.store,
            uuid: head.uuid,
            name: decode_name(&head.name),
            blocks: head.blocks,
            unit: 1 << head.unit_shift.min(u64::BITS - 1),
            has_checksums: head.flags & CHECKSUMS != 0,
            base,
        }
    }

    fn to_head(&self) -> StreamHead {
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

impl StreamEncoder {
    /// Starts a stream. Returns the encoder and the bytes of the head.
    pub fn start_with_head(contents: &StreamInfo) -> (Self, Vec<u8>) {
        let mut bytes = vec![0; StreamHead::BYTES];
        contents.to_head().encode(&mut bytes);
        let checksum = head_checksum(&bytes);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        let mut sums = Crc32c::new();
        sums.update(&checksum.to_le_bytes());
        (Self { records: 0, data_blocks: 0, sums }, bytes)
    }

    /// Record before these data, at most [`DATA_BLOCKS_MAX`] blocks that start at `block`.
    pub fn data_record(&mut self, block: u64, data: &[u8]) -> [u8; StreamRecord::BYTES] {
        let blocks = (data.len() / BLOCK_BYTES) as u64;
        self.data_blocks += blocks;
        self.encode_record(RecordKind::Data, block, blocks, data)
    }

    /// Record for blocks that read as zeroes.
    pub fn hole_record(&mut self, block: u64, blocks: u64) -> [u8; StreamRecord::BYTES] {
        self.encode_record(RecordKind::Hole, block, blocks, &[])
    }

    /// Record at the end of the stream.
    pub fn end_record(mut self) -> [u8; StreamRecord::BYTES] {
        let sums = u64::from(self.sums.value());
        self.encode_record(RecordKind::End, self.data_blocks, sums, &[])
    }

    fn encode_record(
        &mut self,
        kind: RecordKind,
        block: u64,
        blocks: u64,
        data: &[u8],
    ) -> [u8; StreamRecord::BYTES] {
        let sequence = self.records;
        let record = StreamRecord { checksum: 0, kind: kind as u32, sequence, block, blocks };
        let mut bytes = [0; StreamRecord::BYTES];
        record.encode(&mut bytes);
        let checksum = record_checksum(&bytes, data);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        self.records += 1;
        self.sums.update(&checksum.to_le_bytes());
        bytes
    }
}

/// Corrects the checksums of the head and of all records, as far as the records can be followed.
pub(crate) fn fix_checksums(stream: &mut [u8]) {
    let Some((head, mut rest)) = stream.split_at_mut_checked(StreamHead::BYTES) else { return };
    let sum = head_checksum(head);
    head[..4].copy_from_slice(&sum.to_le_bytes());
    while let Some((record, behind)) = rest.split_at_mut_checked(StreamRecord::BYTES) {
        let StreamRecord { kind, blocks, .. } = StreamRecord::decode(record);
        let has_data = RecordKind::from_code(kind) == Some(RecordKind::Data);
        let blocks = if has_data { blocks.min(DATA_BLOCKS_MAX) } else { 0 };
        let len = usize::try_from(blocks).unwrap_or(0) * BLOCK_BYTES;
        let Some((data, behind)) = behind.split_at_mut_checked(len) else { return };
        let sum = record_checksum(record, data);
        record[..4].copy_from_slice(&sum.to_le_bytes());
        rest = behind;
    }
}

fn head_checksum(bytes: &[u8]) -> u32 {
    crc32c(bytes.get(size_of::<u32>()..StreamHead::BYTES).unwrap_or_default())
}

fn record_checksum(record: &[u8], data: &[u8]) -> u32 {
    let mut sum = Crc32c::new();
    sum.update(record.get(size_of::<u32>()..StreamRecord::BYTES).unwrap_or_default());
    sum.update(data);
    sum.value()
}
