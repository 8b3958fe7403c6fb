//! How time goes by in tests.

use base::{Instant, Span};

/// Hosts and targets that turn together, in simulated time.
pub(super) trait Turning: Sized {
    fn now(&mut self) -> &mut Instant;

    /// One turn of everybody, a moment later.
    fn turn(&mut self);

    /// What has happened so far, for whoever waits in vain.
    fn story(&self) -> String;

    /// Long times go by in larger steps.
    fn turn_for(&mut self, span: Span) {
        let end = self.now().after(span);
        while *self.now() < end {
            *self.now() = self.now().after(Span { ns: span.ns / 500 });
            self.turn();
        }
    }

    /// Who waits for long waits in larger steps.
    #[track_caller]
    fn turn_until(&mut self, mut is_enough: impl FnMut(&mut Self) -> bool) {
        let begun = *self.now();
        let end = begun.after(Span::from_secs(100));
        while !is_enough(self) {
            let waited = self.now().since(begun);
            *self.now() = self.now().after(Span { ns: waited.ns / 500 });
            self.turn();
            assert!(*self.now() < end, "it never came: {}", self.story());
        }
    }
}
