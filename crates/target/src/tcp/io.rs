//! An I/O queue at the end of a connection: commands into its ring, completions out of it.
//!
//! ```text
//!   Rooms ─ ready ─▶ submission ring ─▶ ctrl::Queue ─▶ medium
//!     ▲                                     │            │  data where they lie: in the buffer
//!     └─ finish ◀─── completion ring ◀──────┴────────────┘
//! ```
//!
//! A command is in the ring when everything that it needs is there, under its tag as identifier. Its
//! buffer lies within one page of the ring's memory, so that PRP1 says it all.

use std::sync::Arc;

use base::{CompletionRing, Dma, Doorbell, Instant, Memory, Span, SubmissionRing, entry_to_dwords};
use ctrl::SharedDoorbell;
use ctrl::front::fabrics::{FabricsQueue, NoQueue, Order, QueueLink};
use ctrl::queue::{Letter, Queue};
use dma::{HostCompletionRing, HostSubmissionRing};
use reactor::MeanLatency;
use tcp::Controller;
use wire::{AdminOpcode, Command, Completion, IoOpcode, Status};

use super::association::Association;
use super::memory::{Buffer, Reach, iova_of};
use super::rooms::{Rooms, Way};
use super::service::Service;

/// An I/O queue.
#[derive(Debug)]
pub(super) struct Io {
    queue: Queue<Reach>,
    link: Arc<QueueLink>,
    association: Arc<Association>,
    qid: u16,
    submission: HostSubmissionRing,
    completion: HostCompletionRing,
    tail_bell: SharedDoorbell,
    head_bell: SharedDoorbell,
    entries: u32,
    tail: u32,
    /// The tail that was rung last.
    rung: u32,
    head: u32,
    phase: bool,
    /// Commands in the ring that have not been answered.
    under_way: u32,
    latency: MeanLatency,
    /// Where the rings lie.
    rings: Option<Buffer>,
    told_at: Instant,
    is_stopping: bool,
    /// It closes what its media still write when it stops.
    is_fenced: bool,
    ended: Ended,
}

/// How long the media take to answer after the end.
#[derive(Debug)]
struct Ended {
    since: Instant,
    /// When that is reported.
    late_at: Instant,
    quiesce: Span,
    is_late: bool,
}

/// Commands that need more than one request at a time.
const AREAS: u16 = 4;
/// How often a queue tells what it has done.
const TELL: Span = Span::from_secs(1);
/// PSDT in the first word, and what is reserved beside it.
const PSDT: u64 = 0xfc00;
const CID: u64 = 0xffff_0000;
const SUBMISSION_BYTES: u32 = 64;
const COMPLETION_BYTES: u32 = 16;

impl Io {
    /// The queue that a host has asked for, with `depth` commands at most.
    pub(super) fn new(
        service: &Service,
        association: Arc<Association>,
        (qid, depth): (u16, u16),
        rooms: &mut Rooms,
        now: Instant,
    ) -> Result<Self, NoQueue> {
        let len_bytes = ring_bytes(depth);
        let rings = rooms.purse().take_rings(len_bytes).ok_or(NoQueue::Memory)?;
        let made = Self::with(service, association, (qid, depth), rooms, &rings, now);
        match made {
            Ok(mut io) => {
                io.rings = Some(rings);
                Ok(io)
            }
            Err(why) => {
                rooms.purse().give(rings);
                Err(why)
            }
        }
    }

    fn with(
        service: &Service,
        association: Arc<Association>,
        (qid, depth): (u16, u16),
        rooms: &Rooms,
        rings: &Buffer,
        now: Instant,
    ) -> Result<Self, NoQueue> {
        let budget = rooms.budget();
        let limits = service.limits();
        let entries = u32::from(depth) + 1;
        let (first, second) = (entries * SUBMISSION_BYTES, entries * COMPLETION_BYTES);
        let whole = rings.segment(budget, first + second).ok_or(NoQueue::Memory)?;
        let place = iova_of(rings, 0).ok_or(NoQueue::Memory)?;
        let part = |skip, len| whole.slice(skip, len).ok_or(NoQueue::Memory);
        // A submission is read after it was written; a completion is known by what was there before.
        budget.regions().fill(part(first, second)?, 0).map_err(|_| NoQueue::Memory)?;
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
        let host = Reach::new(budget);
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

    /// It is this time, and nothing has begun or ended since the last turn.
    #[inline]
    pub(super) fn pass(&mut self, now: Instant) {
        self.latency.pass(now, self.under_way as usize);
    }

    /// A command has all that it needs.
    #[inline]
    pub(super) fn begin(&mut self, rooms: &mut Rooms, tag: u16) -> Begun {
        let command = *rooms.command(tag);
        if command.opcode() == AdminOpcode::FabricsCommands.code() {
            return Begun::Fabrics;
        }
        let (way, len_bytes) = rooms.data(tag);
        let iova = rooms.iova(tag);
        if way == Way::ToHost && command.opcode() != IoOpcode::Read.code() {
            blank(rooms, tag, len_bytes);
        }
        let Command(mut words) = command;
        words[0] = words[0] & !(CID | PSDT) | u64::from(tag) << 16;
        (words[2], words[3], words[4]) = (0, iova, 0);
        self.submission.store(self.tail, &words);
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        self.under_way += 1;
        Begun::Yes
    }

    /// Does a bounded amount of work. How many things were done.
    #[inline]
    pub(super) fn turn(&mut self, now: Instant, rooms: &mut Rooms, end: &mut Controller) -> usize {
        // Orders and answers to letters end commands outside a turn of the queue.
        let is_ordered = self.link.has_orders();
        let mut has_ends = is_ordered;
        if is_ordered {
            self.obey(now, rooms, end);
        }
        if self.tail != self.rung {
            self.submission.publish();
            self.tail_bell.ring(self.tail);
            self.rung = self.tail;
            self.link.heard(now);
        }
        if self.under_way == 0 && !is_ordered && !self.is_stopping && !self.queue.wants_turn() {
            self.queue.stand_idle(now);
            return 0;
        }
        let turned = self.queue.turn(now);
        has_ends |= turned.posted > 0;
        if self.queue.has_letters() {
            self.read_letters(now, rooms);
            has_ends = true;
        }
        let count = if has_ends { self.take_completions(rooms, end) } else { 0 };
        count + usize::from(turned.is_busy)
    }

    /// Finishes what has ended.
    #[inline]
    fn take_completions(&mut self, rooms: &mut Rooms, end: &mut Controller) -> usize {
        let mut count = 0;
        while let Some(entry) = self.completion.load(self.head, self.phase) {
            self.head += 1;
            if self.head == self.entries {
                (self.head, self.phase) = (0, !self.phase);
            }
            count += 1;
            let completion = Completion(entry_to_dwords(entry));
            let tag = completion.cid();
            if !rooms.is_ready(tag) {
                continue;
            }
            let status = completion.status();
            if status.is_success() {
                let (way, len_bytes) = rooms.data(tag);
                let len_bytes = if way == Way::ToHost { len_bytes } else { 0 };
                rooms.finish(end, tag, len_bytes, completion);
            } else {
                rooms.finish(end, tag, 0, completion.with_status(told(status)));
            }
        }
        if count > 0 {
            self.latency.end(count);
            self.under_way -= u32::try_from(count).unwrap_or(self.under_way);
            self.head_bell.ring(self.head);
        }
        count
    }

    /// Passes on what the queue has to say.
    #[cold]
    fn read_letters(&mut self, now: Instant, rooms: &Rooms) {
        while let Some(letter) = self.queue.next_letter() {
            let letter = match letter {
                Letter::Error(mut report) => {
                    report.cid = rooms.command(report.cid).cid();
                    report.status = told(report.status);
                    Letter::Error(report)
                }
                letter => letter,
            };
            let decision = self.association.front().letter(now, self.qid, letter);
            if let Some(decision) = decision {
                self.queue.decide(now, decision.ticket, decision.end, &decision.bytes);
            }
        }
    }

    /// Does what the association wants.
    #[cold]
    fn obey(&mut self, now: Instant, rooms: &mut Rooms, end: &mut Controller) {
        for order in self.link.take_orders() {
            match order {
                Order::Stop => self.stop(now),
                // And the turn that this is part of.
                Order::Turn => self.queue.check_preempted(),
                Order::AbortNamespace { nsid, preempted } => {
                    self.queue.abort_namespace(now, nsid, &preempted);
                }
                Order::Decide { ticket, end } => self.queue.decide(now, ticket, end, &[]),
                Order::Abort { cid, admin_cid } => {
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

    /// Ends a command that has not begun.
    pub(super) fn refuse(&self, rooms: &mut Rooms, end: &mut Controller, tag: u16, status: Status) {
        rooms.finish(end, tag, 0, Completion::new(0, status));
    }

    /// Nothing more is begun, and nothing answered. What media still write is closed to everyone before
    /// anybody can see that the queue has stopped.
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

    /// What is to be reported of a queue that has stopped: that its media take longer than its host
    /// waits, and that they have answered after that.
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

    /// Whether all that was begun has been answered.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Whether somebody waits until its queue turns.
    pub(super) fn queue_wants_turn(&self) -> bool {
        self.queue.wants_turn()
    }

    /// Commands that were begun and have not been answered.
    pub(super) fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Whether nobody works on anything of it.
    pub(super) fn is_drained(&self) -> bool {
        self.queue.is_drained()
    }

    /// Tells what was done since it was last told, now and then.
    #[inline]
    pub(super) fn tell(&mut self, now: Instant) {
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

    /// The queue is gone, drained: its identifier is free, and its rings are given back.
    pub(super) fn leave(mut self, now: Instant, rooms: &mut Rooms) {
        self.tell_now(now);
        let Self { queue, association, qid, rings, .. } = self;
        drop(queue);
        association.front().queue_gone(now, qid);
        if let Some(rings) = rings {
            rooms.purse().give(rings);
        }
    }

    pub(super) fn queue(&mut self) -> &mut Queue<Reach> {
        &mut self.queue
    }

    pub(super) fn association(&self) -> &Association {
        &self.association
    }

    pub(super) fn link(&self) -> &QueueLink {
        &self.link
    }

    /// What commands that are under way take on average, if there are any and that is known.
    pub(super) fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.under_way > 0)
    }

    /// When a medium wants to be asked, or what was done since it was last told is to be told.
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

/// Bytes of the rings of a queue with `depth` commands at most. A ring keeps an entry free; the
/// completion ring begins on a line of its own.
pub(super) fn ring_bytes(depth: u16) -> u32 {
    (u32::from(depth) + 1) * (SUBMISSION_BYTES + COMPLETION_BYTES)
}

/// Whether a command was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begun {
    Yes,
    /// It is one of fabrics, and the connection's own affair.
    Fabrics,
}

/// What a host is told. That memory could not be reached has one reason here: the host has named
/// another length than that of its blocks.
fn told(status: Status) -> Status {
    if Status::DATA_TRANSFER_ERROR.is(status) {
        Status::DATA_SGL_LENGTH_INVALID.with_dnr()
    } else {
        status
    }
}

/// What a queue does not fill goes to the host as zeroes, and not as what others have left.
#[cold]
fn blank(rooms: &Rooms, tag: u16, len_bytes: u32) {
    if let Some(segment) = rooms.front_of(tag, len_bytes) {
        // It lies in the budget's region.
        let _ = rooms.budget().regions().fill(segment, 0);
    }
}
