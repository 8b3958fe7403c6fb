//! Device Self-test log page (Base 2.1 §5.1.12.1.7).

use tenmil_wire::Status;
use tenmil_wire::log::self_test::{SelfTestOutcome, SelfTestPage, SelfTestResult};

use crate::controller::Controller;
use crate::controller::self_test::{FinishedSelfTest, RESULTS_MAX};

/// Number of the segment that reads blocks, the only one.
const SEGMENT_MEDIA: u8 = 1;

impl Controller {
    pub(super) fn self_test_page(&self) -> Vec<u8> {
        let (code, percent) = self.self_tests.progress();
        let mut page =
            SelfTestPage::zeroed().with(|page| page.current_code(code).completion_percent(percent));
        let unused = SelfTestResult::zeroed().with(|it| it.outcome(SelfTestOutcome::Unused));
        for index in 0..RESULTS_MAX {
            page.set().result(index, unused.clone());
        }
        for (index, test) in self.self_tests.results().enumerate() {
            page.set().result(index, self_test_log_entry(test));
        }
        page.as_bytes().to_vec()
    }
}

fn self_test_log_entry(test: &FinishedSelfTest) -> SelfTestResult {
    let mut result = SelfTestResult::zeroed();
    result.set().outcome(test.outcome).code(test.code).poh(test.hours);
    if let Some((nsid, failure)) = test.failure {
        let status = Status(failure.status.0);
        result
            .set()
            .segment(SEGMENT_MEDIA)
            .nsid_valid(true)
            .flba_valid(true)
            .sct_valid(true)
            .sc_valid(true)
            .nsid(nsid)
            .flba(failure.lba)
            .sct(status.sct())
            .sc(status.sc());
    }
    result
}
