//! Protection information: a guard and tags per block (NVM 1.1 §5.3).
//!
//! ```text
//!  16b guard, 8 bytes    guard 2 | application tag 2 | storage and reference tag 4
//!  32b guard, 16 bytes   guard 4 | application tag 2 | storage and reference tag 10
//!  64b guard, 16 bytes   guard 8 | application tag 2 | storage and reference tag 6
//! ```
//!
//! All fields are big-endian (T10). The storage tag is the high bits of the last field and may be
//! empty; the reference tag is the rest. Guards are computed elsewhere.

use crate::command::Command;
use crate::element::code;
use crate::identify::namespace::GuardFormat;

/// Protection information format of a namespace: PIF and STS (NVM 1.1 §4.1.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    guard: Guard,
    storage_tag_bits: u32,
}

/// Protection information of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// The guard, right-aligned.
    pub guard: u64,
    /// The application tag.
    pub application_tag: u16,
    /// Storage and reference tag, right-aligned.
    pub tags: u128,
}

/// Storage tag and reference tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    /// The storage tag, right-aligned.
    pub storage: u64,
    /// The reference tag, right-aligned.
    pub reference: u128,
}

/// Guard width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guard {
    Bits16,
    Bits32,
    Bits64,
}

code! {
    /// PIT: type of protection, which determines the checks (NVM 1.1 §5.3.2).
    pub enum ProtectionType {
        /// No protection information.
        None = 0,
        /// Reference tags follow the block address.
        Type1 = 1,
        /// Reference tags follow the command's initial value.
        Type2 = 2,
        /// Reference tags are not checked.
        Type3 = 3,
    }
}

/// Application tag that disables checking for a block (NVM 1.1 §5.3.2).
pub const APPLICATION_TAG_ESCAPE: u16 = 0xffff;

/// Guard of a deallocated block, for which no CRC is computed (NVM 1.1 §3.3.3.2.1).
pub const DEALLOCATED_GUARD: u64 = u64::MAX;

impl Format {
    /// The most common format: 16-bit guard, 32-bit reference tag.
    pub const T10: Self = Self { guard: Guard::Bits16, storage_tag_bits: 0 };

    /// Creates the format of these two fields.
    ///
    /// `None` if the storage tag length is not permitted for the guard (NVM 1.1 §5.3.1), or the
    /// guard format is none of the three.
    #[must_use]
    pub fn new(guard: GuardFormat, storage_tag_bits: u8) -> Option<Self> {
        let bits = u32::from(storage_tag_bits);
        let (guard, allowed) = match guard {
            GuardFormat::Bits16 => (Guard::Bits16, 0..=32),
            GuardFormat::Bits32 => (Guard::Bits32, 16..=64),
            GuardFormat::Bits64 => (Guard::Bits64, 0..=48),
            GuardFormat::Qualified | GuardFormat::Reserved(_) => return None,
        };
        allowed.contains(&bits).then_some(Self { guard, storage_tag_bits: bits })
    }

    /// Length of a tuple in bytes.
    #[must_use]
    pub const fn tuple_bytes(&self) -> usize {
        match self.guard {
            Guard::Bits16 => 8,
            Guard::Bits32 | Guard::Bits64 => 16,
        }
    }

    /// Length of a guard in bytes.
    #[must_use]
    pub const fn guard_bytes(&self) -> usize {
        match self.guard {
            Guard::Bits16 => 2,
            Guard::Bits32 => 4,
            Guard::Bits64 => 8,
        }
    }

    /// Width of storage and reference tag together.
    #[must_use]
    pub const fn tags_bits(&self) -> u32 {
        match self.guard {
            Guard::Bits16 => 32,
            Guard::Bits32 => 80,
            Guard::Bits64 => 48,
        }
    }

    /// Width of the storage tag.
    #[must_use]
    pub const fn storage_tag_bits(&self) -> u32 {
        self.storage_tag_bits
    }

    /// Width of the reference tag.
    #[must_use]
    pub const fn reference_tag_bits(&self) -> u32 {
        self.tags_bits() - self.storage_tag_bits
    }

    /// Parses a tuple from the first bytes. `None` if there are too few.
    #[must_use]
    pub fn parse(&self, bytes: &[u8]) -> Option<Tuple> {
        let bytes = bytes.get(..self.tuple_bytes())?;
        let (guard, rest) = bytes.split_at(self.guard_bytes());
        let (application, tags) = rest.split_at(2);
        Some(Tuple {
            guard: u64::try_from(big_endian(guard)).ok()?,
            application_tag: u16::try_from(big_endian(application)).ok()?,
            tags: big_endian(tags),
        })
    }

    /// Stores a tuple into the first bytes. Values wider than their field are truncated.
    ///
    /// # Panics
    ///
    /// If there are fewer than [`Self::tuple_bytes`].
    pub fn emit(&self, tuple: &Tuple, bytes: &mut [u8]) {
        let (guard, rest) = bytes[..self.tuple_bytes()].split_at_mut(self.guard_bytes());
        let (application, tags) = rest.split_at_mut(2);
        put_big_endian(u128::from(tuple.guard), guard);
        put_big_endian(u128::from(tuple.application_tag), application);
        put_big_endian(tuple.tags, tags);
    }

    /// Splits the combined field into both tags.
    #[must_use]
    pub fn split(&self, tags: u128) -> Tags {
        let bits = self.reference_tag_bits();
        let storage = low(tags, self.tags_bits()) >> bits;
        Tags { storage: u64::try_from(storage).unwrap_or(u64::MAX), reference: low(tags, bits) }
    }

    /// Combines both tags into one field. Values wider than their field are truncated.
    #[must_use]
    pub const fn join(&self, tags: Tags) -> u128 {
        let bits = self.reference_tag_bits();
        low(low(tags.reference, bits) | (tags.storage as u128) << bits, self.tags_bits())
    }

    /// Expected reference tag `index` blocks after one of `initial`.
    ///
    /// It wraps at the width of the tag, and stays for type 3 (NVM 1.1 §5.3.2).
    #[must_use]
    pub const fn reference(&self, kind: ProtectionType, initial: u128, index: u64) -> u128 {
        let step = if matches!(kind, ProtectionType::Type3) { 0 } else { index as u128 };
        low(initial.wrapping_add(step), self.reference_tag_bits())
    }

    /// Whether a tuple disables the check of its block (NVM 1.1 §5.3.2).
    #[must_use]
    pub fn is_escaped(&self, kind: ProtectionType, tuple: &Tuple) -> bool {
        let reference = self.split(tuple.tags).reference;
        let ones = low(u128::MAX, self.reference_tag_bits());
        tuple.application_tag == APPLICATION_TAG_ESCAPE
            && (kind != ProtectionType::Type3 || reference == ones)
    }

    /// Tags of a command for its first block (NVM 1.1 §5.3.1.4): 80 bits in CDW2, CDW3 and CDW14,
    /// of which the format uses the low ones.
    #[must_use]
    pub const fn tags_of(&self, command: &Command) -> u128 {
        let high = (command.cdw2() as u128 & 0xffff) << 64 | (command.cdw3() as u128) << 32;
        low(high | command.cdw14() as u128, self.tags_bits())
    }

    /// Sets the tags of `command` for its first block.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the field is taken apart into dwords")]
    pub const fn with_tags(&self, command: Command, tags: u128) -> Command {
        let tags = low(tags, self.tags_bits());
        command
            .with_cdw2((tags >> 64) as u32)
            .with_cdw3((tags >> 32) as u32)
            .with_cdw14(tags as u32)
    }
}

const fn low(value: u128, bits: u32) -> u128 {
    if bits >= 128 { value } else { value & ((1 << bits) - 1) }
}

fn big_endian(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u128::from(byte))
}

fn put_big_endian(value: u128, bytes: &mut [u8]) {
    for (byte, from) in bytes.iter_mut().rev().zip(value.to_le_bytes()) {
        *byte = from;
    }
}

#[cfg(test)]
mod tests {
    use super::{Format, ProtectionType, Tags, Tuple, low};
    use crate::command::Command;
    use crate::identify::namespace::GuardFormat;

    fn every_format() -> Vec<Format> {
        let guards = [GuardFormat::Bits16, GuardFormat::Bits32, GuardFormat::Bits64];
        let of = |guard| (0..=u8::MAX).filter_map(move |bits| Format::new(guard, bits));
        guards.into_iter().flat_map(of).collect()
    }

    #[test]
    fn storage_tags_are_allowed_within_the_bounds_of_their_guard() {
        let widths = |guard| {
            let formats = (0..=u8::MAX).filter_map(|bits| Format::new(guard, bits));
            let widths: Vec<_> = formats.map(|format| format.storage_tag_bits()).collect();
            (widths[0], widths[widths.len() - 1])
        };
        assert_eq!(widths(GuardFormat::Bits16), (0, 32));
        assert_eq!(widths(GuardFormat::Bits32), (16, 64));
        assert_eq!(widths(GuardFormat::Bits64), (0, 48));
        assert_eq!(Format::new(GuardFormat::Qualified, 0), None);
    }

    #[test]
    fn a_tuple_of_t10_is_big_endian() {
        let bytes = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0];
        let tuple = Format::T10.parse(&bytes).unwrap();
        assert_eq!((tuple.guard, tuple.application_tag, tuple.tags), (0x1234, 0x5678, 0x9abc_def0));
        let split = Format::T10.split(tuple.tags);
        assert_eq!(split, Tags { storage: 0, reference: 0x9abc_def0 });
        assert_eq!(Format::T10.parse(&bytes[..7]), None);
    }

    #[test]
    fn every_bit_of_every_field_of_a_tuple_survives_in_every_format() {
        for format in every_format() {
            let length = format.tuple_bytes();
            for bit in 0..length * 8 {
                let mut bytes = vec![0; length];
                bytes[bit / 8] = 1 << (bit % 8);
                let tuple = format.parse(&bytes).unwrap();
                let ones = tuple.guard.count_ones()
                    + tuple.application_tag.count_ones()
                    + tuple.tags.count_ones();
                assert_eq!(ones, 1);
                let mut again = vec![0xff; length];
                format.emit(&tuple, &mut again);
                assert_eq!(again, bytes);
                assert_eq!(format.join(format.split(tuple.tags)), tuple.tags);
            }
        }
    }

    #[test]
    fn storage_and_reference_tag_share_their_field() {
        let format = Format::new(GuardFormat::Bits64, 16).unwrap();
        assert_eq!(format.reference_tag_bits(), 32);
        let joined = format.join(Tags { storage: 0xabcd, reference: 0x1234_5678 });
        assert_eq!(joined, 0xabcd_1234_5678);
        assert_eq!(format.split(joined), Tags { storage: 0xabcd, reference: 0x1234_5678 });
        let cut = format.join(Tags { storage: 0x1_abcd, reference: 1 << 32 });
        assert_eq!(cut, 0xabcd_0000_0000);
    }

    #[test]
    fn a_reference_tag_counts_wraps_and_stays_for_type_three() {
        let format = Format::T10;
        let last = u128::from(u32::MAX);
        assert_eq!(format.reference(ProtectionType::Type1, last, 2), 1);
        assert_eq!(format.reference(ProtectionType::Type2, 5, 3), 8);
        assert_eq!(format.reference(ProtectionType::Type3, 5, 3), 5);
    }

    #[test]
    fn a_block_is_not_checked_when_its_tags_say_so() {
        let tuple = Tuple { guard: 0, application_tag: 0xffff, tags: 0 };
        assert!(Format::T10.is_escaped(ProtectionType::Type1, &tuple));
        assert!(!Format::T10.is_escaped(ProtectionType::Type3, &tuple));
        let all = Tuple { tags: 0xffff_ffff, ..tuple };
        assert!(Format::T10.is_escaped(ProtectionType::Type3, &all));
        let none = Tuple { application_tag: 0xfffe, ..all };
        assert!(!Format::T10.is_escaped(ProtectionType::Type1, &none));
    }

    #[test]
    fn tags_of_a_command_lie_in_three_dwords() {
        let wide = Format::new(GuardFormat::Bits32, 16).unwrap();
        let command = wide.with_tags(Command::default(), 0x1122_3344_5566_7788_99aa);
        assert_eq!(command.cdw2(), 0x1122);
        assert_eq!((command.cdw3(), command.cdw14()), (0x3344_5566, 0x7788_99aa));
        for format in every_format() {
            for bit in 0..80 {
                let command = format.with_tags(Command([u64::MAX; 8]), 1 << bit);
                assert_eq!(format.tags_of(&command), low(1 << bit, format.tags_bits()));
            }
        }
    }
}
