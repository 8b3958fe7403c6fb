//! How long a thread that turns looks for work before it sleeps.
//!
//! It is the problem of renting or buying skis: looking costs by the nanosecond, a sleep costs once.
//! Who looks for as long as a sleep costs, and then sleeps, never pays more than twice the least
//! possible. The gaps between the last pieces of work say more: if work comes sooner than
//! [`SPELL_MAX`], looking for twice the longest recent gap meets it awake; if it comes later,
//! looking is in vain, and [`SPELL_MIN`] is what a sleep costs.
//!
//! Twice the least possible is too much for who serves a thousand that hardly ever want something:
//! each wakes it, and it looks in vain. So it keeps an account of what such spells would have been
//! worth: what work is worth that comes within one, less the spells that nothing came in. While there
//! is a debt it does not look at all.
//!
//! All of this is for work that others do while the thread looks. What the kernel of this machine
//! does, it does on the same processors, and looking takes them away from it: then there is no spell.

use std::fmt;

use base::{Instant, Span};

/// What a reactor does when there is nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// It looks for work, for ever.
    Always,
    /// It looks for a spell, and then sleeps until something wakes it.
    #[default]
    Adaptive,
    /// As adaptive, and while something is in flight it rests for three quarters of the time that
    /// usually takes before it looks.
    Hybrid,
}

/// The shortest spell: about what a sleep costs, from announcing it to running again.
pub const SPELL_MIN: Span = Span::from_us(50);
/// The longest spell.
pub const SPELL_MAX: Span = Span::from_ms(1);
/// Work that comes sooner after other work belongs to it: nobody could have slept meanwhile.
const AT_ONCE: Span = Span::from_us(2);
/// What it is worth to meet a piece of work awake: the sleep, and that it is not kept waiting.
const WORTH: i64 = 8 * SPELL_MIN.ns.cast_signed();
/// The account goes no further than this to either side, so that ten pieces of work that would have
/// been met make up for any debt. It begins there: nothing is known against looking.
const ACCOUNT_MAX: i64 = 10 * WORTH;
/// A rest shorter than this is spent looking: the kernel does not wake more precisely.
pub const REST_MIN: Span = Span::from_us(20);
/// A rest is never longer than this, since nothing ends it early.
pub const REST_MAX: Span = Span::from_ms(1);

/// How long one thread that turns, such as a reactor, goes on looking when it finds nothing. It is
/// told of every turn that found work, and asked after every turn that did not.
///
/// ```
/// use base::{Instant, Span};
/// use tenmil_reactor::{PollMode, SPELL_MIN, Spell};
///
/// let now = Instant { ns: 1_000_000 };
/// let mut spell = Spell::new(PollMode::Adaptive, now);
/// spell.work(now);
/// assert!(!spell.is_over(now));
/// assert!(spell.is_over(now.after(SPELL_MIN)));
/// ```
#[derive(Debug)]
pub struct Spell {
    mode: PollMode,
    last_work: Instant,
    /// The longest recent gap that was not longer than [`SPELL_MAX`].
    gap: Span,
    /// What looking would have been worth lately, in nanoseconds; a debt is below zero.
    account_ns: i64,
    /// The longest spell after work: [`SPELL_MAX`], or none if looking is in vain.
    longest: Span,
    /// When the turn should think about resting or sleeping.
    over_at: Instant,
    /// Whether it has rested since the last work.
    rested: bool,
}

impl Spell {
    /// A spell that begins now, for one who has not seen any work.
    pub fn new(mode: PollMode, now: Instant) -> Self {
        let mut spell = Self {
            mode,
            last_work: now,
            gap: Span::default(),
            account_ns: ACCOUNT_MAX,
            longest: SPELL_MAX,
            over_at: now,
            rested: true,
        };
        spell.set_mode(mode, now);
        spell
    }

    /// Polls in another way from now on: another spell begins.
    pub fn set_mode(&mut self, mode: PollMode, now: Instant) {
        self.mode = mode;
        self.extend(now);
    }

    /// Says whether it is any use to look for work. If not, spells after work have no length in
    /// adaptive mode, from the next on.
    pub fn set_useful(&mut self, is_useful: bool) {
        self.longest = if is_useful { SPELL_MAX } else { Span::default() };
    }

    /// Work was found. The next spell begins, as long as the recent gaps suggest.
    #[inline]
    pub fn work(&mut self, now: Instant) {
        let gap = now.since(self.last_work);
        self.last_work = now;
        self.settle(gap);
        self.gap.ns = if gap > SPELL_MAX {
            self.gap.ns / 2
        } else {
            gap.ns.max(self.gap.ns - self.gap.ns / 64)
        };
        self.rested = false;
        self.over_at = match self.mode {
            PollMode::Always => Instant::NEVER,
            PollMode::Adaptive => now.after(self.length()),
            PollMode::Hybrid => now,
        };
    }

    /// Whether the spell is over, for a turn that found nothing.
    #[inline]
    pub fn is_over(&self, now: Instant) -> bool {
        now >= self.over_at
    }

    /// Begins another spell at `now`, with no work: the thread was about to sleep and may not. It is
    /// [`SPELL_MIN`] long at least.
    pub fn extend(&mut self, now: Instant) {
        self.over_at = match self.mode {
            PollMode::Always => Instant::NEVER,
            PollMode::Adaptive | PollMode::Hybrid => now.after(self.length().max(SPELL_MIN)),
        };
    }

    /// The rest that is due now in hybrid mode, if what is in flight takes `latency`. At most one
    /// for each piece of work; after it another spell begins.
    pub fn rest(&mut self, now: Instant, latency: Option<Span>) -> Option<Span> {
        self.rested = true;
        let until = self.last_work.after(Span { ns: latency?.ns / 4 * 3 });
        let rest = until.since(now).min(REST_MAX);
        (rest >= REST_MIN).then_some(rest)
    }

    /// Whether a rest should be thought of before a sleep is.
    pub fn wants_rest(&self) -> bool {
        self.mode == PollMode::Hybrid && !self.rested
    }

    /// Work has come with this gap: enters whether a spell would have met it.
    #[inline]
    fn settle(&mut self, gap: Span) {
        if gap <= AT_ONCE {
            return;
        }
        let spell = self.full();
        let worth = if gap <= spell { WORTH } else { -spell.ns.cast_signed() };
        self.account_ns = (self.account_ns + worth).clamp(-ACCOUNT_MAX, ACCOUNT_MAX);
    }

    /// How long a spell is that is worth its while.
    #[inline]
    fn full(&self) -> Span {
        Span { ns: (2 * self.gap.ns).clamp(SPELL_MIN.ns, SPELL_MAX.ns) }
    }

    #[inline]
    fn length(&self) -> Span {
        if self.account_ns < 0 { Span::default() } else { self.full().min(self.longest) }
    }
}

impl PollMode {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Always, Self::Adaptive, Self::Hybrid];

    /// Its name, as it is given to `--poll`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Adaptive => "adaptive",
            Self::Hybrid => "hybrid",
        }
    }

    /// The mode of that name.
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
    use base::{Instant, Random, Span};

    use super::{PollMode, REST_MAX, SPELL_MAX, SPELL_MIN, Spell};

    /// How long a spell lasts after work has come with these gaps.
    fn spell_after(gaps: impl IntoIterator<Item = Span>) -> Span {
        let mut now = Instant { ns: 1_000 };
        let mut spell = Spell::new(PollMode::Adaptive, now);
        for gap in gaps {
            now = now.after(gap);
            spell.work(now);
        }
        spell.over_at.since(now)
    }

    #[test]
    fn a_spell_is_bounded_whatever_came_before() {
        for seed in 0..1_000 {
            let mut random = Random::new(seed);
            let gaps = (0..50).map(|_| Span { ns: 1 << random.below(40) });
            let length = spell_after(gaps.collect::<Vec<_>>());
            let is_none = length == Span::default();
            assert!(is_none || SPELL_MIN <= length && length <= SPELL_MAX, "seed {seed}: {length}");
        }
    }

    #[test]
    fn steady_work_is_met_awake_even_if_several_turns_belong_to_each_piece() {
        let one = [Span::from_us(80), Span { ns: 100 }, Span { ns: 100 }, Span { ns: 100 }];
        let length = spell_after(one.repeat(100));
        assert!(length > Span::from_us(120) && length <= Span::from_us(160), "{length}");
    }

    #[test]
    fn rare_work_is_slept_for_after_the_shortest_spell() {
        let steady = [Span::from_us(400)].repeat(10);
        assert_eq!(spell_after(steady.iter().copied()), Span::from_us(800));
        let rare = [Span::from_ms(100)].repeat(5);
        assert_eq!(spell_after(steady.into_iter().chain(rare)), SPELL_MIN);
    }

    #[test]
    fn who_is_woken_in_vain_again_and_again_does_not_look_until_it_would_meet_work() {
        let mut random = Random::new(5);
        // A thousand hosts that each want something every other second.
        let gaps: Vec<_> = (0..2_000).map(|_| Span::from_us(1 + random.below(4_000))).collect();
        let looked: u64 = (100..2_000).map(|count| spell_after(gaps[..count].to_vec()).ns).sum();
        assert!(looked / 1_900 < SPELL_MIN.ns / 10, "{looked} ns");
        // Then one of them wants something every 400 us.
        let steady = [Span::from_us(400)].repeat(12);
        assert_eq!(spell_after(gaps.into_iter().chain(steady)), Span::from_us(800));
    }

    #[test]
    fn a_pause_among_steady_work_does_not_end_the_looking() {
        let gaps = [[Span::from_us(80)].repeat(20), vec![Span::from_ms(3)]].concat().repeat(50);
        assert!(spell_after(gaps) > SPELL_MIN);
    }

    #[test]
    fn a_sleep_that_was_refused_is_tried_again_a_spell_later() {
        let now = Instant { ns: 1_000_000 };
        let mut spell = Spell::new(PollMode::Adaptive, Instant::default());
        assert!(spell.is_over(now));
        spell.extend(now);
        assert!(!spell.is_over(now));
        assert!(spell.is_over(now.after(SPELL_MIN)));
    }

    #[test]
    fn where_looking_is_of_no_use_work_is_slept_for_at_once_until_it_is() {
        let mut now = Instant { ns: 1_000_000 };
        let mut spell = Spell::new(PollMode::Adaptive, now);
        spell.set_useful(false);
        for gap in [5, 80, 800, 20_000].map(Span::from_us) {
            now = now.after(gap);
            spell.work(now);
            assert!(spell.is_over(now), "after {gap}");
        }
        spell.extend(now);
        assert!(!spell.is_over(now), "a sleep that was refused is not tried again at once");
        assert!(spell.is_over(now.after(SPELL_MIN)));
        spell.set_useful(true);
        spell.work(now);
        assert!(!spell.is_over(now));
        spell.set_useful(false);
        spell.set_mode(PollMode::Always, now);
        spell.work(now);
        assert!(
            !spell.is_over(Instant { ns: u64::MAX - 1 }),
            "who always polls looks all the same"
        );
    }

    #[test]
    fn a_reactor_that_always_polls_never_thinks_of_sleeping() {
        let mut spell = Spell::new(PollMode::Always, Instant::default());
        let end = Instant { ns: u64::MAX - 1 };
        assert!(!spell.is_over(end));
        spell.work(Instant { ns: 5 });
        assert!(!spell.is_over(end));
        spell.set_mode(PollMode::Adaptive, Instant { ns: 10 });
        assert!(spell.is_over(end));
        spell.set_mode(PollMode::Always, end);
        assert!(!spell.is_over(end));
    }

    #[test]
    fn a_rest_is_three_quarters_of_the_latency_and_comes_once() {
        let now = Instant { ns: 1_000_000 };
        let mut spell = Spell::new(PollMode::Hybrid, Instant::default());
        spell.work(now);
        assert!(spell.is_over(now) && spell.wants_rest());
        let rest = spell.rest(now.after(Span::from_us(10)), Some(Span::from_us(80)));
        assert_eq!(rest, Some(Span::from_us(50)));
        assert!(!spell.wants_rest());
        spell.work(now);
        assert!(spell.wants_rest());
        assert_eq!(spell.rest(now, Some(Span::from_us(8))), None, "too short to be worth it");
        assert_eq!(spell.rest(now, Some(Span::from_secs(8))), Some(REST_MAX));
        assert_eq!(spell.rest(now, None), None);
    }

    #[test]
    fn names_are_read_back() {
        for mode in PollMode::ALL {
            assert_eq!(PollMode::parse(mode.name()), Some(mode));
        }
        assert_eq!(PollMode::parse("sometimes"), None);
    }
}
