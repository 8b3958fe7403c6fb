//! A load without a driver, kept up for a while: what both ceilings are measured by.

use base::{Histogram, Span};
use host::Clock;

/// Rounds between two looks at the clock.
const ROUNDS_PER_LOOK: u32 = 16;

/// Goes on with `round`, which says how many have come back, for so long: how many that were, in
/// what time, and where one is under way, how long each trip was.
#[inline(always)]
pub(super) fn keep_going(
    clock: Clock,
    time: Span,
    single: bool,
    gives_way: bool,
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
            if done == 0 && gives_way {
                host::thread::give_way();
            }
        }
        let now = clock.now();
        if now >= end {
            return (count, now.since(begun), trips);
        }
    }
}
