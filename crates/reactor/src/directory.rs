//! The directory: who there is, where everybody lives, and how to give a reactor an order.
//!
//! It is shared by all reactors and by whoever watches or steers them. Reactors store plain words
//! into it and take no lock in a turn; the lists behind locks change when somebody comes or goes.

mod loads;
mod record;
mod sample;

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Span};
use host::{Bell, Cores, Sender};

use crate::event::{Event, EventList, Events};
use crate::message::{Handle, Message};
use crate::poller::WakeKind;
use crate::refused::Refused;
use crate::spell::PollMode;
use crate::thread::{LightThread, ThreadPlan};
pub(crate) use loads::{Loads, ReactorTime, ThreadTime};
pub(crate) use record::{PollerRecord, ReactorRecord, ThreadRecord};
pub use sample::{PollerSample, ReactorSample, Sample, ThreadSample};

/// Who there is.
#[derive(Debug)]
pub struct Directory {
    reactors: Box<[Entry]>,
    bells: Arc<[Bell]>,
    threads: Mutex<Vec<Arc<ThreadRecord>>>,
    /// Held by whoever wants something of a thread, until it has been told.
    steering: Mutex<()>,
    /// Messages whose senders are gone and whose receivers had no room.
    strays: Mutex<Vec<(Handle, Message)>>,
    events: EventList,
    next_thread: AtomicU32,
    next_number: AtomicU64,
}

/// A reactor's number: an index, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReactorId(pub u32);

/// A thread's number. Never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId(pub u32);

/// A thread that was not spawned.
#[derive(Debug)]
pub struct NotSpawned {
    /// Why.
    pub why: Refused,
    /// What was to be spawned.
    pub plan: Box<ThreadPlan>,
}

/// What a reactor is told to do.
pub(crate) enum Order {
    /// Take this thread in.
    Adopt(Box<LightThread>),
    /// Have a thread look at what is wanted of it: to move, to stay or to end.
    Heed(ThreadId),
    /// Poll in this way.
    SetPoll(PollMode),
    /// End all threads, and then yourself.
    Stop,
}

#[derive(Debug)]
struct Entry {
    record: Arc<ReactorRecord>,
    inbox: Sender<Order>,
}

impl Directory {
    pub(crate) fn new(
        reactors: Vec<(Arc<ReactorRecord>, Sender<Order>, Bell)>,
        events: usize,
    ) -> Self {
        let mut bells = Vec::with_capacity(reactors.len());
        let entry = |(record, inbox, bell)| {
            bells.push(bell);
            Entry { record, inbox }
        };
        let reactors = reactors.into_iter().map(entry).collect();
        Self {
            reactors,
            bells: bells.into(),
            threads: Mutex::default(),
            steering: Mutex::default(),
            strays: Mutex::default(),
            events: EventList::new(events),
            next_thread: AtomicU32::new(0),
            next_number: AtomicU64::new(1),
        }
    }

    /// Starts a thread where its plan says, or on the reactor with the fewest threads of those that
    /// its mask allows.
    pub fn spawn(&self, plan: ThreadPlan) -> Result<Handle, NotSpawned> {
        let refuse = |why, plan| NotSpawned { why, plan: Box::new(plan) };
        let home = match self.place(&plan.name, plan.mask.as_ref(), plan.reactor) {
            Ok(home) => home,
            Err(why) => return Err(refuse(why, plan)),
        };
        if let Err(why) = plan.check(self.reactors[home.index()].record.mode()) {
            return Err(refuse(why, plan));
        }
        let id = ThreadId(self.next_thread.fetch_add(1, Ordering::Relaxed));
        let thread = LightThread::new(plan, id, home, Arc::clone(&self.bells), self);
        let record = Arc::clone(thread.record());
        match self.order(home, Order::Adopt(Box::new(thread))) {
            Ok(()) => {
                let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|thread| !thread.mail.is_closed());
                threads.push(Arc::clone(&record));
                Ok(Handle(record))
            }
            Err((why, Order::Adopt(thread))) => Err(refuse(why, thread.into_plan())),
            Err(_) => unreachable!("an order that is refused is given back"),
        }
    }

    /// Moves a thread to another reactor. The move has been ordered when this returns, and takes
    /// place once all pollers of the thread have let go; an event tells. It takes the place of a move
    /// that is under way: a thread that is moved to where it still lives stays there. Refused at once
    /// if one of its pollers [is tied](crate::Registration::tied) to where it is.
    pub fn move_thread(&self, thread: ThreadId, to: ReactorId) -> Result<(), Refused> {
        let _alone = self.steering();
        let record = self.record_of(thread)?;
        let core = self.reactor(to)?.record.core;
        if let Some(mask) = record.mask().as_ref().filter(|mask| !mask.contains(core)) {
            let (thread, mask) = (record.name.clone(), mask.clone());
            return Err(Refused::MaskOutside { thread, mask, cores: Cores::from_iter([core]) });
        }
        self.want(&record, to)
    }

    /// Moves a thread wherever its mask says that it may be.
    pub(crate) fn steer(&self, thread: ThreadId, to: ReactorId) -> Result<(), Refused> {
        let _alone = self.steering();
        self.want(&*self.record_of(thread)?, to)
    }

    /// Changes the cores that a thread may live on; without any it may live everywhere. If it lives
    /// elsewhere, or is on its way elsewhere, it is told to stay where it lives or else to move, as by
    /// [`move_thread`](Self::move_thread), to the reactor with the fewest threads of those that are
    /// left. Gives the reactor where it will be. Refused, and nothing is changed, if no reactor has
    /// one of these cores.
    pub fn set_mask(&self, thread: ThreadId, mask: Option<Cores>) -> Result<ReactorId, Refused> {
        let _alone = self.steering();
        let record = self.record_of(thread)?;
        let place = |reactor| self.place(&record.name, mask.as_ref(), reactor);
        let wanted = record.wanted();
        let stays = place(Some(wanted)).or_else(|_| place(Some(record.home())));
        let home = stays.or_else(|_| place(None))?;
        if home != wanted {
            self.want(&record, home)?;
        }
        *record.mask() = mask;
        Ok(home)
    }

    /// Ends a thread, once all of its pollers have let go or a while has passed.
    pub fn end_thread(&self, thread: ThreadId) -> Result<(), Refused> {
        let _alone = self.steering();
        let record = self.record_of(thread)?;
        let before = record.want_end(true);
        self.tell(&record).inspect_err(|_| _ = record.want_end(before))
    }

    /// Wants a thread on a reactor, and has it told.
    fn want(&self, record: &ThreadRecord, to: ReactorId) -> Result<(), Refused> {
        let pollers = record.pollers();
        let tied = pollers.iter().find_map(|poller| Some((poller, poller.tied?)));
        if let Some((poller, reason)) = tied.filter(|_| to != record.home()) {
            let (thread, poller) = (record.name.clone(), poller.name.clone());
            return Err(Refused::Tied { thread, poller, reason });
        }
        drop(pollers);
        let before = record.want(to);
        self.tell(record).inspect_err(|_| _ = record.want(before))
    }

    /// Has a thread look at what is wanted of it.
    fn tell(&self, record: &ThreadRecord) -> Result<(), Refused> {
        match self.order(record.addressee(), Order::Heed(record.id)) {
            // It was on its way there. It looks when it has come back.
            Ok(()) | Err((Refused::Stopped(_), _)) => Ok(()),
            Err((why, _)) => Err(why),
        }
    }

    fn steering(&self) -> MutexGuard<'_, ()> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how a reactor polls. Refused if it would sleep with a poller that nothing wakes.
    pub fn set_poll(&self, reactor: ReactorId, mode: PollMode) -> Result<(), Refused> {
        self.may_poll(reactor, mode)?;
        self.order(reactor, Order::SetPoll(mode)).map_err(|(why, _)| why)
    }

    /// Changes how all reactors poll. Refused, before any of them is told, if one would sleep with a
    /// poller that nothing wakes. Returns those that could not be told, and why: they have ended, or
    /// have no room for orders now.
    pub fn set_poll_of_all(&self, mode: PollMode) -> Result<Vec<(ReactorId, Refused)>, Refused> {
        self.reactors().try_for_each(|reactor| self.may_poll(reactor, mode))?;
        let tell = |reactor| match self.order(reactor, Order::SetPoll(mode)) {
            Ok(()) => None,
            Err((why, _)) => Some((reactor, why)),
        };
        Ok(self.reactors().filter_map(tell).collect())
    }

    fn may_poll(&self, reactor: ReactorId, mode: PollMode) -> Result<(), Refused> {
        self.reactor(reactor)?;
        if mode != PollMode::Always
            && let Some(poller) = self.sleepless_poller(reactor)
        {
            return Err(Refused::NoWakeSource { poller, mode });
        }
        Ok(())
    }

    /// Tells a reactor to end all of its threads and then itself.
    pub fn stop(&self, reactor: ReactorId) -> Result<(), Refused> {
        self.reactor(reactor)?;
        self.order(reactor, Order::Stop).map_err(|(why, _)| why)
    }

    /// The reactors' numbers.
    pub fn reactors(&self) -> impl Iterator<Item = ReactorId> + use<> {
        (0..u32::try_from(self.reactors.len()).unwrap_or(u32::MAX)).map(ReactorId)
    }

    /// The reactor that was meant for this core.
    pub fn reactor_on(&self, core: u32) -> Option<ReactorId> {
        self.reactors().find(|reactor| self.reactors[reactor.index()].record.core == core)
    }

    /// A thread by its number.
    pub fn thread(&self, thread: ThreadId) -> Option<Handle> {
        self.record_of(thread).ok().map(Handle)
    }

    /// What has happened since, from number `from` on.
    pub fn events_since(&self, from: u64) -> Events {
        self.events.since(from)
    }

    /// Looks at all books. Costs nothing to those who write them.
    pub fn sample(&self, now: Instant) -> Sample {
        let records = self.living();
        let threads: Vec<_> = records.iter().map(|record| sample_thread(record, now)).collect();
        let name = |number| name_of(&records, number);
        let reactor =
            |id: ReactorId| sample_reactor(id, &self.reactors[id.index()].record, now, name);
        Sample { at: now, reactors: self.reactors().map(reactor).collect(), threads }
    }

    /// Looks at what a balancer wants to know.
    pub(crate) fn loads(&self, now: Instant) -> Loads {
        let reactor = |id: ReactorId| ReactorTime::of(id, &self.reactors[id.index()].record);
        let mut threads: Vec<_> =
            self.living().iter().map(|record| ThreadTime::of(record)).collect();
        // Two that were spawned at once may stand in either order.
        threads.sort_unstable_by_key(|thread| thread.id);
        Loads { at: now, reactors: self.reactors().map(reactor).collect(), threads }
    }

    /// How many turns a reactor has begun.
    pub(crate) fn turns_of(&self, reactor: ReactorId) -> u64 {
        self.reactors.get(reactor.index()).map_or(0, |entry| entry.record.turns.get())
    }

    /// Whether a reactor sleeps at this moment.
    pub(crate) fn is_asleep(&self, reactor: ReactorId) -> bool {
        let asleep = |entry: &Entry| entry.record.asleep.load(Ordering::Relaxed);
        self.reactors.get(reactor.index()).is_some_and(asleep)
    }

    /// The name of what runs on a reactor, or ran last.
    pub(crate) fn running_on(&self, reactor: ReactorId) -> Option<String> {
        let number = self.reactors.get(reactor.index())?.record.running.get();
        name_of(&self.living(), number)
    }

    /// Whether a reactor takes no orders any more, since it has ended.
    pub(crate) fn has_ended(&self, reactor: ReactorId) -> bool {
        self.reactors.get(reactor.index()).is_none_or(|entry| entry.inbox.is_closed())
    }

    pub(crate) fn note(&self, at: Instant, event: Event) {
        self.events.note(at, event);
    }

    /// Leaves a message that had no room to the next reactor that takes strays.
    pub(crate) fn leave_stray(&self, to: Handle, message: Message) {
        self.strays().push((to, message));
    }

    pub(crate) fn take_strays(&self) -> Vec<(Handle, Message)> {
        std::mem::take(&mut *self.strays())
    }

    fn strays(&self) -> MutexGuard<'_, Vec<(Handle, Message)>> {
        self.strays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a mailbox or a poller, unlike any other.
    pub(crate) fn number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives a reactor an order, and wakes it; or gives the order back.
    pub(crate) fn order(&self, to: ReactorId, order: Order) -> Result<(), (Refused, Order)> {
        let Some(entry) = self.reactors.get(to.index()) else {
            return Err((self.unknown(to), order));
        };
        match entry.inbox.send(order) {
            Ok(()) => {
                self.bells[to.index()].ring();
                Ok(())
            }
            Err(order) if entry.inbox.is_closed() => Err((Refused::Stopped(to), order)),
            Err(order) => Err((Refused::InboxFull(to), order)),
        }
    }

    /// Where a thread may live: on `reactor`, or else on that with the fewest threads of those that
    /// its mask allows.
    fn place(
        &self,
        thread: &str,
        mask: Option<&Cores>,
        reactor: Option<ReactorId>,
    ) -> Result<ReactorId, Refused> {
        let allows = |reactor: &ReactorId| {
            let core = self.reactors[reactor.index()].record.core;
            mask.is_none_or(|mask| mask.contains(core))
        };
        if let Some(reactor) = reactor {
            self.reactor(reactor)?;
            if allows(&reactor) {
                return Ok(reactor);
            }
        } else {
            let homes: Vec<_> = self.living().iter().map(|thread| thread.home()).collect();
            let crowd = |reactor: &ReactorId| homes.iter().filter(|home| *home == reactor).count();
            if let Some(reactor) = self.reactors().filter(allows).min_by_key(crowd) {
                return Ok(reactor);
            }
        }
        let cores = self.reactors.iter().map(|entry| entry.record.core).collect();
        let mask = mask.cloned().unwrap_or_default();
        Err(Refused::MaskOutside { thread: thread.to_owned(), mask, cores })
    }

    fn sleepless_poller(&self, reactor: ReactorId) -> Option<String> {
        let here = self.living().into_iter().filter(|thread| thread.home() == reactor);
        let sleepless = |thread: Arc<ThreadRecord>| {
            let pollers = thread.pollers();
            let poller = pollers.iter().find(|poller| poller.wake == WakeKind::Nothing)?;
            Some(poller.name.clone())
        };
        here.into_iter().find_map(sleepless)
    }

    fn living(&self) -> Vec<Arc<ThreadRecord>> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().filter(|thread| !thread.mail.is_closed()).cloned().collect()
    }

    fn record_of(&self, thread: ThreadId) -> Result<Arc<ThreadRecord>, Refused> {
        let found = self.living().into_iter().find(|record| record.id == thread);
        found.ok_or(Refused::UnknownThread(thread))
    }

    fn reactor(&self, reactor: ReactorId) -> Result<&Entry, Refused> {
        self.reactors.get(reactor.index()).ok_or_else(|| self.unknown(reactor))
    }

    fn unknown(&self, reactor: ReactorId) -> Refused {
        Refused::UnknownReactor { reactor, count: self.reactors.len() }
    }
}

impl ReactorId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

fn sample_reactor(
    id: ReactorId,
    record: &ReactorRecord,
    now: Instant,
    name: impl Fn(u64) -> Option<String>,
) -> ReactorSample {
    let busy = record.busy_ns.get();
    let culprit = record.longest_culprit.lock().unwrap_or_else(PoisonError::into_inner);
    ReactorSample {
        id,
        core: record.core,
        mode: record.mode(),
        asleep: record.asleep.load(Ordering::Relaxed),
        turns: record.turns.get(),
        busy: Span { ns: busy },
        idle: Span { ns: now.since(record.started).ns.saturating_sub(busy) },
        sleeps: record.sleeps.get(),
        wakes: record.wakes.get(),
        messages: record.messages.get(),
        moves: record.moves.get(),
        turns_too_long: record.turns_too_long.get(),
        longest_turn: Span { ns: record.longest_turn_ns.get() },
        longest_culprit: culprit.clone(),
        running: name(record.running.get()),
        turn_began: Instant { ns: record.turn_began.get() },
    }
}

fn sample_thread(record: &ThreadRecord, now: Instant) -> ThreadSample {
    let busy = record.busy_ns.get();
    let started = Instant { ns: record.started_ns.get() };
    ThreadSample {
        id: record.id,
        name: record.name.clone(),
        home: record.home(),
        mask: record.mask().clone(),
        node: record.node,
        busy: Span { ns: busy },
        idle: Span { ns: now.since(started).ns.saturating_sub(busy) },
        messages: record.messages.get(),
        moves: record.moves.get(),
        channels: record.channels.get(),
        pollers: record.pollers().iter().map(|poller| sample_poller(poller)).collect(),
    }
}

fn sample_poller(record: &PollerRecord) -> PollerSample {
    PollerSample {
        name: record.name.clone(),
        wake: record.wake,
        tied: record.tied,
        every: record.every_ns.as_ref().map(|every| Span { ns: every.get() }),
        paused: record.paused.load(Ordering::Relaxed),
        polls: record.polls.get(),
        found: record.found.get(),
        woken_in_vain: record.woken_in_vain.get(),
    }
}

/// The name of the poller with this number.
fn name_of(threads: &[Arc<ThreadRecord>], number: u64) -> Option<String> {
    threads.iter().find_map(|thread| {
        let pollers = thread.pollers();
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

impl fmt::Display for NotSpawned {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(out)
    }
}

impl std::error::Error for NotSpawned {}

impl fmt::Debug for Order {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adopt(thread) => write!(out, "Adopt({})", thread.record().id),
            Self::Heed(thread) => write!(out, "Heed({thread})"),
            Self::SetPoll(mode) => write!(out, "SetPoll({mode})"),
            Self::Stop => out.write_str("Stop"),
        }
    }
}
