//! I/O queue of a connection: commands into an executor, and its completions back.
//!
//! ```text
//!   CommandTable ─ ready ─▶ tenmil_nvme_controller::Executor ─▶ device
//!     ▲                        │            │  data in place: in the buffer
//!     └─ complete ◀────────────┴────────────┘
//! ```
//!
//! A command is ready when all its data are present. It begins under its tag in the next iteration, in one
//! batch with the other ready commands. A command that cannot begin yet stays in the list, and so do those
//! after it; also what is beyond the fair share of the host ([`fair_shares`](super::fair_shares)).

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_nvme_controller::executor::{CommandDataLocation, CommandTag, Executor, SegmentMemory};
use tenmil_nvme_controller::queue::QueueEvent;
use tenmil_nvme_controller::transport::fabrics::{
    CreateQueueError, FabricsQueueParams, QueueCommand, QueueLink,
};
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_reactor::MeanLatency;
use tenmil_wire::{AdminOpcode, Completion, Status};

use super::association::Association;
use super::command_table::{CommandTable, LimitWait, SlowIoTracker};
use super::connection_handle::ConnectionHandle;
use super::fair_shares::QueueShare;
use super::service::Service;
use crate::slow_io::{SlowIoLog, SlowIoSource};

/// I/O queue on the target's end of a connection.
#[derive(Debug)]
pub(super) struct IoQueue {
    executor: Executor<SegmentMemory>,
    link: Arc<QueueLink>,
    association: Arc<Association>,
    qid: u16,
    /// Address of the host.
    peer: String,
    slow_io_log: SlowIoLog,
    /// Tags of commands that have all their data and have not begun, oldest first.
    ready: Vec<u16>,
    share: QueueShare,
    latency: MeanLatency,
    /// Whether outstanding writes of the devices are fenced when the queue stops.
    is_fenced: bool,
    stop_timer: DrainAfterStopTimer,
    /// Whether a channel may have been replaced since an iteration without work, which closes it: an idle
    /// queue would keep its device open.
    may_have_retired_channels: bool,
}

/// Tracks how long the devices take to drain after the queue was stopped.
#[derive(Debug)]
struct DrainAfterStopTimer {
    since: Instant,
    /// When the delay is reported.
    report_at: Instant,
    quiesce: Span,
    is_reported: bool,
}

/// Number of commands that may be split into several requests at the same time.
const SPLIT_COMMANDS_MAX: u16 = 4;
/// The only stream of the executor.
const STREAM: u16 = 0;

impl IoQueue {
    /// Creates the queue that a host connects, with at most `depth` outstanding commands.
    pub(super) fn new(
        (service, handle): (&Service, &Arc<ConnectionHandle>),
        association: Arc<Association>,
        peer: &str,
        (qid, depth): (u16, u16),
        commands: &CommandTable,
        now: Instant,
    ) -> Result<Self, CreateQueueError> {
        let limits = service.limits();
        let new = FabricsQueueParams {
            qid,
            in_flight_max: depth,
            contexts_max: SPLIT_COMMANDS_MAX.min(depth),
        };
        let memory = SegmentMemory::new(
            Arc::new(commands.buffer_pool().regions().clone()),
            commands.buffer_pool().pool_segment(),
        );
        let buffers = service.bounce_pool().clone();
        let (executor, link) = association.lock_transport().create_queue(memory, &new, buffers)?;
        let share = service.fair_shares().join(&association.host.nqn, handle);
        Ok(Self {
            executor,
            link,
            share,
            association,
            qid,
            peer: peer.to_owned(),
            slow_io_log: service.slow_io_log().clone(),
            ready: Vec::new(),
            latency: MeanLatency::default(),
            is_fenced: !limits.injected_bugs.unfenced_writes,
            stop_timer: DrainAfterStopTimer {
                since: now,
                report_at: Instant::NEVER,
                quiesce: limits.quiesce,
                is_reported: false,
            },
            may_have_retired_channels: false,
        })
    }

    /// Allows large reads to be sent from the memory of the medium: only if the connection has no data
    /// digest, which must match the data even if they are written meanwhile.
    pub(super) fn allow_in_place_reads(&mut self) {
        self.executor.allow_in_place_reads();
    }

    /// Fetches the thresholds for slow commands.
    pub(super) fn fetch_slow_io(&self, commands: &mut CommandTable) {
        let association = &self.association;
        let host = association.host.display_name().to_owned();
        let source = SlowIoSource {
            protocol: "nvme-tcp",
            export: association.export().nqn().to_owned(),
            host: Some(host),
            peer: self.peer.clone(),
            queue: Some((association.cntlid, self.qid)),
        };
        let (thresholds, count) = association.export().slow_io();
        commands.set_slow_io(SlowIoTracker::new(
            thresholds,
            source,
            self.slow_io_log.clone(),
            count,
        ));
    }

    /// Fetches the rate limits, if they have changed.
    pub(super) fn fetch_limiters(&self, commands: &mut CommandTable) {
        let host = &self.association.host.nqn;
        let generation = commands.limiter_generation();
        if let Some(limiters) = self.association.export().newer_limiters(generation, host) {
            commands.set_limiters(&limiters);
        }
    }

    /// Records that the host is active though rate limits hold its commands, and counts those that were
    /// released.
    #[cold]
    pub(super) fn record_limit_waits(&mut self, now: Instant, waits: &[LimitWait]) {
        self.link.note_activity(now);
        for LimitWait { nsid, count, time } in waits {
            self.executor.count_limit_wait(*nsid, *count, *time);
        }
    }

    /// Bytes of blocks of a namespace; 0 if it has gone.
    #[cold]
    pub(super) fn bytes_of_blocks(&self, nsid: u32, blocks: u64) -> u64 {
        self.executor.block_size(nsid).map_or(0, |size| blocks.saturating_mul(size.into()))
    }

    /// Records the time of an iteration without new commands or completions.
    #[inline]
    pub(super) fn record_idle_iteration(&mut self, now: Instant) {
        self.latency.account_in_flight(now, self.outstanding_commands());
    }

    /// Adds a command that has all its data to those that begin in the next [`poll_once`](Self::poll_once).
    #[inline(always)]
    pub(super) fn queue_ready_command(&mut self, commands: &CommandTable, tag: u16) -> StartResult {
        if commands.command_of_tag(tag).opcode() == AdminOpcode::FabricsCommands.code() {
            return StartResult::Fabrics;
        }
        self.ready.push(tag);
        StartResult::Yes
    }

    /// Does a bounded amount of work; returns the amount done.
    #[inline]
    pub(super) fn poll_once(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        // Requests of the association complete commands, too.
        let has_commands = self.link.has_commands();
        if has_commands {
            self.execute_association_requests(now, commands, end);
        }
        if self.is_idle()
            && !has_commands
            && !self.is_stopping()
            && !self.executor.wants_iteration()
            && !self.may_have_retired_channels
        {
            return 0;
        }
        self.executor.begin_iteration(now);
        if self.executor.has_commands_in_contexts() {
            self.executor.retry_waiting(now);
        }
        let mut count = self.start_ready_commands(now, commands);
        if count > 0 {
            self.link.note_activity(now);
        }
        if self.executor.in_flight_count() > 0 {
            self.executor.submit_all_channels(now);
            count += self.poll_devices(now, commands, end);
        }
        if self.executor.has_events() {
            count += 1;
            self.forward_events(now);
        }
        if self.executor.has_finished_commands() {
            count += self.complete_finished(now, commands, end);
        }
        if count == 0 {
            self.executor.close_retired_channels();
            self.may_have_retired_channels &= !self.is_idle();
        } else {
            let executing = self.executor.executing_count();
            self.share.set_commands(self.outstanding_commands(), executing);
        }
        count
    }

    /// Begins commands in the order in which they became ready, as far as they can begin now. Returns their
    /// number.
    #[inline]
    fn start_ready_commands(&mut self, now: Instant, commands: &mut CommandTable) -> usize {
        if self.executor.is_exclusivity_held() {
            self.executor.bar_exclusive_namespace();
            let count = self.start_unblocked_commands(now, commands);
            self.executor.unbar_and_acknowledge_exclusivity();
            return count;
        }
        if self.ready.is_empty() { 0 } else { self.start_unblocked_commands(now, commands) }
    }

    fn start_unblocked_commands(&mut self, now: Instant, commands: &mut CommandTable) -> usize {
        self.executor.begin_batch();
        let executing = self.executor.executing_count();
        let startable = self.share.startable(now, executing, self.ready.len());
        let mut count = 0;
        while count < startable && !self.executor.has_started_fused_pair() {
            if self.executor.can_begin_run() {
                let ready = self.ready[count..startable].iter();
                let ready = ready.map(|tag| commands.command_with_segment(*tag));
                count += self.executor.begin_segment_commands(STREAM, ready);
            }
            let Some(&tag) = self.ready[..startable].get(count) else { break };
            let (id, command, segment) = commands.command_with_segment(tag);
            let (tag, data) =
                (CommandTag { stream: STREAM, id }, CommandDataLocation::Segment(segment));
            if !self.executor.begin_command(now, tag, *command, data) {
                break;
            }
            count += 1;
        }
        if commands.tracks_slow_io() {
            commands.record_submitted(now, &self.ready, count);
        }
        self.share.add_started(count);
        if count == self.ready.len() {
            self.ready.clear();
        } else {
            self.ready.drain(..count);
        }
        count
    }

    /// Completes the commands that the devices have completed. Returns their number.
    #[inline]
    fn poll_devices(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        if commands.tracks_slow_io() {
            return self.poll_devices_with_times(now, commands, end);
        }
        let mut count = 0;
        self.executor.poll_fast_path(now, |tag| {
            count += 1;
            commands.complete_executed(end, tag, Status::SUCCESS, 0);
        });
        if count > 0 {
            self.latency.record_completions(count);
        }
        count
    }

    /// [`poll_devices`](Self::poll_devices) while there is a threshold for slow commands.
    #[inline(never)]
    fn poll_devices_with_times(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        let mut count = 0;
        self.executor.poll_fast_path(now, |tag| {
            count += 1;
            commands.record_device_completion(now, tag, Status::SUCCESS);
            commands.complete_executed(end, tag, Status::SUCCESS, 0);
        });
        if count > 0 {
            self.latency.record_completions(count);
        }
        count
    }

    /// Completes the commands that have finished otherwise: also reads with their data in the medium's
    /// memory. Returns their number.
    #[cold]
    fn complete_finished(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        let mut finished = self.executor.take_finished_commands();
        // A stopped queue completes nothing any more.
        let count = if self.is_stopping() { 0 } else { finished.len() };
        for command in &mut finished[..count] {
            let tag = command.tag.id;
            commands.record_device_completion(now, tag, command.status);
            if let Some(medium) = command.medium.take() {
                commands.complete_in_place(end, tag, medium);
                continue;
            }
            if let Some(report) = command.error_report(self.qid, commands.command_of_tag(tag).cid())
            {
                let event = QueueEvent::Error(report);
                self.association.lock_transport().handle_queue_event(now, self.qid, event);
            }
            commands.complete_executed(end, tag, command.status, command.result);
        }
        self.latency.record_completions(count);
        self.executor.recycle_finished_list(finished);
        count
    }

    /// Forwards messages of the executor to the front end and applies its decisions.
    #[cold]
    fn forward_events(&mut self, now: Instant) {
        while let Some(event) = self.executor.next_event() {
            let decision =
                self.association.lock_transport().handle_queue_event(now, self.qid, event);
            if let Some(decision) = decision {
                self.executor.complete_reservation_command(
                    now,
                    decision.ticket,
                    decision.end,
                    &decision.bytes,
                );
            }
        }
    }

    /// Executes requests of the association.
    #[cold]
    fn execute_association_requests(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) {
        for command in self.link.take_commands() {
            match command {
                QueueCommand::Stop => self.stop_commands(now),
                // And the current poll is the one that was requested.
                QueueCommand::Poll => {
                    self.may_have_retired_channels = true;
                    self.executor.poll_preempted_writes();
                    self.fetch_slow_io(commands);
                    self.fetch_limiters(commands);
                }
                QueueCommand::AbortNamespace { nsid, preempted } => {
                    self.executor.abort_namespace(now, nsid, &preempted);
                }
                QueueCommand::CompleteReservation { ticket, end } => {
                    self.executor.complete_reservation_command(now, ticket, end, &[])
                }
                QueueCommand::Abort { cid, admin_cid } => {
                    let is_aborted = match commands.find_by_cid(cid) {
                        None => false,
                        Some((id, true)) if !self.ready.contains(&id) => {
                            self.executor.try_abort_command(now, CommandTag { stream: STREAM, id })
                        }
                        Some((tag, _)) => {
                            self.ready.retain(|ready| *ready != tag);
                            self.reject_command(commands, end, tag, Status::ABORT_REQUESTED);
                            true
                        }
                    };
                    self.association
                        .lock_transport()
                        .handle_abort_result(now, admin_cid, is_aborted);
                }
            }
        }
    }

    /// Completes a command that has not started.
    pub(super) fn reject_command(
        &self,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
        tag: u16,
        status: Status,
    ) {
        commands.complete_with(end, tag, 0, Completion::new(0, status));
    }

    /// Stops the queue: nothing is started or completed any more. Outstanding writes are fenced
    /// before the stop becomes visible to anyone.
    pub(super) fn stop_commands(&mut self, now: Instant) {
        if !self.is_stopping() {
            self.ready.clear();
            self.executor.stop(now);
            if self.is_fenced {
                self.executor.fence_writes();
            }
            self.link.set_ending();
            (self.stop_timer.since, self.stop_timer.report_at) =
                (now, now.after(self.stop_timer.quiesce));
        }
    }

    /// Next report about a stopped queue: that its devices take longer to drain than the host
    /// waits, and later that they have drained.
    #[cold]
    pub(super) fn next_drain_report(&mut self, now: Instant) -> Option<String> {
        let Self { executor, stop_timer, association, qid, .. } = self;
        let ms = now.since(stop_timer.since).ns / 1_000_000;
        let nqn = association.export().nqn();
        let queue_name = format!("queue {qid} of controller {} of {nqn}", association.cntlid);
        if stop_timer.is_reported && executor.in_flight_count() == 0 {
            stop_timer.is_reported = false;
            return Some(format!(
                "{queue_name}: its devices have drained {ms} ms after it was stopped"
            ));
        }
        if now < stop_timer.report_at {
            return None;
        }
        stop_timer.report_at = Instant::NEVER;
        stop_timer.is_reported = executor.in_flight_count() > 0;
        let (opcode, nsid, lba) = executor.lowest_slot_command()?;
        let outstanding = executor.in_flight_count();
        Some(format!(
            "{queue_name} was stopped {ms} ms ago and its devices have not completed {outstanding} \
             commands, the first of them opcode {opcode:#04x} at block {lba} of namespace {nsid}: the \
             blocks that they write are locked until then; fix: check that device"
        ))
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.executor.is_stopping()
    }

    /// Whether every command has been completed.
    pub(super) fn is_idle(&self) -> bool {
        self.outstanding_commands() == 0
    }

    /// Whether the queue must be polled again.
    pub(super) fn wants_iteration(&self) -> bool {
        self.executor.wants_iteration()
    }

    /// Commands that are ready or executing.
    pub(super) fn outstanding_commands(&self) -> usize {
        self.executor.in_flight_count() + self.ready.len()
    }

    /// Whether the devices have nothing of this queue outstanding.
    pub(super) fn is_drained(&self) -> bool {
        self.executor.in_flight_count() == 0
    }

    /// Closes the drained queue: releases its identifier.
    pub(super) fn close_queue(self, now: Instant) {
        let Self { executor, association, qid, .. } = self;
        drop(executor);
        association.lock_transport().remove_queue(now, qid);
        association.remove_credentials(qid);
    }

    /// Arms the devices before sleeping: passes new descriptors to `watch`. Returns true if the thread must
    /// not sleep.
    pub(super) fn arm(&mut self, watch: &mut dyn FnMut(BorrowedFd<'_>)) -> bool {
        let has_ready = !self.ready.is_empty();
        self.executor.for_each_new_wake_fd(watch);
        self.executor.arm_wakeup(has_ready) || self.executor.has_pending_without_wakeup(has_ready)
    }

    /// Disarms the devices after the thread has woken.
    pub(super) fn disarm(&mut self) {
        self.executor.disarm_wakeup();
    }

    pub(super) fn qid(&self) -> u16 {
        self.qid
    }

    pub(super) fn association(&self) -> &Association {
        &self.association
    }

    pub(super) fn queue_link(&self) -> &QueueLink {
        &self.link
    }

    /// Mean latency of the outstanding commands, if there are any and it is known.
    pub(super) fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| !self.is_idle())
    }

    /// Whether commands have taken long of late.
    pub(super) fn has_long_latency(&self) -> bool {
        self.latency.is_long()
    }

    /// When a device must be polled.
    #[inline]
    pub(super) fn wake_at(&self) -> Instant {
        if !self.is_idle() {
            let has_share = self.ready.is_empty() || self.executor.executing_count() > 0;
            let review = if has_share { Instant::NEVER } else { self.share.review_at() };
            self.executor.wake_at().min(self.stop_timer.report_at).min(review)
        } else {
            Instant::NEVER
        }
    }
}

/// Whether a command was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartResult {
    Yes,
    /// A Fabrics command, which the connection executes itself.
    Fabrics,
}
