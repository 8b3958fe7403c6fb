//! Pollers for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::{Instant, Interrupts, Span};
use host::EventVectors;

use crate::{Context, Found, Parting, Poller, PollerId, Registration, WokenBy};

/// Counters that a test shares with its pollers.
pub(crate) type Tally = Arc<AtomicU64>;

pub(crate) fn tally() -> Tally {
    Tally::default()
}

pub(crate) fn count(tally: &Tally) -> u64 {
    tally.load(Ordering::Relaxed)
}

/// Counts its polls and finds nothing; or work, if it is told to.
#[derive(Default)]
pub(crate) struct Counter {
    pub(crate) polls: Tally,
    pub(crate) works: bool,
}

impl Poller for Counter {
    fn poll(&mut self, _: &mut Context<'_>) -> Found {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.works { Found::Work } else { Found::Nothing }
    }
}

pub(crate) fn idle(polls: &Tally) -> Counter {
    Counter { polls: Arc::clone(polls), works: false }
}

pub(crate) fn active(name: &str, poller: impl Poller + 'static) -> Registration {
    Registration::active(name, WokenBy::Messages, poller)
}

/// The first poller of a plan.
pub(crate) const FIRST: PollerId = PollerId::planned(0);

/// A device with an interrupt that has to be asked for, and what its poller has seen of it.
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

    /// Completes something, and signals if that was asked for.
    pub(crate) fn complete(&mut self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.vectors.raise(0);
    }

    /// Completes something, and signals nobody.
    pub(crate) fn note(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn is_seen(&self) -> bool {
        count(&self.done) == count(&self.seen)
    }

    pub(crate) fn vectors(&self) -> EventVectors {
        self.vectors.clone()
    }

    pub(crate) fn registration(&self, name: &str) -> Registration {
        Registration::active(name, self.woken_by(), self.clone())
    }

    pub(crate) fn woken_by(&self) -> WokenBy {
        let descriptor = self.vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
        WokenBy::Descriptor(descriptor)
    }
}

impl Poller for Device {
    fn poll(&mut self, _: &mut Context<'_>) -> Found {
        let news = !self.is_seen();
        self.seen.store(count(&self.done), Ordering::Relaxed);
        Found::from_count(usize::from(news))
    }

    fn arm(&mut self) -> Found {
        let asked = self.vectors.unmask(0);
        Found::from_count(usize::from(!asked || !self.is_seen()))
    }

    fn disarm(&mut self) {
        self.vectors.mask(0);
        self.vectors.clear(0);
    }
}

/// Lets its thread doze while the poller in it has nothing to do by itself; or never. Counts what
/// happens to it.
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
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.poller.poll(context)
    }

    fn message(&mut self, words: [u64; 2], context: &mut Context<'_>) {
        self.poller.message(words, context);
    }

    fn arm(&mut self) -> Found {
        self.arms.fetch_add(1, Ordering::Relaxed);
        self.poller.arm()
    }

    fn disarm(&mut self) {
        self.disarms.fetch_add(1, Ordering::Relaxed);
        self.poller.disarm();
    }

    fn may_doze(&self) -> bool {
        self.dozes && self.poller.is_busy() != Some(true)
    }

    fn may_linger(&self) -> bool {
        // Now so, now otherwise.
        self.dozes && self.arms.load(Ordering::Relaxed) % 3 < 2
    }

    fn wake_at(&self) -> Instant {
        self.poller.wake_at()
    }

    fn is_busy(&self) -> Option<bool> {
        self.poller.is_busy()
    }

    fn detach(&mut self, parting: Parting) -> bool {
        self.poller.detach(parting)
    }

    fn attach(&mut self) {
        self.poller.attach();
    }
}

/// Works at moments of its own, and remembers how late it was polled.
pub(crate) struct Alarm {
    pub(crate) next: Tally,
    pub(crate) rung: Tally,
    pub(crate) gap: Span,
}

impl Poller for Alarm {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        if context.now().ns < count(&self.next) {
            return Found::Nothing;
        }
        self.rung.fetch_add(1, Ordering::Relaxed);
        self.next.store(context.now().after(self.gap).ns, Ordering::Relaxed);
        Found::Work
    }

    fn wake_at(&self) -> Instant {
        Instant { ns: count(&self.next) }
    }
}

/// Something that is tied to the OS thread where it was attached, with operations in flight that
/// have to be waited for before it can go.
pub(crate) struct Ring {
    pub(crate) in_flight: Tally,
    /// Polls after which one operation is over.
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
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        assert!(self.attached, "polled while it was detached");
        let home = *self.home.get_or_insert(context.reactor());
        assert_eq!(home, context.reactor(), "polled where it was not attached");
        self.polls += 1;
        if count(&self.in_flight) > 0 && self.polls.is_multiple_of(self.pace) {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return Found::Work;
        }
        Found::Nothing
    }

    fn is_busy(&self) -> Option<bool> {
        Some(count(&self.in_flight) > 0)
    }

    fn detach(&mut self, _: Parting) -> bool {
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
