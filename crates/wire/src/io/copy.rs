//! Copy (NVM 1.1 §3.3.2).
//!
//! The sources are ranges in one of four formats: 0h and 1h name ranges of the same namespace, 2h
//! and 3h of any namespace; 1h and 3h have space for the tags of 32-bit and 64-bit guards.

use super::ProtectionInformation;
use crate::field_type::code;
use crate::layout::layout;
use crate::opcode::IoOpcode;
use crate::typed::commands;

/// Maximum number of ranges in one command: NR is 8 bits wide (NVM 1.1 §3.3.2).
pub const RANGES_MAX: usize = 256;

commands! {
    /// Copy (NVM 1.1 §3.3.2).
    pub struct Copy = IoOpcode::Copy, "Copy" {
        /// Namespace Identifier of the destination.
        nsid @ 1[0..=31]: u32;
        /// Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting Destination LBA.
        sdlba @ 10[0..=63]: u64;
        /// Number of Ranges, 0's based.
        nr @ 12[0..=7]: u8;
        /// Descriptor Format.
        desfmt @ 12[8..=11]: CopyFormat;
        /// Protection Information field, for the reads.
        prinfor @ 12[12..=15]: ProtectionInformation;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Directive Type.
        dtype @ 12[20..=23]: u8;
        /// Storage Tag Check, for the writes.
        stcw @ 12[24]: bool;
        /// Storage Tag Check, for the reads.
        stcr @ 12[25]: bool;
        /// Protection Information field, for the writes.
        prinfow @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Command Extension Value.
        cev @ 13[0..=15]: u16;
        /// Directive Specific.
        dspec @ 13[16..=31]: u16;
        /// Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }
}

code! {
    /// DESFMT: format of the source ranges (NVM 1.1 §3.3.2).
    pub enum CopyFormat {
        /// Same namespace, 16-bit guard.
        SameNamespace = 0,
        /// Same namespace, 32-bit or 64-bit guard.
        SameNamespaceWideGuard = 1,
        /// Any namespace, 16-bit guard.
        AnyNamespace = 2,
        /// Any namespace, 32-bit or 64-bit guard.
        AnyNamespaceWideGuard = 3,
        /// Subsystem local memory.
        LocalMemory = 4,
    }
}

layout! {
    /// A source range of format 0h, and of format 2h when SNSID is set (NVM 1.1 §3.3.2).
    #[derive(Copy)]
    pub struct CopyRange[32] {
        /// Source Parameters: SNSID, the source namespace, in format 2h.
        snsid @ 0: u32;
        /// Starting LBA.
        slba @ 8: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 16: u16;
        /// Command Extension Type, in format 2h.
        extension @ 18: u8 {
            /// Command Extension Type.
            cetype @ 0..=3: u8;
        };
        /// Command Extension Value, in format 2h.
        cev @ 20: u16;
        /// Source Options.
        sopt @ 22: u16 {
            /// Fast Copy Only, in format 2h.
            fco @ 15: bool;
        };
        /// Expected Logical Block Tags.
        elbt @ 24: u32;
        /// Expected Logical Block Application Tag.
        elbat @ 28: u16;
        /// Expected Logical Block Application Tag Mask.
        elbatm @ 30: u16;
    }

    /// A source range of format 1h, and of format 3h when SNSID is set (NVM 1.1 §3.3.2).
    #[derive(Copy)]
    pub struct CopyRangeWideGuard[40] {
        /// Source Parameters: SNSID, the source namespace, in format 3h.
        snsid @ 0: u32;
        /// Starting LBA.
        slba @ 8: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 16: u16;
        /// Command Extension Type, in format 3h.
        extension @ 18: u8 {
            /// Command Extension Type.
            cetype @ 0..=3: u8;
        };
        /// Command Extension Value, in format 3h.
        cev @ 20: u16;
        /// Source Options.
        sopt @ 22: u16 {
            /// Fast Copy Only, in format 3h.
            fco @ 15: bool;
        };
        /// Expected Logical Block Tags, big-endian.
        elbt @ 26: [u8; 10];
        /// Expected Logical Block Application Tag.
        elbat @ 36: u16;
        /// Expected Logical Block Application Tag Mask.
        elbatm @ 38: u16;
    }
}

/// Source range of any format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySourceRange {
    /// Namespace, if the format names one.
    pub nsid: Option<u32>,
    /// The first block.
    pub slba: u64,
    /// Number of blocks, 1 to 65 536.
    pub count: u32,
    /// Fast Copy Only: fail rather than copy slowly; only in formats that name a namespace.
    pub fast_only: bool,
    /// Expected logical block tags, 80 bits right-aligned.
    pub tags: u128,
    /// Expected application tag.
    pub application_tag: u16,
    /// Mask of the compared bits.
    pub application_mask: u16,
}

impl CopyFormat {
    /// Length of a range. `None` for a format that this crate does not support.
    #[must_use]
    pub const fn source_range_bytes(self) -> Option<usize> {
        match self {
            Self::SameNamespace | Self::AnyNamespace => Some(32),
            Self::SameNamespaceWideGuard | Self::AnyNamespaceWideGuard => Some(40),
            Self::LocalMemory | Self::Reserved(_) => None,
        }
    }

    const fn has_source_namespace(self) -> bool {
        matches!(self, Self::AnyNamespace | Self::AnyNamespaceWideGuard)
    }
}

impl CopySourceRange {
    /// Parses a range of `format`.
    ///
    /// `None` if there are too few bytes or the format has no block ranges.
    #[must_use]
    pub fn parse(format: CopyFormat, bytes: &[u8]) -> Option<Self> {
        let named = |nsid| format.has_source_namespace().then_some(nsid);
        match format.source_range_bytes()? {
            32 => {
                let range = CopyRange::from_bytes(bytes.first_chunk()?);
                Some(Self {
                    nsid: named(range.snsid()),
                    slba: range.slba(),
                    count: u32::from(range.nlb()) + 1,
                    fast_only: format.has_source_namespace() && range.fco(),
                    tags: u128::from(range.elbt()),
                    application_tag: range.elbat(),
                    application_mask: range.elbatm(),
                })
            }
            _ => {
                let range = CopyRangeWideGuard::from_bytes(bytes.first_chunk()?);
                let tags = range.elbt().iter().fold(0, |tags, &byte| tags << 8 | u128::from(byte));
                Some(Self {
                    nsid: named(range.snsid()),
                    slba: range.slba(),
                    count: u32::from(range.nlb()) + 1,
                    fast_only: format.has_source_namespace() && range.fco(),
                    tags,
                    application_tag: range.elbat(),
                    application_mask: range.elbatm(),
                })
            }
        }
    }

    /// Appends the range in `format`.
    ///
    /// Nothing is appended if the format has no block ranges; a count outside 1 to 65 536 and a tag
    /// wider than the format permits are truncated.
    #[allow(clippy::cast_possible_truncation, reason = "cut to the width of the field")]
    pub fn emit(&self, format: CopyFormat, bytes: &mut Vec<u8>) {
        let nsid = self.nsid.filter(|_| format.has_source_namespace()).unwrap_or(0);
        let fast_only = self.fast_only && format.has_source_namespace();
        let nlb = self.count.wrapping_sub(1) as u16;
        match format.source_range_bytes() {
            None => {}
            Some(32) => {
                let mut range = CopyRange::zeroed();
                range.set().snsid(nsid).slba(self.slba).nlb(nlb).fco(fast_only);
                range.set().elbt(self.tags as u32);
                range.set().elbat(self.application_tag).elbatm(self.application_mask);
                bytes.extend(range.as_bytes());
            }
            Some(_) => {
                let mut range = CopyRangeWideGuard::zeroed();
                range.set().snsid(nsid).slba(self.slba).nlb(nlb).fco(fast_only);
                let mut elbt = [0; 10];
                elbt.copy_from_slice(&self.tags.to_be_bytes()[6..]);
                range.set().elbt(elbt);
                range.set().elbat(self.application_tag).elbatm(self.application_mask);
                bytes.extend(range.as_bytes());
            }
        }
    }
}

/// Complete ranges in `bytes`; none for a format without block ranges.
pub fn parse_copy_sources(
    format: CopyFormat,
    bytes: &[u8],
) -> impl Iterator<Item = CopySourceRange> + '_ {
    let length = format.source_range_bytes().unwrap_or(usize::MAX);
    bytes.chunks_exact(length).filter_map(move |chunk| CopySourceRange::parse(format, chunk))
}

#[cfg(test)]
mod tests {
    use super::{CopyFormat, CopySourceRange, parse_copy_sources};

    const SOURCE: CopySourceRange = CopySourceRange {
        nsid: Some(7),
        slba: 0x0102_0304_0506_0708,
        count: 65_536,
        fast_only: true,
        tags: 0x1122_3344,
        application_tag: 0x5566,
        application_mask: 0x7788,
    };

    #[test]
    fn copy_source_range_round_trips_in_every_format() {
        for &format in CopyFormat::ALL {
            let mut bytes = Vec::new();
            SOURCE.emit(format, &mut bytes);
            SOURCE.emit(format, &mut bytes);
            let wider = format.code() >= 2;
            let expected_source =
                CopySourceRange { nsid: SOURCE.nsid.filter(|_| wider), fast_only: wider, ..SOURCE };
            let expected = if format == CopyFormat::LocalMemory { 0 } else { 2 };
            let read: Vec<_> = parse_copy_sources(format, &bytes).collect();
            assert_eq!(read, vec![expected_source; expected], "{format:?}");
        }
    }

    #[test]
    fn copy_range_tags_are_big_endian_for_wide_guards_only() {
        let mut wide = Vec::new();
        SOURCE.emit(CopyFormat::SameNamespaceWideGuard, &mut wide);
        assert_eq!(wide[26..36], [0, 0, 0, 0, 0, 0, 0x11, 0x22, 0x33, 0x44]);
        let mut narrow = Vec::new();
        SOURCE.emit(CopyFormat::SameNamespace, &mut narrow);
        assert_eq!(narrow[24..28], [0x44, 0x33, 0x22, 0x11]);
    }

    #[test]
    fn truncated_copy_range_is_not_parsed() {
        assert_eq!(CopySourceRange::parse(CopyFormat::SameNamespace, &[0; 31]), None);
        assert_eq!(CopySourceRange::parse(CopyFormat::AnyNamespaceWideGuard, &[0; 39]), None);
        assert_eq!(parse_copy_sources(CopyFormat::SameNamespace, &[0; 31]).count(), 0);
    }
}
