//! Memory-based transport: a controller behind registers, doorbells and rings, as in a real or emulated
//! PCI function.
//!
//! ```text
//!   host        stores CC, AQA, …, rings          loads CSTS         vectors
//!                     │                               ▲                 ▲
//!   Bar         ──────┼──── atomics ──────────────────┤                 │
//!                     ▼                               │                 │
//!   turn(now)   state (enable, stop, shut down) ─ admin queue ── I/O queues
//!                                                     │
//!                                                 Controller
//! ```
//!
//! A host in the same process holds a [`HostBarHandle`] and shares its memory. A host whose accesses are
//! trapped is served through [`MemoryTransport::read_register`] and [`MemoryTransport::write_register`]. Both store into
//! the same [`BarRegisters`], and a store takes effect in the next [`poll`](MemoryTransport::poll), as on a real
//! device.
//!
//! After CC.EN is cleared, CSTS.RDY stays set until no operation in progress can access host memory
//! anymore: neither a pending host-memory access nor a request in flight at a block device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{Instant, Interrupts, RingMemory, Span};
use tenmil_wire::register::{Capabilities, ReadyTimeouts, TIMEOUT_UNIT_MS};

use crate::bounce_pool::BouncePool;
use crate::controller::Controller;
use crate::controller::transport_interface::{
    InvalidDoorbell, QueueCommandId, ReservationCompletion, TransportAction,
};
use crate::doorbell::STRIDE;
use crate::queue::{Queue, QueueEvent};
use admin_queue::AdminQueue;
use bar_registers::BarStoreTarget;
pub use bar_registers::{BarRegisters, HostBarHandle};
use controller_state::ControllerState;
use msix_vectors::InterruptVectors;
use shutdown_flush::ShutdownFlush;

mod admin_commands;
mod admin_queue;
mod bar_registers;
mod controller_state;
pub mod fabrics;
mod io_queues;
mod msix_vectors;
mod shutdown_flush;
#[cfg(test)]
mod tests;
mod wakeup;

/// Memory-based transport: a controller behind registers, rings and MSI-X.
pub struct MemoryTransport<H: RingMemory + Clone, I: Interrupts> {
    bar: Arc<BarRegisters>,
    controller: Controller,
    host: H,
    vectors: InterruptVectors<I>,
    buffers: BouncePool,
    config: MemoryTransportConfig,
    /// I/O queues, in the order of their creation.
    queues: Vec<InterruptingQueue<H>>,
    admin: Option<AdminQueue<H>>,
    /// The volatile write cache is disabled; shared with the queues.
    is_write_through: Arc<AtomicBool>,
    state: ControllerState,
    shutdown: Option<ShutdownFlush>,
    /// Queues that the host has deleted and that are not drained yet, with the command to complete.
    deletions: Vec<QueueDeletion>,
    /// Shadow doorbells and event indices (Base 2.1 §5.2.5).
    shadow: Option<(u64, u64)>,
    changes_seen: u32,
    polls: u32,
    housekeeping_at: Instant,
    /// Deadline of the controller's timers, as of the last housekeeping run.
    controller_wakes_at: Instant,
    /// An admin command was executed: events, signals or deferred completions may be pending.
    wants_housekeeping: bool,
    has_io: bool,
    is_paused: bool,
    /// Number of queue creations and deletions.
    queue_change_count: u32,
    /// I/O completions since the last [`take_completed_count`](MemoryTransport::take_completed_count).
    completed_count: u64,
    /// Last error that no NVMe status reports.
    last_error: Option<String>,
}

/// I/O queue and its interrupt vector.
struct InterruptingQueue<H: RingMemory> {
    queue: Queue<H>,
    vector: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueDeletion {
    Submission { cid: u16, cqid: u16, sqid: u16 },
    Completion { cid: u16, cqid: u16 },
}

/// Limits of the memory transport, set at start.
#[derive(Clone, Debug)]
pub struct MemoryTransportConfig {
    /// Maximum commands in flight per I/O queue.
    pub in_flight_max: u16,
    /// Of these, commands that need more than one block-device request.
    pub contexts_max: u16,
    /// Maximum commands fetched from a submission queue at a time, unless the host sets less. A host with
    /// more commands in flight prepares one part while the controller executes the other.
    pub burst: u32,
    /// CAP.TO and CRTO: longest time to become ready, or to stop.
    pub ready_timeout: Span,
    /// MSI-X starts enabled with every vector unmasked, for use without a PCI configuration space.
    pub vectors_armed: bool,
}

/// Time of the next poll of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextPoll {
    /// At once: work was done, or more work is known to be pending.
    Busy,
    /// Soon, and not later than this time: a block device or the host has a pending completion.
    Pending(Instant),
    /// After host activity, and not later than this time.
    Idle(Instant),
}

/// Interval of housekeeping: timers and updates from other controllers.
const HOUSEKEEPING_INTERVAL: Span = Span::from_us(100);
/// Number of polls after which housekeeping runs regardless of the clock; a power of two.
const HOUSEKEEPING_POLLS: u32 = 1024;
/// Number of polls after which the admin queue is polled while I/O is active; a power of two.
const ADMIN_POLL_INTERVAL: u32 = 8;

impl Default for MemoryTransportConfig {
    /// 256 commands in flight, half of them multi-request commands, 64 fetched at a time; ready within
    /// ten seconds.
    fn default() -> Self {
        Self {
            in_flight_max: 256,
            contexts_max: 128,
            burst: 64,
            ready_timeout: Span::from_secs(10),
            vectors_armed: true,
        }
    }
}

impl<H: RingMemory + Clone, I: Interrupts> MemoryTransport<H, I> {
    /// Creates a disabled controller. Each clone of `host` is a separate channel to host memory with its
    /// own access identifiers; `buffers` hold data that block devices cannot access in host memory.
    pub fn new(
        controller: Controller,
        host: H,
        interrupts: I,
        buffers: BouncePool,
        config: MemoryTransportConfig,
    ) -> Self {
        let limits = controller.configuration();
        let (queues, vectors) = (limits.io_queues_max, limits.vectors);
        let units = config.ready_timeout.ns.div_ceil(u64::from(TIMEOUT_UNIT_MS) * 1_000_000);
        let to = u8::try_from(units.clamp(1, 255)).unwrap_or(u8::MAX);
        let mqes = u16::try_from(limits.queue_entries_max - 1).unwrap_or(u16::MAX);
        let capabilities = Capabilities(0).with(|cap| {
            cap.mqes(mqes)
                .cqr(true)
                .to(to)
                .dstrd(STRIDE)
                .nssrs(true)
                .css_nvm(true)
                .css_io(true)
                .mpsmax(controller_state::PAGE_SHIFT_MAX - controller_state::PAGE_SHIFT_MIN)
                .crwms(true)
        });
        let ready = ReadyTimeouts(0).with(|ready| ready.crwmt(to.into()));
        let bar = BarRegisters::new(capabilities.0, ready.0, queues, vectors);
        if config.vectors_armed {
            bar.enable_and_unmask_vectors();
        }
        let mut transport = Self {
            changes_seen: bar.store_count(),
            vectors: InterruptVectors::new(interrupts, vectors, controller.coalescing()),
            is_write_through: Arc::default(),
            bar,
            controller,
            host,
            buffers,
            config,
            queues: Vec::new(),
            admin: None,
            state: ControllerState::Disabled,
            shutdown: None,
            deletions: Vec::new(),
            shadow: None,
            polls: 0,
            housekeeping_at: Instant::default(),
            controller_wakes_at: Instant::default(),
            wants_housekeeping: false,
            has_io: false,
            is_paused: false,
            queue_change_count: 0,
            completed_count: 0,
            last_error: None,
        };
        transport.apply_feature_values();
        transport
    }

    /// Registers, shared with the host.
    pub fn bar_registers(&self) -> &Arc<BarRegisters> {
        &self.bar
    }

    /// Admin controller.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// Last error that no NVMe status reports, as one line.
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// Reads `size` bytes at `offset`; `size` is 1, 2, 4 or 8.
    pub fn read_register(&self, offset: u32, size: u32) -> u64 {
        self.bar.read(offset, size)
    }

    /// Writes 4 or 8 bytes at `offset`. The write takes effect in the next poll.
    pub fn write_register(&mut self, now: Instant, offset: u32, size: u32, value: u64) {
        let is_missing = match self.bar.store(offset, size, value) {
            BarStoreTarget::Register => false,
            BarStoreTarget::NoDoorbell => true,
            BarStoreTarget::Doorbell(index) => !self.has_doorbell(index),
        };
        if is_missing && self.state == ControllerState::Enabled {
            self.controller.record_invalid_doorbell(now, InvalidDoorbell::Register);
        }
    }

    /// Writes doorbell `index`: twice the queue identifier, plus one for a completion queue.
    pub fn write_doorbell(&mut self, now: Instant, index: u32, value: u32) {
        let at = index.checked_mul(4 << STRIDE).and_then(|distance| distance.checked_add(0x1000));
        if let Some(at) = at {
            self.write_register(now, at, 4, value.into());
        }
    }

    /// Stops or resumes fetching commands. Commands already fetched continue until the controller [is
    /// quiesced](Self::is_quiesced). Then host memory is not accessed, except for shadow doorbells, and
    /// parts of it may be unmapped.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        self.queues.iter_mut().for_each(|signalled| signalled.queue.set_paused(is_paused));
    }

    /// Number of queue creations and deletions. A caller that keeps state per queue refreshes it when
    /// this number has changed.
    pub fn queue_change_count(&self) -> u32 {
        self.queue_change_count
    }

    /// Whether no command is executing and no host-memory access is in flight. The first half of a fused
    /// pair does not count: the host may never send the second one.
    pub fn is_quiesced(&self) -> bool {
        let is_admin_quiet = self.admin.as_ref().is_none_or(|admin| admin.is_drained());
        is_admin_quiet
            && self.queues.iter().all(|signalled| signalled.queue.is_idle_except_fused_halves())
    }

    /// I/O commands in flight.
    pub fn executing_count(&self) -> usize {
        self.queues.iter().map(|signalled| signalled.queue.executing_count()).sum()
    }

    /// Number of I/O commands completed since the last call.
    pub fn take_completed_count(&mut self) -> u64 {
        core::mem::take(&mut self.completed_count)
    }

    /// Polls the transport: performs a bounded amount of work.
    pub fn poll(&mut self, now: Instant) -> NextPoll {
        let changes = self.bar.store_count();
        let has_changed = changes != self.changes_seen;
        if has_changed {
            self.changes_seen = changes;
            self.handle_register_store(now);
        }
        // I/O queues first. The admin queue is polled when they are idle, and every ADMIN_TURNS polls
        // otherwise.
        let (is_busy, is_pending) = self.poll_queues(now);
        let mut is_busy = is_busy | has_changed;
        self.polls = self.polls.wrapping_add(1);
        let is_every = |polls| self.polls & (polls - 1) == 0;
        let (wants_admin, wants_housekeeping) =
            (is_every(ADMIN_POLL_INTERVAL), is_every(HOUSEKEEPING_POLLS));
        let may_fetch = self.state == ControllerState::Enabled && !self.is_paused;
        if may_fetch && (!is_busy || has_changed || wants_admin) {
            is_busy |= self.poll_admin(now);
        }
        if wants_housekeeping || (!is_busy && self.is_housekeeping_due(now)) {
            is_busy |= self.run_housekeeping(now);
        }
        is_busy |= self.vectors.poll(now, &self.bar);
        if is_busy {
            return NextPoll::Busy;
        }
        let is_pending = is_pending
            || self.is_transitioning()
            || self.admin.as_ref().is_some_and(|admin| admin.waits_for_entry_or_host());
        self.next_poll_time(is_pending)
    }

    #[inline]
    fn is_housekeeping_due(&self, now: Instant) -> bool {
        let is_time = now.since(self.housekeeping_at) >= HOUSEKEEPING_INTERVAL
            || now >= self.controller_wakes_at;
        is_time || self.wants_housekeeping || self.is_transitioning()
    }

    /// Runs the periodic work: timers, long commands, events, queue deletions, and updates from other
    /// controllers. Returns whether any work was done.
    // Apart from the loop over the queues, which is on the path of an I/O.
    #[inline(never)]
    pub fn run_housekeeping(&mut self, now: Instant) -> bool {
        (self.housekeeping_at, self.wants_housekeeping) = (now, false);
        if core::mem::take(&mut self.has_io) {
            self.controller.note_io_activity(now);
        }
        self.controller.poll(now);
        let mut is_busy = self.advance_state(now);
        // No other event ends the wait for the last access.
        self.wants_housekeeping = self.check_revocation(now);
        while let Some(signal) = self.controller.next_transport_action() {
            is_busy |= signal != TransportAction::CheckPreempted;
            match signal {
                TransportAction::KeepAliveExpired => self
                    .fail_controller(now, "the host sent no command within its keep-alive timeout"),
                TransportAction::AbortNamespace { nsid, preempted } => {
                    for signalled in &mut self.queues {
                        signalled.queue.abort_namespace(now, nsid, &preempted);
                    }
                }
                TransportAction::CheckPreempted => {
                    self.queues
                        .iter_mut()
                        .for_each(|signalled| signalled.queue.poll_preempted_writes());
                }
                TransportAction::PersistFailed { why } => self.last_error = Some(why),
            }
        }
        while let Some(ReservationCompletion { from, end }) =
            self.controller.next_reservation_completion()
        {
            is_busy = true;
            if let Some(signalled) = self.find_completion_queue(from.queue) {
                signalled.queue.complete_reservation_command(now, from.ticket, end, &[]);
            }
        }
        is_busy |= self.poll_deferred_admin(now);
        self.controller_wakes_at = self.controller.wake_at(now);
        is_busy
    }

    fn poll_queues(&mut self, now: Instant) -> (bool, bool) {
        let (mut is_busy, mut is_pending, mut has_events) = (false, false, false);
        for signalled in &mut self.queues {
            let stats = signalled.queue.poll(now);
            is_busy |= stats.is_busy;
            is_pending |= stats.is_pending;
            self.has_io |= stats.taken > 0;
            has_events |= signalled.queue.has_events();
            if stats.posted > 0 {
                self.completed_count += u64::from(stats.posted);
                if let Some(vector) = signalled.vector {
                    self.vectors.signal_completions(now, &self.bar, vector, stats.posted);
                }
            }
        }
        if has_events {
            self.handle_queue_events(now);
        }
        (is_busy, is_pending)
    }

    #[cold]
    fn handle_queue_events(&mut self, now: Instant) {
        let Self { queues, controller, last_error, .. } = self;
        let mut broken = None;
        for signalled in queues {
            let queue = signalled.queue.cqid();
            while let Some(event) = signalled.queue.next_event() {
                match event {
                    QueueEvent::Error(report) => controller.record_error_completion(now, &report),
                    QueueEvent::InvalidDoorbell(kind) => {
                        controller.record_invalid_doorbell(now, kind)
                    }
                    QueueEvent::Reservation { ticket, command, mut bytes } => {
                        let from = QueueCommandId { queue, ticket };
                        let end =
                            controller.execute_reservation_command(now, from, &command, &mut bytes);
                        if let Some(end) = end {
                            signalled.queue.complete_reservation_command(now, ticket, end, &bytes);
                        }
                    }
                    QueueEvent::OpenFailed(what) => *last_error = Some(what),
                    QueueEvent::RingFault(fault) => broken = Some(fault),
                }
            }
        }
        if let Some(fault) = broken {
            self.fail_controller(
                now,
                &format!("the memory of a ring at {:#x} is not accessible", fault.iova),
            );
        }
    }

    fn next_poll_time(&self, is_pending: bool) -> NextPoll {
        let until = self.controller_wakes_at.min(self.vectors.wake_at());
        if !is_pending {
            return NextPoll::Idle(until);
        }
        let media = self.queues.iter().map(|signalled| signalled.queue.wake_at()).min();
        NextPoll::Pending(media.map_or(until, |media| media.min(until)))
    }

    /// Applies the feature values that the host has set.
    fn apply_feature_values(&mut self) {
        let controller = &self.controller;
        let is_write_through = !controller.write_cache_enabled();
        self.is_write_through.store(is_write_through, Ordering::Relaxed);
        let is_exempt = |vector| controller.is_coalescing_disabled(vector);
        self.vectors.set_coalescing(controller.coalescing(), is_exempt);
        let burst = self.fetch_burst_max();
        for signalled in &mut self.queues {
            signalled.queue.set_arbitration_burst(burst);
        }
    }

    fn fetch_burst_max(&self) -> u32 {
        let asked = self.controller.arbitration().burst.map_or(self.config.burst, u32::from);
        asked.min(self.config.burst)
    }
}
