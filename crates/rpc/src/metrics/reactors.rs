//! Metrics of reactors.

use super::families::{
    REACTOR_BUSY, REACTOR_IDLE, REACTOR_ITERATIONS, REACTOR_LONG_ITERATIONS, REACTOR_LONGEST,
    REACTOR_MESSAGES, REACTOR_SLEEPS, REACTOR_THREADS, REACTOR_WAKEUPS,
};
use super::metrics_text::MetricsText;
use crate::methods::reactors::sample_of_process;
use crate::process_parts::ProcessParts;

pub(super) fn collect(parts: &ProcessParts, text: &mut MetricsText) {
    let Ok(sample) = sample_of_process(parts) else { return };
    for reactor in &sample.reactors {
        let id = reactor.id.0.to_string();
        let here = sample.threads.iter().filter(|thread| thread.home == reactor.id).count();
        let numbers = [
            (&REACTOR_BUSY, reactor.busy.ns),
            (&REACTOR_IDLE, reactor.idle.ns),
            (&REACTOR_ITERATIONS, reactor.iterations),
            (&REACTOR_LONG_ITERATIONS, reactor.slow_iterations),
            (&REACTOR_LONGEST, reactor.longest_iteration.ns),
            (&REACTOR_SLEEPS, reactor.sleeps),
            (&REACTOR_WAKEUPS, reactor.wakes),
            (&REACTOR_MESSAGES, reactor.messages),
            (&REACTOR_THREADS, here as u64),
        ];
        for (family, value) in numbers {
            text.add(family, [&id], value);
        }
    }
}
