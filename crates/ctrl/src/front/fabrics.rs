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
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Instant, Span};
use wire::admin::CrossControllerReset;
use wire::register::Configuration;
use wire::{AdminOpcode, Command, Status};

use crate::controller::contract::{AdminData, AdminEnd, AdminStep, Decided, ErrorReport, Signal};
use crate::controller::{Bell, Controller};
use crate::doorbell::DoorbellPage;
use crate::front::shutdown::Shutdown;

mod life;
mod link;
mod queues;

use life::Life;
pub use life::property;
pub use link::{Order, QueueLink};
pub use queues::{Decision, FabricsQueue, NoQueue};

/// A controller behind connections: one association.
pub struct FabricsFrontEnd {
    controller: Controller,
    /// The volatile write cache is switched off: queues look at it.
    is_write_through: Arc<AtomicBool>,
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
    ends: VecDeque<(u16, Ended)>,
    /// Resets of other controllers that were asked for and not yet taken, with what asked for them.
    resets: VecDeque<(u16, CrossControllerReset)>,
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

/// How a command has ended that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It is answered.
    Answered(AdminEnd),
    /// By a reset of the controller, which its host has asked for: it is not answered
    /// (Base 2.1 §3.7.2). Hosts forget what they have sent before they ask, and some take an answer
    /// to it for a fault of the connection.
    Forgotten,
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
    /// Its host has had it reset by another controller (Base 2.3 §5.4.3).
    Reset,
}

/// How long a host may take to enable the controller (Base 2.1 §3.5.2).
const ENABLE_MAX: Span = Span::from_secs(120);
/// How often a shutdown under way, or a reset, is looked after.
const MOTION: Span = Span::from_us(100);

const REFUSED: Status = Status::INVALID_FIELD.with_dnr();

impl FabricsFrontEnd {
    /// An association that has just begun; its controller is disabled.
    pub fn new(controller: Controller, now: Instant) -> Self {
        let queues = controller.configuration().io_queues_max;
        let front = Self {
            is_write_through: Arc::default(),
            doorbells: DoorbellPage::new(queues),
            controller,
            links: BTreeMap::new(),
            life: Life::Disabled,
            configuration: Configuration(0),
            shutdown: None,
            parked: VecDeque::new(),
            waiting: Vec::new(),
            ends: VecDeque::new(),
            resets: VecDeque::new(),
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

    /// How long its host may be silent; zero is for ever.
    pub fn keep_alive(&self) -> Span {
        Span::from_ms(self.controller.keep_alive_ms().into())
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
            AdminStep::Reset(reset) => self.resets.push_back((command.cid(), reset)),
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

    /// The next command that has ended after [`execute`](Self::execute) had not ended it, and how.
    pub fn next_end(&mut self) -> Option<(u16, Ended)> {
        self.ends.pop_front()
    }

    /// A reset of another controller that the host has asked for, with the identifier of its command:
    /// whoever takes it [ends](Self::end_reset) the command.
    pub fn next_reset(&mut self) -> Option<(u16, CrossControllerReset)> {
        self.resets.pop_front()
    }

    /// A reset of another controller has ended so.
    pub fn end_reset(&mut self, now: Instant, cid: u16, end: AdminEnd) {
        self.ended(now, cid, end);
    }

    /// Looks after timers, long commands, events and queues that end. True if anything was done.
    pub fn turn(&mut self, now: Instant) -> bool {
        if let Some(at) = self.links.values().map(|link| link.heard_at()).max() {
            self.hear(at);
        }
        self.controller.turn(now);
        let mut is_busy = self.turn_life(now);
        while let Some(signal) = self.controller.next_signal() {
            is_busy |= signal != Signal::CheckPreempted;
            match signal {
                Signal::KeepAliveExpired => self.end(Over::KeepAliveExpired),
                Signal::AbortNamespace { nsid, preempted } => {
                    self.order(&Order::AbortNamespace { nsid, preempted });
                }
                Signal::CheckPreempted => self.order(&Order::Turn),
                Signal::NotKept { why } => self.trouble = Some(why),
            }
        }
        while let Some(Decided { from, end }) = self.controller.next_decided() {
            is_busy = true;
            if let Some(link) = self.links.get(&from.queue) {
                link.order(Order::Decide { ticket: from.ticket, end });
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
            self.order(&Order::Stop);
            self.ring();
        }
    }

    /// Why the association has ended, once it has.
    pub fn over(&self) -> Option<Over> {
        self.over
    }

    /// Whether every I/O queue has stopped: none begins anything any more.
    pub fn has_stopped(&self) -> bool {
        self.links.values().all(|link| link.is_ending())
    }

    /// Whether no I/O queue is left.
    pub fn is_drained(&self) -> bool {
        self.links.is_empty()
    }

    /// Where queues are rung.
    pub fn doorbells(&self) -> &Arc<DoorbellPage> {
        &self.doorbells
    }
}

impl FabricsFrontEnd {
    /// The host has been heard of, perhaps a while ago.
    fn hear(&mut self, at: Instant) {
        if at > self.heard_at {
            self.heard_at = at;
            self.controller.io_command_seen(at);
        }
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
            self.ends.push_back((cid, Ended::Answered(end)));
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
        self.ends.push_back((cid, Ended::Answered(end)));
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

    fn order(&self, order: &Order) {
        self.links.values().for_each(|link| link.order(order.clone()));
    }

    /// Takes over what the host has set by features.
    fn configure(&self) {
        let is_write_through = !self.controller.write_cache_enabled();
        self.is_write_through.store(is_write_through, Ordering::Relaxed);
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell();
        }
    }
}

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
