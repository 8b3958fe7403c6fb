//! Reactors in simulated time on one OS thread, each a step at a time in an order drawn from a seed.
//!
//! What an OS thread does around a turn is cut into its steps here, so that anything can happen
//! between any two of them: after a turn that wants to sleep, after the announcement, after the last
//! look, and during the sleep.

mod channels;
mod chaos;
pub(crate) mod crew;
mod dozing;
mod idling;
mod lifetimes;
mod sources;
mod timing;
mod travelling;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Instant, Random, Span};
use host::{Sleeper, Turn, Wait};

use crate::{
    Assembly, Context, Directory, Event, Handle, PollMode, Reactor, ReactorId, ReactorOptions,
    Stopwatch,
};

/// Some reactors and their clock.
pub(crate) struct World {
    pub(crate) now_ns: Arc<AtomicU64>,
    pub(crate) random: Random,
    pub(crate) directory: Arc<Directory>,
    pub(crate) members: Vec<Member>,
    ready: Vec<u64>,
}

pub(crate) struct Member {
    reactor: Reactor,
    sleeper: Sleeper,
    pub(crate) stage: Stage,
}

/// Where a reactor's OS thread would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Turning,
    Tired(Instant),
    Announced(Instant),
    Asleep(Instant),
    /// Wants to rest.
    Weary(Instant),
    /// Has announced a rest.
    Leaning(Instant),
    Resting(Instant),
    Ended,
}

impl World {
    pub(crate) fn new(seed: u64, reactors: u32, options: &ReactorOptions) -> Self {
        let start = Instant { ns: 1_000_000 };
        let now_ns = Arc::new(AtomicU64::new(start.ns));
        let stopwatch = Stopwatch::Simulated(Arc::clone(&now_ns));
        let cores: Vec<u32> = (0..reactors).collect();
        let Assembly { directory, reactors } =
            Assembly::new(&cores, options, &stopwatch, start).unwrap();
        let member = |(reactor, sleeper)| Member { reactor, sleeper, stage: Stage::Turning };
        let members = reactors.into_iter().map(member).collect();
        Self { now_ns, random: Random::new(seed), directory, members, ready: Vec::new() }
    }

    pub(crate) fn adaptive(seed: u64, reactors: u32) -> Self {
        Self::new(seed, reactors, &ReactorOptions::default())
    }

    pub(crate) fn always(reactors: u32) -> Self {
        let options = ReactorOptions { poll: PollMode::Always, ..ReactorOptions::default() };
        Self::new(0, reactors, &options)
    }

    pub(crate) fn now(&self) -> Instant {
        Instant { ns: self.now_ns.load(Ordering::Relaxed) }
    }

    pub(crate) fn pass_time(&self, span: Span) {
        self.now_ns.fetch_add(span.ns, Ordering::Relaxed);
    }

    /// One step of one reactor.
    pub(crate) fn step(&mut self, index: usize) {
        let now = self.now();
        let Self { members, ready, .. } = self;
        let Some(Member { reactor, sleeper, stage }) = members.get_mut(index) else { return };
        *stage = match *stage {
            Stage::Turning => match reactor.turn(now) {
                Wait::Again => Stage::Turning,
                Wait::Look => {
                    ready.clear();
                    sleeper.look(ready);
                    reactor.heard(ready);
                    Stage::Turning
                }
                Wait::Until(deadline) => Stage::Tired(deadline),
                Wait::Pause(span) => Stage::Weary(now.after(span)),
                Wait::Ended => Stage::Ended,
            },
            Stage::Tired(deadline) => {
                sleeper.announce();
                Stage::Announced(deadline)
            }
            Stage::Announced(deadline) => {
                if reactor.arm(now) {
                    sleeper.cancel();
                    reactor.woken(&[]);
                    Stage::Turning
                } else {
                    Stage::Asleep(deadline)
                }
            }
            Stage::Asleep(deadline) => {
                ready.clear();
                let rang = sleeper.block(Span::default(), ready);
                if rang || !ready.is_empty() || now >= deadline {
                    reactor.woken(ready);
                    Stage::Turning
                } else {
                    // It has not blocked after all: nobody was there to ring in between.
                    sleeper.announce();
                    Stage::Asleep(deadline)
                }
            }
            Stage::Weary(until) => {
                sleeper.announce_rest();
                Stage::Leaning(until)
            }
            Stage::Leaning(until) => {
                if reactor.is_wanted() {
                    sleeper.cancel();
                    Stage::Turning
                } else {
                    Stage::Resting(until)
                }
            }
            Stage::Resting(until) => {
                if sleeper.rest(Span::default()) || now >= until {
                    Stage::Turning
                } else {
                    // It goes on resting: nobody was there to ring in between.
                    sleeper.announce_rest();
                    Stage::Resting(until)
                }
            }
            Stage::Ended => Stage::Ended,
        };
    }

    /// One step of any reactor, and a little time.
    pub(crate) fn step_any(&mut self) {
        let count = self.members.len() as u64;
        let index = usize::try_from(self.random.below(count)).unwrap();
        self.step(index);
        let span = Span { ns: self.random.below(8_000) };
        self.pass_time(span);
    }

    /// Turns every reactor `count` times, 100 ns apart.
    pub(crate) fn turn_all(&mut self, count: usize) {
        for _ in 0..count {
            (0..self.members.len()).for_each(|index| self.step(index));
            self.pass_time(Span { ns: 100 });
        }
    }

    /// Lets everything happen that happens by itself, until all reactors sleep and nothing wakes
    /// them, and says until when.
    pub(crate) fn settle(&mut self) -> Instant {
        // Until all have been asked twice in their sleep, and have gone on sleeping.
        let mut quiet = 0;
        for _ in 0..1_000_000 {
            (0..self.members.len()).for_each(|index| self.step(index));
            match self.earliest() {
                Some(_) if quiet == 2 => break,
                Some(_) => quiet += 1,
                None => {
                    quiet = 0;
                    let span = Span { ns: self.random.below(2_000) };
                    self.pass_time(span);
                }
            }
        }
        let forgets = |member: &Member| member.stage != Stage::Ended && member.reactor.has_orders();
        assert!(!self.members.iter().any(forgets), "an order slept on: {:?}", self.stages());
        self.earliest().unwrap_or_else(|| panic!("somebody never sleeps: {:?}", self.stages()))
    }

    /// Lets time pass up to the next deadline, if that comes before `end`.
    pub(crate) fn skip(&mut self, end: Instant) -> bool {
        let next = self.settle();
        let goes_on = next <= end;
        let until = next.min(end).max(self.now());
        self.now_ns.store(until.ns, Ordering::Relaxed);
        goes_on
    }

    /// Lives on until `span` has passed.
    pub(crate) fn live(&mut self, span: Span) {
        let end = self.now().after(span);
        while self.skip(end) {}
    }

    /// The earliest deadline, if all reactors sleep or have ended.
    fn earliest(&self) -> Option<Instant> {
        let deadline = |member: &Member| match member.stage {
            Stage::Asleep(deadline) => Some(deadline),
            Stage::Ended => Some(Instant::NEVER),
            _ => None,
        };
        self.members.iter().map(deadline).try_fold(Instant::NEVER, |least, deadline| {
            deadline.map(|deadline| deadline.min(least))
        })
    }

    pub(crate) fn stages(&self) -> Vec<Stage> {
        self.members.iter().map(|member| member.stage).collect()
    }

    /// What has happened, in one word each.
    pub(crate) fn kinds(&self) -> Vec<&'static str> {
        self.events().iter().map(Event::kind).collect()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.directory.events_since(0).noted.into_iter().map(|noted| noted.event).collect()
    }

    /// Sends a closure, for which there has to be room.
    pub(crate) fn call(&self, to: &Handle, call: impl FnOnce(&mut Context<'_>) + Send + 'static) {
        assert!(to.call(call).is_ok(), "no room in the mailbox of {to:?}");
    }
}

pub(crate) const R0: ReactorId = ReactorId(0);
pub(crate) const R1: ReactorId = ReactorId(1);
