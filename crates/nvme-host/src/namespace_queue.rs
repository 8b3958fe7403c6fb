//! Namespace as a block device: converts requests to commands on one queue pair.
//!
//! ```text
//!   submit --> fast path: one segment, at most two pages, within all limits ---> queue pair
//!          '-> slow path: any operation, any memory; splits large requests       ^
//!                              '--> parents, children sent as slots become free -'
//!   poll   <-- completions of the queue pair, and of parents after their last child
//! ```

mod commands;
mod raw;
#[cfg(test)]
mod tests;
mod view;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Dma, Doorbell, DoorbellStats, Durability, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, Request, Segment,
};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, IoOpcode};

pub use commands::BlockRange;
pub use raw::{CompareAndWrite, RawSubmitError};
pub use view::{BlocksMax, Metadata, NamespaceView, ProtectionChecks};

use crate::data_pointer::{ListPool, SglSupport, contiguous};
use crate::queue_link::QueueState;
use crate::queue_pair::QueuePair;
use crate::slot::{SlotFlags, tick_of};
use crate::split::SplitTable;
use commands::{CommandBuilder, PRINFO_SHIFT, flag_bits};

/// Namespace on a dedicated queue pair.
pub struct NamespaceQueue<D: Dma, B: Doorbell> {
    queue: QueuePair<D, B>,
    dma: D,
    short_way: FastPath,
    parents: SplitTable,
    /// Completions of requests that never became a command.
    ready: Vec<IoCompletion>,
    builder: CommandBuilder<D>,
    limits: Limits,
    /// A flush has failed for lost writes, and its completion has not been delivered yet.
    is_reporting: bool,
    /// Interrupt vector on which its thread may sleep.
    vector: Option<Box<dyn tenmil_base::InterruptVector>>,
}

/// Data for the one-segment fast path.
#[derive(Clone, Copy, Debug)]
struct FastPath {
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
    is_plain: bool,
    /// Contiguous memory is described by an SGL data block, not by PRPs.
    is_sgl: bool,
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

impl<D: Dma, B: Doorbell> NamespaceQueue<D, B> {
    /// Creates a queue for the namespace in `view` over `queue`. `None` if there is no device memory left
    /// for its lists.
    pub fn new(
        dma: &D,
        queue: QueuePair<D, B>,
        view: NamespaceView,
        sizes: QueueSizes,
    ) -> Option<Self> {
        let depth = queue.depth();
        let transfer_bytes_max =
            if view.transfer_bytes_max == 0 { u32::MAX } else { view.transfer_bytes_max };
        let lists = ListPool::allocate(dma, depth, transfer_bytes_max, view.page_bytes, view.sgl)?;
        let builder = CommandBuilder::new(view, lists);
        let parents = SplitTable::new(usize::from(sizes.parents), usize::from(sizes.segments));
        Some(Self {
            queue,
            dma: dma.clone(),
            short_way: FastPath::new(&view, builder.transfer_blocks_max()),
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
    pub fn queue(&self) -> &QueuePair<D, B> {
        &self.queue
    }

    /// Like [`queue`](Self::queue), for error injection and for arming interrupts.
    pub fn queue_mut(&mut self) -> &mut QueuePair<D, B> {
        &mut self.queue
    }

    /// Sets a new namespace size. Commands in flight are not affected.
    pub fn resize(&mut self, block_count: u64) {
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
    pub fn drain(&mut self, now: Instant) -> bool {
        let mut nowhere = CompletionBatch::with_capacity(ABANDONED_AT_ONCE);
        self.queue.flush();
        self.queue.poll_with(now, &mut nowhere, &mut self.parents);
        self.queue.in_flight() == 0
    }

    /// Stops sending parts of split requests: these end with [`IoStatus::ABORTED_BY_HOST`], once their
    /// parts in flight have completed.
    pub fn abort_unsent(&mut self) {
        while self.parents.has_unsent() {
            self.ready.extend(self.parents.fail_unsent(IoStatus::ABORTED_BY_HOST));
        }
    }

    /// Submits the leading requests that match the first one and qualify for the shortest path: reads and
    /// writes with equal block counts, each with one segment within a page, for a namespace without
    /// boundary and protection information, on a queue without work after each command. Returns their
    /// number. The common properties are checked once.
    ///
    /// Not inlined: the separate loop keeps more of its values in registers. There is one loop for SGLs
    /// and one for PRPs, whose second entry is always zero.
    #[inline(never)]
    fn submit_run<const IS_SGL: bool>(
        &mut self,
        tick: u32,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let Self { queue, dma, short_way, .. } = self;
        let Some(first) = requests.first() else { return 0 };
        let Some(last_block) = first.blocks.checked_sub(1) else { return 0 };
        let len_bytes = u64::from(first.blocks).saturating_mul(short_way.block_bytes);
        let Some(len_bytes) = u32::try_from(len_bytes).ok().filter(|len| *len <= PAGE_BYTES) else {
            return 0;
        };
        let Some(segment) = segments.get(first.segment_first as usize) else { return 0 };
        let iova_of = dma.iovas(Segment { len_bytes, ..*segment });
        let (read_word, nlb) = (short_way.read_word, u64::from(last_block));
        let second = if IS_SGL { u64::from(len_bytes) } else { 0 };
        let likeness = likeness(first.blocks, 1, 0);
        queue.enqueue_each(tick, requests, |request| {
            // One comparison covers both: no flags, and a read or a write.
            let kind = u16::from(request.operation as u8) | u16::from(request.flags.0) << 8;
            let Request { blocks, segment_count, metadata_count, .. } = *request;
            if likeness != self::likeness(blocks, segment_count, metadata_count)
                || kind > Operation::Write as u16
            {
                return None;
            }
            let iova = iova_of(*segments.get(request.segment_first as usize)?)?;
            if iova & PAGE_MASK != 0 {
                return None;
            }
            let first_word = read_word - u64::from(kind);
            Some((request.token, Command([first_word, 0, 0, iova, second, request.lba, nlb, 0])))
        })
    }

    /// Submits one request on the fast or the slow path. Returns false if the queue is full.
    #[inline(never)]
    fn submit_one(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.short_command(request, segments) {
            Some(command) => {
                let tick = tick_of(now);
                self.queue.enqueue(tick, request.token, SlotFlags::NONE, command).is_some()
            }
            None => self.submit_slowly(now, request, segments),
        }
    }

    /// Command for a read or write with one segment within all limits.
    fn short_command(&self, request: &Request, segments: &[Segment]) -> Option<Command> {
        let way = &self.short_way;
        let Request { lba, blocks, operation, flags, .. } = *request;
        let counts = (request.segment_count, request.metadata_count);
        if operation as u8 > Operation::Write as u8 || counts != (1, 0) {
            return None;
        }
        let nlb = u64::from(blocks.checked_sub(1)?);
        let segment = *segments.get(request.segment_first as usize)?;
        if u64::from(segment.len_bytes) != u64::from(blocks).wrapping_mul(way.block_bytes)
            || (lba ^ lba.wrapping_add(nlb)) & way.boundary_bits != 0
        {
            return None;
        }
        let iova = self.dma.iova(segment)?;
        let second = match way.is_sgl {
            true if segment.len_bytes <= way.len_bytes_max => u64::from(segment.len_bytes),
            true => return None,
            false => contiguous(iova, segment.len_bytes, PAGE_MASK)?.1,
        };
        let dword12 = nlb | u64::from(flag_bits(flags)) | way.prinfo_bits;
        let first_word = way.read_word - u64::from(operation as u8);
        Some(Command([first_word, 0, 0, iova, second, lba, dword12, lba & way.tag_mask]))
    }

    /// Fails a request on a dead queue. Returns false if the queue is not dead, or the completion list is
    /// full.
    #[cold]
    fn is_answered_dead(&mut self, token: u64) -> bool {
        self.queue.state() == QueueState::Dead && self.refuse(token, IoStatus::PATH_ERROR)
    }

    /// Submits a request on the slow path. Returns false if the queue is full.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.queue.state() {
            QueueState::Running => {}
            QueueState::Quiescing
            | QueueState::Frozen
            | QueueState::Released
            | QueueState::Dead => return false,
        }
        if request.operation == Operation::Flush && self.has_lost_writes() {
            return self.report_lost_writes(request.token);
        }
        let Some(own) = segments_of(request, segments) else {
            return self.refuse(request.token, IoStatus::INVALID_FIELD);
        };
        if own.len() > usize::from(self.limits.segments_max) {
            return self.refuse(request.token, IoStatus::INVALID_FIELD);
        }
        if let Err(outcome) = self.builder.check(request, own) {
            return self.refuse(request.token, outcome);
        }
        let Some(index) = self.queue.next_index() else { return false };
        match self.builder.next_command(index, request, own, 0) {
            Err(outcome) => self.refuse(request.token, outcome),
            Ok((command, blocks)) if blocks >= request.blocks => {
                let tick = tick_of(now);
                self.queue.enqueue(tick, request.token, SlotFlags::NONE, command).is_some()
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

    fn report_lost_writes(&mut self, token: u64) -> bool {
        let is_answered = self.refuse(token, IoStatus::WRITE_FAULT);
        if is_answered {
            self.queue.report_lost_writes();
            self.is_reporting = true;
        }
        is_answered
    }

    /// Completes a request without a command. Returns false if the completion list is full.
    fn refuse(&mut self, token: u64, outcome: IoStatus) -> bool {
        let has_space = self.ready.len() < self.limits.depth_max as usize;
        if has_space {
            self.ready.push(IoCompletion { token, status: outcome, result: 0 });
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
                Ok((command, blocks)) => {
                    let tick = tick_of(now);
                    if self.queue.enqueue(tick, parent, SlotFlags::CHILD, command).is_none() {
                        return;
                    }
                    self.parents.sent(blocks);
                }
                Err(outcome) => self.ready.extend(self.parents.fail_unsent(outcome)),
            }
        }
    }

    /// Sends children, and delivers completions of requests without a command.
    #[cold]
    fn poll_leftovers(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        if self.queue.state() == QueueState::Dead {
            while self.parents.has_unsent() {
                self.ready.extend(self.parents.fail_unsent(IoStatus::PATH_ERROR));
            }
        }
        self.send_children(now);
        self.queue.flush();
        let count = self.ready.len().min(answers.remaining());
        self.ready.drain(..count).for_each(|answer| answers.push(answer));
        self.is_reporting &= !self.ready.is_empty();
        count
    }
}

impl<D, B> IoChannel for NamespaceQueue<D, B>
where
    D: Dma<Submission: Send, Completion: Send>,
    B: Doorbell + Send,
{
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.check_state(now);
        let mut has_runs = self.short_way.is_plain && !self.queue.is_eager();
        let mut taken = 0;
        while taken < requests.len() {
            if has_runs {
                let (tick, rest) = (tick_of(now), &requests[taken..]);
                let run = match self.short_way.is_sgl {
                    true => self.submit_run::<true>(tick, rest, segments),
                    false => self.submit_run::<false>(tick, rest, segments),
                };
                // If not even one request qualified, the following ones hardly will.
                has_runs = run > 0;
                taken += run;
            }
            // The run ended at a special request, or the queue is full.
            let Some(request) = requests.get(taken) else { break };
            let is_taken = self.submit_one(now, request, segments);
            if !is_taken && !self.is_answered_dead(request.token) {
                break;
            }
            taken += 1;
        }
        taken
    }

    fn flush(&mut self) {
        self.queue.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        let count = self.queue.poll_with(now, answers, &mut self.parents);
        if self.parents.has_unsent() || !self.ready.is_empty() {
            return count + self.poll_leftovers(now, answers);
        }
        count
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        let stats = self.queue.stats();
        let (submission, completion) = (stats.submission_doorbells, stats.completion_doorbells);
        let (registers, cmb_commands) = (stats.doorbell_registers, stats.cmb_commands);
        DoorbellStats { submission, completion, registers, cmb_commands }
    }
}

impl<D, B> ChannelWakeup for NamespaceQueue<D, B>
where
    D: Dma<Submission: Send, Completion: Send>,
    B: Doorbell + Send,
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
        let armed = crate::arm(&mut self.queue, || is_signalled = vector.unmask());
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

impl<D: Dma, B: Doorbell> Drop for NamespaceQueue<D, B> {
    /// Frees the list memory, unless the device may still read it; then it is leaked. The same holds for
    /// the memory of requests, unless the queue was [drained](NamespaceQueue::drain) before.
    fn drop(&mut self) {
        if self.queue.in_flight() == 0 {
            self.builder.lists.release();
        }
    }
}

impl FastPath {
    fn new(view: &NamespaceView, transfer_blocks_max: u32) -> Self {
        let boundary = u64::from(view.optimal_boundary_blocks);
        let block_bytes = u64::from(view.block_bytes());
        // MDTS counts pages in powers of two, so two pages are always within it. Other cases, which may
        // need a division, are left to the slow path.
        let is_open = view.metadata_bytes() == 0
            && view.page_bytes == PAGE_BYTES
            && u64::from(transfer_blocks_max) * block_bytes >= 2 * u64::from(PAGE_BYTES)
            && (boundary == 0 || boundary.is_power_of_two());
        let is_sgl = view.sgl == SglSupport::Only;
        let read = Command::new(IoOpcode::Read.code()).with_nsid(view.nsid);
        let read = if is_sgl { read.with_sgl1(Descriptor::default()) } else { read };
        Self {
            read_word: read.0[0],
            block_bytes: if is_open { block_bytes } else { 1 << 40 },
            boundary_bits: if boundary == 0 { 0 } else { !(boundary - 1) },
            prinfo_bits: u64::from(view.protection.prinfo()) << PRINFO_SHIFT,
            tag_mask: if view.protection.reference_is_lba { u64::from(u32::MAX) } else { 0 },
            is_plain: boundary == 0 && view.protection == ProtectionChecks::default(),
            is_sgl,
            len_bytes_max: transfer_blocks_max.saturating_mul(view.block_bytes()),
        }
    }
}

/// Maximum completions discarded by one call of [`NamespaceQueue::drain`].
const ABANDONED_AT_ONCE: usize = 64;

/// Page size of the fast path; no controller is known to require larger pages.
const PAGE_BYTES: u32 = 4096;
const PAGE_MASK: u64 = PAGE_BYTES as u64 - 1;

const _: () = assert!(
    Operation::Read as u8 == 0
        && Operation::Write as u8 == 1
        && IoOpcode::Read.code() - 1 == IoOpcode::Write.code(),
    "the first two operations count up as their opcodes count down"
);

/// Common properties of the requests of a run in one word. The three fields are adjacent, so it is also
/// loaded as one word.
#[inline(always)]
fn likeness(blocks: u32, segment_count: u16, metadata_count: u16) -> u64 {
    u64::from(blocks) | u64::from(segment_count) << 32 | u64::from(metadata_count) << 48
}

/// Segments of a request, data first, if they are within the table.
fn segments_of<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    let first = request.segment_first as usize;
    let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
    if count == 0 { Some(&[]) } else { segments.get(first..first.checked_add(count)?) }
}
