//! Limits of the NVM command set (NVM 1.1 §4.1.5.4), and limits derived from controller fields.

use super::controller::IdentifyController;
use crate::io::copy::CopyFormat;
use crate::layout::layout;
use crate::register::Version;

layout! {
    /// CNS 06h, CSI 00h: Identify Controller of the NVM command set (NVM 1.1 §4.1.5.4).
    pub struct IdentifyControllerNvm[4096] {
        /// Verify Size Limit, 2^VSL pages of CAP.MPSMIN; 0 for none.
        vsl @ 0: u8;
        /// Write Zeroes Size Limit, 2^WZSL pages of CAP.MPSMIN; 0 for none.
        wzsl @ 1: u8;
        /// Write Uncorrectable Size Limit, 2^WUSL pages of CAP.MPSMIN; 0 for none.
        wusl @ 2: u8;
        /// Dataset Management Ranges Limit; 0 for none.
        dmrl @ 3: u8;
        /// Dataset Management Range Size Limit, in blocks; 0 for none.
        dmrsl @ 4: u32;
        /// Dataset Management Size Limit, in blocks; 0 for none.
        dmsl @ 8: u64;
        /// Key Per I/O Capabilities.
        kpiocap @ 16: u8 {
            /// Key Per I/O is supported.
            kpios @ 0: bool;
            /// All namespaces support it.
            kpiosc @ 1: bool;
        };
        /// Write Zeroes With Deallocate Size Limit, 2^WZDSL pages of CAP.MPSMIN; 0 for none.
        wzdsl @ 17: u8;
        /// Admin Optional Command Support.
        aocs @ 18: u16 {
            /// Reporting Allocated LBA Supported: Get LBA Status reports allocated blocks.
            rals @ 0: bool;
        };
        /// Version of the NVM Command Set specification.
        ver @ 20: Version;
        /// LBA Migration Queue Format.
        lbamqf @ 24: u8;
    }
}

impl IdentifyController {
    /// Maximum data transfer size of a command, from MDTS and CAP.MPSMIN. `None` for no limit.
    #[must_use]
    pub fn transfer_bytes_max(&self, mpsmin: u8) -> Option<u64> {
        page_power_limit_bytes(self.mdts(), mpsmin)
    }

    /// Delay before a retry, selected by the CRD of a status; 0 for none.
    #[must_use]
    pub fn retry_delay_ms(&self, crd: u8) -> u32 {
        let units = match crd {
            1 => self.crdt1(),
            2 => self.crdt2(),
            3 => self.crdt3(),
            _ => 0,
        };
        u32::from(units) * 100
    }

    /// Whether the controller can copy from ranges of this format.
    #[must_use]
    pub fn supports_copy_format(&self, format: CopyFormat) -> bool {
        self.copy() && self.cdfs() & 1_u16.checked_shl(format.code().into()).unwrap_or(0) != 0
    }
}

/// Limit given as a power of two of pages of CAP.MPSMIN, in bytes. `None` for no limit, and for one
/// too large to matter.
#[must_use]
pub fn page_power_limit_bytes(exponent: u8, mpsmin: u8) -> Option<u64> {
    let shift = u32::from(exponent) + 12 + u32::from(mpsmin);
    if exponent == 0 { None } else { 1_u64.checked_shl(shift) }
}

#[cfg(test)]
mod tests {
    use super::{CopyFormat, IdentifyController, page_power_limit_bytes};
    use crate::layout::{Ascii, Layout};

    #[test]
    fn identify_controller_fields_match_other_implementations() {
        let mut bytes = [0; 4096];
        bytes[4..24].copy_from_slice(b"S3Z8NB0K123456A     ");
        bytes[24..44].copy_from_slice(b"SAMSUNG MZVLB512    ");
        bytes[77] = 9;
        bytes[78..80].copy_from_slice(&[4, 0]);
        bytes[80..84].copy_from_slice(&0x0001_0300_u32.to_le_bytes());
        bytes[256..258].copy_from_slice(&[0x17, 0x01]);
        bytes[516] = 1;
        bytes[520] = 0x5f;
        bytes[525] = 1;
        bytes[768..773].copy_from_slice(b"nqn.x");
        bytes[2048 + 32..2048 + 34].copy_from_slice(&[0x8a, 2]);
        let id = IdentifyController::from_bytes(&bytes);
        assert_eq!(id.sn().to_string(), "S3Z8NB0K123456A");
        assert_eq!(id.mn().to_string(), "SAMSUNG MZVLB512");
        assert_eq!((id.cntlid(), id.ver().to_string(), id.nn()), (4, "1.3.0".into(), 1));
        assert!(id.security() && id.format() && id.firmware() && !id.namespace_management());
        assert!(id.self_test() && id.doorbell_buffer() && !id.get_lba_status());
        assert!(id.compare() && id.write_zeroes() && !id.reservations() && id.timestamp());
        assert!(id.vwcp());
        assert_eq!(id.transfer_bytes_max(0), Some(2 << 20));
        assert_eq!(id.subnqn(), Ascii::nul_padded("nqn.x"));
        assert_eq!(id.psd(1).map(|state| state.mp()), Some(0x28a));
        assert_eq!(id.psd(32), None);
    }

    #[test]
    fn page_power_limit_overflow_means_no_limit() {
        assert_eq!(page_power_limit_bytes(0, 0), None);
        assert_eq!(page_power_limit_bytes(5, 0), Some(131_072));
        assert_eq!(page_power_limit_bytes(255, 15), None);
    }

    #[test]
    fn retry_delays_and_copy_formats_are_decoded() {
        let id = IdentifyController::zeroed().with(|id| id.crdt2(3).copy(true).cdfs(0b101));
        assert_eq!((id.retry_delay_ms(2), id.retry_delay_ms(0)), (300, 0));
        assert!(
            id.supports_copy_format(CopyFormat::SameNamespace)
                && id.supports_copy_format(CopyFormat::AnyNamespace)
        );
        assert!(!id.supports_copy_format(CopyFormat::SameNamespaceWideGuard));
        assert!(!id.supports_copy_format(CopyFormat::Reserved(15)));
    }

    #[test]
    fn identify_controller_fields_are_decoded_with_names_and_parts() {
        let decoded = IdentifyController::zeroed().with(|id| id.vwcp(true)).decode_fields();
        let vwc = decoded.iter().find(|field| field.name == "vwc").unwrap();
        assert_eq!(vwc.description, "Volatile Write Cache.");
        assert_eq!(vwc.parts[0].value.to_string(), "1");
    }
}
