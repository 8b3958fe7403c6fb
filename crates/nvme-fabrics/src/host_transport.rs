//! Fabrics controller presented as a register bank: a write to CC is sent over the wire, and CSTS reads
//! return the state of the connection.
//!
//! ```text
//!   driver     CAP, VS, CC, CSTS       admin queue pair          I/O queue pairs
//!                │  cached               │ AdminTransport          │ TcpTransport
//!   transport  state: connect,         admin: commands and       link of each I/O queue: its
//!              properties, losses,     properties share a        connection is connected here, and
//!              drain of the old        connection                attached by the queue's thread
//!              controller
//! ```
//!
//! CSTS.RDY becomes 0 once no connection is left, and the old controller can no longer execute commands:
//! it has confirmed CC.EN=0, its time has passed, or no command was outstanding that could do harm. So
//! the driver can rely on a reset as with a local SSD.
//!
//! | file | contents |
//! |---|---|
//! | `state` | connection state machine, from the first stream to the end of the controller |
//! | `admin` | admin queue, and the properties that share its connection |
//! | `queues` | I/O queues: connect, wait until they have closed |
//! | `reauthentication` | authentication of the connected controller again, and the generated key of secure channels |

mod admin_connection;
mod controller_state_machine;
mod io_queues;
mod reauthentication;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tenmil_base::{
    Dma, Doorbell, Error, Instant, Mmio, SecureChannel, Segment, SharedWaker, Span, WakeSource,
};
use tenmil_nvme_host::{
    AdminQueueSetup, ControllerError, IoQueueParams, IoQueueSetup, QueueStep, QueueTransports,
    RequestError, StepResult,
};
use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::register::{
    self, Capabilities, Configuration, ControllerStatus, ReadyTimeouts, offset,
};

use crate::admin_transport::{AdminCommands, AdminTransport};
use crate::cache_tracker::{Association, CacheTracker};
use crate::connector::Connector;
use crate::options::Options;
use crate::queue_authentication::ExchangeBuffers;
use crate::queue_connect::{self, CONNECT_BYTES};
use crate::queue_report::{ClosedQueue, EventMailbox};
use crate::remote_dma::RemoteDma;
use crate::segment_lists::SegmentLists;
use crate::tcp_transport::TcpTransport;
use crate::zero_copy_drain::ZeroCopyDrain;
pub(crate) use admin_connection::ADMIN_DEPTH;
use admin_connection::{AdminConnection, outstanding_max};
use controller_state_machine::{ControllerStage, DesiredState};
use io_queues::IoQueueEntry;
use reauthentication::GeneratedKey;

/// Registers of a fabrics controller, and everything behind them outside the I/O path.
pub struct HostTransport {
    connector: Box<dyn Connector>,
    options: Options,
    dma: RemoteDma,
    events: Arc<EventMailbox>,
    stage: ControllerStage,
    registers: ControllerRegisters,
    admin: Option<AdminConnection>,
    /// Cache state of all controllers, and the path of this one.
    caches: Arc<CacheTracker>,
    path: usize,
    /// The association of the admin connection.
    association: Option<Arc<Association>>,
    /// Closed admin connections whose memory the kernel still reads.
    draining: Vec<ZeroCopyDrain>,
    /// The same for connections of dropped queues, each with its report.
    undrained: Vec<(u16, ZeroCopyDrain, ClosedQueue)>,
    queues: BTreeMap<u16, IoQueueEntry>,
    /// Results of the creations and deletions of queues, until the driver has handled them.
    queue_results: VecDeque<(u16, StepResult<TcpTransport>)>,
    /// Commands of the admin queue.
    admin_commands: AdminCommands,
    /// Location of the Connect data: of the admin queue, and of I/O queues.
    page: Segment,
    /// Memory for authentication messages.
    exchange_buffers: Arc<ExchangeBuffers>,
    /// The key of all secure channels, with secure channel concatenation.
    generated_key: Option<GeneratedKey>,
    /// Generation of the secrets by which the controller was last authenticated, if it was.
    authenticated_generation: Option<u64>,
    /// Number of replacements of the secrets before the last attempt.
    attempted_replacements: u64,
    /// The last attempt has failed because of the secrets, and they are being looked up again.
    awaits_secrets: bool,
    /// Controller identifier (CNTLID).
    cntlid: u16,
    /// Facts from its Identify Controller data.
    controller_info: IdentifiedController,
    /// They are those of the controller that is connected now.
    has_controller_info: bool,
    /// Since when it has been lost or reset, until it is ready again.
    lost_since: Option<Instant>,
    /// It was ready before, so it is reconnected if it cannot be reached.
    was_ready: bool,
    /// Cause of the last loss or failed connect.
    why: Option<Error>,
    /// It was lost with a command outstanding that would do harm if it were executed late.
    may_execute_late: bool,
    /// Since when nothing has been sent to it.
    last_sent_at: Instant,
    /// Requested by a write to CC.
    desired_state: Option<DesiredState>,
    /// Earliest time of the next connect.
    next_connect_at: Instant,
    /// Maximum time to become ready (CAP.TO).
    ready_timeout: Span,
    /// CSTS has changed.
    has_changed: bool,
    stats: ConnectionStats,
}

/// Registers as the driver accesses them.
#[derive(Clone, Copy, Debug)]
struct ControllerRegisters {
    cap: Capabilities,
    vs: u32,
    cc: Configuration,
    csts: ControllerStatus,
    /// All registers read as ones: the controller will not return.
    is_removed: bool,
}

/// Queues that are connections: of the admin queue, and of each I/O queue.
#[derive(Debug)]
pub struct ConnectionQueues;

/// There are no doorbells.
#[derive(Clone, Copy, Debug)]
pub enum NoDoorbell {}

/// Facts from Identify Controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IdentifiedController {
    /// Maximum in-capsule data size of an I/O queue.
    pub(crate) in_capsule_bytes: u32,
    /// How long after the last byte from its host a controller may still execute commands.
    pub(crate) quiesce_time: Span,
    /// CIU and CIRN, which with the CNTLID identify this instance for a Cross-Controller Reset.
    pub(crate) instance: Option<(u8, u64)>,
}

/// Connection statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionStats {
    /// Connect attempts.
    pub attempts: u64,
    /// Failed attempts to connect a controller.
    pub failed: u64,
    /// Successful connects of a controller.
    pub connected: u64,
    /// Losses of a controller.
    pub lost: u64,
    /// Authentications of an admin queue.
    pub authentications: u64,
}

impl HostTransport {
    /// Creates a transport, which starts to connect in its first [`poll`](Self::poll). `None` if memory
    /// is exhausted.
    pub(crate) fn new(
        connector: Box<dyn Connector>,
        options: Options,
        dma: RemoteDma,
        (caches, path): (Arc<CacheTracker>, usize),
        now: Instant,
    ) -> Option<Self> {
        let page = dma.allocate(2 * CONNECT_BYTES)?;
        let quiesce_time = options.policy.detect;
        let controller_info =
            IdentifiedController { in_capsule_bytes: 0, quiesce_time, instance: None };
        let exchange_buffers = ExchangeBuffers::new(dma.clone());
        Some(Self {
            connector,
            options,
            dma,
            events: Arc::default(),
            stage: ControllerStage::Backoff { until: now },
            registers: ControllerRegisters::new(),
            admin: None,
            caches,
            path,
            association: None,
            draining: Vec::new(),
            undrained: Vec::new(),
            queues: BTreeMap::new(),
            queue_results: VecDeque::new(),
            admin_commands: AdminCommands::default(),
            page,
            exchange_buffers,
            generated_key: None,
            authenticated_generation: None,
            attempted_replacements: 0,
            awaits_secrets: false,
            cntlid: 0,
            controller_info,
            has_controller_info: false,
            lost_since: None,
            was_ready: false,
            why: None,
            may_execute_late: false,
            last_sent_at: now,
            desired_state: None,
            next_connect_at: now,
            ready_timeout: Span::default(),
            has_changed: false,
            stats: ConnectionStats::default(),
        })
    }

    /// Performs a bounded amount of work.
    pub(crate) fn poll(&mut self, now: Instant) {
        self.draining.retain_mut(|drain| !drain.poll_drained(now));
        self.exchange_buffers.poll();
        self.poll_admin(now);
        if !self.undrained.is_empty() {
            self.reap_drained(now);
        }
        if self.events.take().is_some() {
            self.detect_lost_queues(now);
        }
        self.poll_queues(now);
        self.poll_reauthentication(now);
        self.advance_state(now);
        self.dma.set_in_use(self.has_unfenced_io());
    }

    /// Latest time of the next call of [`poll`](Self::poll).
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let admin = self.admin.as_ref().map_or(Instant::NEVER, AdminConnection::wake_at);
        let queues = self.queues.values().map(|queue| queue.wake_at(now));
        let undrained = self.undrained.iter().map(|(_, drain, _)| drain);
        let draining = self.draining.iter().chain(undrained).map(ZeroCopyDrain::wake_at);
        let authentication =
            self.reauthentication_wake_at(now).min(self.exchange_buffers.wake_at(now));
        let state = self.stage_wake_at(now).min(authentication);
        queues.chain(draining).fold(admin.min(state), Instant::min)
    }

    /// Closes what can be closed, because `poll` will not be called any more. The driver has frozen the
    /// queues.
    pub(crate) fn close(&mut self) {
        self.close_admin();
        self.close_queues();
        self.reap_closed_queues();
        // The old controller may still execute commands, but accesses no memory of this process.
        self.dma.set_in_use(!self.are_queues_closed() || !self.draining.is_empty());
    }

    /// Whether CSTS has changed since the last call.
    pub(crate) fn take_state_change(&mut self) -> bool {
        core::mem::take(&mut self.has_changed)
    }

    /// Stores facts from Identify Controller.
    pub(crate) fn set_identified_controller(
        &mut self,
        page: &tenmil_wire::identify::IdentifyController,
    ) {
        self.controller_info = IdentifiedController::of(page, self.options.policy.detect);
        self.has_controller_info = true;
    }

    /// Sets the cache instance of its namespace.
    pub(crate) fn set_cache_instance(&self, instance: Option<CacheInstance>) {
        if let Some(association) = &self.association {
            self.caches.set_cache_instance(association, instance);
        }
    }

    /// Records that the controller is completely ready, which ends a loss.
    pub(crate) fn note_recovered(&mut self) {
        self.lost_since = None;
        self.was_ready = true;
    }

    /// Since when the connection has been lost.
    pub(crate) fn lost_since(&self) -> Option<Instant> {
        self.lost_since
    }

    /// Cause of the last loss or failed connect.
    pub(crate) fn last_error(&self) -> Option<&Error> {
        self.why.as_ref()
    }

    pub(crate) fn stats(&self) -> ConnectionStats {
        self.stats
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn peer(&self) -> String {
        self.connector.peer()
    }

    /// Secure channel of the admin connection; `None` for plaintext, or without a connection.
    pub(crate) fn secure_channel(&self) -> Option<&SecureChannel> {
        self.admin.as_ref()?.connection.secure_channel()
    }

    /// Whether the controller was authenticated when it was connected, or since.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.admin.is_some() && self.authenticated_generation.is_some()
    }

    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Sets the waker for events of queues.
    pub(crate) fn set_waker(&self, waker: SharedWaker) {
        self.events.set_waker(waker);
    }

    /// Wake source of the admin connection.
    pub(crate) fn wake_source(&self) -> WakeSource<'_> {
        self.admin.as_ref().map_or(WakeSource::None, AdminConnection::wake_source)
    }

    pub(crate) fn arm(&mut self) -> bool {
        self.events.is_pending() || self.admin.as_mut().is_some_and(|admin| admin.connection.arm())
    }

    pub(crate) fn disarm(&mut self) {
        if let Some(admin) = &mut self.admin {
            admin.connection.disarm();
        }
    }

    /// Stores the Connect data, for the admin queue or for I/O queues.
    fn store_connect_data(&self, is_admin: bool) -> Segment {
        let (at, cntlid) = match is_admin {
            true => (0, tenmil_wire::fabrics::CNTLID_DYNAMIC),
            false => (CONNECT_BYTES, self.cntlid),
        };
        // In range: the page has the size of both.
        let segment = self.page.slice(at, CONNECT_BYTES).unwrap_or_default();
        queue_connect::store_connect_data(self.dma.pool(), segment, &self.options, cntlid);
        segment
    }
}

impl Drop for HostTransport {
    fn drop(&mut self) {
        self.close();
        self.dma.release(self.page);
    }
}

impl ControllerRegisters {
    /// Registers before the first connect.
    fn new() -> Self {
        Self {
            cap: Capabilities::zeroed(),
            vs: 0,
            cc: Configuration::zeroed(),
            csts: ControllerStatus::zeroed(),
            is_removed: false,
        }
    }

    /// Sets CAP as the driver reads it: queue limits come from the controller, timeouts from the policy.
    fn set_capabilities(
        &mut self,
        cap: Capabilities,
        vs: u32,
        options: &Options,
        quiesce_time: Span,
    ) {
        // A disable takes one Property Set, its completion, and the drain of the old controller.
        let disable_time = Span { ns: 2 * options.policy.detect.ns + quiesce_time.ns };
        self.cap = Capabilities::zeroed().with(|cap_presented| {
            cap_presented
                .mqes(cap.mqes())
                .cqr(true)
                .to(u8::try_from(timeout_units(disable_time)).unwrap_or(u8::MAX))
                .css_nvm(cap.css_nvm())
                .css_io(cap.css_io())
                .css_none(cap.css_none())
                .crwms(true)
        });
        self.vs = vs;
    }

    fn ready_timeouts(options: &Options) -> u32 {
        let reconnect_time =
            Span { ns: options.policy.give_up.ns.saturating_add(options.policy.connect.ns) };
        let units = u16::try_from(timeout_units(reconnect_time)).unwrap_or(u16::MAX);
        ReadyTimeouts::zeroed().with(|timeouts| timeouts.crwmt(units)).0
    }
}

/// Converts to units of 500 ms, plus two: the driver's timeout must not expire before this one.
fn timeout_units(span: Span) -> u64 {
    span.ns / (u64::from(register::TIMEOUT_UNIT_MS) * 1_000_000) + 2
}

impl IdentifiedController {
    fn of(page: &tenmil_wire::identify::IdentifyController, detect: Span) -> Self {
        // IOCCSZ includes the command (NVM Express Base 2.1, section 5.1.13.2.1). TCP cannot use
        // in-capsule data with an offset (NVM Express TCP Transport 1.0, section 3.3.1).
        let in_capsule = page.ioccsz().saturating_mul(16).saturating_sub(64);
        let in_capsule_bytes = if page.icdoff() == 0 { in_capsule } else { 0 };
        // NVM Express Base 2.1, section 9.6: three keep-alive times with traffic based Keep Alive (the
        // controller checks only at the end of each interval, and an interval may have begun just after
        // the last command), and two without. One of them is for data in transit: the host would have
        // missed the completion in that time.
        let intervals = if page.tbkas() { 3 } else { 2 };
        // Controllers round the requested time up (section 5.1.25.1.8).
        let granularity = Span::from_ms(KEEP_ALIVE_UNIT_MS * u64::from(page.kas().max(1)));
        let interval = detect.ns.next_multiple_of(granularity.ns);
        let quiesce = Span::from_ms(page.cqt().into());
        let quiesce_time = Span { ns: intervals * interval + quiesce.ns };
        let instance = Some((page.ciu(), page.cirn())).filter(|(ciu, _)| *ciu != 0);
        Self { in_capsule_bytes, quiesce_time, instance }
    }
}

/// The unit of KAS (NVM Express Base 2.1, section 5.1.13.2.1).
const KEEP_ALIVE_UNIT_MS: u64 = 100;

#[expect(clippy::cast_possible_truncation, reason = "property offsets end long before 4 GiB")]
const fn offset_u32(offset: usize) -> u32 {
    offset as u32
}

const CAP: u32 = offset_u32(offset::CAP);
const VS: u32 = offset_u32(offset::VS);
const CC: u32 = offset_u32(offset::CC);
const CSTS: u32 = offset_u32(offset::CSTS);
const CRTO: u32 = offset_u32(offset::CRTO);

impl Mmio for HostTransport {
    type Doorbell = NoDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        if self.registers.is_removed {
            return register::ALL_ONES;
        }
        match offset {
            VS => self.registers.vs,
            CC => self.registers.cc.0,
            CSTS => self.registers.csts.0,
            CRTO => ControllerRegisters::ready_timeouts(&self.options),
            _ => 0,
        }
    }

    fn read64(&mut self, offset: u32) -> u64 {
        if self.registers.is_removed {
            return u64::MAX;
        }
        if offset == CAP { self.registers.cap.0 } else { 0 }
    }

    fn write32(&mut self, offset: u32, value: u32) {
        if offset == CC {
            self.handle_cc_write(Configuration(value));
        }
    }

    /// Every property of 64 bits is read-only, other than the addresses of rings.
    fn write64(&mut self, _: u32, _: u64) {}

    fn doorbell(&mut self, offset: u32) -> NoDoorbell {
        unreachable!("a doorbell at {offset:#x}: the queues of a remote controller are connections")
    }
}

impl Doorbell for NoDoorbell {
    fn ring(&mut self, _: u32) {
        match *self {}
    }
}

impl QueueTransports<HostTransport, RemoteDma> for ConnectionQueues {
    type Admin = AdminTransport;
    type Io = TcpTransport;

    const HAS_RINGS: bool = false;
    const STEPS: u8 = 1;

    fn create_admin_transport(
        transport: &mut HostTransport,
        dma: &RemoteDma,
        setup: AdminQueueSetup,
    ) -> Result<AdminTransport, ControllerError> {
        let commands = transport.admin_commands.clone();
        Ok(AdminTransport::new(commands, dma.clone(), outstanding_max(setup.depth)))
    }

    fn create_admin_pointers(dma: &RemoteDma, lists: u32) -> Option<SegmentLists> {
        SegmentLists::allocate(dma, lists)
    }

    fn create_io_transport(
        transport: &mut HostTransport,
        _: &RemoteDma,
        setup: IoQueueSetup,
    ) -> Result<TcpTransport, RequestError> {
        Ok(transport.queue_transport(setup.id, outstanding_max(setup.depth), setup.signals))
    }

    fn start_create_step(
        transport: &mut HostTransport,
        _: &RemoteDma,
        queue: IoQueueParams,
        _: u8,
    ) -> QueueStep {
        transport.connect_queue(queue.id, outstanding_max(queue.depth));
        QueueStep::Started
    }

    fn start_delete_step(transport: &mut HostTransport, id: u16, _: u8) -> QueueStep {
        transport.close_queue(id);
        QueueStep::Started
    }

    fn next_step_result(transport: &mut HostTransport) -> Option<(u16, StepResult<TcpTransport>)> {
        transport.queue_results.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_wire::identify::IdentifyController;

    use super::IdentifiedController;

    #[test]
    fn old_controller_counts_as_stopped_after_the_time_of_the_specification() {
        for (detect_ms, tbkas, kas, cqt, quiet_ms) in [
            // tenmil's own target, and Linux with its granularity of a second.
            (5000, true, 1, 1000, 16_000),
            (5000, true, 10, 0, 15_000),
            (1500, true, 10, 0, 6000),
            // A controller without traffic based Keep Alive that rounds up to ten seconds.
            (5000, false, 100, 0, 20_000),
            (5000, false, 1, 500, 10_500),
            // A controller without a keep-alive granularity is assumed to use the requested time.
            (5000, false, 0, 0, 10_000),
        ] {
            let page = IdentifyController::zeroed().with(|id| id.tbkas(tbkas).kas(kas).cqt(cqt));
            let found = IdentifiedController::of(&page, Span::from_ms(detect_ms)).quiesce_time;
            assert_eq!(found, Span::from_ms(quiet_ms), "{detect_ms} {tbkas} {kas} {cqt}");
        }
    }
}
