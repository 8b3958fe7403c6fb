//! Superblock of a mirror leg: one 4 KiB page; encoding and decoding only.
//!
//! ```text
//!   leg:  | copy 0 | … | copy 1 | … | blocks of the mirror …
//!         0        64k          128k 1m
//!
//!   copy: 0       8       12    16     32       40         48    49     52         56
//!         | magic | version | crc | UUID | sequence | generation | leg | legs | block size | …
//!         56             64      72              80        88                  152      2048            4096
//!         | block count  | first | region blocks | in sync, gone | known generations | owner … | dirty |
//!                                                 fresh
//!         152     168     176                                  304
//!         | owner | epoch | the owner's process and machine    | zeroes …
//! ```
//!
//! The copies are written alternately, by the parity of their sequence number, so the previous one is
//! intact if power fails during a write.

use tenmil_crc::crc32c;

use super::ownership::MirrorOwnership;
use super::region_bitmap::RegionBitmap;
use crate::Layout as _;
use crate::format::OwnerRecord;

/// A decoded superblock copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorSuperblock {
    /// UUID of the mirror, drawn at creation.
    pub uuid: u128,
    /// Sequence number: how often this leg's superblock has been written.
    pub sequence: u64,
    /// Generation: number of leg changes that this leg knows of.
    pub generation: u64,
    /// Number of this leg, from zero.
    pub leg: u8,
    /// One more than the highest leg number.
    pub legs: u8,
    /// Geometry of the mirror.
    pub geometry: MirrorGeometry,
    /// Bit mask of legs that have every completed write, as far as this leg knows. The others are stale.
    pub in_sync: u8,
    /// Bit mask of leg numbers that were removed.
    pub gone: u8,
    /// Bit mask of stale legs that have never been in sync: they have no data of the mirror.
    pub fresh: u8,
    /// Known generation of each leg's superblock.
    pub known: [u64; LEGS_MAX],
    /// Owner that has the mirror open for writing.
    pub owner: MirrorOwnership,
    /// Regions in which legs may differ.
    pub dirty: RegionBitmap,
}

/// Fields common to the superblocks of all legs.
#[derive(Clone, Copy, Debug)]
pub struct MirrorCommonFields<'a> {
    /// UUID of the mirror.
    pub uuid: u128,
    /// Generation of the state.
    pub generation: u64,
    /// Number of legs.
    pub legs: u8,
    /// Geometry.
    pub geometry: MirrorGeometry,
    /// Legs in sync, a bit each.
    pub in_sync: u8,
    /// Legs that were removed.
    pub gone: u8,
    /// Legs that need a full copy.
    pub fresh: u8,
    /// Of each leg, the last generation that is known to be on it.
    pub known: [u64; LEGS_MAX],
    /// The owner.
    pub owner: MirrorOwnership,
    /// Regions that may differ between the legs.
    pub dirty: &'a RegionBitmap,
}

/// Geometry of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorGeometry {
    /// Block size in bytes.
    pub block_size: u32,
    /// Number of blocks.
    pub block_count: u64,
    /// LBA on each leg of the mirror's first block.
    pub first: u64,
    /// Blocks in a region, which has one bit in the bitmap. A power of two.
    pub region_blocks: u64,
}

/// Why bytes are not a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuperblockError {
    /// The magic number is missing.
    Absent,
    /// The magic number is there, and the rest is invalid.
    Damaged(String),
}

/// Bytes in a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Byte offsets of the two copies on a leg.
pub const COPIES_AT: [u64; 2] = [0, 64 << 10];
/// Byte offset of the mirror's first block on a leg.
pub(crate) const FIRST_BYTES: u64 = 1 << 20;
/// Maximum number of legs.
pub const LEGS_MAX: usize = 8;
/// Maximum number of regions.
pub(crate) const REGIONS_MAX: u64 = 16_384;
/// Minimum region size in bytes.
const REGION_BYTES_MIN: u64 = 64 << 10;

const MAGIC: [u8; 8] = *b"tenmilMR";
const VERSION: u32 = 3;
/// The previous version, without an owner.
const VERSION_UNOWNED: u32 = 2;
/// The first version, in which a new leg made every region dirty instead of being fresh.
const VERSION_FIRST: u32 = 1;
const CRC_AT: usize = 12;
const KNOWN_AT: usize = 88;
const OWNER_AT: usize = 152;
const EPOCH_AT: usize = 168;
const RECORD_AT: usize = 176;
const MAP_AT: usize = 2048;

const _: () = assert!(MAP_AT + (REGIONS_MAX / 8) as usize == SUPERBLOCK_BYTES, "as drawn");
const _: () = assert!(OWNER_AT == KNOWN_AT + 8 * LEGS_MAX, "as drawn");
const _: () = assert!(RECORD_AT + OwnerRecord::BYTES == 304, "as drawn");
const _: () = assert!(COPIES_AT[1] >= 65_536, "a copy may fill the largest block");

impl MirrorCommonFields<'_> {
    /// The superblock of one leg.
    pub fn superblock_of_leg(self, leg: u8, sequence: u64) -> MirrorSuperblock {
        let Self { uuid, generation, legs, geometry, in_sync, gone, fresh, known, owner, dirty } =
            self;
        let (fresh, dirty) = (fresh & !in_sync, dirty.clone());
        MirrorSuperblock {
            uuid,
            sequence,
            generation,
            leg,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner,
            dirty,
        }
    }
}

impl MirrorGeometry {
    /// Geometry of a mirror over legs of so many blocks; `None` if they are too small.
    pub fn for_legs(block_size: u32, leg_blocks: u64) -> Option<Self> {
        let block = u64::from(block_size);
        let first = FIRST_BYTES / block;
        let block_count = leg_blocks.checked_sub(first).filter(|count| *count > 0)?;
        let least = block_count.div_ceil(REGIONS_MAX);
        let region_blocks = least.max(REGION_BYTES_MIN.div_ceil(block)).checked_next_power_of_two();
        Some(Self { block_size, block_count, first, region_blocks: region_blocks? })
    }

    /// Number of regions.
    pub const fn regions(&self) -> u64 {
        self.block_count.div_ceil(self.region_blocks)
    }

    /// The region of a block.
    #[inline]
    pub const fn region_of(&self, lba: u64) -> u64 {
        lba >> self.region_blocks.trailing_zeros()
    }

    /// The regions that a block range overlaps: first region and count.
    #[inline]
    pub const fn regions_of(&self, lba: u64, blocks: u64) -> (u64, u64) {
        if blocks == 0 {
            return (0, 0);
        }
        let first = self.region_of(lba);
        (first, self.region_of(lba + blocks - 1) - first + 1)
    }

    /// The first block of a region, and its number of blocks.
    pub fn blocks_of(&self, region: u64) -> (u64, u64) {
        let first = region * self.region_blocks;
        (first, self.region_blocks.min(self.block_count.saturating_sub(first)))
    }

    fn check(&self) -> Result<(), String> {
        let block_size = self.block_size;
        let whole = block_size.is_power_of_two() && (512..=65_536).contains(&block_size);
        let placed = whole && self.first == FIRST_BYTES / u64::from(block_size);
        let mapped = self.region_blocks.is_power_of_two()
            && (1..=REGIONS_MAX).contains(&self.regions())
            && self.first.checked_add(self.block_count).is_some();
        if placed && mapped {
            return Ok(());
        }
        let Self { first, block_count, region_blocks, .. } = self;
        Err(format!(
            "its geometry is {block_count} blocks of {block_size} bytes from block {first} on, in regions \
             of {region_blocks}, expected powers of two and an area of metadata of {FIRST_BYTES} bytes"
        ))
    }
}

impl MirrorSuperblock {
    /// Index of its copy.
    pub const fn copy_index(&self) -> usize {
        (self.sequence % 2) as usize
    }

    /// Number of legs of the mirror.
    pub const fn members(&self) -> u32 {
        self.legs as u32 - self.gone.count_ones()
    }

    /// Whether the leg states itself to be in sync.
    pub const fn is_leg_in_sync(&self) -> bool {
        self.in_sync & (1 << self.leg) != 0
    }

    /// Encodes it for the position of its copy.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let MirrorGeometry { block_size, block_count, first, region_blocks } = self.geometry;
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.uuid.to_be_bytes());
        put(32, &self.sequence.to_le_bytes());
        put(40, &self.generation.to_le_bytes());
        put(48, &[self.leg, self.legs]);
        put(52, &block_size.to_le_bytes());
        put(56, &block_count.to_le_bytes());
        put(64, &first.to_le_bytes());
        put(72, &region_blocks.to_le_bytes());
        put(80, &[self.in_sync, self.gone, self.fresh]);
        for (leg, generation) in self.known.iter().enumerate() {
            put(KNOWN_AT + 8 * leg, &generation.to_le_bytes());
        }
        let MirrorOwnership { id, epoch, record } = &self.owner;
        put(OWNER_AT, &id.to_le_bytes());
        put(EPOCH_AT, &epoch.to_le_bytes());
        let mut owner = [0; OwnerRecord::BYTES];
        record.encode(&mut owner);
        put(RECORD_AT, &owner);
        for (index, word) in self.dirty.words().iter().enumerate() {
            put(MAP_AT + 8 * index, &word.to_le_bytes());
        }
        let crc = crc_of(&bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes one copy.
    ///
    /// # Errors
    ///
    /// If there is no superblock, or its contents are invalid.
    pub fn decode(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<Self, SuperblockError> {
        if bytes[..8] != MAGIC {
            return Err(SuperblockError::Absent);
        }
        let damaged = |problem: String| SuperblockError::Damaged(problem);
        let (found, expected) = (u32_at(bytes, CRC_AT), crc_of(bytes));
        if found != expected {
            return Err(damaged(format!("its CRC is {found:08x}, expected {expected:08x}")));
        }
        let version = u32_at(bytes, 8);
        if !(VERSION_FIRST..=VERSION).contains(&version) {
            let expected = format!("expected {VERSION_FIRST} to {VERSION}");
            return Err(damaged(format!("its version is {version}, {expected}")));
        }
        let geometry = MirrorGeometry {
            block_size: u32_at(bytes, 52),
            block_count: u64_at(bytes, 56),
            first: u64_at(bytes, 64),
            region_blocks: u64_at(bytes, 72),
        };
        geometry.check().map_err(damaged)?;
        let (leg, legs) = (bytes[48], bytes[49]);
        if !(2..=LEGS_MAX).contains(&usize::from(legs)) || leg >= legs {
            return Err(damaged(format!("it is leg {leg} of {legs}")));
        }
        let gone = bytes[81];
        if gone & 1 << leg != 0 || u32::from(gone) >> legs != 0 {
            return Err(damaged(format!("it is leg {leg} of {legs} without {gone:08b}")));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[16..32]);
        let words = (0..).map(|index| u64_at(bytes, MAP_AT + 8 * index));
        Ok(Self {
            uuid: u128::from_be_bytes(uuid),
            sequence: u64_at(bytes, 32),
            generation: u64_at(bytes, 40),
            leg,
            legs,
            in_sync: bytes[80],
            gone,
            fresh: bytes[82],
            known: std::array::from_fn(|leg| u64_at(bytes, KNOWN_AT + 8 * leg)),
            owner: if version > VERSION_UNOWNED {
                decode_owner(bytes)
            } else {
                MirrorOwnership::NONE
            },
            dirty: RegionBitmap::from_words(geometry.regions(), words),
            geometry,
        })
    }

    /// The newer of the valid copies.
    ///
    /// # Errors
    ///
    /// If neither is valid; damage is reported in preference to absence.
    pub fn newest_of_copies(copies: [&[u8; SUPERBLOCK_BYTES]; 2]) -> Result<Self, SuperblockError> {
        match copies.map(Self::decode) {
            [Ok(one), Ok(other)] => Ok(if one.sequence > other.sequence { one } else { other }),
            [Ok(only), Err(_)] | [Err(_), Ok(only)] => Ok(only),
            [Err(damage @ SuperblockError::Damaged(_)), Err(_)] | [Err(_), Err(damage)] => {
                Err(damage)
            }
        }
    }
}

fn decode_owner(bytes: &[u8; SUPERBLOCK_BYTES]) -> MirrorOwnership {
    let mut id = [0; 16];
    id.copy_from_slice(&bytes[OWNER_AT..EPOCH_AT]);
    let record = OwnerRecord::decode(&bytes[RECORD_AT..]);
    MirrorOwnership { id: u128::from_le_bytes(id), epoch: u64_at(bytes, EPOCH_AT), record }
}

/// Formats a UUID in text form.
pub fn uuid_text(uuid: u128) -> String {
    let digits = format!("{uuid:032x}");
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    parts.join("-")
}

/// The CRC-32C of a superblock, with its own field as zeroes.
fn crc_of(bytes: &[u8; SUPERBLOCK_BYTES]) -> u32 {
    let mut bytes = *bytes;
    bytes[CRC_AT..CRC_AT + 4].fill(0);
    crc32c(&bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use crate::format::OwnerRecord;

    use super::{
        MirrorGeometry, MirrorOwnership, MirrorSuperblock, SUPERBLOCK_BYTES, SuperblockError,
        uuid_text,
    };
    use crate::mirror::RegionBitmap;

    fn sample_superblock() -> MirrorSuperblock {
        let geometry = MirrorGeometry::for_legs(512, 1 << 20).unwrap();
        let mut dirty = RegionBitmap::new(geometry.regions());
        for region in [0, 63, 64, geometry.regions() - 1] {
            dirty.set(region);
        }
        let uuid = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef;
        let (sequence, generation, leg, legs, in_sync) = (7, 3, 1, 2, 0b10);
        let (gone, fresh, known) = (0, 0, [2, 3, 0, 0, 0, 0, 0, 0]);
        MirrorSuperblock {
            uuid,
            sequence,
            generation,
            leg,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner: MirrorOwnership { id: 9, epoch: 4, record: OwnerRecord::NONE },
            dirty,
        }
    }

    #[test]
    fn older_superblock_versions_are_read_and_newer_ones_rejected() {
        for (version, is_known) in [(0, false), (1, true), (2, true), (3, true), (4, false)] {
            let mut bytes = sample_superblock().encode();
            bytes[8] = version;
            let crc = super::crc_of(&bytes);
            bytes[super::CRC_AT..super::CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
            let found = MirrorSuperblock::decode(&bytes);
            assert_eq!(found.is_ok(), is_known, "{version}");
            let owner = found.map_or(0, |found| found.owner.id);
            assert_eq!(owner, if version == 3 { 9 } else { 0 }, "{version}");
        }
    }

    #[test]
    fn mirror_superblock_round_trips() {
        let superblock = MirrorSuperblock { fresh: 0b01, ..sample_superblock() };
        assert_eq!(superblock.encode()[82], 1);
        assert_eq!(MirrorSuperblock::decode(&superblock.encode()), Ok(superblock));
    }

    #[test]
    fn missing_leg_is_recorded_and_invalid_legs_are_rejected() {
        let three = MirrorSuperblock { legs: 3, gone: 0b001, ..sample_superblock() };
        assert_eq!(three.encode()[81], 1);
        assert_eq!(MirrorSuperblock::decode(&three.encode()), Ok(three.clone()));
        for gone in [0b010, 0b1000] {
            let bytes = MirrorSuperblock { gone, ..three.clone() }.encode();
            assert!(
                matches!(MirrorSuperblock::decode(&bytes), Err(SuperblockError::Damaged(_))),
                "{gone}"
            );
        }
    }

    #[test]
    fn mirror_superblock_bytes_are_stable() {
        let bytes = sample_superblock().encode();
        assert_eq!(&bytes[..12], b"tenmilMR\x03\0\0\0");
        assert_eq!(bytes[12..16], [0x9a, 0xcc, 0x3a, 0xa7]);
        assert_eq!(bytes[48..50], [1, 2]);
        assert_eq!((bytes[152], bytes[168]), (9, 4));
        assert_eq!(bytes[2048..2057], [1, 0, 0, 0, 0, 0, 0, 0x80, 1]);
    }

    #[test]
    fn any_flipped_superblock_bit_is_detected() {
        let good = sample_superblock().encode();
        let mut random = Random::new(1);
        for _ in 0..2_000 {
            let at = usize::try_from(random.below(SUPERBLOCK_BYTES as u64)).unwrap();
            let mut bytes = good;
            bytes[at] ^= 1 << random.below(8);
            let refused = MirrorSuperblock::decode(&bytes).unwrap_err();
            assert_eq!(refused == SuperblockError::Absent, at < 8, "byte {at}: {refused:?}");
        }
    }

    #[test]
    fn torn_superblock_copy_leaves_the_previous_one() {
        let older = sample_superblock();
        let newer = MirrorSuperblock { sequence: 8, generation: 4, ..older.clone() };
        let (odd, even) = (older.encode(), newer.encode());
        assert_eq!(MirrorSuperblock::newest_of_copies([&even, &odd]), Ok(newer));
        for cut in (0..SUPERBLOCK_BYTES).step_by(512) {
            let mut torn = [0xee; SUPERBLOCK_BYTES];
            torn[..cut].copy_from_slice(&even[..cut]);
            assert_eq!(
                MirrorSuperblock::newest_of_copies([&torn, &odd]),
                Ok(older.clone()),
                "cut at {cut}"
            );
        }
        let (raw, mut torn) = ([0; SUPERBLOCK_BYTES], even);
        torn[4000] ^= 1;
        assert_eq!(MirrorSuperblock::newest_of_copies([&raw, &raw]), Err(SuperblockError::Absent));
        for copies in [[&raw, &torn], [&torn, &raw]] {
            assert!(matches!(
                MirrorSuperblock::newest_of_copies(copies),
                Err(SuperblockError::Damaged(_))
            ));
        }
    }

    #[test]
    fn region_bitmap_size_is_bounded() {
        for shift in 21..60 {
            let geometry = MirrorGeometry::for_legs(4096, (1 << shift) / 4096 + 256).unwrap();
            assert!((1..=16_384).contains(&geometry.regions()), "{geometry:?}");
            assert!(geometry.region_blocks * 4096 >= 64 << 10);
        }
        assert_eq!(MirrorGeometry::for_legs(512, 2048), None, "there must be room for a block");
        let geometry = MirrorGeometry::for_legs(512, 2048 + 300).unwrap();
        assert_eq!((geometry.regions(), geometry.blocks_of(2)), (3, (256, 44)));
        assert_eq!(geometry.regions_of(127, 2), (0, 2));
        assert_eq!(geometry.regions_of(128, 0), (0, 0));
    }

    #[test]
    fn uuid_is_displayed_hyphenated() {
        assert_eq!(uuid_text(sample_superblock().uuid), "01234567-89ab-cdef-0123-456789abcdef");
    }
}
