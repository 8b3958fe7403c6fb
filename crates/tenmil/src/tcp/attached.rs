//! An SSD that was called, and the thread that tends it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Span};
use dma::{CommandStore, DeviceKind, DevicePool, Region, Regions};
use host::{Clock, Stop, Turn, Wait};
use nvme::{ControllerOptions, Event, ResetCause, ShutdownNotification, State};
use remote::{Calling, NotReached, Policy, Remote, RemoteQueue, Sleep};

use super::channel::Queues;
use super::dial::Caller;
use super::name::TcpName;
use super::reservations::{ReservationQueue, ReservedNamespace};
use super::sleep::Pillow;
use super::teller::Teller;
use super::tending::{TenderBed, TendingThread, wait_for_shutdown};
use super::wanted::WantedQueues;
use crate::Refused;
use crate::growth::Growth;

/// An SSD and the thread that tends it. It goes with the last medium and channel.
pub(super) struct Attached {
    shared: Arc<Shared>,
    /// Ends before the SSD is shut down.
    thread: TendingThread,
    pub(super) clock: Clock,
    name: TcpName,
    growth: Arc<Growth>,
    regions: Regions,
    /// Queue pairs may live on when their SSD is lost.
    _memory: Arc<Region>,
}

struct Shared {
    remote: Mutex<Kept>,
}

/// What the lock is around.
struct Kept {
    remote: Remote,
    /// Answers of admin commands that somebody waits for.
    answers: Vec<base::Answer>,
    /// Queue pairs that channels wait for.
    wanted: WantedQueues,
    /// Why it is not there any more.
    lost: Option<String>,
    pulse: Pulse,
    /// Since when it is away, while it is.
    away_since: Option<Instant>,
    teller: Teller,
    namespace: u32,
    growth: Arc<Growth>,
}

/// What has happened to an SSD, or to whatever else was called.
#[derive(Clone, Debug, Default)]
pub(super) struct Pulse {
    /// How often it has said that a log page holds something new.
    pub(super) notices: u64,
    /// How often it was lost, and how often it came back.
    pub(super) losses: u64,
    pub(super) returns: u64,
    /// Why it is away, while it is.
    pub(super) away: Option<String>,
}

/// Pages for the admin queue and its lists.
const ADMIN_BYTES: u64 = 256 << 10;
const PAGE: u64 = 4096;
/// How long the thread sleeps at most.
const TENDED: Span = Span::from_ms(100);

impl Attached {
    /// Calls the SSD and brings it up. What it is given or asked for lies in `regions`.
    pub(super) fn call(name: &TcpName, regions: &Regions, clock: Clock) -> Result<Self, Refused> {
        let machine = |what: &str, error: &dyn std::fmt::Display| {
            Refused::machine(format!("call tcp://{}: {what}: {error}", name.address))
        };
        let memory = regions
            .allocate(usize::try_from(pool_bytes(name)).unwrap_or(usize::MAX))
            .map_err(|error| machine("memory for its queues", &error))?;
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory.segment(), DeviceKind::Emulated, store);
        pool.map_on_use();
        let bed = TenderBed::make(name)?;
        let teller = Teller::new(name);
        let remote = bring_up(name, pool, regions, &clock, &teller)?;
        teller.tell_only_up();
        let (answers, wanted, pulse) = (Vec::new(), WantedQueues::new(name), Pulse::default());
        let (namespace, growth) = (name.namespace, Arc::new(Growth::default()));
        let kept = Kept {
            remote,
            answers,
            wanted,
            lost: None,
            pulse,
            away_since: None,
            teller,
            namespace,
            growth: Arc::clone(&growth),
        };
        let shared = Arc::new(Shared { remote: Mutex::new(kept) });
        let tended = Arc::clone(&shared);
        shared.lock().remote.wakes(bed.bell());
        let thread = bed.begin(name, clock, |stop, pillow| Tender {
            shared: tended,
            stop,
            pillow,
            watched: 0,
        })?;
        let memory = Arc::new(memory);
        let regions = regions.clone();
        Ok(Self { shared, thread, clock, name: name.clone(), growth, regions, _memory: memory })
    }

    /// Does something with the controller.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Remote) -> T) -> T {
        let result = work(&mut self.shared.lock().remote);
        self.thread.wake();
        result
    }

    /// What has happened so far.
    ///
    /// # Errors
    ///
    /// If it is not there any more.
    pub(super) fn pulse(&self) -> Result<Pulse, Refused> {
        let mut kept = self.shared.lock();
        kept.look_after(self.clock.now());
        kept.check(&self.name)?;
        Ok(kept.pulse.clone())
    }

    /// The answer to the owner's admin command with this token.
    pub(super) fn await_answer(&self, token: u64) -> Result<base::Answer, Refused> {
        let end = self.clock.now().after(Span::from_secs(60));
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.look_after(now);
            let found = kept.answers.iter().position(|answer| answer.token == token);
            if let Some(at) = found {
                return Ok(kept.answers.swap_remove(at));
            }
            kept.check(&self.name)?;
            drop(kept);
            if now >= end {
                return Err(self.peer("an admin command was not answered"));
            }
            host::thread::give_way();
        }
    }

    fn peer(&self, problem: &str) -> Refused {
        Refused::peer(format!("tcp://{}: {problem}", self.name.address))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.thread.end();
        let mut kept = self.shared.lock();
        // One that cannot be shut down is dropped, and thereby left.
        let now = self.clock.now();
        let _ = kept.remote.controller().shut_down(now, ShutdownNotification::Normal);
        wait_for_shutdown(&self.clock, |now| {
            kept.look_after(now);
            kept.remote.controller().state() == State::ShuttingDown
        });
    }
}

impl Queues for Attached {
    type Queue = RemoteQueue;
    type Ticket = u64;

    fn open_queue(&self) -> Result<u64, Refused> {
        let mut kept = self.shared.lock();
        kept.look_after(self.clock.now());
        kept.check(&self.name)?;
        kept.check_namespace(&self.name)?;
        let ticket = kept.wanted.open();
        drop(kept);
        self.thread.wake();
        Ok(ticket)
    }

    /// A queue pair with a connection of its own.
    fn take_queue(&self, ticket: u64) -> Result<Option<RemoteQueue>, Refused> {
        let mut kept = self.shared.lock();
        kept.look_after(self.clock.now());
        kept.check(&self.name)?;
        let Kept { remote, wanted, .. } = &mut *kept;
        wanted.take(ticket, remote).map_err(|why| self.peer(&why))
    }

    fn close_queue(&self, ticket: u64) {
        self.shared.lock().wanted.close(ticket);
    }

    fn is_up(&self) -> bool {
        let kept = self.shared.lock();
        kept.away_since.is_none() && kept.lost.is_none()
    }

    fn with_sleep(queue: RemoteQueue, sleep: Box<dyn Sleep>) -> RemoteQueue {
        queue.with_sleep(sleep)
    }

    fn clock(&self) -> (&Clock, &Policy) {
        (&self.clock, &self.name.options.policy)
    }

    fn address(&self) -> &str {
        &self.name.address
    }

    fn queues_max(&self) -> u32 {
        self.shared.lock().remote.controller().queue_pairs_max().into()
    }

    fn takes_lent(&self) -> Result<u32, String> {
        self.name.takes_lent()
    }

    fn identity(&self) -> Option<String> {
        self.shared.lock().remote.namespace_name(self.name.namespace)
    }

    fn reserved(&self) -> Option<ReservedNamespace> {
        let mut kept = self.shared.lock();
        let nsid = self.name.namespace;
        let rescap = kept.remote.controller().namespace(nsid)?.reservations;
        drop(kept);
        ReservedNamespace::of(&self.name, rescap, &self.regions, self.clock)
    }

    fn reservation_queue(&self) -> Result<ReservationQueue, Refused> {
        if let Ok(queue) = self.queue() {
            return Ok(ReservationQueue { queue, _attached: None });
        }
        // All queues of this controller are in use: the host may have another controller.
        let name = self.name.to_one_queue();
        ReservationQueue::of(Self::call(&name, &self.regions, self.clock)?)
    }

    fn growth(&self) -> &Growth {
        &self.growth
    }

    fn abandon(&self, queue: &mut RemoteQueue) -> bool {
        queue.abandon(self.clock.now())
    }
}

impl Pulse {
    /// Whether it is away, and was not, or came back between.
    pub(super) const fn is_newly_away(&self, before: &Self) -> bool {
        self.away.is_some() && self.losses > before.losses
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn look_after(&mut self, now: Instant) {
        while let Some(event) = self.remote.poll(now) {
            match event {
                Event::AdminCompleted(answer) => self.answers.push(answer),
                Event::QueuePairRefused { id, status } => {
                    let why = self.remote.why().unwrap_or_else(|| status.to_string());
                    self.wanted.refused(now, id, &why);
                }
                Event::Dead(error) => self.lose(error.to_string()),
                Event::Removed => {
                    let why = self.remote.why();
                    self.lose(why.unwrap_or_else(|| "the controller is gone".to_owned()));
                }
                Event::Notice { .. } => self.pulse.notices += 1,
                Event::NamespaceResized { id, to_blocks, .. } if id == self.namespace => {
                    self.growth.has_now(to_blocks);
                }
                Event::ResetStarted { cause } => {
                    let lie = match cause {
                        ResetCause::Lie(lie) => Some(lie.to_string()),
                        _ => None,
                    };
                    let is_other = lie.is_some() && self.pulse.away != lie;
                    let why = lie.or_else(|| self.remote.why());
                    let why = why.unwrap_or_else(|| "it is being reset".to_owned());
                    // Some more resets may follow before it is there again.
                    if self.away_since.is_none() || is_other {
                        self.away_since.get_or_insert(now);
                        self.teller.tell_only_away(&why);
                    }
                    self.pulse.away = Some(why);
                    self.pulse.losses += 1;
                }
                Event::Recovered => {
                    let since = self.away_since.take().unwrap_or(now);
                    self.teller.tell_only_back(now.since(since));
                    self.pulse.away = None;
                    self.pulse.returns += 1;
                }
                event => self.teller.tell_of_controller(event),
            }
        }
        self.wanted.create(now, &mut self.remote);
    }

    fn lose(&mut self, why: String) {
        self.teller.tell_only_gone(&why);
        self.lost = Some(why);
    }

    fn check(&mut self, name: &TcpName) -> Result<(), Refused> {
        match &self.lost {
            Some(why) => Err(Refused::peer(format!("tcp://{}: {why}", name.address))),
            None => Ok(()),
        }
    }

    fn check_namespace(&mut self, name: &TcpName) -> Result<(), Refused> {
        let controller = self.remote.controller();
        if controller.namespace(name.namespace).is_some() {
            return Ok(());
        }
        let ids: Vec<String> = controller.namespaces().map(|known| known.id.to_string()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        Err(Refused::caller(format!(
            "tcp://{}: no namespace {} in {}, expected one of: {ids}",
            name.address, name.namespace, name.options.subsystem
        )))
    }
}

/// What the thread does.
struct Tender {
    shared: Arc<Shared>,
    stop: Stop,
    pillow: Pillow,
    /// Which connection is watched, by its number.
    watched: u64,
}

impl Turn for Tender {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() {
            return Wait::Ended;
        }
        let mut kept = self.shared.lock();
        kept.look_after(now);
        Wait::Until(kept.remote.wake_at(now).min(now.after(TENDED)))
    }

    fn arm(&mut self, _: Instant) -> bool {
        let mut kept = self.shared.lock();
        let number = kept.remote.counts().connected;
        if number != self.watched && self.pillow.watch(kept.remote.wake_source()) {
            self.watched = number;
        }
        self.stop.is_stopped() || kept.remote.arm()
    }

    fn woken(&mut self, _: &[u64]) {
        self.shared.lock().remote.disarm();
    }
}

/// Calls, and waits until the controller is ready. Every wait on the way has an end.
fn bring_up(
    name: &TcpName,
    pool: DevicePool,
    regions: &Regions,
    clock: &Clock,
    teller: &Teller,
) -> Result<Remote, Refused> {
    let refuse = |error: &NotReached| Refused::of(error.blame(), error.to_string());
    let dial = Box::new(Caller::new(&name.address, regions, &name.sockets));
    let wishes = ControllerOptions { queue_pairs: name.queues, ..ControllerOptions::default() };
    let options = name.options.clone();
    let mut calling =
        Calling::begin(pool, dial, options, wishes, clock.now()).map_err(|error| refuse(&error))?;
    let mut remote = loop {
        if let Some(ended) = calling.turn(clock.now()) {
            break ended.map_err(|error| refuse(&error))?;
        }
        host::thread::rest(PAUSE);
    };
    loop {
        match remote.poll(clock.now()) {
            Some(Event::Ready) => return Ok(remote),
            Some(Event::Dead(error)) => {
                let why = remote.why().unwrap_or_else(|| error.to_string());
                return Err(Refused::peer(format!("call tcp://{}: {why}", name.address)));
            }
            Some(Event::Removed) => {
                let why = remote.why().unwrap_or_else(|| ALL_ONES.to_owned());
                return Err(Refused::peer(format!("call tcp://{}: {why}", name.address)));
            }
            Some(event) => teller.tell_of_controller(event),
            None => host::thread::rest(PAUSE),
        }
    }
}

/// Why a controller is taken for gone that was not lost.
const ALL_ONES: &str = "a register reads as ones, expected the value of a controller that is there";

/// Between two looks while nobody has anything else to do.
const PAUSE: Span = Span::from_us(50);

/// Memory for the queues and lists of one SSD; what is not used is not there.
pub(super) fn pool_bytes(name: &TcpName) -> u64 {
    let entries = u64::from(name.depth) + 1;
    let queue = entries * (64 + 16 + PAGE) + 4 * PAGE;
    ADMIN_BYTES + u64::from(name.queues) * queue
}
