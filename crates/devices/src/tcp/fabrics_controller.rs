//! A connected remote controller for admin commands, and its admin thread.
//!
//! Block devices have the controllers of their [paths](super::paths).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Error, Instant, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, Region, RegionTable};
use tenmil_linux::{Clock, EventLoop, NextStep, StopFlag};
use tenmil_nvme_fabrics::{
    ConnectingController, FabricsController, FabricsQueuePair, WaitHandle as _,
};
use tenmil_nvme_host::{
    ControllerOptions, ControllerState, Event, FastPathOptions, QueuePairOptions, QueueSizes,
    RequestError, ResetCause, ShutdownNotification,
};

use super::admin_thread::{AdminThread, AdminThreadBuilder, wait_for_shutdown};
use super::connector::new_connector;
use super::path_notifier::PathNotifier;
use super::security::DeviceKeys;
use super::tcp_uri::TcpUri;
use super::wait_set::WaitSet;

/// A remote controller and its admin thread.
pub(super) struct AttachedFabricsController {
    shared: Arc<RemoteState>,
    /// Stopped before the controller is shut down.
    thread: AdminThread,
    pub(super) clock: Clock,
    name: TcpUri,
    /// Keys, which may be replaced while the controller is connected.
    _keys: DeviceKeys,
    _memory: Region,
}

struct RemoteState {
    remote: Mutex<RemoteControllerState>,
}

/// State behind the lock.
struct RemoteControllerState {
    remote: FabricsController,
    /// Completions of admin commands that a caller waits for.
    completions: Vec<tenmil_base::IoCompletion>,
    /// The last queue pair that the controller has not created, and why.
    refused: Option<(u16, String)>,
    /// Why it is not there any more.
    lost: Option<String>,
    health: ConnectionEventCounts,
    /// Time at which the connection was lost, while it is.
    disconnected_since: Option<Instant>,
    teller: PathNotifier,
}

/// Connection events of a remote controller or discovery service so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionEventCounts {
    /// Number of asynchronous events about a changed log page.
    pub(super) notices: u64,
    /// Number of times the connection was lost, and restored.
    pub(super) losses: u64,
    pub(super) returns: u64,
    /// Why the connection is lost, while it is.
    pub(super) disconnect_reason: Option<String>,
}

/// Memory for the data of admin commands.
const ADMIN_BYTES: u64 = 256 << 10;
/// Memory of an I/O command, for the ranges of Dataset Management and Copy.
const COMMAND_BYTES: u64 = 64;
const PAGE: u64 = 4096;
/// Longest sleep of the admin thread.
const TENDED: Span = Span::from_ms(100);

impl AttachedFabricsController {
    /// Connects and initializes the controller. Its queues and admin data are allocated in
    /// `regions`.
    pub(super) fn connect(
        name: &TcpUri,
        regions: &RegionTable,
        clock: Clock,
    ) -> Result<Self, Error> {
        let environment_error = |what: &str, error: &dyn std::fmt::Display| {
            Error::environment(format!("connect to tcp://{}: {what}: {error}", name.address))
        };
        let keys = DeviceKeys::look_up(name.device(), &name.security, &name.options)?;
        let name = &TcpUri { options: keys.secure(&name.options), ..name.clone() };
        let memory = regions
            .allocate_region(usize::try_from(queue_memory_bytes(name)).unwrap_or(usize::MAX))
            .map_err(|error| environment_error("memory for its queues", &error))?;
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory.segment(), DeviceKind::Emulated, store);
        pool.map_on_demand();
        let wake_set = AdminThreadBuilder::new(name)?;
        let teller = PathNotifier::of_controller(name);
        let remote = bring_up(name, (pool, regions), &keys, &clock, &teller)?;
        let kept = RemoteControllerState {
            remote,
            completions: Vec::new(),
            refused: None,
            lost: None,
            health: ConnectionEventCounts::default(),
            disconnected_since: None,
            teller,
        };
        let shared = Arc::new(RemoteState { remote: Mutex::new(kept) });
        let loop_state = Arc::clone(&shared);
        // From here on an event of the connection wakes the admin thread.
        shared.lock().remote.set_waker(wake_set.waker());
        let thread = wake_set.begin(name, clock, |stop, idle_wait| TcpAdminLoop {
            shared: loop_state,
            stop,
            idle_wait,
            watched: 0,
        })?;
        Ok(Self { shared, thread, clock, name: name.clone(), _keys: keys, _memory: memory })
    }

    /// Does something with the controller.
    pub(super) fn with_controller_locked<T>(
        &self,
        work: impl FnOnce(&mut FabricsController) -> T,
    ) -> T {
        let result = work(&mut self.shared.lock().remote);
        self.thread.wake();
        result
    }

    /// Connection events so far.
    ///
    /// # Errors
    ///
    /// If the controller is lost.
    pub(super) fn connection_event_counts(&self) -> Result<ConnectionEventCounts, Error> {
        let mut kept = self.shared.lock();
        kept.poll_controller(self.clock.now());
        kept.check_not_lost(&self.name)?;
        Ok(kept.health.clone())
    }

    /// Waits for the completion of the admin command with this token.
    pub(super) fn await_completion(&self, token: u64) -> Result<tenmil_base::IoCompletion, Error> {
        let end = self.clock.now().after(Span::from_secs(60));
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.poll_controller(now);
            let found = kept.completions.iter().position(|completion| completion.token == token);
            if let Some(at) = found {
                return Ok(kept.completions.swap_remove(at));
            }
            kept.check_not_lost(&self.name)?;
            drop(kept);
            if now >= end {
                return Err(self.remote_error("an admin command timed out"));
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// A queue pair, which is waited for as long as a connection may take.
    pub(super) fn connect_queue_pair(&self) -> Result<FabricsQueuePair, Error> {
        let end = self.clock.now().after(self.name.options.policy.connect);
        let mut requested = None;
        loop {
            let now = self.clock.now();
            let mut kept = self.shared.lock();
            kept.poll_controller(now);
            kept.check_not_lost(&self.name)?;
            kept.check_namespace(&self.name)?;
            let RemoteControllerState { remote, refused, .. } = &mut *kept;
            if let Some((_, why)) = refused.take_if(|(id, _)| requested == Some(*id)) {
                return Err(self.remote_error(&format!("a queue was refused: {why}")));
            }
            match requested {
                Some(id) => {
                    let sizes = QueueSizes::default();
                    if let Some(pair) = remote.take_queue_pair(id, self.name.namespace, sizes) {
                        return Ok(pair);
                    }
                }
                None => requested = self.request_queue_pair(now, remote)?,
            }
            drop(kept);
            self.thread.wake();
            if now >= end {
                return Err(self.remote_error("a queue was not connected in time"));
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Requests a queue pair, if the controller is ready. Returns its identifier.
    fn request_queue_pair(
        &self,
        now: Instant,
        remote: &mut FabricsController,
    ) -> Result<Option<u16>, Error> {
        let controller = remote.controller();
        let most = controller.capabilities().map_or(2, |known| known.depth_max);
        let depth = (self.name.depth + 1).clamp(2, most);
        let techniques = FastPathOptions::default();
        let options = QueuePairOptions { depth, vector: None, techniques };
        match controller.create_queue_pair(now, options) {
            Ok(id) => Ok(Some(id)),
            Err(RequestError::NotReady) => Ok(None),
            Err(refusal) => Err(self.remote_error(&refusal.to_string())),
        }
    }

    /// World-wide name of the namespace.
    pub(super) fn namespace_name(&self) -> Option<String> {
        self.shared.lock().remote.namespace_name(self.name.namespace)
    }

    fn remote_error(&self, problem: &str) -> Error {
        Error::remote(format!("tcp://{}: {problem}", self.name.address))
    }
}

impl Drop for AttachedFabricsController {
    fn drop(&mut self) {
        self.thread.end();
        let mut kept = self.shared.lock();
        // A controller that cannot be shut down is dropped, which closes its connections.
        let now = self.clock.now();
        let _ = kept.remote.controller().start_shutdown(now, ShutdownNotification::Normal);
        wait_for_shutdown(&self.clock, |now| {
            kept.poll_controller(now);
            kept.remote.controller().state() == ControllerState::ShuttingDown
        });
    }
}

impl ConnectionEventCounts {
    /// Whether the connection is lost now and was lost again since `before`.
    pub(super) const fn is_newly_disconnected(&self, before: &Self) -> bool {
        self.disconnect_reason.is_some() && self.losses > before.losses
    }
}

impl RemoteState {
    fn lock(&self) -> MutexGuard<'_, RemoteControllerState> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RemoteControllerState {
    fn poll_controller(&mut self, now: Instant) {
        while let Some(event) = self.remote.poll(now) {
            match event {
                Event::AdminCompleted(completion) => self.completions.push(completion),
                Event::QueuePairRefused { id, status } => {
                    let error = self.remote.last_error();
                    let why = error.map_or_else(|| status.to_string(), |error| error.text);
                    self.refused = Some((id, why));
                }
                Event::Dead(error) => self.mark_lost(error.to_string()),
                Event::Removed => {
                    let why = self.remote.last_error().map(|error| error.text);
                    self.mark_lost(why.unwrap_or_else(|| "the controller was removed".to_owned()));
                }
                Event::Notice { .. } => self.health.notices += 1,
                Event::ResetStarted { cause } => {
                    // Invalid data from the peer is the more precise cause; `remote.last_error()` is the
                    // reason of the transport.
                    let invalid_data = match cause {
                        ResetCause::InvalidData(invalid_data) => Some(invalid_data.to_string()),
                        _ => None,
                    };
                    let is_other =
                        invalid_data.is_some() && self.health.disconnect_reason != invalid_data;
                    let why =
                        invalid_data.or_else(|| self.remote.last_error().map(|error| error.text));
                    let why = why.unwrap_or_else(|| "it is being reset".to_owned());
                    // Several resets may follow before the connection is restored. They are
                    // reported once, unless the cause changes.
                    if self.disconnected_since.is_none() || is_other {
                        self.disconnected_since.get_or_insert(now);
                        self.teller.notify_lost(&why);
                    }
                    self.health.disconnect_reason = Some(why);
                    self.health.losses += 1;
                }
                Event::Recovered => {
                    let since = self.disconnected_since.take().unwrap_or(now);
                    self.teller.notify_restored(now.since(since));
                    self.health.disconnect_reason = None;
                    self.health.returns += 1;
                }
                event => self.teller.notify_controller_event(event),
            }
        }
    }

    fn mark_lost(&mut self, why: String) {
        self.teller.notify_removed(&why);
        self.lost = Some(why);
    }

    fn check_not_lost(&mut self, name: &TcpUri) -> Result<(), Error> {
        match &self.lost {
            Some(why) => Err(Error::remote(format!("tcp://{}: {why}", name.address))),
            None => Ok(()),
        }
    }

    fn check_namespace(&mut self, name: &TcpUri) -> Result<(), Error> {
        let controller = self.remote.controller();
        if controller.namespace(name.namespace).is_some() {
            return Ok(());
        }
        let ids: Vec<String> = controller.namespaces().map(|known| known.id.to_string()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        Err(Error::usage(format!(
            "tcp://{}: no namespace {} in {}, expected one of: {ids}",
            name.address, name.namespace, name.options.subsystem
        )))
    }
}

/// Loop of the admin thread.
struct TcpAdminLoop {
    shared: Arc<RemoteState>,
    stop: StopFlag,
    idle_wait: WaitSet,
    /// Number of the connection in the wait set.
    watched: u64,
}

impl EventLoop for TcpAdminLoop {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() {
            return NextStep::Exit;
        }
        let mut kept = self.shared.lock();
        kept.poll_controller(now);
        NextStep::SleepUntil(kept.remote.wake_at(now).min(now.after(TENDED)))
    }

    fn arm(&mut self, _: Instant) -> bool {
        let mut kept = self.shared.lock();
        let number = kept.remote.connection_stats().connected;
        if number != self.watched && self.idle_wait.watch(kept.remote.wake_source()) {
            self.watched = number;
        }
        self.stop.is_stopped() || kept.remote.arm()
    }

    fn disarm(&mut self, _: &[u64]) {
        self.shared.lock().remote.disarm();
    }
}

/// Connects and polls until the controller is ready. Every state has a timeout.
fn bring_up(
    name: &TcpUri,
    (pool, regions): (DevicePool, &RegionTable),
    keys: &DeviceKeys,
    clock: &Clock,
    teller: &PathNotifier,
) -> Result<FabricsController, Error> {
    let connector = new_connector(&name.address, regions, &name.sockets, keys);
    let controller_options =
        ControllerOptions { queue_pairs: name.queues, ..ControllerOptions::default() };
    let options = name.options.clone();
    let mut calling =
        ConnectingController::begin(pool, connector, options, controller_options, clock.now())
            .map_err(Error::from)?;
    // First the admin connection, then the controller.
    let mut remote = loop {
        if let Some(ended) = calling.poll(clock.now()) {
            break ended.map_err(Error::from)?;
        }
        tenmil_linux::named_thread::sleep(PAUSE);
    };
    loop {
        match remote.poll(clock.now()) {
            Some(Event::Ready) => return Ok(remote),
            Some(Event::Dead(error)) => {
                let error = remote.last_error().unwrap_or_else(|| Error::remote(error));
                return Err(error.with_context(format_args!("tcp://{}", name.address)));
            }
            Some(Event::Removed) => {
                let error = remote.last_error().unwrap_or_else(|| Error::remote(ALL_ONES));
                return Err(error.with_context(format_args!("tcp://{}", name.address)));
            }
            Some(event) => teller.notify_controller_event(event),
            None => tenmil_linux::named_thread::sleep(PAUSE),
        }
    }
}

/// Reason given when a controller was removed without a transport error.
const ALL_ONES: &str = "a register reads as ones, expected the value of a controller that is there";

/// Poll interval while the caller has nothing else to do.
const PAUSE: Span = Span::from_us(50);

/// Size of the memory for the commands of one controller. Unused pages are not backed.
pub(super) fn queue_memory_bytes(name: &TcpUri) -> u64 {
    let entries = u64::from(name.depth) + 1;
    // And a page for the messages of an authentication.
    let authentication = if name.security.dhchap.is_some() { PAGE } else { 0 };
    let queue = (entries * COMMAND_BYTES).next_multiple_of(PAGE) + PAGE + authentication;
    ADMIN_BYTES + u64::from(name.queues) * queue
}
