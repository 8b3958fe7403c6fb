//! Executor: runs the I/O commands of one queue, whichever transport they arrive on.
//!
//! ```text
//!   begin ─▶ decode ─┬─ one request ───────▶ batch ─▶ submit ──┐
//!                    └─ job in a command context ◀─ drive ◀─┐  │
//!                             │ data: lists, bytes          │  ▼
//!                             └────────────────────────────▶│ block device
//!   finished ◀─ complete ◀──────────────── poll ◀───────────┴──┘
//! ```
//!
//! The owner begins commands under a [`CommandTag`] and takes finished ones: [`Queue`](crate::queue::Queue) from
//! and into rings in memory, a connection from and into its stream. An executor is `Send`, owns an I/O
//! channel to every block device, and reads an immutable snapshot of the namespaces, so it may run on any
//! reactor. A call performs bounded work and never blocks.
//!
//! The fast path is a read or write whose data are one segment. It has no allocation, no division and, per
//! command, no dynamic call: look up the namespace by index, check, batch. Commands alike are begun as a
//! run and finish as a run. Every other command is a job in a command context.

use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tenmil_base::{
    CompletionBatch, HostMemory, Instant, MediumMemory, RequestFlags, Segment, Span,
};
use tenmil_wire::Status;

use crate::bounce_pool::BouncePool;
use crate::controller::WakeFn;
use crate::controller::transport_interface::{AdminResult, ErrorReport, IoTotals};
use crate::io_stats::QueueIoStats;
use crate::namespace::{NamespaceSnapshot, VersionedValueReader};
use crate::queue::QueueEvent;
use abort::PreemptedWrites;
use command_context::ContextPool;
use completion_counter::StartTime;
pub(crate) use completion_counter::{CountReleases, NotCounted};
use fused::{FirstFusedHalf, PendingFusedPair};
pub use fused_arbiter::FusedArbiter;
use fused_arbiter::FusedParticipant;
use namespace_table::NamespaceTable;

mod abort;
mod channel;
mod command_context;
mod completion_counter;
mod decode;
mod fast_path;
mod fused;
mod fused_arbiter;
mod job;
mod job_driver;
mod namespace_table;
mod segment_memory;
mod slot_table;
#[cfg(test)]
mod tests;
mod wakeup;

pub(crate) use fast_path::low_16_bits;
pub use segment_memory::SegmentMemory;
pub(crate) use slot_table::SlotTable;

/// Executor of the commands of one queue.
#[derive(Debug)]
pub struct Executor<H: HostMemory> {
    /// Memory that the data pointers of commands refer to.
    pub(crate) host: H,
    fused_participant: FusedParticipant,
    /// The volatile write cache is disabled (feature 06h): every write is FUA.
    is_write_through: Arc<AtomicBool>,
    namespaces: VersionedValueReader<NamespaceSnapshot>,
    namespace_table: NamespaceTable,
    slots: SlotTable,
    completions: CompletionBatch,
    finished: Vec<FinishedCommand>,
    page_bytes: u64,
    /// Time of the current iteration.
    iteration_start: StartTime,
    /// Totals that [`take_io_totals`](Self::take_io_totals) has returned.
    reported: IoTotals,
    contexts: ContextPool,
    /// Contexts that wait for a bounce buffer, oldest first.
    buffer_waiters: VecDeque<u16>,
    /// Contexts whose request was rejected because the block device was full, oldest first.
    capacity_waiters: VecDeque<u16>,
    /// First command of a fused pair of each stream, while the second one is awaited.
    first_halves: Vec<Option<FirstFusedHalf>>,
    pair: Option<PendingFusedPair>,
    /// Begun commands that do not execute yet: halves of fused pairs that wait.
    paused: usize,
    /// Namespace whose commands may not begin, between [`bar_exclusive_namespace`](Self::bar_exclusive_namespace) and
    /// [`unbar_and_acknowledge_exclusivity`](Self::unbar_and_acknowledge_exclusivity).
    blocked_nsid: Option<u32>,
    /// Namespace of which another queue awaits the acknowledgment, between the same two calls.
    quiesce_nsid: Option<u32>,
    events: VecDeque<QueueEvent>,
    /// What preemptions wait for.
    preempted: Vec<PreemptedWrites>,
    buffers: BouncePool,
    /// Memory for one access, allocated when the first command gets a context.
    scratch: Box<[u8]>,
    page_shift: u8,
    transfer_bytes_max: u32,
    /// Smallest read that may complete with its data in the medium's memory.
    in_place_bytes_min: u32,
    write_flags: RequestFlags,
    is_stopping: bool,
}

/// Identity of a command, chosen by the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandTag {
    /// Stream that the command belongs to, counted from 0. The halves of a fused pair are consecutive
    /// commands of one stream.
    pub stream: u16,
    /// Identifier within the stream.
    pub id: u16,
}

/// Where the data of a command lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandDataLocation {
    /// In host memory, described by the command's PRPs or SGL.
    Pointers,
    /// In this segment of a [`SegmentMemory`], which the owner moves from or to the host. Its length is the
    /// one that the host has specified, 0 if the command has no data. The command's data pointer
    /// is not evaluated. Read, Write and Compare fail with Data SGL Length Invalid unless it is the
    /// length of their blocks; other commands if it is shorter than what they need. What a command does
    /// not fill of a longer segment becomes zeroes.
    Segment(Segment),
}

/// Command that has completed.
#[derive(Clone, Debug)]
pub struct FinishedCommand {
    /// Its tag.
    pub tag: CommandTag,
    /// Its status.
    pub status: Status,
    /// Dword 0 of its completion.
    pub result: u32,
    /// For a successful read: memory in which its data begin, if they are not in its segment. Only after
    /// [`Executor::allow_in_place_reads`].
    pub medium: Option<MediumMemory>,
    opcode: u8,
    nsid: u32,
    lba: u64,
}

/// Configuration of an executor.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorConfig {
    /// A host memory page has `1 << page_shift` bytes: CC.MPS + 12.
    pub page_shift: u8,
    /// Largest transfer in bytes (MDTS).
    pub transfer_bytes_max: u32,
    /// Maximum commands in flight: at least 2, for a fused pair.
    pub in_flight_max: u16,
    /// Of these, commands that may have a command context: at least 2.
    pub contexts_max: u16,
}

/// State that an executor shares with the rest of its controller.
#[derive(Clone, Debug)]
pub struct ExecutorContext {
    /// Fused-command arbiter: one for all queues of a subsystem.
    pub fused_arbiter: Arc<FusedArbiter>,
    /// The volatile write cache is disabled (feature 06h): every write is FUA.
    pub is_write_through: Arc<AtomicBool>,
    /// Bounce buffers for data that a block device cannot access in host memory.
    pub buffers: BouncePool,
    /// Where commands are counted, if they are.
    pub io_stats: Option<QueueIoStats>,
}

/// Events kept for the controller. Errors beyond this number in one poll lose their details.
const EVENTS_MAX: usize = 64;

/// The lower four bits of a context's access identifier are the index of a copy access, or this value for
/// its list.
const TICKET_LIST: u32 = 0xf;

impl<H: HostMemory> Executor<H> {
    /// Creates an executor. `host` is a separate channel to host memory with its own access identifiers,
    /// of which those below `1 << 30` belong to the executor.
    pub fn new(
        host: H,
        config: &ExecutorConfig,
        shared: ExecutorContext,
        namespaces: VersionedValueReader<NamespaceSnapshot>,
    ) -> Self {
        let in_flight_max = config.in_flight_max.max(2);
        let contexts_max = config.contexts_max.clamp(2, in_flight_max);
        let mut executor = Self {
            host,
            fused_participant: shared.fused_arbiter.add_participant(),
            is_write_through: shared.is_write_through,
            namespaces,
            namespace_table: NamespaceTable::new(in_flight_max.into(), shared.io_stats),
            slots: SlotTable::new(in_flight_max),
            completions: CompletionBatch::with_capacity(0),
            finished: Vec::new(),
            page_bytes: 1 << config.page_shift,
            iteration_start: StartTime::default(),
            reported: IoTotals::default(),
            contexts: ContextPool::new(contexts_max, config.transfer_bytes_max),
            buffer_waiters: VecDeque::with_capacity(contexts_max.into()),
            capacity_waiters: VecDeque::with_capacity(contexts_max.into()),
            first_halves: Vec::new(),
            pair: None,
            paused: 0,
            blocked_nsid: None,
            quiesce_nsid: None,
            events: VecDeque::new(),
            preempted: Vec::new(),
            buffers: shared.buffers,
            scratch: Box::default(),
            page_shift: config.page_shift,
            transfer_bytes_max: config.transfer_bytes_max,
            in_place_bytes_min: u32::MAX,
            write_flags: RequestFlags::NONE,
            is_stopping: false,
        };
        executor.apply_namespace_snapshot();
        executor
    }

    /// Adds a stream of commands, and returns its number.
    pub fn add_command_stream(&mut self) -> u16 {
        // Nearly every queue has one; a growing `Vec` would start with capacity for four.
        self.first_halves.reserve_exact(1);
        self.first_halves.push(None);
        low_16_bits(self.first_halves.len() as u64 - 1)
    }

    /// Removes a stream that has no commands. The numbers of those after it decrease by one.
    pub(crate) fn remove_command_stream(&mut self, stream: u16) {
        self.first_halves.remove(stream.into());
        for number in self.slots.iter().map(|(number, _)| number).collect::<Vec<_>>() {
            let slot = self.slots.get_mut(number);
            slot.set_stream(slot.stream() - u16::from(slot.stream() > stream));
        }
    }

    /// Allows large reads to complete with their data in the [memory of the
    /// medium](FinishedCommand::medium), if it has one. There they change when the blocks are written, so
    /// the owner must not rely on reading the same data twice.
    pub fn allow_in_place_reads(&mut self) {
        self.in_place_bytes_min = fast_path::IN_PLACE_BYTES_MIN;
    }

    /// Sets the callback that wakes the executor's thread when a queue of the subsystem with a fused pair
    /// waits for a poll of this one.
    pub fn set_waker(&self, waker: WakeFn) {
        self.fused_participant.set_waker(waker);
    }

    /// Begins an iteration: applies what has changed.
    #[inline(always)]
    pub fn begin_iteration(&mut self, now: Instant) {
        self.iteration_start = StartTime::new(now);
        if self.namespaces.refresh() {
            self.apply_namespace_snapshot();
        }
    }

    /// Before commands are begun in an iteration.
    #[inline(always)]
    pub fn begin_batch(&mut self) {
        // An independent flag that orders no other memory access.
        let is_write_through = self.is_write_through.load(Ordering::Relaxed);
        self.write_flags = if is_write_through { RequestFlags::FUA } else { RequestFlags::NONE };
    }

    /// Commands in flight.
    #[inline]
    pub fn in_flight_count(&self) -> usize {
        self.slots.allocated_count()
    }

    /// Commands that may be begun now.
    #[inline]
    pub fn free_count(&self) -> usize {
        self.slots.free_count()
    }

    /// Whether commands are in contexts, so that [`retry_waiting`](Self::retry_waiting) is due.
    #[inline]
    pub fn has_commands_in_contexts(&self) -> bool {
        !self.contexts.is_idle()
    }

    /// Whether a fused pair has begun. Until it has finished nothing else can begin.
    #[inline]
    pub fn has_started_fused_pair(&self) -> bool {
        self.pair.is_some()
    }

    /// Whether commands have finished that were not taken.
    #[inline]
    pub fn has_finished_commands(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Commands that have finished since the last call, oldest first. Give the list back, emptied, to
    /// [`recycle_finished_list`](Self::recycle_finished_list).
    pub fn take_finished_commands(&mut self) -> Vec<FinishedCommand> {
        core::mem::take(&mut self.finished)
    }

    /// Gives the memory of a list of finished commands back.
    pub fn recycle_finished_list(&mut self, mut finished: Vec<FinishedCommand>) {
        if self.finished.is_empty() {
            finished.clear();
            self.finished = finished;
        }
    }

    /// Next event for the controller.
    #[inline]
    pub fn next_event(&mut self) -> Option<QueueEvent> {
        self.events.pop_front()
    }

    /// Completes the command of [`QueueEvent::Reservation`], with the data of a report.
    pub fn complete_reservation_command(
        &mut self,
        now: Instant,
        ticket: u32,
        end: AdminResult,
        bytes: &[u8],
    ) {
        if let Some((index, context)) = self.contexts.find(ticket)
            && context.wait == command_context::WaitReason::Controller
        {
            context.bytes.clear();
            context.bytes.extend_from_slice(bytes);
            self.drive_job(now, index, job::JobEvent::ControllerCompleted(end.status, end.result));
        }
    }

    /// I/O totals since the last call.
    pub fn take_io_totals(&mut self) -> IoTotals {
        let totals = self.namespace_table.io_totals();
        let before = core::mem::replace(&mut self.reported, totals);
        totals.since(&before)
    }

    /// Logical block size of a namespace in bytes.
    pub fn block_size(&self, nsid: u32) -> Option<u32> {
        self.namespaces.get().get(nsid).map(|namespace| 1 << namespace.block_shift)
    }

    /// Counts commands for a namespace that waited for a rate limit before they began, and the sum of the
    /// times that they waited.
    pub fn count_limit_wait(&self, nsid: u32, count: u64, time: Span) {
        self.namespace_table.count_limit_wait(nsid, count, time);
    }

    /// Earliest deadline of the block devices that have requests in flight.
    pub fn wake_at(&self) -> Instant {
        self.namespace_table.wake_at()
    }

    /// Whether events are pending.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether an iteration is needed even without a command: there are events, or another queue waits for
    /// an acknowledgment.
    #[inline]
    pub fn wants_iteration(&self) -> bool {
        self.has_events() || self.fused_participant.must_acknowledge()
    }

    /// Opens I/O channels for a new namespace snapshot.
    #[cold]
    fn apply_namespace_snapshot(&mut self) {
        let namespaces = self.namespaces.get().clone();
        for error in self.namespace_table.update(&namespaces) {
            self.push_event(QueueEvent::OpenFailed(error));
        }
    }

    /// Closes what is not used anymore, in an iteration without work.
    #[inline]
    pub fn close_retired_channels(&mut self) {
        self.namespace_table
            .close_retired_if_idle(|channel| self.contexts.is_channel_in_use(channel));
    }

    /// Queues an event. Excess error events are dropped; the other kinds are bounded by their sources.
    #[cold]
    pub(crate) fn push_event(&mut self, event: QueueEvent) {
        if self.events.len() < EVENTS_MAX || !matches!(event, QueueEvent::Error(_)) {
            self.events.push_back(event);
        }
    }

    /// Finishes a command: frees its slot and queues its result, unless the executor is stopping.
    fn complete_command(&mut self, index: u16, status: Status, result: u32) {
        let slot = self.slots.release(index);
        // What a stopped queue discards is no result that a host sees.
        if !self.is_stopping
            && let Some(counter) = self.namespace_table.command_counter(&slot, self.iteration_start)
        {
            counter.count_command(&slot, status);
        }
        if !status.is_success() && slot.opcode() == tenmil_wire::IoOpcode::Flush.code() {
            self.namespace_table.revoke_cache_instance(slot.channel());
        }
        let tag = CommandTag { stream: slot.stream(), id: slot.id() };
        let nsid = self.namespace_table.nsid_of(slot.channel());
        let (opcode, lba) = (slot.opcode(), slot.lba);
        let medium = None;
        self.finished.push(FinishedCommand { tag, status, result, medium, opcode, nsid, lba });
    }
}

impl FinishedCommand {
    /// Report of a failed command for the error log, with the identifiers that its host knows.
    pub fn error_report(&self, sqid: u16, cid: u16) -> Option<ErrorReport> {
        let Self { status, opcode, nsid, lba, .. } = *self;
        let is_failed = !status.is_success();
        is_failed.then_some(ErrorReport { sqid, cid, opcode, status, lba, nsid })
    }
}
