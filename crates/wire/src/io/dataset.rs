//! Dataset Management (NVM 1.1 §3.3.3).

use crate::layout::layout;
use crate::opcode::IoOpcode;
use crate::typed::commands;

/// Maximum number of ranges in one command (NVM 1.1 §3.3.3).
pub const RANGES_MAX: usize = 256;

commands! {
    /// Dataset Management (NVM 1.1 §3.3.3).
    pub struct DatasetManagement = IoOpcode::DatasetManagement, "Dataset Management" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Number of Ranges, 0's based.
        nr @ 10[0..=7]: u8;
        /// Integral Dataset for Read.
        idr @ 11[0]: bool;
        /// Integral Dataset for Write.
        idw @ 11[1]: bool;
        /// Deallocate.
        ad @ 11[2]: bool;
    }
}

layout! {
    /// One range of a Dataset Management command (NVM 1.1 §3.3.3, Figure 46).
    #[derive(Copy)]
    pub struct DatasetRange[16] {
        /// Context Attributes.
        cattr @ 0: u32 {
            /// Access Frequency.
            access_frequency @ 0..=3: u8;
            /// Access Latency: 1 idle, 2 normal, 3 low.
            access_latency @ 4..=5: u8;
            /// Sequential Read Range.
            sequential_read @ 8: bool;
            /// Sequential Write Range.
            sequential_write @ 9: bool;
            /// Write Prepare.
            write_prepare @ 10: bool;
            /// Command Access Size, in blocks.
            access_size @ 24..=31: u8;
        };
        /// Length in logical blocks.
        nlb @ 4: u32;
        /// Starting LBA.
        slba @ 8: u64;
    }
}

impl DatasetRange {
    /// Range of `nlb` blocks from `slba` on.
    #[must_use]
    pub fn new(slba: u64, nlb: u32) -> Self {
        Self::zeroed().with(|range| range.slba(slba).nlb(nlb))
    }

    /// The block after the last one. `None` on overflow.
    #[must_use]
    pub fn end_lba(&self) -> Option<u64> {
        self.slba().checked_add(u64::from(self.nlb()))
    }
}

/// Complete ranges in `bytes`.
pub fn parse_dataset_ranges(bytes: &[u8]) -> impl Iterator<Item = DatasetRange> + '_ {
    bytes.as_chunks::<16>().0.iter().map(DatasetRange::from_bytes)
}

#[cfg(test)]
mod tests {
    use super::{DatasetManagement, DatasetRange, parse_dataset_ranges};
    use crate::typed::TypedCommand;

    #[test]
    fn incomplete_dataset_range_is_ignored() {
        let mut bytes = Vec::new();
        for range in [DatasetRange::new(8, 1), DatasetRange::new(1 << 40, 3)] {
            bytes.extend(range.as_bytes());
        }
        bytes.push(0xff);
        let read: Vec<_> =
            parse_dataset_ranges(&bytes).map(|range| (range.slba(), range.nlb())).collect();
        assert_eq!(read, [(8, 1), (1 << 40, 3)]);
    }

    #[test]
    fn deallocate_attribute_is_bit_2_of_cdw11() {
        let deallocate = DatasetManagement { nr: 255, ad: true, ..DatasetManagement::default() };
        assert_eq!(deallocate.to_command().cdw10(), 255);
        assert_eq!(deallocate.to_command().cdw11(), 4);
    }

    #[test]
    fn dataset_range_beyond_the_last_lba_has_no_end() {
        assert_eq!(DatasetRange::new(u64::MAX, 1).end_lba(), None);
        assert_eq!(DatasetRange::new(4, 2).end_lba(), Some(6));
    }
}
