//! What lies on the device, block by block; docs/volume-format.md is this file drawn.
//!
//! ```text
//!   store:  0    1    2                                            n-2    n-1     blocks of 4 KiB
//!           | S0 | S1 | metadata and data, wherever there was room | S0' | S1' |  metadata and data on
//!           |<---------------------- the first device ---------------------->|  others, if there are
//!
//!   block:  0                64                                              4096
//!           | Header         | Superblock and devices, VolumeBody, …, Records |
//! ```
//!
//! A superblock of an even generation lies in S0 and S0', one of an odd generation in S1 and S1'.
//! So the one before is whole while one is written, and one block that is destroyed takes neither.

mod page;

use crate::devices::Room;
use crate::error::Flaw;
use crate::layout::{Layout, layout};
pub(crate) use page::reseal;
pub use page::{Body, Page, decode_owner, decode_superblock};

layout! {
    /// What every block of metadata begins with.
    pub struct Header[64] {
        /// CRC-32C of all that follows, to the end of the block.
        checksum: u32,
        /// What the block is: a [`Kind`].
        kind: u8,
        /// Height of a node above its leaves; zero for whatever else.
        level: u8,
        /// Records in a node; zero for whatever else.
        count: u16,
        /// [`MAGIC`].
        magic: [u8; 8],
        /// Whose block it is.
        store: u128,
        /// Where it lies.
        address: u64,
        /// The transaction that wrote it.
        generation: u64,
        /// The volume that it was written for; zero if it serves all.
        owner: u64,
        /// Zero.
        reserved: u64,
    }
}

layout! {
    /// Where a block is, and of which generation it must be. All zeroes is none.
    #[derive(Default)]
    pub struct Pointer[16] {
        /// Its address, in blocks.
        address: u64,
        /// The generation that its header has.
        generation: u64,
    }
}

layout! {
    /// What stands behind the header of a superblock.
    pub struct Superblock[256] {
        /// [`VERSION`].
        version: u32,
        /// Bytes in a block, as a power of two: 12.
        block_shift: u32,
        /// Who does not know one of these bits must not open the store.
        incompatible: u64,
        /// Who does not know one of these bits must not write to the store.
        read_only_compatible: u64,
        /// Who does not know one of these bits may ignore it.
        compatible: u64,
        /// Blocks in the store, superblocks included.
        blocks: u64,
        /// Blocks with a count, superblocks not included.
        used: u64,
        /// How many volumes there are, snapshots included.
        volumes: u64,
        /// The number that the next volume gets.
        next_volume: u64,
        /// Tree: number of a volume to its block.
        catalogue: Pointer,
        /// Tree: hash of a name to the number of the volume.
        names: Pointer,
        /// Tree: volumes with blocks that are to be given back.
        work: Pointer,
        /// Tree: runs of blocks to their counts.
        space: Pointer,
        /// The store's name, UTF-8, padded with zeroes.
        name: [u8; 64],
        /// Per cent of the room for data at which it is told that so much is taken; zero is none.
        thresholds: [u8; 2],
        /// Zero.
        gap: [u8; 6],
        /// Blocks kept for thick volumes: the sum of what each of them is promised beyond what it has.
        promised: u64,
        /// Blocks on the first device that come before the first span; zero if there is none.
        first: u64,
        /// Devices behind the first one: so many of [`DeviceRecord`] follow.
        devices: u32,
        /// Runs of blocks behind those: so many of [`SpanRecord`] follow.
        spans: u32,
        /// How often the store was claimed by somebody who writes to it.
        epoch: u64,
        /// Who has it open for writing: drawn when it was opened. Zero if nobody has.
        owner: u128,
        /// Zero.
        reserved: [u8; 8],
    }
}

layout! {
    /// What the last bytes of a superblock's block say of the owner, if the devices leave room for it.
    pub struct OwnerRecord[128] {
        /// Drawn by the kernel when the machine was started.
        boot: u128,
        /// The machine's own number (machine-id(5)); zero if it has none.
        machine: u128,
        /// The number of the process namespace in which `pid` is one.
        pid_space: u64,
        /// When the process was started, in ticks after the machine was.
        started: u64,
        /// When it opened the store, in seconds after 1970.
        since: u64,
        /// The process.
        pid: u32,
        /// Zero.
        gap: u32,
        /// What the machine is called, UTF-8, padded with zeroes.
        host: [u8; 64],
    }
}

layout! {
    /// A device of a store, but for the first. All of them stand behind the superblock.
    pub struct DeviceRecord[32] {
        /// Drawn when it was added; its label has it, too.
        uuid: u128,
        /// How many bytes its name has. The names stand behind the spans, in the same order.
        uri_bytes: u32,
        /// Zero.
        reserved: [u8; 12],
    }
}

layout! {
    /// Blocks of the store that follow those before and lie together on one device. All of them stand
    /// behind the devices.
    pub struct SpanRecord[24] {
        /// The number of the device: zero is the first one, 1 that of the first [`DeviceRecord`].
        device: u32,
        /// Zero.
        reserved: u32,
        /// Where the first of them lies on the device.
        at: u64,
        /// How many there are.
        blocks: u64,
    }
}

layout! {
    /// What stands behind the header of the first block of every device but the first.
    pub struct LabelBody[2240] {
        /// Drawn when the device was added.
        uuid: u128,
        /// Its number in the store.
        number: u32,
        /// How many bytes of `uri` are a name.
        uri_bytes: u32,
        /// The block of the store that lies behind the label.
        begin: u64,
        /// The store's name then, UTF-8, padded with zeroes.
        name: [u8; 64],
        /// Zero.
        reserved: [u8; 96],
        /// What the first device was called then: how a device is named, UTF-8, padded with zeroes.
        uri: [u8; 2048],
    }
}

layout! {
    /// What stands behind the header of a volume's block.
    pub struct VolumeBody[320] {
        /// Its number.
        id: u64,
        /// The volume or snapshot that it was made from; zero if it was made empty, or was decoupled.
        origin: u64,
        /// [`flags`].
        flags: u32,
        /// Blocks in its unit of allocation, as a power of two.
        unit_shift: u32,
        /// How many blocks it has.
        blocks: u64,
        /// How many of them are mapped.
        mapped: u64,
        /// What is mapped from this block on is to be given back. [`u64::MAX`] if nothing is.
        cut: u64,
        /// How many volumes say that it is their origin.
        children: u64,
        /// The generation in which it was made.
        born: u64,
        /// Tree: block of the volume to block of the store.
        map: Pointer,
        /// Drawn when it was made.
        uuid: u128,
        /// Its name, UTF-8, padded with zeroes.
        name: [u8; 128],
        /// Tree: group of blocks of the volume to their checksums; none if it has no checksums.
        sums: Pointer,
        /// How many of its blocks are spare.
        spare: u64,
        /// Blocks that a thick volume has still to be given before it has all its units.
        owed: u64,
        /// The block that says what is read where nothing is mapped; none if that reads as zeroes.
        parent: Pointer,
        /// Blocks from the first one on of which that is true; behind them nothing is read.
        reach: u64,
        /// Zero.
        reserved: [u8; 40],
    }
}

layout! {
    /// What stands behind the header of a parent's block.
    pub struct ParentBody[2208] {
        /// How many blocks of 4 KiB it had when the first volume was made over it.
        blocks: u64,
        /// Bytes in a block of its own.
        block_bytes: u32,
        /// How many bytes of `uri` are its name.
        uri_bytes: u32,
        /// What it was known by, if it was a snapshot of another store; else zero.
        uuid: u128,
        /// Checksums of some of its blocks: at its ends (low half), and all over it (high half).
        print: u64,
        /// Zero.
        reserved: [u8; 120],
        /// What it is called: how a device is named, UTF-8, padded with zeroes.
        uri: [u8; 2048],
    }
}

layout! {
    /// A line of a tree. In an inner node: first key, address and generation of a child.
    pub struct Record[24] {
        /// What is looked up: the first of a run, where the tree is one of runs.
        key: u64,
        /// What is found: see [`Kind`].
        value: u64,
        /// What else is found, or the length of the run.
        extra: u64,
    }
}

/// Bits of [`VolumeBody::flags`].
pub mod flags {
    /// Nothing is written to it: a snapshot.
    pub const READ_ONLY: u32 = 1;
    /// It has been deleted, and its blocks are being given back.
    pub const DOOMED: u32 = 2;
    /// Its data have checksums.
    pub const CHECKSUMS: u32 = 4;
    /// It is thick: room is kept for all of its blocks.
    pub const THICK: u32 = 8;
    /// Those that this program knows.
    pub(crate) const KNOWN: u32 = READ_ONLY | DOOMED | CHECKSUMS | THICK;
}

/// The bit of a map's [`Record::value`] that says that the run is spare: its room is
/// the volume's, and it reads as zeroes.
pub const SPARE: u64 = 1 << 63;

/// The bit of a map's [`Record::value`] that says that the run is a hole: it has no room,
/// and it reads as zeroes whatever the volume's parent has there. The other bits are the run's key.
pub const HOLE: u64 = 1 << 62;

/// Bits of [`Superblock::incompatible`] and [`Superblock::compatible`].
pub mod features {
    /// There are volumes whose data have checksums, or there were.
    pub const CHECKSUMS: u64 = 1;
    /// There are spare runs in maps, or there were.
    pub const SPARE: u64 = 2;
    /// There are volumes with parents and holes in maps, or there were.
    pub const PARENTS: u64 = 4;
    /// There are blocks on other devices than the first.
    pub const DEVICES: u64 = 8;
    /// Those of `incompatible` that this program knows.
    pub const KNOWN: u64 = CHECKSUMS | SPARE | PARENTS | DEVICES;
    /// Superblocks say who has the store open, and nobody else writes to it: a bit of
    /// `read_only_compatible`, set when it is opened for writing for the first time.
    pub const OWNED: u64 = 1;
    /// The store has thresholds of its own: a bit of `compatible`.
    pub const THRESHOLDS: u64 = 1;
}

/// What a block of metadata is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A superblock.
    Superblock,
    /// A node of the catalogue: a volume's number to address and generation of its block.
    Catalogue,
    /// A node of the names: hash of a name to a volume's number; extra is one.
    Names,
    /// A node of the work to be done: a volume's number to address and generation of its block if
    /// it has been deleted, to zeroes if it is in the catalogue and is to be cut.
    Work,
    /// A node of the space map: first block of a run to its count; extra is the run's length.
    Space,
    /// A node of a volume's map: first block of a run to where it lies, with [`SPARE`] if it is spare,
    /// or [`HOLE`] and that block if it lies nowhere; extra is its length.
    Map,
    /// A volume's block.
    Volume,
    /// A node of a volume's checksums: number of a group of blocks to the checksums of each.
    Sums,
    /// What a volume is read from where nothing is mapped.
    Parent,
    /// The first block of a device that is not the first of its store.
    Label,
}

/// Eight bytes that every block of metadata has.
pub const MAGIC: [u8; 8] = *b"tenmilVS";
/// The version of this format.
pub const VERSION: u32 = 1;
/// Bytes in a block, as a power of two.
pub const BLOCK_SHIFT: u32 = 12;
/// Bytes in a block.
pub const BLOCK_BYTES: usize = 1 << BLOCK_SHIFT;
/// Records in the fullest node.
pub const RECORDS_MAX: usize = (BLOCK_BYTES - Header::BYTES) / Record::BYTES;
/// The highest level of a node: no tree of more blocks than there can be is higher.
pub const LEVEL_MAX: u8 = 12;
/// Superblocks at either end of a store, or of its part on the first device.
pub const SLOTS: u64 = 2;
/// Blocks in the smallest store.
pub const STORE_BLOCKS_MIN: u64 = 512;
/// Blocks in the largest store, and in the largest volume: 2^60 bytes.
pub const BLOCKS_MAX: u64 = 1 << 48;
/// Generations, numbers of volumes and counts of them are below this.
pub const NUMBER_MAX: u64 = 1 << 56;
/// The generation of a superblock, and the number that it has for the next volume, are below this: so
/// that, whatever was found, nobody ever counts up to the limit.
pub const SUPERBLOCK_MAX: u64 = 1 << 55;
/// The largest unit of allocation: 64 KiB, so that all runs of a unit have room in one leaf.
pub const UNIT_SHIFT_MAX: u32 = 4;
/// Bytes in the longest name of a parent, or of a device.
pub const URI_BYTES_MAX: usize = 2048;

const _: () = assert!(RECORDS_MAX == 168, "as drawn");
const _: () =
    assert!(Header::BYTES + Superblock::BYTES + OwnerRecord::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + VolumeBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + ParentBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(Header::BYTES + LabelBody::BYTES <= BLOCK_BYTES, "it has room");
const _: () = assert!(RECORDS_MAX / 4 > 1 << UNIT_SHIFT_MAX, "a leaf can be split between units");

/// The bytes of one block.
pub type Block = [u8; BLOCK_BYTES];

impl Kind {
    /// Every kind, in the order of their codes.
    pub const ALL: [Self; 10] = [
        Self::Superblock,
        Self::Catalogue,
        Self::Names,
        Self::Work,
        Self::Space,
        Self::Map,
        Self::Volume,
        Self::Sums,
        Self::Parent,
        Self::Label,
    ];

    /// What stands in a header.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// What a header means by a code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// What messages call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblock",
            Self::Catalogue => "node of the catalogue",
            Self::Names => "node of the names",
            Self::Work => "node of the work list",
            Self::Space => "node of the space map",
            Self::Map => "node of a volume's map",
            Self::Volume => "volume's block",
            Self::Sums => "node of a volume's checksums",
            Self::Parent => "parent's block",
            Self::Label => "label of a device",
        }
    }
}

impl Pointer {
    /// Points to nothing.
    pub const NONE: Self = Self { address: 0, generation: 0 };

    /// Whether it points to nothing.
    pub const fn is_none(self) -> bool {
        self.address == 0
    }
}

impl Record {
    /// The child that this line of an inner node points to.
    pub const fn child(&self) -> Pointer {
        Pointer { address: self.value, generation: self.extra }
    }

    /// Where the first block of this run of a map lies.
    pub const fn place(&self) -> u64 {
        self.value & !(SPARE | HOLE)
    }

    /// Whether this run of a map is spare.
    pub const fn is_spare(&self) -> bool {
        self.value & SPARE != 0
    }

    /// Whether this run of a map is a hole.
    pub const fn is_hole(&self) -> bool {
        self.value & HOLE != 0
    }

    /// Whether this run of a map was written: it lies somewhere, and what lies there is read.
    pub const fn is_written(&self) -> bool {
        self.value & (SPARE | HOLE) == 0
    }
}

impl Superblock {
    /// Where the superblocks of a generation lie in a store that has so many blocks on its first device,
    /// before any other begins.
    pub const fn places(generation: u64, front: u64) -> [u64; 2] {
        let slot = generation % SLOTS;
        [slot, front - SLOTS + slot]
    }

    /// Blocks on the first device, before any other begins.
    pub const fn front(&self) -> u64 {
        if self.first == 0 { self.blocks } else { self.first }
    }

    /// The blocks in which metadata and data lie.
    pub const fn room(&self) -> Room {
        let slots = self.front() - SLOTS..self.front();
        if self.first == 0 {
            return Room { start: SLOTS, end: slots.start, slots: 0..0 };
        }
        Room { start: SLOTS, end: self.blocks, slots }
    }

    /// Bits of features that this program does not know, and without which nobody may open the store,
    /// or write to it.
    pub(crate) const fn unknown_features(&self) -> u64 {
        (self.incompatible & !features::KNOWN) | (self.read_only_compatible & !features::OWNED)
    }

    /// Whether it is of another version or has features that are not known.
    pub(crate) const fn is_unknown(&self) -> bool {
        self.version != VERSION || self.unknown_features() != 0
    }

    /// What must hold of one whose checksum is right; else what is wrong. What the numbers of an
    /// unknown one mean is not known either.
    pub fn check(&self) -> Result<(), Flaw> {
        if self.is_unknown() {
            return Ok(());
        }
        let sized = (STORE_BLOCKS_MIN..=BLOCKS_MAX).contains(&self.blocks);
        let few = self.volumes < NUMBER_MAX && self.promised < NUMBER_MAX;
        let counted = sized && self.used <= self.blocks && few;
        let numbered = (1..SUPERBLOCK_MAX).contains(&self.next_volume);
        let is_alone = self.first == 0 && self.devices == 0 && self.spans == 0;
        let spans = (STORE_BLOCKS_MIN..self.blocks).contains(&self.first) && self.spans > 0;
        let lies = is_alone || spans && self.incompatible & features::DEVICES != 0;
        let is_right = self.block_shift == BLOCK_SHIFT && counted && numbered && lies;
        if is_right { Ok(()) } else { Err(Flaw::Contents) }
    }
}

impl VolumeBody {
    /// Blocks in its unit of allocation.
    pub const fn unit(&self) -> u64 {
        1 << self.unit_shift
    }

    /// Whether a flag is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// What must hold of one whose checksum is right; else what is wrong.
    pub(crate) fn check(&self) -> Result<(), Flaw> {
        let sized = self.blocks <= BLOCKS_MAX && self.unit_shift <= UNIT_SHIFT_MAX;
        let known = self.flags & !flags::KNOWN == 0;
        let summed = self.has(flags::CHECKSUMS) || self.sums.is_none();
        let never_thick = flags::READ_ONLY | flags::DOOMED | flags::CHECKSUMS;
        let thick = !self.has(flags::THICK) || !self.has(never_thick);
        let owing = self.owed <= if self.has(flags::THICK) { BLOCKS_MAX } else { 0 };
        let numbered = (1..NUMBER_MAX).contains(&self.id) && self.children < NUMBER_MAX;
        let over = self.parent.is_none() == (self.reach == 0) && self.reach <= self.blocks;
        let is_right = sized && known && summed && thick && owing && numbered && over;
        if is_right { Ok(()) } else { Err(Flaw::Contents) }
    }
}

/// A name as it stands on disk; `None` if it is empty, too long, or has control characters.
pub fn padded<const N: usize>(name: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let fits = !name.is_empty() && name.len() <= N && !name.contains(char::is_control);
    bytes.get_mut(..name.len()).filter(|_| fits)?.copy_from_slice(name.as_bytes());
    Some(bytes)
}

/// The name that stands on disk; what is not UTF-8 is replaced.
pub fn unpadded(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The key of a name in the tree of names: FNV-1a, 64 bits.
pub fn hash(name: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    // One less than the greatest, for the end of a run must be a number too.
    name.iter().fold(0xcbf2_9ce4_8422_2325, step).min(u64::MAX - 1)
}

impl Kind {
    /// The key behind the last one that a line of a leaf stands for; `None` if there is no such
    /// number.
    pub(crate) fn end(self, record: &Record) -> Option<u64> {
        let len = if self.has_runs() { record.extra } else { 1 };
        record.key.checked_add(len).filter(|_| len > 0)
    }

    /// Whether the lines of its leaves stand for runs of keys.
    pub(crate) const fn has_runs(self) -> bool {
        matches!(self, Self::Space | Self::Map)
    }

    /// Whether the numbers in a line of a leaf are within the limits.
    pub(crate) fn holds(self, record: &Record) -> bool {
        let within =
            |start: u64| start.checked_add(record.extra).is_some_and(|end| end <= BLOCKS_MAX);
        match self {
            Self::Space => (1..NUMBER_MAX).contains(&record.value) && within(record.key),
            Self::Map if record.is_hole() => {
                record.value == HOLE | record.key && within(record.key)
            }
            Self::Map => record.place() >= SLOTS && within(record.key) && within(record.place()),
            _ => true,
        }
    }
}
