//! Multipath: several paths to one namespace, with a controller for each and queues that use all of them.
//!
//! ```text
//!   Multipath ─┬─ path 0: FabricsController ── ANA log ─┐              MultipathChannel, one per thread
//!              ├─ path 1: FabricsController ── ANA log ─┼── path states ────▶  path selector
//!              └─ …                                     └── queue inboxes ──▶  failover rules
//! ```
//!
//! A [`Multipath`] belongs to one thread, which manages all controllers, and creates a queue pair on each
//! of them for each queue. Queues are notified when paths are connected or lost.

mod channel;
mod event;
mod failover;
mod fence;
mod path;
mod path_selector;
mod path_states;

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{Error, Instant, SharedWaker};
use tenmil_nvme_host::{
    ControllerOptions, Event, Namespace, QueuePairOptions, QueueSizes, ShutdownNotification, State,
};

use crate::caches::CacheScope;
use crate::controller::FabricsController;
use crate::options::{InvalidName, Options};
use crate::wait_handle::WaitHandle;
pub use channel::MultipathChannel;
pub use event::PathEvent;
use fence::Fences;
pub use path::PathSetup;
use path::{Path, PathStage, PathUpdate};
pub use path_selector::{IoPolicy, PathAnaState};
use path_selector::{PathSelector, PathView};
use path_states::{PathStates, QueueInbox};

/// Several paths to one namespace, and their controllers.
pub struct Multipath {
    paths: Vec<Path>,
    shared: Arc<PathStates>,
    queues: Vec<QueueState>,
    options: MultipathOptions,
    /// The namespace as the first path reports it; all others have to report the same.
    first_namespace: Option<PathNamespace>,
    events: VecDeque<PathEvent>,
    /// The best path, as last reported.
    best_path: Option<usize>,
    /// Since when no path is usable.
    down_since: Option<Instant>,
    /// Resets of old controllers by other ones.
    fences: Fences,
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
    /// Scope of the controllers' volatile caches.
    pub cache: CacheScope,
    /// Options of queue pairs; their depth is limited by the controller.
    pub queue: QueuePairOptions,
    /// Table sizes of each queue.
    pub sizes: QueueSizes,
}

/// The namespace as reported over a path.
struct PathNamespace {
    namespace: Namespace,
    /// Completed writes may be in a volatile cache.
    has_cache: bool,
}

/// Maximum number of paths.
pub const PATHS_MAX: usize = 16;

/// A requested queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRequest(u64);

/// A queue, as the managing thread knows it.
struct QueueState {
    number: u64,
    inbox: Arc<QueueInbox>,
    /// It has been taken. If its inbox has no other owner, it has been dropped.
    is_taken: bool,
    /// Its queue pairs, by path.
    pairs: Vec<PathQueuePair>,
}

/// A queue pair of a queue on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathQueuePair {
    None,
    Requested {
        id: u16,
    },
    Created {
        id: u16,
    },
    /// Rejected; retried after the controller has reconnected.
    Rejected,
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
    ) -> Result<Self, InvalidName> {
        let count = paths.len();
        assert!(count <= PATHS_MAX, "{count} paths, expected at most {PATHS_MAX}");
        options.options.check()?;
        let bugs = options.options.injected_bugs;
        let shared = Arc::new(PathStates::new(paths.len(), options.cache, bugs));
        let fences = Fences::new(paths.len());
        let caches = shared.caches();
        let path = |(index, setup)| Path::new(setup, (Arc::clone(caches), index), now);
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
            fences,
            next_queue: 0,
        })
    }

    /// Performs a bounded amount of work and returns the next event.
    pub fn poll(&mut self, now: Instant) -> Option<PathEvent> {
        self.refresh_stale_states();
        self.drop_queues();
        for index in 0..self.paths.len() {
            self.poll_path(now, index);
            if self.paths[index].remote().is_some() {
                self.create_queue_pairs(now, index);
            } else {
                // The queue pairs end with their controller.
                self.queues.iter_mut().for_each(|queue| queue.pairs[index] = PathQueuePair::None);
            }
        }
        self.fences.poll(now, &mut self.paths);
        self.events.pop_front()
    }

    fn poll_path(&mut self, now: Instant, index: usize) {
        let Self { paths, options, first_namespace, .. } = self;
        let nsid = options.namespace;
        let mut check =
            |remote: &mut FabricsController| check_namespace(remote, nsid, first_namespace);
        let path = &mut paths[index];
        let before = path.access;
        let Some(new_events) = path.poll(now, &options.options, options.controller, &mut check)
        else {
            return;
        };
        match new_events {
            PathUpdate::Access(access) => self.handle_access(now, index, before, access),
            PathUpdate::Down(why) => self.handle_down(now, index, why),
            PathUpdate::NamespaceMismatch(why) => {
                self.shared.set_access(index, PathAnaState::default());
                self.publish_states();
                self.events.push_back(PathEvent::NamespaceMismatch { path: index, why });
            }
            PathUpdate::Controller(event) => self.handle_event(index, event),
        }
    }

    /// Handles a new ANA state of a path.
    fn handle_access(
        &mut self,
        now: Instant,
        path: usize,
        before: Option<PathAnaState>,
        access: PathAnaState,
    ) {
        self.shared.set_access(path, access);
        // Even without a change: queues that requested the refresh are waiting.
        self.publish_states();
        match before {
            None => {
                for queue in &mut self.queues {
                    if queue.pairs[path] == PathQueuePair::Rejected {
                        queue.pairs[path] = PathQueuePair::None;
                    }
                }
                // Keep Alive completions of the others prove that they are alive at the same time as this
                // one, so that they can cover it.
                let others = self.paths.iter_mut().enumerate().filter(|(other, _)| *other != path);
                for remote in others.filter_map(|(_, other)| other.remote()) {
                    remote.controller().hurry_keep_alive(now);
                }
                self.events.push_back(PathEvent::Up { path, access });
            }
            Some(before) if before == access => {}
            Some(_) => self.events.push_back(PathEvent::AnaChanged { path, access }),
        }
        self.update_best_path(now);
    }

    fn handle_down(&mut self, now: Instant, path: usize, why: String) {
        self.shared.set_access(path, PathAnaState::default());
        self.publish_states();
        self.events.push_back(PathEvent::Down { path, why });
        self.update_best_path(now);
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

    fn handle_event(&mut self, path: usize, event: Event) {
        match event {
            Event::QueuePairCreated { id } => self.attach_queue_pair(path, id),
            Event::QueuePairRefused { id, .. } => {
                self.set_pair_state(path, id, PathQueuePair::Rejected);
            }
            Event::AdminCompleted(completion) if Fences::is_reset_completion(&completion) => {
                if let Some(of) = self.fences.handle(&mut self.paths, path, &completion) {
                    self.events.push_back(PathEvent::ControllerFenced { path: of, by: path });
                }
            }
            event => self.events.push_back(PathEvent::Controller { path, event }),
        }
    }

    fn set_pair_state(
        &mut self,
        path: usize,
        id: u16,
        to: PathQueuePair,
    ) -> Option<&mut QueueState> {
        let has_id = |pair: PathQueuePair| {
            pair == PathQueuePair::Requested { id } || pair == PathQueuePair::Created { id }
        };
        let queue = self.queues.iter_mut().find(|queue| has_id(queue.pairs[path]))?;
        queue.pairs[path] = to;
        Some(queue)
    }

    /// Hands a created queue pair over to the queue that requested it.
    fn attach_queue_pair(&mut self, path: usize, id: u16) {
        let (nsid, sizes) = (self.options.namespace, self.options.sizes);
        let queue_pair = self.paths[path]
            .remote()
            .and_then(|remote| remote.take_fabrics_queue_pair(id, nsid, sizes));
        // Without a queue that needs it, or memory, the queue pair is dropped.
        let pair = if queue_pair.is_some() {
            PathQueuePair::Created { id }
        } else {
            PathQueuePair::Rejected
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
    fn drop_queues(&mut self) {
        self.queues.retain(|queue| !queue.is_taken || Arc::strong_count(&queue.inbox) > 1);
    }

    /// Requests missing queue pairs from the controller of a path.
    fn create_queue_pairs(&mut self, now: Instant, path: usize) {
        let Self { paths, queues, options, .. } = self;
        if paths[path].access.is_none() {
            return;
        }
        let Some(remote) = paths[path].remote() else { return };
        for queue in queues.iter_mut().filter(|queue| queue.pairs[path] == PathQueuePair::None) {
            let controller = remote.controller();
            let depth_max = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = options.queue.depth.clamp(2, depth_max);
            // If the queue IDs are used up, it is retried after a deletion in progress.
            let options = QueuePairOptions { depth, ..options.queue };
            if let Ok(id) = controller.create_queue_pair(now, options) {
                queue.pairs[path] = PathQueuePair::Requested { id };
            }
        }
    }

    /// Requests a queue: a queue pair on each path.
    pub fn open_queue(&mut self) -> QueueRequest {
        self.next_queue += 1;
        let pairs = vec![PathQueuePair::None; self.paths.len()];
        let number = self.next_queue;
        self.queues.push(QueueState { number, inbox: Arc::default(), is_taken: false, pairs });
        QueueRequest(number)
    }

    /// Takes a requested queue, once each connected path has created its queue pair or rejected it.
    /// `None` before that, or without a path.
    pub fn take_queue(&mut self, request: QueueRequest) -> Option<MultipathChannel> {
        let Self { paths, queues, options, shared, .. } = self;
        let queue = queues.iter_mut().find(|queue| queue.number == request.0 && !queue.is_taken)?;
        let is_resolved = |(path, pair): (&Path, &PathQueuePair)| {
            path.access.is_none()
                || matches!(pair, PathQueuePair::Created { .. } | PathQueuePair::Rejected)
        };
        if !paths.iter().zip(&queue.pairs).all(is_resolved)
            || queue.inbox.lock_contents().is_empty()
        {
            return None;
        }
        let channel = MultipathChannel::new(
            Arc::clone(shared),
            Arc::clone(&queue.inbox),
            paths.len(),
            options,
        );
        queue.is_taken = channel.is_some();
        channel
    }

    /// Cancels a requested queue that has not been taken.
    pub fn close_queue(&mut self, request: QueueRequest) {
        self.queues.retain(|queue| queue.number != request.0 || queue.is_taken);
    }

    /// The ANA state of a path; `None` if it is down.
    pub fn access(&self, path: usize) -> Option<PathAnaState> {
        self.paths.get(path)?.access
    }

    /// Number of blocks of the namespace: the smallest that any controller reports.
    pub fn block_count(&mut self) -> Option<u64> {
        let nsid = self.options.namespace;
        let remotes = self.paths.iter_mut().filter_map(Path::remote);
        let found = remotes.filter_map(|remote| remote.controller().namespace(nsid));
        found.map(|namespace| namespace.block_count).min()
    }

    /// The world-wide name of the namespace, as a connected controller reports it.
    pub fn namespace_name(&mut self) -> Option<String> {
        let nsid = self.options.namespace;
        self.paths
            .iter_mut()
            .filter_map(Path::remote)
            .find_map(|remote| remote.namespace_name(nsid))
    }

    /// The controller of a path, if connected.
    pub fn remote(&mut self, path: usize) -> Option<&mut FabricsController> {
        self.paths.get_mut(path)?.remote()
    }

    /// Number of paths, connected or not.
    pub fn paths(&self) -> usize {
        self.paths.len()
    }

    /// Since when no path is usable.
    pub fn down_since(&self) -> Option<Instant> {
        self.down_since
    }

    /// Whether it is usable or may become so: false after the policy's [ctrl-loss
    /// timeout](crate::TimeoutPolicy::give_up).
    pub fn is_usable(&self, now: Instant) -> bool {
        let limit = self.options.options.policy.give_up;
        self.down_since.is_none_or(|since| now.since(since) < limit)
    }

    /// Latest time of the next poll.
    pub fn wake_at(&mut self, now: Instant) -> Instant {
        if !self.events.is_empty() {
            return now;
        }
        self.paths.iter_mut().map(|path| path.wake_at(now)).fold(Instant::NEVER, Instant::min)
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
            let number = remote.counts().connected;
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
        self.paths.iter_mut().filter_map(Path::remote).for_each(FabricsController::disarm);
    }

    /// Shuts all controllers down. No path is connected any more.
    pub fn shut_down(&mut self, now: Instant) {
        self.paths.iter_mut().for_each(Path::stop_reconnecting);
        for remote in self.paths.iter_mut().filter_map(Path::remote) {
            // A controller that cannot be shut down is dropped, which disconnects it.
            let _ = remote.controller().shut_down(now, ShutdownNotification::Normal);
        }
    }

    /// Whether a controller is still being shut down.
    pub fn is_shutting_down(&mut self) -> bool {
        let mut remotes = self.paths.iter_mut().filter_map(Path::remote);
        remotes.any(|remote| remote.controller().state() == State::ShuttingDown)
    }
}

/// Checks that a controller has the namespace, and that it is the same as on all other paths. Returns its
/// ANA group, or an error with the difference.
fn check_namespace(
    remote: &mut FabricsController,
    nsid: u32,
    first: &mut Option<PathNamespace>,
) -> Result<u32, Error> {
    let controller = remote.controller();
    let limits = controller.identity().map(|identity| identity.limits);
    let has_cache = limits.is_some_and(|limits| limits.volatile_write_cache);
    let Some(found) = controller.namespace(nsid) else {
        let ids: Vec<String> = controller.namespaces().map(|known| known.id.to_string()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        return Err(Error::environment(format!(
            "no namespace {nsid} there, expected one of: {ids}"
        )));
    };
    let group = found.ana_group;
    match first {
        Some(first) => {
            path::check_same_namespace(&first.namespace, found)?;
            // The cache would never be flushed, because completed writes are assumed to be durable.
            if has_cache && !first.has_cache {
                return Err(Error::remote(
                    "it has a volatile write cache, expected none, as the first path",
                ));
            }
        }
        None => *first = Some(PathNamespace { namespace: found.clone(), has_cache }),
    }
    Ok(group)
}
