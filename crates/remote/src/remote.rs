//! An SSD behind a network: calling it, and looking after it.

use core::fmt;
use std::sync::Arc;

use base::{Blame, Instant, Span, Wake, WakeSource};
use dma::DevicePool;
use nvme::{Controller, ControllerError, ControllerOptions, Event, QueueSizes, State};
use wire::admin::CrossControllerReset;

use crate::caches::{Cache, Caches};
use crate::dial::Dial;
use crate::front::{Counts, Front};
use crate::options::{NotAName, Options};
use crate::queue::RemoteQueue;
use crate::reach::Reach;
use crate::way::Way;

/// An SSD behind a network that has answered, from the thread that looks after it.
pub struct Remote {
    controller: Controller<Front, Reach>,
    reach: Reach,
    /// How long a command may take.
    io_timeout: Span,
    /// The namespace that it was asked for a queue of: the first one.
    namespace: Option<u32>,
}

/// One that is being called.
pub struct Calling {
    front: Option<Front>,
    reach: Reach,
    wishes: ControllerOptions,
    peer: String,
}

/// Why an SSD was not reached.
#[derive(Clone, Debug, PartialEq)]
pub enum NotReached {
    /// A name is none.
    Name(NotAName),
    /// There is no memory left for what it takes.
    Memory,
    /// Nobody answers there who lets us in.
    Peer {
        /// Who was called.
        peer: String,
        /// What was heard.
        why: String,
    },
    /// It answers, and says what makes no sense.
    Controller {
        /// Who was called.
        peer: String,
        /// What was wrong.
        error: ControllerError,
    },
}

impl Calling {
    /// Begins to call. Its rings and lists lie in `pool`, and data in whatever `pool` has been shown.
    /// Of `wishes`, what does not suit a network is replaced.
    ///
    /// # Errors
    ///
    /// If a name is none, or no memory is left.
    pub fn begin(
        pool: DevicePool,
        dial: Box<dyn Dial>,
        options: Options,
        wishes: ControllerOptions,
        now: Instant,
    ) -> Result<Self, NotReached> {
        let caches = Caches::new(Cache::Separate, options.injected_bugs);
        Self::begin_over(pool, dial, options, wishes, (caches, 0), now)
    }

    /// As [`begin`](Self::begin), over a path of a device that has several.
    pub(crate) fn begin_over(
        pool: DevicePool,
        dial: Box<dyn Dial>,
        options: Options,
        wishes: ControllerOptions,
        over: (Arc<Caches>, usize),
        now: Instant,
    ) -> Result<Self, NotReached> {
        options.check().map_err(NotReached::Name)?;
        let wishes = suited(wishes, &options);
        let (reach, peer) = (Reach::new(pool), dial.peer());
        let front =
            Front::new(dial, options, reach.clone(), over, now).ok_or(NotReached::Memory)?;
        Ok(Self { front: Some(front), reach, wishes, peer })
    }

    /// Goes on. `None` as long as it takes; not to be called again after anything else.
    pub fn turn(&mut self, now: Instant) -> Option<Result<Remote, NotReached>> {
        let front = self.front.as_mut()?;
        front.turn(now);
        if front.has_given_up() {
            let why = front.why().unwrap_or("nothing was heard").to_owned();
            return Some(Err(NotReached::Peer { peer: self.peer.clone(), why }));
        }
        if !front.is_connected() {
            return None;
        }
        let made = Controller::new(self.front.take()?, self.reach.clone(), self.wishes);
        let reach = self.reach.clone();
        let (peer, io_timeout) = (self.peer.clone(), self.wishes.io_timeout);
        Some(match made {
            Ok(controller) => Ok(Remote { controller, reach, io_timeout, namespace: None }),
            Err(error) => Err(NotReached::Controller { peer, error }),
        })
    }

    /// When to turn even if nothing comes.
    #[must_use]
    pub fn wake_at(&self, now: Instant) -> Instant {
        self.front.as_ref().map_or(Instant::NEVER, |front| front.wake_at(now))
    }

    /// What wakes a thread that waits for it, if there is anything yet.
    #[must_use]
    pub fn wake_source(&self) -> WakeSource<'_> {
        self.front.as_ref().map_or(WakeSource::Nothing, Front::wake_source)
    }
}

impl Remote {
    /// Does a bounded amount of work and returns the next event of its controller.
    pub fn poll(&mut self, now: Instant) -> Option<Event> {
        let front = self.controller.mmio();
        front.turn(now);
        if front.take_change() {
            self.controller.expect_change();
        }
        let event = self.controller.poll(now);
        if let Some(Event::Ready | Event::Recovered) = event {
            self.learn();
        }
        // What the controller has just asked goes out at once.
        self.controller.mmio().turn(now);
        event
    }

    fn learn(&mut self) {
        let page = self.controller.identity().map(|identity| identity.page.clone());
        self.identify_cache();
        let front = self.controller.mmio();
        if let Some(page) = page {
            front.learn(&page);
        }
        front.recovered();
    }

    /// Says which instance of a cache it writes through now, if a queue may have written.
    fn identify_cache(&mut self) {
        let Some(nsid) = self.namespace else { return };
        let instance = self.controller.namespace(nsid).and_then(|known| known.cache_instance);
        self.controller.mmio().identify_cache(instance);
    }

    /// When to poll even if nothing comes.
    pub fn wake_at(&mut self, now: Instant) -> Instant {
        let controller = self.controller.wake_at();
        controller.min(self.controller.mmio().wake_at(now))
    }

    /// What wakes a thread that waits for it: another one after each reset.
    pub fn wake_source(&mut self) -> WakeSource<'_> {
        self.controller.mmio().wake_source()
    }

    /// Gets ready for a sleep of its thread: what comes over the admin connection from now on signals
    /// the wake source. True if there is something already: then the thread must not sleep.
    pub fn arm(&mut self) -> bool {
        self.controller.mmio().arm()
    }

    /// The thread looks by itself again.
    pub fn disarm(&mut self) {
        self.controller.mmio().disarm();
    }

    /// Who is woken when a queue has something to tell, in whichever thread it does.
    pub fn wakes(&mut self, sleeper: Arc<dyn Wake + Send + Sync>) {
        self.controller.mmio().wakes(sleeper);
    }

    /// The controller: to ask it for queue pairs, admin commands and its end.
    pub fn controller(&mut self) -> &mut Controller<Front, Reach> {
        &mut self.controller
    }

    /// Queue pair `id` with its connection, once it has been created, as a block device over
    /// namespace `nsid`. Once each. `None` if there is no such queue pair or namespace, or no memory.
    pub fn take_queue(&mut self, id: u16, nsid: u32, sizes: QueueSizes) -> Option<RemoteQueue> {
        let way = self.take_way(id, nsid, sizes)?;
        let fail_fast = self.controller.mmio().options().policy.fail_fast;
        let caches = Arc::clone(self.controller.mmio().caches());
        Some(RemoteQueue::new(way, sizes.parents, fail_fast, caches))
    }

    /// As [`take_queue`](Self::take_queue), without anything that sends again.
    pub(crate) fn take_way(&mut self, id: u16, nsid: u32, sizes: QueueSizes) -> Option<Way> {
        let limits = self.controller.identity()?.limits;
        let view = self.controller.namespace(nsid)?.view(&limits);
        let pair = self.controller.take_queue_pair(id)?;
        let lane = self.controller.mmio().lane(id);
        // Of several namespaces only one can be vouched for.
        match self.namespace {
            Some(first) if first != nsid => self.controller.mmio().identify_cache(None),
            _ => self.namespace = Some(nsid),
        }
        self.controller.expect_namespace(nsid);
        self.identify_cache();
        let is_direct = self.controller.mmio().options().direct;
        let way = Way::new(&self.reach, pair, lane, view, sizes, self.io_timeout)?;
        Some(way.sending_at_once(is_direct))
    }

    /// The memory that it reaches.
    #[must_use]
    pub fn reach(&self) -> &Reach {
        &self.reach
    }

    /// What another controller would have to reset before nothing of the old one can take effect any
    /// more; `None` if there is nothing like that, or it is not known by what it would be named.
    pub(crate) fn doubtful(&mut self, now: Instant) -> Option<CrossControllerReset> {
        self.controller.mmio().doubtful(now)
    }

    /// It was reset, and nothing of it is left. False if it is another one by now.
    pub(crate) fn confirm_dead(&mut self, whom: CrossControllerReset) -> bool {
        self.controller.mmio().confirm_dead(whom)
    }

    /// Why it was lost last, if it ever was.
    pub fn why(&mut self) -> Option<String> {
        self.controller.mmio().why().map(str::to_owned)
    }

    /// Since when nobody is connected that was before.
    pub fn lost_since(&mut self) -> Option<Instant> {
        self.controller.mmio().lost_since()
    }

    /// Who was called.
    pub fn peer(&mut self) -> String {
        self.controller.mmio().peer()
    }

    /// The controller's identifier in its subsystem.
    pub fn cntlid(&mut self) -> u16 {
        self.controller.mmio().cntlid()
    }

    /// How often what has happened.
    pub fn counts(&mut self) -> Counts {
        self.controller.mmio().counts()
    }

    /// The world-wide name of a namespace, if it is there and has one.
    pub fn namespace_name(&mut self, nsid: u32) -> Option<String> {
        let identity = self.controller.identity()?;
        self.controller.namespace(nsid)?.world_wide_name(identity)
    }

    /// What it was called with.
    pub fn options(&mut self) -> Options {
        self.controller.mmio().options().clone()
    }

    /// Whether it can still be used, now or some time.
    pub fn is_there(&self) -> bool {
        !matches!(self.controller.state(), State::Dead | State::Removed | State::ShutDown)
    }
}

impl Drop for Remote {
    /// Its connections are closed. What queues have under way stays theirs until they are dropped.
    fn drop(&mut self) {
        self.controller.mmio().abandon();
    }
}

/// What suits a network, and who is called.
fn suited(wishes: ControllerOptions, options: &Options) -> ControllerOptions {
    let policy = &options.policy;
    ControllerOptions {
        admin_depth: crate::front::ADMIN_DEPTH,
        keep_alive: Some(policy.detect),
        keep_alive_is_set: true,
        // The front tells when something has changed.
        status_interval: Span::from_secs(3600),
        // Tries have an end in time and not in number.
        resets_max: u32::MAX,
        cut_off_timeout: Span { ns: 4 * policy.detect.ns + policy.give_up.ns },
        shadow_doorbells: false,
        // An answer wakes whoever waits for it.
        interrupts: true,
        sgl_only: true,
        owner_counts_losses: true,
        is_discovery: options.is_discovery(),
        ..wishes
    }
}

impl NotReached {
    /// Whose move it is.
    #[must_use]
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Name(_) => Blame::Caller,
            Self::Memory => Blame::Machine,
            Self::Peer { .. } | Self::Controller { .. } => Blame::Peer,
        }
    }
}

impl fmt::Display for NotReached {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(out),
            Self::Memory => out.write_str("call a controller: no memory is left for its queues"),
            Self::Peer { peer, why } => write!(out, "call {peer}: {why}"),
            Self::Controller { peer, error } => write!(out, "call {peer}: {error}"),
        }
    }
}

impl core::error::Error for NotReached {}
