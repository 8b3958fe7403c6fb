//! Registry: reactors and threads, their locations, and commands to reactors.
//!
//! Shared by all reactors and by monitoring and control code. Reactors store plain words into it
//! and take no lock in an iteration; the lists behind locks change when a thread starts, moves or
//! ends.

mod counters;
mod loads;
mod sample;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_linux::thread_state::OsThreadId;
use tenmil_linux::{CpuList, Notifier, Sender};

use crate::adaptive_spin::PollMode;
use crate::error::ReactorError;
use crate::event::{Event, EventBatch, EventLog, SlowIterationCause};
use crate::flight_recorder;
use crate::light_thread::{LightThread, ThreadBuilder};
use crate::message::{Message, ThreadHandle};
use crate::poller::WakeKind;
pub(crate) use counters::{PollerCounters, ReactorCounters, ThreadCounters};
pub(crate) use loads::{LoadSnapshot, ReactorUsage, ThreadUsage};
pub use sample::{PollerSample, ReactorSample, StatisticsSample, ThreadSample};

/// Registry of reactors and threads.
#[derive(Debug)]
pub struct Registry {
    reactors: Box<[ReactorEntry]>,
    notifiers: Arc<[Notifier]>,
    threads: Mutex<Vec<Arc<ThreadCounters>>>,
    /// Held while a request to a thread is made, until its reactor has been notified.
    steering: Mutex<()>,
    /// Undelivered messages whose senders have ended and whose receivers were full.
    undelivered: Mutex<Vec<(ThreadHandle, Message)>>,
    events: EventLog,
    next_thread: AtomicU32,
    next_number: AtomicU64,
    has_watchdog: AtomicBool,
}

/// Reactor number: an index, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReactorId(pub u32);

/// Thread number. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId(pub u32);

/// A thread was not spawned.
#[derive(Debug)]
pub struct SpawnError {
    /// Reason.
    pub reason: ReactorError,
    /// Its builder.
    pub builder: Box<ThreadBuilder>,
}

/// Command to a reactor.
pub(crate) enum ReactorCommand {
    /// Take over this thread.
    AddThread(Box<LightThread>),
    /// Process the pending request of a thread: migrate, stay or end.
    RecheckThread(ThreadId),
    /// Change the poll mode.
    SetPoll(PollMode),
    /// End all threads, then stop.
    Stop,
}

#[derive(Debug)]
struct ReactorEntry {
    record: Arc<ReactorCounters>,
    inbox: Sender<ReactorCommand>,
}

impl Registry {
    pub(crate) fn new(
        reactors: Vec<(Arc<ReactorCounters>, Sender<ReactorCommand>, Notifier)>,
        events: usize,
    ) -> Self {
        let mut bells = Vec::with_capacity(reactors.len());
        let entry = |(record, inbox, waker)| {
            bells.push(waker);
            ReactorEntry { record, inbox }
        };
        let reactors = reactors.into_iter().map(entry).collect();
        Self {
            reactors,
            notifiers: bells.into(),
            threads: Mutex::default(),
            steering: Mutex::default(),
            undelivered: Mutex::default(),
            events: EventLog::new(events),
            next_thread: AtomicU32::new(0),
            next_number: AtomicU64::new(1),
            has_watchdog: AtomicBool::new(false),
        }
    }

    /// Starts a thread on the reactor that its builder names, or on the reactor with the fewest
    /// threads among those that its mask permits.
    pub fn spawn(&self, plan: ThreadBuilder) -> Result<ThreadHandle, SpawnError> {
        let refuse = |why, plan| SpawnError { reason: why, builder: Box::new(plan) };
        let home = match self.choose_reactor(&plan.name, plan.mask.as_ref(), plan.reactor) {
            Ok(home) => home,
            Err(why) => return Err(refuse(why, plan)),
        };
        if let Err(why) = plan.check_poll_mode(self.reactors[home.index()].record.poll_mode()) {
            return Err(refuse(why, plan));
        }
        let id = ThreadId(self.next_thread.fetch_add(1, Ordering::Relaxed));
        let thread = LightThread::new(plan, id, home, Arc::clone(&self.notifiers), self);
        let record = Arc::clone(thread.thread_counters());
        match self.send_command(home, ReactorCommand::AddThread(Box::new(thread))) {
            Ok(()) => {
                let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|thread| !thread.mail.is_closed());
                threads.push(Arc::clone(&record));
                Ok(ThreadHandle(record))
            }
            Err((why, ReactorCommand::AddThread(thread))) => {
                Err(refuse(why, thread.into_builder()))
            }
            Err(_) => unreachable!("an order that is refused is given back"),
        }
    }

    /// Migrates a thread to another reactor.
    ///
    /// The migration has been requested when this returns, and takes place once all pollers of the
    /// thread have detached; an event reports it. It replaces a migration in progress: a thread
    /// that is moved to its current reactor stays there. Rejected at once if one of its pollers is
    /// [pinned](crate::PollerBuilder::pinned).
    pub fn migrate_thread(&self, thread: ThreadId, to: ReactorId) -> Result<(), ReactorError> {
        let _alone = self.lock_migrations();
        let record = self.thread_counters(thread)?;
        let core = self.reactor_entry(to)?.record.core;
        if let Some(mask) = record.lock_mask().as_ref().filter(|mask| !mask.contains(core)) {
            let (thread, mask) = (record.name.clone(), mask.clone());
            return Err(ReactorError::MaskOutside {
                thread,
                mask,
                cores: CpuList::from_iter([core]),
            });
        }
        self.request_migration(&record, to)
    }

    /// Migrates a thread regardless of its mask.
    pub(crate) fn force_migration(
        &self,
        thread: ThreadId,
        to: ReactorId,
    ) -> Result<(), ReactorError> {
        let _alone = self.lock_migrations();
        self.request_migration(&*self.thread_counters(thread)?, to)
    }

    /// Changes the cores on which a thread may run; `None` permits all.
    ///
    /// If it is on, or migrating to, a reactor that is no longer permitted, it stays on its current
    /// one if that is permitted, else it migrates, as by [`migrate_thread`](Self::migrate_thread), to the
    /// permitted reactor with the fewest threads. Returns its future reactor. Rejected, with
    /// nothing changed, if no reactor runs on one of these cores.
    pub fn set_thread_mask(
        &self,
        thread: ThreadId,
        mask: Option<CpuList>,
    ) -> Result<ReactorId, ReactorError> {
        let _alone = self.lock_migrations();
        let record = self.thread_counters(thread)?;
        let place = |reactor| self.choose_reactor(&record.name, mask.as_ref(), reactor);
        let wanted = record.requested_reactor();
        // In order of preference: the requested reactor, the current one, any permitted one.
        let stays = place(Some(wanted)).or_else(|_| place(Some(record.current_reactor())));
        let home = stays.or_else(|_| place(None))?;
        if home != wanted {
            self.request_migration(&record, home)?;
        }
        *record.lock_mask() = mask;
        Ok(home)
    }

    /// Ends a thread, once all of its pollers have detached or a time limit has passed.
    pub fn end_thread(&self, thread: ThreadId) -> Result<(), ReactorError> {
        let _alone = self.lock_migrations();
        let record = self.thread_counters(thread)?;
        let before = record.swap_end_requested(true);
        // If its reactor cannot be notified, the previous request is restored.
        self.notify_reactor(&record).inspect_err(|_| _ = record.swap_end_requested(before))
    }

    /// Requests that a thread runs on a reactor, and notifies it.
    fn request_migration(
        &self,
        record: &ThreadCounters,
        to: ReactorId,
    ) -> Result<(), ReactorError> {
        let pollers = record.lock_pollers();
        let tied = pollers.iter().find_map(|poller| Some((poller, poller.pinned?)));
        if let Some((poller, reason)) = tied.filter(|_| to != record.current_reactor()) {
            let (thread, poller) = (record.name.clone(), poller.name.clone());
            return Err(ReactorError::Pinned { thread, poller, reason });
        }
        drop(pollers);
        let before = record.request_migration(to);
        // If its reactor cannot be notified, the previous request is restored.
        self.notify_reactor(record).inspect_err(|_| _ = record.request_migration(before))
    }

    /// Makes a thread process its pending request.
    fn notify_reactor(&self, record: &ThreadCounters) -> Result<(), ReactorError> {
        match self
            .send_command(record.reactor_to_notify(), ReactorCommand::RecheckThread(record.id))
        {
            // It was migrating there; it processes the request when it has come back.
            Ok(()) | Err((ReactorError::Stopped(_), _)) => Ok(()),
            Err((why, _)) => Err(why),
        }
    }

    fn lock_migrations(&self) -> MutexGuard<'_, ()> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the poll mode of a reactor. Rejected if it would sleep with a poller that nothing
    /// wakes.
    pub fn set_poll_mode(&self, reactor: ReactorId, mode: PollMode) -> Result<(), ReactorError> {
        self.check_poll_mode(reactor, mode)?;
        self.send_command(reactor, ReactorCommand::SetPoll(mode)).map_err(|(why, _)| why)
    }

    /// Changes the poll mode of all reactors. Rejected, with nothing changed, if one would sleep
    /// with a poller that nothing wakes. Returns the reactors that were not reached, with the
    /// reason: stopped, or inbox full.
    pub fn set_poll_mode_of_all(
        &self,
        mode: PollMode,
    ) -> Result<Vec<(ReactorId, ReactorError)>, ReactorError> {
        self.reactors().try_for_each(|reactor| self.check_poll_mode(reactor, mode))?;
        let tell = |reactor| match self.send_command(reactor, ReactorCommand::SetPoll(mode)) {
            Ok(()) => None,
            Err((why, _)) => Some((reactor, why)),
        };
        Ok(self.reactors().filter_map(tell).collect())
    }

    fn check_poll_mode(&self, reactor: ReactorId, mode: PollMode) -> Result<(), ReactorError> {
        self.reactor_entry(reactor)?;
        if mode != PollMode::Always
            && let Some(poller) = self.name_of_poller_without_wake(reactor)
        {
            return Err(ReactorError::NoWakeSource { poller, mode });
        }
        Ok(())
    }

    /// Makes a reactor end all of its threads and then stop.
    pub fn stop_reactor(&self, reactor: ReactorId) -> Result<(), ReactorError> {
        self.reactor_entry(reactor)?;
        self.send_command(reactor, ReactorCommand::Stop).map_err(|(why, _)| why)
    }

    /// Reactor numbers.
    pub fn reactors(&self) -> impl Iterator<Item = ReactorId> + use<> {
        (0..u32::try_from(self.reactors.len()).unwrap_or(u32::MAX)).map(ReactorId)
    }

    /// Reactor of this core.
    pub fn reactor_on(&self, core: u32) -> Option<ReactorId> {
        self.reactors().find(|reactor| self.reactors[reactor.index()].record.core == core)
    }

    /// Thread with this number.
    pub fn find_thread(&self, thread: ThreadId) -> Option<ThreadHandle> {
        self.thread_counters(thread).ok().map(ThreadHandle)
    }

    /// Events from sequence number `from` on.
    pub fn events_since(&self, from: u64) -> EventBatch {
        self.events.events_since(from)
    }

    /// Samples all statistics. Costs their writers nothing.
    pub fn sample_statistics(&self, now: Instant) -> StatisticsSample {
        let records = self.live_threads();
        let threads: Vec<_> = records.iter().map(|record| sample_thread(record, now)).collect();
        let name = |number| poller_name_of(&records, number);
        let reactor =
            |id: ReactorId| sample_reactor(id, &self.reactors[id.index()].record, now, name);
        StatisticsSample { at: now, reactors: self.reactors().map(reactor).collect(), threads }
    }

    /// Samples the input of a balancer.
    pub(crate) fn sample_loads(&self, now: Instant) -> LoadSnapshot {
        let reactor =
            |id: ReactorId| ReactorUsage::from_counters(id, &self.reactors[id.index()].record);
        let mut threads: Vec<_> =
            self.live_threads().iter().map(|record| ThreadUsage::from_counters(record)).collect();
        // Two threads that were spawned concurrently may be in either order.
        threads.sort_unstable_by_key(|thread| thread.id);
        LoadSnapshot { at: now, reactors: self.reactors().map(reactor).collect(), threads }
    }

    /// Number of iterations that a reactor has started.
    pub(crate) fn iterations_of(&self, reactor: ReactorId) -> u64 {
        self.reactors.get(reactor.index()).map_or(0, |entry| entry.record.iterations.get())
    }

    /// Whether a reactor is asleep now.
    pub(crate) fn is_reactor_asleep(&self, reactor: ReactorId) -> bool {
        let sleeping = |entry: &ReactorEntry| entry.record.sleeping.load(Ordering::Relaxed);
        self.reactors.get(reactor.index()).is_some_and(sleeping)
    }

    /// Number of the poller or mailbox that runs on a reactor, or ran last.
    pub(crate) fn running_account(&self, reactor: ReactorId) -> u64 {
        self.reactors.get(reactor.index()).map_or(0, |entry| entry.record.running.get())
    }

    /// Name of the poller that runs on a reactor, or ran last.
    pub fn running_poller_name(&self, reactor: ReactorId) -> Option<String> {
        poller_name_of(&self.live_threads(), self.running_account(reactor))
    }

    /// What runs on a reactor, or ran last, with the name of its thread.
    pub(crate) fn describe_running(&self, reactor: ReactorId) -> Option<String> {
        let number = self.running_account(reactor);
        self.live_threads().iter().find_map(|thread| {
            if thread.mailbox_number == number {
                return Some(format!("a message to thread '{}'", thread.name));
            }
            let pollers = thread.lock_pollers();
            let poller = pollers.iter().find(|poller| poller.number == number)?;
            Some(format!("poller '{}' of thread '{}'", poller.name, thread.name))
        })
    }

    /// The poller or mailbox with this number, unless a lock would have to be waited for: for a report of a
    /// panic, which may have interrupted the owner of the lock.
    pub(crate) fn account_if_free(&self, number: u64) -> Option<SlowIterationCause> {
        let threads = self.threads.try_lock().ok()?;
        threads.iter().find_map(|thread| {
            if thread.mailbox_number == number {
                return Some(SlowIterationCause::Message(thread.name.clone()));
            }
            let pollers = thread.try_lock_pollers()?;
            let poller = pollers.iter().find(|poller| poller.number == number)?;
            Some(SlowIterationCause::Poller(poller.name.clone()))
        })
    }

    /// Name of a thread, unless a lock would have to be waited for.
    pub(crate) fn thread_name_if_free(&self, thread: ThreadId) -> Option<String> {
        let threads = self.threads.try_lock().ok()?;
        threads.iter().find(|record| record.id == thread).map(|record| record.name.clone())
    }

    /// Records which thread runs a reactor.
    pub(crate) fn set_os_thread(&self, reactor: ReactorId, OsThreadId(thread): OsThreadId) {
        if let Some(entry) = self.reactors.get(reactor.index()) {
            entry.record.os_thread.store(thread, Ordering::Relaxed);
        }
    }

    /// The thread that runs a reactor, unless it is simulated.
    pub(crate) fn os_thread_of(&self, reactor: ReactorId) -> Option<OsThreadId> {
        let thread = self.reactors.get(reactor.index())?.record.os_thread.load(Ordering::Relaxed);
        (thread != 0).then_some(OsThreadId(thread))
    }

    /// Whether a thread of these reactors observes them.
    pub fn has_watchdog(&self) -> bool {
        self.has_watchdog.load(Ordering::Relaxed)
    }

    pub(crate) fn set_watchdog(&self) {
        self.has_watchdog.store(true, Ordering::Relaxed);
    }

    /// Whether a reactor has stopped and accepts no commands.
    pub(crate) fn has_reactor_ended(&self, reactor: ReactorId) -> bool {
        self.reactors.get(reactor.index()).is_none_or(|entry| entry.inbox.is_closed())
    }

    pub(crate) fn record_event(&self, at: Instant, event: Event) {
        flight_recorder::record_reactor_event(at, &event);
        self.events.append(at, event);
    }

    /// Leaves an undelivered message to the next reactor that retries such messages.
    pub(crate) fn requeue_message(&self, to: ThreadHandle, message: Message) {
        self.lock_undelivered().push((to, message));
    }

    pub(crate) fn take_undelivered(&self) -> Vec<(ThreadHandle, Message)> {
        std::mem::take(&mut *self.lock_undelivered())
    }

    fn lock_undelivered(&self) -> MutexGuard<'_, Vec<(ThreadHandle, Message)>> {
        self.undelivered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a unique number for a mailbox or a poller.
    pub(crate) fn allocate_account_number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a command to a reactor and wakes it, or returns the command.
    pub(crate) fn send_command(
        &self,
        to: ReactorId,
        order: ReactorCommand,
    ) -> Result<(), (ReactorError, ReactorCommand)> {
        let Some(entry) = self.reactors.get(to.index()) else {
            return Err((self.unknown_reactor_error(to), order));
        };
        match entry.inbox.send(order) {
            Ok(()) => {
                self.notifiers[to.index()].notify();
                Ok(())
            }
            Err(order) if entry.inbox.is_closed() => Err((ReactorError::Stopped(to), order)),
            Err(order) => Err((ReactorError::InboxFull(to), order)),
        }
    }

    /// Reactor for a thread: `reactor` if given, else the one with the fewest threads among those
    /// its mask permits.
    fn choose_reactor(
        &self,
        thread: &str,
        mask: Option<&CpuList>,
        reactor: Option<ReactorId>,
    ) -> Result<ReactorId, ReactorError> {
        let allows = |reactor: &ReactorId| {
            let core = self.reactors[reactor.index()].record.core;
            mask.is_none_or(|mask| mask.contains(core))
        };
        if let Some(reactor) = reactor {
            self.reactor_entry(reactor)?;
            if allows(&reactor) {
                return Ok(reactor);
            }
        } else {
            let homes: Vec<_> =
                self.live_threads().iter().map(|thread| thread.current_reactor()).collect();
            let crowd = |reactor: &ReactorId| homes.iter().filter(|home| *home == reactor).count();
            if let Some(reactor) = self.reactors().filter(allows).min_by_key(crowd) {
                return Ok(reactor);
            }
        }
        let cores = self.reactors.iter().map(|entry| entry.record.core).collect();
        let mask = mask.cloned().unwrap_or_default();
        Err(ReactorError::MaskOutside { thread: thread.to_owned(), mask, cores })
    }

    fn name_of_poller_without_wake(&self, reactor: ReactorId) -> Option<String> {
        let here =
            self.live_threads().into_iter().filter(|thread| thread.current_reactor() == reactor);
        let sleepless = |thread: Arc<ThreadCounters>| {
            let pollers = thread.lock_pollers();
            let poller = pollers.iter().find(|poller| poller.wake == WakeKind::Never)?;
            Some(poller.name.clone())
        };
        here.into_iter().find_map(sleepless)
    }

    fn live_threads(&self) -> Vec<Arc<ThreadCounters>> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().filter(|thread| !thread.mail.is_closed()).cloned().collect()
    }

    fn thread_counters(&self, thread: ThreadId) -> Result<Arc<ThreadCounters>, ReactorError> {
        let found = self.live_threads().into_iter().find(|record| record.id == thread);
        found.ok_or(ReactorError::UnknownThread(thread))
    }

    fn reactor_entry(&self, reactor: ReactorId) -> Result<&ReactorEntry, ReactorError> {
        self.reactors.get(reactor.index()).ok_or_else(|| self.unknown_reactor_error(reactor))
    }

    fn unknown_reactor_error(&self, reactor: ReactorId) -> ReactorError {
        ReactorError::UnknownReactor { reactor, count: self.reactors.len() }
    }
}

impl ReactorId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

fn sample_reactor(
    id: ReactorId,
    record: &ReactorCounters,
    now: Instant,
    name: impl Fn(u64) -> Option<String>,
) -> ReactorSample {
    let busy = record.busy_ns.get();
    let cause = record.longest_attribution.lock().unwrap_or_else(PoisonError::into_inner);
    ReactorSample {
        id,
        core: record.core,
        mode: record.poll_mode(),
        sleeping: record.sleeping.load(Ordering::Relaxed),
        iterations: record.iterations.get(),
        busy: Span { ns: busy },
        idle: Span { ns: now.since(record.started).ns.saturating_sub(busy) },
        sleeps: record.sleeps.get(),
        wakes: record.wakes.get(),
        messages: record.messages.get(),
        migrations: record.migrations.get(),
        slow_iterations: record.slow_iterations.get(),
        longest_iteration: Span { ns: record.longest_iteration_ns.get() },
        longest_attribution: cause.clone(),
        running: name(record.running.get()),
        iteration_started: Instant { ns: record.iteration_started.get() },
    }
}

fn sample_thread(record: &ThreadCounters, now: Instant) -> ThreadSample {
    let busy = record.busy_ns.get();
    let started = Instant { ns: record.started_ns.get() };
    ThreadSample {
        id: record.id,
        name: record.name.clone(),
        home: record.current_reactor(),
        mask: record.lock_mask().clone(),
        node: record.node,
        busy: Span { ns: busy },
        idle: Span { ns: now.since(started).ns.saturating_sub(busy) },
        messages: record.messages.get(),
        migrations: record.migrations.get(),
        channels: record.channels.get(),
        pollers: record.lock_pollers().iter().map(|poller| sample_poller(poller)).collect(),
    }
}

fn sample_poller(record: &PollerCounters) -> PollerSample {
    PollerSample {
        name: record.name.clone(),
        wake: record.wake,
        pinned: record.pinned,
        every: record.every_ns.as_ref().map(|every| Span { ns: every.get() }),
        paused: record.paused.load(Ordering::Relaxed),
        polls: record.polls.get(),
        found: record.found.get(),
        spurious_wakeups: record.spurious_wakeups.get(),
    }
}

/// Name of the poller with this number.
fn poller_name_of(threads: &[Arc<ThreadCounters>], number: u64) -> Option<String> {
    threads.iter().find_map(|thread| {
        let pollers = thread.lock_pollers();
        pollers.iter().find(|poller| poller.number == number).map(|poller| poller.name.clone())
    })
}

impl fmt::Display for ReactorId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl fmt::Display for ThreadId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl fmt::Display for SpawnError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(out)
    }
}

impl std::error::Error for SpawnError {}

impl fmt::Debug for ReactorCommand {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddThread(thread) => write!(out, "Adopt({})", thread.thread_counters().id),
            Self::RecheckThread(thread) => write!(out, "Heed({thread})"),
            Self::SetPoll(mode) => write!(out, "SetPoll({mode})"),
            Self::Stop => out.write_str("Stop"),
        }
    }
}
