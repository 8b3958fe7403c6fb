//! What the owner of a controller decides.

use base::Span;

use super::memory_buffer::MemoryBufferUse;
use crate::data_pointer::SglSupport;

/// While something is awaited and no interrupt will tell of it, this is how often one looks.
pub(super) const BUSY_INTERVAL: Span = Span::from_us(20);

/// How a controller is to be treated. The defaults suit a local SSD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerOptions {
    /// Entries in the admin queue, 16 to 4096.
    pub admin_depth: u32,
    /// I/O queue pairs to ask for.
    pub queue_pairs: u16,
    /// Asynchronous Event Requests to keep outstanding, if the controller takes as many.
    pub event_requests: u16,
    /// Namespaces to keep track of; what the controller has beyond is told and left alone.
    pub namespaces_max: u32,
    /// How long an admin command may take.
    pub admin_timeout: Span,
    /// How long an I/O command may take before it is aborted, and again before the controller is
    /// reset.
    pub io_timeout: Span,
    /// The keep-alive time to set, if the controller has one (Identify: KAS). `None` leaves it off.
    pub keep_alive: Option<Span>,
    /// The keep-alive timer was started by Connect (KATO), so the controller is told that its host lives
    /// even if it says that it has no such timer (KAS is 0).
    pub keep_alive_is_set: bool,
    /// How often CSTS is looked at while all is well.
    pub status_interval: Span,
    /// How often commands in flight are looked after on the admin queue, and the queue pairs asked
    /// whether they need something. The wait for an interrupt, in effect.
    pub poll_interval: Span,
    /// How many resets are too many…
    pub resets_max: u32,
    /// …within this time.
    pub resets_within: Span,
    /// How long queue pairs may take to run dry before a shutdown goes on without them.
    pub quiesce_timeout: Span,
    /// The least a shutdown is waited for; a controller may ask for more (Identify: RTD3E).
    pub shutdown_timeout: Span,
    /// How long a controller that has been cut off from memory may have an access under way. After
    /// that its owner is told that it is dead, and what it may touch stays parked until it has ended.
    pub cut_off_timeout: Span,
    /// Whether to ask for shadow doorbells, if the controller has them (Identify: OACS).
    pub shadow_doorbells: bool,
    /// What is done with a controller memory buffer.
    pub memory_buffer: MemoryBufferUse,
    /// The interrupt vector of the admin queue is always 0; false leaves it to polling.
    pub interrupts: bool,
    /// Whether commands point at their data by SGLs only, whatever the controller says of itself:
    /// what stands between is a connection, which needs to know how long they are.
    pub sgl_only: bool,
    /// Whether the owner keeps account of lost writes: CSTS.CFS and RDY = 0 are then the end of a
    /// connection, and say nothing about the controller's volatile cache.
    pub owner_counts_losses: bool,
    /// Whether it is a discovery controller, as the name that was connected to says: those of before
    /// 1.4 do not say it themselves (Identify: CNTRLTYPE 0). What is told of I/O queues is not looked
    /// at then, and nothing is asked about queues and namespaces.
    pub is_discovery: bool,
    /// What is known to be wrong with this controller.
    pub quirks: Quirks,
}

/// Known faults of controllers, to be worked round. Each was proven by a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// CSTS.SHST never says that a shutdown is complete: waiting it out counts as clean.
    pub shutdown_never_completes: bool,
    /// Shadow doorbells are offered and do not work.
    pub broken_shadow_doorbells: bool,
}

impl ControllerOptions {
    /// How admin commands point at their data: by SGLs only over fabrics (Base 2.1 §4.1.1, PSDT).
    pub(super) const fn admin_pointers(&self) -> SglSupport {
        if self.sgl_only { SglSupport::Only } else { SglSupport::None }
    }
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            admin_depth: 64,
            queue_pairs: 128,
            event_requests: 4,
            namespaces_max: 1024,
            admin_timeout: Span::from_secs(30),
            io_timeout: Span::from_secs(30),
            keep_alive: None,
            keep_alive_is_set: false,
            status_interval: Span::from_secs(1),
            poll_interval: Span::from_ms(50),
            resets_max: 4,
            resets_within: Span::from_secs(300),
            quiesce_timeout: Span::from_secs(1),
            shutdown_timeout: Span::from_secs(5),
            cut_off_timeout: Span::from_secs(1),
            shadow_doorbells: false,
            memory_buffer: MemoryBufferUse::Ignored,
            interrupts: false,
            sgl_only: false,
            owner_counts_losses: false,
            is_discovery: false,
            quirks: Quirks::default(),
        }
    }
}
