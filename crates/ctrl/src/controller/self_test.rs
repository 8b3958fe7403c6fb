//! Device self-tests: what runs, and how the last ones ended (Base 2.1 §8.1.7).
//!
//! A test reads its way through the blocks with Verify requests: a short one the first and the last
//! blocks of each namespace, an extended one all of them. A medium that cannot verify is asked to
//! flush, and one that cannot do that either is only opened.

use std::collections::VecDeque;

use base::{Instant, Operation, Outcome};
use wire::Status;
use wire::admin::SelfTestCode;
use wire::log::self_test::SelfTestOutcome;

use super::subsystem::{Record, State, Subsystem};
use super::sweep::{Failure, Sweep};

/// The tests of one controller.
#[derive(Default)]
pub(super) struct SelfTests {
    running: Option<Running>,
    /// How tests ended, newest first.
    results: VecDeque<Ending>,
}

struct Running {
    code: SelfTestCode,
    /// The namespace named by the command: 0 for none, all ones for all.
    nsid: u32,
    /// What is still to be swept, in the medium's blocks.
    stretches: VecDeque<Stretch>,
    sweep: Option<(u32, Sweep)>,
    blocks_total: u64,
}

/// Blocks of one namespace's medium.
struct Stretch {
    nsid: u32,
    first: u64,
    end: u64,
}

/// A namespace, and what failed there.
type Failed = (u32, Failure);

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    /// Which kind it was.
    pub(super) code: SelfTestCode,
    pub(super) outcome: SelfTestOutcome,
    /// Hours since power-on.
    pub(super) hours: u64,
    /// Where it failed.
    pub(super) failure: Option<Failed>,
}

/// Results that are kept (Base 2.1 §5.1.12.1.7).
pub(super) const RESULTS_MAX: usize = 20;

/// Blocks at each end of a medium that a short test reads.
const SHORT_BLOCKS: u64 = 256;

impl SelfTests {
    /// Begins a test over `nsids`.
    pub(super) fn start(&mut self, code: SelfTestCode, nsid: u32, nsids: &[u32], state: &State) {
        let records = nsids.iter().filter_map(|nsid| state.records.get(nsid));
        let stretches: VecDeque<Stretch> =
            records.flat_map(|record| stretches(code, record)).collect();
        let blocks_total = stretches.iter().map(|stretch| stretch.end - stretch.first).sum();
        self.running = Some(Running { code, nsid, stretches, sweep: None, blocks_total });
    }

    /// Whether a test runs.
    pub(super) const fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether the test that runs was asked to read this namespace.
    pub(super) fn reads(&self, nsid: u32) -> bool {
        self.running.as_ref().is_some_and(|running| [nsid, u32::MAX].contains(&running.nsid))
    }

    /// Whether the test that runs is ended by a reset (Base 2.1 §8.1.7.1).
    pub(super) fn is_ended_by_reset(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.code == SelfTestCode::Short)
    }

    /// Ends what runs, if anything does.
    pub(super) fn abort(&mut self, outcome: SelfTestOutcome, hours: u64) {
        if let Some(running) = self.running.take() {
            self.keep(Ending { code: running.code, outcome, hours, failure: None });
        }
    }

    /// Works on what runs. Returns how it ended, if it did.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        hours: u64,
        read_by: (&Subsystem, u16),
    ) -> Option<Ending> {
        let running = self.running.as_mut()?;
        let (outcome, failure) = running.turn(now, read_by)?;
        let ending = Ending { code: running.code, outcome, hours, failure };
        self.running = None;
        self.keep(ending);
        Some(ending)
    }

    /// What runs and how much of it is done in percent.
    pub(super) fn progress(&self) -> (SelfTestCode, u8) {
        self.running
            .as_ref()
            .map_or((SelfTestCode::None, 0), |running| (running.code, running.percent()))
    }

    /// How the last tests ended, newest first.
    pub(super) fn results(&self) -> impl Iterator<Item = &Ending> {
        self.results.iter()
    }

    /// When to look again.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        self.running.as_ref().map_or(Instant::NEVER, |running| {
            running.sweep.as_ref().map_or(now, |(_, sweep)| sweep.wake_at(now))
        })
    }

    fn keep(&mut self, ending: Ending) {
        self.results.truncate(RESULTS_MAX - 1);
        self.results.push_front(ending);
    }
}

impl Running {
    fn turn(
        &mut self,
        now: Instant,
        read_by: (&Subsystem, u16),
    ) -> Option<(SelfTestOutcome, Option<Failed>)> {
        if self.sweep.is_none() {
            let Some(stretch) = self.stretches.pop_front() else {
                return Some((SelfTestOutcome::Passed, None));
            };
            match open(&stretch, read_by) {
                Some(Ok(sweep)) => self.sweep = Some((stretch.nsid, sweep)),
                Some(Err(status)) => {
                    let failure = Failure { outcome: Outcome(status.0), lba: stretch.first };
                    return Some((SelfTestOutcome::FailedSegment, Some((stretch.nsid, failure))));
                }
                None => return Some((SelfTestOutcome::AbortedByRemoval, None)),
            }
        }
        let (nsid, sweep) = self.sweep.as_mut()?;
        match sweep.turn(now)? {
            Ok(()) => {
                self.sweep = None;
                self.stretches.is_empty().then_some((SelfTestOutcome::Passed, None))
            }
            Err(failure) => Some((SelfTestOutcome::FailedSegment, Some((*nsid, failure)))),
        }
    }

    fn percent(&self) -> u8 {
        let waiting: u64 = self.stretches.iter().map(|stretch| stretch.end - stretch.first).sum();
        let left = waiting + self.sweep.as_ref().map_or(0, |(_, sweep)| sweep.blocks_left());
        let done = u128::from(self.blocks_total.saturating_sub(left));
        let percent = done * 100 / u128::from(self.blocks_total.max(1));
        u8::try_from(percent).unwrap_or(100)
    }
}

/// What a test of this kind reads of a namespace.
fn stretches(code: SelfTestCode, record: &Record) -> Vec<Stretch> {
    let (nsid, count) = (record.nsid, record.limits.block_count);
    if code == SelfTestCode::Extended || count <= 2 * SHORT_BLOCKS {
        return vec![Stretch { nsid, first: 0, end: count }];
    }
    vec![
        Stretch { nsid, first: 0, end: SHORT_BLOCKS },
        Stretch { nsid, first: count - SHORT_BLOCKS, end: count },
    ]
}

/// Opens the medium of a stretch; `None` if the namespace is not attached to the controller any more.
fn open(
    stretch: &Stretch,
    (subsystem, cntlid): (&Subsystem, u16),
) -> Option<Result<Sweep, Status>> {
    let (medium, support) = {
        let state = subsystem.lock();
        let record = state.attached(cntlid, stretch.nsid)?;
        (record.medium.clone(), record.limits.support)
    };
    let (operation, end) = if support.has(Operation::Verify) {
        (Operation::Verify, stretch.end)
    } else {
        (Operation::Flush, stretch.first)
    };
    Some(Sweep::over(&*medium, operation, stretch.first, end))
}
