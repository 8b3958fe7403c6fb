//! Timing of consecutive steps.

use tenmil_base::{Instant, Span};

use crate::Clock;

/// Measures the duration of each step.
#[derive(Clone, Debug)]
pub struct StepTimer {
    clock: Clock,
    since: Instant,
    took: Vec<StepTiming>,
}

/// A completed step and its duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTiming {
    /// Name of the step.
    pub step: String,
    /// Time since the end of the previous step.
    pub span: Span,
}

impl StepTimer {
    /// Starts the first step.
    pub fn begin(clock: Clock) -> Self {
        Self { clock, since: clock.now(), took: Vec::new() }
    }

    /// Clock in use.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Ends the current step under the name `step`, and starts the next.
    pub fn finish_step(&mut self, step: impl Into<String>) {
        let now = self.clock.now();
        self.took.push(StepTiming { step: step.into(), span: now.since(self.since) });
        self.since = now;
    }

    /// Returns the completed steps.
    pub fn timings(self) -> Vec<StepTiming> {
        self.took
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::StepTimer;
    use crate::Clock;

    #[test]
    fn step_durations_cover_the_whole_time() {
        let clock = Clock::on_kernel_clock();
        let before = clock.now();
        let mut steps = StepTimer::begin(clock);
        crate::named_thread::sleep(Span::from_ms(2));
        steps.finish_step("rest");
        steps.finish_step("nothing");
        let after = clock.now();
        let took = steps.timings();
        let [rest, nothing] = took.as_slice() else { panic!("{took:?}") };
        assert_eq!((rest.step.as_str(), nothing.step.as_str()), ("rest", "nothing"));
        assert!(rest.span.ns >= 2_000_000, "{rest:?}");
        assert!(rest.span.ns + nothing.span.ns <= after.since(before).ns, "{took:?}");
    }
}
