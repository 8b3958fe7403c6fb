//! virtio-blk: configuration space and request headers (virtio 5.2).

/// Size of the known part of configuration space, in bytes.
pub const CONFIG_BYTES: usize = 60;
/// Size of a sector in bytes, independent of the block size.
pub const SECTOR_BYTES: u32 = 512;
/// Size of a request header in bytes.
pub const HEADER_BYTES: u32 = 16;
/// Size of a discard or write-zeroes segment in bytes.
pub const STRETCH_BYTES: u32 = 16;
/// Size of the device id string in bytes.
pub const ID_BYTES: usize = 20;

/// Configuration space.
///
/// ```text
///   0    capacity : 8 | size_max : 4 | seg_max : 4 | geometry : 4 | blk_size : 4
///   24   physical block exponent : 1 | alignment : 1 | min_io : 2 | opt_io : 4
///   32   writeback : 1 | – : 1 | num_queues : 2
///   36   max_discard_sectors : 4 | max_discard_seg : 4 | discard_sector_alignment : 4
///   48   max_write_zeroes_sectors : 4 | max_write_zeroes_seg : 4 | may_unmap : 1 | – : 3
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Largest segment of a request in bytes.
    pub segment_bytes_max: u32,
    /// Largest number of data segments in a request.
    pub segments_max: u32,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// log2 of the logical blocks per physical block.
    pub physical_exponent: u8,
    /// Number of queues.
    pub queues: u16,
    /// Largest discard in sectors; zero if discard is not supported.
    pub discard_sectors_max: u32,
    /// Largest write-zeroes in sectors; zero if it is not supported.
    pub zero_sectors_max: u32,
}

impl BlkConfig {
    /// Encodes the configuration space.
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.sectors.to_le_bytes());
        put(8, &self.segment_bytes_max.to_le_bytes());
        put(12, &self.segments_max.to_le_bytes());
        put(20, &self.block_bytes.to_le_bytes());
        put(24, &[self.physical_exponent]);
        put(34, &self.queues.to_le_bytes());
        let one = |sectors_max: u32| u32::from(sectors_max > 0).to_le_bytes();
        put(36, &self.discard_sectors_max.to_le_bytes());
        put(40, &one(self.discard_sectors_max));
        put(44, &(self.block_bytes / SECTOR_BYTES).to_le_bytes());
        put(48, &self.zero_sectors_max.to_le_bytes());
        put(52, &one(self.zero_sectors_max));
        put(56, &[u8::from(self.zero_sectors_max > 0)]);
        bytes
    }
}

/// Request type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkRequestType {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush.
    Flush,
    /// Get the device id string.
    GetId,
    /// Discard.
    Discard,
    /// Write zeroes.
    WriteZeroes,
    /// Unknown type.
    Other(u32),
}

/// Request header.
///
/// ```text
///   0      4          8          16
///   | type | reserved | sector   |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRequestHeader {
    /// Request type.
    pub kind: BlkRequestType,
    /// First sector.
    pub sector: u64,
}

/// Segment of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardSegment {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// Bit 0: the blocks may be deallocated. The other bits are reserved.
    pub flags: u32,
}

/// Status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkStatus(pub u8);

impl BlkStatus {
    /// VIRTIO_BLK_S_OK.
    pub const OK: Self = Self(0);
    /// VIRTIO_BLK_S_IOERR.
    pub const ERROR: Self = Self(1);
    /// VIRTIO_BLK_S_UNSUPP.
    pub const UNSUPPORTED: Self = Self(2);
}

impl DiscardSegment {
    /// Flag of a write-zeroes segment: the blocks may be deallocated.
    pub const UNMAP: u32 = 1;

    /// Parses a segment.
    pub fn parse(bytes: [u8; STRETCH_BYTES as usize]) -> Self {
        let mut fields = crate::payload_reader::PayloadReader(&bytes);
        Self { sector: fields.u64(), sectors: fields.u32(), flags: fields.u32() }
    }
}

impl BlkRequestHeader {
    /// Parses a header.
    #[inline]
    pub fn parse(bytes: [u8; HEADER_BYTES as usize]) -> Self {
        let mut fields = crate::payload_reader::PayloadReader(&bytes);
        let kind = match fields.u32() {
            0 => BlkRequestType::Read,
            1 => BlkRequestType::Write,
            4 => BlkRequestType::Flush,
            8 => BlkRequestType::GetId,
            11 => BlkRequestType::Discard,
            13 => BlkRequestType::WriteZeroes,
            other => BlkRequestType::Other(other),
        };
        let _ = fields.u32();
        Self { kind, sector: fields.u64() }
    }
}
