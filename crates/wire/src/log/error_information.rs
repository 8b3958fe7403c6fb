//! 01h: Error Information, newest first (Base 2.1 §5.1.12.1.2).

use crate::layout::layout;
use crate::status::Status;

layout! {
    /// One entry of the Error Information log page (Base 2.1 §5.1.12.1.2).
    pub struct ErrorEntry[64] {
        /// Error Count: unique, increasing; 0 for an unused entry.
        error_count @ 0: u64;
        /// Submission Queue ID, or all ones.
        sqid @ 8: u16;
        /// Command ID, or all ones.
        cid @ 10: u16;
        /// Status Info.
        status_info @ 12: u16 {
            /// Phase Tag.
            phase_tag @ 0: bool;
            /// Status Field.
            status_field @ 1..=15: u16;
        };
        /// Parameter Error Location, or all ones.
        parameter_error_location @ 14: u16 {
            /// Byte of the command.
            location_byte @ 0..=7: u8;
            /// Bit of the byte.
            location_bit @ 8..=10: u8;
        };
        /// Logical Block Address.
        lba @ 16: u64;
        /// Namespace Identifier.
        nsid @ 24: u32;
        /// Vendor Specific Information Available: log page identifier.
        vendor_page @ 28: u8;
        /// Transport Type.
        trtype @ 29: u8;
        /// Command Set Indicator.
        csi @ 30: u8;
        /// Opcode.
        opcode @ 31: u8;
        /// Command Specific Information.
        command_specific @ 32: u64;
        /// Transport Type Specific Information.
        transport_specific @ 40: u16;
        /// Log Page Version: 1 if CSI and opcode are valid.
        version @ 63: u8;
    }
}

/// Value of SQID, CID and parameter location if not applicable (Base 2.1 §5.1.12.1.2).
pub const NOT_APPLICABLE: u16 = 0xffff;

impl ErrorEntry {
    /// Status of the command.
    #[must_use]
    pub fn status(&self) -> Status {
        Status(self.status_field())
    }
}

/// Entries of a page, without the unused ones.
pub fn error_entries(page: &[u8]) -> impl Iterator<Item = ErrorEntry> + '_ {
    let entries = page.as_chunks::<64>().0.iter().map(ErrorEntry::from_bytes);
    entries.filter(|entry| entry.error_count() != 0)
}

#[cfg(test)]
mod tests {
    use super::{ErrorEntry, error_entries};
    use crate::status::Status;

    #[test]
    fn empty_error_entries_are_skipped() {
        let mut page = ErrorEntry::zeroed()
            .with(|entry| entry.error_count(7).status_field(Status::INVALID_FIELD.0))
            .as_bytes()
            .to_vec();
        page.extend([0; 64]);
        page.extend([0xff; 63]);
        let found: Vec<_> = error_entries(&page).map(|entry| entry.status()).collect();
        assert_eq!(found, [Status::INVALID_FIELD]);
        assert_eq!(page[12..14], [0x04, 0x00]);
    }
}
