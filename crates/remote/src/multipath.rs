//! Several paths to one namespace: a controller at the end of each, and queues that use them all.
//!
//! ```text
//!   Multipath ─┬─ path 0: Remote ── ANA log ─┐                     MultipathQueue, one per thread
//!              ├─ path 1: Remote ── ANA log ─┼── standings ──────▶   route: which path
//!              └─ …                          └── ways in desks ──▶   fate: what may be sent again
//! ```
//!
//! A [`Multipath`] belongs to one thread, which looks after all controllers, and has a queue pair made
//! on each of them for each queue. Paths come and go; a queue is told, and takes what there is.

mod event;
mod fate;
mod fence;
mod path;
mod queue;
mod route;
mod standings;

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Instant, Wake};
use nvme::{
    ControllerOptions, Event, Namespace, QueuePairOptions, QueueSizes, ShutdownNotification, State,
};

use crate::caches::Cache;
use crate::options::{NotAName, Options};
use crate::remote::Remote;
use crate::sleep::Sleep;
pub use event::PathEvent;
use fence::Fences;
pub use path::PathSetup;
use path::{News, Path, Stage};
pub use queue::MultipathQueue;
pub use route::{Access, Spread};
use route::{Route, View};
use standings::{Desk, Standings};

/// Several paths to one namespace, and what stands at their ends.
pub struct Multipath {
    paths: Vec<Path>,
    shared: Arc<Standings>,
    queues: Vec<Queue>,
    wishes: MultipathOptions,
    /// What the first path has shown: all others have to show the same.
    shown: Option<Shown>,
    events: VecDeque<PathEvent>,
    /// The best path, as it was told last.
    leader: Option<usize>,
    /// Since when there is none.
    down_since: Option<Instant>,
    /// How old controllers are ended by others.
    fences: Fences,
    next_queue: u64,
}

/// What a namespace is reached with over several paths.
#[derive(Clone, Debug)]
pub struct MultipathOptions {
    /// Who is called, who calls, and what is agreed upon.
    pub options: Options,
    /// What is wanted of each controller.
    pub controller: ControllerOptions,
    /// The namespace.
    pub namespace: u32,
    /// How requests are spread.
    pub spread: Spread,
    /// Whose volatile caches are.
    pub cache: Cache,
    /// What queue pairs are like; their depth is cut to what a controller has.
    pub queue: QueuePairOptions,
    /// The sizes of each queue's tables.
    pub sizes: QueueSizes,
}

/// What a path shows of the namespace.
struct Shown {
    namespace: Namespace,
    /// Answered writes may lie in a volatile cache.
    has_cache: bool,
}

/// The most paths that there may be.
pub const PATHS_MAX: usize = 16;

/// A queue that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueTicket(u64);

/// A queue, as the tending thread knows it.
struct Queue {
    number: u64,
    desk: Arc<Desk>,
    /// It has been taken: if nobody else has its desk, it has gone.
    is_taken: bool,
    /// Its queue pairs, by path.
    pairs: Vec<Pair>,
}

/// A queue pair of a queue on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pair {
    None,
    Asked {
        id: u16,
    },
    Made {
        id: u16,
    },
    /// Not before the controller has come back.
    Refused,
}

impl Multipath {
    /// Begins to call all paths.
    ///
    /// # Errors
    ///
    /// If a name is none.
    ///
    /// # Panics
    ///
    /// If there are more than [`PATHS_MAX`] paths.
    pub fn begin(
        paths: Vec<PathSetup>,
        wishes: MultipathOptions,
        now: Instant,
    ) -> Result<Self, NotAName> {
        let count = paths.len();
        assert!(count <= PATHS_MAX, "{count} paths, expected at most {PATHS_MAX}");
        wishes.options.check()?;
        let bugs = wishes.options.injected_bugs;
        let shared = Arc::new(Standings::new(paths.len(), wishes.cache, bugs));
        let fences = Fences::new(paths.len());
        let caches = shared.caches();
        let path = |(index, setup)| Path::new(setup, (Arc::clone(caches), index), now);
        let paths = paths.into_iter().enumerate().map(path).collect();
        Ok(Self {
            paths,
            shared,
            queues: Vec::new(),
            wishes,
            shown: None,
            events: VecDeque::new(),
            leader: None,
            down_since: Some(now),
            fences,
            next_queue: 0,
        })
    }

    /// Does a bounded amount of work and returns the next event.
    pub fn poll(&mut self, now: Instant) -> Option<PathEvent> {
        self.heed_doubts();
        self.drop_queues();
        for index in 0..self.paths.len() {
            self.poll_path(now, index);
            if self.paths[index].remote().is_some() {
                self.make_pairs(now, index);
            } else {
                // With a controller go its queue pairs.
                self.queues.iter_mut().for_each(|queue| queue.pairs[index] = Pair::None);
            }
        }
        self.fences.turn(now, &mut self.paths);
        self.events.pop_front()
    }

    fn poll_path(&mut self, now: Instant, index: usize) {
        let Self { paths, wishes, shown, .. } = self;
        let nsid = wishes.namespace;
        let mut fits = |remote: &mut Remote| fit(remote, nsid, shown);
        let path = &mut paths[index];
        let before = path.access;
        let Some(news) = path.poll(now, &wishes.options, wishes.controller, &mut fits) else {
            return;
        };
        match news {
            News::Access(access) => self.handle_access(now, index, before, access),
            News::Down(why) => self.handle_down(now, index, why),
            News::Unfit(why) => {
                self.shared.set_access(index, Access::default());
                self.tell();
                self.events.push_back(PathEvent::Unfit { path: index, why });
            }
            News::Controller(event) => self.handle_event(index, event),
        }
    }

    /// How well a path leads there is known, or known better.
    fn handle_access(&mut self, now: Instant, path: usize, before: Option<Access>, access: Access) {
        self.shared.set_access(path, access);
        // Even if nothing has changed: whoever had doubts is waiting.
        self.tell();
        match before {
            None => {
                for queue in &mut self.queues {
                    if queue.pairs[path] == Pair::Refused {
                        queue.pairs[path] = Pair::None;
                    }
                }
                // Those that are connected with it can vouch for it from their next answer on.
                let others = self.paths.iter_mut().enumerate().filter(|(other, _)| *other != path);
                for remote in others.filter_map(|(_, other)| other.remote()) {
                    remote.controller().hurry_keep_alive(now);
                }
                self.events.push_back(PathEvent::Up { path, access });
            }
            Some(before) if before == access => {}
            Some(_) => self.events.push_back(PathEvent::Access { path, access }),
        }
        self.look_who_leads(now);
    }

    fn handle_down(&mut self, now: Instant, path: usize, why: String) {
        self.shared.set_access(path, Access::default());
        self.tell();
        self.events.push_back(PathEvent::Down { path, why });
        self.look_who_leads(now);
    }

    /// Tells whether another path is the best.
    fn look_who_leads(&mut self, now: Instant) {
        let view = |path: &Path| View {
            is_open: path.access.is_some(),
            access: path.access.unwrap_or_default(),
            ..View::default()
        };
        let views: Vec<View> = self.paths.iter().map(view).collect();
        let leader = Route::new(Spread::ActivePassive).choose(&views);
        match (self.leader, leader) {
            (Some(from), Some(to)) if from != to => {
                self.events.push_back(PathEvent::Failover { from, to });
            }
            (Some(_), None) => self.events.push_back(PathEvent::NoPath),
            _ => {}
        }
        match leader {
            Some(_) => self.down_since = None,
            None => {
                self.down_since.get_or_insert(now);
            }
        }
        self.leader = leader;
    }

    fn handle_event(&mut self, path: usize, event: Event) {
        match event {
            Event::QueuePairCreated { id } => self.hand_over(path, id),
            Event::QueuePairRefused { id, .. } => {
                self.change_pair(path, id, Pair::Refused);
            }
            Event::AdminCompleted(answer) if Fences::is_theirs(&answer) => {
                if let Some(of) = self.fences.handle(&mut self.paths, path, &answer) {
                    self.events.push_back(PathEvent::OldControllerReset { path: of, by: path });
                }
            }
            event => self.events.push_back(PathEvent::Controller { path, event }),
        }
    }

    fn change_pair(&mut self, path: usize, id: u16, to: Pair) -> Option<&mut Queue> {
        let is_it = |pair: Pair| pair == Pair::Asked { id } || pair == Pair::Made { id };
        let queue = self.queues.iter_mut().find(|queue| is_it(queue.pairs[path]))?;
        queue.pairs[path] = to;
        Some(queue)
    }

    /// A queue pair was made: whoever has asked for it gets it.
    fn hand_over(&mut self, path: usize, id: u16) {
        let (nsid, sizes) = (self.wishes.namespace, self.wishes.sizes);
        let way = self.paths[path].remote().and_then(|remote| remote.take_way(id, nsid, sizes));
        // Without a queue that wants it, or memory, it goes again with its way.
        let pair = if way.is_some() { Pair::Made { id } } else { Pair::Refused };
        let Some(queue) = self.change_pair(path, id, pair) else { return };
        if let Some(way) = way {
            queue.desk.put(path, way);
            self.tell();
        }
    }

    fn tell(&self) {
        self.shared.tell(self.queues.iter().map(|queue| &*queue.desk));
    }

    fn heed_doubts(&mut self) {
        let doubts = self.shared.take_doubts();
        for (index, path) in self.paths.iter_mut().enumerate() {
            if doubts >> index & 1 == 1 {
                path.doubt();
            }
        }
    }

    /// Forgets queues that have gone.
    fn drop_queues(&mut self) {
        self.queues.retain(|queue| !queue.is_taken || Arc::strong_count(&queue.desk) > 1);
    }

    /// Asks the controller of a path for what queues lack.
    fn make_pairs(&mut self, now: Instant, path: usize) {
        let Self { paths, queues, wishes, .. } = self;
        if paths[path].access.is_none() {
            return;
        }
        let Some(remote) = paths[path].remote() else { return };
        for queue in queues.iter_mut().filter(|queue| queue.pairs[path] == Pair::None) {
            let controller = remote.controller();
            let most = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = wishes.queue.depth.clamp(2, most);
            // One whose deletion is under way makes room.
            let wishes = QueuePairOptions { depth, ..wishes.queue };
            if let Ok(id) = controller.create_queue_pair(now, wishes) {
                queue.pairs[path] = Pair::Asked { id };
            }
        }
    }

    /// Asks for a queue: a queue pair on each path.
    pub fn open_queue(&mut self) -> QueueTicket {
        self.next_queue += 1;
        let pairs = vec![Pair::None; self.paths.len()];
        let number = self.next_queue;
        self.queues.push(Queue { number, desk: Arc::default(), is_taken: false, pairs });
        QueueTicket(number)
    }

    /// The queue that was asked for, once each path that is up has a queue pair for it, or has refused
    /// it. `None` if not, or if there is no such path.
    pub fn take_queue(&mut self, ticket: QueueTicket) -> Option<MultipathQueue> {
        let Self { paths, queues, wishes, shared, .. } = self;
        let queue = queues.iter_mut().find(|queue| queue.number == ticket.0 && !queue.is_taken)?;
        let is_settled = |(path, pair): (&Path, &Pair)| {
            path.access.is_none() || matches!(pair, Pair::Made { .. } | Pair::Refused)
        };
        if !paths.iter().zip(&queue.pairs).all(is_settled) || queue.desk.is_empty() {
            return None;
        }
        let made =
            MultipathQueue::new(Arc::clone(shared), Arc::clone(&queue.desk), paths.len(), wishes);
        queue.is_taken = made.is_some();
        made
    }

    /// Gives up a queue that was asked for and has not been taken.
    pub fn close_queue(&mut self, ticket: QueueTicket) {
        self.queues.retain(|queue| queue.number != ticket.0 || queue.is_taken);
    }

    /// How well a path leads there; `None` if it is down.
    pub fn access(&self, path: usize) -> Option<Access> {
        self.paths.get(path)?.access
    }

    /// How many blocks the namespace has, by whichever controller says the fewest.
    pub fn block_count(&mut self) -> Option<u64> {
        let nsid = self.wishes.namespace;
        let remotes = self.paths.iter_mut().filter_map(Path::remote);
        let found = remotes.filter_map(|remote| remote.controller().namespace(nsid));
        found.map(|namespace| namespace.block_count).min()
    }

    /// The world-wide name of the namespace, as a controller says that is there now.
    pub fn namespace_name(&mut self) -> Option<String> {
        let nsid = self.wishes.namespace;
        self.paths.iter_mut().filter_map(Path::remote).find_map(|one| one.namespace_name(nsid))
    }

    /// The controller at the end of a path, if there is one.
    pub fn remote(&mut self, path: usize) -> Option<&mut Remote> {
        self.paths.get_mut(path)?.remote()
    }

    /// How many paths there are, up or down.
    pub fn paths(&self) -> usize {
        self.paths.len()
    }

    /// Since when no path leads there, if none does.
    pub fn down_since(&self) -> Option<Instant> {
        self.down_since
    }

    /// Whether it can be used, now or some time: not after the policy's time to
    /// [give up](crate::Policy::give_up).
    pub fn is_there(&self, now: Instant) -> bool {
        let limit = self.wishes.options.policy.give_up;
        self.down_since.is_none_or(|since| now.since(since) < limit)
    }

    /// When to poll even if nothing comes.
    pub fn wake_at(&mut self, now: Instant) -> Instant {
        if !self.events.is_empty() {
            return now;
        }
        self.paths.iter_mut().map(|path| path.wake_at(now)).fold(Instant::NEVER, Instant::min)
    }

    /// Who is woken when a queue has something to tell, in whichever thread it does.
    pub fn wakes(&mut self, sleeper: Arc<dyn Wake + Send + Sync>) {
        self.shared.wakes(sleeper);
    }

    /// Gets ready for a sleep of its thread: what comes over the admin connections wakes `sleep`. True
    /// if there is something already: then the thread must not sleep.
    pub fn arm(&mut self, sleep: &mut dyn Sleep) -> bool {
        let mut has_work = self.shared.has_doubts() || !self.events.is_empty();
        for path in &mut self.paths {
            let Stage::There(remote) = &mut path.stage else { continue };
            // Another stream after each reset.
            let number = remote.counts().connected;
            if number != path.watched && sleep.watch(remote.wake_source()) {
                path.watched = number;
                remote.wakes(sleep.bell());
            }
            has_work |= remote.arm();
        }
        has_work
    }

    /// The thread looks by itself again.
    pub fn disarm(&mut self) {
        self.paths.iter_mut().filter_map(Path::remote).for_each(Remote::disarm);
    }

    /// Tells all controllers that nobody needs them any more. None is called from now on.
    pub fn shut_down(&mut self, now: Instant) {
        self.paths.iter_mut().for_each(Path::call_no_more);
        for remote in self.paths.iter_mut().filter_map(Path::remote) {
            // One that cannot be shut down is dropped, and thereby left.
            let _ = remote.controller().shut_down(now, ShutdownNotification::Normal);
        }
    }

    /// Whether a controller is still being shut down.
    pub fn is_shutting_down(&mut self) -> bool {
        let mut remotes = self.paths.iter_mut().filter_map(Path::remote);
        remotes.any(|remote| remote.controller().state() == State::ShuttingDown)
    }
}

/// Whether a controller shows the namespace, and the same as all others: the ANA group it is in. The
/// error says what was found instead.
fn fit(remote: &mut Remote, nsid: u32, first: &mut Option<Shown>) -> Result<u32, String> {
    let controller = remote.controller();
    let limits = controller.identity().map(|identity| identity.limits);
    let has_cache = limits.is_some_and(|limits| limits.volatile_write_cache);
    let Some(found) = controller.namespace(nsid) else {
        let ids: Vec<String> = controller.namespaces().map(|known| known.id.to_string()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        return Err(format!("no namespace {nsid} there, expected one of: {ids}"));
    };
    let group = found.ana_group;
    match first {
        Some(first) => {
            path::is_same(&first.namespace, found)?;
            // Nobody would flush what is said to be durable as soon as it is answered.
            if has_cache && !first.has_cache {
                return Err(
                    "it has a volatile write cache, expected none, as the first path".into()
                );
            }
        }
        None => *first = Some(Shown { namespace: found.clone(), has_cache }),
    }
    Ok(group)
}
