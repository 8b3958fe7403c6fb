//! Adaptive spinning: how long an idle polling thread spins before it sleeps.
//!
//! This is the ski rental problem: spinning costs per nanosecond, a sleep costs once. A thread that
//! spins for as long as a sleep costs, and then sleeps, never pays more than twice the optimum. The
//! recent gaps between work allow better: if work comes within [`SPIN_MAX`], spinning for twice the
//! longest recent gap meets it awake; if it comes later, spinning is useless, and [`SPIN_MIN`] is
//! the cost of a sleep.
//!
//! Twice the optimum is too much for a thread that serves a thousand mostly idle clients: each
//! wakes it, and it spins without gain. Therefore an account records the value of recent spins: the gain
//! from work that came within one, minus the cost of those without work. While the account is
//! negative the thread does not spin.
//!
//! Spinning helps only if the work is done elsewhere. Work of the local kernel runs on the same
//! CPUs, from which spinning takes time; then there is no spinning.

use std::fmt;

use tenmil_base::{Instant, Span};

/// Behavior of an idle reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Polls continuously.
    Always,
    /// Spins for an adaptive time, then sleeps until woken.
    #[default]
    Adaptive,
    /// As adaptive; while I/O is in flight, first pauses for three quarters of its usual completion
    /// time.
    Hybrid,
}

/// Shortest spin: about the cost of a sleep, from the announcement to running again.
pub const SPIN_MIN: Span = Span::from_us(50);
/// Longest spin.
pub const SPIN_MAX: Span = Span::from_ms(1);
/// Work that follows other work within this time belongs to it: no sleep fits in between.
const SAME_WORK: Span = Span::from_us(2);
/// Value of meeting work awake: the cost of a sleep and the added latency.
const WORK_VALUE: i64 = 8 * SPIN_MIN.ns.cast_signed();
/// Bounds of the account: ten met pieces of work repay any debt. It starts at the upper bound.
const ACCOUNT_MAX: i64 = 10 * WORK_VALUE;
/// A pause shorter than this is spent spinning: the kernel's wake-up is not more precise.
pub const PAUSE_MIN: Span = Span::from_us(20);
/// Maximum pause, since descriptors do not end it.
pub const PAUSE_MAX: Span = Span::from_ms(1);

/// Spin time of one polling thread, such as a reactor. Updated at every iteration that found work,
/// and queried after every idle one.
///
/// ```
/// use tenmil_base::{Instant, Span};
/// use tenmil_reactor::{AdaptiveSpin, PollMode, SPIN_MIN};
///
/// let now = Instant { ns: 1_000_000 };
/// let mut spin = AdaptiveSpin::new(PollMode::Adaptive, now);
/// spin.record_work(now);
/// assert!(!spin.is_spin_over(now));
/// assert!(spin.is_spin_over(now.after(SPIN_MIN)));
/// ```
#[derive(Debug)]
pub struct AdaptiveSpin {
    mode: PollMode,
    last_work: Instant,
    /// Longest recent gap that did not exceed [`SPIN_MAX`].
    gap: Span,
    /// Value of recent spinning, in nanoseconds; negative is a debt.
    account_ns: i64,
    /// Longest spin after work: [`SPIN_MAX`], or zero if spinning does not help.
    longest: Span,
    /// Time at which the thread considers a pause or a sleep.
    expires_at: Instant,
    /// Whether it has paused since the last work.
    has_paused: bool,
}

impl AdaptiveSpin {
    /// Starts a spin now, without any history.
    pub fn new(mode: PollMode, now: Instant) -> Self {
        let mut spell = Self {
            mode,
            last_work: now,
            gap: Span::default(),
            account_ns: ACCOUNT_MAX,
            longest: SPIN_MAX,
            expires_at: now,
            has_paused: true,
        };
        spell.set_mode(mode, now);
        spell
    }

    /// Changes the poll mode and starts a new spin.
    pub fn set_mode(&mut self, mode: PollMode, now: Instant) {
        self.mode = mode;
        self.restart_spin(now);
    }

    /// Sets whether spinning can find work. If not, spins after work have zero length in adaptive
    /// mode, from the next on.
    pub fn set_spin_useful(&mut self, is_useful: bool) {
        self.longest = if is_useful { SPIN_MAX } else { Span::default() };
    }

    /// Records that work was found, and starts a spin whose length follows from recent gaps.
    #[inline]
    pub fn record_work(&mut self, now: Instant) {
        let gap = now.since(self.last_work);
        self.last_work = now;
        self.update_gap_statistics(gap);
        // The longest gap decays slowly, and is halved by each gap beyond SPIN_MAX.
        self.gap.ns = if gap > SPIN_MAX {
            self.gap.ns / 2
        } else {
            gap.ns.max(self.gap.ns - self.gap.ns / 64)
        };
        self.has_paused = false;
        self.expires_at = match self.mode {
            PollMode::Always => Instant::NEVER,
            PollMode::Adaptive => now.after(self.spin_length()),
            PollMode::Hybrid => now,
        };
    }

    /// Whether the spin time is over; queried after an idle iteration.
    #[inline]
    pub fn is_spin_over(&self, now: Instant) -> bool {
        now >= self.expires_at
    }

    /// Starts another spin at `now`, without work, because the thread was not permitted to sleep.
    /// It lasts at least [`SPIN_MIN`].
    pub fn restart_spin(&mut self, now: Instant) {
        self.expires_at = match self.mode {
            PollMode::Always => Instant::NEVER,
            PollMode::Adaptive | PollMode::Hybrid => now.after(self.spin_length().max(SPIN_MIN)),
        };
    }

    /// Pause due now in hybrid mode, if I/O in flight takes `latency`. At most one per piece of
    /// work; after it another spin starts.
    pub fn take_hybrid_pause(&mut self, now: Instant, latency: Option<Span>) -> Option<Span> {
        self.has_paused = true;
        let until = self.last_work.after(Span { ns: latency?.ns / 4 * 3 });
        let rest = until.since(now).min(PAUSE_MAX);
        (rest >= PAUSE_MIN).then_some(rest)
    }

    /// Whether a pause is to be considered before a sleep.
    pub fn is_hybrid_pause_due(&self) -> bool {
        self.mode == PollMode::Hybrid && !self.has_paused
    }

    /// Updates the account for work after this gap: whether a spin would have met it.
    #[inline]
    fn update_gap_statistics(&mut self, gap: Span) {
        if gap <= SAME_WORK {
            return;
        }
        let spell = self.expected_useful_length();
        let worth = if gap <= spell { WORK_VALUE } else { -spell.ns.cast_signed() };
        self.account_ns = (self.account_ns + worth).clamp(-ACCOUNT_MAX, ACCOUNT_MAX);
    }

    /// Length of a spin that is expected to pay off.
    #[inline]
    fn expected_useful_length(&self) -> Span {
        Span { ns: (2 * self.gap.ns).clamp(SPIN_MIN.ns, SPIN_MAX.ns) }
    }

    #[inline]
    fn spin_length(&self) -> Span {
        if self.account_ns < 0 {
            Span::default()
        } else {
            self.expected_useful_length().min(self.longest)
        }
    }
}

impl PollMode {
    /// All modes, in numerical order.
    pub const ALL: [Self; 3] = [Self::Always, Self::Adaptive, Self::Hybrid];

    /// Name of the mode, as given to `--poll`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Adaptive => "adaptive",
            Self::Hybrid => "hybrid",
        }
    }

    /// Parses the name of a mode.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

impl fmt::Display for PollMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random, Span};

    use super::{AdaptiveSpin, PAUSE_MAX, PollMode, SPIN_MAX, SPIN_MIN};

    /// Spin time after work with these gaps.
    fn spin_length_after_gaps(gaps: impl IntoIterator<Item = Span>) -> Span {
        let mut now = Instant { ns: 1_000 };
        let mut spell = AdaptiveSpin::new(PollMode::Adaptive, now);
        for gap in gaps {
            now = now.after(gap);
            spell.record_work(now);
        }
        spell.expires_at.since(now)
    }

    #[test]
    fn spin_length_is_bounded_after_any_history() {
        for seed in 0..1_000 {
            let mut random = Random::new(seed);
            let gaps = (0..50).map(|_| Span { ns: 1 << random.below(40) });
            let length = spin_length_after_gaps(gaps.collect::<Vec<_>>());
            let is_none = length == Span::default();
            assert!(is_none || SPIN_MIN <= length && length <= SPIN_MAX, "seed {seed}: {length}");
        }
    }

    #[test]
    fn steady_work_is_found_while_spinning_even_over_several_iterations() {
        let one = [Span::from_us(80), Span { ns: 100 }, Span { ns: 100 }, Span { ns: 100 }];
        let length = spin_length_after_gaps(one.repeat(100));
        assert!(length > Span::from_us(120) && length <= Span::from_us(160), "{length}");
    }

    #[test]
    fn rare_work_leads_to_the_shortest_spin() {
        let steady = [Span::from_us(400)].repeat(10);
        assert_eq!(spin_length_after_gaps(steady.iter().copied()), Span::from_us(800));
        let rare = [Span::from_ms(100)].repeat(5);
        assert_eq!(spin_length_after_gaps(steady.into_iter().chain(rare)), SPIN_MIN);
    }

    #[test]
    fn repeated_spurious_wakeups_do_not_lengthen_the_spin() {
        let mut random = Random::new(5);
        // A thousand hosts that are each active every other second.
        let gaps: Vec<_> = (0..2_000).map(|_| Span::from_us(1 + random.below(4_000))).collect();
        let looked: u64 =
            (100..2_000).map(|count| spin_length_after_gaps(gaps[..count].to_vec()).ns).sum();
        assert!(looked / 1_900 < SPIN_MIN.ns / 10, "{looked} ns");
        // Then one of them is active every 400 us.
        let steady = [Span::from_us(400)].repeat(12);
        assert_eq!(spin_length_after_gaps(gaps.into_iter().chain(steady)), Span::from_us(800));
    }

    #[test]
    fn one_gap_in_steady_work_does_not_end_spinning() {
        let gaps = [[Span::from_us(80)].repeat(20), vec![Span::from_ms(3)]].concat().repeat(50);
        assert!(spin_length_after_gaps(gaps) > SPIN_MIN);
    }

    #[test]
    fn refused_sleep_is_retried_one_spin_later() {
        let now = Instant { ns: 1_000_000 };
        let mut spell = AdaptiveSpin::new(PollMode::Adaptive, Instant::default());
        assert!(spell.is_spin_over(now));
        spell.restart_spin(now);
        assert!(!spell.is_spin_over(now));
        assert!(spell.is_spin_over(now.after(SPIN_MIN)));
    }

    #[test]
    fn useless_spinning_is_skipped_until_it_becomes_useful() {
        let mut now = Instant { ns: 1_000_000 };
        let mut spell = AdaptiveSpin::new(PollMode::Adaptive, now);
        spell.set_spin_useful(false);
        for gap in [5, 80, 800, 20_000].map(Span::from_us) {
            now = now.after(gap);
            spell.record_work(now);
            assert!(spell.is_spin_over(now), "after {gap}");
        }
        spell.restart_spin(now);
        assert!(!spell.is_spin_over(now), "a sleep that was refused is not tried again at once");
        assert!(spell.is_spin_over(now.after(SPIN_MIN)));
        spell.set_spin_useful(true);
        spell.record_work(now);
        assert!(!spell.is_spin_over(now));
        spell.set_spin_useful(false);
        spell.set_mode(PollMode::Always, now);
        spell.record_work(now);
        assert!(
            !spell.is_spin_over(Instant { ns: u64::MAX - 1 }),
            "who always polls looks all the same"
        );
    }

    #[test]
    fn always_polling_reactor_never_sleeps() {
        let mut spell = AdaptiveSpin::new(PollMode::Always, Instant::default());
        let end = Instant { ns: u64::MAX - 1 };
        assert!(!spell.is_spin_over(end));
        spell.record_work(Instant { ns: 5 });
        assert!(!spell.is_spin_over(end));
        spell.set_mode(PollMode::Adaptive, Instant { ns: 10 });
        assert!(spell.is_spin_over(end));
        spell.set_mode(PollMode::Always, end);
        assert!(!spell.is_spin_over(end));
    }

    #[test]
    fn hybrid_sleep_is_three_quarters_of_the_latency_once() {
        let now = Instant { ns: 1_000_000 };
        let mut spell = AdaptiveSpin::new(PollMode::Hybrid, Instant::default());
        spell.record_work(now);
        assert!(spell.is_spin_over(now) && spell.is_hybrid_pause_due());
        let rest = spell.take_hybrid_pause(now.after(Span::from_us(10)), Some(Span::from_us(80)));
        assert_eq!(rest, Some(Span::from_us(50)));
        assert!(!spell.is_hybrid_pause_due());
        spell.record_work(now);
        assert!(spell.is_hybrid_pause_due());
        assert_eq!(
            spell.take_hybrid_pause(now, Some(Span::from_us(8))),
            None,
            "too short to be worth it"
        );
        assert_eq!(spell.take_hybrid_pause(now, Some(Span::from_secs(8))), Some(PAUSE_MAX));
        assert_eq!(spell.take_hybrid_pause(now, None), None);
    }

    #[test]
    fn poll_mode_names_parse_back() {
        for mode in PollMode::ALL {
            assert_eq!(PollMode::parse(mode.name()), Some(mode));
        }
        assert_eq!(PollMode::parse("sometimes"), None);
    }
}
