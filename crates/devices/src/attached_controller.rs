//! A controller attached over PCIe or vfio-user, and its admin thread.
//!
//! ```text
//!   AttachedDevice, AttachedChannel, … ─▶ AttachedController ── nvme controller (under a lock)
//!                                           └── admin thread: bus messages, command timeouts, removal
//! ```

mod channel;
mod dma;
mod identify;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::tenmil_dma::{DeviceKind, Region, RegionError, RegionTable};
use tenmil_base::{
    BarMapError, BarRange, Doorbell, Error, Instant, InterruptVector, IoCompletion, Mmio, RegionId,
    Segment, Span,
};
use tenmil_block::uri::{Uri, UriError, UriOptions};
use tenmil_block::{ExistingData, OpenedDevice};
use tenmil_linux::{
    Clock, EventFdVectors, EventLoop, NamedThread, NextStep, Notifier, Sleeper, StepTimer, StopFlag,
};
use tenmil_nvme_host::{
    CmbMode, Controller, ControllerError, ControllerOptions, ControllerState, Event,
    FastPathOptions, NamespaceQueue, QueuePair, QueuePairOptions, QueueSizes, RequestError,
    RingTransport, ShutdownNotification,
};

use self::channel::AttachedDevice;
use self::dma::{MappedDma, QueueMemory};
use crate::size_watch::SizeWatch;

pub(crate) use self::identify::with_controller;

/// Access to a controller over some bus. Clones are cheap and refer to the same connection.
pub(crate) trait ControllerBus: Clone + Send + Sync + 'static {
    /// Register access.
    type Registers: Mmio<Doorbell = Self::Doorbell> + Send + 'static;
    /// One doorbell register.
    type Doorbell: Doorbell + Send + 'static;

    /// Kind of device, which determines how it accesses memory.
    const KIND: DeviceKind;

    /// Name of the device.
    fn name(&self) -> &str;

    /// One-line description.
    fn describe(&self) -> &'static str;

    /// Register access. Called once.
    fn registers(&self) -> Self::Registers;

    /// Descriptor that becomes readable when [`process_messages`](Self::process_messages) has work.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Handles incoming bus messages.
    fn process_messages(&self);

    /// Why the controller is lost, if it is.
    fn lost_reason(&self) -> Option<String>;

    /// Marks the controller as lost.
    fn mark_lost(&self, why: &str);

    /// Allocates memory for its queues that can be mapped for the device.
    fn allocate(&self, regions: &RegionTable, len_bytes: usize) -> Result<Region, RegionError> {
        regions.allocate_shared(len_bytes)
    }

    /// Maps a region for the device, if it is not mapped yet, and returns its IOVA.
    fn map(&self, region: RegionId) -> Result<u64, Error>;

    /// Unmaps a region. True once the device cannot access it any more.
    fn unmap(&self, region: RegionId) -> bool;

    /// Revokes the access to all memory. True once the device can access none. If the controller
    /// was [marked lost](Self::mark_lost) before, its function or connection is released too.
    fn revoke_dma_access(&self) -> bool;

    /// Restores the mappings that [`revoke_dma_access`](Self::revoke_dma_access) revoked.
    fn restore_dma_access(&self);

    /// Maps a part of a BAR that holds controller memory. Called once. Returns the segment and the
    /// address at which the device sees it.
    fn device_memory(&self, part: BarRange) -> Result<(Segment, u64), BarMapError> {
        let _ = part;
        Err(BarMapError::Unusable { reason: "it is not on the PCI bus" })
    }

    /// Whether the doorbells are mapped memory that the device polls: a doorbell write is then a
    /// plain store, and a shadow doorbell would only add a barrier.
    fn are_doorbells_mapped_memory(&self) -> bool {
        false
    }

    /// Number of interrupt vectors that support sleeping.
    fn interrupt_vector_count(&self) -> u32;

    /// Interrupt vector `number`, and the handle that wakes its sleeper.
    fn vector(
        &self,
        number: u16,
    ) -> Result<(Box<dyn InterruptVector + Send>, EventFdVectors), Error>;
}

/// Options for attaching a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachOptions {
    /// Namespace identifier.
    pub namespace: u32,
    /// Queue depth: commands in flight on each queue.
    pub depth: u32,
    /// Number of I/O queues requested from the controller.
    pub queues: u16,
    /// Whether to use shadow doorbells (Doorbell Buffer Config), if the controller supports them.
    pub shadow_doorbells: bool,
    /// Whether to place submission queues in the Controller Memory Buffer, as far as they fit.
    pub queues_in_cmb: bool,
    /// Command timeout, which also limits the time until the controller is ready.
    pub time_limit: Span,
}

/// Queue pair of the controller, bound to its namespace.
type Queue<B> = NamespaceQueue<RingTransport<MappedDma<B>, <B as ControllerBus>::Doorbell>>;

/// An attached controller and its admin thread. Dropped with the last device and channel.
pub(crate) struct AttachedController<B: ControllerBus> {
    shared: Arc<Shared<B>>,
    /// Stopped before the controller is shut down.
    admin_thread: Option<NamedThread<()>>,
    waker: Notifier,
    clock: Clock,
    wanted: AttachOptions,
    queue_memory: QueueMemory<B>,
    size_watch: Arc<SizeWatch>,
}

struct Shared<B: ControllerBus> {
    kept: Mutex<AttachedState<B>>,
    bus: B,
}

/// State behind the lock.
struct AttachedState<B: ControllerBus> {
    /// None once the controller is lost and can access no memory. Its queue pairs have been
    /// notified then.
    controller: Option<Controller<B::Registers, MappedDma<B>>>,
    /// Completions of admin commands that a caller waits for.
    completions: Vec<IoCompletion>,
    /// Why the controller is lost.
    lost: Option<Error>,
    /// Unused interrupt vectors; the last one is used next.
    vectors_free: Vec<u16>,
    /// Wake handles of the vectors in use.
    vectors_used: BTreeMap<u16, EventFdVectors>,
    /// Queue pairs that were requested and not taken yet, by queue identifier.
    asked_for: BTreeMap<u16, QueueRequestState>,
    namespace: u32,
    size_watch: Arc<SizeWatch>,
}

/// State of a requested queue pair.
enum QueueRequestState {
    /// A caller waits for it.
    Pending,
    /// Creation failed for this reason, which the caller has not seen yet.
    Failed(String),
    /// The caller has given up: the queue pair is deleted once it exists, and only then is its
    /// vector free.
    Abandoned { vector: Option<u16> },
}

/// A queue pair and its interrupt vector.
struct QueueLease<B: ControllerBus> {
    queue: Queue<B>,
    vector: Option<u16>,
}

const YES_OR_NO: [(&str, bool); 2] = [("no", false), ("yes", true)];
const DEPTH: u64 = 255;
const DEPTH_MAX: u64 = 4095;
const QUEUES: u64 = 16;
const QUEUES_MAX: u64 = 1024;
const DEFAULT_TIMEOUT: Span = Span::from_secs(5);
/// Entries of the admin queue.
const ADMIN_DEPTH: u32 = 64;
/// Memory for the admin queue, PRP lists and admin data.
const ADMIN_BYTES: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// Longest sleep of the admin thread.
const ADMIN_POLL_MAX: Span = Span::from_ms(100);
/// Poll interval while the caller has nothing else to do.
const PAUSE: Span = Span::from_us(50);
/// Timeout of a shutdown.
const SHUTDOWN: Span = Span::from_secs(2);
/// Hint for a controller memory buffer whose registers are invalid.
const WITHOUT_CMB: &str = "without `cmb=queues` in its name its memory buffer is not used.";
/// Token of the bus descriptor in the wait set of the admin thread.
const SOCKET: u64 = 1;

impl AttachOptions {
    /// Parses the options of a URI.
    pub fn from_uri_options(fields: &mut UriOptions<'_>) -> Result<Self, UriError> {
        let small = |number: u64| u32::try_from(number).unwrap_or(1);
        let namespace = fields.number_value("ns", 1..=u64::from(u32::MAX - 1))?.unwrap_or(1);
        let depth = fields.number_value("depth", 1..=DEPTH_MAX)?.unwrap_or(DEPTH);
        let queues = fields.number_value("queues", 1..=QUEUES_MAX)?.unwrap_or(QUEUES);
        let shadow_doorbells = fields.choice_value("shadow-doorbells", &YES_OR_NO)?.unwrap_or(true);
        let time_limit = fields.time_value("command-timeout")?.unwrap_or(DEFAULT_TIMEOUT);
        Ok(Self {
            namespace: small(namespace),
            depth: small(depth),
            queues: u16::try_from(queues).unwrap_or(1),
            shadow_doorbells,
            queues_in_cmb: false,
            time_limit,
        })
    }
}

impl<B: ControllerBus> AttachedController<B> {
    /// Attaches the controller behind `bus` and records each step. Its queues and admin data are
    /// allocated in `regions`.
    pub(crate) fn attach(
        bus: &B,
        wanted: &AttachOptions,
        regions: &RegionTable,
        steps: &mut StepTimer,
    ) -> Result<Self, Error> {
        let (shown, clock) = (bus.name(), steps.clock());
        let environment_error = |what: &str, error: &dyn std::fmt::Display| {
            Error::environment(format!("attach {shown}: {what}: {error}"))
        };
        let bytes = usize::try_from(queue_memory_bytes(wanted)).unwrap_or(usize::MAX);
        let memory = bus.allocate(regions, bytes);
        let memory = memory.map_err(|error| environment_error("memory for its queues", &error))?;
        let queue_memory = QueueMemory::new(memory, regions, bus.clone()).map_err(|refused| {
            Error { text: format!("attach {shown}: {}", refused.text), ..refused }
        })?;
        steps.finish_step("show it the memory of its queues");
        let controller = bring_up(bus, wanted, queue_memory.dma(), steps)?;
        let mut sleeper =
            Sleeper::new().map_err(|error| environment_error("a thread to tend it", &error))?;
        let added = sleeper.sources().add_source(bus.descriptor(), SOCKET);
        added.map_err(|error| environment_error("a descriptor to wait for", &error))?;
        // Vector 0 belongs to the admin queue, which is polled.
        let most =
            bus.interrupt_vector_count().saturating_sub(1).min(controller.queue_pairs_max().into());
        let size_watch = Arc::new(SizeWatch::default());
        let kept = AttachedState {
            controller: Some(controller),
            completions: Vec::new(),
            lost: None,
            vectors_free: (1..=u16::try_from(most).unwrap_or(u16::MAX)).rev().collect(),
            vectors_used: BTreeMap::new(),
            asked_for: BTreeMap::new(),
            namespace: wanted.namespace,
            size_watch: Arc::clone(&size_watch),
        };
        let shared = Arc::new(Shared { kept: Mutex::new(kept), bus: bus.clone() });
        let (waker, loop_state) = (sleeper.notifier(), Arc::clone(&shared));
        // The admin thread starts after the initialization, which therefore needs no lock.
        let body = move |stop: &StopFlag| {
            let mut event_loop = AttachedAdminLoop { shared: loop_state, stop: stop.clone() };
            tenmil_linux::event_loop::run_event_loop(&mut event_loop, &clock, &mut sleeper);
        };
        let admin_thread = NamedThread::spawn("tend", None, body);
        let admin_thread =
            Some(admin_thread.map_err(|error| environment_error("a thread to tend it", &error))?);
        Ok(Self {
            shared,
            admin_thread,
            waker,
            clock,
            wanted: wanted.clone(),
            queue_memory,
            size_watch,
        })
    }

    /// Opens its namespace as an existing device.
    pub(crate) fn open(self, uri: &Uri) -> Result<OpenedDevice, Error> {
        let what = self.shared.bus.describe();
        let medium = AttachedDevice::new(self)?;
        let limits = tenmil_base::BlockDevice::limits(&medium);
        let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
        let existing = vec![ExistingData {
            name: uri.to_string(),
            found: format!("{bytes} bytes"),
            path: None,
        }];
        Ok(OpenedDevice { existing, ..OpenedDevice::without_existing_data(Arc::new(medium), what) })
    }

    /// Creates a queue pair, with an interrupt vector if one is free.
    fn create_queue_pair(&self) -> Result<QueueLease<B>, Error> {
        let end = self.clock.now().after(self.wanted.time_limit);
        let number = self.shared.lock().vectors_free.pop();
        let leased = self.create_queue_pair_with_vector(number, end);
        if let (Err(_), Some(number)) = (&leased, number) {
            self.release_vector(number);
        }
        leased
    }

    fn create_queue_pair_with_vector(
        &self,
        number: Option<u16>,
        end: Instant,
    ) -> Result<QueueLease<B>, Error> {
        let vector = number.map(|number| self.shared.bus.vector(number));
        let vector = vector.transpose().map_err(|why| self.remote_error(&why.text))?;
        if let (Some(number), Some((_, event))) = (number, &vector) {
            self.shared.lock().vectors_used.insert(number, event.clone());
        }
        let id = self.request_queue_pair_and_wait(number, end)?;
        // The queue pair is created asynchronously: poll the controller until it appears, fails, or
        // the timeout passes. After the timeout the vector stays reserved until the late queue pair
        // is deleted.
        loop {
            let mut kept = self.shared.lock();
            kept.poll(&self.shared.bus, self.clock.now());
            kept.controller()?;
            if let Some(QueueRequestState::Failed(why)) = kept.asked_for.get(&id) {
                let refused = self.remote_error(why);
                kept.asked_for.remove(&id);
                return Err(refused);
            }
            if let Some(pair) = kept.controller()?.take_queue_pair(id) {
                kept.asked_for.remove(&id);
                kept.controller()?.require_same_namespace(self.wanted.namespace);
                let queue = self.bind_namespace(kept.controller()?, pair)?;
                let queue = match vector {
                    Some((vector, event)) => {
                        // No interrupt announces a state change of the queue.
                        queue.queue().set_waker(Arc::new(move || event.signal(0)));
                        queue.with_vector(vector)
                    }
                    None => queue,
                };
                return Ok(QueueLease { queue, vector: number });
            }
            if self.clock.now() >= end {
                kept.asked_for.insert(id, QueueRequestState::Abandoned { vector: number });
                return Err(self.remote_error("a queue pair was not created in time"));
            }
            drop(kept);
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Binds a queue pair to the namespace. On failure the queue pair is dropped, which deletes it.
    fn bind_namespace(
        &self,
        controller: &Controller<B::Registers, MappedDma<B>>,
        pair: QueuePair<RingTransport<MappedDma<B>, B::Doorbell>>,
    ) -> Result<Queue<B>, Error> {
        let limits = controller.identity().map(|identity| identity.limits);
        let namespace = controller.namespace(self.wanted.namespace);
        let Some((namespace, limits)) = namespace.zip(limits) else {
            return Err(self.remote_error("the namespace is not there any more"));
        };
        let view = namespace.view(&limits);
        let queue = NamespaceQueue::new(pair, view, QueueSizes::default());
        queue.ok_or_else(|| {
            let text = format!("{}: no memory is left for lists", self.shared.bus.name());
            Error::environment(text)
        })
    }

    fn request_queue_pair_and_wait(&self, vector: Option<u16>, end: Instant) -> Result<u16, Error> {
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.poll(&self.shared.bus, now);
            let controller = kept.controller()?;
            if controller.namespace(self.wanted.namespace).is_none() {
                let ids: Vec<String> =
                    controller.namespaces().map(|known| known.id.to_string()).collect();
                let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
                let (name, number) = (self.shared.bus.name(), self.wanted.namespace);
                let text = format!("{name}: no namespace {number}, expected one of: {ids}");
                return Err(Error::usage(text));
            }
            let most = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = (self.wanted.depth + 1).clamp(2, most);
            let options =
                QueuePairOptions { depth, vector, techniques: FastPathOptions::default() };
            match controller.create_queue_pair(now, options) {
                Ok(id) => {
                    kept.asked_for.insert(id, QueueRequestState::Pending);
                    return Ok(id);
                }
                // A queue pair that is being deleted frees its identifier soon.
                Err(RequestError::QueueLimit { .. } | RequestError::NotReady) if now < end => {}
                Err(refusal) => return Err(self.remote_error(&refusal.to_string())),
            }
            drop(kept);
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Frees the vector of a dropped queue pair, unless an abandoned request still owns it.
    fn release_vector(&self, vector: u16) {
        let mut kept = self.shared.lock();
        let has_it = |submitted: &QueueRequestState| matches!(submitted, QueueRequestState::Abandoned { vector: Some(other) } if *other == vector);
        if !kept.asked_for.values().any(has_it) {
            kept.free_vector(vector);
        }
    }

    /// Maximum number of I/O queue pairs.
    fn queues_max(&self) -> u32 {
        let mut kept = self.shared.lock();
        kept.controller().map_or(0, |controller| controller.queue_pairs_max().into())
    }

    /// World-wide name of the namespace, if the namespace exists and has one.
    fn identity(&self) -> Option<String> {
        let mut kept = self.shared.lock();
        let controller = kept.controller().ok()?;
        let namespace = controller.namespace(self.wanted.namespace)?;
        namespace.world_wide_name(controller.identity()?)
    }

    /// Why the device is unusable: the controller is lost, or its first data mappings were
    /// rejected.
    fn failure_reason(&self) -> Option<String> {
        if let Some(refused) = &self.shared.lock().lost {
            return Some(refused.text.clone());
        }
        let Error { text, hint, .. } = self.queue_memory.dma().mapping_error()?;
        let hint = hint.map_or_else(String::new, |hint| format!(". {hint}"));
        Some(format!("{}: {text}{hint}", self.shared.bus.name()))
    }

    /// Runs `work` on the controller, under the lock.
    fn with_controller_locked<T>(
        &self,
        work: impl FnOnce(&mut Controller<B::Registers, MappedDma<B>>) -> T,
    ) -> Result<T, Error> {
        let mut kept = self.shared.lock();
        let result = work(kept.controller()?);
        drop(kept);
        self.waker.notify();
        Ok(result)
    }

    /// Waits for the completion of the admin command with this token.
    fn await_completion(&self, token: u64) -> Result<IoCompletion, Error> {
        let end = self.clock.now().after(Span::from_secs(60));
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.poll(&self.shared.bus, now);
            let found = kept.completions.iter().position(|completion| completion.token == token);
            if let Some(at) = found {
                return Ok(kept.completions.swap_remove(at));
            }
            kept.controller()?;
            drop(kept);
            if now >= end {
                return Err(self.remote_error("an admin command timed out"));
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    fn remote_error(&self, problem: &str) -> Error {
        Error::remote(format!("{}: {problem}", self.shared.bus.name()))
    }
}

impl<B: ControllerBus> Drop for AttachedController<B> {
    fn drop(&mut self) {
        if let Some(admin_thread) = self.admin_thread.take() {
            admin_thread.stop_flag().set();
            self.waker.notify();
            // Joins the thread.
            drop(admin_thread);
        }
        let end = self.clock.now().after(SHUTDOWN);
        let mut kept = self.shared.lock();
        if let Ok(controller) = kept.controller() {
            // A controller that cannot be shut down is dropped, which revokes its DMA access.
            let _ = controller.start_shutdown(self.clock.now(), ShutdownNotification::Normal);
        }
        let is_going = |kept: &AttachedState<B>| {
            let state = kept.controller.as_ref().map(Controller::state);
            state == Some(ControllerState::ShuttingDown)
        };
        while is_going(&kept) && self.clock.now() < end {
            kept.poll(&self.shared.bus, self.clock.now());
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}

impl<B: ControllerBus> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, AttachedState<B>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: ControllerBus> AttachedState<B> {
    fn controller(&mut self) -> Result<&mut Controller<B::Registers, MappedDma<B>>, Error> {
        match (&self.lost, &mut self.controller) {
            (None, Some(controller)) => Ok(controller),
            (Some(lost), _) => Err(lost.clone()),
            (None, None) => Err(Error::remote("the controller was removed")),
        }
    }

    fn poll(&mut self, bus: &B, now: Instant) {
        bus.process_messages();
        if self.lost.is_some() {
            return self.drop_controller(bus);
        }
        // A lost bus is checked before the controller is polled: its registers read as all ones.
        if let Some(why) = bus.lost_reason() {
            return self.mark_lost(bus, &why);
        }
        while let Some(event) = self.controller.as_mut().and_then(|known| known.poll(now)) {
            match event {
                Event::AdminCompleted(completion) => self.completions.push(completion),
                Event::Dead(error) => return self.mark_lost(bus, &error.to_string()),
                Event::Removed => return self.mark_lost(bus, "the controller was removed"),
                Event::RingInHostMemory { id, why } => {
                    let name = bus.name();
                    tracing::info!(cause = %name, "{name}: queue {id} lies in the host's memory: {why}");
                }
                Event::NamespaceResized { id, to_blocks, .. } if id == self.namespace => {
                    self.size_watch.set_size(to_blocks);
                }
                Event::QueuePairRefused { id, status } => {
                    self.record_queue_failure(id, || format!("a queue pair was refused: {status}"));
                }
                Event::QueuePairDeleted { id } => {
                    self.record_queue_failure(id, || {
                        "a queue pair was deleted before it was used".to_owned()
                    });
                }
                _ => {}
            }
        }
        self.drop_abandoned_queue_pairs();
    }

    /// Records that a queue pair does not exist and will not be created.
    fn record_queue_failure(&mut self, id: u16, why: impl FnOnce() -> String) {
        match self.asked_for.remove(&id) {
            Some(QueueRequestState::Pending) => {
                self.asked_for.insert(id, QueueRequestState::Failed(why()));
            }
            Some(QueueRequestState::Abandoned { vector: Some(vector) }) => self.free_vector(vector),
            _ => {}
        }
    }

    /// Takes queue pairs that were created too late and drops them, which deletes them.
    fn drop_abandoned_queue_pairs(&mut self) {
        let Self { asked_for, controller: Some(controller), .. } = self else { return };
        let unwanted = |submitted: &QueueRequestState| {
            matches!(submitted, QueueRequestState::Abandoned { .. })
        };
        for (id, _) in asked_for.iter().filter(|(_, submitted)| unwanted(submitted)) {
            drop(controller.take_queue_pair(*id));
        }
    }

    fn free_vector(&mut self, vector: u16) {
        self.vectors_used.remove(&vector);
        self.vectors_free.push(vector);
    }

    /// Marks the controller as lost for all users.
    fn mark_lost(&mut self, bus: &B, why: &str) {
        bus.mark_lost(why);
        self.lost.get_or_insert_with(|| Error::remote(format!("{}: {why}", bus.name())));
        self.drop_controller(bus);
    }

    /// Drops the controller once it can access no memory. Its queue pairs then complete all
    /// requests with an error, and their sleepers are woken. Until then no buffer is returned.
    fn drop_controller(&mut self, bus: &B) {
        if self.controller.is_some() && bus.revoke_dma_access() {
            self.controller = None;
            self.vectors_used.values().for_each(|event| event.signal(0));
        }
    }
}

/// Loop of the admin thread.
struct AttachedAdminLoop<B: ControllerBus> {
    shared: Arc<Shared<B>>,
    stop: StopFlag,
}

impl<B: ControllerBus> EventLoop for AttachedAdminLoop<B> {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() {
            return NextStep::Exit;
        }
        let mut kept = self.shared.lock();
        kept.poll(&self.shared.bus, now);
        match &kept.controller {
            None => NextStep::Exit,
            Some(_) if kept.lost.is_some() => NextStep::SleepUntil(now.after(ADMIN_POLL_MAX)),
            Some(controller) => {
                NextStep::SleepUntil(controller.wake_at().min(now.after(ADMIN_POLL_MAX)))
            }
        }
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.stop.is_stopped()
    }

    fn disarm(&mut self, _: &[u64]) {}
}

/// Polls until the controller is ready. Every state has a timeout.
fn bring_up<B: ControllerBus>(
    bus: &B,
    wanted: &AttachOptions,
    dma: &MappedDma<B>,
    steps: &mut StepTimer,
) -> Result<Controller<B::Registers, MappedDma<B>>, Error> {
    let refuse = |why: String| Error::remote(format!("attach {}: {why}", bus.name()));
    let options = ControllerOptions {
        admin_depth: ADMIN_DEPTH,
        queue_pairs: wanted.queues,
        shadow_doorbells: wanted.shadow_doorbells && !bus.are_doorbells_mapped_memory(),
        memory_buffer: match (B::KIND, wanted.queues_in_cmb) {
            (_, true) => CmbMode::SubmissionQueues,
            (DeviceKind::Pcie, false) => CmbMode::Enabled,
            (DeviceKind::Emulated, false) => CmbMode::Ignored,
        },
        ..ControllerOptions::default()
    };
    // A lost device reads as all ones, which the driver reports as another error; the bus knows the
    // cause.
    let why = |found: String| refuse(bus.lost_reason().unwrap_or(found));
    let mut controller = Controller::new(bus.registers(), dma.clone(), options)
        .map_err(|error| why(error.to_string()))?;
    let mut is_enabled = false;
    loop {
        bus.process_messages();
        if let Some(why) = bus.lost_reason() {
            return Err(refuse(why));
        }
        let event = controller.poll(steps.clock().now());
        if !is_enabled && controller.capabilities().is_some() {
            is_enabled = true;
            steps.finish_step("disable and enable it");
        }
        match event {
            Some(Event::Ready) => {
                steps.finish_step("identify it and its namespaces");
                return Ok(controller);
            }
            Some(Event::Dead(error)) => {
                let refused = why(error.to_string());
                let is_buffer = matches!(error, ControllerError::MemoryBuffer(_));
                return Err(if is_buffer { refused.with_hint(WITHOUT_CMB) } else { refused });
            }
            Some(Event::Removed) => return Err(why("the controller was removed".to_owned())),
            Some(_) => {}
            None => tenmil_linux::named_thread::sleep(PAUSE),
        }
    }
}

/// Size of the memory for the queues and lists of one controller. Unused pages are not backed.
fn queue_memory_bytes(wanted: &AttachOptions) -> u64 {
    let entries = u64::from(wanted.depth) + 1;
    let queue = entries * (64 + 16 + PAGE) + 4 * PAGE;
    (ADMIN_BYTES + u64::from(wanted.queues) * queue).min(u64::from(u32::MAX) & !(PAGE - 1))
}
