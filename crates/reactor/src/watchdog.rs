//! Watchdog: detects iterations that do not return, which a reactor itself cannot report.

use tenmil_base::{Instant, Span};

use crate::event::Event;
use crate::registry::{ReactorId, Registry};

/// Observer outside of these reactors, to be called periodically. It reads the reactors' counters
/// only, so its cost does not depend on the number of threads.
#[derive(Debug, Default)]
pub struct Watchdog {
    /// State by reactor.
    seen: Vec<ObservedIteration>,
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

impl Watchdog {
    /// Checks all reactors. One that is awake and was in the same iteration at every check for
    /// longer than [`STALL_THRESHOLD`] is reported, once per iteration.
    pub fn check_reactors(&mut self, now: Instant, directory: &Registry) {
        for (index, reactor) in directory.reactors().enumerate() {
            let iteration = directory.iterations_of(reactor);
            let found = ObservedIteration { iteration, since: now, is_reported: false };
            let Some(seen) = self.seen.get_mut(index) else {
                self.seen.push(found);
                continue;
            };
            if seen.iteration != iteration
                || directory.is_reactor_asleep(reactor)
                || directory.has_reactor_ended(reactor)
            {
                *seen = found;
            } else if !seen.is_reported && now.since(seen.since) > STALL_THRESHOLD {
                seen.is_reported = true;
                directory
                    .record_event(now, stalled_event(directory, reactor, now.since(seen.since)));
            }
        }
    }
}

fn stalled_event(directory: &Registry, reactor: ReactorId, lasts: Span) -> Event {
    Event::ReactorStalled { reactor, lasts, running: directory.running_poller_name(reactor) }
}
