//! One or several paths to a namespace, with a controller for each and channels that use all of them.
//!
//! ```text
//!   Multipath ─┬─ path 0: FabricsController ── ANA log ─┐              FabricsChannel, one per thread
//!              ├─ path 1: FabricsController ── ANA log ─┼── path states ────▶  path selector
//!              └─ …                                     └── queue inboxes ──▶  failover rules
//! ```
//!
//! A [`Multipath`] belongs to one thread, which manages all controllers, and creates a queue pair on each
//! of them for each queue. Queues are notified when paths are connected or lost.
//!
//! A device with a single path is a multipath of one, with one difference: its controller is not replaced.
//! If it fails permanently, or its reconnects have ended (ctrl-loss timeout), the device is gone.

mod controller_fencing;
mod fabrics_channel;
mod failover;
mod path;
mod path_event;
mod path_selector;
mod path_states;

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{Error, Instant, Limits, SharedWaker};
use tenmil_nvme_host::{
    ControllerOptions, ControllerState, Event, Namespace, QueuePairOptions, QueueSizes,
    RequestError, ShutdownNotification,
};

use crate::cache_tracker::CacheScope;
use crate::fabrics_controller::FabricsController;
use crate::options::{InvalidNqn, Options};
use crate::path_table::PathCounters;
use crate::wait_handle::WaitHandle;
use controller_fencing::ControllerFencing;
pub use fabrics_channel::FabricsChannel;
pub use path::PathSetup;
use path::{NamespaceMismatch, Path, PathStage, PathUpdate};
pub use path_event::PathEvent;
pub use path_selector::{IoPolicy, PathAnaState};
use path_selector::{PathSelector, PathView};
use path_states::{PathStates, QueueInbox};

/// The paths to one namespace, and their controllers.
pub struct Multipath {
    paths: Vec<Path>,
    shared: Arc<PathStates>,
    queues: Vec<MultipathQueue>,
    options: MultipathOptions,
    /// The namespace as the first path reports it; all others have to report the same.
    first_namespace: Option<FirstNamespace>,
    events: VecDeque<PathEvent>,
    /// The best path, as last reported.
    best_path: Option<usize>,
    /// Since when no path is usable.
    down_since: Option<Instant>,
    /// Why the only path is gone.
    removed: Option<String>,
    /// Resets of old controllers by other ones.
    fences: ControllerFencing,
    next_queue: u64,
}

/// Options of a multipath device.
#[derive(Clone, Debug)]
pub struct MultipathOptions {
    /// Connection options: subsystem, host and negotiated features.
    pub options: Options,
    /// Options of each controller.
    pub controller: ControllerOptions,
    /// Namespace ID.
    pub namespace: u32,
    /// I/O policy.
    pub io_policy: IoPolicy,
    /// Scope of the controllers' volatile caches. With one path, another controller is always one with
    /// another cache.
    pub cache: CacheScope,
    /// Options of queue pairs; their depth is limited by the controller.
    pub queue: QueuePairOptions,
    /// Table sizes of each queue.
    pub sizes: QueueSizes,
}

/// The namespace as first reported.
struct FirstNamespace {
    /// The path that reported it.
    path: usize,
    namespace: Namespace,
    /// World-wide name, if it has one.
    name: Option<String>,
    /// Completed writes may be in a volatile cache.
    has_cache: bool,
}

/// Maximum number of paths.
pub const PATHS_MAX: usize = 16;

/// A requested queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRequest(u64);

/// A queue, as the managing thread knows it.
struct MultipathQueue {
    number: u64,
    inbox: Arc<QueueInbox>,
    /// It has been taken. If its inbox has no other owner, it has been dropped.
    is_taken: bool,
    /// Its queue pairs, by path.
    pairs: Vec<PathQueuePairState>,
    /// Why a controller has not created the last one that was requested.
    refusal: Option<String>,
}

/// A queue pair of a queue on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathQueuePairState {
    None,
    Requested {
        id: u16,
    },
    Created {
        id: u16,
    },
    /// Rejected; retried after the controller has reconnected, or at this time if the queue has no queue
    /// pair on another path.
    Rejected {
        retry_at: Instant,
    },
}

impl Multipath {
    /// Starts to connect all paths.
    ///
    /// # Errors
    ///
    /// If an NQN is invalid.
    ///
    /// # Panics
    ///
    /// If there are more than [`PATHS_MAX`] paths.
    pub fn begin(
        paths: Vec<PathSetup>,
        options: MultipathOptions,
        now: Instant,
    ) -> Result<Self, InvalidNqn> {
        let count = paths.len();
        assert!(count <= PATHS_MAX, "{count} paths, expected at most {PATHS_MAX}");
        options.options.check_nqns()?;
        let bugs = options.options.injected_bugs;
        let is_only = count == 1;
        let cache = if is_only { CacheScope::Separate } else { options.cache };
        let shared = Arc::new(PathStates::new(count, cache, bugs));
        let fences = ControllerFencing::new(count);
        let caches = shared.caches();
        let path = |(index, setup)| Path::new(setup, (Arc::clone(caches), index), is_only, now);
        let paths = paths.into_iter().enumerate().map(path).collect();
        Ok(Self {
            paths,
            shared,
            queues: Vec::new(),
            options,
            first_namespace: None,
            events: VecDeque::new(),
            best_path: None,
            down_since: Some(now),
            removed: None,
            fences,
            next_queue: 0,
        })
    }

    /// Counters of the device's requests.
    pub fn path_counters(&self) -> &Arc<PathCounters> {
        self.shared.counters()
    }

    /// Performs a bounded amount of work and returns the next event.
    pub fn poll(&mut self, now: Instant) -> Option<PathEvent> {
        self.refresh_stale_states();
        self.remove_dropped_queues();
        for index in 0..self.paths.len() {
            self.poll_path(now, index);
            if self.paths[index].connected_controller().is_some() {
                self.request_queue_pairs(now, index);
            } else {
                // The queue pairs end with their controller.
                self.queues
                    .iter_mut()
                    .for_each(|queue| queue.pairs[index] = PathQueuePairState::None);
            }
        }
        self.fences.poll(now, &mut self.paths);
        self.give_up_only_path(now);
        self.events.pop_front()
    }

    fn poll_path(&mut self, now: Instant, index: usize) {
        let Self { paths, options, first_namespace, .. } = self;
        let mut check = |remote: &mut FabricsController| {
            check_namespace(remote, index, options, first_namespace)
        };
        let path = &mut paths[index];
        let before = path.access;
        let failed = path.failed_connects();
        let new_events = path.poll(now, &options.options, options.controller, &mut check);
        if path.failed_connects() != failed {
            self.shared.counters().set_failed_connects(index, path.failed_connects());
        }
        let Some(new_events) = new_events else { return };
        match new_events {
            PathUpdate::Access(access) => self.handle_ana_state(now, index, before, access),
            PathUpdate::Down(why) => self.handle_path_down(now, index, why),
            PathUpdate::NamespaceMismatch(why) => {
                self.shared.set_ana_state(index, PathAnaState::default());
                self.publish_states();
                self.events.push_back(PathEvent::NamespaceMismatch { path: index, why });
            }
            PathUpdate::Removed(why) => self.handle_device_removed(now, index, why),
            PathUpdate::Controller(event) => self.handle_event(now, index, event),
        }
    }

    /// Handles a new ANA state of a path.
    fn handle_ana_state(
        &mut self,
        now: Instant,
        path: usize,
        before: Option<PathAnaState>,
        access: PathAnaState,
    ) {
        self.shared.set_ana_state(path, access);
        // Even without a change: queues that requested the refresh are waiting.
        self.publish_states();
        match before {
            None => {
                for queue in &mut self.queues {
                    if let PathQueuePairState::Rejected { .. } = queue.pairs[path] {
                        queue.pairs[path] = PathQueuePairState::None;
                    }
                }
                // Keep Alive completions of the others prove that they are alive at the same time as this
                // one, so that they can cover it.
                let others = self.paths.iter_mut().enumerate().filter(|(other, _)| *other != path);
                for remote in others.filter_map(|(_, other)| other.connected_controller()) {
                    remote.controller().request_keep_alive(now);
                }
                self.events.push_back(PathEvent::Up { path, access });
            }
            Some(before) if before == access => {}
            Some(_) => self.events.push_back(PathEvent::AnaChanged { path, access }),
        }
        self.update_best_path(now);
    }

    fn handle_path_down(&mut self, now: Instant, path: usize, why: String) {
        self.shared.set_ana_state(path, PathAnaState::default());
        self.publish_states();
        self.events.push_back(PathEvent::Down { path, why });
        self.update_best_path(now);
    }

    /// Handles the end of the only path.
    fn handle_device_removed(&mut self, now: Instant, path: usize, why: String) {
        self.shared.set_ana_state(path, PathAnaState::default());
        self.shared.record_device_gone();
        self.publish_states();
        self.removed = Some(why.clone());
        self.update_best_path(now);
        self.events.push_back(PathEvent::Removed { path, why });
    }

    /// Ends the only path if it has led to another namespace, or to none, for as long as reconnects may
    /// take. A connected controller ends by itself.
    fn give_up_only_path(&mut self, now: Instant) {
        let limit = self.options.options.policy.give_up;
        let is_overdue = self.down_since.is_some_and(|since| now.since(since) >= limit);
        let [path] = &mut self.paths[..] else { return };
        if is_overdue && path.is_abandoned() {
            path.stop_reconnecting();
            let why = path
                .down_reason()
                .map_or_else(|| "it was given up".to_owned(), |it| it.text.clone());
            self.handle_device_removed(now, 0, why);
        }
    }

    /// Emits events on changes of the best path.
    fn update_best_path(&mut self, now: Instant) {
        let view = |path: &Path| PathView {
            is_open: path.access.is_some(),
            access: path.access.unwrap_or_default(),
            ..PathView::default()
        };
        let views: Vec<PathView> = self.paths.iter().map(view).collect();
        let best_path = PathSelector::new(IoPolicy::ActivePassive).choose(&views);
        match (self.best_path, best_path) {
            (Some(from), Some(to)) if from != to => {
                self.events.push_back(PathEvent::Failover { from, to });
            }
            (Some(_), None) => self.events.push_back(PathEvent::AllPathsDown),
            _ => {}
        }
        match best_path {
            Some(_) => self.down_since = None,
            None => {
                self.down_since.get_or_insert(now);
            }
        }
        self.best_path = best_path;
    }

    fn handle_event(&mut self, now: Instant, path: usize, event: Event) {
        match event {
            Event::QueuePairCreated { id } => self.attach_queue_pair(now, path, id),
            Event::QueuePairRefused { id, status } => {
                let last_error =
                    self.paths[path].connected_controller().and_then(FabricsController::last_error);
                let why = last_error.map_or_else(|| status.to_string(), |error| error.text);
                let rejected = self.rejected_pair_state(now);
                if let Some(queue) = self.set_pair_state(path, id, rejected) {
                    queue.refusal = Some(format!("a queue was refused: {why}"));
                }
            }
            Event::AdminCompleted(completion)
                if ControllerFencing::is_reset_completion(&completion) =>
            {
                if let Some(of) = self.fences.handle_completion(&mut self.paths, path, &completion)
                {
                    self.events.push_back(PathEvent::ControllerFenced { path: of, by: path });
                }
            }
            event => self.events.push_back(PathEvent::Controller { path, event }),
        }
    }

    /// The state of a queue pair that was rejected now.
    fn rejected_pair_state(&self, now: Instant) -> PathQueuePairState {
        PathQueuePairState::Rejected { retry_at: now.after(self.options.options.policy.retry) }
    }

    fn set_pair_state(
        &mut self,
        path: usize,
        id: u16,
        to: PathQueuePairState,
    ) -> Option<&mut MultipathQueue> {
        let has_id = |pair: PathQueuePairState| {
            pair == PathQueuePairState::Requested { id }
                || pair == PathQueuePairState::Created { id }
        };
        let queue = self.queues.iter_mut().find(|queue| has_id(queue.pairs[path]))?;
        queue.pairs[path] = to;
        Some(queue)
    }

    /// Hands a created queue pair over to the queue that requested it.
    fn attach_queue_pair(&mut self, now: Instant, path: usize, id: u16) {
        let (nsid, sizes) = (self.options.namespace, self.options.sizes);
        let queue_pair = self.paths[path]
            .connected_controller()
            .and_then(|remote| remote.take_queue_pair(id, nsid, sizes));
        // Without a queue that needs it, or memory, the queue pair is dropped.
        let pair = if queue_pair.is_some() {
            PathQueuePairState::Created { id }
        } else {
            self.rejected_pair_state(now)
        };
        let Some(queue) = self.set_pair_state(path, id, pair) else { return };
        if let Some(queue_pair) = queue_pair {
            queue.inbox.send(|pairs| pairs.push((path, queue_pair)));
        }
    }

    /// Publishes changed path states.
    fn publish_states(&self) {
        self.queues.iter().for_each(|queue| queue.inbox.send(|_| {}));
    }

    fn refresh_stale_states(&mut self) {
        let stale_states = self.shared.stale_states.take().unwrap_or_default();
        for (index, path) in self.paths.iter_mut().enumerate() {
            if stale_states >> index & 1 == 1 {
                path.refresh_ana();
            }
        }
    }

    /// Removes queues that were dropped.
    fn remove_dropped_queues(&mut self) {
        self.queues.retain(|queue| !queue.is_taken || Arc::strong_count(&queue.inbox) > 1);
    }

    /// Requests missing queue pairs from the controller of a path.
    fn request_queue_pairs(&mut self, now: Instant, path: usize) {
        let Self { paths, queues, options, .. } = self;
        if paths[path].access.is_none() {
            return;
        }
        let Some(remote) = paths[path].connected_controller() else { return };
        let retry_at = now.after(options.options.policy.retry);
        for queue in queues
            .iter_mut()
            .filter(|queue| queue.next_request_at(path).is_some_and(|at| now >= at))
        {
            let controller = remote.controller();
            let depth_max = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = options.queue.depth.clamp(2, depth_max);
            let options = QueuePairOptions { depth, ..options.queue };
            match controller.create_queue_pair(now, options) {
                Ok(id) => {
                    queue.pairs[path] = PathQueuePairState::Requested { id };
                    queue.refusal = None;
                }
                // If the queue IDs are used up, it is retried after a deletion in progress.
                Err(RequestError::QueueLimit { .. } | RequestError::NotReady) => {}
                Err(refusal) => {
                    queue.pairs[path] = PathQueuePairState::Rejected { retry_at };
                    queue.refusal = Some(refusal.to_string());
                }
            }
        }
    }

    /// Requests a queue: a queue pair on each path.
    pub fn open_queue(&mut self) -> QueueRequest {
        self.next_queue += 1;
        let pairs = vec![PathQueuePairState::None; self.paths.len()];
        let number = self.next_queue;
        let (inbox, is_taken, refusal) = (Arc::default(), false, None);
        self.queues.push(MultipathQueue { number, inbox, is_taken, pairs, refusal });
        QueueRequest(number)
    }

    /// Requests a queue whose limits are known, and takes it at once: its queue pairs are connected when
    /// its paths are.
    pub fn open_channel(&mut self, limits: Limits) -> (QueueRequest, FabricsChannel) {
        let request = self.open_queue();
        let inbox = Arc::new(QueueInbox::default());
        if let Some(queue) = self.queues.last_mut() {
            (queue.inbox, queue.is_taken) = (Arc::clone(&inbox), true);
        }
        let shared = Arc::clone(&self.shared);
        (request, FabricsChannel::new(shared, inbox, self.paths.len(), &self.options, limits))
    }

    /// Why no queue pair of a queue was created, if all connected paths have rejected it.
    pub fn queue_refusal(&self, request: QueueRequest) -> Option<&str> {
        let queue = self.queues.iter().find(|queue| queue.number == request.0)?;
        let is_rejected = |(path, pair): (&Path, &PathQueuePairState)| {
            path.access.is_none() || matches!(pair, PathQueuePairState::Rejected { .. })
        };
        let are_rejected = self.paths.iter().zip(&queue.pairs).all(is_rejected);
        queue.refusal.as_deref().filter(|_| are_rejected)
    }

    /// Takes a requested queue, once each connected path has created its queue pair or rejected it.
    /// `None` before that, or without a path.
    pub fn take_queue(&mut self, request: QueueRequest) -> Option<FabricsChannel> {
        let Self { paths, queues, options, shared, .. } = self;
        let queue = queues.iter_mut().find(|queue| queue.number == request.0 && !queue.is_taken)?;
        let is_resolved = |(path, pair): (&Path, &PathQueuePairState)| {
            path.access.is_none()
                || matches!(
                    pair,
                    PathQueuePairState::Created { .. } | PathQueuePairState::Rejected { .. }
                )
        };
        if !paths.iter().zip(&queue.pairs).all(is_resolved) {
            return None;
        }
        let limits = queue.inbox.lock_contents().first()?.1.limits().clone();
        queue.is_taken = true;
        let (shared, inbox) = (Arc::clone(shared), Arc::clone(&queue.inbox));
        Some(FabricsChannel::new(shared, inbox, paths.len(), options, limits))
    }

    /// Sets the depth of queues that are requested from now on.
    #[cfg(test)]
    pub(crate) fn set_queue_depth(&mut self, depth: u32) {
        self.options.queue.depth = depth;
    }

    /// Cancels a requested queue that has not been taken.
    pub fn close_queue(&mut self, request: QueueRequest) {
        self.queues.retain(|queue| queue.number != request.0 || queue.is_taken);
    }

    /// The ANA state of a path; `None` if it is down.
    pub fn ana_state(&self, path: usize) -> Option<PathAnaState> {
        self.paths.get(path)?.access
    }

    /// Number of blocks of the namespace: the smallest that any controller reports.
    pub fn block_count(&mut self) -> Option<u64> {
        let nsid = self.options.namespace;
        let remotes = self.paths.iter_mut().filter_map(Path::connected_controller);
        let found = remotes.filter_map(|remote| remote.controller().namespace(nsid));
        found.map(|namespace| namespace.block_count).min()
    }

    /// The world-wide name of the namespace, if it has one.
    pub fn namespace_name(&self) -> Option<&str> {
        self.first_namespace.as_ref()?.name.as_deref()
    }

    /// The namespace as the first connected controller reported it.
    pub fn namespace(&self) -> Option<&Namespace> {
        Some(&self.first_namespace.as_ref()?.namespace)
    }

    /// Maximum number of queues: the largest number that a connected controller has granted.
    pub fn queues_max(&mut self) -> Option<u16> {
        let remotes = self.paths.iter_mut().filter_map(Path::connected_controller);
        remotes.map(|remote| remote.controller().queue_pairs_max()).max().filter(|most| *most > 0)
    }

    /// The controller of a path, if connected.
    pub fn path_controller(&mut self, path: usize) -> Option<&mut FabricsController> {
        self.paths.get_mut(path)?.connected_controller()
    }

    /// Number of paths, connected or not.
    pub fn path_count(&self) -> usize {
        self.paths.len()
    }

    /// Why a path is not up, with the name of its peer.
    pub fn path_error(&self, path: usize) -> Option<&Error> {
        self.paths.get(path)?.down_reason()
    }

    /// Since when no path is usable.
    pub fn down_since(&self) -> Option<Instant> {
        self.down_since
    }

    /// Why it is not usable any more: after the policy's [ctrl-loss
    /// timeout](crate::TimeoutPolicy::give_up), or when the only controller has failed permanently. `None`
    /// while it is usable, or may become so.
    pub fn failure_reason(&self, now: Instant) -> Option<&str> {
        if self.paths.len() == 1 {
            return self.removed.as_deref();
        }
        let limit = self.options.options.policy.give_up;
        let is_overdue = self.down_since.is_some_and(|since| now.since(since) >= limit);
        is_overdue.then_some("all paths have been given up")
    }

    /// Whether it is usable, or may become so.
    pub fn is_usable(&self, now: Instant) -> bool {
        self.failure_reason(now).is_none()
    }

    /// Latest time of the next poll.
    pub fn wake_at(&mut self, now: Instant) -> Instant {
        if !self.events.is_empty() {
            return now;
        }
        let queues = self.queues.iter().flat_map(|queue| {
            (0..queue.pairs.len()).filter_map(move |path| match queue.pairs[path] {
                PathQueuePairState::Rejected { .. } => queue.next_request_at(path),
                _ => None,
            })
        });
        let paths = self.paths.iter_mut().map(|path| path.wake_at(now));
        paths.chain(queues).fold(Instant::NEVER, Instant::min)
    }

    /// Sets the waker for events of queues, which may be raised by any thread.
    pub fn set_waker(&mut self, waker: SharedWaker) {
        self.shared.stale_states.set_waker(waker);
    }

    /// Prepares for a sleep of its thread: data on the admin connections wakes `wait_handle`. Returns true if
    /// there is work already: then the thread must not sleep.
    pub fn arm(&mut self, wait_handle: &mut dyn WaitHandle) -> bool {
        let mut has_work = self.shared.stale_states.is_pending() || !self.events.is_empty();
        for path in &mut self.paths {
            let PathStage::Connected(remote) = &mut path.stage else { continue };
            // The stream changes with each reset.
            let number = remote.connection_stats().connected;
            if number != path.watched_connection && wait_handle.watch(remote.wake_source()) {
                path.watched_connection = number;
                remote.set_waker(wait_handle.waker());
            }
            has_work |= remote.arm();
        }
        has_work
    }

    /// Ends the preparation for a sleep.
    pub fn disarm(&mut self) {
        self.paths
            .iter_mut()
            .filter_map(Path::connected_controller)
            .for_each(FabricsController::disarm);
    }

    /// Shuts all controllers down. No path is connected any more.
    pub fn shut_down(&mut self, now: Instant) {
        self.paths.iter_mut().for_each(Path::stop_reconnecting);
        for remote in self.paths.iter_mut().filter_map(Path::connected_controller) {
            // A controller that cannot be shut down is dropped, which disconnects it.
            let _ = remote.controller().start_shutdown(now, ShutdownNotification::Normal);
        }
    }

    /// Whether a controller is still being shut down.
    pub fn is_shutting_down(&mut self) -> bool {
        let mut remotes = self.paths.iter_mut().filter_map(Path::connected_controller);
        remotes.any(|remote| remote.controller().state() == ControllerState::ShuttingDown)
    }
}

impl MultipathQueue {
    /// When its queue pair on `path` is to be requested, if it is.
    fn next_request_at(&self, path: usize) -> Option<Instant> {
        let is_live = |pair: &PathQueuePairState| {
            matches!(
                pair,
                PathQueuePairState::Requested { .. } | PathQueuePairState::Created { .. }
            )
        };
        match self.pairs[path] {
            PathQueuePairState::None => Some(Instant::default()),
            PathQueuePairState::Rejected { retry_at } => {
                (!self.pairs.iter().any(is_live)).then_some(retry_at)
            }
            PathQueuePairState::Requested { .. } | PathQueuePairState::Created { .. } => None,
        }
    }
}

/// Checks that a controller has the namespace, and that it is the one that was first reported. Returns its
/// ANA group, or an error with the difference.
fn check_namespace(
    remote: &mut FabricsController,
    path: usize,
    options: &MultipathOptions,
    first: &mut Option<FirstNamespace>,
) -> Result<u32, NamespaceMismatch> {
    let nsid = options.namespace;
    let name = remote.namespace_name(nsid);
    let controller = remote.controller();
    let limits = controller.identity().map(|identity| identity.limits);
    let has_cache = limits.is_some_and(|limits| limits.volatile_write_cache);
    let Some(found) = controller.namespace(nsid) else {
        let ids: Vec<String> = controller.namespaces().map(|known| known.id.to_string()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        let subsystem = &options.options.subsystem;
        let error =
            Error::usage(format!("no namespace {nsid} in {subsystem}, expected one of: {ids}"));
        return Err(NamespaceMismatch { error, is_missing: true });
    };
    let group = found.ana_group;
    match first {
        Some(first) => {
            let is_another = |error| NamespaceMismatch { error, is_missing: false };
            path::check_same_namespace(&first.namespace, found, first.path == path)
                .map_err(is_another)?;
            // The cache would never be flushed, because completed writes are assumed to be durable.
            if has_cache && !first.has_cache {
                return Err(is_another(Error::remote(
                    "it has a volatile write cache, expected none, as the first path",
                )));
            }
        }
        None => {
            *first = Some(FirstNamespace { path, namespace: found.clone(), name, has_cache });
        }
    }
    Ok(group)
}
