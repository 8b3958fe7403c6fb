//! On-disk format of a pool; docs/developer/volume-format.md has the drawings.
//!
//! ```text
//!   pool:   0    1    2                                            n-2    n-1     blocks of 4 KiB
//!           | S0 | S1 | metadata and data, at any free block       | S0' | S1' |  metadata and data on
//!           |<---------------------- the first device ---------------------->|  others, if there are
//!
//!   block:  0                64                                              4096
//!           | Header         | Superblock and devices, VolumeBody, …, Records |
//! ```
//!
//! A superblock of an even generation is in S0 and S0', one of an odd generation in S1 and S1'. The
//! previous one is therefore intact while a new one is written, and a single destroyed block loses
//! neither.

mod page;

use crate::device_table::DataArea;
use crate::error::CorruptionKind;
use crate::on_disk_layout::{Layout, layout};
pub(crate) use page::update_checksum;
pub use page::{Page, PageBody, decode_owner, decode_superblock};

layout! {
    /// Header of every metadata block.
    pub struct Header[64] {
        /// CRC-32C of everything that follows, to the end of the block.
        checksum: u32,
        /// Kind of the block: a [`BlockKind`].
        kind: u8,
        /// Height of a node above its leaves; zero for other kinds.
        level: u8,
        /// Number of records of a node; zero for other kinds.
        count: u16,
        /// [`MAGIC`].
        magic: [u8; 8],
        /// UUID of the pool.
        store: u128,
        /// Address of the block.
        address: u64,
        /// Generation of the transaction that wrote it.
        generation: u64,
        /// Volume for which it was written; zero if it belongs to the pool.
        owner: u64,
        /// Zero.
        reserved: u64,
    }
}

layout! {
    /// Address and expected generation of a block. All zeroes means none.
    #[derive(Default)]
    pub struct Pointer[16] {
        /// Address in blocks.
        address: u64,
        /// Generation in its header.
        generation: u64,
    }
}

layout! {
    /// Superblock, after the header.
    pub struct Superblock[256] {
        /// [`VERSION`].
        version: u32,
        /// Block size in bytes, as a power of two: 12.
        block_shift: u32,
        /// Features without which a program must not open the pool.
        incompatible: u64,
        /// Features without which a program must not write to the pool.
        read_only_compatible: u64,
        /// Features that a program may ignore.
        compatible: u64,
        /// Blocks of the pool, including superblocks.
        blocks: u64,
        /// Blocks with a reference count, without superblocks.
        used: u64,
        /// Number of volumes, including snapshots.
        volumes: u64,
        /// Number of the next volume.
        next_volume: u64,
        /// Tree: volume number to volume block.
        catalogue: Pointer,
        /// Tree: hash of a name to volume number.
        names: Pointer,
        /// Tree: volumes with blocks to be freed.
        work: Pointer,
        /// Tree: runs of blocks to their reference counts.
        space: Pointer,
        /// Pool name, UTF-8, padded with zeroes.
        name: [u8; 64],
        /// Capacity thresholds in percent; zero disables one.
        thresholds: [u8; 2],
        /// Zero.
        gap: [u8; 6],
        /// Blocks reserved for thick volumes: the sum of what each of them has not yet allocated.
        provisioned: u64,
        /// Blocks on the first device before the first span; zero if there is no span.
        first: u64,
        /// Number of devices other than the first: this many [`DeviceRecord`]s follow.
        devices: u32,
        /// Number of spans: this many [`SpanRecord`]s follow the devices.
        spans: u32,
        /// Number of times the pool was claimed for writing.
        epoch: u64,
        /// Owner that has it open for writing: a random number drawn at opening. Zero if none.
        owner: u128,
        /// Zero.
        reserved: [u8; 8],
    }
}

layout! {
    /// Owner record in the last bytes of a superblock's block, if the device table leaves space for it.
    pub struct OwnerRecord[128] {
        /// Boot identifier of the kernel.
        boot: u128,
        /// Machine identifier (machine-id(5)); zero if there is none.
        machine: u128,
        /// Number of the PID namespace of `pid`.
        pid_space: u64,
        /// Start time of the process, in clock ticks after boot.
        started: u64,
        /// Time of opening, in seconds since 1970.
        since: u64,
        /// Process identifier.
        pid: u32,
        /// Zero.
        gap: u32,
        /// Host name, UTF-8, padded with zeroes.
        host: [u8; 64],
    }
}

layout! {
    /// Device of a pool other than the first. The records follow the superblock.
    pub struct DeviceRecord[32] {
        /// Random UUID, drawn when it was added; also in its label.
        uuid: u128,
        /// Length of its URI. The URIs follow the spans, in the same order.
        uri_bytes: u32,
        /// Zero.
        reserved: [u8; 12],
    }
}

layout! {
    /// Next blocks of the pool that are contiguous on one device. The records follow the devices.
    pub struct SpanRecord[24] {
        /// Device number: zero is the first one, 1 that of the first [`DeviceRecord`].
        device: u32,
        /// Zero.
        reserved: u32,
        /// Offset on the device.
        at: u64,
        /// Number of blocks.
        blocks: u64,
    }
}

layout! {
    /// Label in the first block of every device but the first, after the header.
    pub struct LabelBody[2240] {
        /// Random UUID, drawn when the device was added.
        uuid: u128,
        /// Device number in the pool.
        number: u32,
        /// Length of `uri`.
        uri_bytes: u32,
        /// First block of the pool after the label.
        begin: u64,
        /// Pool name at that time, UTF-8, padded with zeroes.
        name: [u8; 64],
        /// Zero.
        reserved: [u8; 96],
        /// URI of the first device at that time, UTF-8, padded with zeroes.
        uri: [u8; 2048],
    }
}

layout! {
    /// Volume block, after the header.
    pub struct VolumeBody[320] {
        /// Volume number.
        id: u64,
        /// Volume or snapshot from which it was created; zero if it was created empty, or was decoupled.
        origin: u64,
        /// [`flags`].
        flags: u32,
        /// Cluster size in blocks, as a power of two.
        unit_shift: u32,
        /// Size in blocks.
        blocks: u64,
        /// Number of written blocks.
        mapped: u64,
        /// Blocks mapped from this one on are to be freed. [`u64::MAX`] if none are.
        cut: u64,
        /// Number of volumes that have it as their origin.
        children: u64,
        /// Generation in which it was created.
        born: u64,
        /// Tree: block of the volume to block of the pool.
        map: Pointer,
        /// Random UUID, drawn when it was created.
        uuid: u128,
        /// Name, UTF-8, padded with zeroes.
        name: [u8; 128],
        /// Tree: group of blocks of the volume to their checksums; none if it has no checksums.
        sums: Pointer,
        /// Number of unwritten blocks.
        spare: u64,
        /// Blocks that a thick volume has not yet allocated.
        owed: u64,
        /// Block that describes the parent, read where nothing is mapped; none if such blocks read as
        /// zeroes.
        parent: Pointer,
        /// Overlap: leading blocks for which the parent is read; after them, unmapped blocks read as
        /// zeroes.
        reach: u64,
        /// Zero.
        reserved: [u8; 40],
    }
}

layout! {
    /// Parent block, after the header.
    pub struct ParentBody[2208] {
        /// Size of the parent in blocks of 4 KiB when the first volume was created on it.
        blocks: u64,
        /// Block size of the parent in bytes.
        block_bytes: u32,
        /// Length of `uri`.
        uri_bytes: u32,
        /// UUID if it is a snapshot of another pool; otherwise zero.
        uuid: u128,
        /// Checksums of samples: of its ends (low half), and of blocks spread over it (high half).
        print: u64,
        /// Zero.
        reserved: [u8; 120],
        /// URI of the parent device, UTF-8, padded with zeroes.
        uri: [u8; 2048],
    }
}

layout! {
    /// Record of a tree node. In an inner node: first key, address and generation of a child.
    pub struct Record[24] {
        /// Key: the first of a run, if the tree has runs.
        key: u64,
        /// Value: see [`BlockKind`].
        value: u64,
        /// Second value, or the length of the run.
        extra: u64,
    }
}

/// Bits of [`VolumeBody::flags`].
pub mod flags {
    /// Read-only: a snapshot.
    pub const READ_ONLY: u32 = 1;
    /// Deleted, with its blocks being freed.
    pub const DOOMED: u32 = 2;
    /// Its data have checksums.
    pub const CHECKSUMS: u32 = 4;
    /// Thick: space is reserved for all of its blocks.
    pub const THICK: u32 = 8;
    /// Supported flags.
    pub(crate) const KNOWN: u32 = READ_ONLY | DOOMED | CHECKSUMS | THICK;
}

/// Bit of a map's [`Record::value`]: the run is unwritten; it is allocated and reads as zeroes.
pub const UNWRITTEN: u64 = 1 << 63;

/// Bit of a map's [`Record::value`]: the run is a hole; it is not allocated and reads as zeroes, whatever
/// the volume's parent has there. The other bits are the run's key.
pub const HOLE: u64 = 1 << 62;

/// Bits of [`Superblock::incompatible`] and [`Superblock::compatible`].
pub mod features {
    /// Volumes with data checksums exist, or have existed.
    pub const CHECKSUMS: u64 = 1;
    /// Unwritten runs in maps exist, or have existed.
    pub const UNWRITTEN: u64 = 2;
    /// Volumes with parents and holes in maps exist, or have existed.
    pub const PARENTS: u64 = 4;
    /// Other devices than the first exist.
    pub const DEVICES: u64 = 8;
    /// Supported bits of `incompatible`.
    pub const KNOWN: u64 = CHECKSUMS | UNWRITTEN | PARENTS | DEVICES;
    /// Superblocks name the owner, and no other program writes to the pool: a bit of
    /// `read_only_compatible`, set when the pool is first opened for writing.
    pub const OWNED: u64 = 1;
    /// The pool has its own thresholds: a bit of `compatible`.
    pub const THRESHOLDS: u64 = 1;
}

/// Kind of a metadata block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockKind {
    /// Superblock.
    Superblock,
    /// Node of the catalog: volume number to address and generation of the volume block.
    Catalog,
    /// Node of the names tree: hash of a name to volume number; extra is one.
    Names,
    /// Node of the deferred frees: volume number to address and generation of its block if it was
    /// deleted, or to zeroes if it is in the catalog and has a pending truncation.
    DeferredFrees,
    /// Node of the space map: first block of a run to its count; extra is the length of the run.
    SpaceMap,
    /// Node of a volume's map: first block of a run to its address, with [`UNWRITTEN`] if it is
    /// unwritten, or [`HOLE`] and the key if it is a hole; extra is its length.
    Map,
    /// Volume block.
    Volume,
    /// Node of a volume's checksums: number of a group of blocks to their checksums.
    Checksums,
    /// Parent block of a volume.
    Parent,
    /// Label of a device other than the first of its pool.
    Label,
}

/// Magic number of every metadata block.
pub const MAGIC: [u8; 8] = *b"tenmilVS";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Block size in bytes, as a power of two.
pub const BLOCK_SHIFT: u32 = 12;
/// Block size in bytes.
pub const BLOCK_BYTES: usize = 1 << BLOCK_SHIFT;
/// Maximum records of a node.
pub const RECORDS_MAX: usize = (BLOCK_BYTES - Header::BYTES) / Record::BYTES;
/// Maximum level of a node: no tree within the maximum number of blocks is higher.
pub const LEVEL_MAX: u8 = 12;
/// Superblocks at each end of a pool, or of its part on the first device.
pub const SLOTS: u64 = 2;
/// Minimum blocks of a pool.
pub const STORE_BLOCKS_MIN: u64 = 512;
/// Maximum blocks of a pool and of a volume: 2^60 bytes.
pub const BLOCKS_MAX: u64 = 1 << 48;
/// Upper limit of generations, volume numbers and reference counts.
pub const NUMBER_MAX: u64 = 1 << 56;
/// Upper limit of a superblock's generation and next volume number, so that counting on from any accepted
/// value never reaches [`NUMBER_MAX`].
pub const SUPERBLOCK_MAX: u64 = 1 << 55;
/// Maximum cluster size: 64 KiB, so that all runs of a cluster fit in one leaf.
pub const UNIT_SHIFT_MAX: u32 = 4;
/// Maximum length of the URI of a parent or a device.
pub const URI_BYTES_MAX: usize = 2048;

const _: () = assert!(RECORDS_MAX == 168, "as drawn");
const _: () =
    assert!(Header::BYTES + Superblock::BYTES + OwnerRecord::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + VolumeBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + ParentBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + LabelBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(RECORDS_MAX / 4 > 1 << UNIT_SHIFT_MAX, "a leaf can be split between units");

/// Bytes of one block.
pub type Block = [u8; BLOCK_BYTES];

impl BlockKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [Self; 10] = [
        Self::Superblock,
        Self::Catalog,
        Self::Names,
        Self::DeferredFrees,
        Self::SpaceMap,
        Self::Map,
        Self::Volume,
        Self::Checksums,
        Self::Parent,
        Self::Label,
    ];

    /// Code in a header.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// Kind with a code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblock",
            Self::Catalog => "node of the catalogue",
            Self::Names => "node of the names",
            Self::DeferredFrees => "node of the work list",
            Self::SpaceMap => "node of the space map",
            Self::Map => "node of a volume's map",
            Self::Volume => "volume's block",
            Self::Checksums => "node of a volume's checksums",
            Self::Parent => "parent's block",
            Self::Label => "label of a device",
        }
    }
}

impl Pointer {
    /// The null pointer.
    pub const NONE: Self = Self { address: 0, generation: 0 };

    /// Whether it is null.
    pub const fn is_null(self) -> bool {
        self.address == 0
    }
}

impl Record {
    /// Child to which this record of an inner node points.
    pub const fn child(&self) -> Pointer {
        Pointer { address: self.value, generation: self.extra }
    }

    /// Address of the first block of this map run.
    pub const fn first_address(&self) -> u64 {
        self.value & !(UNWRITTEN | HOLE)
    }

    /// Whether this map run is unwritten.
    pub const fn is_unwritten(&self) -> bool {
        self.value & UNWRITTEN != 0
    }

    /// Whether this map run is a hole.
    pub const fn is_hole(&self) -> bool {
        self.value & HOLE != 0
    }

    /// Whether this map run is written: it has an address, from which it is read.
    pub const fn is_written(&self) -> bool {
        self.value & (UNWRITTEN | HOLE) == 0
    }
}

impl Superblock {
    /// Addresses of the superblocks of a generation in a pool with `front` blocks on its first device
    /// before the first span.
    pub const fn superblock_addresses(generation: u64, front: u64) -> [u64; 2] {
        let slot = generation % SLOTS;
        [slot, front - SLOTS + slot]
    }

    /// Blocks on the first device before the first span.
    pub const fn first_device_reserved_blocks(&self) -> u64 {
        if self.first == 0 { self.blocks } else { self.first }
    }

    /// Blocks available for metadata and data.
    pub const fn data_area(&self) -> DataArea {
        let slots =
            self.first_device_reserved_blocks() - SLOTS..self.first_device_reserved_blocks();
        if self.first == 0 {
            return DataArea { start: SLOTS, end: slots.start, slots: 0..0 };
        }
        DataArea { start: SLOTS, end: self.blocks, slots }
    }

    /// Unsupported feature bits that prevent opening the pool, or writing to it.
    pub(crate) const fn blocking_unknown_features(&self) -> u64 {
        (self.incompatible & !features::KNOWN) | (self.read_only_compatible & !features::OWNED)
    }

    /// Whether it has another version or unsupported features.
    pub(crate) const fn is_unsupported(&self) -> bool {
        self.version != VERSION || self.blocking_unknown_features() != 0
    }

    /// Checks a superblock whose checksum is right. One of an unsupported version is accepted, because
    /// the meaning of its fields is unknown.
    pub fn check(&self) -> Result<(), CorruptionKind> {
        if self.is_unsupported() {
            return Ok(());
        }
        let sized = (STORE_BLOCKS_MIN..=BLOCKS_MAX).contains(&self.blocks);
        let few = self.volumes < NUMBER_MAX && self.provisioned < NUMBER_MAX;
        let counted = sized && self.used <= self.blocks && few;
        let numbered = (1..SUPERBLOCK_MAX).contains(&self.next_volume);
        let is_alone = self.first == 0 && self.devices == 0 && self.spans == 0;
        let spans = (STORE_BLOCKS_MIN..self.blocks).contains(&self.first) && self.spans > 0;
        let lies = is_alone || spans && self.incompatible & features::DEVICES != 0;
        let is_right = self.block_shift == BLOCK_SHIFT && counted && numbered && lies;
        if is_right { Ok(()) } else { Err(CorruptionKind::Contents) }
    }
}

impl VolumeBody {
    /// Cluster size in blocks.
    pub const fn cluster_blocks(&self) -> u64 {
        1 << self.unit_shift
    }

    /// Whether a flag is set.
    pub const fn has_flag(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Checks a volume block whose checksum is right.
    pub(crate) fn validate(&self) -> Result<(), CorruptionKind> {
        let sized = self.blocks <= BLOCKS_MAX && self.unit_shift <= UNIT_SHIFT_MAX;
        let known = self.flags & !flags::KNOWN == 0;
        let summed = self.has_flag(flags::CHECKSUMS) || self.sums.is_null();
        let never_thick = flags::READ_ONLY | flags::DOOMED | flags::CHECKSUMS;
        let thick = !self.has_flag(flags::THICK) || !self.has_flag(never_thick);
        let owing = self.owed <= if self.has_flag(flags::THICK) { BLOCKS_MAX } else { 0 };
        let numbered = (1..NUMBER_MAX).contains(&self.id) && self.children < NUMBER_MAX;
        let over = self.parent.is_null() == (self.reach == 0) && self.reach <= self.blocks;
        let is_right = sized && known && summed && thick && owing && numbered && over;
        if is_right { Ok(()) } else { Err(CorruptionKind::Contents) }
    }
}

/// Encodes a name; `None` if it is empty, too long, or has control characters.
pub fn encode_name<const N: usize>(name: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let fits = !name.is_empty() && name.len() <= N && !name.contains(char::is_control);
    bytes.get_mut(..name.len()).filter(|_| fits)?.copy_from_slice(name.as_bytes());
    Some(bytes)
}

/// Decodes a name; invalid UTF-8 is replaced.
pub fn decode_name(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Key of a name in the names tree: FNV-1a, 64 bits.
pub fn hash_name(name: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    // At most one less than the maximum, because the end of a run must be representable, too.
    name.iter().fold(0xcbf2_9ce4_8422_2325, step).min(u64::MAX - 1)
}

impl BlockKind {
    /// Key after the last one covered by a leaf record; `None` if it is not representable.
    pub(crate) fn record_end_key(self, record: &Record) -> Option<u64> {
        let len = if self.has_run_records() { record.extra } else { 1 };
        record.key.checked_add(len).filter(|_| len > 0)
    }

    /// Whether the records of its leaves are runs of keys.
    pub(crate) const fn has_run_records(self) -> bool {
        matches!(self, Self::SpaceMap | Self::Map)
    }

    /// Whether the numbers in a leaf record are within the limits.
    pub(crate) fn is_within_limits(self, record: &Record) -> bool {
        let within =
            |start: u64| start.checked_add(record.extra).is_some_and(|end| end <= BLOCKS_MAX);
        match self {
            Self::SpaceMap => (1..NUMBER_MAX).contains(&record.value) && within(record.key),
            Self::Map if record.is_hole() => {
                record.value == HOLE | record.key && within(record.key)
            }
            Self::Map => {
                record.first_address() >= SLOTS
                    && within(record.key)
                    && within(record.first_address())
            }
            _ => true,
        }
    }
}
