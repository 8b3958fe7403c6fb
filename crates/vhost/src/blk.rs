//! A block device of virtio: its configuration space and its requests (virtio 5.2).

/// Bytes of configuration space that are known here.
pub const CONFIG_BYTES: usize = 60;
/// Sectors are counted in these, whatever blocks are.
pub const SECTOR_BYTES: u32 = 512;
/// What every request begins with.
pub const HEADER_BYTES: u32 = 16;
/// A stretch to be discarded or zeroed.
pub const STRETCH_BYTES: u32 = 16;
/// What a device is known by.
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
pub struct Config {
    /// Sectors on the device.
    pub sectors: u64,
    /// Bytes in the longest segment of a request.
    pub segment_bytes_max: u32,
    /// Segments of data in the largest request.
    pub segments_max: u32,
    /// Bytes in a logical block.
    pub block_bytes: u32,
    /// Logical blocks in a physical one, as a power of two.
    pub physical_exponent: u8,
    /// Queues.
    pub queues: u16,
    /// Sectors in the longest stretch to be discarded; zero if none can be.
    pub discard_sectors_max: u32,
    /// Sectors in the longest stretch to be zeroed; zero if none can be.
    pub zero_sectors_max: u32,
}

impl Config {
    /// Its bytes.
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

/// What a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Device to guest.
    Read,
    /// Guest to device.
    Write,
    /// What was written survives a loss of power.
    Flush,
    /// What the device is known by.
    GetId,
    /// Blocks are no longer needed.
    Discard,
    /// Blocks read as zeroes.
    WriteZeroes,
    /// Something else.
    Other(u32),
}

/// What a request begins with.
///
/// ```text
///   0      4          8          16
///   | type | reserved | sector   |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it wants.
    pub kind: Kind,
    /// Its first sector.
    pub sector: u64,
}

/// Blocks to be discarded or zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first of its sectors.
    pub sector: u64,
    /// How many.
    pub sectors: u32,
    /// Bit 0: the blocks may be deallocated. The others are reserved.
    pub flags: u32,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u8);

impl Status {
    /// Done.
    pub const OK: Self = Self(0);
    /// Not done.
    pub const ERROR: Self = Self(1);
    /// The device has no such request.
    pub const UNSUPPORTED: Self = Self(2);
}

impl Stretch {
    /// Of a stretch to be zeroed: it may be deallocated.
    pub const UNMAP: u32 = 1;

    /// Reads one.
    pub fn read(bytes: [u8; STRETCH_BYTES as usize]) -> Self {
        let mut fields = crate::bytes::Fields(&bytes);
        Self { sector: fields.u64(), sectors: fields.u32(), flags: fields.u32() }
    }
}

impl Header {
    /// Reads one.
    #[inline]
    pub fn read(bytes: [u8; HEADER_BYTES as usize]) -> Self {
        let mut fields = crate::bytes::Fields(&bytes);
        let kind = match fields.u32() {
            0 => Kind::Read,
            1 => Kind::Write,
            4 => Kind::Flush,
            8 => Kind::GetId,
            11 => Kind::Discard,
            13 => Kind::WriteZeroes,
            other => Kind::Other(other),
        };
        let _ = fields.u32();
        Self { kind, sector: fields.u64() }
    }
}
