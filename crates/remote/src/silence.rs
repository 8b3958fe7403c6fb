//! A connection of an I/O queue that stalls while its controller lives.
//!
//! Nothing comes while commands are under way: the device is slow, or the connection has stalled. A
//! Flush of namespace 0, which every controller refuses at once, tells which:
//!
//! ```text
//!   busy ── a third of `detect`, nothing came ──▶ asked ── another third ──▶ lost
//!    ▲                                             │
//!    └───────────── something came ────────────────┘
//! ```
//!
//! A queue with all its commands out has no room for it, and is lost when nothing has come for as long as
//! requests may be held (`fail-fast`).

use base::{Instant, Span};
use tcp::Data;
use wire::{Command, IoOpcode};

use crate::exchange::Exchange;
use crate::policy::Policy;

/// Looks whether anything comes.
#[derive(Debug)]
pub(crate) struct Silence {
    every: Span,
    patience: Span,
    /// The next look.
    next: Instant,
    /// How often something had come at the last look.
    seen: u64,
    /// Since when nothing has come and something was under way.
    since: Option<Instant>,
    is_asking: bool,
    /// The tag of the question, behind those of the ring.
    tag: u16,
}

impl Silence {
    /// For a queue of so many commands.
    pub(crate) fn new(policy: &Policy, slots: u16, now: Instant) -> Self {
        let every = Span { ns: (policy.detect.ns / 3).max(1) };
        let patience = policy.fail_fast.max(policy.detect);
        let (seen, since, is_asking, next) = (0, None, false, now.after(every));
        Self { every, patience, next, seen, since, is_asking, tag: slots }
    }

    /// When to [`look`](Self::look) next.
    #[inline]
    pub(crate) const fn next(&self) -> Instant {
        self.next
    }

    /// Whether nothing new is to be sent: there would be more under way than there may be.
    #[inline]
    pub(crate) const fn is_asking(&self) -> bool {
        self.is_asking
    }

    /// Whether an answer with this tag is to the question.
    #[inline]
    pub(crate) const fn is_ours(&self, tag: u16) -> bool {
        tag == self.tag
    }

    /// Nothing was under way until now.
    pub(crate) const fn begin(&mut self) {
        self.since = None;
    }

    /// Looks whether anything has come since the last look, and asks or gives up if not.
    #[cold]
    pub(crate) fn look(&mut self, now: Instant, exchange: &mut Exchange) {
        self.next = now.after(self.every);
        let count = exchange.received();
        let is_new = core::mem::replace(&mut self.seen, count) != count;
        if is_new || exchange.outstanding() == 0 {
            self.since = (exchange.outstanding() > 0).then_some(now);
            self.is_asking = false;
            return;
        }
        let Some(since) = self.since else {
            self.since = Some(now);
            return;
        };
        let waited = now.since(since);
        if self.is_asking || waited >= self.patience {
            exchange.fall_silent(waited);
        } else if exchange.outstanding() < u32::from(self.tag) {
            let question = Command::new(IoOpcode::Flush.code());
            let nothing = Some(base::Segment::default());
            let names = (self.tag, self.tag);
            self.is_asking = exchange.submit(names, &question, Data::None, nothing).is_ok();
        }
    }
}
