//! Pollers for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Interrupts, Span};
use tenmil_linux::EventFdVectors;

use crate::{Context, DetachReason, PollResult, Poller, PollerBuilder, PollerId, PollerWake};

/// Counters that a test shares with its pollers.
pub(crate) type SharedCount = Arc<AtomicU64>;

pub(crate) fn new_count() -> SharedCount {
    SharedCount::default()
}

pub(crate) fn count_of(tally: &SharedCount) -> u64 {
    tally.load(Ordering::Relaxed)
}

/// Counts its polls and returns idle, or busy if requested.
#[derive(Default)]
pub(crate) struct CountingPoller {
    pub(crate) polls: SharedCount,
    pub(crate) works: bool,
}

impl Poller for CountingPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.works { PollResult::Busy } else { PollResult::Idle }
    }
}

pub(crate) fn idle_poller(polls: &SharedCount) -> CountingPoller {
    CountingPoller { polls: Arc::clone(polls), works: false }
}

pub(crate) fn message_woken_poller(name: &str, poller: impl Poller + 'static) -> PollerBuilder {
    PollerBuilder::polled_each_iteration(name, PollerWake::Messages, poller)
}

/// First poller of a builder.
pub(crate) const FIRST: PollerId = PollerId::of_builder_index(0);

/// A device with an interrupt that must be armed, and what its poller has seen of it.
#[derive(Clone)]
pub(crate) struct InterruptingDevice {
    done: SharedCount,
    pub(crate) seen: SharedCount,
    vectors: EventFdVectors,
    /// Whether its work takes so long that spinning does not help.
    pub(crate) is_slow: bool,
}

impl InterruptingDevice {
    pub(crate) fn new() -> Self {
        let vectors = EventFdVectors::new(1).unwrap();
        Self { done: new_count(), seen: new_count(), vectors, is_slow: false }
    }

    /// Completes something, and signals if armed.
    pub(crate) fn complete_and_signal(&mut self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.vectors.raise(0);
    }

    /// Completes something without a signal.
    pub(crate) fn complete_without_signal(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn is_completion_handled(&self) -> bool {
        count_of(&self.done) == count_of(&self.seen)
    }

    pub(crate) fn event_vectors(&self) -> EventFdVectors {
        self.vectors.clone()
    }

    pub(crate) fn poller_builder(&self, name: &str) -> PollerBuilder {
        PollerBuilder::polled_each_iteration(name, self.poller_wake(), self.clone())
    }

    pub(crate) fn poller_wake(&self) -> PollerWake {
        let descriptor = self.vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
        PollerWake::Descriptor(descriptor)
    }
}

impl Poller for InterruptingDevice {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let new_events = !self.is_completion_handled();
        self.seen.store(count_of(&self.done), Ordering::Relaxed);
        PollResult::from_count(usize::from(new_events))
    }

    fn arm(&mut self) -> PollResult {
        let asked = self.vectors.unmask(0);
        PollResult::from_count(usize::from(!asked || !self.is_completion_handled()))
    }

    fn disarm(&mut self) {
        self.vectors.mask(0);
        self.vectors.clear_signals(0);
    }

    fn can_spin_help(&self) -> bool {
        !self.is_slow
    }
}

/// Permits parking while the inner poller is not busy by itself, or never. Counts its calls.
pub(crate) struct ParkingPoller<P> {
    pub(crate) poller: P,
    pub(crate) dozes: bool,
    pub(crate) polls: SharedCount,
    pub(crate) arms: SharedCount,
    pub(crate) disarms: SharedCount,
}

impl<P> ParkingPoller<P> {
    pub(crate) fn new(poller: P, dozes: bool) -> Self {
        Self { poller, dozes, polls: new_count(), arms: new_count(), disarms: new_count() }
    }

    /// Polls, arms and disarms.
    pub(crate) fn poll_arm_disarm_counters(&self) -> [SharedCount; 3] {
        [&self.polls, &self.arms, &self.disarms].map(Arc::clone)
    }
}

impl<P: Poller> Poller for ParkingPoller<P> {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.poller.poll(context)
    }

    fn handle_message(&mut self, words: [u64; 2], context: &mut Context<'_>) {
        self.poller.handle_message(words, context);
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

    fn try_detach(&mut self, parting: DetachReason) -> bool {
        self.poller.try_detach(parting)
    }

    fn attach(&mut self) {
        self.poller.attach();
    }
}

/// Works at times of its own, and records how late it was polled.
pub(crate) struct DeadlinePoller {
    pub(crate) next: SharedCount,
    pub(crate) rung: SharedCount,
    pub(crate) gap: Span,
}

impl Poller for DeadlinePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if context.now().ns < count_of(&self.next) {
            return PollResult::Idle;
        }
        self.rung.fetch_add(1, Ordering::Relaxed);
        self.next.store(context.now().after(self.gap).ns, Ordering::Relaxed);
        PollResult::Busy
    }

    fn wake_at(&self) -> Instant {
        Instant { ns: count_of(&self.next) }
    }
}

/// Bound to the OS thread where it was attached, with operations in flight that must complete
/// before it can detach.
pub(crate) struct PinnedRingPoller {
    pub(crate) in_flight: SharedCount,
    /// Polls per completed operation.
    pub(crate) pace: u64,
    pub(crate) polls: u64,
    pub(crate) attached: bool,
    pub(crate) detaching: bool,
    pub(crate) log: Arc<Mutex<Vec<&'static str>>>,
    home: Option<crate::ReactorId>,
}

impl PinnedRingPoller {
    pub(crate) fn new(in_flight: &SharedCount, pace: u64) -> Self {
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

    fn log_call(&self, what: &'static str) {
        self.log.lock().unwrap().push(what);
    }
}

impl Poller for PinnedRingPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        assert!(self.attached, "polled while it was detached");
        let home = *self.home.get_or_insert(context.reactor_id());
        assert_eq!(home, context.reactor_id(), "polled where it was not attached");
        self.polls += 1;
        if count_of(&self.in_flight) > 0 && self.polls.is_multiple_of(self.pace) {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return PollResult::Busy;
        }
        PollResult::Idle
    }

    fn is_busy(&self) -> Option<bool> {
        Some(count_of(&self.in_flight) > 0)
    }

    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.detaching = true;
        let drained = count_of(&self.in_flight) == 0;
        if drained && self.attached {
            self.attached = false;
            self.home = None;
            self.log_call("detached");
        }
        drained
    }

    fn attach(&mut self) {
        (self.attached, self.detaching) = (true, false);
        self.log_call("attached");
    }
}

pub(crate) const RELAXED: Ordering = Ordering::Relaxed;
