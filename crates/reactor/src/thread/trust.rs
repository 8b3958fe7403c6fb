//! Which descriptors are believed. One that stays readable ends every sleep at once, and a reactor
//! that believes it announces a sleep every other microsecond and never sleeps.
//!
//! ```text
//!   believed ── 32 sleeps in a row ended at once, and nothing found ──▶ heard when it changes
//!      ▲                                                                  │ for 100 us
//!      ├────── it changed meanwhile, or the poller finds work ◀───────────┤
//!      └── no more ◀── ended at once again: it is stuck, and told ◀────────┘ twice as long, to 10 ms
//! ```
//!
//! A descriptor that others use too, such as that of a device which several threads wait for, may end
//! many sleeps with what is for somebody else. It is not stuck: each signal is new, and so is heard.
//! One that is stuck is silent as long as it does not change, and the reactor sleeps. Should it have
//! something to say and not change, that is seen when it is believed again: 10 ms later at most.

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
    /// How long it is heard only when it changes, and until when it is now.
    wary_for: Span,
    wary_until: Instant,
    /// Sleeps that it has ended meanwhile.
    changes: u32,
    is_told: bool,
}

/// So many sleeps in a row are no accident.
pub(crate) const ROW: u32 = 32;
/// A sleep that was ended by what comes now and then has lasted longer.
const AT_ONCE: Span = Span::from_us(20);
const WARY_MIN: Span = Span::from_us(100);
/// How late a signal may be seen that changes nothing about a descriptor that is readable.
pub(crate) const WARY_MAX: Span = Span::from_ms(10);
/// One that was readable at the beginning ends one sleep by that. More are changes.
const ECHO: u32 = 1;

impl Default for Trust {
    fn default() -> Self {
        Self {
            found: 0,
            row: 0,
            in_vain: 0,
            wary_for: Span::default(),
            wary_until: Instant::NEVER,
            changes: 0,
            is_told: false,
        }
    }
}

impl Trust {
    /// The descriptor has ended a sleep, and its poller has found work `found` times in all. True if
    /// it is stuck, and that should be told.
    pub(super) fn woken(&mut self, found: u64, slept: Span, now: Instant) -> bool {
        if found != self.found {
            *self = Self { found, in_vain: self.in_vain, ..Self::default() };
            return false;
        }
        if self.is_wary() {
            self.changes = self.changes.saturating_add(1);
            return false;
        }
        if slept > AT_ONCE {
            (self.row, self.wary_for) = (0, Span::default());
            return false;
        }
        self.row = self.row.saturating_add(1);
        if self.row < ROW {
            return false;
        }
        let is_first = self.row == ROW;
        self.in_vain += if is_first { u64::from(ROW) } else { 1 };
        self.wary_for.ns = (2 * self.wary_for.ns).clamp(WARY_MIN.ns, WARY_MAX.ns);
        (self.wary_until, self.changes) = (now.after(self.wary_for), 0);
        !is_first && !std::mem::replace(&mut self.is_told, true)
    }

    /// Whether it is heard only when it changes.
    pub(super) fn is_wary(&self) -> bool {
        self.wary_until != Instant::NEVER
    }

    /// When it is believed again; never if it is.
    pub(super) fn wary_until(&self) -> Instant {
        self.wary_until
    }

    /// Sleeps that it has ended in vain, as far as they are counted.
    pub(super) fn in_vain(&self) -> u64 {
        self.in_vain
    }

    /// True if it is to be believed again from now on.
    fn is_reconciled(&mut self, now: Instant) -> bool {
        let is_over = self.is_wary() && now >= self.wary_until;
        if is_over {
            self.wary_until = Instant::NEVER;
            if self.changes > ECHO {
                (self.row, self.wary_for) = (0, Span::default());
            }
        }
        is_over
    }
}

impl LightThread {
    /// The descriptors with these numbers have ended a sleep of this length.
    #[cold]
    pub(crate) fn woken(&mut self, ready: &[u64], slept: Span, now: Instant, local: &mut Local) {
        let thread = self.desk.record.id;
        let mut is_wary = false;
        for slot in self.slots.iter_mut().filter(|slot| ready.contains(&slot.number)) {
            is_wary |= slot.trust.is_wary();
            if let Some(descriptor) = slot.woken(slept, now) {
                let poller = slot.name().to_owned();
                let event = Event::WokenInVain { poller, thread, descriptor, times: ROW };
                local.directory.note(now, event);
            }
            is_wary |= slot.trust.is_wary();
        }
        if is_wary {
            self.slots.sort_out(thread, now, local);
        }
    }

    /// Believes those descriptors again for which it is time.
    pub(super) fn reconcile(&mut self, now: Instant, local: &mut Local) {
        let is_reconciled = |slot: &mut super::Slot| slot.trust.is_reconciled(now);
        if self.slots.iter_mut().filter_map(|slot| is_reconciled(slot).then_some(())).count() > 0 {
            self.slots.sort_out(self.desk.record.id, now, local);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Random, Span};

    use super::{AT_ONCE, ROW, Trust, WARY_MAX, WARY_MIN};

    const SOON: Span = Span::from_us(2);

    /// Ends `count` sleeps at once and for nothing. Returns how often that was to be told.
    fn stuck(trust: &mut Trust, found: u64, count: u32) -> usize {
        let now = Instant { ns: 1_000 };
        (0..count).filter(|_| trust.woken(found, SOON, now)).count()
    }

    #[test]
    fn one_that_stays_readable_is_told_once_and_believed_ever_more_rarely() {
        let mut trust = Trust::default();
        assert_eq!(stuck(&mut trust, 0, ROW - 1), 0);
        assert!(!trust.is_wary());
        let mut now = Instant { ns: 5_000 };
        let mut told = usize::from(trust.woken(0, SOON, now));
        assert!(told == 0 && trust.is_wary(), "it may be that of many");
        let mut spans = Vec::new();
        for _ in 0..12 {
            // It was readable when changes were begun to be listened for, and has not changed.
            assert!(!trust.woken(0, SOON, now));
            spans.push(trust.wary_until().since(now));
            assert!(!trust.is_reconciled(Instant { ns: trust.wary_until().ns - 1 }));
            now = trust.wary_until();
            assert!(trust.is_reconciled(now) && !trust.is_wary());
            told += usize::from(trust.woken(0, SOON, now));
            assert_eq!(told, 1);
        }
        assert_eq!((spans[0], spans[1]), (WARY_MIN, Span { ns: 2 * WARY_MIN.ns }));
        assert_eq!(spans[11], WARY_MAX);
        assert_eq!(trust.in_vain(), u64::from(ROW) + 12);
    }

    #[test]
    fn one_that_changes_is_never_told_and_never_doubted_for_long() {
        let mut trust = Trust::default();
        for _ in 0..20 {
            let now = Instant { ns: 5_000 };
            assert_eq!(stuck(&mut trust, 0, ROW), 0);
            assert_eq!(trust.wary_until().since(Instant { ns: 1_000 }), WARY_MIN);
            assert_eq!(stuck(&mut trust, 0, 2), 0);
            assert!(trust.is_reconciled(now.after(WARY_MIN)));
        }
    }

    #[test]
    fn one_whose_poller_finds_work_is_believed_again_and_told_again() {
        let mut trust = Trust::default();
        let later = Instant { ns: 1_000 }.after(WARY_MIN);
        for found in 0..3 {
            assert_eq!(stuck(&mut trust, found, ROW), 0);
            assert!(trust.is_wary());
            assert_eq!(trust.wary_until(), later);
            assert!(trust.is_reconciled(later));
            assert_eq!(stuck(&mut trust, found, 1), 1);
            assert!(!trust.woken(found + 1, SOON, later), "while it was not believed");
            assert!(!trust.is_wary());
        }
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
        assert_eq!((trust.is_wary(), trust.in_vain()), (false, 0));
    }
}
