//! Paths to a namespace, one or several, and the admin thread of their controllers.
//!
//! ```text
//!   RemoteDevice, … ─▶ NamespacePaths ── multipath driver (under a lock: queue creation, admin)
//!                        └── admin thread: connections, ANA states, timeouts, events
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{CompletionBatch, Error, Instant, IoChannel, Limits, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, Region, RegionTable};
use tenmil_linux::{Clock, EventLoop, NextStep, StopFlag};
use tenmil_nvme_fabrics::{
    FabricsChannel, Multipath, MultipathOptions, PathEvent, PathSecurity, PathSetup, QueueRequest,
    WaitHandle as _,
};
use tenmil_nvme_host::{ControllerOptions, Event, FastPathOptions, QueuePairOptions, QueueSizes};

use super::admin_thread::{AdminThread, AdminThreadBuilder, wait_for_shutdown};
use super::connector::new_connector;
use super::fabrics_controller::{AttachedFabricsController, queue_memory_bytes};
use super::path_notifier::PathNotifier;
use super::reservations::{ReservableNamespace, ReservationQueue};
use super::security::DeviceKeys;
use super::tcp_uri::TcpUri;
use super::wait_set::WaitSet;
use crate::size_watch::SizeWatch;

/// Paths to a namespace, and their admin thread. Dropped with the last device and channel.
pub(super) struct NamespacePaths {
    shared: Arc<PathsState>,
    thread: AdminThread,
    clock: Clock,
    name: TcpUri,
    regions: RegionTable,
    /// Keys, which may be replaced while the device exists.
    _keys: DeviceKeys,
    /// Queue pairs may live on when their path is lost.
    _memory: Vec<Arc<Region>>,
}

/// State shared with the admin thread.
struct PathsState {
    multipath: Mutex<Multipath>,
    notifier: PathNotifier,
    size_watch: SizeWatch,
}

/// Longest sleep of the admin thread, and poll interval while connecting.
const TENDED: Span = Span::from_ms(100);
const PAUSE: Span = Span::from_us(50);
/// How long a channel waits for its queue pairs while the device is connected: a refusal is returned to
/// the opener. A lost device may not be detected yet, and other openers wait behind.
const OPEN_WAIT: Span = Span::from_ms(100);

impl NamespacePaths {
    /// Connects all paths, and waits until each is up or has failed once. At least one must be up.
    pub(super) fn connect(
        name: &TcpUri,
        regions: &RegionTable,
        clock: Clock,
    ) -> Result<Self, Error> {
        let keys = DeviceKeys::look_up(name.device(), &name.security, &name.options)?;
        let name = &TcpUri { options: keys.secure(&name.options), ..name.clone() };
        let mut memory = Vec::new();
        let mut setups = Vec::new();
        for address in name.addresses() {
            let (setup, region) = path_setup(name, address, regions, &keys)?;
            setups.push(setup);
            memory.push(Arc::new(region));
        }
        let wake_set = AdminThreadBuilder::new(name)?;
        let multipath = Multipath::begin(setups, multipath_options(name), clock.now())
            .map_err(|error| Error::usage(error.to_string()))?;
        let notifier = PathNotifier::of_paths(name, multipath.path_counters());
        let shared = Arc::new(PathsState {
            multipath: Mutex::new(multipath),
            notifier,
            size_watch: SizeWatch::default(),
        });
        shared.await_paths(name, &clock)?;
        shared.lock().set_waker(wake_set.wait_set().waker());
        let loop_state = Arc::clone(&shared);
        let thread = wake_set.begin(name, clock, |stop, idle_wait| PathsAdminLoop {
            shared: loop_state,
            stop,
            idle_wait,
        })?;
        let (name, regions) = (name.clone(), regions.clone());
        Ok(Self { shared, thread, clock, name, regions, _keys: keys, _memory: memory })
    }

    /// The channel by which the limits of the namespace become known. It is waited for as long as a
    /// connection may take.
    pub(super) fn first_channel(&self) -> Result<FabricsChannel, Error> {
        let end = self.clock.now().after(self.name.options.policy.connect);
        let idle_wait = new_wait_set()?;
        self.check_not_failed()?;
        let request = self.shared.lock().open_queue();
        self.thread.wake();
        let refused = loop {
            let now = self.clock.now();
            let mut multipath = self.shared.lock();
            if let Some(event) = multipath.poll(now) {
                self.shared.report_event_and_update_size(now, &event, &mut multipath);
            }
            if let Some(channel) = multipath.take_queue(request) {
                return Ok(channel.with_wait_handle(Box::new(idle_wait)));
            }
            if let Err(refused) = self.check_request(&multipath, now, request) {
                break refused;
            }
            drop(multipath);
            if now >= end {
                break self.remote_error("a queue was not connected in time");
            }
            tenmil_linux::named_thread::yield_cpu();
        };
        self.shared.lock().close_queue(request);
        Err(refused)
    }

    /// Another channel, with connections of its own. While the device is not connected, nothing is waited
    /// for: the channel is connected when the device is.
    pub(super) fn open_channel(&self, limits: Limits) -> Result<FabricsChannel, Error> {
        let idle_wait = new_wait_set()?;
        self.check_not_failed()?;
        let (request, channel) = self.shared.lock().open_channel(limits);
        self.thread.wake();
        let mut channel = channel.with_wait_handle(Box::new(idle_wait));
        // Nothing was submitted, so nothing completes.
        let mut completions = CompletionBatch::with_capacity(1);
        let end = self.clock.now().after(OPEN_WAIT);
        loop {
            let now = self.clock.now();
            channel.poll(now, &mut completions);
            let mut multipath = self.shared.lock();
            if let Some(event) = multipath.poll(now) {
                self.shared.report_event_and_update_size(now, &event, &mut multipath);
            }
            self.check_request(&multipath, now, request)?;
            let is_connected = multipath.down_since().is_none();
            drop(multipath);
            if channel.accepting_path_count() > 0 || !is_connected || now >= end {
                return Ok(channel);
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Maximum number of channels.
    pub(super) fn queues_max(&self) -> u32 {
        self.shared.lock().queues_max().unwrap_or(self.name.queues).into()
    }

    /// See [`BlockDevice::supports_kernel_buffers`](tenmil_base::BlockDevice::supports_kernel_buffers).
    pub(super) fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.name.supports_kernel_buffers()
    }

    /// See [`BlockDevice::identity`](tenmil_base::BlockDevice::identity).
    pub(super) fn identity(&self) -> Option<String> {
        self.shared.lock().namespace_name().map(str::to_owned)
    }

    /// How its first connected path is secured, for people; `None` if it is not.
    pub(super) fn security_description(&self) -> Option<String> {
        let mut multipath = self.shared.lock();
        let count = multipath.path_count();
        let path = (0..count).find(|path| multipath.ana_state(*path).is_some())?;
        let PathSecurity { cipher_suite, is_authenticated } = path_security(&mut multipath, path);
        let tls = cipher_suite.map(|cipher_suite| format!("TLS ({cipher_suite})"));
        let chap = is_authenticated.then(|| "DH-HMAC-CHAP".to_owned());
        let parts: Vec<String> = tls.into_iter().chain(chap).collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }

    /// See [`BlockDevice::failure_reason`](tenmil_base::BlockDevice::failure_reason).
    pub(super) fn failure(&self) -> Option<String> {
        self.check_not_failed().err().map(|lost| lost.text)
    }

    /// The namespace, if it takes reservations that exclude other hosts from writing.
    pub(super) fn reservable_namespace(&self) -> Option<ReservableNamespace> {
        let rescap = self.shared.lock().namespace()?.reservations;
        ReservableNamespace::from_name(&self.name, rescap, &self.regions, self.clock)
    }

    /// A queue for reservation commands, of a controller of its own: a reservation belongs to the host,
    /// whatever the path.
    pub(super) fn reservation_queue(&self) -> Result<ReservationQueue, Error> {
        let mut refused = None;
        for address in self.name.addresses() {
            let name = TcpUri { address: address.to_owned(), ..self.name.to_one_queue() };
            let attached = AttachedFabricsController::connect(&name, &self.regions, self.clock);
            match attached.and_then(|attached| self.reservation_queue_if_same_namespace(attached)) {
                Ok(queue) => return Ok(queue),
                Err(why) => refused = Some(why),
            }
        }
        Err(refused.unwrap_or_else(|| Error::usage("a namespace without a path")))
    }

    /// How long the namespace is by now.
    pub(super) fn size_watch(&self) -> &SizeWatch {
        &self.shared.size_watch
    }

    /// A queue to the namespace that the paths lead to, and to no other.
    fn reservation_queue_if_same_namespace(
        &self,
        attached: AttachedFabricsController,
    ) -> Result<ReservationQueue, Error> {
        let (found, expected) = (attached.namespace_name(), self.identity());
        if found != expected {
            let text = |name: Option<String>| name.unwrap_or_else(|| "none".to_owned());
            let (found, expected) = (text(found), text(expected));
            return Err(Error::remote(format!(
                "reserve tcp://{}: found namespace {found}, expected {expected}",
                self.name.address
            )));
        }
        ReservationQueue::from_attached(attached)
    }

    fn check_not_failed(&self) -> Result<(), Error> {
        let now = self.clock.now();
        let multipath = self.shared.lock();
        multipath.failure_reason(now).map_or(Ok(()), |why| Err(self.remote_error(why)))
    }

    /// Checks that a queue is, or may be, connected.
    fn check_request(
        &self,
        multipath: &Multipath,
        now: Instant,
        request: QueueRequest,
    ) -> Result<(), Error> {
        let why = multipath.failure_reason(now).or_else(|| multipath.queue_refusal(request));
        why.map_or(Ok(()), |why| Err(self.remote_error(why)))
    }

    fn remote_error(&self, problem: &str) -> Error {
        Error::remote(format!("tcp://{}: {problem}", self.name.address))
    }
}

impl Drop for NamespacePaths {
    fn drop(&mut self) {
        self.thread.end();
        let mut multipath = self.shared.lock();
        multipath.shut_down(self.clock.now());
        wait_for_shutdown(&self.clock, |now| {
            // Events are not reported any more: no user of the device is left.
            let _ = multipath.poll(now);
            multipath.is_shutting_down()
        });
    }
}

impl PathsState {
    fn lock(&self) -> MutexGuard<'_, Multipath> {
        self.multipath.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls until each path is up or has failed once. Every state has a timeout.
    fn await_paths(&self, name: &TcpUri, clock: &Clock) -> Result<(), Error> {
        let mut troubles: Vec<Option<String>> = vec![None; name.addresses().count()];
        loop {
            let now = clock.now();
            let mut multipath = self.lock();
            let event = multipath.poll(now);
            if let Some(event) = &event {
                self.report_event(now, event, &mut multipath);
            }
            match event {
                Some(
                    PathEvent::Down { path, why } | PathEvent::NamespaceMismatch { path, why },
                ) => {
                    troubles[path] = Some(why);
                }
                // Other events do not decide the state of a path.
                Some(_) => continue,
                None => {}
            }
            let is_up = |path: usize| multipath.ana_state(path).is_some();
            if (0..troubles.len()).all(|path| is_up(path) || troubles[path].is_some()) {
                if (0..troubles.len()).any(is_up) {
                    return Ok(());
                }
                return Err(no_path_error(name, &troubles, multipath.path_error(0)));
            }
            drop(multipath);
            tenmil_linux::named_thread::sleep(PAUSE);
        }
    }

    /// Reports an event; of a path that is up, how it is secured too.
    fn report_event(&self, now: Instant, event: &PathEvent, multipath: &mut Multipath) {
        if let PathEvent::Up { path, .. } = event {
            self.notifier.record_security(*path, path_security(multipath, *path));
        }
        self.notifier.report(now, event);
    }

    /// Reports an event, and updates the size of the device after a resize.
    fn report_event_and_update_size(
        &self,
        now: Instant,
        event: &PathEvent,
        multipath: &mut Multipath,
    ) {
        self.report_event(now, event, multipath);
        if let PathEvent::Controller { event: Event::NamespaceResized { .. }, .. } = event {
            // The size is the same on all paths.
            if let Some(blocks) = multipath.block_count() {
                self.size_watch.set_size(blocks);
            }
        }
    }
}

/// How the connections of a path are secured; not at all while it has no controller.
fn path_security(multipath: &mut Multipath, path: usize) -> PathSecurity {
    let Some(remote) = multipath.path_controller(path) else { return PathSecurity::default() };
    let cipher_suite = remote.secure_channel().map(|channel| channel.cipher_suite);
    PathSecurity { cipher_suite, is_authenticated: remote.is_authenticated() }
}

/// A path to `address`, and its memory.
fn path_setup(
    name: &TcpUri,
    address: &str,
    regions: &RegionTable,
    keys: &DeviceKeys,
) -> Result<(PathSetup, Region), Error> {
    // Twice the size for one path of several: a later controller creates new queues while the old ones may
    // still exist. The controller of the only path is not replaced.
    let controllers = if name.others.is_empty() { 1 } else { 2 };
    let bytes = usize::try_from(controllers * queue_memory_bytes(name)).unwrap_or(usize::MAX);
    let region = regions.allocate_region(bytes).map_err(|error| {
        let address = &name.address;
        Error::environment(format!("connect to tcp://{address}: memory for its queues: {error}"))
    })?;
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), region.segment(), DeviceKind::Emulated, store);
    pool.map_on_demand();
    let (address, regions) = (address.to_owned(), regions.clone());
    let (sockets, keys) = (name.sockets.clone(), keys.clone());
    let make_connector = move || new_connector(&address, &regions, &sockets, &keys);
    Ok((PathSetup { pool, make_connector: Box::new(make_connector) }, region))
}

/// Requests to the paths.
fn multipath_options(name: &TcpUri) -> MultipathOptions {
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

/// The error if no path is up: that of the only one, or one with the reason for each.
fn no_path_error(name: &TcpUri, troubles: &[Option<String>], first: Option<&Error>) -> Error {
    if let (true, Some(error)) = (name.others.is_empty(), first) {
        return error.clone();
    }
    let troubles = name.addresses().zip(troubles);
    let each: Vec<String> = troubles
        .map(|(address, why)| format!("{address}: {}", why.as_deref().unwrap_or("")))
        .collect();
    let (address, each) = (&name.address, each.join("; "));
    Error::remote(format!("connect to tcp://{address}: no path leads there: {each}"))
}

fn new_wait_set() -> Result<WaitSet, Error> {
    let refused = |error| Error::environment(format!("make a descriptor to sleep on: {error}"));
    WaitSet::new().map_err(refused)
}

/// Loop of the admin thread.
struct PathsAdminLoop {
    shared: Arc<PathsState>,
    stop: StopFlag,
    idle_wait: WaitSet,
}

impl EventLoop for PathsAdminLoop {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() {
            return NextStep::Exit;
        }
        let mut multipath = self.shared.lock();
        while let Some(event) = multipath.poll(now) {
            self.shared.report_event_and_update_size(now, &event, &mut multipath);
        }
        NextStep::SleepUntil(multipath.wake_at(now).min(now.after(TENDED)))
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.idle_wait.clear();
        self.stop.is_stopped() || self.shared.lock().arm(&mut self.idle_wait)
    }

    fn disarm(&mut self, _: &[u64]) {
        self.shared.lock().disarm();
    }
}
