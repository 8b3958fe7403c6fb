//! Namespace properties, checked against the specification.

mod view;
mod world_wide_name;

pub use world_wide_name::INSTANCE;

use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::identify::namespace::{DeallocatedRead, GuardFormat};
use tenmil_wire::identify::{
    CommandSet, IdentifyNamespace, IdentifyNamespaceNvm, NamespaceIdentifier,
};

use crate::error::InvalidValue;

/// Usable namespace of the NVM command set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace identifier (NSID).
    pub id: u32,
    /// Number of blocks (NSZE).
    pub block_count: u64,
    /// Maximum number of allocated blocks (NCAP); smaller than the size if thinly provisioned.
    pub capacity_blocks: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Metadata bytes per block.
    pub metadata_size: u16,
    /// The metadata follow the data of each block (extended LBA), instead of being in a separate buffer.
    pub metadata_extended: bool,
    /// End-to-end data protection, if enabled.
    pub protection: Option<Protection>,
    /// Transfers should not cross multiples of this many blocks (NOIOB). Zero means none.
    pub optimal_boundary_blocks: u32,
    /// Largest write in blocks that is atomic with respect to power loss. Zero defers to the controller
    /// (AWUPF).
    pub atomic_write_blocks: u32,
    /// A write is atomic only if it does not cross multiples of this many blocks, counted from
    /// `atomic_offset_blocks`. Zero means none.
    pub atomic_boundary_blocks: u32,
    /// Position of the first atomic boundary.
    pub atomic_offset_blocks: u32,
    /// Largest fused Compare and Write in blocks that is atomic. Zero defers to the controller (ACWU).
    pub compare_and_write_blocks: u32,
    /// Preferred granularities and alignments.
    pub preferences: IoPreferences,
    /// Limits of the Copy command.
    pub copy: CopyLimits,
    /// Value read from deallocated blocks.
    pub deallocated_read: DeallocatedRead,
    /// Write Zeroes may deallocate.
    pub write_zeroes_deallocates: bool,
    /// Other controllers may attach it, too.
    pub is_shared: bool,
    /// Write protected at present.
    pub is_write_protected: bool,
    /// Supported reservation types (RESCAP).
    pub reservations: u8,
    /// ANA group; zero if none.
    pub ana_group: u32,
    /// Globally unique identifiers.
    pub names: NamespaceIds,
    /// Instance of the volatile cache, if reported.
    pub cache_instance: Option<CacheInstance>,
}

/// Globally unique namespace identifiers; zeroes if not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceIds {
    /// IEEE Extended Unique Identifier.
    pub eui64: [u8; 8],
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// Universally Unique Identifier.
    pub uuid: [u8; 16],
}

/// End-to-end data protection of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Protection type, 1 to 3.
    pub kind: u8,
    /// The protection information is in the first bytes of the metadata, not in the last.
    pub is_first: bool,
    /// Guard format.
    pub guard: GuardFormat,
}

/// Preferred I/O sizes in blocks; zero if not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoPreferences {
    /// Write granularity (NPWG).
    pub write_granularity: u32,
    /// Write alignment (NPWA).
    pub write_alignment: u32,
    /// Deallocate granularity (NPDG).
    pub deallocate_granularity: u32,
    /// Deallocate alignment (NPDA).
    pub deallocate_alignment: u32,
    /// Optimal write size (NOWS).
    pub write_size: u32,
}

/// Limits of the Copy command; zeroes mean no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyLimits {
    /// Blocks of one source range (MSSRL).
    pub range_blocks_max: u32,
    /// Blocks of all source ranges together (MCL).
    pub blocks_max: u32,
    /// Number of source ranges (MSRC).
    pub ranges_max: u32,
}

/// Blocks larger than 64 KiB are not supported.
const BLOCK_SHIFT_MAX: u8 = 16;
/// Protection information has 8 bytes with a 16-bit guard, otherwise 16 (NVM 1.1 §5.3.1).
const PROTECTION_BYTES_SHORT: u16 = 8;
const PROTECTION_BYTES_LONG: u16 = 16;

impl Namespace {
    /// Checks the Identify data of namespace `id`. `nvm` is given if the controller supports that page;
    /// without it, guards have 16 bits.
    pub fn from_identify(
        id: u32,
        common: &IdentifyNamespace,
        nvm: Option<&IdentifyNamespaceNvm>,
        names: &[NamespaceIdentifier],
    ) -> Result<Self, InvalidValue> {
        let format = format_of(common)?;
        let (block_count, capacity_blocks) = (common.nsze(), common.ncap());
        if block_count == 0 {
            return Err(invalid_value("identify namespace: NSZE", 0, "at least 1"));
        }
        if block_count.checked_mul(u64::from(format.block_size)).is_none() {
            let expected = "fewer than 2^64 bytes";
            return Err(invalid_value("identify namespace: NSZE", block_count, expected));
        }
        if capacity_blocks > block_count {
            return Err(invalid_value("identify namespace: NCAP", capacity_blocks, "at most NSZE"));
        }
        let gives_atomicity = common.nsabp();
        let gives_preferences = common.optperf() != 0;
        Ok(Self {
            id,
            block_count,
            capacity_blocks,
            block_size: format.block_size,
            metadata_size: format.metadata_size,
            metadata_extended: common.metadata_extended(),
            protection: protection_of(common, nvm, &format)?,
            optimal_boundary_blocks: common.noiob().into(),
            atomic_write_blocks: one_based_if(gives_atomicity, common.nawupf()),
            atomic_boundary_blocks: boundary_from_zero_based(common.nabspf()),
            atomic_offset_blocks: common.nabo().into(),
            compare_and_write_blocks: one_based_if(gives_atomicity, common.nacwu()),
            preferences: IoPreferences {
                write_granularity: one_based_if(gives_preferences, common.npwg()),
                write_alignment: one_based_if(gives_preferences, common.npwa()),
                deallocate_granularity: one_based_if(gives_preferences, common.npdg()),
                deallocate_alignment: one_based_if(gives_preferences, common.npda()),
                write_size: one_based_if(gives_preferences, common.nows()),
            },
            copy: CopyLimits {
                range_blocks_max: common.mssrl().into(),
                blocks_max: common.mcl(),
                ranges_max: if common.mcl() == 0 { 0 } else { u32::from(common.msrc()) + 1 },
            },
            deallocated_read: common.drb(),
            write_zeroes_deallocates: common.wzds(),
            is_shared: common.shrns(),
            is_write_protected: common.cwp(),
            reservations: common.rescap(),
            ana_group: common.anagrpid(),
            names: NamespaceIds::collect(common, names),
            cache_instance: CacheInstance::from_identify_namespace(common),
        })
    }

    /// Whether the two differ at most in size and cache instance.
    pub fn is_same_but_for_size(&self, other: &Self) -> bool {
        let sized = Self {
            block_count: other.block_count,
            capacity_blocks: other.capacity_blocks,
            cache_instance: other.cache_instance,
            ..self.clone()
        };
        sized == *other
    }
}

impl NamespaceIds {
    /// Collects the identifiers from the descriptors, with those of Identify Namespace as defaults.
    fn collect(common: &IdentifyNamespace, descriptors: &[NamespaceIdentifier]) -> Self {
        let mut names = Self { eui64: common.eui64(), nguid: common.nguid(), uuid: [0; 16] };
        for descriptor in descriptors {
            match descriptor {
                NamespaceIdentifier::Eui64(eui64) => names.eui64 = *eui64,
                NamespaceIdentifier::Nguid(nguid) => names.nguid = *nguid,
                NamespaceIdentifier::Uuid(uuid) => names.uuid = *uuid,
                NamespaceIdentifier::Csi(_) => {}
            }
        }
        names
    }
}

/// Command set named by the descriptors; by default the NVM command set.
pub(crate) fn command_set_of(descriptors: &[NamespaceIdentifier]) -> CommandSet {
    let mut named = descriptors.iter().filter_map(|descriptor| match descriptor {
        NamespaceIdentifier::Csi(set) => Some(*set),
        _ => None,
    });
    named.next().unwrap_or(CommandSet::Nvm)
}

/// LBA format of a namespace.
#[derive(Clone, Copy, Debug)]
struct NamespaceFormat {
    index: u8,
    block_size: u32,
    metadata_size: u16,
}

fn format_of(common: &IdentifyNamespace) -> Result<NamespaceFormat, InvalidValue> {
    let formats = u16::from(common.nlbaf()) + 1 + u16::from(common.nulbaf());
    // With at most 16 formats, the upper bits of the index are ignored (NVM 1.1 §4.1.5.1).
    let index = if formats > 16 { common.format_index() } else { common.fidxl() };
    if u16::from(index) >= formats {
        let expected = "at most NLBAF + NULBAF";
        return Err(invalid_value("identify namespace: FLBAS", index.into(), expected));
    }
    let format = common.lbaf(usize::from(index)).unwrap_or_default();
    match format.block_bytes() {
        Some(block_size) if format.lbads() <= BLOCK_SHIFT_MAX => {
            Ok(NamespaceFormat { index, block_size, metadata_size: format.ms() })
        }
        _ => Err(invalid_value("identify namespace: LBADS", format.lbads().into(), "9 to 16")),
    }
}

fn protection_of(
    common: &IdentifyNamespace,
    nvm: Option<&IdentifyNamespaceNvm>,
    format: &NamespaceFormat,
) -> Result<Option<Protection>, InvalidValue> {
    let kind = common.pit();
    if kind == 0 {
        return Ok(None);
    }
    if kind > 3 {
        return Err(invalid_value("identify namespace: DPS", kind.into(), "a type of 0 to 3"));
    }
    let extended = nvm.and_then(|nvm| nvm.elbaf(usize::from(format.index)));
    let guard = extended.map_or(GuardFormat::Bits16, |extended| extended.pif());
    let needed = match guard {
        GuardFormat::Bits16 => PROTECTION_BYTES_SHORT,
        _ => PROTECTION_BYTES_LONG,
    };
    if format.metadata_size < needed {
        let expected = "room for protection information";
        return Err(invalid_value("identify namespace: MS", format.metadata_size.into(), expected));
    }
    Ok(Some(Protection { kind, is_first: common.pip(), guard }))
}

fn invalid_value(field: &'static str, found: u64, expected: &'static str) -> InvalidValue {
    InvalidValue { field, found, expected }
}

fn one_based_if(is_given: bool, zero_based: u16) -> u32 {
    if is_given { u32::from(zero_based) + 1 } else { 0 }
}

/// Converts a 0's based boundary, where zero means none (NVM 1.1 §4.1.5.1, NABSPF).
fn boundary_from_zero_based(zero_based: u16) -> u32 {
    if zero_based == 0 { 0 } else { u32::from(zero_based) + 1 }
}

#[cfg(test)]
mod tests {
    use tenmil_wire::identify::namespace::{ExtendedLbaFormat, GuardFormat, LbaFormat};
    use tenmil_wire::identify::{
        CommandSet, IdentifyNamespace, IdentifyNamespaceNvm, NamespaceIdentifier,
    };

    use super::{CopyLimits, IoPreferences, Namespace, Protection, command_set_of};

    fn plain_identify_namespace() -> IdentifyNamespace {
        IdentifyNamespace::zeroed()
            .with(|id| id.nsze(1000).ncap(900).lbaf(0, LbaFormat::new(12, 0)))
    }

    fn check_namespace(common: &IdentifyNamespace) -> Result<Namespace, (&'static str, u64)> {
        Namespace::from_identify(7, common, None, &[]).map_err(|lie| (lie.field, lie.found))
    }

    #[test]
    fn plain_namespace_is_limited_only_by_its_size() {
        let found = check_namespace(&plain_identify_namespace()).unwrap();
        assert_eq!((found.id, found.block_count, found.capacity_blocks), (7, 1000, 900));
        assert_eq!((found.block_size, found.metadata_size, found.protection), (4096, 0, None));
        assert_eq!((found.optimal_boundary_blocks, found.atomic_write_blocks), (0, 0));
        assert_eq!(
            (found.preferences, found.copy),
            (IoPreferences::default(), CopyLimits::default())
        );
    }

    #[test]
    fn zeroes_based_fields_apply_only_if_reported() {
        let all = |given| {
            plain_identify_namespace().with(|id| {
                let id = id.nsabp(given).optperf(u8::from(given)).nawupf(7).nabspf(15).nabo(3);
                id.npwg(1).npwa(2).npdg(3).npda(4).nows(5).noiob(64).mssrl(8).mcl(32).msrc(3)
            })
        };
        let silent = check_namespace(&all(false)).unwrap();
        assert_eq!(silent.atomic_write_blocks, 0);
        assert_eq!(silent.preferences, IoPreferences::default());
        let found = check_namespace(&all(true)).unwrap();
        assert_eq!((found.atomic_write_blocks, found.atomic_boundary_blocks), (8, 16));
        assert_eq!((found.atomic_offset_blocks, found.optimal_boundary_blocks), (3, 64));
        let preferences = IoPreferences {
            write_granularity: 2,
            write_alignment: 3,
            deallocate_granularity: 4,
            deallocate_alignment: 5,
            write_size: 6,
        };
        assert_eq!(found.preferences, preferences);
        let copy = CopyLimits { range_blocks_max: 8, blocks_max: 32, ranges_max: 4 };
        assert_eq!(found.copy, copy);
    }

    #[test]
    fn invalid_value_is_rejected_with_its_field_name() {
        let cases = [
            (
                plain_identify_namespace().with(|id| id.nsze(0).ncap(0)),
                ("identify namespace: NSZE", 0),
            ),
            (
                plain_identify_namespace().with(|id| id.nsze(1 << 52)),
                ("identify namespace: NSZE", 1 << 52),
            ),
            (
                plain_identify_namespace().with(|id| id.ncap(1001)),
                ("identify namespace: NCAP", 1001),
            ),
            (plain_identify_namespace().with(|id| id.fidxl(1)), ("identify namespace: FLBAS", 1)),
            (
                plain_identify_namespace().with(|id| id.lbaf(0, LbaFormat::new(8, 0))),
                ("identify namespace: LBADS", 8),
            ),
            (
                plain_identify_namespace().with(|id| id.lbaf(0, LbaFormat::new(17, 0))),
                ("identify namespace: LBADS", 17),
            ),
            (plain_identify_namespace().with(|id| id.pit(4)), ("identify namespace: DPS", 4)),
            (
                plain_identify_namespace().with(|id| id.pit(1).lbaf(0, LbaFormat::new(9, 7))),
                ("identify namespace: MS", 7),
            ),
        ];
        for (common, expected) in cases {
            assert_eq!(check_namespace(&common), Err(expected));
        }
        assert!(
            check_namespace(&plain_identify_namespace().with(|id| id.nsze((1 << 52) - 1))).is_ok()
        );
    }

    #[test]
    fn upper_format_bits_apply_only_with_more_than_16_formats() {
        let upper =
            plain_identify_namespace().with(|id| id.fidxu(1).lbaf(16, LbaFormat::new(9, 0)));
        assert_eq!(check_namespace(&upper).unwrap().block_size, 4096);
        let many = upper.with(|id| id.nlbaf(10).nulbaf(6));
        assert_eq!(check_namespace(&many).unwrap().block_size, 512);
    }

    #[test]
    fn a_wide_guard_needs_more_metadata() {
        let common = plain_identify_namespace()
            .with(|id| id.pit(2).pip(true).lbaf(0, LbaFormat::new(12, 8)));
        let narrow = Protection { kind: 2, is_first: true, guard: GuardFormat::Bits16 };
        assert_eq!(check_namespace(&common).unwrap().protection, Some(narrow));
        let wide = ExtendedLbaFormat::zeroed().with(|format| format.pif(GuardFormat::Bits64));
        let nvm = IdentifyNamespaceNvm::zeroed().with(|id| id.elbaf(0, wide));
        assert!(Namespace::from_identify(7, &common, Some(&nvm), &[]).is_err());
        let roomy = common.with(|id| id.lbaf(0, LbaFormat::new(12, 16)));
        let found = Namespace::from_identify(7, &roomy, Some(&nvm), &[]).unwrap();
        assert_eq!(found.protection.map(|protection| protection.guard), Some(GuardFormat::Bits64));
    }

    #[test]
    fn descriptors_supply_identifiers_missing_in_the_page() {
        let common = plain_identify_namespace().with(|id| id.eui64([1; 8]).nguid([2; 16]));
        let descriptors = [NamespaceIdentifier::Nguid([3; 16]), NamespaceIdentifier::Uuid([4; 16])];
        let names = Namespace::from_identify(7, &common, None, &descriptors).unwrap().names;
        assert_eq!((names.eui64, names.nguid, names.uuid), ([1; 8], [3; 16], [4; 16]));
        assert_eq!(command_set_of(&descriptors), CommandSet::Nvm);
        let zoned = [NamespaceIdentifier::Csi(CommandSet::Zoned)];
        assert_eq!(command_set_of(&zoned), CommandSet::Zoned);
    }

    #[test]
    fn only_a_change_of_size_is_a_resize() {
        let one = check_namespace(&plain_identify_namespace()).unwrap();
        let grown =
            check_namespace(&plain_identify_namespace().with(|id| id.nsze(2000).ncap(2000)))
                .unwrap();
        assert!(one.is_same_but_for_size(&grown) && one != grown);
        let formatted = check_namespace(
            &plain_identify_namespace().with(|id| id.lbaf(0, LbaFormat::new(9, 0))),
        )
        .unwrap();
        assert!(!one.is_same_but_for_size(&formatted));
    }
}
