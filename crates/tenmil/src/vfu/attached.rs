//! A controller of another process, and the thread that tends it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Answer, Instant, Interrupts, Span};
use dma::{CommandStore, DeviceKind, DevicePool, Region, Regions};
use host::{Bell, Clock, EventVectors, Sleeper, Stop, Thread, Turn, Wait};
use nvme::{
    Controller, ControllerOptions, Event, NamespaceQueue, QueuePairOptions, QueueSizes, Refusal,
    ShutdownNotification, State, Techniques,
};

use super::link::{Link, Offer};
use super::name::VfuName;
use super::reach::SharedReach;
use super::registers::{Register, Registers};
use super::vector::MessageVector;
use crate::Refused;

/// A queue pair of it.
pub(super) type Queue = NamespaceQueue<SharedReach, Register>;

/// A controller and the thread that tends it. It goes with the last medium and channel.
pub(super) struct Attached {
    shared: Arc<Shared>,
    /// Ends before the controller is shut down.
    tender: Option<Thread<()>>,
    bell: Bell,
    pub(super) clock: Clock,
    name: VfuName,
    pub(super) reach: SharedReach,
    /// How many vectors there are, and where their table is; none if it cannot be reached.
    vectors: Option<(u32, u32)>,
    /// Queue pairs may live on when their controller is lost.
    _memory: Arc<Region>,
}

struct Shared {
    kept: Mutex<Kept>,
    link: Link,
}

/// What the lock is around.
struct Kept {
    /// None once it is lost: then its queue pairs have been told.
    controller: Option<Controller<Registers, SharedReach>>,
    /// Answers of admin commands that somebody waits for.
    answers: Vec<Answer>,
    /// Why it is not there any more.
    lost: Option<Refused>,
    /// Vectors that no queue pair has, the next one to be given away last.
    vectors_free: Vec<u16>,
    /// What the others are slept on by.
    vectors_used: BTreeMap<u16, EventVectors>,
}

/// A queue pair, and which vector it has.
pub(super) struct Lent {
    pub(super) queue: Queue,
    pub(super) vector: Option<u16>,
}

/// Entries in the admin queue.
const ADMIN_DEPTH: u32 = 64;
/// Memory for the admin queue, its lists and answers to questions.
const ADMIN_BYTES: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// How long the thread sleeps at most.
const TENDED: Span = Span::from_ms(100);
/// Between two looks while nobody has anything else to do.
const PAUSE: Span = Span::from_us(50);
/// How long a shutdown is waited for.
const SHUTDOWN: Span = Span::from_secs(2);
/// The token of the socket among what the thread sleeps on.
const SOCKET: u64 = 1;

impl Attached {
    /// Connects to whoever serves it, and brings it up. What it is given or asked for lies in
    /// `regions`.
    pub(super) fn call(name: &VfuName, regions: &Regions, clock: Clock) -> Result<Self, Refused> {
        let shown = name.shown();
        let machine = |what: &str, error: &dyn std::fmt::Display| {
            Refused::machine(format!("attach {shown}: {what}: {error}"))
        };
        let (link, offer) = Link::connect(name, regions, clock)?;
        let bytes = usize::try_from(pool_bytes(name)).unwrap_or(usize::MAX);
        let memory = regions.allocate_shared(bytes);
        let memory = memory.map_err(|error| machine("memory for its queues", &error))?;
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let whole = memory.segment();
        let pool = DevicePool::new(regions.clone(), whole, DeviceKind::Emulated, store);
        let peer = |why: String| Refused::peer(format!("attach {shown}: {why}"));
        let reach = SharedReach::new(pool, whole, link.clone()).map_err(peer)?;
        let Offer { doorbells, vectors, table_offset } = offer;
        let registers = Registers::new(link.clone(), regions, doorbells);
        let controller = bring_up(name, registers, &reach, &link, clock)?;
        let mut sleeper = Sleeper::new().map_err(|error| machine("a thread to tend it", &error))?;
        let added = sleeper.sources().add(link.descriptor(), SOCKET);
        added.map_err(|error| machine("a descriptor to wait for", &error))?;
        let queues = controller.queue_pairs_max();
        let vectors = (table_offset > 0 && vectors > 1).then_some((vectors, table_offset));
        let most = vectors.map_or(0, |(count, _)| u16::try_from(count - 1).unwrap_or(u16::MAX));
        let kept = Kept {
            controller: Some(controller),
            answers: Vec::new(),
            lost: None,
            vectors_free: (1..=queues.min(most)).rev().collect(),
            vectors_used: BTreeMap::new(),
        };
        let shared = Arc::new(Shared { kept: Mutex::new(kept), link });
        let (bell, tended) = (sleeper.bell(), Arc::clone(&shared));
        let body = move |stop: &Stop| {
            let mut tender = Tender { shared: tended, stop: stop.clone() };
            host::turn::run(&mut tender, &clock, &mut sleeper);
        };
        let tender = Thread::spawn("tend", None, body);
        let tender = Some(tender.map_err(|error| machine("a thread to tend it", &error))?);
        let (memory, name) = (Arc::new(memory), name.clone());
        Ok(Self { shared, tender, bell, clock, name, reach, vectors, _memory: memory })
    }

    /// A queue pair.
    pub(super) fn queue(&self) -> Result<Lent, Refused> {
        let end = self.clock.now().after(self.name.patience);
        let number = self.shared.lock().vectors_free.pop();
        let lent = self.queue_with(number, end);
        if let (Err(_), Some(number)) = (&lent, number) {
            self.release_vector(number);
        }
        lent
    }

    fn queue_with(&self, number: Option<u16>, end: Instant) -> Result<Lent, Refused> {
        let vector = number.zip(self.vectors).map(|(number, (_, table_offset))| {
            MessageVector::new(&self.shared.link, table_offset, number)
        });
        let vector = vector.transpose().map_err(|why| self.peer(&why))?;
        if let Some((number, vector)) = number.zip(vector.as_ref()) {
            self.shared.lock().vectors_used.insert(number, vector.event());
        }
        let id = self.create(number, end)?;
        loop {
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.link, self.clock.now());
            let controller = kept.controller()?;
            if let Some(pair) = controller.take_queue_pair(id) {
                let limits = controller.identity().map(|identity| identity.limits);
                let namespace = controller.namespace(self.name.namespace);
                let Some((namespace, limits)) = namespace.zip(limits) else {
                    return Err(self.peer("the namespace is not there any more"));
                };
                let view = namespace.view(&limits);
                let queue = NamespaceQueue::new(&self.reach, pair, view, QueueSizes::default());
                let queue = queue.ok_or_else(|| {
                    let text = format!("{}: no memory is left for lists", self.name.shown());
                    Refused::machine(text)
                })?;
                let queue = match vector {
                    Some(vector) => queue.with_vector(Box::new(vector)),
                    None => queue,
                };
                return Ok(Lent { queue, vector: number });
            }
            drop(kept);
            if self.clock.now() >= end {
                return Err(self.peer("a queue pair was not created in time"));
            }
            host::thread::give_way();
        }
    }

    fn create(&self, vector: Option<u16>, end: Instant) -> Result<u16, Refused> {
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.link, now);
            let controller = kept.controller()?;
            if controller.namespace(self.name.namespace).is_none() {
                let ids: Vec<String> =
                    controller.namespaces().map(|known| known.id.to_string()).collect();
                let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
                let (name, number) = (self.name.shown(), self.name.namespace);
                let text = format!("{name}: no namespace {number}, expected one of: {ids}");
                return Err(Refused::caller(text));
            }
            let most = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = (self.name.depth + 1).clamp(2, most);
            let options = QueuePairOptions { depth, vector, techniques: Techniques::default() };
            match controller.create_queue_pair(now, options) {
                Ok(id) => return Ok(id),
                // One whose deletion is under way makes room.
                Err(Refusal::NoQueueLeft { .. } | Refusal::NotReady) if now < end => {}
                Err(refusal) => return Err(self.peer(&refusal.to_string())),
            }
            drop(kept);
            host::thread::give_way();
        }
    }

    /// A queue pair is gone, and its vector is free.
    pub(super) fn release_vector(&self, vector: u16) {
        let mut kept = self.shared.lock();
        kept.vectors_used.remove(&vector);
        kept.vectors_free.push(vector);
    }

    /// How many queue pairs it has.
    pub(super) fn queues_max(&self) -> u32 {
        let mut kept = self.shared.lock();
        kept.controller().map_or(0, |controller| controller.queue_pairs_max().into())
    }

    /// Does something with the controller.
    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(&mut Controller<Registers, SharedReach>) -> T,
    ) -> Result<T, Refused> {
        let mut kept = self.shared.lock();
        let result = work(kept.controller()?);
        drop(kept);
        self.bell.ring();
        Ok(result)
    }

    /// The answer to the owner's admin command with this token.
    pub(super) fn await_answer(&self, token: u64) -> Result<Answer, Refused> {
        let end = self.clock.now().after(Span::from_secs(60));
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.link, now);
            let found = kept.answers.iter().position(|answer| answer.token == token);
            if let Some(at) = found {
                return Ok(kept.answers.swap_remove(at));
            }
            kept.controller()?;
            drop(kept);
            if now >= end {
                return Err(self.peer("an admin command was not answered"));
            }
            host::thread::give_way();
        }
    }

    fn peer(&self, problem: &str) -> Refused {
        Refused::peer(format!("{}: {problem}", self.name.shown()))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(tender) = self.tender.take() {
            tender.stop_flag().stop();
            self.bell.ring();
            // Its own drop waits for the end.
            drop(tender);
        }
        let end = self.clock.now().after(SHUTDOWN);
        let mut kept = self.shared.lock();
        if let Some(controller) = &mut kept.controller {
            // One that cannot be shut down is dropped, and thereby cut off.
            let _ = controller.shut_down(self.clock.now(), ShutdownNotification::Normal);
        }
        let is_going = |kept: &Kept| {
            let state = kept.controller.as_ref().map(Controller::state);
            state == Some(State::ShuttingDown)
        };
        while is_going(&kept) && self.clock.now() < end {
            kept.look_after(&self.shared.link, self.clock.now());
            host::thread::give_way();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn controller(&mut self) -> Result<&mut Controller<Registers, SharedReach>, Refused> {
        let lost = || self.lost.clone().unwrap_or_else(|| Refused::peer("the controller is gone"));
        self.controller.as_mut().ok_or_else(lost)
    }

    fn look_after(&mut self, link: &Link, now: Instant) {
        link.carry();
        if let Some(why) = link.lost() {
            return self.lose(link, &why);
        }
        while let Some(event) = self.controller.as_mut().and_then(|known| known.poll(now)) {
            match event {
                Event::AdminCompleted(answer) => self.answers.push(answer),
                Event::Dead(error) => return self.lose(link, &error.to_string()),
                Event::Removed => return self.lose(link, "the controller is gone"),
                _ => {}
            }
        }
    }

    /// It is not there any more: its queue pairs are told, and answer everything so. Whoever sleeps
    /// on one is woken for it.
    fn lose(&mut self, link: &Link, why: &str) {
        link.lose(why);
        if self.controller.take().is_some() {
            self.lost = Some(Refused::peer(format!("{}: {why}", link.name())));
            self.vectors_used.values_mut().for_each(|event| event.raise(0));
        }
    }
}

/// What the thread does.
struct Tender {
    shared: Arc<Shared>,
    stop: Stop,
}

impl Turn for Tender {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() {
            return Wait::Ended;
        }
        let mut kept = self.shared.lock();
        kept.look_after(&self.shared.link, now);
        match &kept.controller {
            None => Wait::Ended,
            Some(controller) => Wait::Until(controller.wake_at().min(now.after(TENDED))),
        }
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.stop.is_stopped()
    }

    fn woken(&mut self, _: &[u64]) {}
}

/// Waits until the controller is ready. Every wait on the way has an end.
fn bring_up(
    name: &VfuName,
    registers: Registers,
    reach: &SharedReach,
    link: &Link,
    clock: Clock,
) -> Result<Controller<Registers, SharedReach>, Refused> {
    let refuse = |why: String| Refused::peer(format!("attach {}: {why}", name.shown()));
    let options = ControllerOptions {
        admin_depth: ADMIN_DEPTH,
        queue_pairs: name.queues,
        shadow_doorbells: true,
        ..ControllerOptions::default()
    };
    let mut controller = Controller::new(registers, reach.clone(), options)
        .map_err(|error| refuse(error.to_string()))?;
    loop {
        link.carry();
        if let Some(why) = link.lost() {
            return Err(refuse(why));
        }
        match controller.poll(clock.now()) {
            Some(Event::Ready) => return Ok(controller),
            Some(Event::Dead(error)) => return Err(refuse(error.to_string())),
            Some(Event::Removed) => return Err(refuse("the controller is gone".to_owned())),
            Some(_) => {}
            None => host::thread::rest(PAUSE),
        }
    }
}

/// Memory for the queues and lists of one controller; what is not used is not there.
fn pool_bytes(name: &VfuName) -> u64 {
    let entries = u64::from(name.depth) + 1;
    let queue = entries * (64 + 16 + PAGE) + 4 * PAGE;
    (ADMIN_BYTES + u64::from(name.queues) * queue).min(u64::from(u32::MAX) & !(PAGE - 1))
}
