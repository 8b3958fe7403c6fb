//! I/O queue: one completion queue and the submission queues that use it.
//!
//! ```text
//!   tail doorbell ─▶ fetch ─▶ decode ─┬─ one request ───────▶ batch ─▶ submit ──┐
//!                                     └─ job in a command context ◀─ drive ◀─┐  │
//!                                              │ host: lists, bytes          │  ▼
//!                                              └────────────────────────────▶│ block device
//!   head doorbell ─▶ free entries ◀─ complete ◀───────── poll ◀──────────────┴──┘
//! ```
//!
//! A queue is `Send`, owns an I/O channel to every block device, and reads an immutable snapshot of the
//! namespaces, so it may run on any reactor. A poll performs bounded work and never blocks. An entry of
//! the completion queue is reserved before a command is fetched: every fetched command can be completed.
//!
//! The fast path is a read or write within one page that the block device accesses in place. It has no
//! allocation, no division and, per command, no dynamic call: load the entry, look up the namespace by
//! index, check, resolve one address, batch. Every other command is a job in a command context.

/// Barrier used by `shadow`; the model of the rings substitutes a model checker's.
use core::sync::atomic as sync;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tenmil_base::{AccessFault, CompletionBatch, HostMemory, Instant};
use tenmil_wire::{Command, Status};

use crate::bounce::BouncePool;
use crate::controller::WakeFn;
use crate::controller::interface::{AdminResult, ErrorReport, InvalidDoorbell, IoCounters};
use crate::doorbell::DoorbellPage;
use crate::namespace::{Namespaces, VersionedReader};
use abort::PreemptedWrites;
use command_context::ContextPool;
use fused::FusedPair;
pub use fused_arbiter::FusedArbiter;
use fused_arbiter::FusedParticipant;
use namespace_table::NamespaceTable;
use ring::{CompletionQueue, SubmissionQueue};
use shadow::Shadow;
use slot::Slots;

mod abort;
mod channel;
mod command_context;
mod decode;
mod drive;
mod fast;
mod fused;
mod fused_arbiter;
mod idle;
mod job;
mod namespace_table;
pub(crate) mod ring;
mod shadow;
mod slot;
#[cfg(test)]
mod tests;

/// Completion queue with its submission queues, nearly always exactly one.
#[derive(Debug)]
pub struct Queue<H: HostMemory> {
    submissions: Vec<SubmissionQueue<H::Entries>>,
    completion: CompletionQueue<H::Entries>,
    doorbells: Arc<DoorbellPage>,
    voice: FusedParticipant,
    /// The volatile write cache is disabled (feature 06h): every write is FUA.
    is_write_through: Arc<AtomicBool>,
    namespaces: VersionedReader<Namespaces>,
    directory: NamespaceTable,
    slots: Slots,
    host: H,
    answers: CompletionBatch,
    /// Maximum commands fetched from one submission queue at a time.
    burst: u32,
    page_bytes: u64,
    traffic: TrafficCounters,
    /// Completions posted since the last poll reported them; some are posted between polls.
    posted: u32,
    areas: ContextPool,
    /// Contexts that wait for a bounce buffer, oldest first.
    want_buffer: VecDeque<u16>,
    /// Contexts whose request was rejected because the block device was full, oldest first.
    want_room: VecDeque<u16>,
    /// Fetched command that cannot start yet, with its submission queue. While it is held, no other
    /// command is fetched.
    held: Option<(usize, Command)>,
    pair: Option<FusedPair>,
    /// Fetched commands that do not execute yet: halves of fused pairs that wait.
    paused: usize,
    letters: VecDeque<QueueEvent>,
    /// What preemptions wait for.
    preempted: Vec<PreemptedWrites>,
    buffers: BouncePool,
    /// Memory for one access, allocated when the first command gets a context.
    scratch: Box<[u8]>,
    /// Pending host accesses to a remote ring.
    ring_accesses: u32,
    page_shift: u8,
    transfer_bytes_max: u32,
    write_flags: tenmil_base::RequestFlags,
    is_stopping: bool,
    is_on_hold: bool,
}

/// Configuration of a queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Completion queue identifier, which also identifies the queue within its controller.
    pub cqid: u16,
    /// Entries of the completion queue: at least 2.
    pub entries: u32,
    /// IOVA of its first entry.
    pub address: u64,
    /// A host memory page has `1 << page_shift` bytes: CC.MPS + 12.
    pub page_shift: u8,
    /// Largest transfer in bytes (MDTS).
    pub transfer_bytes_max: u32,
    /// Maximum commands in flight: at least 2, for a fused pair.
    pub in_flight_max: u16,
    /// Of these, commands that may have a command context: at least 2.
    pub areas: u16,
    /// Maximum commands fetched from one submission queue at a time.
    pub burst: u32,
}

/// State that a queue shares with the rest of its controller.
#[derive(Clone, Debug)]
pub struct QueueContext {
    /// Doorbells of the controller.
    pub doorbells: Arc<DoorbellPage>,
    /// Fused-command arbiter: one for all queues of a subsystem.
    pub floor: Arc<FusedArbiter>,
    /// The volatile write cache is disabled (feature 06h): every write is FUA.
    pub is_write_through: Arc<AtomicBool>,
    /// Bounce buffers for data that a block device cannot access in host memory.
    pub buffers: BouncePool,
}

/// Result of one queue poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollStats {
    /// Commands fetched.
    pub taken: u32,
    /// Completions that became visible to the host since the last poll.
    pub posted: u32,
    /// Work was done, or more work is known to be pending: poll again at once.
    pub is_busy: bool,
    /// Commands are in flight.
    pub is_pending: bool,
}

/// Event from an I/O queue to its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueEvent {
    /// A command completed with an error status.
    Error(ErrorReport),
    /// The host wrote an invalid doorbell or an invalid value.
    InvalidDoorbell(InvalidDoorbell),
    /// Reservation command with its data, completed through [`Queue::complete_reservation`].
    Reservation {
        /// Identifies the command in the completion.
        ticket: u32,
        /// The command.
        command: Command,
        /// Parameter data: the reservation keys.
        bytes: Vec<u8>,
    },
    /// A block device could not be opened; its namespace is not ready.
    OpenFailed(String),
    /// Ring memory is not accessible: the queue has stopped, and the controller has to fail.
    RingFault(AccessFault),
}

/// Traffic since the last report, by the two low bits of the opcode: 1 is write, 2 is read.
#[derive(Clone, Copy, Debug, Default)]
struct TrafficCounters {
    commands: [u64; 4],
    bytes: [u64; 4],
    busy_ns: u64,
    busy_since: Option<Instant>,
}

/// Maximum bursts fetched in a poll, as long as every command completes synchronously.
const BURSTS: u32 = 4;
/// Events kept for the controller. Errors beyond this number in one poll lose their details.
const EVENTS_MAX: usize = 64;

/// Access identifiers: the upper bits select the kind.
const TICKET_FETCH: u32 = 1 << 30;
const TICKET_POST: u32 = 2 << 30;
const TICKET_KIND: u32 = 3 << 30;
/// The lower four bits of a context's access identifier are the index of a copy access, or this value for
/// its list.
const TICKET_LIST: u32 = 0xf;

impl<H: HostMemory> Queue<H> {
    /// Creates a queue without submission queues. `host` is a separate channel to host memory with its
    /// own access identifiers.
    pub fn new(
        mut host: H,
        config: &QueueConfig,
        shared: QueueContext,
        namespaces: VersionedReader<Namespaces>,
    ) -> Result<Self, AccessFault> {
        let completion =
            CompletionQueue::open(&mut host, config.cqid, config.entries, config.address)?;
        shared.doorbells.clear_head(config.cqid);
        let in_flight_max = config.in_flight_max.max(2);
        let areas = config.areas.clamp(2, in_flight_max);
        let mut queue = Self {
            submissions: Vec::new(),
            completion,
            doorbells: shared.doorbells,
            voice: shared.floor.join(),
            is_write_through: shared.is_write_through,
            namespaces,
            directory: NamespaceTable::new(in_flight_max.into()),
            slots: Slots::new(in_flight_max),
            host,
            answers: CompletionBatch::with_capacity(0),
            burst: config.burst.max(1),
            page_bytes: 1 << config.page_shift,
            traffic: TrafficCounters::default(),
            posted: 0,
            areas: ContextPool::new(areas, config.transfer_bytes_max),
            want_buffer: VecDeque::with_capacity(areas.into()),
            want_room: VecDeque::with_capacity(areas.into()),
            held: None,
            pair: None,
            paused: 0,
            letters: VecDeque::new(),
            preempted: Vec::new(),
            buffers: shared.buffers,
            scratch: Box::default(),
            ring_accesses: 0,
            page_shift: config.page_shift,
            transfer_bytes_max: config.transfer_bytes_max,
            write_flags: tenmil_base::RequestFlags::NONE,
            is_stopping: false,
            is_on_hold: false,
        };
        queue.renew();
        Ok(queue)
    }

    /// Completion queue identifier, which identifies the queue.
    pub fn cqid(&self) -> u16 {
        self.completion.id
    }

    /// Adds an empty submission queue.
    pub fn add_submission_queue(
        &mut self,
        sqid: u16,
        entries: u32,
        address: u64,
    ) -> Result<(), AccessFault> {
        let queue = SubmissionQueue::open(&mut self.host, sqid, entries, address)?;
        self.doorbells.clear_tail(sqid);
        // Nearly every queue has one submission queue; a growing `Vec` would start with capacity for
        // four.
        self.submissions.reserve_exact(1);
        self.submissions.push(queue);
        Ok(())
    }

    /// Identifiers of the submission queues.
    pub fn submission_queues(&self) -> impl Iterator<Item = u16> + '_ {
        self.submissions.iter().map(|queue| queue.id)
    }

    /// Sets the shadow doorbell of submission queue `sqid`, or of the queue's head. Returns an error if
    /// the memory is not accessible, and `Ok(false)` if it is not shared.
    pub fn set_shadow(
        &mut self,
        sqid: Option<u16>,
        doorbell: u64,
        event_index: u64,
    ) -> Result<bool, AccessFault> {
        let Some(shadow) = Shadow::open(&mut self.host, doorbell, event_index)? else {
            return Ok(false);
        };
        match sqid {
            None => self.completion.set_shadow(shadow),
            Some(sqid) => {
                if let Some(queue) = self.submissions.iter_mut().find(|queue| queue.id == sqid) {
                    queue.set_shadow(shadow);
                }
            }
        }
        Ok(true)
    }

    /// Sets the callback that wakes the queue's thread when a queue of the subsystem with a fused pair
    /// waits for a poll of this one.
    pub fn set_waker(&self, waker: WakeFn) {
        self.voice.set_arbiter_waker(waker);
    }

    /// Sets the maximum number of commands fetched from one submission queue at a time (feature 01h).
    pub fn set_burst(&mut self, burst: u32) {
        self.burst = burst.max(1);
    }

    /// Stops or resumes fetching commands. Commands already fetched continue.
    pub fn set_paused(&mut self, is_on_hold: bool) {
        self.is_on_hold = is_on_hold;
    }

    /// Polls the queue: performs a bounded amount of work.
    pub fn turn(&mut self, now: Instant) -> PollStats {
        if self.namespaces.refresh() {
            self.renew();
        }
        let before = self.slots.taken();
        if before == 0 {
            self.traffic.rest(now);
        }
        let mut is_busy = false;
        if !self.areas.is_idle() || self.ring_accesses > 0 {
            is_busy |= self.poll_host_access(now);
            self.retry_waiting(now);
        }
        let mut taken = 0;
        for _ in 0..BURSTS {
            let count = self.take(now);
            if count > 0 && before == 0 {
                self.traffic.work(now);
            }
            taken += count;
            if self.slots.taken() > 0 {
                self.submit(now);
                is_busy |= self.poll(now);
            }
            // A further burst is fetched only if all commands completed at once: the host can process
            // these completions meanwhile.
            if count < self.burst || self.slots.taken() > 0 {
                break;
            }
        }
        let is_pending = self.slots.taken() > 0 || self.ring_accesses > 0;
        is_busy |= taken > 0 || self.posted > 0;
        // A stopped queue does not access host memory anymore.
        if !is_busy && !self.is_stopping {
            is_busy = self.rest();
        }
        PollStats { taken, posted: core::mem::take(&mut self.posted), is_busy, is_pending }
    }

    /// Fetches a burst of commands, if fetching is permitted now. Returns their number.
    #[inline(always)]
    fn take(&mut self, now: Instant) -> u32 {
        let takes_none = self.is_stopping || self.is_on_hold;
        if self.voice.is_held() {
            self.fetch_unblocked(now, takes_none)
        } else if takes_none {
            0
        } else {
            self.fetch(now, None)
        }
    }

    /// Next event for the controller.
    #[inline]
    pub fn next_event(&mut self) -> Option<QueueEvent> {
        self.letters.pop_front()
    }

    /// Completes the command of [`QueueEvent::Reservation`], with the data of a report.
    pub fn complete_reservation(
        &mut self,
        now: Instant,
        ticket: u32,
        end: AdminResult,
        bytes: &[u8],
    ) {
        if let Some((index, area)) = self.areas.find(ticket)
            && area.wait == command_context::WaitReason::Controller
        {
            area.bytes.clear();
            area.bytes.extend_from_slice(bytes);
            self.drive(now, index, job::JobEvent::Decided(end.status, end.result));
        }
    }

    /// Replaces a poll if the caller knows that there is no command.
    #[inline]
    pub fn skip_idle(&mut self, now: Instant) {
        self.traffic.rest(now);
    }

    /// Whether commands have passed through the queue since [`take_traffic`](Self::take_traffic).
    pub fn has_traffic(&self) -> bool {
        self.traffic.commands != [0; 4]
    }

    /// I/O totals since the last call.
    pub fn take_traffic(&mut self, now: Instant) -> IoCounters {
        self.traffic.take(now)
    }

    /// Earliest deadline of the block devices that have requests in flight.
    pub fn wake_at(&self) -> Instant {
        self.directory.wake_at()
    }

    /// Whether events are pending.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.letters.is_empty()
    }

    /// Whether the queue needs a poll even without a command: it has events, or another queue waits for
    /// its acknowledgment.
    #[inline]
    pub fn wants_iteration(&self) -> bool {
        self.has_events() || self.voice.must_ack()
    }

    /// Opens I/O channels for a new namespace snapshot.
    #[cold]
    fn renew(&mut self) {
        let namespaces = self.namespaces.get().clone();
        for trouble in self.directory.update(&namespaces) {
            self.write(QueueEvent::OpenFailed(trouble));
        }
    }

    /// Publishes event indices before the queue goes idle. Returns whether new commands or completion
    /// entries appeared meanwhile.
    #[inline]
    fn rest(&mut self) -> bool {
        self.directory.reap_retired(|channel| self.areas.use_channel(channel));
        let mut has_new_events = false;
        for queue in &mut self.submissions {
            has_new_events |= queue.publish_event_index() && self.held.is_none();
        }
        // The head matters only to a queue that waits for free completion entries; it is then read, and
        // any entries it frees are worth another poll.
        let room = self.completion.room();
        if self.completion.publish_event_index() && room as usize <= self.slots.taken() {
            if self.completion.read_doorbell(&self.doorbells).is_some() {
                self.write(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
            }
            has_new_events |= self.completion.room() > room;
        }
        has_new_events
    }

    /// Queues an event. Excess error events are dropped; the other kinds are bounded by their sources.
    #[cold]
    fn write(&mut self, letter: QueueEvent) {
        if self.letters.len() < EVENTS_MAX || !matches!(letter, QueueEvent::Error(_)) {
            self.letters.push_back(letter);
        }
    }

    /// Stops the queue after a ring access failed.
    #[cold]
    fn break_down(&mut self, fault: AccessFault) {
        if !self.is_stopping {
            self.is_stopping = true;
            self.write(QueueEvent::RingFault(fault));
        }
    }

    #[cold]
    fn report(&mut self, slot: slot::Slot, status: Status) {
        let queue = self.submissions.get(usize::from(slot.submission()));
        let report = ErrorReport {
            sqid: queue.map_or(0xffff, |queue| queue.id),
            cid: slot.cid(),
            opcode: slot.opcode(),
            status,
            lba: slot.lba,
            nsid: self.directory.nsid_of(slot.channel()),
        };
        self.write(QueueEvent::Error(report));
    }
}

impl TrafficCounters {
    /// Counts one command of a class, 1 for writes and 2 for reads.
    #[inline]
    fn count(&mut self, class: usize, bytes: u64) {
        self.commands[class & 3] += 1;
        self.bytes[class & 3] += bytes;
    }

    /// Counts `count` commands of a class that moved `bytes` together.
    #[inline]
    fn add(&mut self, class: usize, count: u32, bytes: u64) {
        self.commands[class & 3] += u64::from(count);
        self.bytes[class & 3] += bytes;
    }

    /// Adds bytes that a Verify command reads from the block device; it does not count as a read command.
    fn add_read_bytes(&mut self, bytes: u64) {
        self.bytes[2] += bytes;
    }

    #[inline]
    fn work(&mut self, now: Instant) {
        self.busy_since.get_or_insert(now);
    }

    #[inline]
    fn rest(&mut self, now: Instant) {
        if let Some(since) = self.busy_since.take() {
            self.busy_ns += now.since(since).ns;
        }
    }

    fn take(&mut self, now: Instant) -> IoCounters {
        let is_working = self.busy_since.is_some();
        self.rest(now);
        self.busy_since = is_working.then_some(now);
        let traffic = IoCounters {
            read_bytes: self.bytes[2],
            written_bytes: self.bytes[1],
            read_commands: self.commands[2],
            write_commands: self.commands[1],
            busy: tenmil_base::Span { ns: self.busy_ns },
        };
        *self = Self { busy_since: self.busy_since, ..Self::default() };
        traffic
    }
}
