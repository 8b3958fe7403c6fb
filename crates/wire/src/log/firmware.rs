//! Firmware slots (03h), telemetry (07h, 08h), boot partitions (15h).

use crate::layout::{Ascii, layout};
use crate::register::BootPartitionInformation;

/// Length of a telemetry data block, and of the header (Base 2.1 §5.1.12.1.8).
pub const TELEMETRY_BLOCK_BYTES: u64 = 512;

layout! {
    /// 03h: Firmware Slot Information (Base 2.1 §5.1.12.1.4).
    pub struct FirmwareSlots[512] {
        /// Active Firmware Info.
        afi @ 0: u8 {
            /// Current Active Firmware Slot.
            cafslt @ 0..=2: u8;
            /// Next Reset Active Firmware Slot; 0 for the current one.
            nrafslt @ 4..=6: u8;
        };
        /// Firmware Revision of slots 1 to 7; zeros for an empty one.
        frs @ 8: Ascii<8>[7];
    }

    /// The header of 07h, Telemetry Host-Initiated (Base 2.1 §5.1.12.1.8).
    pub struct TelemetryHost[512] {
        /// Log Page Identifier.
        lid @ 0: u8;
        /// IEEE OUI Identifier, least significant byte first.
        ieee @ 5: [u8; 3];
        /// Data Area 1 Last Block.
        da1lb @ 8: u16;
        /// Data Area 2 Last Block.
        da2lb @ 10: u16;
        /// Data Area 3 Last Block.
        da3lb @ 12: u16;
        /// Data Area 4 Last Block.
        da4lb @ 16: u32;
        /// Telemetry Host-Initiated Scope.
        ths @ 380: u8;
        /// Telemetry Host-Initiated Data Generation Number.
        thdgn @ 381: u8;
        /// Telemetry Controller-Initiated Data Available.
        tcda @ 382: u8;
        /// Telemetry Controller-Initiated Data Generation Number.
        tcdgn @ 383: u8;
        /// Reason Identifier.
        rid @ 384: [u8; 128];
    }

    /// The header of 08h, Telemetry Controller-Initiated (Base 2.1 §5.1.12.1.9).
    pub struct TelemetryController[512] {
        /// Log Page Identifier.
        lid @ 0: u8;
        /// IEEE OUI Identifier, least significant byte first.
        ieee @ 5: [u8; 3];
        /// Data Area 1 Last Block.
        da1lb @ 8: u16;
        /// Data Area 2 Last Block.
        da2lb @ 10: u16;
        /// Data Area 3 Last Block.
        da3lb @ 12: u16;
        /// Data Area 4 Last Block.
        da4lb @ 16: u32;
        /// Telemetry Controller-Initiated Scope.
        tcs @ 381: u8;
        /// Telemetry Controller-Initiated Data Available.
        tcda @ 382: u8;
        /// Telemetry Controller-Initiated Data Generation Number.
        tcdgn @ 383: u8;
        /// Reason Identifier.
        rid @ 384: [u8; 128];
    }

    /// The header of 15h, Boot Partition (Base 2.1 §5.1.12.1.21).
    pub struct BootPartition[16] {
        /// Log Page Identifier.
        lid @ 0: u8;
        /// Boot Partition Information: size and active partition.
        bpinfo @ 4: BootPartitionInformation;
    }
}

impl TelemetryHost {
    /// Length of the header and the data blocks up to data area `area`, 1 to 4.
    #[must_use]
    pub fn len_bytes_through_area(&self, area: u8) -> u64 {
        let last = match area {
            1 => self.da1lb().into(),
            2 => self.da2lb().into(),
            3 => self.da3lb().into(),
            _ => self.da4lb(),
        };
        TELEMETRY_BLOCK_BYTES * (1 + u64::from(last))
    }
}

#[cfg(test)]
mod tests {
    use super::{FirmwareSlots, TelemetryHost};
    use crate::layout::Ascii;

    #[test]
    fn firmware_slot_1_is_the_first_revision() {
        let slots = FirmwareSlots::zeroed().with(|page| page.cafslt(1).frs(0, Ascii::new("1.0")));
        assert_eq!(slots.as_bytes()[0], 1);
        assert_eq!(&slots.as_bytes()[8..16], b"1.0     ");
        assert_eq!(slots.frs(6).map(|revision| revision.to_string()), Some(String::new()));
        assert_eq!(slots.frs(7), None);
    }

    #[test]
    fn telemetry_length_is_given_by_its_last_block() {
        let header = TelemetryHost::zeroed().with(|it| it.da1lb(3).da4lb(u32::MAX));
        assert_eq!(
            (header.len_bytes_through_area(1), header.len_bytes_through_area(2)),
            (2048, 512)
        );
        assert_eq!(header.len_bytes_through_area(4), 512 << 32);
    }
}
