//! Who takes the time in a turn.
//!
//! A look at the clock costs as much as many a poll, so it is looked at after those that found work,
//! and only where several share the reactor: what they take goes to their thread's account. Between
//! the others the kernel's last tick is looked at, which costs a quarter of that: who has held a turn
//! up for longer than it may last has seen ticks pass. Should a turn be too long and none of these
//! explain it, everybody is timed for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Instant, Span};
use host::Clock;

use crate::directory::ReactorRecord;

/// What time is measured with inside a turn.
#[derive(Clone, Debug)]
pub enum Stopwatch {
    /// The clock that turns are called with.
    Clock(Clock),
    /// Simulated time: nanoseconds that a test moves on.
    Simulated(Arc<AtomicU64>),
}

impl Stopwatch {
    /// The last tick of the kernel's clock.
    #[inline]
    fn tick(&self) -> Span {
        match self {
            Self::Clock(_) => host::clock::tick(),
            Self::Simulated(ns) => Span { ns: ns.load(Ordering::Relaxed) },
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::Clock(clock) => clock.now(),
            Self::Simulated(ns) => Instant { ns: ns.load(Ordering::Relaxed) },
        }
    }
}

/// The measurement of one turn after another.
#[derive(Debug)]
pub(crate) struct Watch {
    record: Arc<ReactorRecord>,
    stopwatch: Stopwatch,
    /// When the clock was looked at last.
    mark: Instant,
    /// How many have begun since.
    begun: u32,
    /// Whether there are several whose time has to be told apart.
    pub(crate) several: bool,
    /// Until when everybody is timed.
    closely_until: Instant,
    /// Before when this does not begin again.
    closely_again: Instant,
    closely: bool,
    longest: Span,
    /// Who took the longest, by number; 0 if that is not known.
    culprit: u64,
    /// The tick that was seen last.
    tick: Span,
    /// The most ticks that one has seen pass in this turn, and who that was.
    ticked: Span,
    ticker: u64,
}

/// For how long everybody is timed after a long turn that nobody explained.
const CLOSELY: Span = Span::from_secs(1);
/// How often that may be: on a machine where the kernel often takes the processor away, turns are
/// long and nobody is to blame.
const CLOSELY_EVERY: Span = Span::from_secs(10);

impl Watch {
    pub(crate) fn new(record: Arc<ReactorRecord>, stopwatch: Stopwatch, now: Instant) -> Self {
        Self {
            record,
            stopwatch,
            mark: now,
            begun: 0,
            several: false,
            closely_until: now,
            closely_again: now,
            closely: false,
            longest: Span::default(),
            culprit: 0,
            tick: Span::default(),
            ticked: Span::default(),
            ticker: 0,
        }
    }

    /// The time.
    pub(crate) fn now(&self) -> Instant {
        self.stopwatch.now()
    }

    /// A turn begins.
    #[inline]
    pub(crate) fn turn(&mut self, now: Instant) {
        (self.mark, self.begun) = (now, 0);
        (self.longest, self.culprit) = (Span::default(), 0);
        (self.ticked, self.ticker) = (Span::default(), 0);
    }

    /// The mailbox or poller with this number begins.
    #[inline]
    pub(crate) fn begin(&mut self, number: u64) {
        if self.several && self.begun > 0 {
            self.look_at_tick();
        }
        self.record.running.set(number);
        self.begun += 1;
    }

    /// Nobody runs now, and what passes until somebody does is nobody's.
    #[inline]
    pub(crate) fn finish(&mut self) {
        if self.several && self.begun > 1 {
            self.look_at_tick();
        }
    }

    /// It is done. Returns how long it took, if it found work and that was measured.
    #[inline]
    pub(crate) fn end(&mut self, found: bool) -> u64 {
        if self.closely || (found && self.several) {
            self.finish();
            let took = self.look(self.stopwatch.now()).ns;
            if found { took } else { 0 }
        } else {
            0
        }
    }

    /// Looks whether a tick has passed while the last one ran.
    #[inline]
    fn look_at_tick(&mut self) {
        let tick = self.stopwatch.tick();
        if tick != self.tick {
            self.ticks(tick, self.stopwatch.now());
        }
    }

    /// Ticks have passed since one was seen, which may be long ago: no more of them count than there
    /// is time since the clock was looked at.
    #[cold]
    fn ticks(&mut self, tick: Span, now: Instant) {
        let passed = Span { ns: tick.ns.saturating_sub(self.tick.ns) };
        let passed = passed.min(now.since(self.mark));
        self.tick = tick;
        if passed > self.ticked {
            (self.ticked, self.ticker) = (passed, self.running());
        }
    }

    /// Books the time since the last look, and says how long that was.
    #[inline]
    pub(crate) fn look(&mut self, now: Instant) -> Span {
        let took = now.since(self.mark);
        if took > self.longest {
            self.longest = took;
            self.culprit = if self.begun == 1 { self.running() } else { 0 };
        }
        (self.mark, self.begun) = (now, 0);
        took
    }

    /// The number of whoever began last.
    pub(crate) fn running(&self) -> u64 {
        self.record.running.get()
    }

    /// Who took the longest in the turn that was looked at last, of which `took` is the length, by
    /// number. If that is not known, they are all timed for a while, so that it may be the next time.
    pub(crate) fn culprit(&mut self, took: Span, now: Instant) -> u64 {
        if self.culprit == 0 && self.ticked.ns > took.ns / 2 {
            return self.ticker;
        }
        if self.culprit == 0 && now >= self.closely_again {
            self.closely = true;
            self.closely_until = now.after(CLOSELY);
            self.closely_again = now.after(CLOSELY_EVERY);
        }
        self.culprit
    }

    /// Looks whether everybody has been timed for long enough.
    pub(crate) fn relax(&mut self, now: Instant) {
        if now >= self.closely_until {
            self.closely = false;
        }
    }
}
