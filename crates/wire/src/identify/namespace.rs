//! Identify Namespace of the NVM command set (NVM 1.1 §4.1.5.1, §4.1.5.3), and the
//! fields common to all command sets (Base 2.1 §5.1.13.2.8).

use crate::field_type::code;
use crate::layout::layout;

layout! {
    /// CNS 00h: Identify Namespace (NVM 1.1 §4.1.5.1).
    pub struct IdentifyNamespace[4096] {
        /// Namespace Size, in blocks.
        nsze @ 0: u64;
        /// Namespace Capacity, in blocks.
        ncap @ 8: u64;
        /// Namespace Utilization, in blocks.
        nuse @ 16: u64;
        /// Namespace Features.
        nsfeat @ 24: u8 {
            /// Thin Provisioning.
            thinp @ 0: bool;
            /// Namespace Supported Atomic Boundary and Power: NAWUN, NAWUPF and NACWU are valid.
            nsabp @ 1: bool;
            /// Deallocated or unwritten blocks may be reported as errors.
            dae @ 2: bool;
            /// NGUID and EUI64 are never reused.
            uidreuse @ 3: bool;
            /// Optimal Performance: which of NPWG, NPWA, NPDG, NPDA and NOWS are valid.
            optperf @ 4..=5: u8;
            /// Multiple Atomicity Mode.
            mam @ 6: bool;
            /// Optimal Read Performance: NPRG, NPRA and NORS are valid.
            optrperf @ 7: bool;
        };
        /// Number of LBA Formats, 0's based.
        nlbaf @ 25: u8;
        /// Formatted LBA Size.
        flbas @ 26: u8 {
            /// Format Index, bits 3 to 0.
            fidxl @ 0..=3: u8;
            /// Metadata follows the data of each block.
            metadata_extended @ 4: bool;
            /// Format Index, bits 5 and 4.
            fidxu @ 5..=6: u8;
        };
        /// Metadata Capabilities.
        mc @ 27: u8 {
            /// Metadata may follow the data of each block.
            mtedlba @ 0: bool;
            /// Metadata may be in a separate buffer.
            mtsmb @ 1: bool;
        };
        /// End-to-end Data Protection Capabilities.
        dpc @ 28: u8 {
            /// Type 1.
            pit1s @ 0: bool;
            /// Type 2.
            pit2s @ 1: bool;
            /// Type 3.
            pit3s @ 2: bool;
            /// In the first bytes of metadata.
            piifb @ 3: bool;
            /// In the last bytes of metadata.
            piilb @ 4: bool;
        };
        /// End-to-end Data Protection Type Settings.
        dps @ 29: u8 {
            /// Protection Information Type: 0 for none.
            pit @ 0..=2: u8;
            /// Protection information is in the first bytes of metadata.
            pip @ 3: bool;
        };
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        nmic @ 30: u8 {
            /// Shared Namespace: it may be attached to several controllers.
            shrns @ 0: bool;
            /// Dispersed Namespace.
            disns @ 1: bool;
        };
        /// Reservation Capabilities.
        rescap @ 31: u8 {
            /// Persist Through Power Loss.
            ptpls @ 0: bool;
            /// Write exclusive.
            wes @ 1: bool;
            /// Exclusive access.
            eas @ 2: bool;
            /// Write exclusive, registrants only.
            weros @ 3: bool;
            /// Exclusive access, registrants only.
            earos @ 4: bool;
            /// Write exclusive, all registrants.
            wears @ 5: bool;
            /// Exclusive access, all registrants.
            eaars @ 6: bool;
            /// Ignore Existing Key as defined in revision 1.3 and later.
            iekr @ 7: bool;
        };
        /// Format Progress Indicator.
        fpi @ 32: u8 {
            /// Percentage that remains to be formatted.
            fpi_remaining @ 0..=6: u8;
            /// The indicator is supported.
            fpis @ 7: bool;
        };
        /// Deallocate Logical Block Features.
        dlfeat @ 33: u8 {
            /// Content read from deallocated blocks.
            drb @ 0..=2: DeallocatedRead;
            /// Write Zeroes may deallocate.
            wzds @ 3: bool;
            /// The guard of deallocated blocks is the CRC of the content read.
            gdcrc @ 4: bool;
        };
        /// Namespace Atomic Write Unit Normal, in blocks, 0's based.
        nawun @ 34: u16;
        /// Namespace Atomic Write Unit Power Fail, in blocks, 0's based.
        nawupf @ 36: u16;
        /// Namespace Atomic Compare and Write Unit, in blocks, 0's based.
        nacwu @ 38: u16;
        /// Namespace Atomic Boundary Size Normal, in blocks, 0's based.
        nabsn @ 40: u16;
        /// Namespace Atomic Boundary Offset, in blocks.
        nabo @ 42: u16;
        /// Namespace Atomic Boundary Size Power Fail, in blocks, 0's based.
        nabspf @ 44: u16;
        /// Namespace Optimal I/O Boundary, in blocks; 0 for none.
        noiob @ 46: u16;
        /// NVM Capacity, in bytes.
        nvmcap @ 48: u128;
        /// Namespace Preferred Write Granularity, in blocks, 0's based.
        npwg @ 64: u16;
        /// Namespace Preferred Write Alignment, in blocks, 0's based.
        npwa @ 66: u16;
        /// Namespace Preferred Deallocate Granularity, in blocks, 0's based.
        npdg @ 68: u16;
        /// Namespace Preferred Deallocate Alignment, in blocks, 0's based.
        npda @ 70: u16;
        /// Namespace Optimal Write Size, in blocks, 0's based.
        nows @ 72: u16;
        /// Maximum Single Source Range Length of a copy, in blocks.
        mssrl @ 74: u16;
        /// Maximum Copy Length, in blocks.
        mcl @ 76: u32;
        /// Maximum Source Range Count of a copy, 0's based.
        msrc @ 80: u8;
        /// Key Per I/O Status.
        kpios @ 81: u8 {
            /// Enabled.
            kpioens @ 0: bool;
            /// Supported.
            kpiosns @ 1: bool;
        };
        /// Number of Unique Attribute LBA Formats.
        nulbaf @ 82: u8;
        /// Key Per I/O Data Access Alignment and Granularity, in blocks, 0's based.
        kpiodaag @ 84: u32;
        /// ANA Group Identifier.
        anagrpid @ 92: u32;
        /// Namespace Attributes.
        nsattr @ 99: u8 {
            /// Currently Write Protected.
            cwp @ 0: bool;
        };
        /// NVM Set Identifier.
        nvmsetid @ 100: u16;
        /// Endurance Group Identifier.
        endgid @ 102: u16;
        /// Namespace Globally Unique Identifier, big-endian.
        nguid @ 104: [u8; 16];
        /// IEEE Extended Unique Identifier, big-endian.
        eui64 @ 120: [u8; 8];
        /// LBA Format Support.
        lbaf @ 128: LbaFormat[64];
        /// Vendor Specific.
        vendor @ 384: [u8; 3712];
    }

    /// Data structure of Namespace Management to create a namespace (NVM 1.1 §4.1.6).
    pub struct NamespaceCreation[4096] {
        /// Namespace Size, in blocks.
        nsze @ 0: u64;
        /// Namespace Capacity, in blocks.
        ncap @ 8: u64;
        /// Formatted LBA Size.
        flbas @ 26: u8 {
            /// Format Index, bits 3 to 0.
            fidxl @ 0..=3: u8;
            /// Metadata follows the data of each block.
            metadata_extended @ 4: bool;
            /// Format Index, bits 5 and 4.
            fidxu @ 5..=6: u8;
        };
        /// End-to-end Data Protection Type Settings.
        dps @ 29: u8 {
            /// Protection Information Type: 0 for none.
            pit @ 0..=2: u8;
            /// Protection information is in the first bytes of metadata.
            pip @ 3: bool;
        };
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        nmic @ 30: u8 {
            /// Shared Namespace: it may be attached to several controllers.
            shrns @ 0: bool;
        };
        /// ANA Group Identifier; 0 to let the controller choose.
        anagrpid @ 92: u32;
        /// NVM Set Identifier.
        nvmsetid @ 100: u16;
        /// Endurance Group Identifier.
        endgid @ 102: u16;
        /// Logical Block Storage Tag Mask.
        lbstm @ 384: u64;
        /// Number of Placement Handles.
        nphndls @ 392: u16;
        /// Reclaim unit handles of the placement handles.
        phndl @ 512: u16[128];
    }

    /// An LBA format (NVM 1.1 §4.1.5.1, Figure 116).
    pub struct LbaFormat(u32) {
        /// Metadata Size, in bytes.
        ms @ 0..=15: u16;
        /// LBA Data Size, as a power of two; 0 for an unsupported format.
        lbads @ 16..=23: u8;
        /// Relative Performance: 0 is best.
        rp @ 24..=25: u8;
    }

    /// CNS 05h, CSI 00h: Identify Namespace of the NVM command set (NVM 1.1 §4.1.5.3).
    pub struct IdentifyNamespaceNvm[4096] {
        /// Logical Block Storage Tag Mask.
        lbstm @ 0: u64;
        /// Protection Information Capabilities.
        pic @ 8: u8 {
            /// 16b Guard Protection Information Storage Tag Support.
            pi16bpists @ 0: bool;
            /// 16b Guard Protection Information Storage Tag Mask: it is all ones.
            pi16bpistm @ 1: bool;
            /// Storage Tag Check Read Support.
            stcrs @ 2: bool;
            /// Qualified Protection Information Format Support.
            qpifs @ 3: bool;
        };
        /// Protection Information Format Attribute.
        pifa @ 9: u8 {
            /// Storage Tag Masking Level Attribute: 0 bits, 1 bytes, 2 none.
            stmla @ 0..=2: u8;
        };
        /// Extended LBA Format Support.
        elbaf @ 12: ExtendedLbaFormat[64];
        /// Namespace Preferred Deallocate Granularity Large, in blocks.
        npdgl @ 268: u32;
        /// Namespace Preferred Read Granularity, in blocks.
        nprg @ 272: u32;
        /// Namespace Preferred Read Alignment, in blocks.
        npra @ 276: u32;
        /// Namespace Optimal Read Size, in blocks.
        nors @ 280: u32;
        /// Namespace Preferred Deallocate Alignment Large, in blocks.
        npdal @ 284: u32;
        /// LBA Format Placement Shard Size.
        lbapss @ 288: u32;
        /// Tracked LBA Allocation Granularity.
        tlbaag @ 292: u32;
    }

    /// Protection information format of an LBA format (NVM 1.1 §4.1.5.3, Figure 119).
    pub struct ExtendedLbaFormat(u32) {
        /// Storage Tag Size, in bits.
        sts @ 0..=6: u8;
        /// Protection Information Format.
        pif @ 7..=8: GuardFormat;
        /// Qualified Protection Information Format, when PIF is 3.
        qpif @ 9..=12: u8;
    }

    /// CNS 08h: fields common to all command sets (Base 2.1 §5.1.13.2.8).
    pub struct IdentifyNamespaceIndependent[4096] {
        /// Common Namespace Features.
        nsfeat @ 0: u8 {
            /// NGUID and EUI64 are never reused.
            uidreuse @ 3: bool;
            /// Rotational medium.
            rmedia @ 4: bool;
            /// Volatile Write Cache Not Present.
            vwcnp @ 5: bool;
        };
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        nmic @ 1: u8 {
            /// Shared Namespace: it may be attached to several controllers.
            shrns @ 0: bool;
            /// Dispersed Namespace.
            disns @ 1: bool;
        };
        /// Reservation Capabilities, as in Identify Namespace.
        rescap @ 2: u8;
        /// Format Progress Indicator.
        fpi @ 3: u8 {
            /// Percentage that remains to be formatted.
            fpi_remaining @ 0..=6: u8;
            /// The indicator is supported.
            fpis @ 7: bool;
        };
        /// ANA Group Identifier.
        anagrpid @ 4: u32;
        /// Namespace Attributes.
        nsattr @ 8: u8 {
            /// Currently Write Protected.
            cwp @ 0: bool;
        };
        /// NVM Set Identifier.
        nvmsetid @ 10: u16;
        /// Endurance Group Identifier.
        endgid @ 12: u16;
        /// Namespace Status.
        nstat @ 14: u8 {
            /// Namespace Ready.
            nrdy @ 0: bool;
        };
        /// Key Per I/O Status.
        kpios @ 15: u8 {
            /// Enabled.
            kpioens @ 0: bool;
            /// Supported.
            kpiosns @ 1: bool;
        };
        /// Maximum Key Tag.
        maxkt @ 16: u16;
        /// Reachability Group Identifier.
        rgrpid @ 20: u32;
    }
}

code! {
    /// DRB of DLFEAT: content read from deallocated blocks (NVM 1.1 §4.1.5.1).
    pub enum DeallocatedRead {
        /// Not reported.
        NotReported = 0,
        /// All bytes 00h.
        Zeroes = 1,
        /// All bytes FFh.
        Ones = 2,
    }

    /// PIF: the width of the guard (NVM 1.1 §4.1.5.3).
    pub enum GuardFormat {
        /// 16 bits.
        Bits16 = 0,
        /// 32 bits.
        Bits32 = 1,
        /// 64 bits.
        Bits64 = 2,
        /// Given by the qualified protection information format.
        Qualified = 3,
    }
}

impl IdentifyNamespace {
    /// Index of the namespace's LBA format.
    #[must_use]
    pub fn format_index(&self) -> u8 {
        self.fidxu() << 4 | self.fidxl()
    }

    /// LBA format of the namespace.
    #[must_use]
    pub fn current_format(&self) -> LbaFormat {
        self.lbaf(usize::from(self.format_index())).unwrap_or_default()
    }

    /// Logical block size. `None` if the controller reports an impossible value.
    #[must_use]
    pub fn block_bytes(&self) -> Option<u32> {
        self.current_format().block_bytes()
    }

    /// Optimal boundary, if there is one.
    #[must_use]
    pub fn optimal_boundary_blocks(&self) -> Option<u16> {
        Some(self.noiob()).filter(|&blocks| blocks != 0)
    }
}

impl NamespaceCreation {
    /// Index of the requested LBA format.
    #[must_use]
    pub fn format_index(&self) -> u8 {
        self.fidxu() << 4 | self.fidxl()
    }
}

impl LbaFormat {
    /// A format of blocks of 2^`lbads` bytes and `ms` bytes of metadata.
    #[must_use]
    pub fn new(lbads: u8, ms: u16) -> Self {
        Self::zeroed().with(|format| format.lbads(lbads).ms(ms))
    }

    /// Logical block size, 512 bytes to 2 GiB. `None` for anything else (NVM 1.1 §4.1.5.1).
    #[must_use]
    pub fn block_bytes(&self) -> Option<u32> {
        (9..32).contains(&self.lbads()).then(|| 1 << self.lbads())
    }
}

#[cfg(test)]
mod tests {
    use super::{GuardFormat, IdentifyNamespace, IdentifyNamespaceNvm, LbaFormat};

    #[test]
    fn identify_namespace_fields_match_other_implementations() {
        let mut bytes = [0; 4096];
        bytes[0..8].copy_from_slice(&0x10_0000_u64.to_le_bytes());
        bytes[25] = 1;
        bytes[26] = 0x01;
        bytes[33] = 0x09;
        bytes[46] = 32;
        bytes[104] = 0xaa;
        bytes[127] = 0xbb;
        bytes[128..132].copy_from_slice(&[0, 0, 9, 0]);
        bytes[132..136].copy_from_slice(&[8, 0, 12, 1]);
        let id = IdentifyNamespace::from_bytes(&bytes);
        assert_eq!((id.nsze(), id.nlbaf(), id.format_index()), (0x10_0000, 1, 1));
        assert_eq!(
            (id.block_bytes(), id.current_format().ms(), id.current_format().rp()),
            (Some(4096), 8, 1)
        );
        assert_eq!(id.lbaf(0).and_then(|format| format.block_bytes()), Some(512));
        assert_eq!(id.drb().code(), 1);
        assert!(id.wzds());
        assert_eq!(
            (id.optimal_boundary_blocks(), id.nguid()[0], id.eui64()[7]),
            (Some(32), 0xaa, 0xbb)
        );
    }

    #[test]
    fn format_index_is_six_bits_in_two_fields() {
        let id = IdentifyNamespace::zeroed().with(|id| {
            id.fidxl(2).fidxu(3).metadata_extended(true).lbaf(50, LbaFormat::new(12, 0))
        });
        assert_eq!((id.flbas(), id.format_index(), id.block_bytes()), (0x72, 50, Some(4096)));
    }

    #[test]
    fn invalid_block_sizes_are_rejected() {
        for lbads in (0..9).chain(32..=255) {
            assert_eq!(LbaFormat::new(lbads, 0).block_bytes(), None);
        }
        assert_eq!(LbaFormat::new(31, 0).block_bytes(), Some(1 << 31));
    }

    #[test]
    fn extended_lba_format_has_guard_and_storage_tag_size() {
        let mut bytes = [0; 4096];
        bytes[16..20].copy_from_slice(&(2_u32 << 7 | 48).to_le_bytes());
        let format = IdentifyNamespaceNvm::from_bytes(&bytes).elbaf(1).unwrap();
        assert_eq!((format.pif(), format.sts()), (GuardFormat::Bits64, 48));
    }
}
