//! A controller behind connections: properties, admin commands and associations (Base 2.1 §3.3, §6).
//!
//! ```text
//!   admin connection ── property · data · execute ──▶ FabricsFrontEnd ── Controller
//!          ▲ next_end                                     │    ▲
//!          └──────────────────────────────────────────────┘    │ letters, answers to orders, traffic
//!                                             orders │         │
//!   I/O connection ◀── QueueLink ────────────────────┘         │
//!          └── Queue, which lives with its connection ─────────┘
//! ```
//!
//! There are no rings here and no memory of a host: whoever has the admin connection brings commands
//! with their bytes and takes their ends away. Commands are known by the identifier that they are
//! brought with, which has to be unique among those that have not ended.
//!
//! Nothing here is on the way of an I/O. Several threads may need the front end, so its owner keeps
//! it behind a lock; what the front end wants of a queue is an order that lies in its [`QueueLink`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::{HostMemory, Instant, Span};
use wire::register::{
    Arbitration, Capabilities, CommandSetSelected, Configuration, ControllerStatus, ReadyTimeouts,
    ShutdownStatus, VERSION_2_1, offset,
};
use wire::{AdminOpcode, Command, Status};

use crate::buffers::Buffers;
use crate::controller::contract::{
    AdminData, AdminDone, AdminEnd, AdminStep, ErrorReport, Signal, Traffic,
};
use crate::controller::{Bell, Controller};
use crate::doorbell::DoorbellPage;
use crate::front::shutdown::Shutdown;
use crate::queue::{Letter, Queue, QueueConfig, QueueShared, Siblings};

mod link;

pub use link::{Order, QueueLink};

/// A controller behind connections: one association.
pub struct FabricsFrontEnd {
    controller: Controller,
    siblings: Arc<Siblings>,
    doorbells: Arc<DoorbellPage>,
    /// I/O queues that exist, by identifier.
    links: BTreeMap<u16, Arc<QueueLink>>,
    life: Life,
    configuration: Configuration,
    shutdown: Option<Shutdown>,
    /// Event requests, oldest first.
    parked: VecDeque<u16>,
    /// Commands that end later, event requests among them.
    waiting: Vec<Waiting>,
    ends: VecDeque<AdminDone>,
    /// Until when the host has to enable the controller.
    enable_by: Instant,
    /// When the host was last heard of.
    heard_at: Instant,
    bell: Option<Bell>,
    over: Option<Over>,
    trouble: Option<String>,
}

/// A command that ends later.
struct Waiting {
    /// Under the identifier that it was brought with.
    command: Command,
    /// What its host calls it.
    host_cid: u16,
}

/// Why an association has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// The admin connection is not there any more.
    HostLost,
    /// The host has not been heard of for its keep-alive time-out (Base 2.1 §3.9).
    KeepAliveExpired,
    /// The subsystem is not offered any more.
    Withdrawn,
    /// The host has connected and has not enabled the controller in time (Base 2.1 §3.5.2).
    NotEnabled,
}

/// What an I/O queue is made with.
#[derive(Clone, Copy, Debug)]
pub struct FabricsQueue {
    /// Its identifier: that of the submission and of the completion queue.
    pub qid: u16,
    /// Entries of either ring.
    pub entries: u32,
    /// IOVA of the submission ring.
    pub submission: u64,
    /// IOVA of the completion ring.
    pub completion: u64,
    /// A page of the memory behind it is `1 << page_shift` bytes.
    pub page_shift: u8,
    /// Commands that may be in flight.
    pub in_flight_max: u16,
    /// Of these, commands that need more than one request.
    pub areas: u16,
}

/// The answer to a letter that wants one: for [`Queue::decide`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// As it came in the letter.
    pub ticket: u32,
    /// How the command ends.
    pub end: AdminEnd,
    /// The bytes of a report.
    pub bytes: Vec<u8>,
}

/// Where a controller is between its resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Disabled,
    Enabled,
    /// It has been disabled, and I/O queues still end.
    Stopping,
    /// It was enabled with what cannot be, and waits to be disabled.
    Failed,
}

/// CC.IOSQES and CC.IOCQES as powers of two (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;
/// How long a host may take to enable the controller (Base 2.1 §3.5.2).
const ENABLE_MAX: Span = Span::from_secs(120);
/// CAP.TO and CRTO, in units of 500 ms.
const READY_UNITS: u8 = 20;
/// How often a shutdown under way, or a reset, is looked after.
const MOTION: Span = Span::from_us(100);

const REFUSED: Status = Status::INVALID_FIELD.with_dnr();

impl FabricsFrontEnd {
    /// An association that has just begun; its controller is disabled.
    pub fn new(controller: Controller, now: Instant) -> Self {
        let queues = controller.configuration().io_queues_max;
        let front = Self {
            siblings: Siblings::new(queues),
            doorbells: DoorbellPage::new(queues),
            controller,
            links: BTreeMap::new(),
            life: Life::Disabled,
            configuration: Configuration(0),
            shutdown: None,
            parked: VecDeque::new(),
            waiting: Vec::new(),
            ends: VecDeque::new(),
            enable_by: now.after(ENABLE_MAX),
            heard_at: now,
            bell: None,
            over: None,
            trouble: None,
        };
        front.configure();
        front
    }

    /// The admin half.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// The last thing that went wrong and that no status tells, in a line; once.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// Has `bell` called when another thread has left something for the admin connection.
    pub fn set_bell(&mut self, bell: Bell) {
        self.controller.ring_on_mail(bell.clone());
        self.bell = Some(bell);
    }

    /// Property Get (Base 2.1 §6.5): the value of `len_bytes` at `at`.
    ///
    /// # Errors
    ///
    /// If there is no such property, or it has another length.
    pub fn property(&mut self, now: Instant, at: u32, len_bytes: u32) -> Result<u64, Status> {
        self.hear(now);
        let entries = self.controller.configuration().queue_entries_max;
        property(entries, (self.configuration, self.status()), at, len_bytes)
    }

    /// Property Set (Base 2.1 §6.6).
    ///
    /// # Errors
    ///
    /// If there is no such property, or it cannot be set, or it has another length.
    pub fn set_property(
        &mut self,
        now: Instant,
        at: u32,
        len_bytes: u32,
        value: u64,
    ) -> Result<(), Status> {
        self.hear(now);
        let value = u32::try_from(value).map_err(|_| REFUSED)?;
        if (at as usize, len_bytes) != (offset::CC, 4) {
            return Err(REFUSED);
        }
        self.configuration = Configuration(value);
        self.turn_life(now);
        Ok(())
    }

    /// Whether commands other than those of fabrics are taken.
    pub fn is_enabled(&self) -> bool {
        self.life == Life::Enabled
    }

    /// The data that goes with an admin command, or why it is refused.
    pub fn data(&self, command: &Command) -> Result<AdminData, Status> {
        if !self.is_enabled() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        self.controller.data(command)
    }

    /// Carries out an admin command; its end, and the bytes that go to the host, may be there at
    /// once. If not, it ends through [`next_end`](Self::next_end). `host_cid` is what its host calls
    /// it, and is told of it.
    pub fn execute(
        &mut self,
        now: Instant,
        command: &Command,
        host_cid: u16,
        bytes: &mut Vec<u8>,
    ) -> Option<AdminEnd> {
        if !self.is_enabled() {
            return Some(AdminEnd::refused(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
        }
        self.heard_at = now;
        let step = self.controller.execute(now, command, bytes);
        if command.opcode() == AdminOpcode::SetFeatures.code() {
            self.configure();
        }
        match step {
            AdminStep::Done(end) => return Some(self.told(now, (command, host_cid), end)),
            AdminStep::Abort { sqid, cid } => return self.abort((command, host_cid), sqid, cid),
            AdminStep::AsyncEvent => self.parked.push_back(command.cid()),
            AdminStep::Later => {}
            // Queues come with connections, and so the controller knows no such commands.
            AdminStep::CreateCompletionQueue(_)
            | AdminStep::CreateSubmissionQueue(_)
            | AdminStep::DeleteSubmissionQueue { .. }
            | AdminStep::DeleteCompletionQueue { .. }
            | AdminStep::DoorbellBuffers { .. } => {
                return Some(AdminEnd::refused(Status::INVALID_OPCODE.with_dnr()));
            }
        }
        self.waiting.push(Waiting { command: *command, host_cid });
        None
    }

    /// Takes note of an admin command that was refused before it came here, under the identifier
    /// that its host has for it.
    pub fn refused(&mut self, now: Instant, command: &Command, status: Status) {
        let end = AdminEnd::refused(status);
        self.controller.report_error(now, &report(command, command.cid(), end));
    }

    /// The next command that has ended after [`execute`](Self::execute) had not ended it.
    pub fn next_end(&mut self) -> Option<AdminDone> {
        self.ends.pop_front()
    }

    /// Looks after timers, long commands, events and queues that end. True if anything was done.
    pub fn turn(&mut self, now: Instant) -> bool {
        if let Some(at) = self.links.values().map(|link| link.heard_at()).max() {
            self.hear(at);
        }
        self.controller.turn(now);
        let mut is_busy = self.turn_life(now);
        while let Some(signal) = self.controller.next_signal() {
            is_busy = true;
            match signal {
                Signal::KeepAliveExpired => self.end(Over::KeepAliveExpired),
                Signal::AbortNamespace { nsid } => self.order(Order::AbortNamespace { nsid }),
            }
        }
        if now >= self.enable_by {
            self.enable_by = Instant::NEVER;
            self.end(Over::NotEnabled);
        }
        while let Some(done) = self.controller.next_done() {
            is_busy |= self.ended(now, done.cid, done.end);
        }
        while !self.parked.is_empty()
            && let Some(result) = self.controller.next_event()
            && let Some(cid) = self.parked.pop_front()
        {
            is_busy |= self.ended(now, cid, AdminEnd::with(result));
        }
        is_busy
    }

    /// When to turn even if nothing happens.
    pub fn wake_at(&self, now: Instant) -> Instant {
        let is_flushing = self.shutdown.as_ref().is_some_and(Shutdown::is_running);
        let motion = if is_flushing { now.after(MOTION) } else { Instant::NEVER };
        self.controller.wake_at(now).min(self.enable_by).min(motion)
    }

    /// The association ends: every I/O queue is told to. The first reason is the one.
    pub fn end(&mut self, why: Over) {
        if self.over.is_none() {
            self.over = Some(why);
            self.order(Order::Stop);
            self.ring();
        }
    }

    /// Why the association has ended, once it has.
    pub fn over(&self) -> Option<Over> {
        self.over
    }

    /// Whether no I/O queue is left.
    pub fn is_drained(&self) -> bool {
        self.links.is_empty()
    }

    /// Makes an I/O queue for a connection, which owns it and does what its link says.
    ///
    /// # Errors
    ///
    /// [`NoQueue`] says what stands in the way.
    pub fn create_queue<H: HostMemory>(
        &mut self,
        host: H,
        new: &FabricsQueue,
        buffers: Buffers,
    ) -> Result<(Queue<H>, Arc<QueueLink>), NoQueue> {
        self.may_create(new.qid)?;
        let config = QueueConfig {
            cqid: new.qid,
            entries: new.entries,
            address: new.completion,
            page_shift: new.page_shift,
            transfer_bytes_max: self.controller.configuration().transfer_bytes_max,
            in_flight_max: new.in_flight_max,
            areas: new.areas,
            burst: self.burst(),
        };
        let shared = QueueShared {
            doorbells: self.doorbells.clone(),
            siblings: self.siblings.clone(),
            buffers,
        };
        let namespaces = self.controller.namespaces().reader();
        let queue = Queue::new(host, &config, shared, namespaces);
        let mut queue = queue.map_err(|_| NoQueue::Memory)?;
        queue
            .add_submission_queue(new.qid, new.entries, new.submission)
            .map_err(|_| NoQueue::Memory)?;
        self.controller.queue_created();
        let link = Arc::new(QueueLink::default());
        self.links.insert(new.qid, Arc::clone(&link));
        Ok((queue, link))
    }

    /// Whether there may be a queue `qid` now.
    ///
    /// # Errors
    ///
    /// [`NoQueue`] says what stands in the way.
    pub fn may_create(&self, qid: u16) -> Result<(), NoQueue> {
        let (granted, _) = self.controller.queues_granted();
        let cc = &self.configuration;
        let has_entries = cc.iosqes() == SUBMISSION_ENTRY_SHIFT
            && cc.iocqes() == COMPLETION_ENTRY_SHIFT
            && cc.css() != CommandSetSelected::AdminOnly;
        if !self.is_enabled() || !has_entries || self.over.is_some() {
            return Err(NoQueue::NotEnabled);
        }
        if qid == 0 || qid > granted {
            return Err(NoQueue::Identifier { qid, granted });
        }
        if self.links.contains_key(&qid) {
            return Err(NoQueue::Exists { qid });
        }
        Ok(())
    }

    /// Where queues are rung.
    pub fn doorbells(&self) -> &Arc<DoorbellPage> {
        &self.doorbells
    }

    /// Takes what a queue has to say. Commands in it are known by the identifiers of the host.
    pub fn letter(&mut self, now: Instant, letter: Letter) -> Option<Decision> {
        match letter {
            Letter::Error(report) => self.controller.report_error(now, &report),
            Letter::InvalidDoorbell(kind) => self.controller.invalid_doorbell(now, kind),
            Letter::Reservation { ticket, command, mut bytes } => {
                let end = self.controller.reservation(now, &command, &mut bytes);
                self.ring();
                return Some(Decision { ticket, end, bytes });
            }
            Letter::Trouble(what) => self.trouble = Some(what),
            Letter::Broken(fault) => {
                self.trouble = Some(format!("a ring at {:#x} is not there any more", fault.iova));
            }
        }
        None
    }

    /// The answer to [`Order::Abort`].
    pub fn aborted(&mut self, now: Instant, admin_cid: u16, is_aborted: bool) {
        self.controller.abort_ended();
        self.ended(now, admin_cid, AdminEnd::with(u32::from(!is_aborted)));
        self.ring();
    }

    /// Adds what a queue has done since it last told.
    pub fn add_traffic(&mut self, traffic: &Traffic) {
        self.controller.add_traffic(traffic);
    }

    /// A queue is gone, and nothing that it had begun is under way.
    pub fn queue_gone(&mut self, now: Instant, qid: u16) {
        if let Some(link) = self.links.remove(&qid) {
            for order in link.take_orders() {
                if let Order::Abort { admin_cid, .. } = order {
                    self.aborted(now, admin_cid, false);
                }
            }
        }
        self.turn_life(now);
        self.ring();
    }
}

/// Why there is no such I/O queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoQueue {
    /// The controller is not enabled, or not for I/O.
    NotEnabled,
    /// The identifier is none of those that were granted.
    Identifier {
        /// Which.
        qid: u16,
        /// The highest.
        granted: u16,
    },
    /// There is one already.
    Exists {
        /// Which.
        qid: u16,
    },
    /// Its rings lie nowhere.
    Memory,
}

impl FabricsFrontEnd {
    /// The host has been heard of, perhaps a while ago.
    fn hear(&mut self, at: Instant) {
        if at > self.heard_at {
            self.heard_at = at;
            self.controller.io_command_seen(at);
        }
    }

    fn status(&self) -> ControllerStatus {
        let shutdown = self.shutdown.as_ref().map_or(ShutdownStatus::None, Shutdown::status);
        let is_lost = self.shutdown.as_ref().is_some_and(Shutdown::has_failed);
        ControllerStatus(0).with(|status| {
            status
                .rdy(matches!(self.life, Life::Enabled | Life::Stopping))
                .cfs(self.life == Life::Failed || is_lost)
                .shst(shutdown)
        })
    }

    /// Goes from one state of life to the next as far as CC and the queues let it
    /// (Base 2.1 §3.5.2, §3.6.2, §3.7.2).
    fn turn_life(&mut self, now: Instant) -> bool {
        let before = (self.life, self.status().0);
        match (self.life, self.configuration.en()) {
            (Life::Enabled | Life::Failed, false) => self.stop(now),
            (Life::Disabled, true) => self.start(),
            _ => {}
        }
        if self.life == Life::Stopping && self.links.is_empty() {
            self.life = Life::Disabled;
            if self.configuration.en() {
                self.start();
            }
        }
        self.turn_shutdown(now);
        (self.life, self.status().0) != before
    }

    fn start(&mut self) {
        self.shutdown = None;
        let cc = &self.configuration;
        let known_sets =
            [CommandSetSelected::Nvm, CommandSetSelected::All, CommandSetSelected::AdminOnly];
        let is_sound = known_sets.contains(&cc.css()) && cc.ams() == Arbitration::RoundRobin;
        if is_sound {
            self.life = Life::Enabled;
            self.enable_by = Instant::NEVER;
            self.configure();
        } else {
            self.trouble = Some(format!(
                "enable: CC is {:#x}, expected command set 0, 6 or 7 and round robin",
                cc.0
            ));
            self.life = Life::Failed;
        }
    }

    /// CC.EN went to 0: a controller level reset. What the admin queue still owes is given back
    /// unanswered in substance, so that its host may enable the controller once more.
    fn stop(&mut self, now: Instant) {
        self.order(Order::Stop);
        self.controller.reset(now);
        self.parked.clear();
        for waiting in core::mem::take(&mut self.waiting) {
            let end = AdminEnd::refused(Status::ABORTED_SQ_DELETION);
            self.ends.push_back(AdminDone { cid: waiting.command.cid(), end });
        }
        self.enable_by = now.after(ENABLE_MAX);
        self.life = Life::Stopping;
    }

    fn turn_shutdown(&mut self, now: Instant) {
        let notice = self.configuration.shn();
        Shutdown::heed(&mut self.shutdown, now, notice, &mut self.controller);
    }

    /// Tries to abort a command of any queue (Base 2.1 §5.1.1).
    fn abort(
        &mut self,
        (command, host_cid): (&Command, u16),
        sqid: u16,
        cid: u16,
    ) -> Option<AdminEnd> {
        if sqid != 0 {
            if let Some(link) = self.links.get(&sqid) {
                link.order(Order::Abort { cid, admin_cid: command.cid() });
                self.waiting.push(Waiting { command: *command, host_cid });
                return None;
            }
            self.controller.abort_ended();
            return Some(AdminEnd::with(1));
        }
        self.controller.abort_ended();
        let at = self.parked.iter().position(|parked| *parked == cid);
        if let Some(at) = at {
            self.parked.remove(at);
            self.controller.event_request_aborted();
            self.waiting.retain(|waiting| waiting.command.cid() != cid);
            let end = AdminEnd::refused(Status::ABORT_REQUESTED);
            self.ends.push_back(AdminDone { cid, end });
        }
        Some(AdminEnd::with(u32::from(at.is_none())))
    }

    /// Ends a command that was waiting. True if there is one.
    fn ended(&mut self, now: Instant, cid: u16, end: AdminEnd) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.command.cid() == cid) else {
            return false;
        };
        let Waiting { command, host_cid } = self.waiting.swap_remove(at);
        if !end.status.is_success() {
            self.controller.report_error(now, &report(&command, host_cid, end));
        }
        self.ends.push_back(AdminDone { cid, end });
        true
    }

    fn told(
        &mut self,
        now: Instant,
        (command, host_cid): (&Command, u16),
        end: AdminEnd,
    ) -> AdminEnd {
        if !end.status.is_success() {
            self.controller.report_error(now, &report(command, host_cid, end));
        }
        end
    }

    fn order(&self, order: Order) {
        self.links.values().for_each(|link| link.order(order));
    }

    /// Takes over what the host has set by features.
    fn configure(&self) {
        self.siblings.set_write_through(!self.controller.write_cache_enabled());
    }

    fn burst(&self) -> u32 {
        self.controller.arbitration().burst.map_or(BURST, u32::from).min(BURST)
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell();
        }
    }
}

/// The value of a property of a controller behind connections, whose queues have at most
/// `entries_max` entries and whose CC and CSTS are these (Base 2.1 §6.5).
///
/// # Errors
///
/// If there is no such property, or it has another length.
pub fn property(
    entries_max: u32,
    (cc, csts): (Configuration, ControllerStatus),
    at: u32,
    len_bytes: u32,
) -> Result<u64, Status> {
    let capabilities = Capabilities(0).with(|cap| {
        cap.mqes(u16::try_from(entries_max - 1).unwrap_or(u16::MAX))
            .cqr(true)
            .to(READY_UNITS)
            .css_nvm(true)
            .css_io(true)
            .mpsmax(4)
            .crwms(true)
    });
    match (at as usize, len_bytes) {
        (offset::CAP, 8) => Ok(capabilities.0),
        (offset::VS, 4) => Ok(VERSION_2_1.0.into()),
        (offset::CC, 4) => Ok(cc.0.into()),
        (offset::CSTS, 4) => Ok(csts.0.into()),
        (offset::CRTO, 4) => {
            Ok(ReadyTimeouts(0).with(|ready| ready.crwmt(READY_UNITS.into())).0.into())
        }
        _ => Err(REFUSED),
    }
}

/// Commands taken from a submission queue in a turn, unless the host wants fewer.
const BURST: u32 = 64;

fn report(command: &Command, host_cid: u16, end: AdminEnd) -> ErrorReport {
    ErrorReport {
        sqid: 0,
        cid: host_cid,
        opcode: command.opcode(),
        status: end.status,
        lba: 0,
        nsid: command.nsid(),
    }
}

impl core::fmt::Debug for FabricsFrontEnd {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("FabricsFrontEnd")
            .field("cntlid", &self.controller.configuration().cntlid)
            .field("life", &self.life)
            .field("queues", &self.links.keys())
            .field("over", &self.over)
            .finish_non_exhaustive()
    }
}
