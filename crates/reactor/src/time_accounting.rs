//! Time accounting within an iteration.
//!
//! Reading the clock costs as much as many a poll, so it is read only after polls that found work,
//! and only where several threads share the reactor: the time is charged to their thread. Between
//! other polls the kernel's coarse clock is read, which costs a quarter: a poller that exceeds the
//! time limit has seen ticks pass. If an iteration is too long and neither explains it, every
//! poller is timed for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;

use crate::registry::ReactorCounters;

/// Time source within an iteration.
#[derive(Clone, Debug)]
pub enum TimeSource {
    /// The clock with which iterations are called.
    Clock(Clock),
    /// Simulated time in nanoseconds, advanced by a test.
    Simulated(Arc<AtomicU64>),
}

impl TimeSource {
    /// Last tick of the kernel's coarse clock.
    #[inline]
    fn coarse_tick(&self) -> Span {
        match self {
            Self::Clock(_) => tenmil_linux::clock::coarse_now(),
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

/// Time accounting of consecutive iterations.
#[derive(Debug)]
pub(crate) struct TimeAccounting {
    record: Arc<ReactorCounters>,
    stopwatch: TimeSource,
    /// Last reading of the clock.
    mark: Instant,
    /// Polls started since.
    begun: u32,
    /// Whether the time of several threads must be distinguished.
    pub(crate) has_several_accounts: bool,
    /// End of the period in which everything is timed.
    closely_until: Instant,
    /// Earliest start of the next such period.
    closely_again: Instant,
    times_everything: bool,
    longest: Span,
    /// Number of what took the most time; 0 if unknown.
    cause: u64,
    /// Last tick seen.
    tick: Span,
    /// Most ticks that passed within one poll of this iteration, and its number.
    ticked: Span,
    ticker: u64,
}

/// Duration of the timing of every poller after an unexplained slow iteration.
const CLOSE_TIMING: Span = Span::from_secs(1);
/// Minimum interval of such periods: where the kernel preempts often, slow iterations are frequent
/// and no poller causes them.
const CLOSE_TIMING_INTERVAL: Span = Span::from_secs(10);

impl TimeAccounting {
    pub(crate) fn new(record: Arc<ReactorCounters>, stopwatch: TimeSource, now: Instant) -> Self {
        Self {
            record,
            stopwatch,
            mark: now,
            begun: 0,
            has_several_accounts: false,
            closely_until: now,
            closely_again: now,
            times_everything: false,
            longest: Span::default(),
            cause: 0,
            tick: Span::default(),
            ticked: Span::default(),
            ticker: 0,
        }
    }

    /// Current time.
    pub(crate) fn now(&self) -> Instant {
        self.stopwatch.now()
    }

    /// Starts an iteration.
    #[inline]
    pub(crate) fn start_iteration(&mut self, now: Instant) {
        (self.mark, self.begun) = (now, 0);
        (self.longest, self.cause) = (Span::default(), 0);
        (self.ticked, self.ticker) = (Span::default(), 0);
    }

    /// Starts the mailbox or poller with this number.
    #[inline]
    pub(crate) fn begin_account(&mut self, number: u64) {
        if self.has_several_accounts && self.begun > 0 {
            self.account_passed_tick();
        }
        self.record.running.set(number);
        self.begun += 1;
    }

    /// Nothing runs until the next start; the time until then is charged to nothing.
    #[inline]
    pub(crate) fn begin_uncharged(&mut self) {
        if self.has_several_accounts && self.begun > 1 {
            self.account_passed_tick();
        }
    }

    /// Ends a poll. Returns its duration, if it found work and was measured.
    #[inline]
    pub(crate) fn finish_account(&mut self, found: bool) -> u64 {
        if self.times_everything || (found && self.has_several_accounts) {
            self.begin_uncharged();
            let took = self.charge_elapsed(self.stopwatch.now()).ns;
            if found { took } else { 0 }
        } else {
            0
        }
    }

    /// Checks whether a tick has passed during the last poll.
    #[inline]
    fn account_passed_tick(&mut self) {
        let tick = self.stopwatch.coarse_tick();
        if tick != self.tick {
            self.account_ticks(tick, self.stopwatch.now());
        }
    }

    /// Accounts ticks since the last one seen, which may be long ago: limited by the time since the
    /// clock was last read.
    #[cold]
    fn account_ticks(&mut self, tick: Span, now: Instant) {
        let passed = Span { ns: tick.ns.saturating_sub(self.tick.ns) };
        let passed = passed.min(now.since(self.mark));
        self.tick = tick;
        if passed > self.ticked {
            (self.ticked, self.ticker) = (passed, self.last_started_account());
        }
    }

    /// Charges the time since the last call, and returns it.
    #[inline]
    pub(crate) fn charge_elapsed(&mut self, now: Instant) -> Span {
        let took = now.since(self.mark);
        if took > self.longest {
            self.longest = took;
            // Time shared by several polls cannot be attributed.
            self.cause = if self.begun == 1 { self.last_started_account() } else { 0 };
        }
        (self.mark, self.begun) = (now, 0);
        took
    }

    /// Number of what started last.
    pub(crate) fn last_started_account(&self) -> u64 {
        self.record.running.get()
    }

    /// Number of what took the most time in the last iteration, which lasted `took`. If that is
    /// unknown, everything is timed for a while, so that the next occurrence can be attributed.
    pub(crate) fn longest_account_of_iteration(&mut self, took: Span, now: Instant) -> u64 {
        // A poll that has seen ticks for more than half of the iteration is the likely cause.
        if self.cause == 0 && self.ticked.ns > took.ns / 2 {
            return self.ticker;
        }
        if self.cause == 0 && now >= self.closely_again {
            self.times_everything = true;
            self.closely_until = now.after(CLOSE_TIMING);
            self.closely_again = now.after(CLOSE_TIMING_INTERVAL);
        }
        self.cause
    }

    /// Ends the timing of every poller after its period.
    pub(crate) fn end_timing_of_every_poller(&mut self, now: Instant) {
        if now >= self.closely_until {
            self.times_everything = false;
        }
    }
}
