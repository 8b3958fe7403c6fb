//! A controller that the driver reaches over some bus, and the thread that tends it.
//!
//! ```text
//!   AttachedMedium, AttachedChannel, … ─▶ Attached ── nvme::Controller (locked to make a queue, or to tend)
//!                                           └── a thread that tends: what the bus says, time-outs, removal
//! ```

mod ask;
mod channel;
mod reach;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{
    Answer, BarPart, Doorbell, Instant, Interrupts, Mmio, NoDeviceMemory, RegionId, Segment, Span,
    Vector,
};
use block::uri::{Fields, Uri, UriError};
use block::{Existing, MediumError, Opened};
use dma::{DeviceKind, NoRegion, Region, Regions};
use host::{Bell, Clock, EventVectors, Sleeper, Steps, Stop, Thread, Turn, Wait};
use nvme::{
    Controller, ControllerError, ControllerOptions, Event, MemoryBufferUse, NamespaceQueue,
    QueuePair, QueuePairOptions, QueueSizes, Refusal, ShutdownNotification, State, Techniques,
};

use self::channel::AttachedMedium;
use self::reach::{Home, Reach};
use crate::Refused;
use crate::growth::Growth;

pub(crate) use self::ask::with_controller;

/// What a controller is reached by. Cheap to clone; every clone is the same way.
pub(crate) trait Bus: Clone + Send + Sync + 'static {
    /// Its registers.
    type Registers: Mmio<Doorbell = Self::Doorbell> + Send + 'static;
    /// One of its doorbells.
    type Doorbell: Doorbell + Send + 'static;

    /// How it looks at memory.
    const KIND: DeviceKind;

    /// What the device is called.
    fn name(&self) -> &str;

    /// What it is, in a line.
    fn what(&self) -> &'static str;

    /// Its registers, once.
    fn registers(&self) -> Self::Registers;

    /// What becomes readable when [`carry`](Self::carry) has something to do.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Takes what has come.
    fn carry(&self);

    /// Why it is over, if it is.
    fn lost(&self) -> Option<String>;

    /// Ends it.
    fn lose(&self, why: &str);

    /// Memory that it can be shown, for its queues.
    fn allocate(&self, regions: &Regions, len_bytes: usize) -> Result<Region, NoRegion> {
        regions.allocate_shared(len_bytes)
    }

    /// Lets the device reach a region, if it does not yet, and says where it finds it.
    fn show(&self, region: RegionId) -> Result<u64, Refused>;

    /// Takes a region away. True once the device does not reach it.
    fn hide(&self, region: RegionId) -> bool;

    /// Keeps the device from all memory. True once it reaches none. If it was [lost](Self::lose)
    /// before, it is let go of, too.
    fn cut_off(&self) -> bool;

    /// Lets it reach again what it was kept from.
    fn reconnect(&self);

    /// Maps a part of one of its BARs, in which it has memory of its own, once. Also the address at
    /// which it lies for the device.
    fn device_memory(&self, part: BarPart) -> Result<(Segment, u64), NoDeviceMemory> {
        let _ = part;
        Err(NoDeviceMemory::Unusable { why: "it is not on the PCI bus" })
    }

    /// Whether its doorbells are memory that the device looks at by itself: ringing one there is a
    /// store, and a shadow beside it would only cost a barrier.
    fn maps_doorbells(&self) -> bool {
        false
    }

    /// How many vectors there are that can be slept on.
    fn vectors(&self) -> u32;

    /// Vector `number`, and what wakes whoever sleeps on it.
    fn vector(&self, number: u16) -> Result<(Box<dyn Vector + Send>, EventVectors), String>;
}

/// What is wanted of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The namespace.
    pub namespace: u32,
    /// Commands in flight on each queue.
    pub depth: u32,
    /// I/O queues that the controller is asked for.
    pub queues: u16,
    /// Whether doorbells are rung in memory, if the controller can.
    pub shadow_doorbells: bool,
    /// Whether submission queues lie in the controller memory buffer, as far as it has room.
    pub queues_in_cmb: bool,
    /// How long it may take to answer, and all that it takes to be ready.
    pub patience: Span,
}

/// A queue pair of it.
type Queue<B> = NamespaceQueue<Reach<B>, <B as Bus>::Doorbell>;

/// A controller and the thread that tends it. It goes with the last medium and channel.
pub(crate) struct Attached<B: Bus> {
    shared: Arc<Shared<B>>,
    /// Ends before the controller is shut down.
    tender: Option<Thread<()>>,
    bell: Bell,
    clock: Clock,
    wanted: Wanted,
    home: Home<B>,
    growth: Arc<Growth>,
}

struct Shared<B: Bus> {
    kept: Mutex<Kept<B>>,
    bus: B,
}

/// What the lock is around.
struct Kept<B: Bus> {
    /// None once it is lost and reaches no memory: then its queue pairs have been told.
    controller: Option<Controller<B::Registers, Reach<B>>>,
    /// Answers of admin commands that somebody waits for.
    answers: Vec<Answer>,
    /// Why it is not there any more.
    lost: Option<Refused>,
    /// Vectors that no queue pair has, the next one to be given away last.
    vectors_free: Vec<u16>,
    /// What the others are slept on by.
    vectors_used: BTreeMap<u16, EventVectors>,
    /// Queue pairs that were asked for and are nobody's yet.
    asked_for: BTreeMap<u16, AskedFor>,
    namespace: u32,
    growth: Arc<Growth>,
}

/// What becomes of a queue pair that was asked for.
enum AskedFor {
    /// Somebody waits for it.
    Wanted,
    /// It will not be, for this reason, which whoever waits has not seen yet.
    Over(String),
    /// Nobody waits any more: it is deleted once it is there, and only then is its vector free.
    Unwanted { vector: Option<u16> },
}

/// A queue pair, and which vector it has.
struct Lent<B: Bus> {
    queue: Queue<B>,
    vector: Option<u16>,
}

const YES_OR_NO: [(&str, bool); 2] = [("no", false), ("yes", true)];
const DEPTH: u64 = 255;
const DEPTH_MAX: u64 = 4095;
const QUEUES: u64 = 16;
const QUEUES_MAX: u64 = 1024;
const PATIENCE: Span = Span::from_secs(5);
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
/// What to do about a buffer that cannot be as its registers say.
const WITHOUT_CMB: &str = "without `cmb=queues` in its name its memory buffer is not used.";
/// The token of the socket among what the thread sleeps on.
const SOCKET: u64 = 1;

impl Wanted {
    /// Takes what of it stands in a URI.
    pub(crate) fn of(fields: &mut Fields<'_>) -> Result<Self, UriError> {
        let small = |number: u64| u32::try_from(number).unwrap_or(1);
        let namespace = fields.number("ns", 1..=u64::from(u32::MAX - 1))?.unwrap_or(1);
        let depth = fields.number("depth", 1..=DEPTH_MAX)?.unwrap_or(DEPTH);
        let queues = fields.number("queues", 1..=QUEUES_MAX)?.unwrap_or(QUEUES);
        let shadow_doorbells = fields.choice("shadow-doorbells", &YES_OR_NO)?.unwrap_or(true);
        let patience = fields.time("patience")?.unwrap_or(PATIENCE);
        Ok(Self {
            namespace: small(namespace),
            depth: small(depth),
            queues: u16::try_from(queues).unwrap_or(1),
            shadow_doorbells,
            queues_in_cmb: false,
            patience,
        })
    }
}

impl<B: Bus> Attached<B> {
    /// Brings the controller at the other end of `bus` up, and notes each step. What it is given or
    /// asked for lies in `regions`.
    pub(crate) fn call(
        bus: &B,
        wanted: &Wanted,
        regions: &Regions,
        steps: &mut Steps,
    ) -> Result<Self, Refused> {
        let (shown, clock) = (bus.name(), steps.clock());
        let machine = |what: &str, error: &dyn std::fmt::Display| {
            Refused::machine(format!("attach {shown}: {what}: {error}"))
        };
        let bytes = usize::try_from(pool_bytes(wanted)).unwrap_or(usize::MAX);
        let memory = bus.allocate(regions, bytes);
        let memory = memory.map_err(|error| machine("memory for its queues", &error))?;
        let home = Home::new(memory, regions, bus.clone()).map_err(|refused| Refused {
            text: format!("attach {shown}: {}", refused.text),
            ..refused
        })?;
        steps.done("show it the memory of its queues");
        let controller = bring_up(bus, wanted, home.reach(), steps)?;
        let mut sleeper = Sleeper::new().map_err(|error| machine("a thread to tend it", &error))?;
        let added = sleeper.sources().add(bus.descriptor(), SOCKET);
        added.map_err(|error| machine("a descriptor to wait for", &error))?;
        let most = bus.vectors().saturating_sub(1).min(controller.queue_pairs_max().into());
        let growth = Arc::new(Growth::default());
        let kept = Kept {
            controller: Some(controller),
            answers: Vec::new(),
            lost: None,
            vectors_free: (1..=u16::try_from(most).unwrap_or(u16::MAX)).rev().collect(),
            vectors_used: BTreeMap::new(),
            asked_for: BTreeMap::new(),
            namespace: wanted.namespace,
            growth: Arc::clone(&growth),
        };
        let shared = Arc::new(Shared { kept: Mutex::new(kept), bus: bus.clone() });
        let (bell, tended) = (sleeper.bell(), Arc::clone(&shared));
        let body = move |stop: &Stop| {
            let mut tender = Tender { shared: tended, stop: stop.clone() };
            host::turn::run(&mut tender, &clock, &mut sleeper);
        };
        let tender = Thread::spawn("tend", None, body);
        let tender = Some(tender.map_err(|error| machine("a thread to tend it", &error))?);
        Ok(Self { shared, tender, bell, clock, wanted: wanted.clone(), home, growth })
    }

    /// Its namespace, as a device that was there before whoever opens it.
    pub(crate) fn open(self, uri: &Uri) -> Result<Opened, MediumError> {
        let what = self.shared.bus.what();
        let medium = AttachedMedium::new(self)?;
        let limits = base::Medium::limits(&medium);
        let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
        let existing =
            vec![Existing { name: uri.to_string(), found: format!("{bytes} bytes"), path: None }];
        Ok(Opened { existing, ..Opened::fresh(Arc::new(medium), what) })
    }

    /// A queue pair.
    fn queue(&self) -> Result<Lent<B>, Refused> {
        let end = self.clock.now().after(self.wanted.patience);
        let number = self.shared.lock().vectors_free.pop();
        let lent = self.queue_with(number, end);
        if let (Err(_), Some(number)) = (&lent, number) {
            self.release_vector(number);
        }
        lent
    }

    fn queue_with(&self, number: Option<u16>, end: Instant) -> Result<Lent<B>, Refused> {
        let vector = number.map(|number| self.shared.bus.vector(number));
        let vector = vector.transpose().map_err(|why| self.peer(&why))?;
        let vector = vector.map(|(vector, event)| {
            if let Some(number) = number {
                self.shared.lock().vectors_used.insert(number, event);
            }
            vector
        });
        let id = self.create(number, end)?;
        loop {
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.bus, self.clock.now());
            kept.controller()?;
            if let Some(AskedFor::Over(why)) = kept.asked_for.get(&id) {
                let refused = self.peer(why);
                kept.asked_for.remove(&id);
                return Err(refused);
            }
            if let Some(pair) = kept.controller()?.take_queue_pair(id) {
                kept.asked_for.remove(&id);
                kept.controller()?.expect_namespace(self.wanted.namespace);
                let queue = self.of_namespace(kept.controller()?, pair)?;
                let queue = match vector {
                    Some(vector) => queue.with_vector(vector),
                    None => queue,
                };
                return Ok(Lent { queue, vector: number });
            }
            if self.clock.now() >= end {
                kept.asked_for.insert(id, AskedFor::Unwanted { vector: number });
                return Err(self.peer("a queue pair was not created in time"));
            }
            drop(kept);
            host::thread::give_way();
        }
    }

    /// A queue pair as one of the namespace. If it cannot be, dropping it has it deleted.
    fn of_namespace(
        &self,
        controller: &Controller<B::Registers, Reach<B>>,
        pair: QueuePair<Reach<B>, B::Doorbell>,
    ) -> Result<Queue<B>, Refused> {
        let limits = controller.identity().map(|identity| identity.limits);
        let namespace = controller.namespace(self.wanted.namespace);
        let Some((namespace, limits)) = namespace.zip(limits) else {
            return Err(self.peer("the namespace is not there any more"));
        };
        let (reach, view) = (self.home.reach(), namespace.view(&limits));
        let queue = NamespaceQueue::new(reach, pair, view, QueueSizes::default());
        queue.ok_or_else(|| {
            let text = format!("{}: no memory is left for lists", self.shared.bus.name());
            Refused::machine(text)
        })
    }

    fn create(&self, vector: Option<u16>, end: Instant) -> Result<u16, Refused> {
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.bus, now);
            let controller = kept.controller()?;
            if controller.namespace(self.wanted.namespace).is_none() {
                let ids: Vec<String> =
                    controller.namespaces().map(|known| known.id.to_string()).collect();
                let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
                let (name, number) = (self.shared.bus.name(), self.wanted.namespace);
                let text = format!("{name}: no namespace {number}, expected one of: {ids}");
                return Err(Refused::caller(text));
            }
            let most = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = (self.wanted.depth + 1).clamp(2, most);
            let options = QueuePairOptions { depth, vector, techniques: Techniques::default() };
            match controller.create_queue_pair(now, options) {
                Ok(id) => {
                    kept.asked_for.insert(id, AskedFor::Wanted);
                    return Ok(id);
                }
                // One whose deletion is under way makes room.
                Err(Refusal::NoQueueLeft { .. } | Refusal::NotReady) if now < end => {}
                Err(refusal) => return Err(self.peer(&refusal.to_string())),
            }
            drop(kept);
            host::thread::give_way();
        }
    }

    /// A queue pair is gone, and its vector is free, unless one has it that nobody waits for.
    fn release_vector(&self, vector: u16) {
        let mut kept = self.shared.lock();
        let has_it = |asked: &AskedFor| matches!(asked, AskedFor::Unwanted { vector: Some(other) } if *other == vector);
        if !kept.asked_for.values().any(has_it) {
            kept.free_vector(vector);
        }
    }

    /// How many queue pairs it has.
    fn queues_max(&self) -> u32 {
        let mut kept = self.shared.lock();
        kept.controller().map_or(0, |controller| controller.queue_pairs_max().into())
    }

    /// The world-wide name of its namespace, if that is there and has one.
    fn identity(&self) -> Option<String> {
        let mut kept = self.shared.lock();
        let controller = kept.controller().ok()?;
        let namespace = controller.namespace(self.wanted.namespace)?;
        namespace.world_wide_name(controller.identity()?)
    }

    /// Why it is of no use any more: it is not there, or was never let reach any data.
    fn lost(&self) -> Option<String> {
        if let Some(refused) = &self.shared.lock().lost {
            return Some(refused.text.clone());
        }
        let Refused { text, hint, .. } = self.home.reach().complaint()?;
        let hint = hint.map_or_else(String::new, |hint| format!(". {hint}"));
        Some(format!("{}: {text}{hint}", self.shared.bus.name()))
    }

    /// Does something with the controller.
    fn with<T>(
        &self,
        work: impl FnOnce(&mut Controller<B::Registers, Reach<B>>) -> T,
    ) -> Result<T, Refused> {
        let mut kept = self.shared.lock();
        let result = work(kept.controller()?);
        drop(kept);
        self.bell.ring();
        Ok(result)
    }

    /// The answer to the owner's admin command with this token.
    fn await_answer(&self, token: u64) -> Result<Answer, Refused> {
        let end = self.clock.now().after(Span::from_secs(60));
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.look_after(&self.shared.bus, now);
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
        Refused::peer(format!("{}: {problem}", self.shared.bus.name()))
    }
}

impl<B: Bus> Drop for Attached<B> {
    fn drop(&mut self) {
        if let Some(tender) = self.tender.take() {
            tender.stop_flag().stop();
            self.bell.ring();
            // Its own drop waits for the end.
            drop(tender);
        }
        let end = self.clock.now().after(SHUTDOWN);
        let mut kept = self.shared.lock();
        if let Ok(controller) = kept.controller() {
            // One that cannot be shut down is dropped, and thereby cut off.
            let _ = controller.shut_down(self.clock.now(), ShutdownNotification::Normal);
        }
        let is_going = |kept: &Kept<B>| {
            let state = kept.controller.as_ref().map(Controller::state);
            state == Some(State::ShuttingDown)
        };
        while is_going(&kept) && self.clock.now() < end {
            kept.look_after(&self.shared.bus, self.clock.now());
            host::thread::give_way();
        }
    }
}

impl<B: Bus> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Kept<B>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Bus> Kept<B> {
    fn controller(&mut self) -> Result<&mut Controller<B::Registers, Reach<B>>, Refused> {
        match (&self.lost, &mut self.controller) {
            (None, Some(controller)) => Ok(controller),
            (Some(lost), _) => Err(lost.clone()),
            (None, None) => Err(Refused::peer("the controller is gone")),
        }
    }

    fn look_after(&mut self, bus: &B, now: Instant) {
        bus.carry();
        if self.lost.is_some() {
            return self.let_go(bus);
        }
        if let Some(why) = bus.lost() {
            return self.lose(bus, &why);
        }
        while let Some(event) = self.controller.as_mut().and_then(|known| known.poll(now)) {
            match event {
                Event::AdminCompleted(answer) => self.answers.push(answer),
                Event::Dead(error) => return self.lose(bus, &error.to_string()),
                Event::Removed => return self.lose(bus, "the controller is gone"),
                Event::RingInHostMemory { id, why } => {
                    let name = bus.name();
                    tracing::info!(cause = %name, "{name}: queue {id} lies in the host's memory: {why}");
                }
                Event::NamespaceResized { id, to_blocks, .. } if id == self.namespace => {
                    self.growth.has_now(to_blocks);
                }
                Event::QueuePairRefused { id, status } => {
                    self.will_not_be(id, || format!("a queue pair was refused: {status}"));
                }
                Event::QueuePairDeleted { id } => {
                    self.will_not_be(id, || "a queue pair is gone before it was taken".to_owned());
                }
                _ => {}
            }
        }
        self.drop_unwanted();
    }

    /// There is no such queue pair, nor is there going to be.
    fn will_not_be(&mut self, id: u16, why: impl FnOnce() -> String) {
        match self.asked_for.remove(&id) {
            Some(AskedFor::Wanted) => {
                self.asked_for.insert(id, AskedFor::Over(why()));
            }
            Some(AskedFor::Unwanted { vector: Some(vector) }) => self.free_vector(vector),
            _ => {}
        }
    }

    /// Takes queue pairs that came too late and drops them, which has the controller delete them.
    fn drop_unwanted(&mut self) {
        let Self { asked_for, controller: Some(controller), .. } = self else { return };
        let unwanted = |asked: &AskedFor| matches!(asked, AskedFor::Unwanted { .. });
        for (id, _) in asked_for.iter().filter(|(_, asked)| unwanted(asked)) {
            drop(controller.take_queue_pair(*id));
        }
    }

    fn free_vector(&mut self, vector: u16) {
        self.vectors_used.remove(&vector);
        self.vectors_free.push(vector);
    }

    /// It is not there any more, whoever asks.
    fn lose(&mut self, bus: &B, why: &str) {
        bus.lose(why);
        self.lost.get_or_insert_with(|| Refused::peer(format!("{}: {why}", bus.name())));
        self.let_go(bus);
    }

    /// Once it reaches no memory its queue pairs are told, and answer everything so. Whoever sleeps
    /// on one is woken for it. Until then no buffer is given back.
    fn let_go(&mut self, bus: &B) {
        if self.controller.is_some() && bus.cut_off() {
            self.controller = None;
            self.vectors_used.values_mut().for_each(|event| event.raise(0));
        }
    }
}

/// What the thread does.
struct Tender<B: Bus> {
    shared: Arc<Shared<B>>,
    stop: Stop,
}

impl<B: Bus> Turn for Tender<B> {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() {
            return Wait::Ended;
        }
        let mut kept = self.shared.lock();
        kept.look_after(&self.shared.bus, now);
        match &kept.controller {
            None => Wait::Ended,
            Some(_) if kept.lost.is_some() => Wait::Until(now.after(TENDED)),
            Some(controller) => Wait::Until(controller.wake_at().min(now.after(TENDED))),
        }
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.stop.is_stopped()
    }

    fn woken(&mut self, _: &[u64]) {}
}

/// Waits until the controller is ready. Every wait on the way has an end.
fn bring_up<B: Bus>(
    bus: &B,
    wanted: &Wanted,
    reach: &Reach<B>,
    steps: &mut Steps,
) -> Result<Controller<B::Registers, Reach<B>>, Refused> {
    let refuse = |why: String| Refused::peer(format!("attach {}: {why}", bus.name()));
    let options = ControllerOptions {
        admin_depth: ADMIN_DEPTH,
        queue_pairs: wanted.queues,
        shadow_doorbells: wanted.shadow_doorbells && !bus.maps_doorbells(),
        memory_buffer: match (B::KIND, wanted.queues_in_cmb) {
            (_, true) => MemoryBufferUse::Queues,
            (DeviceKind::Pcie, false) => MemoryBufferUse::Shown,
            (DeviceKind::Emulated, false) => MemoryBufferUse::Ignored,
        },
        ..ControllerOptions::default()
    };
    // What is lost reads as ones, and so looks like something else.
    let why = |found: String| refuse(bus.lost().unwrap_or(found));
    let mut controller = Controller::new(bus.registers(), reach.clone(), options)
        .map_err(|error| why(error.to_string()))?;
    let mut is_enabled = false;
    loop {
        bus.carry();
        if let Some(why) = bus.lost() {
            return Err(refuse(why));
        }
        let event = controller.poll(steps.clock().now());
        if !is_enabled && controller.capabilities().is_some() {
            is_enabled = true;
            steps.done("disable and enable it");
        }
        match event {
            Some(Event::Ready) => {
                steps.done("identify it and its namespaces");
                return Ok(controller);
            }
            Some(Event::Dead(error)) => {
                let refused = why(error.to_string());
                let is_buffer = matches!(error, ControllerError::MemoryBuffer(_));
                return Err(if is_buffer { refused.with_hint(WITHOUT_CMB) } else { refused });
            }
            Some(Event::Removed) => return Err(why("the controller is gone".to_owned())),
            Some(_) => {}
            None => host::thread::rest(PAUSE),
        }
    }
}

/// Memory for the queues and lists of one controller; what is not used is not there.
fn pool_bytes(wanted: &Wanted) -> u64 {
    let entries = u64::from(wanted.depth) + 1;
    let queue = entries * (64 + 16 + PAGE) + 4 * PAGE;
    (ADMIN_BYTES + u64::from(wanted.queues) * queue).min(u64::from(u32::MAX) & !(PAGE - 1))
}
