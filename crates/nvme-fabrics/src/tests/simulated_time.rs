//! Progress of time in tests.

use tenmil_base::{Instant, Span};

/// Hosts and targets that run together, in simulated time.
pub(super) trait SimulatedTime: Sized {
    fn now(&mut self) -> &mut Instant;

    /// One iteration of all participants, a moment later.
    fn step(&mut self);

    /// Log of the events so far, for a test that waits in vain.
    fn event_log(&self) -> String;

    /// Long times pass in larger steps.
    fn run_for(&mut self, span: Span) {
        let end = self.now().after(span);
        while *self.now() < end {
            *self.now() = self.now().after(Span { ns: span.ns / 500 });
            self.step();
        }
    }

    /// Long waits use larger steps.
    #[track_caller]
    fn run_until(&mut self, mut is_enough: impl FnMut(&mut Self) -> bool) {
        let begun = *self.now();
        let end = begun.after(Span::from_secs(100));
        while !is_enough(self) {
            let waited = self.now().since(begun);
            *self.now() = self.now().after(Span { ns: waited.ns / 500 });
            self.step();
            assert!(*self.now() < end, "it never came: {}", self.event_log());
        }
    }
}
