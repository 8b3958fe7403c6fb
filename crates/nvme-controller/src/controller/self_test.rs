//! Device self-tests: the test in progress and the results of the last ones (Base 2.1 §8.1.7).
//!
//! A test reads blocks with Verify requests: a short one the first and the last blocks of each namespace,
//! an extended one all of them. A block device without Verify is flushed; one without Flush is only
//! opened.

use std::collections::VecDeque;

use tenmil_base::{Instant, IoStatus, Operation};
use tenmil_wire::Status;
use tenmil_wire::admin::SelfTestCode;
use tenmil_wire::log::self_test::SelfTestOutcome;

use super::range_operation::{RangeOperation, RangeOperationFailure};
use super::subsystem::{NamespaceEntry, Subsystem, SubsystemState};

/// Self-tests of one controller.
#[derive(Default)]
pub(super) struct SelfTests {
    running: Option<RunningSelfTest>,
    /// Results, newest first.
    results: VecDeque<FinishedSelfTest>,
}

struct RunningSelfTest {
    code: SelfTestCode,
    /// NSID of the command: 0 for none, FFFFFFFFh for all.
    nsid: u32,
    /// Segments still to be scanned, in blocks of the block device.
    segments: VecDeque<SelfTestSegment>,
    scan: Option<(u32, RangeOperation)>,
    blocks_total: u64,
}

/// Part of one namespace's block device that a test reads.
struct SelfTestSegment {
    nsid: u32,
    first: u64,
    end: u64,
}

/// Namespace and failure of a scan.
type SelfTestFailure = (u32, RangeOperationFailure);

/// Result of a finished self-test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FinishedSelfTest {
    /// Short or extended.
    pub(super) code: SelfTestCode,
    pub(super) outcome: SelfTestOutcome,
    /// Hours since power-on.
    pub(super) hours: u64,
    /// Location of the failure.
    pub(super) failure: Option<SelfTestFailure>,
}

/// Number of results kept (Base 2.1 §5.1.12.1.7).
pub(super) const RESULTS_MAX: usize = 20;

/// Blocks at each end of a block device that a short test reads.
const SHORT_BLOCKS: u64 = 256;

impl SelfTests {
    /// Starts a test of `nsids`.
    pub(super) fn start_test(
        &mut self,
        code: SelfTestCode,
        nsid: u32,
        nsids: &[u32],
        state: &SubsystemState,
    ) {
        let records = nsids.iter().filter_map(|nsid| state.records.get(nsid));
        let segments: VecDeque<SelfTestSegment> =
            records.flat_map(|record| self_test_segments(code, record)).collect();
        let blocks_total = segments.iter().map(|segment| segment.end - segment.first).sum();
        self.running = Some(RunningSelfTest { code, nsid, segments, scan: None, blocks_total });
    }

    /// Whether a test is running.
    pub(super) const fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether the running test includes this namespace.
    pub(super) fn includes_namespace(&self, nsid: u32) -> bool {
        self.running.as_ref().is_some_and(|running| [nsid, u32::MAX].contains(&running.nsid))
    }

    /// Whether a reset aborts the running test (Base 2.1 §8.1.7.1).
    pub(super) fn is_ended_by_reset(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.code == SelfTestCode::Short)
    }

    /// Aborts the running test, if any.
    pub(super) fn abort(&mut self, outcome: SelfTestOutcome, hours: u64) {
        if let Some(running) = self.running.take() {
            self.push_result(FinishedSelfTest {
                code: running.code,
                outcome,
                hours,
                failure: None,
            });
        }
    }

    /// Advances the running test. Returns its result once it has finished.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        hours: u64,
        reader: (&Subsystem, u16),
    ) -> Option<FinishedSelfTest> {
        let running = self.running.as_mut()?;
        let (outcome, failure) = running.poll(now, reader)?;
        let result = FinishedSelfTest { code: running.code, outcome, hours, failure };
        self.running = None;
        self.push_result(result);
        Some(result)
    }

    /// Running test, and its progress in percent.
    pub(super) fn progress(&self) -> (SelfTestCode, u8) {
        self.running
            .as_ref()
            .map_or((SelfTestCode::None, 0), |running| (running.code, running.percent()))
    }

    /// Results of the last tests, newest first.
    pub(super) fn results(&self) -> impl Iterator<Item = &FinishedSelfTest> {
        self.results.iter()
    }

    /// Time of the next poll.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        self.running.as_ref().map_or(Instant::NEVER, |running| {
            running.scan.as_ref().map_or(now, |(_, scan)| scan.wake_at(now))
        })
    }

    fn push_result(&mut self, result: FinishedSelfTest) {
        self.results.truncate(RESULTS_MAX - 1);
        self.results.push_front(result);
    }
}

impl RunningSelfTest {
    fn poll(
        &mut self,
        now: Instant,
        reader: (&Subsystem, u16),
    ) -> Option<(SelfTestOutcome, Option<SelfTestFailure>)> {
        if self.scan.is_none() {
            let Some(segment) = self.segments.pop_front() else {
                return Some((SelfTestOutcome::Passed, None));
            };
            match start_segment_scan(&segment, reader) {
                Some(Ok(scan)) => self.scan = Some((segment.nsid, scan)),
                Some(Err(status)) => {
                    let failure =
                        RangeOperationFailure { status: IoStatus(status.0), lba: segment.first };
                    return Some((SelfTestOutcome::FailedSegment, Some((segment.nsid, failure))));
                }
                None => return Some((SelfTestOutcome::AbortedByRemoval, None)),
            }
        }
        let (nsid, scan) = self.scan.as_mut()?;
        match scan.poll(now)? {
            Ok(()) => {
                self.scan = None;
                self.segments.is_empty().then_some((SelfTestOutcome::Passed, None))
            }
            Err(failure) => Some((SelfTestOutcome::FailedSegment, Some((*nsid, failure)))),
        }
    }

    fn percent(&self) -> u8 {
        let waiting: u64 = self.segments.iter().map(|segment| segment.end - segment.first).sum();
        let left = waiting + self.scan.as_ref().map_or(0, |(_, scan)| scan.unsubmitted_blocks());
        let done = u128::from(self.blocks_total.saturating_sub(left));
        let percent = done * 100 / u128::from(self.blocks_total.max(1));
        u8::try_from(percent).unwrap_or(100)
    }
}

/// Segments of a namespace that a test of this kind reads.
fn self_test_segments(code: SelfTestCode, record: &NamespaceEntry) -> Vec<SelfTestSegment> {
    let (nsid, count) = (record.nsid, record.limits.block_count);
    if code == SelfTestCode::Extended || count <= 2 * SHORT_BLOCKS {
        return vec![SelfTestSegment { nsid, first: 0, end: count }];
    }
    vec![
        SelfTestSegment { nsid, first: 0, end: SHORT_BLOCKS },
        SelfTestSegment { nsid, first: count - SHORT_BLOCKS, end: count },
    ]
}

/// Opens the block device of a segment; `None` if the namespace is no longer attached to the controller.
fn start_segment_scan(
    segment: &SelfTestSegment,
    (subsystem, cntlid): (&Subsystem, u16),
) -> Option<Result<RangeOperation, Status>> {
    let (device, support) = {
        let state = subsystem.lock_state();
        let record = state.attached_namespace(cntlid, segment.nsid)?;
        (record.device.clone(), record.limits.operations)
    };
    let (operation, end) = if support.has(Operation::Verify) {
        (Operation::Verify, segment.end)
    } else {
        (Operation::Flush, segment.first)
    };
    Some(RangeOperation::start(&*device, operation, segment.first, end))
}
