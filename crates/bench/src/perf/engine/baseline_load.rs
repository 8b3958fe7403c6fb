//! Load loop of the baselines, without a driver.

use tenmil_base::{Histogram, Span};
use tenmil_linux::Clock;

/// Rounds per reading of the clock.
const ROUNDS_PER_LOOK: u32 = 16;

/// Runs `round`, which returns the number of completions, for the duration `time`. Returns the
/// number of completions, the elapsed time, and with a single entry in flight the round trip times.
#[inline(always)]
pub(super) fn repeat_for(
    clock: Clock,
    time: Span,
    single: bool,
    yields: bool,
    mut round: impl FnMut() -> u64,
) -> (u64, Span, Histogram) {
    let mut trips = Histogram::new();
    let mut count = 0;
    let begun = clock.now();
    let end = begun.after(time);
    let mut last = begun;
    loop {
        for _ in 0..ROUNDS_PER_LOOK {
            let done = round();
            if done > 0 && single {
                let now = clock.now();
                trips.record(now.since(last).ns);
                last = now;
            }
            count += done;
            if done == 0 && yields {
                tenmil_linux::named_thread::yield_cpu();
            }
        }
        let now = clock.now();
        if now >= end {
            return (count, now.since(begun), trips);
        }
    }
}
