//! Watchdog: detects iterations that do not return, which a reactor itself cannot report.

mod thread;

use tenmil_base::{Instant, Span};
use tenmil_linux::thread_state::ThreadState;

use crate::event::Event;
use crate::flight_recorder::{self, FlightEventKind};
use crate::registry::{ReactorId, Registry};

pub use thread::StallReport;
pub(crate) use thread::run_watchdog;

/// Observer outside of these reactors, to be called periodically. It reads the reactors' counters
/// only, so its cost does not depend on the number of threads.
#[derive(Debug)]
pub struct Watchdog {
    /// State by reactor.
    seen: Vec<ObservedIteration>,
    threshold: Span,
}

/// Check for a service manager's watchdog, which restarts the process: whether reactors make progress between
/// two calls.
#[derive(Debug, Default)]
pub struct ProgressCheck {
    /// Iterations of each reactor at the last call.
    seen: Vec<u64>,
}

/// A reactor that makes no progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StalledReactor {
    /// The reactor.
    pub reactor: ReactorId,
    /// Poller or mailbox that it runs, or ran last.
    pub running: Option<String>,
}

/// Iteration last observed on a reactor.
#[derive(Clone, Copy, Debug)]
struct ObservedIteration {
    iteration: u64,
    since: Instant,
    is_reported: bool,
}

/// Iteration time from which a stall is reported.
pub const STALL_THRESHOLD: Span = Span::from_secs(1);

impl Default for Watchdog {
    fn default() -> Self {
        Self::with_threshold(STALL_THRESHOLD)
    }
}

impl Watchdog {
    /// Creates a watchdog that reports iterations of more than `threshold`.
    pub fn with_threshold(threshold: Span) -> Self {
        Self { seen: Vec::new(), threshold }
    }

    /// Checks all reactors. One that is awake and was in the same iteration at every check for
    /// longer than the threshold is reported, once per iteration.
    pub fn check_reactors(&mut self, now: Instant, directory: &Registry) {
        self.check_reactors_and(now, directory, |_, _| ());
    }

    /// Checks all reactors, and calls `tell` with each that is reported, and the time that its iteration has
    /// lasted so far.
    pub(crate) fn check_reactors_and(
        &mut self,
        now: Instant,
        directory: &Registry,
        mut tell: impl FnMut(ReactorId, &Event),
    ) {
        for (index, reactor) in directory.reactors().enumerate() {
            let iteration = directory.iterations_of(reactor);
            let found = ObservedIteration { iteration, since: now, is_reported: false };
            let Some(seen) = self.seen.get_mut(index) else {
                self.seen.push(found);
                continue;
            };
            let lasts = now.since(seen.since);
            if seen.iteration != iteration
                || directory.is_reactor_asleep(reactor)
                || directory.has_reactor_ended(reactor)
            {
                if seen.is_reported {
                    flight_recorder::record(now, FlightEventKind::Resumed, [lasts.ns, 0]);
                }
                *seen = found;
            } else if !seen.is_reported && lasts > self.threshold {
                seen.is_reported = true;
                let account = directory.running_account(reactor);
                flight_recorder::record(now, FlightEventKind::Stalled, [account, lasts.ns]);
                let event = stalled_event(directory, reactor, lasts);
                tell(reactor, &event);
                directory.record_event(now, event);
            }
        }
    }
}

impl ProgressCheck {
    /// First reactor that is awake and has started no iteration since the last call. After a reactor has been
    /// found, it is found again at each call until it goes on.
    pub fn find_stalled_reactor(&mut self, directory: &Registry) -> Option<StalledReactor> {
        let mut stalled = None;
        for (index, reactor) in directory.reactors().enumerate() {
            let iteration = directory.iterations_of(reactor);
            match self.seen.get_mut(index) {
                None => self.seen.push(iteration),
                Some(seen) => {
                    let is_stalled = *seen == iteration && !directory.is_reactor_asleep(reactor);
                    *seen = iteration;
                    if is_stalled && stalled.is_none() {
                        let running = directory.running_poller_name(reactor);
                        stalled = Some(StalledReactor { reactor, running });
                    }
                }
            }
        }
        stalled
    }
}

fn stalled_event(directory: &Registry, reactor: ReactorId, lasts: Span) -> Event {
    let lasts = Span::from_ms(lasts.ns / 1_000_000);
    let state = directory.os_thread_of(reactor).map(|thread| ThreadState::read(thread).to_string());
    Event::ReactorStalled { reactor, lasts, running: directory.describe_running(reactor), state }
}
