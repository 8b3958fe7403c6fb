//! NVMe controller on the host side, from its registers to its namespaces: everything except the I/O
//! path.
//!
//! ```text
//!                 .-------------- reset (bounded in number) <-------------.
//!                 v                                                       |
//!   Registers --> Starting: Identify, queues, events, namespaces --> Ready --> ShuttingDown
//!       |             |                                               |             |
//!       '-------------'--> Dead (DMA revoked)              Removed <--'   ShutDown <'
//! ```
//!
//! [`Controller::poll`] performs a bounded amount of work and returns the next [`Event`];
//! [`Controller::wake_at`] returns the time of the next call. One thread can therefore initialize
//! hundreds of controllers.
//!
//! | module | contents |
//! |---|---|
//! | `register_steps` | runs `Bringup` and `Shutdown` over `Mmio` |
//! | `admin`, `transfer` | admin queue: purpose of each command, and location of its data |
//! | `initialization`, `namespace_scan`, `identity` | commands from Identify on; checks of results |
//! | `async_events`, `keep_alive` | asynchronous events and their log pages; Keep Alive |
//! | `queues`, `queue_transports`, `interrupt` | I/O queue pairs, and what carries their commands |
//! | `cmb` | rings in the controller memory buffer |
//! | `recovery`, `dma_revocation` | timeout → abort → reset → dead; removal; revocation of DMA |
//! | `owner`, `firmware` | interface for the owner |
//! | `graceful_shutdown`, `shutdown` | shutdown |

mod admin_pointers;
mod admin_queue_pair;
mod arm_interrupt;
mod async_events;
mod cmb;
mod dma_revocation;
mod firmware;
mod graceful_shutdown;
mod identity;
mod initialization;
mod io_queue_pairs;
mod keep_alive;
mod namespace_scan;
mod options;
mod owner_commands;
mod queue_transports;
mod recovery;
mod register_sequence;
mod shutdown;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use tenmil_base::{Dma, Instant, IoCompletion, Mmio, Segment};

pub use arm_interrupt::{ArmResult, arm_interrupt};
pub use cmb::{CmbMode, CmbUnavailable};
pub use firmware::FirmwareDownloadCommands;
pub use identity::{ControllerLimits, Identity, OptionalIoCommands};
pub use io_queue_pairs::QueuePairOptions;
pub use options::{ControllerOptions, Quirks};
pub use queue_transports::{
    AdminQueueSetup, IoQueueParams, IoQueueSetup, QueueStep, QueueTransports, RingQueues,
    StepResult,
};
pub use shutdown::Shutdown;
use tenmil_wire::Status;
pub use tenmil_wire::register::ShutdownNotification;

use crate::bringup::{AdminQueueAddresses, Capabilities};
use crate::error::ControllerError;
use crate::event::Event;
use crate::namespace::{Namespace, NamespaceIds};
use crate::queue_pair::{AttachmentOf, QueueMemory, QueuePair};
use admin_queue_pair::{AdminCommandPurpose, AdminQueuePair};
use async_events::PendingLogPages;
use cmb::CmbState;
use dma_revocation::DmaRevocation;
use initialization::AdminQuery;
use io_queue_pairs::{IoQueue, RetiredQueue};
use recovery::ResetHistory;
use register_sequence::RegisterSequence;

/// A controller with all state that its host keeps: registers `M`, memory `D`, queues `Q`.
pub struct Controller<M: Mmio, D: Dma, Q: QueueTransports<M, D> = RingQueues> {
    mmio: M,
    dma: D,
    options: ControllerOptions,
    memory: ControllerMemory,
    admin: AdminQueuePair<Q::Admin>,
    /// Admin rings, as programmed at every initialization, if it has any.
    admin_queues: Option<AdminQueueAddresses>,
    phase: Phase,
    events: VecDeque<Event>,
    doorbell_stride: u8,
    capabilities: Option<Capabilities>,
    identity: Option<Identity>,
    namespaces: BTreeMap<u32, Namespace>,
    queues: Vec<IoQueue<Q::Io>>,
    /// Deleted queue pairs that their owners may still hold.
    retired: Vec<RetiredQueue<AttachmentOf<Q::Io>>>,
    /// I/O queue pairs that the controller grants.
    granted: u16,
    /// The driver's own outstanding command; at most one.
    asked: Option<AdminQuery>,
    wanted: PendingLogPages,
    /// Asynchronous Event Requests to keep outstanding.
    event_requests: u16,
    /// Status of a rejected Asynchronous Event Configuration.
    events_refused: Option<Status>,
    /// The namespace in use, and the identifiers that it must have after every reset.
    expected: Option<(u32, NamespaceIds)>,
    resets: ResetHistory,
    has_been_ready: bool,
    /// Completed writes may be lost, and no flush is known to have failed for it.
    has_lost_writes: bool,
    uses_shadow_doorbells: bool,
    buffer: CmbState,
    polled_at: Instant,
    status_at: Instant,
    keep_alive_at: Instant,
}

/// Memory of the controller object that is shared with the device.
#[derive(Debug)]
struct ControllerMemory {
    /// Admin rings, if it has any.
    admin: Option<QueueMemory>,
    /// Data of the driver's own commands.
    page: Segment,
    /// Shadow doorbells and event indices.
    shadows: Option<[Segment; 2]>,
}

/// State of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerState {
    /// First initialization in progress.
    Starting,
    /// Ready for commands.
    Ready,
    /// Reset in progress.
    Resetting,
    /// Shutdown in progress.
    ShuttingDown,
    /// Shut down and disabled.
    ShutDown,
    /// Not usable anymore.
    Dead,
    /// Removed from the system.
    Removed,
}

/// Internal phases, named after the result that they wait for.
#[derive(Debug)]
enum Phase {
    /// A register sequence.
    Registers(RegisterSequence),
    /// Completions of start-up commands.
    Starting,
    /// Nothing in particular.
    Ready,
    /// Deletion of the queues before a shutdown.
    Stopping { notification: ShutdownNotification, drain_until: Instant },
    /// End of DMA in flight.
    RevokingDma(DmaRevocation),
    /// Nothing anymore.
    Ended(ControllerState),
}

const PAGE: u32 = 4096;

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Creates a controller whose queues are rings in memory, in the state `Starting`. All memory for its
    /// own use is allocated here; [`poll`](Self::poll) starts the initialization.
    ///
    /// # Panics
    ///
    /// `options.admin_depth` is not 16 to 4096; it comes from the driver's own configuration.
    pub fn new(mmio: M, dma: D, options: ControllerOptions) -> Result<Self, ControllerError> {
        Self::with_queue_transports(mmio, dma, options)
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Like [`new`](Controller::new), for a controller with queues of any kind.
    ///
    /// # Panics
    ///
    /// `options.admin_depth` is not 16 to 4096.
    pub fn with_queue_transports(
        mut mmio: M,
        dma: D,
        options: ControllerOptions,
    ) -> Result<Self, ControllerError> {
        assert!((16..=4096).contains(&options.admin_depth), "depth {}", options.admin_depth);
        let doorbell_stride = register_sequence::read_doorbell_stride(&mut mmio)?;
        let memory = ControllerMemory::allocate(&dma, &options, Q::HAS_RINGS)?;
        let setup =
            AdminQueueSetup { depth: options.admin_depth, memory: memory.admin, doorbell_stride };
        let queues = memory
            .admin
            .map(|rings| queue_transports::admin_queue_addresses(&dma, rings))
            .transpose();
        let made = queues.and_then(|queues| {
            let transport = Q::create_admin_transport(&mut mmio, &dma, setup)?;
            let lists = Q::create_admin_pointers(&dma, admin_pointers::LISTS);
            Ok((AdminQueuePair::new(transport, lists, options.admin_timeout)?, queues))
        });
        let (admin, admin_queues) = match made {
            Ok(made) => made,
            Err(error) => {
                memory.release(&dma);
                return Err(error);
            }
        };
        let walk = RegisterSequence::bring_up(admin_queues, Instant::default());
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
            wanted: PendingLogPages::default(),
            event_requests: 0,
            events_refused: None,
            expected: None,
            resets: ResetHistory::default(),
            has_been_ready: false,
            has_lost_writes: false,
            uses_shadow_doorbells: false,
            buffer: CmbState::default(),
            polled_at: Instant::default(),
            status_at: Instant::NEVER,
            keep_alive_at: Instant::NEVER,
        })
    }

    /// Performs a bounded amount of work and returns the next event, or `None` if there is none at this
    /// time.
    pub fn poll(&mut self, now: Instant) -> Option<Event> {
        if self.events.is_empty() {
            self.step(now);
        }
        self.events.pop_front()
    }

    /// Time of the next poll, even without an interrupt.
    pub fn wake_at(&self) -> Instant {
        if !self.events.is_empty() {
            return Instant::default();
        }
        match &self.phase {
            Phase::Registers(walk) => return walk.wake_at(),
            Phase::Ended(_) if self.retired.is_empty() => return Instant::NEVER,
            Phase::Ended(_) => return self.polled_at.after(self.options.poll_interval),
            Phase::RevokingDma(cutting) if cutting.reported_state().is_none() => {
                return self.polled_at.after(options::BUSY_INTERVAL);
            }
            Phase::RevokingDma(_) => return self.polled_at.after(self.options.poll_interval),
            Phase::Starting | Phase::Ready | Phase::Stopping { .. } => {}
        }
        let is_busy =
            !self.options.interrupts && (self.admin.is_busy() || self.needs_queue_polling());
        let pause = if is_busy { options::BUSY_INTERVAL } else { self.options.poll_interval };
        let timers = self.status_at.min(self.keep_alive_at).min(self.admin.pair.wake_at());
        timers.min(self.polled_at.after(pause))
    }

    /// Current state.
    pub fn state(&self) -> ControllerState {
        match &self.phase {
            Phase::Registers(walk) if walk.is_shutdown() => ControllerState::ShuttingDown,
            Phase::Registers(_) | Phase::Starting if self.has_been_ready => {
                ControllerState::Resetting
            }
            Phase::Registers(_) | Phase::Starting => ControllerState::Starting,
            Phase::Ready => ControllerState::Ready,
            Phase::Stopping { .. } => ControllerState::ShuttingDown,
            Phase::RevokingDma(cutting) => match cutting.reported_state() {
                Some(state) => state,
                None if cutting.ends_shutdown() => ControllerState::ShuttingDown,
                None if self.has_been_ready => ControllerState::Resetting,
                None => ControllerState::Starting,
            },
            Phase::Ended(state) => *state,
        }
    }

    /// Capabilities from the registers; `None` before they are read.
    pub fn capabilities(&self) -> Option<&Capabilities> {
        self.capabilities.as_ref()
    }

    /// Data of Identify Controller; `None` before they are read.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// Usable namespaces, by identifier.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces.values()
    }

    /// Namespace with this identifier, if usable.
    pub fn namespace(&self, id: u32) -> Option<&Namespace> {
        self.namespaces.get(&id)
    }

    /// Requires that this namespace keeps its identifiers across every reset: a controller that presents
    /// a different one under this NSID is reset and not used. Only the first call has an effect.
    pub fn require_same_namespace(&mut self, id: u32) {
        if let Some(namespace) = self.namespaces.get(&id) {
            self.expected.get_or_insert((id, namespace.names));
        }
    }

    /// Maximum I/O queue pairs.
    pub fn queue_pairs_max(&self) -> u16 {
        self.granted
    }

    /// Handle to the memory shared with the controller.
    pub fn dma(&self) -> &D {
        &self.dma
    }

    /// Registers, for tests that change something behind the driver's back.
    pub fn mmio(&mut self) -> &mut M {
        &mut self.mmio
    }

    /// Admin queue pair, for its statistics and for error injection.
    pub fn admin_queue(&mut self) -> &mut QueuePair<Q::Admin> {
        &mut self.admin.pair
    }

    /// One poll: handles everything that may have happened, and advances all state machines.
    fn step(&mut self, now: Instant) {
        self.polled_at = now;
        self.release_retired();
        match &self.phase {
            Phase::Ended(_) => return,
            Phase::Registers(_) => return self.run_sequence(now),
            Phase::RevokingDma(_) => return self.poll_revocation(now),
            _ => {}
        }
        if self.poll_csts(now) || self.process_reset_requests(now) {
            return;
        }
        for (purpose, answer) in self.admin.take_completions(now) {
            self.handle_admin_completion(now, purpose, answer);
        }
        while !self.is_admin_queue_stopped()
            && let Some((id, result)) = Q::next_step_result(&mut self.mmio)
        {
            self.handle_queue_result(now, id, result);
        }
        let steps = [
            Self::poll_async_events,
            Self::advance_queues,
            Self::abort_overdue,
            Self::send_keep_alive_if_due,
            Self::continue_shutdown,
        ];
        for step in steps {
            // Each step may start a reset or the end of the controller.
            if self.is_admin_queue_stopped() {
                return;
            }
            step(self, now);
        }
        self.admin.pair.flush();
    }

    fn handle_admin_completion(
        &mut self,
        now: Instant,
        purpose: AdminCommandPurpose,
        answer: IoCompletion,
    ) {
        match purpose {
            AdminCommandPurpose::Owner { token, list } => self.notify_owner(token, list, answer),
            AdminCommandPurpose::Abort { queue, overdue } => {
                self.handle_abort_completion(queue, overdue)
            }
            // The other purposes have no meaning after a reset or failure.
            _ if self.is_admin_queue_stopped() => {}
            AdminCommandPurpose::DriverQuery => self.handle_query_response(now, answer),
            AdminCommandPurpose::Queue { id } => {
                let status = Status(answer.status.0);
                let result = if status.is_success() { Ok(None) } else { Err(status) };
                self.handle_queue_result(now, id, result);
            }
            AdminCommandPurpose::Event => self.handle_event_completion(answer),
            AdminCommandPurpose::KeepAlive => {}
        }
    }

    /// Whether the admin queue accepts no commands at present.
    fn is_admin_queue_stopped(&self) -> bool {
        matches!(self.phase, Phase::Registers(_) | Phase::RevokingDma(_) | Phase::Ended(_))
    }

    fn push_event(&mut self, event: Event) {
        self.events.push_back(event);
    }
}

impl ControllerMemory {
    fn allocate<D: Dma>(
        dma: &D,
        options: &ControllerOptions,
        has_rings: bool,
    ) -> Result<Self, ControllerError> {
        let depth = options.admin_depth;
        let none = |what, len_bytes| ControllerError::Memory { what, len_bytes };
        let admin = if has_rings {
            let rings = QueueMemory::allocate(dma, depth, depth);
            Some(rings.ok_or(none("the admin queue", depth * (64 + 16)))?)
        } else {
            None
        };
        let mut memory = Self { admin, page: Segment::default(), shadows: None };
        let pages = if options.shadow_doorbells { 3 } else { 1 };
        let mut taken = Vec::with_capacity(pages);
        while taken.len() < pages {
            let Some(page) = dma.allocate(PAGE) else {
                taken.into_iter().for_each(|page| dma.release(page));
                admin.iter().for_each(|rings| rings.release(dma));
                return Err(none("pages for admin commands", PAGE));
            };
            taken.push(page);
        }
        memory.page = taken[0];
        memory.shadows = (pages == 3).then(|| [taken[1], taken[2]]);
        Ok(memory)
    }

    fn release<D: Dma>(&self, dma: &D) {
        self.admin.iter().for_each(|rings| rings.release(dma));
        dma.release(self.page);
        self.shadows.iter().flatten().for_each(|page| dma.release(*page));
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Drop for Controller<M, D, Q> {
    /// Revokes DMA of a controller that was not shut down, and releases its queue pairs. If DMA is still
    /// in flight, they are not released, and parked commands stay parked.
    fn drop(&mut self) {
        if !matches!(self.phase, Phase::Ended(_)) {
            if !self.dma.revoke_access() {
                // Memory that the device may still access is leaked: nothing is left to poll the
                // revocation.
                self.freeze();
                return;
            }
            self.end_queues();
        }
        self.release_retired();
        // An owner that has not noticed the deletion may still write a doorbell or clear its rings. That
        // memory is kept, and freed together with the pool it came from.
        if self.retired.is_empty() {
            self.admin.pointers.release();
            self.memory.release(&self.dma);
        }
    }
}
