//! SGL descriptors (Base 2.1 §4.3.2).
//!
//! ```text
//!  bytes 0..8    address (or offset)
//!  bytes 8..12   length in bytes        (keyed: 8..11 length, 11..15 key)
//!  byte  15      type 7:4 | sub type 3:0
//! ```

use core::fmt;

use crate::layout::{extract_bits, low_bits_mask};

/// SGL descriptor: 16 bytes as two words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Descriptor(
    /// Address, then length and type.
    pub [u64; 2],
);

/// Decoded descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorKind {
    /// Type 0h: data block.
    DataBlock {
        /// Address, or offset in the capsule's data.
        location: DataLocation,
        /// Length.
        len_bytes: u32,
    },
    /// Type 1h: bytes of read data that are discarded.
    BitBucket {
        /// Length.
        len_bytes: u32,
    },
    /// Type 2h: next segment, which is not the last.
    Segment {
        /// Address, or offset in the capsule.
        location: DataLocation,
        /// Length, a multiple of 16.
        len_bytes: u32,
    },
    /// Type 3h: last segment.
    LastSegment {
        /// Address, or offset in the capsule.
        location: DataLocation,
        /// Length, a multiple of 16.
        len_bytes: u32,
    },
    /// Type 4h: keyed data block, for RDMA.
    KeyedDataBlock {
        /// Address.
        address: u64,
        /// Length; 24 bits wide.
        len_bytes: u32,
        /// The key.
        key: u32,
        /// Whether the key is invalidated afterwards.
        invalidate_key: bool,
    },
    /// Type 5h: data transferred by the transport itself, for TCP.
    TransportDataBlock {
        /// Length.
        len_bytes: u32,
    },
    /// Any other type or subtype.
    Unknown {
        /// The type.
        kind: u8,
        /// The sub type.
        subtype: u8,
    },
}

/// Location of a data block or segment, by subtype (Base 2.1 §4.3.2, Figure 121).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLocation {
    /// Subtype 0h: address.
    Address(u64),
    /// Subtype 1h: offset in the capsule's data.
    Offset(u64),
}

impl Descriptor {
    /// Length of a descriptor.
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
    /// Type Fh, vendor specific (Base 2.1 §4.3.2).
    pub const VENDOR_SPECIFIC: u8 = 0xf;

    /// Subtype 0h: address (Base 2.1 §4.3.2).
    pub const ADDRESS: u8 = 0x0;
    /// Subtype 1h: offset in the capsule (Base 2.1 §4.3.2).
    pub const OFFSET: u8 = 0x1;
    /// Subtype Ah: transport specific (Base 2.1 §4.3.2).
    pub const TRANSPORT: u8 = 0xa;
    /// Subtype Fh of a keyed data block: the key is invalidated (RDMA 1.1 §3.3).
    pub const INVALIDATE_KEY: u8 = 0xf;

    /// Creates a descriptor from an address, a length, and type and subtype.
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

    /// `len_bytes` of data in the capsule, at `offset` from the position given by ICDOFF.
    #[inline]
    #[must_use]
    pub const fn in_capsule(offset: u64, len_bytes: u32) -> Self {
        Self::new(offset, len_bytes, Self::DATA_BLOCK, Self::OFFSET)
    }

    /// Discards `len_bytes` of a read.
    #[inline]
    #[must_use]
    pub const fn bit_bucket(len_bytes: u32) -> Self {
        Self::new(0, len_bytes, Self::BIT_BUCKET, Self::ADDRESS)
    }

    /// Next segment of descriptors, which is not the last.
    #[inline]
    #[must_use]
    pub const fn segment(address: u64, len_bytes: u32) -> Self {
        Self::new(address, len_bytes, Self::SEGMENT, Self::ADDRESS)
    }

    /// Last segment of descriptors.
    #[inline]
    #[must_use]
    pub const fn last_segment(address: u64, len_bytes: u32) -> Self {
        Self::new(address, len_bytes, Self::LAST_SEGMENT, Self::ADDRESS)
    }

    /// `len_bytes` (24 bits) of data at `address`, with `key`.
    #[inline]
    #[must_use]
    pub const fn keyed_data_block(
        address: u64,
        len_bytes: u32,
        key: u32,
        invalidate_key: bool,
    ) -> Self {
        let subtype = if invalidate_key { Self::INVALIDATE_KEY } else { Self::ADDRESS };
        let base = Self::new(address, 0, Self::KEYED_DATA_BLOCK, subtype);
        Self([address, base.0[1] | (key as u64) << 24 | (len_bytes as u64 & low_bits_mask(24))])
    }

    /// `len_bytes` transferred by the transport itself.
    #[inline]
    #[must_use]
    pub const fn transport_data_block(len_bytes: u32) -> Self {
        Self::new(0, len_bytes, Self::TRANSPORT_DATA_BLOCK, Self::TRANSPORT)
    }

    /// Decodes little-endian bytes.
    #[inline]
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 16]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])])
    }

    /// Encodes to little-endian bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (word, chunk) in self.0.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// Descriptor type.
    #[inline]
    #[must_use]
    pub const fn type_code(&self) -> u8 {
        self.0[1].to_le_bytes()[7] >> 4
    }

    /// Descriptor subtype.
    #[inline]
    #[must_use]
    pub const fn subtype(&self) -> u8 {
        self.0[1].to_le_bytes()[7] & 0xf
    }

    /// Address, or offset, depending on the subtype.
    #[inline]
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.0[0]
    }

    /// Length, for all types but keyed ones.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the low half is the field")]
    pub const fn len_bytes(&self) -> u32 {
        self.0[1] as u32
    }

    /// Decodes the descriptor.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "cut to the width of the field")]
    pub const fn decode(&self) -> DescriptorKind {
        let (kind, subtype, len_bytes) = (self.type_code(), self.subtype(), self.len_bytes());
        let place = match subtype {
            Self::ADDRESS => DataLocation::Address(self.0[0]),
            _ => DataLocation::Offset(self.0[0]),
        };
        match (kind, subtype) {
            (Self::DATA_BLOCK, Self::ADDRESS | Self::OFFSET) => {
                DescriptorKind::DataBlock { location: place, len_bytes }
            }
            (Self::BIT_BUCKET, Self::ADDRESS) => DescriptorKind::BitBucket { len_bytes },
            (Self::SEGMENT, Self::ADDRESS | Self::OFFSET) => {
                DescriptorKind::Segment { location: place, len_bytes }
            }
            (Self::LAST_SEGMENT, Self::ADDRESS | Self::OFFSET) => {
                DescriptorKind::LastSegment { location: place, len_bytes }
            }
            (Self::KEYED_DATA_BLOCK, Self::ADDRESS | Self::INVALIDATE_KEY) => {
                DescriptorKind::KeyedDataBlock {
                    address: self.0[0],
                    len_bytes: extract_bits(self.0[1], 0, 24) as u32,
                    key: extract_bits(self.0[1], 24, 32) as u32,
                    invalidate_key: subtype == Self::INVALIDATE_KEY,
                }
            }
            (Self::TRANSPORT_DATA_BLOCK, Self::TRANSPORT) => {
                DescriptorKind::TransportDataBlock { len_bytes }
            }
            _ => DescriptorKind::Unknown { kind, subtype },
        }
    }
}

impl DescriptorKind {
    /// Encodes the descriptor; reserved bits are clear.
    #[must_use]
    pub const fn to_descriptor(self) -> Descriptor {
        const fn descriptor_at(place: DataLocation, len_bytes: u32, kind: u8) -> Descriptor {
            match place {
                DataLocation::Address(address) => {
                    Descriptor::new(address, len_bytes, kind, Descriptor::ADDRESS)
                }
                DataLocation::Offset(offset) => {
                    Descriptor::new(offset, len_bytes, kind, Descriptor::OFFSET)
                }
            }
        }
        match self {
            Self::DataBlock { location: place, len_bytes } => {
                descriptor_at(place, len_bytes, Descriptor::DATA_BLOCK)
            }
            Self::BitBucket { len_bytes } => Descriptor::bit_bucket(len_bytes),
            Self::Segment { location: place, len_bytes } => {
                descriptor_at(place, len_bytes, Descriptor::SEGMENT)
            }
            Self::LastSegment { location: place, len_bytes } => {
                descriptor_at(place, len_bytes, Descriptor::LAST_SEGMENT)
            }
            Self::KeyedDataBlock { address, len_bytes, key, invalidate_key } => {
                Descriptor::keyed_data_block(address, len_bytes, key, invalidate_key)
            }
            Self::TransportDataBlock { len_bytes } => Descriptor::transport_data_block(len_bytes),
            Self::Unknown { kind, subtype } => Descriptor::new(0, 0, kind, subtype),
        }
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.decode().fmt(out)
    }
}

#[cfg(test)]
mod tests {
    use super::{DataLocation, Descriptor, DescriptorKind};

    #[test]
    fn data_block_descriptor_has_the_layout_of_figure_123() {
        let bytes = Descriptor::data_block(0x0807_0605_0403_0201, 0x0c0b_0a09).to_bytes();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0x00]);
        assert_eq!(Descriptor::last_segment(0, 0).to_bytes()[15], 0x30);
        assert_eq!(Descriptor::in_capsule(0, 0).to_bytes()[15], 0x01);
        assert_eq!(Descriptor::transport_data_block(0).to_bytes()[15], 0x5a);
    }

    #[test]
    fn keyed_data_block_has_a_24_bit_length_and_a_32_bit_key() {
        let bytes = Descriptor::keyed_data_block(0, 0x03_0201, 0x0706_0504, true).to_bytes();
        assert_eq!(bytes[8..], [1, 2, 3, 4, 5, 6, 7, 0x4f]);
        assert_eq!(
            Descriptor::from_bytes(&bytes).decode(),
            DescriptorKind::KeyedDataBlock {
                address: 0,
                len_bytes: 0x03_0201,
                key: 0x0706_0504,
                invalidate_key: true
            }
        );
    }

    #[test]
    fn sgl_descriptors_round_trip() {
        for identifier in 0..=u8::MAX {
            let (kind, subtype) = (identifier >> 4, identifier & 0xf);
            for bit in 0..120 {
                let (address, tail) = if bit < 64 { (1 << bit, 0) } else { (0, 1 << (bit - 64)) };
                let described = Descriptor([address, tail | u64::from(identifier) << 56]);
                let again = described.decode().to_descriptor();
                assert_eq!((again.type_code(), again.subtype()), (kind, subtype));
                assert_eq!(again.decode(), described.decode());
                let shown = match described.decode() {
                    DescriptorKind::Unknown { .. } => continue,
                    DescriptorKind::BitBucket { .. }
                    | DescriptorKind::TransportDataBlock { .. } => 64..96,
                    DescriptorKind::KeyedDataBlock { .. } => 0..120,
                    _ => 0..96,
                };
                assert_eq!(again == described, shown.contains(&bit), "{described:?} bit {bit}");
                assert_eq!(Descriptor::from_bytes(&described.to_bytes()), described);
            }
        }
    }

    #[test]
    fn offset_and_address_subtypes_are_distinct() {
        assert_eq!(
            Descriptor::in_capsule(4096, 512).decode(),
            DescriptorKind::DataBlock { location: DataLocation::Offset(4096), len_bytes: 512 }
        );
        assert_eq!(
            Descriptor::segment(4096, 32).decode(),
            DescriptorKind::Segment { location: DataLocation::Address(4096), len_bytes: 32 }
        );
    }
}
