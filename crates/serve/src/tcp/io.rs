//! I/O queue of a connection: commands into an executor, and its completions back.
//!
//! ```text
//!   CommandTable ─ ready ─▶ tenmil_nvme_controller::Executor ─▶ device
//!     ▲                        │            │  data in place: in the buffer
//!     └─ complete ◀────────────┴────────────┘
//! ```
//!
//! A command is ready when all its data are present. It begins under its tag in the next iteration; those
//! alike begin together. A command that cannot begin yet stays in the list, and so do those after it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_nvme_controller::executor::{CommandData, Executor, SegmentMemory, Tag};
use tenmil_nvme_controller::queue::QueueEvent;
use tenmil_nvme_controller::transport::fabrics::{
    CreateQueueError, FabricsQueue, QueueCommand, QueueLink,
};
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_reactor::MeanLatency;
use tenmil_wire::{AdminOpcode, Completion, Status};

use super::association::Association;
use super::command_table::CommandTable;
use super::service::Service;

/// I/O queue on the target's end of a connection.
#[derive(Debug)]
pub(super) struct Io {
    executor: Executor<SegmentMemory>,
    link: Arc<QueueLink>,
    association: Arc<Association>,
    qid: u16,
    /// Tags of commands that have all their data and have not begun, oldest first.
    ready: Vec<u16>,
    latency: MeanLatency,
    told_at: Instant,
    /// Whether outstanding writes of the devices are fenced when the queue stops.
    is_fenced: bool,
    ended: Ended,
}

/// Tracks how long the devices take to drain after the queue was stopped.
#[derive(Debug)]
struct Ended {
    since: Instant,
    /// When the delay is reported.
    late_at: Instant,
    quiesce: Span,
    is_late: bool,
}

/// Number of commands that may be split into several requests at the same time.
const AREAS: u16 = 4;
/// Interval at which a queue publishes its counters.
const TELL: Span = Span::from_secs(1);
/// The only stream of the executor.
const STREAM: u16 = 0;

impl Io {
    /// Creates the queue that a host connects, with at most `depth` outstanding commands.
    pub(super) fn new(
        service: &Service,
        association: Arc<Association>,
        (qid, depth): (u16, u16),
        rooms: &CommandTable,
        now: Instant,
    ) -> Result<Self, CreateQueueError> {
        let limits = service.limits();
        let new = FabricsQueue { qid, in_flight_max: depth, contexts_max: AREAS.min(depth) };
        let memory =
            SegmentMemory::new(Arc::new(rooms.budget().regions().clone()), rooms.budget().region());
        let buffers = service.buffers().clone();
        let (executor, link) = association.front().create_queue(memory, &new, buffers)?;
        Ok(Self {
            executor,
            link,
            association,
            qid,
            ready: Vec::new(),
            latency: MeanLatency::default(),
            told_at: now,
            is_fenced: !limits.injected_bugs.unfenced_writes,
            ended: Ended {
                since: now,
                late_at: Instant::NEVER,
                quiesce: limits.quiesce,
                is_late: false,
            },
        })
    }

    /// Records the time of an iteration without new commands or completions.
    #[inline]
    pub(super) fn is_idle_round(&mut self, now: Instant) {
        self.latency.account(now, self.under_way());
    }

    /// Adds a command that has all its data to those that begin in the next [`turn`](Self::turn).
    #[inline(always)]
    pub(super) fn begin(&mut self, rooms: &CommandTable, tag: u16) -> StartResult {
        if rooms.command(tag).opcode() == AdminOpcode::FabricsCommands.code() {
            return StartResult::Fabrics;
        }
        self.ready.push(tag);
        StartResult::Yes
    }

    /// Does a bounded amount of work; returns the amount done.
    #[inline]
    pub(super) fn turn(
        &mut self,
        now: Instant,
        rooms: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        // Requests of the association complete commands, too.
        let is_ordered = self.link.has_commands();
        if is_ordered {
            self.obey(now, rooms, end);
        }
        if self.is_idle() && !is_ordered && !self.is_stopping() && !self.executor.wants_iteration()
        {
            self.executor.skip_idle(now);
            return 0;
        }
        let was_idle = self.executor.begin_iteration(now);
        if self.executor.has_contexts() {
            self.executor.retry_waiting(now);
        }
        let mut count = self.begin_ready(now, rooms);
        if count > 0 {
            self.link.note_activity(now);
            if was_idle {
                self.executor.note_busy(now);
            }
        }
        if self.executor.taken() > 0 {
            self.executor.submit(now);
            count += self.poll(now, rooms, end);
        }
        if self.executor.has_events() {
            count += 1;
            self.read_letters(now);
        }
        if self.executor.has_finished() {
            count += self.take_finished(now, rooms, end);
        }
        if count == 0 {
            self.executor.reap_retired();
        }
        count
    }

    /// Begins commands in the order in which they became ready, as far as they can begin now. Returns their number.
    #[inline]
    fn begin_ready(&mut self, now: Instant, rooms: &CommandTable) -> usize {
        if self.executor.is_exclusive() {
            self.executor.begin_exclusive();
            let count = self.begin_unblocked(now, rooms);
            self.executor.end_exclusive();
            return count;
        }
        if self.ready.is_empty() { 0 } else { self.begin_unblocked(now, rooms) }
    }

    fn begin_unblocked(&mut self, now: Instant, rooms: &CommandTable) -> usize {
        self.executor.open();
        let mut count = 0;
        while count < self.ready.len() && !self.executor.has_pair() {
            if self.executor.may_run() {
                let ready = self.ready[count..].iter().map(|tag| rooms.started(*tag));
                count += self.executor.begin_segments(STREAM, ready);
            }
            let Some(&tag) = self.ready.get(count) else { break };
            let (id, command, segment) = rooms.started(tag);
            let (tag, data) = (Tag { stream: STREAM, id }, CommandData::Segment(segment));
            if !self.executor.begin(now, tag, *command, data) {
                break;
            }
            count += 1;
        }
        if count == self.ready.len() {
            self.ready.clear();
        } else {
            self.ready.drain(..count);
        }
        count
    }

    /// Completes the commands that the devices have completed. Returns their number.
    #[inline]
    fn poll(
        &mut self,
        now: Instant,
        rooms: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        let mut count = 0;
        self.executor.poll_each(now, |tag, result| {
            count += 1;
            rooms.complete(end, tag, Status::SUCCESS, result);
        });
        if count > 0 {
            self.latency.end(count);
        }
        count
    }

    /// Completes the commands that have finished otherwise. Returns their number.
    #[cold]
    fn take_finished(
        &mut self,
        now: Instant,
        rooms: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        let finished = self.executor.take_finished();
        // A stopped queue completes nothing any more.
        let count = if self.is_stopping() { 0 } else { finished.len() };
        for command in &finished[..count] {
            let tag = command.tag.id;
            if let Some(report) = command.report(self.qid, rooms.command(tag).cid()) {
                let event = QueueEvent::Error(report);
                self.association.front().handle_queue_event(now, self.qid, event);
            }
            rooms.complete(end, tag, command.status, command.result);
        }
        self.latency.end(count);
        self.executor.reuse(finished);
        count
    }

    /// Forwards messages of the executor to the front end and applies its decisions.
    #[cold]
    fn read_letters(&mut self, now: Instant) {
        while let Some(letter) = self.executor.next_event() {
            let decision = self.association.front().handle_queue_event(now, self.qid, letter);
            if let Some(decision) = decision {
                self.executor.complete_reservation(
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
    fn obey(&mut self, now: Instant, rooms: &mut CommandTable, end: &mut ControllerConnection) {
        for order in self.link.take_commands() {
            match order {
                QueueCommand::Stop => self.stop(now),
                // And the current poll is the one that was requested.
                QueueCommand::Poll => self.executor.check_preempted(),
                QueueCommand::AbortNamespace { nsid, preempted } => {
                    self.executor.abort_namespace(now, nsid, &preempted);
                }
                QueueCommand::CompleteReservation { ticket, end } => {
                    self.executor.complete_reservation(now, ticket, end, &[])
                }
                QueueCommand::Abort { cid, admin_cid } => {
                    let is_aborted = match rooms.find(cid) {
                        None => false,
                        Some((id, true)) if !self.ready.contains(&id) => {
                            self.executor.abort(now, Tag { stream: STREAM, id })
                        }
                        Some((tag, _)) => {
                            self.ready.retain(|ready| *ready != tag);
                            self.refuse(rooms, end, tag, Status::ABORT_REQUESTED);
                            true
                        }
                    };
                    self.association.front().aborted(now, admin_cid, is_aborted);
                }
            }
        }
    }

    /// Completes a command that has not started.
    pub(super) fn refuse(
        &self,
        rooms: &mut CommandTable,
        end: &mut ControllerConnection,
        tag: u16,
        status: Status,
    ) {
        rooms.finish(end, tag, 0, Completion::new(0, status));
    }

    /// Stops the queue: nothing is started or completed any more. Outstanding writes are fenced
    /// before the stop becomes visible to anyone.
    pub(super) fn stop(&mut self, now: Instant) {
        if !self.is_stopping() {
            self.ready.clear();
            self.executor.stop(now);
            if self.is_fenced {
                self.executor.fence_writes();
            }
            self.link.set_ending();
            (self.ended.since, self.ended.late_at) = (now, now.after(self.ended.quiesce));
        }
    }

    /// Next report about a stopped queue: that its devices take longer to drain than the host
    /// waits, and later that they have drained.
    #[cold]
    pub(super) fn next_report(&mut self, now: Instant) -> Option<String> {
        let Self { executor, ended, association, qid, .. } = self;
        let ms = now.since(ended.since).ns / 1_000_000;
        let nqn = association.offer().nqn();
        let whose = format!("queue {qid} of controller {} of {nqn}", association.cntlid);
        if ended.is_late && executor.taken() == 0 {
            ended.is_late = false;
            return Some(format!("{whose}: its media have answered {ms} ms after it was stopped"));
        }
        if now < ended.late_at {
            return None;
        }
        ended.late_at = Instant::NEVER;
        ended.is_late = executor.taken() > 0;
        let (opcode, nsid, lba) = executor.first_outstanding()?;
        let under_way = executor.taken();
        Some(format!(
            "{whose} was stopped {ms} ms ago and its media have not answered {under_way} commands, \
             the first of them opcode {opcode:#04x} at block {lba} of namespace {nsid}: what they \
             write is closed to everyone until they do; fix: look after that device"
        ))
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.executor.is_stopping()
    }

    /// Whether every command has been completed.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way() == 0
    }

    /// Whether the queue must be polled again.
    pub(super) fn queue_wants_turn(&self) -> bool {
        self.executor.wants_iteration()
    }

    /// Commands that are ready or executing.
    pub(super) fn under_way(&self) -> usize {
        self.executor.taken() + self.ready.len()
    }

    /// Whether the devices have nothing of this queue outstanding.
    pub(super) fn is_drained(&self) -> bool {
        self.executor.taken() == 0
    }

    /// Publishes the counters of the interval, at most once per `TELL`.
    #[inline]
    pub(super) fn publish_counters(&mut self, now: Instant) {
        if now.since(self.told_at) >= TELL {
            self.tell_now(now);
        }
    }

    #[cold]
    fn tell_now(&mut self, now: Instant) {
        self.told_at = now;
        let traffic = self.executor.take_traffic(now);
        self.association.front().add_traffic(&traffic);
    }

    /// Closes the drained queue: releases its identifier.
    pub(super) fn close_queue(mut self, now: Instant) {
        self.tell_now(now);
        let Self { executor, association, qid, .. } = self;
        drop(executor);
        association.front().remove_queue(now, qid);
    }

    /// Arms the devices before sleeping: passes new descriptors to `watch`. Returns true if the thread must not sleep.
    pub(super) fn arm(&mut self, watch: &mut dyn FnMut(BorrowedFd<'_>)) -> bool {
        let is_held = !self.ready.is_empty();
        self.executor.new_descriptors(watch);
        self.executor.arm(is_held) || self.executor.lacks_wakeup(is_held)
    }

    /// Disarms the devices after the thread has woken.
    pub(super) fn disarm(&mut self) {
        self.executor.disarm();
    }

    pub(super) fn association(&self) -> &Association {
        &self.association
    }

    pub(super) fn link(&self) -> &QueueLink {
        &self.link
    }

    /// Mean latency of the outstanding commands, if there are any and it is known.
    pub(super) fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| !self.is_idle())
    }

    /// When a device must be polled, or counters are due for publication.
    #[inline]
    pub(super) fn wake_at(&self) -> Instant {
        if !self.is_idle() {
            self.executor.wake_at().min(self.ended.late_at)
        } else if self.executor.has_traffic() {
            self.told_at.after(TELL)
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
