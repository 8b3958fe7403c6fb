//! Multipath namespace, and the admin thread of its controllers.
//!
//! ```text
//!   RemoteDevice, … ─▶ MultipathDevice ── multipath driver (under a lock: queue creation, admin)
//!                        └── admin thread: connections, ANA states, timeouts, events
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, Region, RegionTable};
use tenmil_linux::{Clock, EventLoop, NextStep, StopFlag};
use tenmil_nvme_fabrics::{
    Multipath, MultipathChannel, MultipathOptions, PathEvent, PathSetup, QueueRequest,
    TimeoutPolicy, WaitHandle,
};
use tenmil_nvme_host::{ControllerOptions, FastPathOptions, QueuePairOptions, QueueSizes};

use super::admin_thread::{AdminThread, AdminThreadBuilder, wait_for_shutdown};
use super::attached::{Attached, pool_bytes};
use super::channel::QueueSource;
use super::connector::TcpConnector;
use super::name::TcpName;
use super::path_notifier::PathNotifier;
use super::reservations::{ReservationQueue, ReservedNamespace};
use super::wait_set::WaitSet;
use crate::size_watch::SizeWatch;
use tenmil_base::Error;

/// Paths to a namespace, and their admin thread. Dropped with the last device and channel.
pub(super) struct MultipathDevice {
    shared: Arc<Mutex<Multipath>>,
    thread: AdminThread,
    clock: Clock,
    name: TcpName,
    teller: Arc<PathNotifier>,
    growth: Arc<SizeWatch>,
    regions: RegionTable,
    /// Queue pairs may live on when their path is lost.
    _memory: Vec<Arc<Region>>,
}

/// Longest sleep of the admin thread, and poll interval while connecting.
const TENDED: Span = Span::from_ms(100);
const PAUSE: Span = Span::from_us(50);

impl MultipathDevice {
    /// Connects all paths, and waits until each is up or has failed once. At least one must be up.
    pub(super) fn call(name: &TcpName, regions: &RegionTable, clock: Clock) -> Result<Self, Error> {
        let machine = |what: &str, error: &dyn std::fmt::Display| {
            Error::environment(format!("connect to tcp://{}: {what}: {error}", name.address))
        };
        let mut memory = Vec::new();
        let mut setups = Vec::new();
        for address in name.addresses() {
            // Twice the size: a restored path creates new queues while its old ones may still
            // exist.
            let bytes = usize::try_from(2 * pool_bytes(name)).unwrap_or(usize::MAX);
            let region = regions.allocate_region(bytes);
            let region = region.map_err(|error| machine("memory for its queues", &error))?;
            let store = CommandStore::for_device(DeviceKind::Emulated);
            let kind = DeviceKind::Emulated;
            let pool = DevicePool::new(regions.clone(), region.segment(), kind, store);
            pool.map_on_demand();
            let (address, regions) = (address.to_owned(), regions.clone());
            let sockets = name.sockets.clone();
            let make_connector = move || {
                Box::new(TcpConnector::new(&address, &regions, &sockets))
                    as Box<dyn tenmil_nvme_fabrics::Connector>
            };
            setups.push(PathSetup { pool, make_connector: Box::new(make_connector) });
            memory.push(Arc::new(region));
        }
        let wake_set = AdminThreadBuilder::make(name)?;
        let multipath = Multipath::begin(setups, wishes(name), clock.now())
            .map_err(|error| Error::usage(error.to_string()))?;
        let shared = Arc::new(Mutex::new(multipath));
        let teller = Arc::new(PathNotifier::new(name));
        reach(name, &teller, &shared, &clock)?;
        lock(&shared).set_waker(wake_set.idle_wait().waker());
        let (tended, told) = (Arc::clone(&shared), Arc::clone(&teller));
        let growth = Arc::new(SizeWatch::default());
        let grown = Arc::clone(&growth);
        let thread = wake_set.begin(name, clock, |stop, idle_wait| MultipathAdminLoop {
            shared: tended,
            stop,
            idle_wait,
            teller: told,
            growth: grown,
        })?;
        let (name, regions) = (name.clone(), regions.clone());
        Ok(Self { shared, thread, clock, name, teller, growth, regions, _memory: memory })
    }
}

impl MultipathDevice {
    fn check(&self, multipath: &Multipath, now: Instant) -> Result<(), Error> {
        let address = &self.name.address;
        let refused = || Error::remote(format!("tcp://{address}: all paths have been given up"));
        multipath.is_usable(now).then_some(()).ok_or_else(refused)
    }

    /// A queue to the namespace that the paths lead to, and to no other.
    fn checked(&self, attached: Attached) -> Result<ReservationQueue, Error> {
        let (found, expected) = (attached.identity(), self.identity());
        if found != expected {
            let text = |name: Option<String>| name.unwrap_or_else(|| "none".to_owned());
            let (found, expected) = (text(found), text(expected));
            return Err(Error::remote(format!(
                "reserve tcp://{}: found namespace {found}, expected {expected}",
                self.name.address
            )));
        }
        ReservationQueue::of(attached)
    }
}

/// Requests to the paths.
fn wishes(name: &TcpName) -> MultipathOptions {
    let techniques = FastPathOptions::default();
    MultipathOptions {
        options: name.options.clone(),
        controller: ControllerOptions { queue_pairs: name.queues, ..ControllerOptions::default() },
        namespace: name.namespace,
        io_policy: name.io_policy,
        cache: name.cache,
        queue: QueuePairOptions { depth: name.depth + 1, vector: None, techniques },
        sizes: QueueSizes::default(),
    }
}

/// Polls until each path is up or has failed once. Every state has a timeout.
fn reach(
    name: &TcpName,
    teller: &PathNotifier,
    shared: &Mutex<Multipath>,
    clock: &Clock,
) -> Result<(), Error> {
    let mut troubles: Vec<Option<String>> = vec![None; name.addresses().count()];
    loop {
        let now = clock.now();
        let mut multipath = lock(shared);
        let event = multipath.poll(now);
        if let Some(event) = &event {
            teller.report(event);
        }
        match event {
            Some(PathEvent::Down { path, why } | PathEvent::NamespaceMismatch { path, why }) => {
                troubles[path] = Some(why);
            }
            // Other events do not decide the state of a path.
            Some(_) => continue,
            None => {}
        }
        let is_known = |path: usize| multipath.access(path).is_some() || troubles[path].is_some();
        if (0..troubles.len()).all(is_known) {
            if (0..troubles.len()).any(|path| multipath.access(path).is_some()) {
                return Ok(());
            }
            let troubles = name.addresses().zip(&troubles);
            let each: Vec<String> = troubles
                .map(|(address, why)| format!("{address}: {}", why.as_deref().unwrap_or("")))
                .collect();
            let address = &name.address;
            let each = each.join("; ");
            return Err(Error::remote(format!(
                "connect to tcp://{address}: no path leads there: {each}"
            )));
        }
        drop(multipath);
        tenmil_linux::named_thread::sleep(PAUSE);
    }
}

fn lock(shared: &Mutex<Multipath>) -> MutexGuard<'_, Multipath> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for MultipathDevice {
    fn drop(&mut self) {
        self.thread.end();
        let mut multipath = lock(&self.shared);
        multipath.shut_down(self.clock.now());
        wait_for_shutdown(&self.clock, |now| {
            // Events are not reported any more: no user of the device is left.
            let _ = multipath.poll(now);
            multipath.is_shutting_down()
        });
    }
}

impl QueueSource for MultipathDevice {
    type Queue = MultipathChannel;
    type Ticket = QueueRequest;

    fn open_queue(&self) -> Result<QueueRequest, Error> {
        let mut multipath = lock(&self.shared);
        self.check(&multipath, self.clock.now())?;
        let ticket = multipath.open_queue();
        drop(multipath);
        self.thread.wake();
        Ok(ticket)
    }

    /// With a connection on each path that is there.
    fn take_queue(&self, ticket: QueueRequest) -> Result<Option<MultipathChannel>, Error> {
        let now = self.clock.now();
        let mut multipath = lock(&self.shared);
        if let Some(event) = multipath.poll(now) {
            handle_event(&event, &mut multipath, &self.teller, &self.growth);
        }
        self.check(&multipath, now)?;
        Ok(multipath.take_queue(ticket))
    }

    fn close_queue(&self, ticket: QueueRequest) {
        lock(&self.shared).close_queue(ticket);
    }

    fn is_up(&self) -> bool {
        lock(&self.shared).down_since().is_none()
    }

    fn with_wait_handle(
        queue: MultipathChannel,
        wait_set: Box<dyn WaitHandle>,
    ) -> MultipathChannel {
        queue.with_wait_handle(wait_set)
    }

    fn clock(&self) -> (&Clock, &TimeoutPolicy) {
        (&self.clock, &self.name.options.policy)
    }

    fn address(&self) -> &str {
        &self.name.address
    }

    fn queues_max(&self) -> u32 {
        self.name.queues.into()
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.name.supports_kernel_buffers()
    }

    fn identity(&self) -> Option<String> {
        lock(&self.shared).namespace_name()
    }

    fn failure(&self) -> Option<String> {
        let multipath = lock(&self.shared);
        self.check(&multipath, self.clock.now()).err().map(|lost| lost.text)
    }

    fn reserved(&self) -> Option<ReservedNamespace> {
        let mut multipath = lock(&self.shared);
        let nsid = self.name.namespace;
        let known = (0..multipath.paths()).find_map(|path| {
            Some(multipath.remote(path)?.controller().namespace(nsid)?.reservations)
        });
        drop(multipath);
        ReservedNamespace::of(&self.name, known?, &self.regions, self.clock)
    }

    /// A queue of a controller of its own: a reservation belongs to the host, whatever the path.
    fn reservation_queue(&self) -> Result<ReservationQueue, Error> {
        let mut refused = None;
        for address in self.name.addresses() {
            let name = TcpName { address: address.to_owned(), ..self.name.to_one_queue() };
            let attached = Attached::call(&name, &self.regions, self.clock);
            match attached.and_then(|attached| self.checked(attached)) {
                Ok(queue) => return Ok(queue),
                Err(why) => refused = Some(why),
            }
        }
        Err(refused.unwrap_or_else(|| Error::usage("a namespace without a path")))
    }

    fn growth(&self) -> &SizeWatch {
        &self.growth
    }

    fn abandon(&self, queue: &mut MultipathChannel) -> bool {
        queue.drain(self.clock.now())
    }
}

/// Reports an event, and updates the size of the device after a resize.
fn handle_event(
    event: &PathEvent,
    multipath: &mut Multipath,
    teller: &PathNotifier,
    growth: &SizeWatch,
) {
    teller.report(event);
    let is_resized = |event: &tenmil_nvme_host::Event| {
        matches!(event, tenmil_nvme_host::Event::NamespaceResized { .. })
    };
    if matches!(event, PathEvent::Controller { event, .. } if is_resized(event)) {
        // The size is the same on all paths.
        if let Some(blocks) = multipath.block_count() {
            growth.set_size(blocks);
        }
    }
}

/// Loop of the admin thread.
struct MultipathAdminLoop {
    shared: Arc<Mutex<Multipath>>,
    stop: StopFlag,
    idle_wait: WaitSet,
    teller: Arc<PathNotifier>,
    growth: Arc<SizeWatch>,
}

impl EventLoop for MultipathAdminLoop {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() {
            return NextStep::Exit;
        }
        let mut multipath = lock(&self.shared);
        while let Some(event) = multipath.poll(now) {
            handle_event(&event, &mut multipath, &self.teller, &self.growth);
        }
        NextStep::SleepUntil(multipath.wake_at(now).min(now.after(TENDED)))
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.idle_wait.clear();
        self.stop.is_stopped() || lock(&self.shared).arm(&mut self.idle_wait)
    }

    fn handle_wakeup(&mut self, _: &[u64]) {
        lock(&self.shared).disarm();
    }
}
