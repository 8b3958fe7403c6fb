//! Reactor: its light threads, and the iteration that runs them.
//!
//! ```text
//!   iterate(now):  commands → migrations → for each thread that is not parked: messages, active pollers,
//!                  due timed pollers, and after work a flush → again, or sleep
//! ```
//!
//! An iteration neither reads the clock nor blocks; [`tenmil_linux::event_loop::run_event_loop`] does both around it.
//! An idle iteration takes no lock, allocates nothing and executes no atomic read-modify-write.

mod idle;
mod migration;
mod parking;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_linux::{EventLoop, NextStep, Notifier, Receiver, Sleeper, WakeSources, mailbox};

use crate::adaptive_spin::{AdaptiveSpin, PollMode};
use crate::error::ReactorError;
use crate::event::{Event, PollerPanicked, SlowIterationCause};
use crate::flight_recorder::{self, FlightEventKind, LONG_SLEEP};
use crate::light_thread::LightThread;
use crate::message::{Message, ThreadHandle};
use crate::panic_text::panic_text;
use crate::registry::{ReactorCommand, ReactorCounters, ReactorId, Registry};
use crate::time_accounting::{TimeAccounting, TimeSource};
use parking::ParkedThreads;

/// Reactor, run by its owner: an OS thread of its own, or a simulation.
pub struct Reactor {
    local: ReactorLocal,
    inbox: Receiver<ReactorCommand>,
    /// Threads polled in every iteration; parked threads are kept separately.
    threads: Vec<LightThread>,
    parked: ParkedThreads,
    spin: AdaptiveSpin,
    /// Start of the last iteration.
    last: Instant,
    /// Whether it found work, and which thread did last.
    busy: bool,
    last_worker: usize,
    /// Whether the time since then was spent in a pause or asleep.
    slept: bool,
    /// Last poll of descriptors for parked threads, unless it was at the end of a sleep since which
    /// the clock was not read.
    descriptors_polled_at: Instant,
    busy_ns: u64,
    /// Busy time at the last publication, when that was, and whether it was most of the time before.
    published_busy_ns: u64,
    published_at: Instant,
    is_mostly_busy: bool,
    iterations: u64,
    /// Idle iterations since the last attempt to sleep.
    idle_polls: u32,
    /// Iterations longer than this are recorded.
    record_above: Span,
    iteration_max: Span,
    publish_at: Instant,
    /// Deadline of the announced sleep, and its start.
    deadline: Instant,
    armed: Instant,
    /// Threads for which the inbox of their new reactor was full.
    departing: Vec<(ReactorId, Box<LightThread>)>,
    /// Messages left by ended threads whose destination was full.
    undelivered: Vec<(ThreadHandle, Message)>,
    stopping: bool,
    /// The descriptors of parked threads are to be polled.
    poll_descriptors: bool,
    /// `stopping` or `looks_out`: an iteration has more to do than to continue.
    has_deferred: bool,
}

/// Per-reactor state that is borrowed by its threads.
pub(crate) struct ReactorLocal {
    pub(crate) id: ReactorId,
    pub(crate) registry: Arc<Registry>,
    pub(crate) sources: WakeSources,
    pub(crate) notifier: Notifier,
    pub(crate) mode: PollMode,
    pub(crate) accounting: TimeAccounting,
    pub(crate) messages: u64,
    /// Earliest due time of a timed poller or of the statistics.
    pub(crate) due: Instant,
    /// Whether a thread arrives or leaves.
    pub(crate) has_migrations: bool,
    pub(crate) drain_max: Span,
    record: Arc<ReactorCounters>,
}

/// Options of reactors.
#[derive(Clone, Debug)]
pub struct ReactorOptions {
    /// Poll mode.
    pub poll: PollMode,
    /// Iteration time beyond which an event is recorded.
    pub iteration_max: Span,
    /// Upper bound for the time a poller may delay the migration or exit of its thread.
    pub drain_max: Span,
    /// Capacity of the command inbox.
    pub inbox: usize,
    /// Capacity of the event log.
    pub events: usize,
    /// Whether OS threads are pinned to their cores, where permitted.
    pub pin: bool,
}

/// Reactors that are not running yet.
pub struct UnstartedReactors {
    /// Registry shared by the reactors.
    pub registry: Arc<Registry>,
    /// The reactors, each with its sleeper.
    pub reactors: Vec<(Reactor, Sleeper)>,
}

/// Maximum age of published statistics.
const PUBLISH: Span = Span::from_ms(1);
/// Idle iterations that share a clock reading, which costs more than one of them: timers are late
/// by less than a tenth of a microsecond.
const IDLE_POLLS_PER_CLOCK_READ: u32 = 4;
/// Maximum number of commands per iteration.
const COMMANDS_PER_ITERATION: usize = 8;

impl Default for ReactorOptions {
    fn default() -> Self {
        Self {
            poll: PollMode::default(),
            iteration_max: Span::from_ms(10),
            drain_max: Span::from_secs(1),
            inbox: 256,
            events: 1024,
            pin: true,
        }
    }
}

impl UnstartedReactors {
    /// Creates a reactor for each core. `stopwatch` measures the same time that iterations are
    /// called with, of which `now` is the present. In simulated time, notifications are ordered by
    /// fences only.
    pub fn new(
        cores: &[u32],
        options: &ReactorOptions,
        stopwatch: &TimeSource,
        now: Instant,
    ) -> Result<Self, ReactorError> {
        let mut parts = Vec::with_capacity(cores.len());
        let mut entries = Vec::with_capacity(cores.len());
        for core in cores {
            let sleeper = match stopwatch {
                TimeSource::Clock(_) => Sleeper::new(),
                TimeSource::Simulated(_) => Sleeper::with_fences(),
            };
            let sleeper =
                sleeper.map_err(|error| ReactorError::from_io_error("make a bell", &error))?;
            let record = Arc::new(ReactorCounters::new(*core, options.poll, now));
            let (send, inbox) = mailbox(options.inbox);
            entries.push((Arc::clone(&record), send, sleeper.notifier()));
            parts.push((record, inbox, sleeper));
        }
        let directory = Arc::new(Registry::new(entries, options.events));
        let reactors = directory.reactors().zip(parts).map(|(id, (record, inbox, sleeper))| {
            let local = ReactorLocal {
                id,
                registry: Arc::clone(&directory),
                sources: sleeper.sources(),
                notifier: sleeper.notifier(),
                mode: options.poll,
                accounting: TimeAccounting::new(Arc::clone(&record), stopwatch.clone(), now),
                messages: 0,
                due: now,
                has_migrations: false,
                drain_max: options.drain_max,
                record,
            };
            (Reactor::new(local, inbox, options, now), sleeper)
        });
        Ok(Self { reactors: reactors.collect(), registry: directory })
    }
}

impl Reactor {
    fn new(
        local: ReactorLocal,
        inbox: Receiver<ReactorCommand>,
        options: &ReactorOptions,
        now: Instant,
    ) -> Self {
        Self {
            local,
            inbox,
            threads: Vec::new(),
            parked: ParkedThreads::default(),
            spin: AdaptiveSpin::new(options.poll, now),
            last: now,
            busy: false,
            last_worker: 0,
            slept: true,
            descriptors_polled_at: now,
            busy_ns: 0,
            published_busy_ns: 0,
            published_at: Instant::default(),
            is_mostly_busy: false,
            iterations: 0,
            idle_polls: 0,
            record_above: Span::default(),
            iteration_max: options.iteration_max,
            publish_at: now,
            deadline: Instant::NEVER,
            armed: now,
            departing: Vec::new(),
            undelivered: Vec::new(),
            stopping: false,
            poll_descriptors: false,
            has_deferred: false,
        }
    }

    /// Reactor number.
    pub fn id(&self) -> ReactorId {
        self.local.id
    }

    /// Whether commands are pending.
    #[cfg(test)]
    pub(crate) fn has_commands(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Accounts the time since the start of the last iteration.
    #[inline]
    fn account_iteration(&mut self, now: Instant) {
        let took = now.since(self.last);
        self.last = now;
        // Time asleep is neither busy time nor part of a slow iteration.
        if self.slept {
            self.slept = false;
            if took >= LONG_SLEEP {
                flight_recorder::record(now, FlightEventKind::LongSleep, [took.ns, 0]);
            }
        } else {
            if self.busy {
                self.charge_last_worker(now, took);
            }
            if took > self.record_above {
                self.record_slow_iteration(now, took);
            }
        }
        self.iterations += 1;
        self.local.accounting.start_iteration(now);
        self.local.record.iterations.set(self.iterations);
        self.local.record.iteration_started.set(now.ns);
    }

    #[inline]
    fn charge_last_worker(&mut self, now: Instant, took: Span) {
        self.busy_ns += took.ns;
        let rest = self.local.accounting.charge_elapsed(now);
        if let Some(thread) = self.threads.get_mut(self.last_worker) {
            thread.charge_time(rest);
        }
    }

    /// Records an iteration that was the longest so far, or longer than permitted.
    #[cold]
    fn record_slow_iteration(&mut self, now: Instant, took: Span) {
        let record = Arc::clone(&self.local.record);
        let longest = took.ns > record.longest_iteration_ns.get();
        if longest {
            record.longest_iteration_ns.set(took.ns);
            self.record_above = took.min(self.iteration_max);
        }
        if took <= self.iteration_max {
            return;
        }
        record.slow_iterations.add(1);
        self.local.accounting.charge_elapsed(now);
        let number = self.local.accounting.longest_account_of_iteration(took, now);
        let cause = self.slow_cause_of(number);
        flight_recorder::record(now, FlightEventKind::SlowIteration, [number, took.ns]);
        if longest {
            let mut kept =
                record.longest_attribution.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = Some(cause.to_string());
        }
        let reactor = self.local.id;
        self.local
            .registry
            .record_event(now, Event::SlowIteration { reactor, took, attribution: cause });
    }

    fn slow_cause_of(&mut self, number: u64) -> SlowIterationCause {
        for thread in &mut self.threads {
            if thread.is_mailbox_number(number) {
                return SlowIterationCause::Message(thread.thread_counters().name.clone());
            }
            if let Some(id) = thread.find_poller(number) {
                return SlowIterationCause::Poller(thread.poller_name(id).unwrap_or_default());
            }
        }
        SlowIterationCause::Unknown
    }

    /// Body of an iteration. Returns whether it found work.
    #[inline]
    fn run_threads(&mut self, now: Instant) -> bool {
        let mut found = false;
        if !self.inbox.is_empty() {
            self.run_commands(now);
            found = true;
        }
        if self.local.has_migrations {
            found |= self.poll_migrations(now);
        }
        // Unparked threads run in this iteration.
        if self.local.notifier.has_notified_parked_thread() {
            self.unpark_notified(now);
        }
        let due = now >= self.local.due;
        if due {
            self.unpark_due(now);
        }
        for (index, thread) in self.threads.iter_mut().enumerate() {
            if thread.run_iteration(now, due, &mut self.local) {
                found = true;
                self.last_worker = index;
            }
        }
        if due {
            self.publish_if_due(now);
        }
        found
    }

    fn run_commands(&mut self, now: Instant) {
        for _ in 0..COMMANDS_PER_ITERATION {
            match self.inbox.receive() {
                Some(ReactorCommand::AddThread(thread)) => self.add_thread(*thread, now),
                Some(ReactorCommand::RecheckThread(thread)) => {
                    self.apply_thread_request(thread, now)
                }
                Some(ReactorCommand::SetPoll(mode)) => self.set_poll_mode(mode, now),
                Some(ReactorCommand::Stop) => self.stop_all_threads(now),
                None => return,
            }
        }
    }

    fn set_poll_mode(&mut self, mode: PollMode, now: Instant) {
        if mode == self.local.mode {
            return;
        }
        self.local.mode = mode;
        self.local.record.set_poll_mode(mode);
        self.spin.set_mode(mode, now);
        if !Self::allows_parking(mode) {
            self.unpark_all(now);
        }
        let reactor = self.local.id;
        self.local.registry.record_event(now, Event::PollModeChanged { reactor, mode });
    }

    /// Publishes statistics, at a limited rate, and determines the next due time.
    fn publish_if_due(&mut self, now: Instant) {
        if now >= self.publish_at {
            self.publish_at = now.after(PUBLISH);
            let busy_ns = self.busy_ns - self.published_busy_ns;
            self.is_mostly_busy = 2 * busy_ns > now.since(self.published_at).ns;
            (self.published_busy_ns, self.published_at) = (self.busy_ns, now);
            self.update_spin_use(now);
            self.publish_statistics(now);
            self.local.accounting.end_timing_of_every_poller(now);
            if self.is_descriptor_poll_due(now) {
                (self.poll_descriptors, self.has_deferred) = (true, true);
            }
        }
        let timer = self.threads.iter().map(LightThread::earliest_timed_poll).min();
        let due = timer.map_or(self.publish_at, |timer| timer.min(self.publish_at));
        self.local.due = due.min(self.parked.next_deadline());
    }

    fn publish_statistics(&mut self, now: Instant) {
        let local = &mut self.local;
        self.threads.iter_mut().for_each(|thread| thread.close_unused_and_publish(now, local));
        self.local.record.busy_ns.set(self.busy_ns);
        self.local.record.messages.set(self.local.messages);
        let workers: usize = self.threads.iter().map(LightThread::time_account_count).sum();
        // A single mailbox and a single poller share an account.
        self.local.accounting.has_several_accounts = workers > 2;
    }

    /// Runs `body`. A panic drops what panicked and is reported; the reactor continues.
    ///
    /// The state is consistent after a panic at any point: everything changed around a call of a
    /// poller or a message is changed before or after it, one entry at a time.
    fn catch_panic<T>(&mut self, now: Instant, body: impl FnOnce(&mut Self) -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| body(self))) {
            Ok(value) => Some(value),
            Err(panic) => {
                self.handle_panic(&*panic, now);
                None
            }
        }
    }

    #[cold]
    fn handle_panic(&mut self, panic: &(dyn Any + Send), now: Instant) {
        let number = self.local.accounting.last_started_account();
        let panic = panic_text(panic);
        for thread in &mut self.threads {
            let (id, name) = (thread.thread_counters().id, thread.thread_counters().name.clone());
            if let Some(poller) = thread.find_poller(number) {
                let named = thread.poller_name(poller).unwrap_or_default();
                let panicked = PollerPanicked { poller: named, thread: id, panic };
                self.local.registry.record_event(now, Event::PollerPanicked(panicked.clone()));
                thread.drop_panicked(poller, panicked, now, &mut self.local);
                return;
            }
            if thread.is_mailbox_number(number) {
                let event = Event::MessagePanicked { thread: id, name, panic };
                self.local.registry.record_event(now, event);
                return;
            }
        }
    }

    /// Next step after an iteration that found work.
    #[inline]
    fn next_step_when_busy(&mut self) -> NextStep {
        if self.has_deferred { self.handle_stop_or_descriptor_poll() } else { NextStep::Again }
    }

    /// Handles a stop, or polls the descriptors of parked threads.
    #[cold]
    fn handle_stop_or_descriptor_poll(&mut self) -> NextStep {
        // Exit only when no thread, departing thread or undelivered message is left.
        let nobody_waits = || self.departing.is_empty() && self.undelivered.is_empty();
        let nobody_lives = || self.threads.is_empty() && self.parked.is_empty();
        if self.stopping && nobody_lives() && nobody_waits() && self.inbox.is_empty() {
            // Later commands are rejected with `Stopped`.
            self.inbox = mailbox(1).1;
            return NextStep::Exit;
        }
        self.has_deferred = self.stopping;
        if std::mem::take(&mut self.poll_descriptors) {
            NextStep::PollDescriptors
        } else {
            NextStep::Again
        }
    }
}

impl EventLoop for Reactor {
    #[inline]
    fn iterate(&mut self, now: Instant) -> NextStep {
        self.account_iteration(now);
        // An iteration in which something panicked counts as busy.
        self.busy = self.catch_panic(now, |reactor| reactor.run_threads(now)).unwrap_or(true);
        self.local.accounting.begin_uncharged();
        if self.busy {
            self.spin.record_work(now);
            return self.next_step_when_busy();
        }
        if self.spin.is_spin_over(now) {
            return self.next_step_when_idle(now);
        }
        self.idle_polls = self.idle_polls.wrapping_add(1);
        NextStep::Again
    }

    #[inline]
    fn needs_clock(&self) -> bool {
        self.busy || self.idle_polls.is_multiple_of(IDLE_POLLS_PER_CLOCK_READ)
    }

    fn arm(&mut self, now: Instant) -> bool {
        self.arm_wake_sources(now)
    }

    fn has_unnotified_work(&self) -> bool {
        self.has_unnotified_messages()
    }

    fn disarm(&mut self, ready: &[u64]) {
        self.disarm_wake_sources(ready);
    }

    fn handle_ready(&mut self, ready: &[u64]) {
        self.unpark_while_awake(ready);
    }
}

impl fmt::Debug for Reactor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads.len() + self.parked.len();
        out.debug_struct("Reactor").field("id", &self.local.id).field("threads", &threads).finish()
    }
}

impl fmt::Debug for UnstartedReactors {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Assembly").field("reactors", &self.reactors.len()).finish()
    }
}
