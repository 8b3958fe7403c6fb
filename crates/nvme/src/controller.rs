//! One controller, from its registers to its namespaces: everything that is not the way of an I/O.
//!
//! ```text
//!                 .-------------- reset (bounded in number) <-------------.
//!                 v                                                       |
//!   Registers --> Starting: Identify, queues, events, namespaces --> Ready --> ShuttingDown
//!       |             |                                               |             |
//!       '-------------'--> Dead (cut off from memory)      Removed <--'   ShutDown <'
//! ```
//!
//! [`Controller::poll`] does a bounded amount of work and returns the next [`Event`];
//! [`Controller::wake_at`] says when it wants to be called again. So one thread brings up hundreds.
//!
//! | file | what of it |
//! |---|---|
//! | `registers` | walking `Bringup` and `Shutdown` over `Mmio` |
//! | `admin`, `transfer` | the admin queue: who asked for what, and where the data lie |
//! | `startup`, `scan`, `identity` | what is asked from Identify on, and what may be answered |
//! | `notices`, `keep_alive` | asynchronous events and the log pages behind them; signs of life |
//! | `queues`, `interrupt` | I/O queue pairs |
//! | `memory_buffer` | rings in memory of the controller's own |
//! | `ladder`, `cut_off` | overdue → abort → reset → dead; removal; cut off from memory |
//! | `owner`, `firmware` | what the owner may ask for |
//! | `stopping`, `shutdown` | the end |

mod admin;
mod cut_off;
mod firmware;
mod identity;
mod interrupt;
mod keep_alive;
mod ladder;
mod memory_buffer;
mod notices;
mod options;
mod owner;
mod queues;
mod registers;
mod scan;
mod shutdown;
mod startup;
mod stopping;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::{BTreeMap, VecDeque};

use base::{Answer, Dma, Instant, Mmio, Segment};

pub use firmware::FirmwareChunks;
pub use identity::{ControllerLimits, Identity, IoCommands};
pub use interrupt::{Armed, arm};
pub use memory_buffer::{MemoryBufferUse, NotInBuffer};
pub use options::{ControllerOptions, Quirks};
pub use queues::QueuePairOptions;
pub use shutdown::Shutdown;
use wire::Status;
pub use wire::register::ShutdownNotification;

use crate::bringup::{AdminQueues, Capabilities};
use crate::error::ControllerError;
use crate::event::Event;
use crate::namespace::{Names, Namespace};
use crate::queue_pair::{QueueMemory, QueuePair};
use admin::{Admin, Purpose};
use cut_off::CuttingOff;
use ladder::ResetHistory;
use memory_buffer::MemoryBuffer;
use notices::Wanted;
use queues::{IoQueue, Retired};
use registers::Walk;
use startup::Ask;

/// A controller and everything its host knows about it.
pub struct Controller<M: Mmio, D: Dma> {
    mmio: M,
    dma: D,
    options: ControllerOptions,
    memory: ControllerMemory,
    admin: Admin<D, M::Doorbell>,
    /// Where the admin queue is, as every bring-up tells the controller.
    admin_queues: AdminQueues,
    phase: Phase,
    events: VecDeque<Event>,
    doorbell_stride: u8,
    capabilities: Option<Capabilities>,
    identity: Option<Identity>,
    namespaces: BTreeMap<u32, Namespace>,
    queues: Vec<IoQueue<D, M::Doorbell>>,
    /// Queue pairs that are gone from the device, whose owners may not have noticed yet.
    retired: Vec<Retired>,
    /// I/O queue pairs that the controller grants.
    granted: u16,
    /// The one question that is open.
    asked: Option<Ask>,
    wanted: Wanted,
    /// Asynchronous Event Requests that the controller is meant to hold.
    event_requests: u16,
    /// What it said to an event configuration that it did not take.
    events_refused: Option<Status>,
    /// The namespace that is used, and the names that it has to have after every reset.
    expected: Option<(u32, Names)>,
    resets: ResetHistory,
    has_been_ready: bool,
    /// Writes may be lost, and no queue is known to have failed a flush for it.
    has_lost_writes: bool,
    uses_shadow_doorbells: bool,
    buffer: MemoryBuffer,
    polled_at: Instant,
    status_at: Instant,
    keep_alive_at: Instant,
}

/// Memory that the controller half itself shares with the device.
#[derive(Debug)]
struct ControllerMemory {
    admin: QueueMemory,
    /// For the data of whatever is asked.
    page: Segment,
    /// Shadow doorbells and event indexes.
    shadows: Option<[Segment; 2]>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is being brought up for the first time.
    Starting,
    /// It works.
    Ready,
    /// It is being reset.
    Resetting,
    /// It is being shut down.
    ShuttingDown,
    /// It has been shut down and switched off.
    ShutDown,
    /// It cannot be used.
    Dead,
    /// It is no longer there.
    Removed,
}

/// Named after what is awaited.
#[derive(Debug)]
enum Phase {
    /// What the registers say.
    Registers(Walk),
    /// The answers of start-up.
    Starting,
    /// Nothing in particular.
    Ready,
    /// The deletion of the queues, before a shutdown.
    Stopping { notification: ShutdownNotification, drain_until: Instant },
    /// That it has no access to memory under way.
    CuttingOff(CuttingOff),
    /// Nothing any more.
    Ended(State),
}

const PAGE: u32 = 4096;

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// A controller of which nothing is known yet. All the memory it will ever take for itself is
    /// taken here; [`poll`](Self::poll) begins to bring it up.
    ///
    /// # Panics
    ///
    /// If `options.admin_depth` is not 16 to 4096: that is our own configuration.
    pub fn new(mut mmio: M, dma: D, options: ControllerOptions) -> Result<Self, ControllerError> {
        assert!((16..=4096).contains(&options.admin_depth), "depth {}", options.admin_depth);
        let doorbell_stride = registers::doorbell_stride(&mut mmio)?;
        let memory = ControllerMemory::allocate(&dma, &options)?;
        let made = Admin::new(&mut mmio, &dma, &options, memory.admin, doorbell_stride);
        let (admin, admin_queues) = match made {
            Ok(made) => made,
            Err(error) => {
                memory.release(&dma);
                return Err(error);
            }
        };
        let walk = Walk::bring_up(admin_queues, Instant::default());
        Ok(Self {
            mmio,
            dma,
            options,
            memory,
            admin,
            admin_queues,
            phase: Phase::Registers(walk),
            events: VecDeque::new(),
            doorbell_stride,
            capabilities: None,
            identity: None,
            namespaces: BTreeMap::new(),
            queues: Vec::new(),
            retired: Vec::new(),
            granted: 0,
            asked: None,
            wanted: Wanted::default(),
            event_requests: 0,
            events_refused: None,
            expected: None,
            resets: ResetHistory::default(),
            has_been_ready: false,
            has_lost_writes: false,
            uses_shadow_doorbells: false,
            buffer: MemoryBuffer::default(),
            polled_at: Instant::default(),
            status_at: Instant::NEVER,
            keep_alive_at: Instant::NEVER,
        })
    }

    /// Does a bounded amount of work and returns the next event. `None` means that there is nothing
    /// more to tell at this time.
    pub fn poll(&mut self, now: Instant) -> Option<Event> {
        if self.events.is_empty() {
            self.turn(now);
        }
        self.events.pop_front()
    }

    /// When to poll even if no interrupt comes.
    pub fn wake_at(&self) -> Instant {
        if !self.events.is_empty() {
            return Instant::default();
        }
        match &self.phase {
            Phase::Registers(walk) => return walk.wake_at(),
            Phase::Ended(_) if self.retired.is_empty() => return Instant::NEVER,
            Phase::Ended(_) => return self.polled_at.after(self.options.poll_interval),
            Phase::CuttingOff(cutting) if cutting.ended().is_none() => {
                return self.polled_at.after(options::BUSY_INTERVAL);
            }
            Phase::CuttingOff(_) => return self.polled_at.after(self.options.poll_interval),
            Phase::Starting | Phase::Ready | Phase::Stopping { .. } => {}
        }
        let is_busy =
            !self.options.interrupts && (self.admin.is_busy() || self.queues_are_moving());
        let pause = if is_busy { options::BUSY_INTERVAL } else { self.options.poll_interval };
        let timers = self.status_at.min(self.keep_alive_at).min(self.admin.pair.wake_at());
        timers.min(self.polled_at.after(pause))
    }

    /// How far it is.
    pub fn state(&self) -> State {
        match &self.phase {
            Phase::Registers(walk) if walk.is_shutdown() => State::ShuttingDown,
            Phase::Registers(_) | Phase::Starting if self.has_been_ready => State::Resetting,
            Phase::Registers(_) | Phase::Starting => State::Starting,
            Phase::Ready => State::Ready,
            Phase::Stopping { .. } => State::ShuttingDown,
            Phase::CuttingOff(cutting) => match cutting.ended() {
                Some(state) => state,
                None if cutting.is_shutdown() => State::ShuttingDown,
                None if self.has_been_ready => State::Resetting,
                None => State::Starting,
            },
            Phase::Ended(state) => *state,
        }
    }

    /// What its registers said. `None` before they have been read.
    pub fn capabilities(&self) -> Option<&Capabilities> {
        self.capabilities.as_ref()
    }

    /// What Identify Controller said. `None` before it has been asked.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// The namespaces that can be used, by identifier.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces.values()
    }

    /// The namespace with this identifier, if it can be used.
    pub fn namespace(&self, id: u32) -> Option<&Namespace> {
        self.namespaces.get(&id)
    }

    /// From now on this namespace has to be the same one after every reset, by its names: a controller that
    /// shows another one under its identifier is reset and not used. The first call counts.
    pub fn expect_namespace(&mut self, id: u32) {
        if let Some(namespace) = self.namespaces.get(&id) {
            self.expected.get_or_insert((id, namespace.names));
        }
    }

    /// How many I/O queue pairs can exist at once.
    pub fn queue_pairs_max(&self) -> u16 {
        self.granted
    }

    /// The handle to the memory shared with it.
    pub fn dma(&self) -> &D {
        &self.dma
    }

    /// The registers, for whoever has something to change behind the controller's back: a test.
    pub fn mmio(&mut self) -> &mut M {
        &mut self.mmio
    }

    /// The admin queue pair, for its counters and for injecting errors into it.
    pub fn admin_queue(&mut self) -> &mut QueuePair<D, M::Doorbell> {
        &mut self.admin.pair
    }

    /// One turn: looks at everything that may have happened, and goes on with whatever can.
    fn turn(&mut self, now: Instant) {
        self.polled_at = now;
        self.release_retired();
        match &self.phase {
            Phase::Ended(_) => return,
            Phase::Registers(_) => return self.walk(now),
            Phase::CuttingOff(_) => return self.turn_cutting_off(now),
            _ => {}
        }
        if self.look_at_status(now) || self.heed_wanted_resets(now) {
            return;
        }
        for (purpose, answer) in self.admin.take(now) {
            self.handle_answer(now, purpose, answer);
        }
        let steps = [
            Self::converse,
            Self::move_queues,
            Self::abort_overdue,
            Self::keep_alive,
            Self::stop_if_so,
        ];
        for step in steps {
            // Any of them may be the end of this life.
            if self.is_standing_still() {
                return;
            }
            step(self, now);
        }
        self.admin.pair.flush();
    }

    fn handle_answer(&mut self, now: Instant, purpose: Purpose, answer: Answer) {
        match purpose {
            Purpose::Owner { token, list } => self.tell_owner(token, list, answer),
            Purpose::Abort { queue, overdue } => self.handle_aborted(queue, overdue),
            // The rest is of no use to a controller that has just been reset or given up.
            _ if self.is_standing_still() => {}
            Purpose::Asked => self.handle_asked(now, answer),
            Purpose::Queue { id } => self.handle_queue_answer(now, id, answer),
            Purpose::Event => self.handle_event(answer),
            Purpose::KeepAlive => {}
        }
    }

    /// Whether the admin queue takes nothing at the moment.
    fn is_standing_still(&self) -> bool {
        matches!(self.phase, Phase::Registers(_) | Phase::CuttingOff(_) | Phase::Ended(_))
    }

    fn tell(&mut self, event: Event) {
        self.events.push_back(event);
    }
}

impl ControllerMemory {
    fn allocate<D: Dma>(dma: &D, options: &ControllerOptions) -> Result<Self, ControllerError> {
        let depth = options.admin_depth;
        let none = |what, len_bytes| ControllerError::Memory { what, len_bytes };
        let admin = QueueMemory::allocate(dma, depth, depth)
            .ok_or(none("the admin queue", depth * (64 + 16)))?;
        let mut memory = Self { admin, page: Segment::default(), shadows: None };
        let pages = if options.shadow_doorbells { 3 } else { 1 };
        let mut taken = Vec::with_capacity(pages);
        while taken.len() < pages {
            let Some(page) = dma.allocate(PAGE) else {
                taken.into_iter().for_each(|page| dma.release(page));
                admin.release(dma);
                return Err(none("pages for admin commands", PAGE));
            };
            taken.push(page);
        }
        memory.page = taken[0];
        memory.shadows = (pages == 3).then(|| [taken[1], taken[2]]);
        Ok(memory)
    }

    fn release<D: Dma>(&self, dma: &D) {
        self.admin.release(dma);
        dma.release(self.page);
        self.shadows.iter().flatten().for_each(|page| dma.release(*page));
    }
}

impl<M: Mmio, D: Dma> Drop for Controller<M, D> {
    /// A controller that was not shut down is cut off from memory, and its queue pairs are told. If
    /// it has something under way at this moment, they are not, and what is parked stays parked.
    fn drop(&mut self) {
        if !matches!(self.phase, Phase::Ended(_)) {
            if !self.dma.cut_off() {
                // What it may still touch stays as it is, for ever: nobody is left to ask again.
                self.freeze();
                return;
            }
            self.end_queues();
        }
        self.release_retired();
        // An owner that has not noticed yet may still ring a doorbell or clear its rings. That
        // memory stays; it is given back with whatever lent it.
        if self.retired.is_empty() {
            self.admin.lists.release();
            self.memory.release(&self.dma);
        }
    }
}
