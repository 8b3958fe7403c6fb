//! Filter for spurious wake-ups. A descriptor that stays readable without work ends every sleep at
//! once, and the reactor would announce a sleep every other microsecond and never sleep.
//!
//! ```text
//!   level ── 32 sleeps in a row ended at once, without work ─────▶ edge-triggered
//!      ▲                                                             │ for 100 us
//!      ├────── it changed meanwhile, or the poller finds work ◀──────┤
//!      └── no longer ◀── at once again: stuck, event recorded ◀──────┘ doubled, up to 10 ms
//! ```
//!
//! A descriptor shared with others, such as that of a device that several threads wait for, may end
//! many sleeps with work for another thread. It is not stuck: each signal is a new edge and is
//! reported. A stuck one is silent as long as it does not change, and the reactor sleeps. If it has
//! work without a change, that is found when it becomes level-triggered again: at most 10 ms later.

use tenmil_base::{Instant, Span};

use super::LightThread;
use crate::event::Event;
use crate::reactor::ReactorLocal;

/// Spurious wake-up state of one descriptor.
#[derive(Debug)]
pub(crate) struct SpuriousWakeFilter {
    /// Number of polls with work when the descriptor last ended a sleep.
    found: u64,
    /// Consecutive sleeps that it ended at once, without work.
    row: u32,
    spurious: u64,
    /// Duration of the edge-triggered period, and its end.
    edge_for: Span,
    edge_until: Instant,
    /// Sleeps that it has ended in that period.
    changes: u32,
    is_reported: bool,
}

/// Consecutive spurious wake-ups that are no coincidence.
pub(crate) const SPURIOUS_ROW: u32 = 32;
/// A sleep ended by an occasional event lasts longer than this.
const SPURIOUS_SLEEP_MAX: Span = Span::from_us(20);
const EDGE_MIN: Span = Span::from_us(100);
/// Maximum delay of a signal that does not change a readable descriptor.
pub(crate) const EDGE_MAX: Span = Span::from_ms(10);
/// A descriptor that was readable at the start ends one sleep by that. Further ones are changes.
const INITIAL_READINESS: u32 = 1;

impl Default for SpuriousWakeFilter {
    fn default() -> Self {
        Self {
            found: 0,
            row: 0,
            spurious: 0,
            edge_for: Span::default(),
            edge_until: Instant::NEVER,
            changes: 0,
            is_reported: false,
        }
    }
}

impl SpuriousWakeFilter {
    /// Handles a sleep that the descriptor ended, after its poller found work `found` times in
    /// total. True if it is stuck and an event is to be recorded.
    pub(super) fn handle_wakeup(&mut self, found: u64, slept: Span, now: Instant) -> bool {
        // The poller has found work since: the descriptor is trusted again.
        if found != self.found {
            *self = Self { found, spurious: self.spurious, ..Self::default() };
            return false;
        }
        if self.is_edge_triggered() {
            self.changes = self.changes.saturating_add(1);
            return false;
        }
        // A sleep that lasted was ended by a real event.
        if slept > SPURIOUS_SLEEP_MAX {
            (self.row, self.edge_for) = (0, Span::default());
            return false;
        }
        self.row = self.row.saturating_add(1);
        if self.row < SPURIOUS_ROW {
            return false;
        }
        // The first row may be a coincidence; the event is recorded when it repeats.
        let is_first = self.row == SPURIOUS_ROW;
        self.spurious += if is_first { u64::from(SPURIOUS_ROW) } else { 1 };
        self.edge_for.ns = (2 * self.edge_for.ns).clamp(EDGE_MIN.ns, EDGE_MAX.ns);
        (self.edge_until, self.changes) = (now.after(self.edge_for), 0);
        !is_first && !std::mem::replace(&mut self.is_reported, true)
    }

    /// Whether it is edge-triggered.
    pub(super) fn is_edge_triggered(&self) -> bool {
        self.edge_until != Instant::NEVER
    }

    /// Time at which it becomes level-triggered again; never if it is.
    pub(super) fn level_triggered_at(&self) -> Instant {
        self.edge_until
    }

    /// Counted spurious wake-ups.
    pub(super) fn spurious_count(&self) -> u64 {
        self.spurious
    }

    /// True if it becomes level-triggered now.
    fn end_edge_period(&mut self, now: Instant) -> bool {
        let is_over = self.is_edge_triggered() && now >= self.edge_until;
        if is_over {
            self.edge_until = Instant::NEVER;
            if self.changes > INITIAL_READINESS {
                (self.row, self.edge_for) = (0, Span::default());
            }
        }
        is_over
    }
}

impl LightThread {
    /// Handles a sleep of this length that the descriptors with these numbers ended.
    #[cold]
    pub(crate) fn handle_wakeups(
        &mut self,
        ready: &[u64],
        slept: Span,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let thread = self.state.record.id;
        let mut is_wary = false;
        for slot in self.slots.iter_mut().filter(|slot| ready.contains(&slot.number)) {
            is_wary |= slot.spurious_filter.is_edge_triggered();
            if let Some(descriptor) = slot.handle_wakeup(slept, now) {
                let poller = slot.name().to_owned();
                let event =
                    Event::SpuriousWakeups { poller, thread, descriptor, times: SPURIOUS_ROW };
                local.registry.record_event(now, event);
            }
            is_wary |= slot.spurious_filter.is_edge_triggered();
        }
        if is_wary {
            self.slots.rebuild_lists(thread, now, local);
        }
    }

    /// Makes descriptors level-triggered whose period has ended.
    pub(super) fn restore_level_triggered(&mut self, now: Instant, local: &mut ReactorLocal) {
        let is_reconciled =
            |slot: &mut super::PollerSlot| slot.spurious_filter.end_edge_period(now);
        if self.slots.iter_mut().filter_map(|slot| is_reconciled(slot).then_some(())).count() > 0 {
            self.slots.rebuild_lists(self.state.record.id, now, local);
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random, Span};

    use super::{EDGE_MAX, EDGE_MIN, SPURIOUS_ROW, SPURIOUS_SLEEP_MAX, SpuriousWakeFilter};

    const SOON: Span = Span::from_us(2);

    /// Ends `count` sleeps at once and without work. Returns how often an event was to be recorded.
    fn count_reports_when_always_readable(
        trust: &mut SpuriousWakeFilter,
        found: u64,
        count: u32,
    ) -> usize {
        let now = Instant { ns: 1_000 };
        (0..count).filter(|_| trust.handle_wakeup(found, SOON, now)).count()
    }

    #[test]
    fn permanently_readable_source_is_reported_once_and_trusted_ever_less() {
        let mut trust = SpuriousWakeFilter::default();
        assert_eq!(count_reports_when_always_readable(&mut trust, 0, SPURIOUS_ROW - 1), 0);
        assert!(!trust.is_edge_triggered());
        let mut now = Instant { ns: 5_000 };
        let mut reported_values = usize::from(trust.handle_wakeup(0, SOON, now));
        assert!(reported_values == 0 && trust.is_edge_triggered(), "it may be that of many");
        let mut spans = Vec::new();
        for _ in 0..12 {
            // It was readable when it became edge-triggered, and has not changed.
            assert!(!trust.handle_wakeup(0, SOON, now));
            spans.push(trust.level_triggered_at().since(now));
            assert!(!trust.end_edge_period(Instant { ns: trust.level_triggered_at().ns - 1 }));
            now = trust.level_triggered_at();
            assert!(trust.end_edge_period(now) && !trust.is_edge_triggered());
            reported_values += usize::from(trust.handle_wakeup(0, SOON, now));
            assert_eq!(reported_values, 1);
        }
        assert_eq!((spans[0], spans[1]), (EDGE_MIN, Span { ns: 2 * EDGE_MIN.ns }));
        assert_eq!(spans[11], EDGE_MAX);
        assert_eq!(trust.spurious_count(), u64::from(SPURIOUS_ROW) + 12);
    }

    #[test]
    fn changing_source_is_never_reported_and_soon_trusted() {
        let mut trust = SpuriousWakeFilter::default();
        for _ in 0..20 {
            let now = Instant { ns: 5_000 };
            assert_eq!(count_reports_when_always_readable(&mut trust, 0, SPURIOUS_ROW), 0);
            assert_eq!(trust.level_triggered_at().since(Instant { ns: 1_000 }), EDGE_MIN);
            assert_eq!(count_reports_when_always_readable(&mut trust, 0, 2), 0);
            assert!(trust.end_edge_period(now.after(EDGE_MIN)));
        }
    }

    #[test]
    fn source_whose_poller_finds_work_is_trusted_again() {
        let mut trust = SpuriousWakeFilter::default();
        let later = Instant { ns: 1_000 }.after(EDGE_MIN);
        for found in 0..3 {
            assert_eq!(count_reports_when_always_readable(&mut trust, found, SPURIOUS_ROW), 0);
            assert!(trust.is_edge_triggered());
            assert_eq!(trust.level_triggered_at(), later);
            assert!(trust.end_edge_period(later));
            assert_eq!(count_reports_when_always_readable(&mut trust, found, 1), 1);
            assert!(!trust.handle_wakeup(found + 1, SOON, later), "while it was not believed");
            assert!(!trust.is_edge_triggered());
        }
    }

    #[test]
    fn occasional_or_productive_wakeups_are_always_trusted() {
        let mut random = Random::new(4);
        let (mut trust, mut found) = (SpuriousWakeFilter::default(), 0);
        for _ in 0..1_000 {
            for _ in 0..random.below(SPURIOUS_ROW.into()) {
                assert!(!trust.handle_wakeup(found, SOON, Instant::default()));
            }
            let brings = random.chance(1, 2);
            found += u64::from(brings);
            let slept = if brings { SOON } else { Span { ns: SPURIOUS_SLEEP_MAX.ns + 1 } };
            assert!(!trust.handle_wakeup(found, slept, Instant::default()));
        }
        assert_eq!((trust.is_edge_triggered(), trust.spurious_count()), (false, 0));
    }
}
