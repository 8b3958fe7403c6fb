//! Pollers for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Interrupts, Span};
use tenmil_linux::EventVectors;

use crate::{Context, DetachReason, PollResult, Poller, PollerBuilder, PollerId, PollerWake};

/// Counters that a test shares with its pollers.
pub(crate) type Tally = Arc<AtomicU64>;

pub(crate) fn tally() -> Tally {
    Tally::default()
}

pub(crate) fn count(tally: &Tally) -> u64 {
    tally.load(Ordering::Relaxed)
}

/// Counts its polls and returns idle, or busy if requested.
#[derive(Default)]
pub(crate) struct Counter {
    pub(crate) polls: Tally,
    pub(crate) works: bool,
}

impl Poller for Counter {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.works { PollResult::Busy } else { PollResult::Idle }
    }
}

pub(crate) fn idle(polls: &Tally) -> Counter {
    Counter { polls: Arc::clone(polls), works: false }
}

pub(crate) fn active(name: &str, poller: impl Poller + 'static) -> PollerBuilder {
    PollerBuilder::active(name, PollerWake::Messages, poller)
}

/// First poller of a builder.
pub(crate) const FIRST: PollerId = PollerId::planned(0);

/// A device with an interrupt that must be armed, and what its poller has seen of it.
#[derive(Clone)]
pub(crate) struct Device {
    done: Tally,
    pub(crate) seen: Tally,
    vectors: EventVectors,
}

impl Device {
    pub(crate) fn new() -> Self {
        let vectors = EventVectors::new(1).unwrap();
        Self { done: tally(), seen: tally(), vectors }
    }

    /// Completes something, and signals if armed.
    pub(crate) fn complete(&mut self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.vectors.raise(0);
    }

    /// Completes something without a signal.
    pub(crate) fn note(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn is_seen(&self) -> bool {
        count(&self.done) == count(&self.seen)
    }

    pub(crate) fn vectors(&self) -> EventVectors {
        self.vectors.clone()
    }

    pub(crate) fn registration(&self, name: &str) -> PollerBuilder {
        PollerBuilder::active(name, self.woken_by(), self.clone())
    }

    pub(crate) fn woken_by(&self) -> PollerWake {
        let descriptor = self.vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
        PollerWake::Descriptor(descriptor)
    }
}

impl Poller for Device {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let new_events = !self.is_seen();
        self.seen.store(count(&self.done), Ordering::Relaxed);
        PollResult::from_count(usize::from(new_events))
    }

    fn arm(&mut self) -> PollResult {
        let asked = self.vectors.unmask(0);
        PollResult::from_count(usize::from(!asked || !self.is_seen()))
    }

    fn disarm(&mut self) {
        self.vectors.mask(0);
        self.vectors.clear(0);
    }
}

/// Permits parking while the inner poller is not busy by itself, or never. Counts its calls.
pub(crate) struct Dozing<P> {
    pub(crate) poller: P,
    pub(crate) dozes: bool,
    pub(crate) polls: Tally,
    pub(crate) arms: Tally,
    pub(crate) disarms: Tally,
}

impl<P> Dozing<P> {
    pub(crate) fn new(poller: P, dozes: bool) -> Self {
        Self { poller, dozes, polls: tally(), arms: tally(), disarms: tally() }
    }

    /// Polls, arms and disarms.
    pub(crate) fn tallies(&self) -> [Tally; 3] {
        [&self.polls, &self.arms, &self.disarms].map(Arc::clone)
    }
}

impl<P: Poller> Poller for Dozing<P> {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.poller.poll(context)
    }

    fn message(&mut self, words: [u64; 2], context: &mut Context<'_>) {
        self.poller.message(words, context);
    }

    fn arm(&mut self) -> PollResult {
        self.arms.fetch_add(1, Ordering::Relaxed);
        self.poller.arm()
    }

    fn disarm(&mut self) {
        self.disarms.fetch_add(1, Ordering::Relaxed);
        self.poller.disarm();
    }

    fn may_park(&self) -> bool {
        self.dozes && self.poller.is_busy() != Some(true)
    }

    fn may_coalesce_wakeups(&self) -> bool {
        // Varies over time.
        self.dozes && self.arms.load(Ordering::Relaxed) % 3 < 2
    }

    fn wake_at(&self) -> Instant {
        self.poller.wake_at()
    }

    fn is_busy(&self) -> Option<bool> {
        self.poller.is_busy()
    }

    fn detach(&mut self, parting: DetachReason) -> bool {
        self.poller.detach(parting)
    }

    fn attach(&mut self) {
        self.poller.attach();
    }
}

/// Works at times of its own, and records how late it was polled.
pub(crate) struct Alarm {
    pub(crate) next: Tally,
    pub(crate) rung: Tally,
    pub(crate) gap: Span,
}

impl Poller for Alarm {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if context.now().ns < count(&self.next) {
            return PollResult::Idle;
        }
        self.rung.fetch_add(1, Ordering::Relaxed);
        self.next.store(context.now().after(self.gap).ns, Ordering::Relaxed);
        PollResult::Busy
    }

    fn wake_at(&self) -> Instant {
        Instant { ns: count(&self.next) }
    }
}

/// Bound to the OS thread where it was attached, with operations in flight that must complete
/// before it can detach.
pub(crate) struct Ring {
    pub(crate) in_flight: Tally,
    /// Polls per completed operation.
    pub(crate) pace: u64,
    pub(crate) polls: u64,
    pub(crate) attached: bool,
    pub(crate) detaching: bool,
    pub(crate) log: Arc<Mutex<Vec<&'static str>>>,
    home: Option<crate::ReactorId>,
}

impl Ring {
    pub(crate) fn new(in_flight: &Tally, pace: u64) -> Self {
        Self {
            in_flight: Arc::clone(in_flight),
            pace,
            polls: 0,
            attached: false,
            detaching: false,
            log: Arc::default(),
            home: None,
        }
    }

    fn note(&self, what: &'static str) {
        self.log.lock().unwrap().push(what);
    }
}

impl Poller for Ring {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        assert!(self.attached, "polled while it was detached");
        let home = *self.home.get_or_insert(context.reactor());
        assert_eq!(home, context.reactor(), "polled where it was not attached");
        self.polls += 1;
        if count(&self.in_flight) > 0 && self.polls.is_multiple_of(self.pace) {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return PollResult::Busy;
        }
        PollResult::Idle
    }

    fn is_busy(&self) -> Option<bool> {
        Some(count(&self.in_flight) > 0)
    }

    fn detach(&mut self, _: DetachReason) -> bool {
        self.detaching = true;
        let drained = count(&self.in_flight) == 0;
        if drained && self.attached {
            self.attached = false;
            self.home = None;
            self.note("detached");
        }
        drained
    }

    fn attach(&mut self) {
        (self.attached, self.detaching) = (true, false);
        self.note("attached");
    }
}

pub(crate) const RELAXED: Ordering = Ordering::Relaxed;
