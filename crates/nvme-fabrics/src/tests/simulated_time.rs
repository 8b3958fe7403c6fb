//! Progress of time in tests.

use tenmil_base::{Instant, Span};

/// Hosts and targets that run together, in simulated time.
pub(super) trait SimulatedTime: Sized {
    fn now_mut(&mut self) -> &mut Instant;

    /// One iteration of all participants, a moment later.
    fn step(&mut self);

    /// Log of the events so far, for a test that waits in vain.
    fn event_log(&self) -> String;

    /// Long times pass in larger steps.
    fn run_for(&mut self, span: Span) {
        let end = self.now_mut().after(span);
        while *self.now_mut() < end {
            *self.now_mut() = self.now_mut().after(Span { ns: span.ns / 500 });
            self.step();
        }
    }

    /// Long waits use larger steps.
    #[track_caller]
    fn run_until(&mut self, mut is_enough: impl FnMut(&mut Self) -> bool) {
        let begun = *self.now_mut();
        let end = begun.after(Span::from_secs(100));
        while !is_enough(self) {
            let waited = self.now_mut().since(begun);
            *self.now_mut() = self.now_mut().after(Span { ns: waited.ns / 500 });
            self.step();
            assert!(*self.now_mut() < end, "it never came: {}", self.event_log());
        }
    }
}
