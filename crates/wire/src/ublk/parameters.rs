//! What a disk is like.

use super::{put, take};

/// ```text
///   0       4       8      12        13         14         15       16
///   | bytes | types | attr | logical | physical | io opt   | io min | …      shifts
///   16            20              24        32                 40
///   | max sectors | chunk sectors | sectors | virtual boundary | …
///   40          44            48            52           56         58   60
///   | alignment | granularity | max discard | max zeroes | segments |    |
///   60                       76                  108              112   116
///   | numbers of its devices | what zones it has | alignment mask |     |
/// ```
///
/// `struct ublk_params`, as far as the basic parameters, those of discard and the alignment of
/// memory. What follows in newer kernels is left out: the length says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// What it is besides.
    pub attributes: Attributes,
    /// Bytes in a block, as a power of two.
    pub block_shift: u8,
    /// Bytes of which a part is not written faster than the whole, as a power of two.
    pub physical_shift: u8,
    /// Sectors in the largest request that moves data.
    pub sectors_max: u32,
    /// Sectors on the disk.
    pub sectors: u64,
    /// What can be deallocated and zeroed; none if neither can be.
    pub discard: Option<Discard>,
    /// Bytes that the memory of requests is aligned to, a power of two; none leaves it to the kernel,
    /// which takes 4.
    pub memory_alignment: Option<u32>,
}

/// How blocks are deallocated, and zeroed (`struct ublk_param_discard`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Bytes that can be deallocated by themselves.
    pub granularity: u32,
    /// Sectors in the largest deallocation; zero if there is none.
    pub discard_sectors_max: u32,
    /// Sectors that can be zeroed at once; zero if none can be.
    pub zero_sectors_max: u32,
}

/// What a disk is besides (`UBLK_ATTR_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes(pub u32);

impl Attributes {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Nobody may write.
    pub const READ_ONLY: Self = Self(1 << 0);
    /// It has a cache that is lost with the power, and flushes.
    pub const VOLATILE_CACHE: Self = Self(1 << 2);
    /// Single writes may be forced past that cache.
    pub const FUA: Self = Self(1 << 3);

    /// Both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are in it.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// `UBLK_PARAM_TYPE_BASIC`, `UBLK_PARAM_TYPE_DISCARD` and `UBLK_PARAM_TYPE_DMA_ALIGN`.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;
const ALIGNMENT: u32 = 1 << 4;

impl Parameters {
    /// How long they are.
    pub const BYTES: usize = 116;
    const SIZE: u32 = 116;
    /// How long they are without an alignment: all that kernels before 6.5 know.
    const SIZE_WITHOUT: u32 = 60;

    /// They as bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut types = BASIC;
        let mut size = Self::SIZE_WITHOUT;
        put(&mut bytes, 8, &self.attributes.0.to_ne_bytes());
        // The best size is the physical block, and so is the least that is worth while.
        let physical = self.physical_shift;
        put(&mut bytes, 12, &[self.block_shift, physical, physical, physical]);
        put(&mut bytes, 16, &self.sectors_max.to_ne_bytes());
        put(&mut bytes, 24, &self.sectors.to_ne_bytes());
        if let Some(discard) = self.discard {
            types |= DISCARD;
            put(&mut bytes, 44, &discard.granularity.to_ne_bytes());
            put(&mut bytes, 48, &discard.discard_sectors_max.to_ne_bytes());
            put(&mut bytes, 52, &discard.zero_sectors_max.to_ne_bytes());
            // No kernel takes more.
            put(&mut bytes, 56, &1_u16.to_ne_bytes());
        }
        if let Some(alignment) = self.memory_alignment {
            types |= ALIGNMENT;
            size = Self::SIZE;
            put(&mut bytes, 108, &(alignment - 1).to_ne_bytes());
        }
        put(&mut bytes, 0, &size.to_ne_bytes());
        put(&mut bytes, 4, &types.to_ne_bytes());
        bytes
    }

    /// What the kernel is given to say how much it may answer.
    pub fn question() -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &Self::SIZE.to_ne_bytes());
        bytes
    }

    /// What `bytes` say; none if they do not say what the disk is like.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let types = u32::from_ne_bytes(take(bytes, 4));
        let discard = Discard {
            granularity: u32::from_ne_bytes(take(bytes, 44)),
            discard_sectors_max: u32::from_ne_bytes(take(bytes, 48)),
            zero_sectors_max: u32::from_ne_bytes(take(bytes, 52)),
        };
        (types & BASIC != 0).then(|| Self {
            attributes: Attributes(u32::from_ne_bytes(take(bytes, 8))),
            block_shift: bytes[12],
            physical_shift: bytes[13],
            sectors_max: u32::from_ne_bytes(take(bytes, 16)),
            sectors: u64::from_ne_bytes(take(bytes, 24)),
            discard: (types & DISCARD != 0).then_some(discard),
            memory_alignment: (types & ALIGNMENT != 0)
                .then(|| u32::from_ne_bytes(take(bytes, 108)).saturating_add(1)),
        })
    }
}
