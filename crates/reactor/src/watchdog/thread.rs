//! Thread that runs the watchdog of running reactors.

use std::fmt;

use tenmil_base::Span;
use tenmil_linux::{Clock, StopFlag, named_thread};

use super::Watchdog;
use crate::event::Event;
use crate::registry::{ReactorId, Registry};

/// Iteration that does not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallReport {
    /// The reactor.
    pub reactor: ReactorId,
    /// Time for which the iteration has been observed.
    pub lasts: Span,
    /// What runs: the poller, or the thread whose message runs.
    pub running: Option<String>,
    /// The event, which has the stack too.
    pub event: Event,
}

/// Checks within the threshold. A stall is reported after at most this part of the threshold more.
const CHECKS: u64 = 4;
/// Longest interval between two checks, and between two looks at the stop flag.
const INTERVAL_MAX: Span = Span::from_ms(250);
/// Shortest interval between two checks.
const INTERVAL_MIN: Span = Span::from_ms(1);

/// Checks the reactors until it is stopped.
pub(crate) fn run_watchdog(
    stop: &StopFlag,
    threshold: Span,
    (directory, clock): (&Registry, Clock),
    tell: &dyn Fn(&StallReport),
) {
    let interval = Span { ns: threshold.ns / CHECKS }.clamp(INTERVAL_MIN, INTERVAL_MAX);
    let mut watchdog = Watchdog::with_threshold(threshold);
    while !stop.is_stopped() {
        watchdog.check_reactors_and(clock.now(), directory, |reactor, event| {
            if let Event::ReactorStalled { lasts, running, .. } = event {
                let (lasts, running, event) = (*lasts, running.clone(), event.clone());
                tell(&StallReport { reactor, lasts, running, event });
            }
        });
        named_thread::sleep(interval);
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.event.fmt(out)
    }
}
