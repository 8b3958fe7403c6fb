//! A reactor: some light threads, and the turn that runs them.
//!
//! ```text
//!   turn(now):  orders → those who come and go → of each thread that is not dozing: messages, active pollers,
//!               timed pollers that are due, and if there was work a flush → again, or sleep
//! ```
//!
//! A turn neither reads the clock nor blocks; [`host::turn::run`] does both around it. A turn in which
//! nothing happens takes no lock, allocates nothing and has no atomic read-modify-write.

mod dozing;
mod idle;
mod travellers;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use base::{Instant, Span};
use host::{Bell, Receiver, Sleeper, Sources, Turn, Wait, mailbox};

use crate::directory::{Directory, Order, ReactorId, ReactorRecord};
use crate::event::{Culprit, Event, PollerPanicked};
use crate::message::{Handle, Message};
use crate::panicked::panic_text;
use crate::refused::Refused;
use crate::spell::{PollMode, Spell};
use crate::thread::LightThread;
use crate::watch::{Stopwatch, Watch};
use dozing::Dormitory;

/// A reactor, to be turned by whoever has it: an OS thread of its own, or a simulation.
pub struct Reactor {
    local: Local,
    inbox: Receiver<Order>,
    /// Those who are looked at in every turn, and those who are not until there is something for them.
    threads: Vec<LightThread>,
    dormitory: Dormitory,
    spell: Spell,
    /// When the last turn began.
    last: Instant,
    /// Whether it found work, and which thread did last.
    busy: bool,
    last_worker: usize,
    /// Whether the time since then was spent resting or asleep.
    slept: bool,
    /// When descriptors were asked for those who doze, unless that was at the end of a sleep since
    /// which nobody has looked at the time.
    asked: Instant,
    busy_ns: u64,
    turns: u64,
    /// Turns that found nothing, since it last thought of sleeping.
    looks: u32,
    /// A turn longer than this has something to tell.
    notable: Span,
    turn_max: Span,
    publish_at: Instant,
    /// The deadline of the sleep that was announced, and when it began.
    promised: Instant,
    armed: Instant,
    /// Threads that the inbox of their new reactor had no room for.
    parting: Vec<(ReactorId, Box<LightThread>)>,
    /// Messages that ended threads left behind and that had no room where they go.
    strays: Vec<(Handle, Message)>,
    stopping: bool,
    /// Descriptors of those who doze are to be asked for.
    looks_out: bool,
    /// One of the two: what a turn has to do besides turning again.
    has_aside: bool,
}

/// What a reactor lends to what runs on it.
pub(crate) struct Local {
    pub(crate) id: ReactorId,
    pub(crate) directory: Arc<Directory>,
    pub(crate) sources: Sources,
    pub(crate) bell: Bell,
    pub(crate) mode: PollMode,
    pub(crate) watch: Watch,
    pub(crate) messages: u64,
    /// When a timed poller is due, or the books are, at the earliest.
    pub(crate) due: Instant,
    /// Whether somebody comes or goes.
    pub(crate) attention: bool,
    pub(crate) drain_max: Span,
    record: Arc<ReactorRecord>,
}

/// How reactors are made.
#[derive(Clone, Debug)]
pub struct ReactorOptions {
    /// How they poll.
    pub poll: PollMode,
    /// How long a turn may take before the watchdog notes it.
    pub turn_max: Span,
    /// How long a poller may hold on to a thread that is to leave.
    pub drain_max: Span,
    /// Orders that a reactor has room for.
    pub inbox: usize,
    /// Events that are kept.
    pub events: usize,
    /// Whether OS threads are bound to their cores, where the kernel allows it.
    pub pin: bool,
}

/// Reactors that nobody turns yet.
pub struct Assembly {
    /// What they share.
    pub directory: Arc<Directory>,
    /// Each with what it sleeps by.
    pub reactors: Vec<(Reactor, Sleeper)>,
}

/// How old the books may be that others see.
const PUBLISH: Span = Span::from_ms(1);
/// So many turns that find nothing share a reading of the clock, which costs more than one of them:
/// what is due is late by less than a tenth of a microsecond.
const LOOKS_PER_READING: u32 = 4;
/// How many orders a turn obeys.
const ORDERS: usize = 8;

impl Default for ReactorOptions {
    fn default() -> Self {
        Self {
            poll: PollMode::default(),
            turn_max: Span::from_ms(10),
            drain_max: Span::from_secs(1),
            inbox: 256,
            events: 1024,
            pin: true,
        }
    }
}

impl Assembly {
    /// Makes a reactor for each core. `stopwatch` measures the same time as turns are called with,
    /// of which `now` is the present. With simulated time, nothing but fences orders bells.
    pub fn new(
        cores: &[u32],
        options: &ReactorOptions,
        stopwatch: &Stopwatch,
        now: Instant,
    ) -> Result<Self, Refused> {
        let mut parts = Vec::with_capacity(cores.len());
        let mut entries = Vec::with_capacity(cores.len());
        for core in cores {
            let sleeper = match stopwatch {
                Stopwatch::Clock(_) => Sleeper::new(),
                Stopwatch::Simulated(_) => Sleeper::with_fences(),
            };
            let sleeper = sleeper.map_err(|error| Refused::machine("make a bell", &error))?;
            let record = Arc::new(ReactorRecord::new(*core, options.poll, now));
            let (send, inbox) = mailbox(options.inbox);
            entries.push((Arc::clone(&record), send, sleeper.bell()));
            parts.push((record, inbox, sleeper));
        }
        let directory = Arc::new(Directory::new(entries, options.events));
        let reactors = directory.reactors().zip(parts).map(|(id, (record, inbox, sleeper))| {
            let local = Local {
                id,
                directory: Arc::clone(&directory),
                sources: sleeper.sources(),
                bell: sleeper.bell(),
                mode: options.poll,
                watch: Watch::new(Arc::clone(&record), stopwatch.clone(), now),
                messages: 0,
                due: now,
                attention: false,
                drain_max: options.drain_max,
                record,
            };
            (Reactor::new(local, inbox, options, now), sleeper)
        });
        Ok(Self { reactors: reactors.collect(), directory })
    }
}

impl Reactor {
    fn new(local: Local, inbox: Receiver<Order>, options: &ReactorOptions, now: Instant) -> Self {
        Self {
            local,
            inbox,
            threads: Vec::new(),
            dormitory: Dormitory::default(),
            spell: Spell::new(options.poll, now),
            last: now,
            busy: false,
            last_worker: 0,
            slept: true,
            asked: now,
            busy_ns: 0,
            turns: 0,
            looks: 0,
            notable: Span::default(),
            turn_max: options.turn_max,
            publish_at: now,
            promised: Instant::NEVER,
            armed: now,
            parting: Vec::new(),
            strays: Vec::new(),
            stopping: false,
            looks_out: false,
            has_aside: false,
        }
    }

    /// Its number.
    pub fn id(&self) -> ReactorId {
        self.local.id
    }

    /// Whether there are orders that it has not looked at.
    #[cfg(test)]
    pub(crate) fn has_orders(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Books the time since the last turn began.
    #[inline]
    fn account(&mut self, now: Instant) {
        let took = now.since(self.last);
        self.last = now;
        if self.slept {
            self.slept = false;
        } else {
            if self.busy {
                self.charge(now, took);
            }
            if took > self.notable {
                self.note_long(now, took);
            }
        }
        self.turns += 1;
        self.local.watch.turn(now);
        self.local.record.turns.set(self.turns);
        self.local.record.turn_began.set(now.ns);
    }

    #[inline]
    fn charge(&mut self, now: Instant, took: Span) {
        self.busy_ns += took.ns;
        let rest = self.local.watch.look(now);
        if let Some(thread) = self.threads.get_mut(self.last_worker) {
            thread.charge(rest);
        }
    }

    /// Notes a turn that was the longest, or longer than it may be.
    #[cold]
    fn note_long(&mut self, now: Instant, took: Span) {
        let record = Arc::clone(&self.local.record);
        let longest = took.ns > record.longest_turn_ns.get();
        if longest {
            record.longest_turn_ns.set(took.ns);
            self.notable = took.min(self.turn_max);
        }
        if took <= self.turn_max {
            return;
        }
        record.turns_too_long.add(1);
        self.local.watch.look(now);
        let number = self.local.watch.culprit(took, now);
        let culprit = self.name_of(number);
        if longest {
            let mut kept = record.longest_culprit.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = Some(culprit.to_string());
        }
        let reactor = self.local.id;
        self.local.directory.note(now, Event::TurnTooLong { reactor, took, culprit });
    }

    fn name_of(&mut self, number: u64) -> Culprit {
        for thread in &mut self.threads {
            if thread.has_mailbox(number) {
                return Culprit::Message(thread.record().name.clone());
            }
            if let Some(id) = thread.poller_numbered(number) {
                return Culprit::Poller(thread.poller_name(id).unwrap_or_default());
            }
        }
        Culprit::Unknown
    }

    /// What a turn does. Returns whether it found work.
    #[inline]
    fn work(&mut self, now: Instant) -> bool {
        let mut found = false;
        if !self.inbox.is_empty() {
            self.obey(now);
            found = true;
        }
        if self.local.attention {
            found |= self.mind_travellers(now);
        }
        if self.local.bell.is_called() {
            self.rouse_called(now);
        }
        let due = now >= self.local.due;
        if due {
            self.rouse_due(now);
        }
        for (index, thread) in self.threads.iter_mut().enumerate() {
            if thread.pass(now, due, &mut self.local) {
                found = true;
                self.last_worker = index;
            }
        }
        if due {
            self.keep_house(now);
        }
        found
    }

    fn obey(&mut self, now: Instant) {
        for _ in 0..ORDERS {
            match self.inbox.receive() {
                Some(Order::Adopt(thread)) => self.adopt(*thread, now),
                Some(Order::Heed(thread)) => self.heed(thread, now),
                Some(Order::SetPoll(mode)) => self.set_poll(mode, now),
                Some(Order::Stop) => self.stop(now),
                None => return,
            }
        }
    }

    fn set_poll(&mut self, mode: PollMode, now: Instant) {
        if mode == self.local.mode {
            return;
        }
        self.local.mode = mode;
        self.local.record.set_mode(mode);
        self.spell.set_mode(mode, now);
        if !Self::lets_doze(mode) {
            self.rouse_all(now);
        }
        let reactor = self.local.id;
        self.local.directory.note(now, Event::PollModeChanged { reactor, mode });
    }

    /// Publishes the books, at most once in a while, and finds out when something is due next.
    fn keep_house(&mut self, now: Instant) {
        if now >= self.publish_at {
            self.publish_at = now.after(PUBLISH);
            self.publish(now);
            self.local.watch.relax(now);
            if self.wants_look(now) {
                (self.looks_out, self.has_aside) = (true, true);
            }
        }
        let timer = self.threads.iter().map(LightThread::next_timer).min();
        let due = timer.map_or(self.publish_at, |timer| timer.min(self.publish_at));
        self.local.due = due.min(self.dormitory.next_alarm());
    }

    fn publish(&mut self, now: Instant) {
        let local = &mut self.local;
        self.threads.iter_mut().for_each(|thread| thread.keep_house(now, local));
        self.local.record.busy_ns.set(self.busy_ns);
        self.local.record.messages.set(self.local.messages);
        let workers: usize = self.threads.iter().map(LightThread::workers).sum();
        // One mailbox and one poller share a thread, and so an account.
        self.local.watch.several = workers > 2;
    }

    /// Runs `body`; if something in it panics, that is dropped and reported, and the reactor goes
    /// on.
    ///
    /// The state is sound after a panic anywhere: all that is changed around a call to a poller or a
    /// message is changed before or after it, an entry at a time.
    fn guarded<T>(&mut self, now: Instant, body: impl FnOnce(&mut Self) -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| body(self))) {
            Ok(value) => Some(value),
            Err(panic) => {
                self.survive(&*panic, now);
                None
            }
        }
    }

    #[cold]
    fn survive(&mut self, panic: &(dyn Any + Send), now: Instant) {
        let number = self.local.watch.running();
        let panic = panic_text(panic);
        for thread in &mut self.threads {
            let (id, name) = (thread.record().id, thread.record().name.clone());
            if let Some(poller) = thread.poller_numbered(number) {
                let named = thread.poller_name(poller).unwrap_or_default();
                let panicked = PollerPanicked { poller: named, thread: id, panic };
                self.local.directory.note(now, Event::PollerPanicked(panicked.clone()));
                thread.bury(poller, panicked, now, &mut self.local);
                return;
            }
            if thread.has_mailbox(number) {
                let event = Event::MessagePanicked { thread: id, name, panic };
                self.local.directory.note(now, event);
                return;
            }
        }
    }

    /// What to do after a turn that found something.
    #[inline]
    fn next(&mut self) -> Wait {
        if self.has_aside { self.step_aside() } else { Wait::Again }
    }

    /// Ends, or asks for what those who doze are not asked for.
    #[cold]
    fn step_aside(&mut self) -> Wait {
        let nobody_waits = || self.parting.is_empty() && self.strays.is_empty();
        let nobody_lives = || self.threads.is_empty() && self.dormitory.is_empty();
        if self.stopping && nobody_lives() && nobody_waits() && self.inbox.is_empty() {
            // Whoever orders something from now on is told so.
            self.inbox = mailbox(1).1;
            return Wait::Ended;
        }
        self.has_aside = self.stopping;
        if std::mem::take(&mut self.looks_out) { Wait::Look } else { Wait::Again }
    }
}

impl Turn for Reactor {
    #[inline]
    fn turn(&mut self, now: Instant) -> Wait {
        self.account(now);
        // A turn in which something panicked counts as one that found work.
        self.busy = self.guarded(now, |reactor| reactor.work(now)).unwrap_or(true);
        self.local.watch.finish();
        if self.busy {
            self.spell.work(now);
            return self.next();
        }
        if self.spell.is_over(now) {
            return self.idle(now);
        }
        self.looks = self.looks.wrapping_add(1);
        Wait::Again
    }

    #[inline]
    fn wants_time(&self) -> bool {
        self.busy || self.looks.is_multiple_of(LOOKS_PER_READING)
    }

    fn arm(&mut self, now: Instant) -> bool {
        self.arm_all(now)
    }

    fn is_wanted(&self) -> bool {
        self.has_messages()
    }

    fn woken(&mut self, ready: &[u64]) {
        self.disarm_all(ready);
    }

    fn heard(&mut self, ready: &[u64]) {
        self.overhear(ready);
    }
}

impl fmt::Debug for Reactor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads.len() + self.dormitory.len();
        out.debug_struct("Reactor").field("id", &self.local.id).field("threads", &threads).finish()
    }
}

impl fmt::Debug for Assembly {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Assembly").field("reactors", &self.reactors.len()).finish()
    }
}
