//! Namespace as a block device: converts requests to commands on one queue pair.
//!
//! ```text
//!   submit --> fast path: one segment, at most two pages, within all limits ---> queue pair
//!          '-> slow path: any operation, any memory; splits large requests       ^
//!                              '--> parents, children sent as slots become free -'
//!   poll   <-- completions of the queue pair, and of parents after their last child
//! ```

mod command_builder;
mod raw;
#[cfg(test)]
mod tests;
mod view;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Operation, Request, Segment,
};
use tenmil_wire::{Command, IoOpcode};

pub use command_builder::BlockRange;
pub use raw::{CompareAndWrite, RawSubmitError};
pub use view::{BlocksMax, Metadata, NamespaceView, ProtectionChecks};

use crate::data_pointer::FAST_PAGE_BYTES;
use crate::queue_link::QueueState;
use crate::queue_pair::{DataPointers, PointerOf, QueuePair, Transport};
use crate::slot_table::{SlotFlags, tick_of};
use crate::split::SplitTable;
use command_builder::{CommandBuilder, PRINFO_SHIFT, cdw12_flags};

/// Namespace on a dedicated queue pair.
pub struct NamespaceQueue<T: Transport> {
    queue: QueuePair<T>,
    short_way: FastPathParams,
    parents: SplitTable,
    /// Completions of requests that never became a command.
    ready: Vec<IoCompletion>,
    builder: CommandBuilder<T::Pointers>,
    limits: Limits,
    /// A flush has failed for lost writes, and its completion has not been delivered yet.
    is_reporting: bool,
    /// Interrupt vector on which its thread may sleep.
    vector: Option<Box<dyn tenmil_base::InterruptVector>>,
}

/// Data for the one-segment fast path.
#[derive(Clone, Copy, Debug)]
struct FastPathParams {
    /// First qword of a read; that of a write is one less.
    read_word: u64,
    /// Block size, or a number of which no segment is a multiple, if every request must take the slow
    /// path.
    block_bytes: u64,
    /// Bits of a block number above the optimal boundary: requests whose first and last blocks differ in
    /// one of them take the slow path.
    boundary_bits: u64,
    /// PRINFO at its position in CDW12, and all ones if reference tags are block numbers.
    prinfo_bits: u64,
    tag_mask: u64,
    /// No boundary and no protection information.
    is_simple: bool,
    /// Maximum bytes of one command.
    len_bytes_max: u32,
}

/// Table sizes of a namespace queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Maximum requests that are split at the same time.
    pub parents: u16,
    /// Maximum segments of a request, data and metadata together.
    pub segments: u16,
}

impl Default for QueueSizes {
    fn default() -> Self {
        Self { parents: 16, segments: 128 }
    }
}

impl<T: Transport> NamespaceQueue<T> {
    /// Creates a queue for the namespace in `view` over `queue`. `None` if there is no device memory left
    /// for its lists.
    pub fn new(queue: QueuePair<T>, view: NamespaceView, sizes: QueueSizes) -> Option<Self> {
        let depth = queue.depth();
        let lists = queue.transport().create_data_pointers(&view, depth)?;
        let builder = CommandBuilder::new(view, lists);
        let parents = SplitTable::new(usize::from(sizes.parents), usize::from(sizes.segments));
        Some(Self {
            queue,
            short_way: FastPathParams::new(&view, builder.transfer_blocks_max()),
            parents,
            ready: Vec::with_capacity(depth as usize + usize::from(sizes.parents)),
            builder,
            limits: view.limits(depth, sizes.segments),
            is_reporting: false,
            vector: None,
        })
    }

    /// Sets the interrupt vector with which the queue pair was created. Without it, a thread cannot sleep
    /// while commands are in flight.
    #[must_use]
    pub fn with_vector(mut self, vector: Box<dyn tenmil_base::InterruptVector>) -> Self {
        self.vector = Some(vector);
        self
    }

    /// Underlying queue pair: statistics, injections and state.
    pub fn queue(&self) -> &QueuePair<T> {
        &self.queue
    }

    /// Like [`queue`](Self::queue), for error injection and for arming interrupts.
    pub fn queue_mut(&mut self) -> &mut QueuePair<T> {
        &mut self.queue
    }

    /// Sets a new namespace size. Commands in flight are not affected.
    pub fn set_block_count(&mut self, block_count: u64) {
        self.builder.view.block_count = block_count;
        self.limits.block_count = block_count;
    }

    /// Discards completions, for a queue that is about to be dropped. Returns true once no command is in
    /// flight, so that the device no longer accesses memory of a request. Unsent parts of split requests
    /// are never sent.
    ///
    /// The drop itself cannot wait. The owner of the queue as an [`IoChannel`] calls this until it
    /// returns true, while the controller is polled: recovery ends commands that the device never
    /// completes.
    pub fn drain_discarding_completions(&mut self, now: Instant) -> bool {
        let mut nowhere = CompletionBatch::with_capacity(ABANDONED_AT_ONCE);
        self.queue.flush();
        self.queue.poll_with_tracker(now, &mut nowhere, &mut self.parents);
        self.queue.in_flight() == 0
    }

    /// Stops sending parts of split requests: these end with [`IoStatus::ABORTED_BY_HOST`], once their
    /// parts in flight have completed.
    pub fn abort_unsent(&mut self) {
        while self.parents.has_unsent() {
            self.ready.extend(self.parents.fail_oldest_unsent(IoStatus::ABORTED_BY_HOST));
        }
    }

    /// Submits the leading requests that match the first one and qualify for the shortest path: reads and
    /// writes with equal block counts, each with one segment within a page, for a namespace without
    /// boundary and protection information, on a queue without work after each command. Returns their
    /// number. The common properties are checked once.
    ///
    /// Not inlined: the separate loop keeps more of its values in registers.
    #[inline(never)]
    fn submit_run(&mut self, tick: u32, requests: &[Request], segments: &[Segment]) -> usize {
        let Self { queue, builder, short_way, .. } = self;
        let Some(first) = requests.first() else { return 0 };
        let Some(last_block) = first.blocks.checked_sub(1) else { return 0 };
        let len_bytes = u64::from(first.blocks).saturating_mul(short_way.block_bytes);
        let Some(len_bytes) = u32::try_from(len_bytes).ok().filter(|len| *len <= FAST_PAGE_BYTES)
        else {
            return 0;
        };
        let Some(segment) = segments.get(first.segment_first as usize) else { return 0 };
        let pointer_to = builder.lists.contiguous_run(Segment { len_bytes, ..*segment });
        let (read_word, nlb) = (short_way.read_word, u64::from(last_block));
        let request_shape_key = request_shape_key(first.blocks, 1, 0);
        queue.enqueue_each(
            tick,
            requests,
            #[inline(always)]
            |request| {
                // One comparison covers both: no flags, and a read or a write.
                let kind = u16::from(request.operation as u8) | u16::from(request.flags.0) << 8;
                let Request { blocks, segment_count, metadata_count, .. } = *request;
                if request_shape_key
                    != self::request_shape_key(blocks, segment_count, metadata_count)
                    || kind > Operation::Write as u16
                {
                    return None;
                }
                let pointer = pointer_to(*segments.get(request.segment_first as usize)?)?;
                let first_word = read_word - u64::from(kind);
                let command = Command([first_word, 0, 0, 0, 0, request.lba, nlb, 0]);
                Some((request.token, command, pointer))
            },
        )
    }

    /// Submits one request on the fast or the slow path. Returns false if the queue is full.
    #[inline(never)]
    fn submit_one(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.fast_path_command(request, segments) {
            Some(entry) => {
                let tick = tick_of(now);
                let lists = Some(&mut self.builder.lists);
                self.queue.enqueue(tick, request.token, SlotFlags::NONE, entry, lists).is_some()
            }
            None => self.submit_slow_path(now, request, segments),
        }
    }

    /// Command for a read or write with one segment within all limits.
    fn fast_path_command(
        &self,
        request: &Request,
        segments: &[Segment],
    ) -> Option<(Command, PointerOf<T>)> {
        let way = &self.short_way;
        let Request { lba, blocks, operation, flags, .. } = *request;
        let counts = (request.segment_count, request.metadata_count);
        if operation as u8 > Operation::Write as u8 || counts != (1, 0) {
            return None;
        }
        let nlb = u64::from(blocks.checked_sub(1)?);
        let segment = *segments.get(request.segment_first as usize)?;
        if u64::from(segment.len_bytes) != u64::from(blocks).wrapping_mul(way.block_bytes)
            || segment.len_bytes > way.len_bytes_max
            || (lba ^ lba.wrapping_add(nlb)) & way.boundary_bits != 0
        {
            return None;
        }
        let pointer = self.builder.lists.pointer_to_contiguous(segment)?;
        let dword12 = nlb | u64::from(cdw12_flags(flags)) | way.prinfo_bits;
        let first_word = way.read_word - u64::from(operation as u8);
        let command = Command([first_word, 0, 0, 0, 0, lba, dword12, lba & way.tag_mask]);
        Some((command, pointer))
    }

    /// Fails a request on a dead queue. Returns false if the queue is not dead, or the completion list is
    /// full.
    #[cold]
    fn complete_if_dead(&mut self, token: u64) -> bool {
        self.queue.state() == QueueState::Dead
            && self.complete_without_command(token, IoStatus::PATH_ERROR)
    }

    /// Submits a request on the slow path. Returns false if the queue is full.
    #[cold]
    fn submit_slow_path(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.queue.state() {
            QueueState::Running => {}
            QueueState::Quiescing
            | QueueState::Frozen
            | QueueState::Released
            | QueueState::Dead => return false,
        }
        if request.operation == Operation::Flush && self.has_lost_writes() {
            return self.fail_flush_for_lost_writes(request.token);
        }
        let Some(own) = segments_of(request, segments) else {
            return self.complete_without_command(request.token, IoStatus::INVALID_FIELD);
        };
        if own.len() > usize::from(self.limits.segments_max) {
            return self.complete_without_command(request.token, IoStatus::INVALID_FIELD);
        }
        if let Err(status) = self.builder.check_request(request, own) {
            return self.complete_without_command(request.token, status);
        }
        let Some(index) = self.queue.next_index() else { return false };
        match self.builder.next_command(index, request, own, 0) {
            Err(status) => self.complete_without_command(request.token, status),
            Ok((entry, blocks)) if blocks >= request.blocks => {
                let tick = tick_of(now);
                let lists = Some(&mut self.builder.lists);
                self.queue.enqueue(tick, request.token, SlotFlags::NONE, entry, lists).is_some()
            }
            Ok(_) => {
                let is_taken = self.parents.begin(request, own).is_some();
                self.send_children(now);
                is_taken
            }
        }
    }

    /// Whether a flush submitted now has to fail: writes before it may be lost with the controller's
    /// cache, or another flush has failed for that and its completion is not delivered yet.
    fn has_lost_writes(&self) -> bool {
        let has_cache = self.limits.durability == Durability::VolatileCache;
        has_cache && (self.is_reporting || self.queue.has_lost_writes())
    }

    fn fail_flush_for_lost_writes(&mut self, token: u64) -> bool {
        let is_answered = self.complete_without_command(token, IoStatus::WRITE_FAULT);
        if is_answered {
            self.queue.note_lost_writes_reported();
            self.is_reporting = true;
        }
        is_answered
    }

    /// Completes a request without a command. Returns false if the completion list is full.
    fn complete_without_command(&mut self, token: u64, status: IoStatus) -> bool {
        let has_space = self.ready.len() < self.limits.depth_max as usize;
        if has_space {
            self.ready.push(IoCompletion { token, status, result: 0 });
        }
        has_space
    }

    /// Sends children as long as there are free slots.
    fn send_children(&mut self, now: Instant) {
        while let Some(rest) = self.parents.next_unsent() {
            let Some(index) = self.queue.next_index() else { return };
            if self.queue.state() != QueueState::Running {
                return;
            }
            let parent = rest.parent as u64;
            match self.builder.next_command(index, rest.request, rest.segments, rest.sent_blocks) {
                Ok((entry, blocks)) => {
                    let tick = tick_of(now);
                    let lists = Some(&mut self.builder.lists);
                    if self.queue.enqueue(tick, parent, SlotFlags::CHILD, entry, lists).is_none() {
                        return;
                    }
                    self.parents.record_sent_child(blocks);
                }
                Err(status) => self.ready.extend(self.parents.fail_oldest_unsent(status)),
            }
        }
    }

    /// Sends children, and delivers completions of requests without a command.
    #[cold]
    fn poll_unsent_children(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        if self.queue.state() == QueueState::Dead {
            while self.parents.has_unsent() {
                self.ready.extend(self.parents.fail_oldest_unsent(IoStatus::PATH_ERROR));
            }
        }
        self.send_children(now);
        self.queue.flush();
        let count = self.ready.len().min(completions.remaining());
        self.ready.drain(..count).for_each(|answer| completions.push(answer));
        self.is_reporting &= !self.ready.is_empty();
        count
    }
}

impl<T: Transport + Send> IoChannel for NamespaceQueue<T>
where
    T::Pointers: Send,
{
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.check_state(now);
        let mut has_runs = self.short_way.is_simple && !self.queue.is_eager();
        let mut taken = 0;
        while taken < requests.len() {
            if has_runs {
                let (tick, rest) = (tick_of(now), &requests[taken..]);
                let run = self.submit_run(tick, rest, segments);
                // If not even one request qualified, the following ones hardly will.
                has_runs = run > 0;
                taken += run;
            }
            // The run ended at a special request, or the queue is full.
            let Some(request) = requests.get(taken) else { break };
            let is_taken = self.submit_one(now, request, segments);
            if !is_taken && !self.complete_if_dead(request.token) {
                break;
            }
            taken += 1;
        }
        taken
    }

    fn flush_submissions(&mut self) {
        self.queue.flush();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.queue.poll_with_tracker(now, completions, &mut self.parents);
        if self.parents.has_unsent() || !self.ready.is_empty() {
            return count + self.poll_unsent_children(now, completions);
        }
        count
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        let stats = self.queue.stats();
        DoorbellStats {
            submission: stats.submission_doorbells,
            completion: stats.completion_doorbells,
            registers: stats.doorbell_registers,
            cmb_commands: stats.cmb_commands,
        }
    }
}

impl<T: Transport + Send> ChannelWakeup for NamespaceQueue<T>
where
    T::Pointers: Send,
{
    fn wake_at(&self) -> Instant {
        // A child can be sent and no other is in flight whose completion would trigger it.
        let can_send =
            self.queue.state() == QueueState::Running && self.queue.next_index().is_some();
        let has_child = self.parents.has_unsent() && self.queue.in_flight() == 0 && can_send;
        if self.ready.is_empty() && !has_child { self.queue.wake_at() } else { Instant::default() }
    }

    fn wake_source(&self) -> tenmil_base::WakeSource<'_> {
        let descriptor = self.vector.as_ref().map(|vector| vector.descriptor());
        descriptor.map_or(tenmil_base::WakeSource::None, tenmil_base::WakeSource::Descriptor)
    }

    fn arm(&mut self) -> bool {
        let Some(vector) = &mut self.vector else { return true };
        let mut is_signalled = false;
        let armed = crate::arm_interrupt(&mut self.queue, || is_signalled = vector.unmask());
        // No interrupt announces requests completed without a command, or unsent children.
        let has_leftovers = self.wake_at() == Instant::default();
        !is_signalled || armed == crate::ArmResult::Pending || has_leftovers
    }

    fn disarm(&mut self) {
        if let Some(vector) = &mut self.vector {
            vector.mask();
        }
    }
}

impl<T: Transport> Drop for NamespaceQueue<T> {
    /// Frees the list memory, unless the device may still read it; then it is leaked. The same holds for
    /// the memory of requests, unless the queue was [drained](NamespaceQueue::drain_discarding_completions) before.
    fn drop(&mut self) {
        if self.queue.in_flight() == 0 {
            self.builder.lists.release();
        }
    }
}

impl FastPathParams {
    fn new(view: &NamespaceView, transfer_blocks_max: u32) -> Self {
        let boundary = u64::from(view.optimal_boundary_blocks);
        let block_bytes = u64::from(view.block_bytes());
        // MDTS counts pages in powers of two, so two pages are always within it. Other cases, which may
        // need a division, are left to the slow path.
        let is_open = view.metadata_bytes() == 0
            && view.page_bytes == FAST_PAGE_BYTES
            && u64::from(transfer_blocks_max) * block_bytes >= 2 * u64::from(FAST_PAGE_BYTES)
            && (boundary == 0 || boundary.is_power_of_two());
        let read = Command::new(IoOpcode::Read.code()).with_nsid(view.nsid);
        Self {
            read_word: read.0[0],
            block_bytes: if is_open { block_bytes } else { 1 << 40 },
            boundary_bits: if boundary == 0 { 0 } else { !(boundary - 1) },
            prinfo_bits: u64::from(view.protection.prinfo()) << PRINFO_SHIFT,
            tag_mask: if view.protection.reference_is_lba { u64::from(u32::MAX) } else { 0 },
            is_simple: boundary == 0 && view.protection == ProtectionChecks::default(),
            len_bytes_max: transfer_blocks_max.saturating_mul(view.block_bytes()),
        }
    }
}

/// Maximum completions discarded by one call of [`NamespaceQueue::drain_discarding_completions`].
const ABANDONED_AT_ONCE: usize = 64;

const _: () = assert!(
    Operation::Read as u8 == 0
        && Operation::Write as u8 == 1
        && IoOpcode::Read.code() - 1 == IoOpcode::Write.code(),
    "the first two operations count up as their opcodes count down"
);

/// Common properties of the requests of a run in one word. The three fields are adjacent, so it is also
/// loaded as one word.
#[inline(always)]
fn request_shape_key(blocks: u32, segment_count: u16, metadata_count: u16) -> u64 {
    u64::from(blocks) | u64::from(segment_count) << 32 | u64::from(metadata_count) << 48
}

/// Segments of a request, data first, if they are within the table.
fn segments_of<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    let first = request.segment_first as usize;
    let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
    if count == 0 { Some(&[]) } else { segments.get(first..first.checked_add(count)?) }
}
