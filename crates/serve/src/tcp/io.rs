//! I/O queue of a connection: commands into its submission ring, completions out of its completion
//! ring.
//!
//! ```text
//!   CommandTable ─ ready ─▶ submission ring ─▶ tenmil_nvme_controller::Queue ─▶ device
//!     ▲                                            │            │  data in place: in the buffer
//!     └─ finish ◀─── completion ring ◀─────────────┴────────────┘
//! ```
//!
//! A command enters the ring when all its data are present, with its tag as command identifier. Its
//! buffer lies within one page of the ring's memory page size, so PRP1 alone describes it.

use std::sync::Arc;

use tenmil_base::{
    CompletionRing, Dma, Doorbell, Instant, Memory, Span, SubmissionRing, entry_to_dwords,
};
use tenmil_dma::{HostCompletionRing, HostSubmissionRing};
use tenmil_nvme_controller::SharedDoorbell;
use tenmil_nvme_controller::queue::{Queue, QueueEvent};
use tenmil_nvme_controller::transport::fabrics::{
    CreateQueueError, FabricsQueue, QueueCommand, QueueLink,
};
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_reactor::MeanLatency;
use tenmil_wire::{AdminOpcode, Command, Completion, IoOpcode, Status};

use super::association::Association;
use super::command_table::{CommandTable, DataDirection, StartedCommand};
use super::memory::{Buffer, ConnectionMemory, iova_of};
use super::service::Service;

/// I/O queue on the target's end of a connection.
#[derive(Debug)]
pub(super) struct Io {
    queue: Queue<ConnectionMemory>,
    link: Arc<QueueLink>,
    association: Arc<Association>,
    qid: u16,
    submission: HostSubmissionRing,
    completion: HostCompletionRing,
    tail_bell: SharedDoorbell,
    head_bell: SharedDoorbell,
    entries: u32,
    tail: u32,
    /// Tail of the last doorbell write.
    rung: u32,
    head: u32,
    phase: bool,
    /// Commands in the ring without a completion.
    under_way: u32,
    latency: MeanLatency,
    /// Memory of both rings.
    rings: Option<Buffer>,
    told_at: Instant,
    is_stopping: bool,
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
/// PSDT and the adjacent reserved bits in the first qword of a command.
const PSDT: u64 = 0xfc00;
const CID: u64 = 0xffff_0000;
const SUBMISSION_BYTES: u32 = 64;
const COMPLETION_BYTES: u32 = 16;

impl Io {
    /// Creates the queue that a host connects, with at most `depth` outstanding commands.
    pub(super) fn new(
        service: &Service,
        association: Arc<Association>,
        (qid, depth): (u16, u16),
        rooms: &mut CommandTable,
        now: Instant,
    ) -> Result<Self, CreateQueueError> {
        let len_bytes = ring_bytes(depth);
        let rings = rooms.quota().take_rings(len_bytes).ok_or(CreateQueueError::Memory)?;
        let made = Self::with(service, association, (qid, depth), rooms, &rings, now);
        match made {
            Ok(mut io) => {
                io.rings = Some(rings);
                Ok(io)
            }
            Err(why) => {
                rooms.quota().release(rings);
                Err(why)
            }
        }
    }

    fn with(
        service: &Service,
        association: Arc<Association>,
        (qid, depth): (u16, u16),
        rooms: &CommandTable,
        rings: &Buffer,
        now: Instant,
    ) -> Result<Self, CreateQueueError> {
        let budget = rooms.budget();
        let limits = service.limits();
        let entries = u32::from(depth) + 1;
        let (first, second) = (entries * SUBMISSION_BYTES, entries * COMPLETION_BYTES);
        let whole = rings.segment(budget, first + second).ok_or(CreateQueueError::Memory)?;
        let place = iova_of(rings, 0).ok_or(CreateQueueError::Memory)?;
        let part = |skip, len| whole.slice(skip, len).ok_or(CreateQueueError::Memory);
        // A submission entry is read only after it was written. A completion entry is detected by
        // its phase bit, so the ring must start zeroed.
        budget.regions().fill(part(first, second)?, 0).map_err(|_| CreateQueueError::Memory)?;
        let new = FabricsQueue {
            qid,
            entries,
            submission: place,
            completion: place + u64::from(first),
            page_shift: u8::try_from(budget.buffer_bytes_max().trailing_zeros()).unwrap_or(0),
            in_flight_max: depth,
            areas: AREAS.min(depth),
        };
        let mut front = association.front();
        let host = ConnectionMemory::new(budget);
        let (queue, link) = front.create_queue(host, &new, service.buffers().clone())?;
        let bell = |index| SharedDoorbell::new(front.doorbells().clone(), index, ());
        let (tail_bell, head_bell) = (bell(2 * usize::from(qid)), bell(2 * usize::from(qid) + 1));
        drop(front);
        Ok(Self {
            queue,
            link,
            association,
            qid,
            submission: budget.pool().submission_ring(part(0, first)?, entries),
            completion: budget.pool().completion_ring(part(first, second)?, entries),
            tail_bell,
            head_bell,
            entries,
            tail: 0,
            rung: 0,
            head: 0,
            phase: true,
            under_way: 0,
            latency: MeanLatency::default(),
            rings: None,
            told_at: now,
            is_stopping: false,
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
        self.latency.account(now, self.under_way as usize);
    }

    /// Writes a command into the submission ring.
    #[inline(always)]
    pub(super) fn begin(&mut self, rooms: &mut CommandTable, tag: u16) -> StartResult {
        let StartedCommand { command, way, len_bytes, iova } = rooms.started(tag);
        if command.opcode() == AdminOpcode::FabricsCommands.code() {
            return StartResult::Fabrics;
        }
        // A read fills its whole buffer. Other commands may fill less, and the rest must not expose
        // another host's data.
        if way == DataDirection::ToHost && command.opcode() != IoOpcode::Read.code() {
            blank(rooms, tag, len_bytes);
        }
        let Command(mut words) = command;
        words[0] = words[0] & !(CID | PSDT) | u64::from(tag) << 16;
        (words[2], words[3], words[4]) = (0, iova, 0);
        self.submission.store(self.tail, &words);
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        self.under_way += 1;
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
        // Requests of the association and replies to messages complete commands outside the queue's
        // own poll.
        let is_ordered = self.link.has_orders();
        let mut has_ends = is_ordered;
        if is_ordered {
            self.obey(now, rooms, end);
        }
        if self.tail != self.rung {
            self.submission.publish();
            self.tail_bell.ring(self.tail);
            self.rung = self.tail;
            self.link.note_activity(now);
        }
        if self.under_way == 0 && !is_ordered && !self.is_stopping && !self.queue.wants_iteration()
        {
            self.queue.skip_idle(now);
            return 0;
        }
        let turned = self.queue.turn(now);
        has_ends |= turned.posted > 0;
        if self.queue.has_events() {
            self.read_letters(now, rooms);
            has_ends = true;
        }
        let count = if has_ends { self.take_completions(rooms, end) } else { 0 };
        count + usize::from(turned.is_busy)
    }

    /// Completes the commands in the completion ring.
    #[inline]
    fn take_completions(
        &mut self,
        rooms: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        let mut count = 0;
        while let Some(entry) = self.completion.load(self.head, self.phase) {
            self.head += 1;
            if self.head == self.entries {
                (self.head, self.phase) = (0, !self.phase);
            }
            count += 1;
            let completion = Completion(entry_to_dwords(entry));
            let tag = completion.cid();
            // Dropped by a controller reset meanwhile.
            if !rooms.is_ready(tag) {
                continue;
            }
            let status = completion.status();
            if status.is_success() {
                let (way, len_bytes) = rooms.data(tag);
                let len_bytes = if way == DataDirection::ToHost { len_bytes } else { 0 };
                rooms.finish(end, tag, len_bytes, completion);
            } else {
                rooms.finish(end, tag, 0, completion.with_status(status_for_host(status)));
            }
        }
        if count > 0 {
            self.latency.end(count);
            self.under_way -= u32::try_from(count).unwrap_or(self.under_way);
            self.head_bell.ring(self.head);
        }
        count
    }

    /// Forwards messages of the queue to the front end and applies its decisions.
    #[cold]
    fn read_letters(&mut self, now: Instant, rooms: &CommandTable) {
        while let Some(letter) = self.queue.next_event() {
            let letter = match letter {
                QueueEvent::Error(mut report) => {
                    report.cid = rooms.command(report.cid).cid();
                    report.status = status_for_host(report.status);
                    QueueEvent::Error(report)
                }
                letter => letter,
            };
            let decision = self.association.front().handle_queue_event(now, self.qid, letter);
            if let Some(decision) = decision {
                self.queue.complete_reservation(
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
                QueueCommand::Poll => self.queue.check_preempted(),
                QueueCommand::AbortNamespace { nsid, preempted } => {
                    self.queue.abort_namespace(now, nsid, &preempted);
                }
                QueueCommand::CompleteReservation { ticket, end } => {
                    self.queue.complete_reservation(now, ticket, end, &[])
                }
                QueueCommand::Abort { cid, admin_cid } => {
                    let is_aborted = match rooms.find(cid) {
                        None => false,
                        Some((tag, true)) => self.queue.abort(now, self.qid, tag),
                        Some((tag, false)) => {
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
        if !self.is_stopping {
            self.is_stopping = true;
            self.queue.stop(now);
            if self.is_fenced {
                self.queue.fence_writes();
            }
            self.link.set_ending();
            (self.ended.since, self.ended.late_at) = (now, now.after(self.ended.quiesce));
        }
    }

    /// Next report about a stopped queue: that its devices take longer to drain than the host
    /// waits, and later that they have drained.
    #[cold]
    pub(super) fn next_report(&mut self, now: Instant) -> Option<String> {
        let Self { queue, ended, association, qid, under_way, .. } = self;
        let ms = now.since(ended.since).ns / 1_000_000;
        let nqn = association.offer().nqn();
        let whose = format!("queue {qid} of controller {} of {nqn}", association.cntlid);
        if ended.is_late && queue.is_drained() {
            ended.is_late = false;
            return Some(format!("{whose}: its media have answered {ms} ms after it was stopped"));
        }
        if now < ended.late_at {
            return None;
        }
        ended.late_at = Instant::NEVER;
        ended.is_late = !queue.is_drained();
        let (opcode, nsid, lba) = queue.first_outstanding()?;
        Some(format!(
            "{whose} was stopped {ms} ms ago and its media have not answered {under_way} commands, \
             the first of them opcode {opcode:#04x} at block {lba} of namespace {nsid}: what they \
             write is closed to everyone until they do; fix: look after that device"
        ))
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Whether everything started has been completed.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Whether the queue must be polled again.
    pub(super) fn queue_wants_turn(&self) -> bool {
        self.queue.wants_iteration()
    }

    /// Commands that were started and not completed.
    pub(super) fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Whether the devices have nothing of this queue outstanding.
    pub(super) fn is_drained(&self) -> bool {
        self.queue.is_drained()
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
        let traffic = self.queue.take_traffic(now);
        self.association.front().add_traffic(&traffic);
    }

    /// Closes the drained queue: releases its identifier and its rings.
    pub(super) fn close_queue(mut self, now: Instant, rooms: &mut CommandTable) {
        self.tell_now(now);
        let Self { queue, association, qid, rings, .. } = self;
        drop(queue);
        association.front().queue_gone(now, qid);
        if let Some(rings) = rings {
            rooms.quota().release(rings);
        }
    }

    pub(super) fn queue(&mut self) -> &mut Queue<ConnectionMemory> {
        &mut self.queue
    }

    pub(super) fn association(&self) -> &Association {
        &self.association
    }

    pub(super) fn link(&self) -> &QueueLink {
        &self.link
    }

    /// Mean latency of the outstanding commands, if there are any and it is known.
    pub(super) fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.under_way > 0)
    }

    /// When a device must be polled, or counters are due for publication.
    #[inline]
    pub(super) fn wake_at(&self) -> Instant {
        if self.under_way > 0 {
            self.queue.wake_at().min(self.ended.late_at)
        } else if self.queue.has_traffic() {
            self.told_at.after(TELL)
        } else {
            Instant::NEVER
        }
    }
}

/// Bytes of both rings of a queue with `depth` entries. A ring keeps one entry free; the completion
/// ring starts on a cache line of its own.
pub(super) fn ring_bytes(depth: u16) -> u32 {
    (u32::from(depth) + 1) * (SUBMISSION_BYTES + COMPLETION_BYTES)
}

/// Whether a command was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartResult {
    Yes,
    /// A Fabrics command, which the connection executes itself.
    Fabrics,
}

/// Translates a status for the host. Data cannot be unmapped here, so a data transfer error means
/// that the SGL length does not match the number of blocks.
fn status_for_host(status: Status) -> Status {
    if Status::DATA_TRANSFER_ERROR.is(status) {
        Status::DATA_SGL_LENGTH_INVALID.with_dnr()
    } else {
        status
    }
}

/// Zeroes a buffer that the command may not fill completely, so that the host never receives data
/// of others.
#[cold]
fn blank(rooms: &CommandTable, tag: u16, len_bytes: u32) {
    if let Some(segment) = rooms.front_of(tag, len_bytes) {
        // The buffer lies in the pool's region.
        let _ = rooms.budget().regions().fill(segment, 0);
    }
}
