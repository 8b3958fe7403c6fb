//! Fabrics transport: a controller behind connections, with properties, admin commands and associations
//! (Base 2.1 §3.3, §6).
//!
//! ```text
//!   admin connection ── property · data · execute ──▶ FabricsTransport ── Controller
//!          ▲ next_end                                     │    ▲
//!          └──────────────────────────────────────────────┘    │ events, command results, traffic
//!                                           commands │         │
//!   I/O connection ◀── QueueLink ────────────────────┘         │
//!          └── Executor, owned by its connection ──────────────┘
//! ```
//!
//! This module has no rings and no host memory: the owner of the admin connection submits commands with
//! their data and fetches their results. A command is identified by the identifier it is submitted with,
//! which must be unique among the commands in progress.
//!
//! No I/O passes through this module. Several threads may use the transport, so its owner keeps it behind
//! a lock. The transport controls a queue by a [`QueueCommand`] in its [`QueueLink`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{Instant, Span};
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::register::Configuration;
use tenmil_wire::{AdminOpcode, Command, Status};

use crate::controller::transport_interface::{
    AdminDataTransfer, AdminOutcome, AdminResult, ErrorReport, ReservationCompletion,
    TransportAction,
};
use crate::controller::{Controller, WakeFn};
use crate::io_stats::{IoStatsSource, IoStatsTable};
use crate::namespace::{NamespaceSnapshot, VersionedValueReader};
use crate::transport::shutdown_flush::ShutdownFlush;

mod queue_link;
mod queues;
mod state;

pub use queue_link::{QueueCommand, QueueLink};
pub use queues::{CreateQueueError, FabricsQueueParams, ReservationReply};
use state::FabricsState;
pub use state::property_value;

/// Fabrics transport of one controller: one association.
pub struct FabricsTransport {
    controller: Controller,
    /// The volatile write cache is disabled; shared with the queues.
    is_write_through: Arc<AtomicBool>,
    /// Namespaces that were announced to the I/O queues.
    namespaces: VersionedValueReader<NamespaceSnapshot>,
    /// I/O queues by identifier.
    links: BTreeMap<u16, Arc<QueueLink>>,
    state: FabricsState,
    configuration: Configuration,
    shutdown: Option<ShutdownFlush>,
    /// Outstanding Asynchronous Event Requests, oldest first.
    event_requests: VecDeque<u16>,
    /// Commands that complete later, including Asynchronous Event Requests.
    waiting: Vec<DeferredCommand>,
    completed: VecDeque<(u16, DeferredResult)>,
    /// Requested resets of other controllers, not yet fetched, with the identifier of the command.
    resets: VecDeque<(u16, CrossControllerReset)>,
    /// Deadline for the host to enable the controller.
    enable_by: Instant,
    /// Time of the host's last activity.
    last_activity: Instant,
    waker: Option<WakeFn>,
    association_end_reason: Option<AssociationEndReason>,
    last_error: Option<String>,
    /// Where the commands of the I/O queues are counted.
    io_stats: IoStatsSource,
}

/// Command that completes later.
struct DeferredCommand {
    /// Command, with the identifier it was submitted with.
    command: Command,
    /// Command identifier used by the host.
    host_cid: u16,
}

/// Result of a deferred command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeferredResult {
    /// The command completes with this result.
    Completed(AdminResult),
    /// The command was dropped by a controller reset that its host has requested: it gets no completion
    /// (Base 2.1 §3.7.2). Hosts forget their outstanding commands before they request the reset, and some
    /// treat a late completion as a connection error.
    Dropped,
}

/// Reason why an association has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AssociationEndReason {
    /// The admin connection was lost.
    ConnectionLost,
    /// The host was silent for its keep-alive timeout (Base 2.1 §3.9).
    KeepAliveExpired,
    /// The subsystem is no longer exported.
    SubsystemRemoved,
    /// A key that the host has used was removed, or more is required of it than it has proved.
    CredentialsRevoked,
    /// The host did not enable the controller in time after Connect (Base 2.1 §3.5.2).
    EnableTimeout,
    /// The host has had the controller reset through another controller (Base 2.3 §5.4.3).
    Reset,
}

/// Time limit for the host to enable the controller (Base 2.1 §3.5.2).
const ENABLE_MAX: Span = Span::from_secs(120);
/// Poll interval during a shutdown or reset.
const TRANSITION_POLL: Span = Span::from_us(100);

const REFUSED: Status = Status::INVALID_FIELD.with_dnr();

impl FabricsTransport {
    /// Creates the transport of a new association; its controller is disabled.
    pub fn new(controller: Controller, now: Instant) -> Self {
        let transport = Self {
            is_write_through: Arc::default(),
            namespaces: controller.namespaces().reader(),
            controller,
            links: BTreeMap::new(),
            state: FabricsState::Disabled,
            configuration: Configuration(0),
            shutdown: None,
            event_requests: VecDeque::new(),
            waiting: Vec::new(),
            completed: VecDeque::new(),
            resets: VecDeque::new(),
            enable_by: now.after(ENABLE_MAX),
            last_activity: now,
            waker: None,
            association_end_reason: None,
            last_error: None,
            io_stats: Arc::<IoStatsTable>::default().source("", 0),
        };
        transport.apply_feature_values();
        transport
    }

    /// Admin controller.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// Sets where the commands of the I/O queues created from now on are counted.
    pub fn set_io_stats(&mut self, io_stats: IoStatsSource) {
        self.io_stats = io_stats;
    }

    /// Removes and returns the last error that no NVMe status reports, as one line.
    pub fn take_error(&mut self) -> Option<String> {
        self.last_error.take()
    }

    /// Sets the callback invoked when another thread has produced work for the admin connection.
    pub fn set_waker(&mut self, waker: WakeFn) {
        self.controller.set_waker(waker.clone());
        self.waker = Some(waker);
    }

    /// Whether commands other than fabrics commands are accepted.
    pub fn is_enabled(&self) -> bool {
        self.state == FabricsState::Enabled
    }

    /// Data length and direction of an admin command, or the status that rejects it.
    pub fn command_data_length(&self, command: &Command) -> Result<AdminDataTransfer, Status> {
        if !self.is_enabled() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        self.controller.command_data_length(command)
    }

    /// Keep-alive timeout; zero disables it.
    pub fn keep_alive_timeout(&self) -> Span {
        Span::from_ms(self.controller.keep_alive_ms().into())
    }

    /// Executes an admin command. Returns its result if it completes at once, with the data for the host
    /// in `bytes`. Otherwise the result follows through [`next_deferred_result`](Self::next_deferred_result). `host_cid` is the
    /// host's command identifier, used in the error log.
    pub fn execute_admin(
        &mut self,
        now: Instant,
        command: &Command,
        host_cid: u16,
        bytes: &mut Vec<u8>,
    ) -> Option<AdminResult> {
        if !self.is_enabled() {
            return Some(AdminResult::failure(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
        }
        self.last_activity = now;
        // The health log includes all I/O so far.
        if command.opcode() == AdminOpcode::GetLogPage.code() {
            self.controller.set_io_totals(&self.io_stats.totals());
        }
        let step = self.controller.execute(now, command, bytes);
        if command.opcode() == AdminOpcode::SetFeatures.code() {
            self.apply_feature_values();
        }
        match step {
            AdminOutcome::Done(end) => {
                return Some(self.record_result(now, (command, host_cid), end));
            }
            AdminOutcome::Abort { sqid, cid } => {
                return self.try_abort((command, host_cid), sqid, cid);
            }
            AdminOutcome::AsyncEvent => self.event_requests.push_back(command.cid()),
            AdminOutcome::Reset(reset) => self.resets.push_back((command.cid(), reset)),
            AdminOutcome::Deferred => {}
            // Over fabrics, queues are created by Connect; the controller rejects these commands earlier.
            AdminOutcome::CreateCompletionQueue(_)
            | AdminOutcome::CreateSubmissionQueue(_)
            | AdminOutcome::DeleteSubmissionQueue { .. }
            | AdminOutcome::DeleteCompletionQueue { .. }
            | AdminOutcome::DoorbellBuffers { .. } => {
                return Some(AdminResult::failure(Status::INVALID_OPCODE.with_dnr()));
            }
        }
        self.waiting.push(DeferredCommand { command: *command, host_cid });
        None
    }

    /// Records in the error log an admin command that was rejected before it reached the controller;
    /// `command` has the host's identifier.
    pub fn record_rejection(&mut self, now: Instant, command: &Command, status: Status) {
        let end = AdminResult::failure(status);
        self.controller.record_error_completion(now, &error_report(command, command.cid(), end));
    }

    /// Next result of a command that [`execute_admin`](Self::execute_admin) has deferred.
    pub fn next_deferred_result(&mut self) -> Option<(u16, DeferredResult)> {
        self.completed.pop_front()
    }

    /// Next requested reset of another controller, with the identifier of its command. The caller
    /// performs it and reports its result through [`complete_cross_controller_reset`](Self::complete_cross_controller_reset).
    pub fn next_cross_controller_reset(&mut self) -> Option<(u16, CrossControllerReset)> {
        self.resets.pop_front()
    }

    /// Completes the command of a cross-controller reset.
    pub fn complete_cross_controller_reset(&mut self, now: Instant, cid: u16, end: AdminResult) {
        self.complete_deferred(now, cid, end);
    }

    /// Runs the periodic work: timers, long commands, events and queues that terminate. Returns whether
    /// any work was done.
    pub fn poll(&mut self, now: Instant) -> bool {
        if let Some(at) = self.links.values().map(|link| link.last_activity()).max() {
            self.record_activity(at);
        }
        self.controller.poll(now);
        let mut is_busy = self.advance_state(now);
        while let Some(signal) = self.controller.next_transport_action() {
            is_busy |= signal != TransportAction::CheckPreempted;
            match signal {
                TransportAction::KeepAliveExpired => {
                    self.end_association(AssociationEndReason::KeepAliveExpired)
                }
                TransportAction::AbortNamespace { nsid, preempted } => {
                    self.send_to_all_queues(&QueueCommand::AbortNamespace { nsid, preempted });
                }
                TransportAction::CheckPreempted => self.send_to_all_queues(&QueueCommand::Poll),
                TransportAction::PersistFailed { why } => self.last_error = Some(why),
            }
        }
        while let Some(ReservationCompletion { from, end }) =
            self.controller.next_reservation_completion()
        {
            is_busy = true;
            if let Some(link) = self.links.get(&from.queue) {
                link.send_command(QueueCommand::CompleteReservation { ticket: from.ticket, end });
            }
        }
        if self.namespaces.refresh() {
            // An idle queue has the devices of removed namespaces open until it is polled.
            self.send_to_all_queues(&QueueCommand::Poll);
        }
        if now >= self.enable_by {
            self.enable_by = Instant::NEVER;
            self.end_association(AssociationEndReason::EnableTimeout);
        }
        while let Some(done) = self.controller.next_deferred_completion() {
            is_busy |= self.complete_deferred(now, done.cid, done.end);
        }
        // Asynchronous Event Requests complete in the order of their submission.
        while !self.event_requests.is_empty()
            && let Some(result) = self.controller.next_async_event_dword0()
            && let Some(cid) = self.event_requests.pop_front()
        {
            is_busy |= self.complete_deferred(now, cid, AdminResult::success_with(result));
        }
        is_busy
    }

    /// Latest time of the next [`poll`](Self::poll), even without activity.
    pub fn wake_at(&self, now: Instant) -> Instant {
        let is_flushing = self.shutdown.as_ref().is_some_and(ShutdownFlush::is_running);
        let motion = if is_flushing { now.after(TRANSITION_POLL) } else { Instant::NEVER };
        self.controller.wake_at(now).min(self.enable_by).min(motion)
    }

    /// Ends the association: every I/O queue is instructed to stop. The first reason is kept.
    pub fn end_association(&mut self, why: AssociationEndReason) {
        if self.association_end_reason.is_none() {
            self.association_end_reason = Some(why);
            self.send_to_all_queues(&QueueCommand::Stop);
            self.wake_owner();
        }
    }

    /// Has every I/O queue polled once, to apply what has changed for it.
    pub fn poll_queues(&self) {
        self.send_to_all_queues(&QueueCommand::Poll);
    }

    /// Reason why the association has ended, if it has.
    pub fn end_reason(&self) -> Option<AssociationEndReason> {
        self.association_end_reason
    }

    /// Whether every I/O queue has stopped: none starts a command anymore.
    pub fn have_queues_stopped(&self) -> bool {
        self.links.values().all(|link| link.is_ending())
    }

    /// Whether no I/O queue is left.
    pub fn has_no_io_queues(&self) -> bool {
        self.links.is_empty()
    }
}

impl FabricsTransport {
    /// Records host activity, which may lie in the past.
    fn record_activity(&mut self, at: Instant) {
        if at > self.last_activity {
            self.last_activity = at;
            self.controller.note_io_activity(at);
        }
    }

    /// Tries to abort a command of any queue (Base 2.1 §5.1.1).
    fn try_abort(
        &mut self,
        (command, host_cid): (&Command, u16),
        sqid: u16,
        cid: u16,
    ) -> Option<AdminResult> {
        // An I/O command is aborted by its connection's thread; the result arrives through `aborted`.
        if sqid != 0 {
            if let Some(link) = self.links.get(&sqid) {
                link.send_command(QueueCommand::Abort { cid, admin_cid: command.cid() });
                self.waiting.push(DeferredCommand { command: *command, host_cid });
                return None;
            }
            self.controller.note_abort_completed();
            return Some(AdminResult::success_with(1));
        }
        self.controller.note_abort_completed();
        let at = self.event_requests.iter().position(|request| *request == cid);
        if let Some(at) = at {
            self.event_requests.remove(at);
            self.controller.note_event_request_aborted();
            self.waiting.retain(|waiting| waiting.command.cid() != cid);
            let end = AdminResult::failure(Status::ABORT_REQUESTED);
            self.completed.push_back((cid, DeferredResult::Completed(end)));
        }
        Some(AdminResult::success_with(u32::from(at.is_none())))
    }

    /// Completes a deferred command. Returns false if it is unknown.
    fn complete_deferred(&mut self, now: Instant, cid: u16, end: AdminResult) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.command.cid() == cid) else {
            return false;
        };
        let DeferredCommand { command, host_cid } = self.waiting.swap_remove(at);
        if !end.status.is_success() {
            self.controller.record_error_completion(now, &error_report(&command, host_cid, end));
        }
        self.completed.push_back((cid, DeferredResult::Completed(end)));
        true
    }

    fn record_result(
        &mut self,
        now: Instant,
        (command, host_cid): (&Command, u16),
        end: AdminResult,
    ) -> AdminResult {
        if !end.status.is_success() {
            self.controller.record_error_completion(now, &error_report(command, host_cid, end));
        }
        end
    }

    fn send_to_all_queues(&self, command: &QueueCommand) {
        self.links.values().for_each(|link| link.send_command(command.clone()));
    }

    /// Applies the feature values that the host has set.
    fn apply_feature_values(&self) {
        let is_write_through = !self.controller.write_cache_enabled();
        self.is_write_through.store(is_write_through, Ordering::Relaxed);
    }

    /// Invokes the callback of the admin connection.
    pub fn wake_owner(&self) {
        if let Some(waker) = &self.waker {
            waker();
        }
    }
}

fn error_report(command: &Command, host_cid: u16, end: AdminResult) -> ErrorReport {
    ErrorReport {
        sqid: 0,
        cid: host_cid,
        opcode: command.opcode(),
        status: end.status,
        lba: 0,
        nsid: command.nsid(),
    }
}

impl core::fmt::Debug for FabricsTransport {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("FabricsTransport")
            .field("cntlid", &self.controller.configuration().cntlid)
            .field("state", &self.state)
            .field("queues", &self.links.keys())
            .field("end_reason", &self.association_end_reason)
            .finish_non_exhaustive()
    }
}
