//! Reactors in simulated time on one OS thread, executed step by step in a seeded random order.
//!
//! What an OS thread does around an iteration is divided into steps, so that anything can happen
//! between any two of them: after an iteration that wants to sleep, after the announcement, after
//! the final check, and during the sleep.

mod channels;
mod hybrid_pause;
mod lifetimes;
mod migration;
mod parking;
mod sleeping;
mod stress;
pub(crate) mod test_pollers;
mod timing;
mod wake_sources;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Instant, Random, Span};
use tenmil_linux::{EventLoop, NextStep, Sleeper};

use crate::{
    Context, Event, PollMode, Reactor, ReactorId, ReactorOptions, Registry, ThreadHandle,
    TimeSource, UnstartedReactors,
};

/// Simulated reactors and their clock.
pub(crate) struct Simulation {
    pub(crate) now_ns: Arc<AtomicU64>,
    pub(crate) random: Random,
    pub(crate) directory: Arc<Registry>,
    pub(crate) members: Vec<SimReactor>,
    ready: Vec<u64>,
}

pub(crate) struct SimReactor {
    reactor: Reactor,
    sleeper: Sleeper,
    pub(crate) stage: SimReactorState,
}

/// State of a simulated reactor's OS thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SimReactorState {
    Iterating,
    /// Is about to announce that it sleeps until this time.
    WantsSleep(Instant),
    SleepAnnounced(Instant),
    Sleeping(Instant),
    /// Is about to announce a pause until this time.
    WantsPause(Instant),
    PauseAnnounced(Instant),
    Pausing(Instant),
    Ended,
}

impl Simulation {
    pub(crate) fn new(seed: u64, reactors: u32, options: &ReactorOptions) -> Self {
        let start = Instant { ns: 1_000_000 };
        let now_ns = Arc::new(AtomicU64::new(start.ns));
        let stopwatch = TimeSource::Simulated(Arc::clone(&now_ns));
        let cores: Vec<u32> = (0..reactors).collect();
        let UnstartedReactors { registry: directory, reactors } =
            UnstartedReactors::new(&cores, options, &stopwatch, start).unwrap();
        let member =
            |(reactor, sleeper)| SimReactor { reactor, sleeper, stage: SimReactorState::Iterating };
        let members = reactors.into_iter().map(member).collect();
        Self { now_ns, random: Random::new(seed), directory, members, ready: Vec::new() }
    }

    pub(crate) fn new_adaptive(seed: u64, reactors: u32) -> Self {
        Self::new(seed, reactors, &ReactorOptions::default())
    }

    pub(crate) fn new_always_polling(reactors: u32) -> Self {
        let options = ReactorOptions { poll: PollMode::Always, ..ReactorOptions::default() };
        Self::new(0, reactors, &options)
    }

    pub(crate) fn now(&self) -> Instant {
        Instant { ns: self.now_ns.load(Ordering::Relaxed) }
    }

    pub(crate) fn advance_clock(&self, span: Span) {
        self.now_ns.fetch_add(span.ns, Ordering::Relaxed);
    }

    /// Executes one step of one reactor.
    pub(crate) fn step_reactor(&mut self, index: usize) {
        let now = self.now();
        let Self { members, ready, .. } = self;
        let Some(SimReactor { reactor, sleeper, stage }) = members.get_mut(index) else { return };
        *stage = match *stage {
            SimReactorState::Iterating => match reactor.iterate(now) {
                NextStep::Again => SimReactorState::Iterating,
                NextStep::PollDescriptors => {
                    ready.clear();
                    sleeper.poll_ready(ready);
                    reactor.handle_ready(ready);
                    SimReactorState::Iterating
                }
                NextStep::SleepUntil(deadline) => SimReactorState::WantsSleep(deadline),
                NextStep::Pause(span) => SimReactorState::WantsPause(now.after(span)),
                NextStep::Exit => SimReactorState::Ended,
            },
            SimReactorState::WantsSleep(deadline) => {
                sleeper.announce_sleep();
                SimReactorState::SleepAnnounced(deadline)
            }
            SimReactorState::SleepAnnounced(deadline) => {
                if reactor.arm(now) {
                    sleeper.cancel_sleep();
                    reactor.disarm(&[]);
                    SimReactorState::Iterating
                } else {
                    SimReactorState::Sleeping(deadline)
                }
            }
            SimReactorState::Sleeping(deadline) => {
                ready.clear();
                let rang = sleeper.sleep_until_ready(Span::default(), ready);
                if rang || !ready.is_empty() || now >= deadline {
                    reactor.disarm(ready);
                    SimReactorState::Iterating
                } else {
                    // It has not blocked after all: no notification could occur in between.
                    sleeper.announce_sleep();
                    SimReactorState::Sleeping(deadline)
                }
            }
            SimReactorState::WantsPause(until) => {
                sleeper.announce_sleep_without_descriptors();
                SimReactorState::PauseAnnounced(until)
            }
            SimReactorState::PauseAnnounced(until) => {
                if reactor.has_unnotified_work() {
                    sleeper.cancel_sleep();
                    SimReactorState::Iterating
                } else {
                    SimReactorState::Pausing(until)
                }
            }
            SimReactorState::Pausing(until) => {
                if sleeper.sleep_without_descriptors(Span::default()) || now >= until {
                    SimReactorState::Iterating
                } else {
                    // It continues to pause: no notification could occur in between.
                    sleeper.announce_sleep_without_descriptors();
                    SimReactorState::Pausing(until)
                }
            }
            SimReactorState::Ended => SimReactorState::Ended,
        };
    }

    /// Executes one step of a random reactor, and advances the clock a little.
    pub(crate) fn step_random_reactor(&mut self) {
        let count = self.members.len() as u64;
        let index = usize::try_from(self.random.below(count)).unwrap();
        self.step_reactor(index);
        let span = Span { ns: self.random.below(8_000) };
        self.advance_clock(span);
    }

    /// Runs `count` iterations of every reactor, 100 ns apart.
    pub(crate) fn step_all(&mut self, count: usize) {
        for _ in 0..count {
            (0..self.members.len()).for_each(|index| self.step_reactor(index));
            self.advance_clock(Span { ns: 100 });
        }
    }

    /// Runs until all reactors sleep and nothing wakes them. Returns the earliest deadline.
    pub(crate) fn run_until_idle(&mut self) -> Instant {
        // Until all have been polled twice while asleep, and continued to sleep.
        let mut quiet = 0;
        for _ in 0..1_000_000 {
            (0..self.members.len()).for_each(|index| self.step_reactor(index));
            match self.earliest_deadline() {
                Some(_) if quiet == 2 => break,
                Some(_) => quiet += 1,
                None => {
                    quiet = 0;
                    let span = Span { ns: self.random.below(2_000) };
                    self.advance_clock(span);
                }
            }
        }
        let forgets = |member: &SimReactor| {
            member.stage != SimReactorState::Ended && member.reactor.has_commands()
        };
        assert!(
            !self.members.iter().any(forgets),
            "an order slept on: {:?}",
            self.reactor_states()
        );
        self.earliest_deadline()
            .unwrap_or_else(|| panic!("a reactor never sleeps: {:?}", self.reactor_states()))
    }

    /// Advances to the next deadline, if that is before `end`.
    pub(crate) fn run_to_next_deadline(&mut self, end: Instant) -> bool {
        let next = self.run_until_idle();
        let continues = next <= end;
        let until = next.min(end).max(self.now());
        self.now_ns.store(until.ns, Ordering::Relaxed);
        continues
    }

    /// Runs for `span`.
    pub(crate) fn run_for(&mut self, span: Span) {
        let end = self.now().after(span);
        while self.run_to_next_deadline(end) {}
    }

    /// Earliest deadline, if all reactors sleep or have ended.
    fn earliest_deadline(&self) -> Option<Instant> {
        let deadline = |member: &SimReactor| match member.stage {
            SimReactorState::Sleeping(deadline) => Some(deadline),
            SimReactorState::Ended => Some(Instant::NEVER),
            _ => None,
        };
        self.members.iter().map(deadline).try_fold(Instant::NEVER, |least, deadline| {
            deadline.map(|deadline| deadline.min(least))
        })
    }

    pub(crate) fn reactor_states(&self) -> Vec<SimReactorState> {
        self.members.iter().map(|member| member.stage).collect()
    }

    /// Kinds of the recorded events.
    pub(crate) fn event_kinds(&self) -> Vec<&'static str> {
        self.events().iter().map(Event::kind).collect()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.directory.events_since(0).events.into_iter().map(|noted| noted.event).collect()
    }

    /// Sends a closure, which must fit.
    pub(crate) fn send_closure(
        &self,
        to: &ThreadHandle,
        call: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) {
        assert!(to.send_closure(call).is_ok(), "no room in the mailbox of {to:?}");
    }
}

pub(crate) const R0: ReactorId = ReactorId(0);
pub(crate) const R1: ReactorId = ReactorId(1);
