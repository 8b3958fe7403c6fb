//! SGL descriptors (Base 2.1 §4.3.2).
//!
//! ```text
//!  bytes 0..8    address (or offset)
//!  bytes 8..12   length in bytes        (keyed: 8..11 length, 11..15 key)
//!  byte  15      type 7:4 | sub type 3:0
//! ```

use core::fmt;

use crate::layout::{bits, mask};

/// An SGL descriptor: 16 bytes as two words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Descriptor(
    /// The address, then length and type.
    pub [u64; 2],
);

/// What a descriptor says, once its type is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Type 0h: bytes to transfer.
    DataBlock {
        /// Where they are, or how far into the capsule's data.
        place: Place,
        /// How many.
        len_bytes: u32,
    },
    /// Type 1h: bytes of the read data that are thrown away.
    BitBucket {
        /// How many.
        len_bytes: u32,
    },
    /// Type 2h: where the next segment is; another one follows it.
    Segment {
        /// Where it is, or how far into the capsule.
        place: Place,
        /// Its length: a multiple of 16.
        len_bytes: u32,
    },
    /// Type 3h: where the last segment is.
    LastSegment {
        /// Where it is, or how far into the capsule.
        place: Place,
        /// Its length: a multiple of 16.
        len_bytes: u32,
    },
    /// Type 4h: bytes at an address that a key opens, for RDMA.
    KeyedDataBlock {
        /// Where they are.
        address: u64,
        /// How many; 24 bits wide.
        len_bytes: u32,
        /// The key.
        key: u32,
        /// Whether the key is to be invalidated afterwards.
        invalidate_key: bool,
    },
    /// Type 5h: bytes that the transport carries itself, for TCP.
    TransportDataBlock {
        /// How many.
        len_bytes: u32,
    },
    /// Any other type or sub type.
    Unknown {
        /// The type.
        kind: u8,
        /// The sub type.
        subtype: u8,
    },
}

/// Where a data block or segment is: the sub type's two meanings (Base 2.1 §4.3.2, Figure 121).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Sub type 0h: at this address.
    Address(u64),
    /// Sub type 1h: this far from the beginning of the capsule's data.
    Offset(u64),
}

impl Descriptor {
    /// Its length.
    pub const BYTES: usize = 16;

    /// Type 0h, SGL Data Block (Base 2.1 §4.3.2).
    pub const DATA_BLOCK: u8 = 0x0;
    /// Type 1h, SGL Bit Bucket (Base 2.1 §4.3.2).
    pub const BIT_BUCKET: u8 = 0x1;
    /// Type 2h, SGL Segment (Base 2.1 §4.3.2).
    pub const SEGMENT: u8 = 0x2;
    /// Type 3h, SGL Last Segment (Base 2.1 §4.3.2).
    pub const LAST_SEGMENT: u8 = 0x3;
    /// Type 4h, Keyed SGL Data Block (Base 2.1 §4.3.2).
    pub const KEYED_DATA_BLOCK: u8 = 0x4;
    /// Type 5h, Transport SGL Data Block (Base 2.1 §4.3.2).
    pub const TRANSPORT_DATA_BLOCK: u8 = 0x5;
    /// Type Fh, the vendor's own (Base 2.1 §4.3.2).
    pub const VENDOR_SPECIFIC: u8 = 0xf;

    /// Sub type 0h: an address (Base 2.1 §4.3.2).
    pub const ADDRESS: u8 = 0x0;
    /// Sub type 1h: an offset into the capsule (Base 2.1 §4.3.2).
    pub const OFFSET: u8 = 0x1;
    /// Sub type Ah: the transport decides (Base 2.1 §4.3.2).
    pub const TRANSPORT: u8 = 0xa;
    /// Sub type Fh of a keyed data block: an address whose key is invalidated (RDMA 1.1 §3.3).
    pub const INVALIDATE_KEY: u8 = 0xf;

    /// Words of an address, a length and the identifier byte.
    #[inline]
    #[must_use]
    pub const fn new(address: u64, len_bytes: u32, kind: u8, subtype: u8) -> Self {
        let identifier = ((kind & 0xf) << 4 | subtype & 0xf) as u64;
        Self([address, len_bytes as u64 | identifier << 56])
    }

    /// `len_bytes` of data at `address`.
    #[inline]
    #[must_use]
    pub const fn data_block(address: u64, len_bytes: u32) -> Self {
        Self::new(address, len_bytes, Self::DATA_BLOCK, Self::ADDRESS)
    }

    /// `len_bytes` of data in the capsule, `offset` bytes behind the point that ICDOFF gives.
    #[inline]
    #[must_use]
    pub const fn in_capsule(offset: u64, len_bytes: u32) -> Self {
        Self::new(offset, len_bytes, Self::DATA_BLOCK, Self::OFFSET)
    }

    /// `len_bytes` of a read that nobody wants.
    #[inline]
    #[must_use]
    pub const fn bit_bucket(len_bytes: u32) -> Self {
        Self::new(0, len_bytes, Self::BIT_BUCKET, Self::ADDRESS)
    }

    /// The next segment of descriptors, which is not the last.
    #[inline]
    #[must_use]
    pub const fn segment(address: u64, len_bytes: u32) -> Self {
        Self::new(address, len_bytes, Self::SEGMENT, Self::ADDRESS)
    }

    /// The last segment of descriptors.
    #[inline]
    #[must_use]
    pub const fn last_segment(address: u64, len_bytes: u32) -> Self {
        Self::new(address, len_bytes, Self::LAST_SEGMENT, Self::ADDRESS)
    }

    /// `len_bytes` (24 bits) of data at `address`, opened by `key`.
    #[inline]
    #[must_use]
    pub const fn keyed(address: u64, len_bytes: u32, key: u32, invalidate_key: bool) -> Self {
        let subtype = if invalidate_key { Self::INVALIDATE_KEY } else { Self::ADDRESS };
        let base = Self::new(address, 0, Self::KEYED_DATA_BLOCK, subtype);
        Self([address, base.0[1] | (key as u64) << 24 | (len_bytes as u64 & mask(24))])
    }

    /// `len_bytes` that the transport carries itself.
    #[inline]
    #[must_use]
    pub const fn transport(len_bytes: u32) -> Self {
        Self::new(0, len_bytes, Self::TRANSPORT_DATA_BLOCK, Self::TRANSPORT)
    }

    /// The descriptor in these little-endian bytes.
    #[inline]
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 16]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])])
    }

    /// The descriptor as little-endian bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (word, chunk) in self.0.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// The type.
    #[inline]
    #[must_use]
    pub const fn kind(&self) -> u8 {
        self.0[1].to_le_bytes()[7] >> 4
    }

    /// The sub type.
    #[inline]
    #[must_use]
    pub const fn subtype(&self) -> u8 {
        self.0[1].to_le_bytes()[7] & 0xf
    }

    /// The address, or the offset if the sub type says so.
    #[inline]
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.0[0]
    }

    /// The length of any type but keyed.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the low half is the field")]
    pub const fn len_bytes(&self) -> u32 {
        self.0[1] as u32
    }

    /// What it says.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "cut to the width of the field")]
    pub const fn meaning(&self) -> Meaning {
        let (kind, subtype, len_bytes) = (self.kind(), self.subtype(), self.len_bytes());
        let place = match subtype {
            Self::ADDRESS => Place::Address(self.0[0]),
            _ => Place::Offset(self.0[0]),
        };
        match (kind, subtype) {
            (Self::DATA_BLOCK, Self::ADDRESS | Self::OFFSET) => {
                Meaning::DataBlock { place, len_bytes }
            }
            (Self::BIT_BUCKET, Self::ADDRESS) => Meaning::BitBucket { len_bytes },
            (Self::SEGMENT, Self::ADDRESS | Self::OFFSET) => Meaning::Segment { place, len_bytes },
            (Self::LAST_SEGMENT, Self::ADDRESS | Self::OFFSET) => {
                Meaning::LastSegment { place, len_bytes }
            }
            (Self::KEYED_DATA_BLOCK, Self::ADDRESS | Self::INVALIDATE_KEY) => {
                Meaning::KeyedDataBlock {
                    address: self.0[0],
                    len_bytes: bits(self.0[1], 0, 24) as u32,
                    key: bits(self.0[1], 24, 32) as u32,
                    invalidate_key: subtype == Self::INVALIDATE_KEY,
                }
            }
            (Self::TRANSPORT_DATA_BLOCK, Self::TRANSPORT) => {
                Meaning::TransportDataBlock { len_bytes }
            }
            _ => Meaning::Unknown { kind, subtype },
        }
    }
}

impl Meaning {
    /// The descriptor that says this; reserved bits are clear.
    #[must_use]
    pub const fn to_descriptor(self) -> Descriptor {
        const fn at(place: Place, len_bytes: u32, kind: u8) -> Descriptor {
            match place {
                Place::Address(address) => {
                    Descriptor::new(address, len_bytes, kind, Descriptor::ADDRESS)
                }
                Place::Offset(offset) => {
                    Descriptor::new(offset, len_bytes, kind, Descriptor::OFFSET)
                }
            }
        }
        match self {
            Self::DataBlock { place, len_bytes } => at(place, len_bytes, Descriptor::DATA_BLOCK),
            Self::BitBucket { len_bytes } => Descriptor::bit_bucket(len_bytes),
            Self::Segment { place, len_bytes } => at(place, len_bytes, Descriptor::SEGMENT),
            Self::LastSegment { place, len_bytes } => {
                at(place, len_bytes, Descriptor::LAST_SEGMENT)
            }
            Self::KeyedDataBlock { address, len_bytes, key, invalidate_key } => {
                Descriptor::keyed(address, len_bytes, key, invalidate_key)
            }
            Self::TransportDataBlock { len_bytes } => Descriptor::transport(len_bytes),
            Self::Unknown { kind, subtype } => Descriptor::new(0, 0, kind, subtype),
        }
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.meaning().fmt(out)
    }
}

#[cfg(test)]
mod tests {
    use super::{Descriptor, Meaning, Place};

    #[test]
    fn a_data_block_lies_in_memory_as_figure_123_draws_it() {
        let bytes = Descriptor::data_block(0x0807_0605_0403_0201, 0x0c0b_0a09).to_bytes();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0x00]);
        assert_eq!(Descriptor::last_segment(0, 0).to_bytes()[15], 0x30);
        assert_eq!(Descriptor::in_capsule(0, 0).to_bytes()[15], 0x01);
        assert_eq!(Descriptor::transport(0).to_bytes()[15], 0x5a);
    }

    #[test]
    fn a_keyed_data_block_has_three_bytes_of_length_and_four_of_key() {
        let bytes = Descriptor::keyed(0, 0x03_0201, 0x0706_0504, true).to_bytes();
        assert_eq!(bytes[8..], [1, 2, 3, 4, 5, 6, 7, 0x4f]);
        assert_eq!(
            Descriptor::from_bytes(&bytes).meaning(),
            Meaning::KeyedDataBlock {
                address: 0,
                len_bytes: 0x03_0201,
                key: 0x0706_0504,
                invalidate_key: true
            }
        );
    }

    #[test]
    fn every_type_and_sub_type_survives_and_every_bit_of_its_fields() {
        for identifier in 0..=u8::MAX {
            let (kind, subtype) = (identifier >> 4, identifier & 0xf);
            for bit in 0..120 {
                let (address, tail) = if bit < 64 { (1 << bit, 0) } else { (0, 1 << (bit - 64)) };
                let described = Descriptor([address, tail | u64::from(identifier) << 56]);
                let again = described.meaning().to_descriptor();
                assert_eq!((again.kind(), again.subtype()), (kind, subtype));
                assert_eq!(again.meaning(), described.meaning());
                let shown = match described.meaning() {
                    Meaning::Unknown { .. } => continue,
                    Meaning::BitBucket { .. } | Meaning::TransportDataBlock { .. } => 64..96,
                    Meaning::KeyedDataBlock { .. } => 0..120,
                    _ => 0..96,
                };
                assert_eq!(again == described, shown.contains(&bit), "{described:?} bit {bit}");
                assert_eq!(Descriptor::from_bytes(&described.to_bytes()), described);
            }
        }
    }

    #[test]
    fn an_offset_is_not_taken_for_an_address() {
        assert_eq!(
            Descriptor::in_capsule(4096, 512).meaning(),
            Meaning::DataBlock { place: Place::Offset(4096), len_bytes: 512 }
        );
        assert_eq!(
            Descriptor::segment(4096, 32).meaning(),
            Meaning::Segment { place: Place::Address(4096), len_bytes: 32 }
        );
    }
}
