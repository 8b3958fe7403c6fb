//! Options of a controller, set by its owner.

use tenmil_base::Span;

use super::cmb::CmbMode;

/// Poll interval while a completion is pending that no interrupt announces.
pub(super) const BUSY_INTERVAL: Span = Span::from_us(20);

/// Options of a controller. The defaults suit a local SSD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerOptions {
    /// Entries of the admin queue, 16 to 4096.
    pub admin_depth: u32,
    /// I/O queue pairs to request.
    pub queue_pairs: u16,
    /// Asynchronous Event Requests to keep outstanding, if the controller supports as many.
    pub event_requests: u16,
    /// Maximum namespaces to track; additional ones are reported and ignored.
    pub namespaces_max: u32,
    /// Timeout of admin commands.
    pub admin_timeout: Span,
    /// Timeout of I/O commands, after which a command is aborted; after the same time again, the
    /// controller is reset.
    pub io_timeout: Span,
    /// Keep-alive timeout to set, if supported (Identify: KAS). `None` disables it.
    pub keep_alive: Option<Span>,
    /// The keep-alive timer was started by Connect (KATO): Keep Alive commands are sent even if the
    /// controller reports no timer (KAS is 0).
    pub keep_alive_is_set: bool,
    /// Interval of CSTS reads during normal operation.
    pub status_interval: Span,
    /// Interval of polls of the admin queue and of the queue pairs' requests; in effect, the longest wait
    /// for an interrupt.
    pub poll_interval: Span,
    /// Maximum number of resets
    pub resets_max: u32,
    /// within this time.
    pub resets_within: Span,
    /// Time for queue pairs to drain before a shutdown continues without them.
    pub quiesce_timeout: Span,
    /// Minimum shutdown timeout; a controller may request more (Identify: RTD3E).
    pub shutdown_timeout: Span,
    /// Time for DMA in flight to end after its revocation. After that, the controller is reported as
    /// dead, and memory that it may access stays parked until its DMA has ended.
    pub cut_off_timeout: Span,
    /// Whether to use shadow doorbells, if supported (Identify: OACS).
    pub shadow_doorbells: bool,
    /// Use of a controller memory buffer.
    pub memory_buffer: CmbMode,
    /// Whether interrupts are used; the vector of the admin queue is always 0. Otherwise queues are
    /// polled.
    pub interrupts: bool,
    /// Whether the owner tracks lost writes: CSTS.CFS and RDY = 0 then mean the end of a connection, and
    /// do not concern the controller's volatile cache.
    pub owner_counts_losses: bool,
    /// Whether it is a discovery controller, according to the NQN connected to: controllers before 1.4 do
    /// not report it (Identify: CNTRLTYPE 0). Data about I/O queues are then ignored, and neither queues
    /// nor namespaces are queried.
    pub is_discovery: bool,
    /// Known faults of this controller.
    pub quirks: Quirks,
}

/// Known faults of controllers that need a workaround. Each was observed on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// CSTS.SHST never reports a complete shutdown: its timeout counts as clean.
    pub shutdown_never_completes: bool,
    /// Shadow doorbells are reported as supported and do not work.
    pub broken_shadow_doorbells: bool,
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
            memory_buffer: CmbMode::Ignored,
            interrupts: false,
            owner_counts_losses: false,
            is_discovery: false,
            quirks: Quirks::default(),
        }
    }
}
