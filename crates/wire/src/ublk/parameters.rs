//! Disk parameters.

use super::{bytes_at, put_bytes};

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
/// `struct ublk_params`, as far as the basic parameters, those of discard and the DMA alignment.
/// Parameters of newer kernels are omitted, as the length indicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Attributes.
    pub attributes: DiskAttributes,
    /// Logical block size, as a power of two.
    pub block_shift: u8,
    /// Physical block size, as a power of two.
    pub physical_shift: u8,
    /// Sectors in the largest data request.
    pub sectors_max: u32,
    /// Capacity in sectors.
    pub sectors: u64,
    /// Discard and write zeroes parameters; `None` if neither is supported.
    pub discard: Option<Discard>,
    /// Memory alignment of requests in bytes, a power of two; `None` leaves it to the kernel, which
    /// uses 4.
    pub memory_alignment: Option<u32>,
}

/// Discard and write zeroes parameters (`struct ublk_param_discard`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Discard granularity in bytes.
    pub granularity: u32,
    /// Sectors in the largest discard; zero if not supported.
    pub discard_sectors_max: u32,
    /// Sectors in the largest write zeroes; zero if not supported.
    pub zero_sectors_max: u32,
}

/// Disk attributes (`UBLK_ATTR_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskAttributes(pub u32);

impl DiskAttributes {
    /// No attributes.
    pub const NONE: Self = Self(0);
    /// Read-only.
    pub const READ_ONLY: Self = Self(1 << 0);
    /// The disk has a volatile write cache and supports flush.
    pub const VOLATILE_CACHE: Self = Self(1 << 2);
    /// Force unit access is supported.
    pub const FUA: Self = Self(1 << 3);

    /// Union of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are in the set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// `UBLK_PARAM_TYPE_BASIC`, `UBLK_PARAM_TYPE_DISCARD` and `UBLK_PARAM_TYPE_DMA_ALIGN`.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;
const ALIGNMENT: u32 = 1 << 4;

impl Parameters {
    /// Length in bytes.
    pub const BYTES: usize = 116;
    const SIZE: u32 = 116;
    /// Length without the DMA alignment: all that kernels before 6.5 know.
    const SIZE_WITHOUT: u32 = 60;

    /// Encodes to bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut types = BASIC;
        let mut size = Self::SIZE_WITHOUT;
        put_bytes(&mut bytes, 8, &self.attributes.0.to_ne_bytes());
        // Optimal and minimum I/O size are the physical block size.
        let physical = self.physical_shift;
        put_bytes(&mut bytes, 12, &[self.block_shift, physical, physical, physical]);
        put_bytes(&mut bytes, 16, &self.sectors_max.to_ne_bytes());
        put_bytes(&mut bytes, 24, &self.sectors.to_ne_bytes());
        if let Some(discard) = self.discard {
            types |= DISCARD;
            put_bytes(&mut bytes, 44, &discard.granularity.to_ne_bytes());
            put_bytes(&mut bytes, 48, &discard.discard_sectors_max.to_ne_bytes());
            put_bytes(&mut bytes, 52, &discard.zero_sectors_max.to_ne_bytes());
            // The kernel accepts no more than one segment.
            put_bytes(&mut bytes, 56, &1_u16.to_ne_bytes());
        }
        if let Some(alignment) = self.memory_alignment {
            types |= ALIGNMENT;
            size = Self::SIZE;
            put_bytes(&mut bytes, 108, &(alignment - 1).to_ne_bytes());
        }
        put_bytes(&mut bytes, 0, &size.to_ne_bytes());
        put_bytes(&mut bytes, 4, &types.to_ne_bytes());
        bytes
    }

    /// Buffer for GET_PARAMS: its length field limits the result.
    pub fn query_buffer() -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put_bytes(&mut bytes, 0, &Self::SIZE.to_ne_bytes());
        bytes
    }

    /// Decodes bytes; `None` if the basic parameters are missing.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let types = u32::from_ne_bytes(bytes_at(bytes, 4));
        let discard = Discard {
            granularity: u32::from_ne_bytes(bytes_at(bytes, 44)),
            discard_sectors_max: u32::from_ne_bytes(bytes_at(bytes, 48)),
            zero_sectors_max: u32::from_ne_bytes(bytes_at(bytes, 52)),
        };
        (types & BASIC != 0).then(|| Self {
            attributes: DiskAttributes(u32::from_ne_bytes(bytes_at(bytes, 8))),
            block_shift: bytes[12],
            physical_shift: bytes[13],
            sectors_max: u32::from_ne_bytes(bytes_at(bytes, 16)),
            sectors: u64::from_ne_bytes(bytes_at(bytes, 24)),
            discard: (types & DISCARD != 0).then_some(discard),
            memory_alignment: (types & ALIGNMENT != 0)
                .then(|| u32::from_ne_bytes(bytes_at(bytes, 108)).saturating_add(1)),
        })
    }
}
