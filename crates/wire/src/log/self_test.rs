//! 06h: the last twenty self-tests (Base 2.1 §5.1.12.1.7).

use crate::admin::SelfTestCode;
use crate::field_type::code;
use crate::layout::layout;

layout! {
    /// 06h: Device Self-test (Base 2.1 §5.1.12.1.7).
    pub struct SelfTestPage[564] {
        /// Current Device Self-test Operation.
        current @ 0: u8 {
            /// Operation in progress.
            current_code @ 0..=3: SelfTestCode;
        };
        /// Current Device Self-test Completion.
        completion @ 1: u8 {
            /// Percentage completed.
            completion_percent @ 0..=6: u8;
        };
        /// Results, newest first.
        result @ 4: SelfTestResult[20];
    }

    /// A self-test's result (Base 2.1 §5.1.12.1.7, Figure 215).
    pub struct SelfTestResult[28] {
        /// Device Self-test Status.
        status @ 0: u8 {
            /// Result.
            outcome @ 0..=3: SelfTestOutcome;
            /// Self-test Code.
            code @ 4..=7: SelfTestCode;
        };
        /// Segment Number of the first failure.
        segment @ 1: u8;
        /// Valid Diagnostic Information.
        valid @ 2: u8 {
            /// NSID is valid.
            nsid_valid @ 0: bool;
            /// Failing LBA is valid.
            flba_valid @ 1: bool;
            /// Status code type is valid.
            sct_valid @ 2: bool;
            /// Status code is valid.
            sc_valid @ 3: bool;
        };
        /// Power On Hours.
        poh @ 4: u64;
        /// Namespace Identifier.
        nsid @ 12: u32;
        /// Failing LBA.
        flba @ 16: u64;
        /// Status Code Type.
        status_type @ 24: u8 {
            /// Status Code Type.
            sct @ 0..=2: u8;
        };
        /// Status Code.
        sc @ 25: u8;
        /// Vendor Specific.
        vendor @ 26: u16;
    }
}

code! {
    /// Result of a self-test (Base 2.1 §5.1.12.1.7, Figure 215).
    pub enum SelfTestOutcome {
        /// Completed without error.
        Passed = 0x0,
        /// Aborted by a command.
        AbortedByCommand = 0x1,
        /// Aborted by a controller level reset.
        AbortedByReset = 0x2,
        /// Aborted by the removal of a namespace.
        AbortedByRemoval = 0x3,
        /// Aborted by a format.
        AbortedByFormat = 0x4,
        /// Not completed because of a fatal error.
        FatalError = 0x5,
        /// Completed with an unknown failed segment.
        FailedSomewhere = 0x6,
        /// Completed with a failed segment, which is reported.
        FailedSegment = 0x7,
        /// Aborted for an unknown reason.
        Aborted = 0x8,
        /// Aborted by a sanitize operation.
        AbortedBySanitize = 0x9,
        /// Unused entry.
        Unused = 0xf,
    }
}

impl SelfTestPage {
    /// Results, newest first, without unused entries.
    pub fn results(&self) -> impl Iterator<Item = SelfTestResult> + '_ {
        let results = (0..20).filter_map(|index| self.result(index));
        results.filter(|result| result.outcome() != SelfTestOutcome::Unused)
    }
}

#[cfg(test)]
mod tests {
    use super::{SelfTestOutcome, SelfTestPage, SelfTestResult};
    use crate::admin::SelfTestCode;

    #[test]
    fn unused_self_test_entries_are_skipped() {
        let unused = SelfTestResult::zeroed().with(|it| it.outcome(SelfTestOutcome::Unused));
        let passed = SelfTestResult::zeroed().with(|it| it.code(SelfTestCode::Short).poh(5));
        let mut page = SelfTestPage::zeroed();
        for index in 0..20 {
            page.set().result(index, unused.clone());
        }
        page.set().result(0, passed.clone());
        assert_eq!(page.as_bytes()[4], 0x10);
        assert_eq!(page.results().collect::<Vec<_>>(), [passed]);
    }
}
