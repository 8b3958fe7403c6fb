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
use crate::field_type::code;
use crate::identify::namespace::GuardFormat;

/// Protection information format of a namespace: PIF and STS (NVM 1.1 §4.1.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionInfoFormat {
    guard: GuardWidth,
    storage_tag_bits: u32,
}

/// Protection information of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionInfo {
    /// The guard, right-aligned.
    pub guard: u64,
    /// The application tag.
    pub application_tag: u16,
    /// Storage and reference tag, right-aligned.
    pub tags: u128,
}

/// Storage tag and reference tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionTags {
    /// The storage tag, right-aligned.
    pub storage: u64,
    /// The reference tag, right-aligned.
    pub reference: u128,
}

/// Guard width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuardWidth {
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

impl ProtectionInfoFormat {
    /// The most common format: 16-bit guard, 32-bit reference tag.
    pub const T10: Self = Self { guard: GuardWidth::Bits16, storage_tag_bits: 0 };

    /// Creates the format of these two fields.
    ///
    /// `None` if the storage tag length is not permitted for the guard (NVM 1.1 §5.3.1), or the
    /// guard format is none of the three.
    #[must_use]
    pub fn new(guard: GuardFormat, storage_tag_bits: u8) -> Option<Self> {
        let bits = u32::from(storage_tag_bits);
        let (guard, allowed) = match guard {
            GuardFormat::Bits16 => (GuardWidth::Bits16, 0..=32),
            GuardFormat::Bits32 => (GuardWidth::Bits32, 16..=64),
            GuardFormat::Bits64 => (GuardWidth::Bits64, 0..=48),
            GuardFormat::Qualified | GuardFormat::Reserved(_) => return None,
        };
        allowed.contains(&bits).then_some(Self { guard, storage_tag_bits: bits })
    }

    /// Length of a tuple in bytes.
    #[must_use]
    pub const fn tuple_bytes(&self) -> usize {
        match self.guard {
            GuardWidth::Bits16 => 8,
            GuardWidth::Bits32 | GuardWidth::Bits64 => 16,
        }
    }

    /// Length of a guard in bytes.
    #[must_use]
    pub const fn guard_bytes(&self) -> usize {
        match self.guard {
            GuardWidth::Bits16 => 2,
            GuardWidth::Bits32 => 4,
            GuardWidth::Bits64 => 8,
        }
    }

    /// Width of storage and reference tag together.
    #[must_use]
    pub const fn combined_tag_bits(&self) -> u32 {
        match self.guard {
            GuardWidth::Bits16 => 32,
            GuardWidth::Bits32 => 80,
            GuardWidth::Bits64 => 48,
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
        self.combined_tag_bits() - self.storage_tag_bits
    }

    /// Parses a tuple from the first bytes. `None` if there are too few.
    #[must_use]
    pub fn parse_tuple(&self, bytes: &[u8]) -> Option<ProtectionInfo> {
        let bytes = bytes.get(..self.tuple_bytes())?;
        let (guard, rest) = bytes.split_at(self.guard_bytes());
        let (application, tags) = rest.split_at(2);
        Some(ProtectionInfo {
            guard: u64::try_from(from_big_endian(guard)).ok()?,
            application_tag: u16::try_from(from_big_endian(application)).ok()?,
            tags: from_big_endian(tags),
        })
    }

    /// Stores a tuple into the first bytes. Values wider than their field are truncated.
    ///
    /// # Panics
    ///
    /// If there are fewer than [`Self::tuple_bytes`].
    pub fn store_tuple(&self, tuple: &ProtectionInfo, bytes: &mut [u8]) {
        let (guard, rest) = bytes[..self.tuple_bytes()].split_at_mut(self.guard_bytes());
        let (application, tags) = rest.split_at_mut(2);
        put_big_endian(u128::from(tuple.guard), guard);
        put_big_endian(u128::from(tuple.application_tag), application);
        put_big_endian(tuple.tags, tags);
    }

    /// Splits the combined field into both tags.
    #[must_use]
    pub fn split_tags(&self, tags: u128) -> ProtectionTags {
        let bits = self.reference_tag_bits();
        let storage = low_bits(tags, self.combined_tag_bits()) >> bits;
        ProtectionTags {
            storage: u64::try_from(storage).unwrap_or(u64::MAX),
            reference: low_bits(tags, bits),
        }
    }

    /// Combines both tags into one field. Values wider than their field are truncated.
    #[must_use]
    pub const fn join_tags(&self, tags: ProtectionTags) -> u128 {
        let bits = self.reference_tag_bits();
        low_bits(
            low_bits(tags.reference, bits) | (tags.storage as u128) << bits,
            self.combined_tag_bits(),
        )
    }

    /// Expected reference tag `index` blocks after one of `initial`.
    ///
    /// It wraps at the width of the tag, and stays for type 3 (NVM 1.1 §5.3.2).
    #[must_use]
    pub const fn expected_reference_tag(
        &self,
        kind: ProtectionType,
        initial: u128,
        index: u64,
    ) -> u128 {
        let step = if matches!(kind, ProtectionType::Type3) { 0 } else { index as u128 };
        low_bits(initial.wrapping_add(step), self.reference_tag_bits())
    }

    /// Whether a tuple disables the check of its block (NVM 1.1 §5.3.2).
    #[must_use]
    pub fn is_check_disabled_by(&self, kind: ProtectionType, tuple: &ProtectionInfo) -> bool {
        let reference = self.split_tags(tuple.tags).reference;
        let ones = low_bits(u128::MAX, self.reference_tag_bits());
        tuple.application_tag == APPLICATION_TAG_ESCAPE
            && (kind != ProtectionType::Type3 || reference == ones)
    }

    /// Tags of a command for its first block (NVM 1.1 §5.3.1.4): 80 bits in CDW2, CDW3 and CDW14,
    /// of which the format uses the low ones.
    #[must_use]
    pub const fn command_tags(&self, command: &Command) -> u128 {
        let high = (command.cdw2() as u128 & 0xffff) << 64 | (command.cdw3() as u128) << 32;
        low_bits(high | command.cdw14() as u128, self.combined_tag_bits())
    }

    /// Sets the tags of `command` for its first block.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the field is taken apart into dwords")]
    pub const fn with_command_tags(&self, command: Command, tags: u128) -> Command {
        let tags = low_bits(tags, self.combined_tag_bits());
        command
            .with_cdw2((tags >> 64) as u32)
            .with_cdw3((tags >> 32) as u32)
            .with_cdw14(tags as u32)
    }
}

const fn low_bits(value: u128, bits: u32) -> u128 {
    if bits >= 128 { value } else { value & ((1 << bits) - 1) }
}

fn from_big_endian(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u128::from(byte))
}

fn put_big_endian(value: u128, bytes: &mut [u8]) {
    for (byte, from) in bytes.iter_mut().rev().zip(value.to_le_bytes()) {
        *byte = from;
    }
}

#[cfg(test)]
mod tests {
    use super::{ProtectionInfo, ProtectionInfoFormat, ProtectionTags, ProtectionType, low_bits};
    use crate::command::Command;
    use crate::identify::namespace::GuardFormat;

    fn all_formats() -> Vec<ProtectionInfoFormat> {
        let guards = [GuardFormat::Bits16, GuardFormat::Bits32, GuardFormat::Bits64];
        let of =
            |guard| (0..=u8::MAX).filter_map(move |bits| ProtectionInfoFormat::new(guard, bits));
        guards.into_iter().flat_map(of).collect()
    }

    #[test]
    fn storage_tag_sizes_are_limited_by_the_guard_format() {
        let widths = |guard| {
            let formats = (0..=u8::MAX).filter_map(|bits| ProtectionInfoFormat::new(guard, bits));
            let widths: Vec<_> = formats.map(|format| format.storage_tag_bits()).collect();
            (widths[0], widths[widths.len() - 1])
        };
        assert_eq!(widths(GuardFormat::Bits16), (0, 32));
        assert_eq!(widths(GuardFormat::Bits32), (16, 64));
        assert_eq!(widths(GuardFormat::Bits64), (0, 48));
        assert_eq!(ProtectionInfoFormat::new(GuardFormat::Qualified, 0), None);
    }

    #[test]
    fn protection_info_is_big_endian() {
        let bytes = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0];
        let tuple = ProtectionInfoFormat::T10.parse_tuple(&bytes).unwrap();
        assert_eq!((tuple.guard, tuple.application_tag, tuple.tags), (0x1234, 0x5678, 0x9abc_def0));
        let split = ProtectionInfoFormat::T10.split_tags(tuple.tags);
        assert_eq!(split, ProtectionTags { storage: 0, reference: 0x9abc_def0 });
        assert_eq!(ProtectionInfoFormat::T10.parse_tuple(&bytes[..7]), None);
    }

    #[test]
    fn protection_info_round_trips_in_every_format() {
        for format in all_formats() {
            let length = format.tuple_bytes();
            for bit in 0..length * 8 {
                let mut bytes = vec![0; length];
                bytes[bit / 8] = 1 << (bit % 8);
                let tuple = format.parse_tuple(&bytes).unwrap();
                let ones = tuple.guard.count_ones()
                    + tuple.application_tag.count_ones()
                    + tuple.tags.count_ones();
                assert_eq!(ones, 1);
                let mut again = vec![0xff; length];
                format.store_tuple(&tuple, &mut again);
                assert_eq!(again, bytes);
                assert_eq!(format.join_tags(format.split_tags(tuple.tags)), tuple.tags);
            }
        }
    }

    #[test]
    fn storage_and_reference_tag_share_their_field() {
        let format = ProtectionInfoFormat::new(GuardFormat::Bits64, 16).unwrap();
        assert_eq!(format.reference_tag_bits(), 32);
        let joined = format.join_tags(ProtectionTags { storage: 0xabcd, reference: 0x1234_5678 });
        assert_eq!(joined, 0xabcd_1234_5678);
        assert_eq!(
            format.split_tags(joined),
            ProtectionTags { storage: 0xabcd, reference: 0x1234_5678 }
        );
        let cut = format.join_tags(ProtectionTags { storage: 0x1_abcd, reference: 1 << 32 });
        assert_eq!(cut, 0xabcd_0000_0000);
    }

    #[test]
    fn reference_tag_increments_and_wraps_except_for_type_3() {
        let format = ProtectionInfoFormat::T10;
        let last = u128::from(u32::MAX);
        assert_eq!(format.expected_reference_tag(ProtectionType::Type1, last, 2), 1);
        assert_eq!(format.expected_reference_tag(ProtectionType::Type2, 5, 3), 8);
        assert_eq!(format.expected_reference_tag(ProtectionType::Type3, 5, 3), 5);
    }

    #[test]
    fn escape_tags_disable_the_check() {
        let tuple = ProtectionInfo { guard: 0, application_tag: 0xffff, tags: 0 };
        assert!(ProtectionInfoFormat::T10.is_check_disabled_by(ProtectionType::Type1, &tuple));
        assert!(!ProtectionInfoFormat::T10.is_check_disabled_by(ProtectionType::Type3, &tuple));
        let all = ProtectionInfo { tags: 0xffff_ffff, ..tuple };
        assert!(ProtectionInfoFormat::T10.is_check_disabled_by(ProtectionType::Type3, &all));
        let none = ProtectionInfo { application_tag: 0xfffe, ..all };
        assert!(!ProtectionInfoFormat::T10.is_check_disabled_by(ProtectionType::Type1, &none));
    }

    #[test]
    fn command_tags_are_in_cdw2_cdw3_and_cdw14() {
        let wide = ProtectionInfoFormat::new(GuardFormat::Bits32, 16).unwrap();
        let command = wide.with_command_tags(Command::default(), 0x1122_3344_5566_7788_99aa);
        assert_eq!(command.cdw2(), 0x1122);
        assert_eq!((command.cdw3(), command.cdw14()), (0x3344_5566, 0x7788_99aa));
        for format in all_formats() {
            for bit in 0..80 {
                let command = format.with_command_tags(Command([u64::MAX; 8]), 1 << bit);
                assert_eq!(
                    format.command_tags(&command),
                    low_bits(1 << bit, format.combined_tag_bits())
                );
            }
        }
    }
}
