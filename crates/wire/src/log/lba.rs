//! LBA status: log page 0Eh (potentially lost blocks) and the data structure of Get LBA Status
//! (NVM 1.1 §4.1.4.5, §4.2.1).

use crate::field_type::code;
use crate::layout::{Layout, layout};

layout! {
    /// The header of 0Eh, LBA Status Information (NVM 1.1 §4.1.4.5).
    pub struct LbaStatusInformation[16] {
        /// LBA Status Log Page Length, in bytes.
        lslplen @ 0: u32;
        /// Number of LBA Status Log Namespace Elements.
        nlslne @ 4: u32;
        /// Estimate of Unrecoverable Logical Blocks.
        estulb @ 8: u32;
        /// LBA Status Generation Counter.
        lsgc @ 14: u16;
    }

    /// Namespace element, followed by its ranges (NVM 1.1 §4.1.4.5).
    pub struct LbaStatusNamespace[16] {
        /// Namespace Element Identifier.
        neid @ 0: u32;
        /// Number of LBA Range Descriptors; all ones for the whole namespace.
        nlrd @ 4: u32;
        /// Recommended Action Type.
        ratype @ 8: u8;
    }

    /// A range (NVM 1.1 §4.1.4.5).
    pub struct LbaRange[16] {
        /// Range Starting LBA.
        rslba @ 0: u64;
        /// Range Number of Logical Blocks, 0's based.
        rnlb @ 8: u32;
    }

    /// Header of the Get LBA Status data structure (NVM 1.1 §4.2.1).
    pub struct LbaStatusList[8] {
        /// Number of LBA Status Descriptors.
        nlsd @ 0: u32;
        /// Completion Condition.
        cmpc @ 4: u8 {
            /// Reason why the list ends.
            completion @ 0..=2: LbaStatusCompletion;
        };
    }

    /// Range in the Get LBA Status data structure (NVM 1.1 §4.2.1).
    pub struct LbaStatusDescriptor[16] {
        /// Descriptor Starting LBA.
        dslba @ 0: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 8: u32;
        /// LBA Status Entry.
        lbase @ 13: u8 {
            /// LBA Status.
            lbas @ 0..=2: u8;
        };
    }
}

code! {
    /// CMPC (NVM 1.1 §4.2.1).
    pub enum LbaStatusCompletion {
        /// Not reported.
        None = 0,
        /// Incomplete.
        Incomplete = 1,
        /// Complete.
        Complete = 2,
    }
}

/// Ranges of the Get LBA Status data structure, limited by its count and by the bytes available.
pub fn lba_status_descriptors(answer: &[u8]) -> impl Iterator<Item = LbaStatusDescriptor> + '_ {
    let count = LbaStatusList::parse(answer).map_or(0, |list| list.nlsd());
    let rest = answer.get(LbaStatusList::BYTES..).unwrap_or(&[]);
    let whole = rest.as_chunks::<16>().0.iter().map(LbaStatusDescriptor::from_bytes);
    whole.take(usize::try_from(count).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::{LbaStatusDescriptor, LbaStatusList, lba_status_descriptors};

    #[test]
    fn lba_status_descriptors_are_bounded_by_count_and_length() {
        let mut answer = LbaStatusList::zeroed().with(|it| it.nlsd(2)).as_bytes().to_vec();
        for dslba in [10, 20, 30] {
            answer.extend(LbaStatusDescriptor::zeroed().with(|it| it.dslba(dslba)).as_bytes());
        }
        let starts =
            |bytes: &[u8]| lba_status_descriptors(bytes).map(|it| it.dslba()).collect::<Vec<_>>();
        assert_eq!(starts(&answer), [10, 20]);
        assert_eq!(starts(&answer[..8 + 31]), [10]);
        assert_eq!(starts(&answer[..7]), []);
    }
}
