//! Which descriptors are believed. One that stays readable ends every sleep at once, and a reactor
//! that believes it announces a sleep every other microsecond and never sleeps.
//!
//! ```text
//!   believed ── 32 sleeps in a row ended at once, and nothing found ──▶ deaf for 100 us
//!      ▲                                                                  │ listens again
//!      └──────────── the poller finds work ◀── ended at once ──▶ deaf for twice as long, to 10 ms
//! ```
//!
//! While a reactor is deaf to a descriptor it sleeps no longer than that lasts. So a signal that is
//! true after all is seen so much later at most.

use base::{Instant, Span};

use super::LightThread;
use crate::event::Event;
use crate::reactor::Local;

/// What is thought of one descriptor.
#[derive(Debug)]
pub(crate) struct Trust {
    /// How often the poller had found work when the descriptor ended a sleep last.
    found: u64,
    /// Sleeps in a row that it has ended at once, for nothing.
    row: u32,
    in_vain: u64,
    deaf_for: Span,
    deaf_until: Instant,
    is_told: bool,
}

/// So many sleeps in a row are no accident.
pub(crate) const ROW: u32 = 32;
/// A sleep that was ended by what comes now and then has lasted longer.
const AT_ONCE: Span = Span::from_us(20);
const DEAF_MIN: Span = Span::from_us(100);
/// How late a true signal may be seen.
pub(crate) const DEAF_MAX: Span = Span::from_ms(10);

impl Default for Trust {
    fn default() -> Self {
        Self {
            found: 0,
            row: 0,
            in_vain: 0,
            deaf_for: Span::default(),
            deaf_until: Instant::NEVER,
            is_told: false,
        }
    }
}

impl Trust {
    /// The descriptor has ended a sleep, and its poller has found work `found` times in all. True if
    /// it is believed no more, and that should be told.
    pub(super) fn woken(&mut self, found: u64, slept: Span, now: Instant) -> bool {
        if found != self.found {
            *self = Self { found, in_vain: self.in_vain, ..Self::default() };
            return false;
        }
        if slept > AT_ONCE {
            self.row = 0;
            return false;
        }
        self.row = self.row.saturating_add(1);
        if self.row < ROW {
            return false;
        }
        self.in_vain += if self.row == ROW { u64::from(ROW) } else { 1 };
        self.deaf_for.ns = (2 * self.deaf_for.ns).clamp(DEAF_MIN.ns, DEAF_MAX.ns);
        self.deaf_until = now.after(self.deaf_for);
        !std::mem::replace(&mut self.is_told, true)
    }

    pub(super) fn is_deaf(&self) -> bool {
        self.deaf_until != Instant::NEVER
    }

    /// When it is listened to again; never if it is.
    pub(super) fn deaf_until(&self) -> Instant {
        self.deaf_until
    }

    /// Sleeps that it has ended in vain, as far as they are counted.
    pub(super) fn in_vain(&self) -> u64 {
        self.in_vain
    }

    /// True if it is to be listened to again from now on.
    fn listens_again(&mut self, now: Instant) -> bool {
        let is_over = self.is_deaf() && now >= self.deaf_until;
        if is_over {
            self.deaf_until = Instant::NEVER;
        }
        is_over
    }
}

impl LightThread {
    /// The descriptors with these numbers have ended a sleep of this length.
    #[cold]
    pub(crate) fn woken(&mut self, ready: &[u64], slept: Span, now: Instant, local: &mut Local) {
        let thread = self.desk.record.id;
        let mut is_deaf = false;
        for slot in self.slots.iter_mut().filter(|slot| ready.contains(&slot.number)) {
            if let Some(descriptor) = slot.woken(slept, now) {
                let poller = slot.name().to_owned();
                let event = Event::WokenInVain { poller, thread, descriptor, times: ROW };
                local.directory.note(now, event);
            }
            is_deaf |= slot.trust.is_deaf();
        }
        if is_deaf {
            self.slots.sort_out(thread, now, local);
        }
    }

    /// Listens again to those descriptors for which it is time.
    pub(super) fn listen_again(&mut self, now: Instant, local: &mut Local) {
        let listens = |slot: &mut super::Slot| slot.trust.listens_again(now);
        if self.slots.iter_mut().filter_map(|slot| listens(slot).then_some(())).count() > 0 {
            self.slots.sort_out(self.desk.record.id, now, local);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Random, Span};

    use super::{AT_ONCE, DEAF_MAX, DEAF_MIN, ROW, Trust};

    const SOON: Span = Span::from_us(2);

    /// Ends `count` sleeps at once and for nothing. Returns how often that was to be told.
    fn stuck(trust: &mut Trust, found: u64, count: u32) -> usize {
        let now = Instant { ns: 1_000 };
        (0..count).filter(|_| trust.woken(found, SOON, now)).count()
    }

    #[test]
    fn one_that_stays_readable_is_told_once_and_heard_ever_more_rarely() {
        let mut trust = Trust::default();
        assert_eq!(stuck(&mut trust, 0, ROW - 1), 0);
        assert!(!trust.is_deaf());
        let mut now = Instant { ns: 5_000 };
        assert!(trust.woken(0, SOON, now));
        let mut spans = Vec::new();
        for _ in 0..12 {
            let span = trust.deaf_until().since(now);
            spans.push(span);
            assert!(!trust.listens_again(Instant { ns: trust.deaf_until().ns - 1 }));
            now = trust.deaf_until();
            assert!(trust.listens_again(now) && !trust.is_deaf());
            assert!(!trust.woken(0, SOON, now), "it was told");
        }
        assert_eq!((spans[0], spans[1]), (DEAF_MIN, Span { ns: 2 * DEAF_MIN.ns }));
        assert_eq!(spans[11], DEAF_MAX);
        assert_eq!(trust.in_vain(), u64::from(ROW) + 12);
    }

    #[test]
    fn one_whose_poller_finds_work_is_believed_again_and_told_again() {
        let mut trust = Trust::default();
        assert_eq!(stuck(&mut trust, 0, ROW), 1);
        assert_eq!(stuck(&mut trust, 1, ROW), 0, "the first of them was true");
        assert!(!trust.is_deaf());
        assert_eq!(stuck(&mut trust, 1, 1), 1);
        assert_eq!(trust.deaf_for, DEAF_MIN);
    }

    #[test]
    fn what_comes_now_and_then_or_brings_work_is_always_believed() {
        let mut random = Random::new(4);
        let (mut trust, mut found) = (Trust::default(), 0);
        for _ in 0..1_000 {
            for _ in 0..random.below(ROW.into()) {
                assert!(!trust.woken(found, SOON, Instant::default()));
            }
            let brings = random.chance(1, 2);
            found += u64::from(brings);
            let slept = if brings { SOON } else { Span { ns: AT_ONCE.ns + 1 } };
            assert!(!trust.woken(found, slept, Instant::default()));
        }
        assert_eq!((trust.is_deaf(), trust.in_vain()), (false, 0));
    }
}
