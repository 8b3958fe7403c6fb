//! How long one thing after another takes.

use base::{Instant, Span};

use crate::Clock;

/// A watch that is looked at whenever a step is done.
#[derive(Clone, Debug)]
pub struct Steps {
    clock: Clock,
    since: Instant,
    took: Vec<Took>,
}

/// A step that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Took {
    /// Which.
    pub step: String,
    /// From the end of the one before.
    pub span: Span,
}

impl Steps {
    /// The first one begins now.
    pub fn begin(clock: Clock) -> Self {
        Self { clock, since: clock.now(), took: Vec::new() }
    }

    /// What is looked at.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// One is done, and the next begins.
    pub fn done(&mut self, step: impl Into<String>) {
        let now = self.clock.now();
        self.took.push(Took { step: step.into(), span: now.since(self.since) });
        self.since = now;
    }

    /// All that are done.
    pub fn took(self) -> Vec<Took> {
        self.took
    }
}

#[cfg(test)]
mod tests {
    use base::Span;

    use super::Steps;
    use crate::Clock;

    #[test]
    fn steps_follow_each_other_without_a_gap() {
        let clock = Clock::kernel();
        let before = clock.now();
        let mut steps = Steps::begin(clock);
        crate::thread::rest(Span::from_ms(2));
        steps.done("rest");
        steps.done("nothing");
        let after = clock.now();
        let took = steps.took();
        let [rest, nothing] = took.as_slice() else { panic!("{took:?}") };
        assert_eq!((rest.step.as_str(), nothing.step.as_str()), ("rest", "nothing"));
        assert!(rest.span.ns >= 2_000_000, "{rest:?}");
        assert!(rest.span.ns + nothing.span.ns <= after.since(before).ns, "{took:?}");
    }
}
