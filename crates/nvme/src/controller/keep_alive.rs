//! Telling the controller that its host is still there (Base 2.1 §3.9).

use base::{Dma, Instant, Mmio, Span};
use wire::admin::KeepAlive;

use super::Controller;
use super::admin::Purpose;

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// The keep-alive time to be set: what the owner wants, in the controller's units, rounded up.
    /// Zero if there is none to be set.
    pub(super) fn keep_alive_time(&self) -> Span {
        let unit = self.identity.as_ref().map_or(0, |identity| identity.limits.keep_alive_unit.ns);
        match self.options.keep_alive {
            Some(wanted) if unit > 0 => Span { ns: wanted.ns.max(1).next_multiple_of(unit) },
            _ => Span::default(),
        }
    }

    /// The time begins to run.
    pub(super) fn begin_keep_alive(&mut self, now: Instant) {
        self.keep_alive_at = now.after(self.keep_alive_pause());
    }

    /// Sends a Keep Alive when half of the time is over.
    pub(super) fn keep_alive(&mut self, now: Instant) {
        if now < self.keep_alive_at || self.is_standing_still() {
            return;
        }
        self.keep_alive_at = now.after(self.keep_alive_pause());
        if self.admin.count(|purpose| *purpose == Purpose::KeepAlive) == 0 {
            self.admin.ask(now, Purpose::KeepAlive, &KeepAlive {});
        }
    }

    /// Has a Keep Alive sent by the next [`poll`](Self::poll), if it is sent any at all.
    pub fn hurry_keep_alive(&mut self, now: Instant) {
        if self.keep_alive_at != Instant::NEVER {
            self.keep_alive_at = self.keep_alive_at.min(now);
        }
    }

    fn keep_alive_pause(&self) -> Span {
        match self.keep_alive_time() {
            // What Connect has set.
            Span { ns: 0 } => Span { ns: self.options.keep_alive.map_or(0, |time| time.ns / 2) },
            time => Span { ns: time.ns / 2 },
        }
    }
}
