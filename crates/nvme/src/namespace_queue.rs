//! A namespace as a block device: requests to commands, on one queue pair.
//!
//! ```text
//!   submit --> short way: one segment, at most two pages, no limit in sight --> queue pair
//!          '-> long way:  any operation, any memory; splits what is too large    ^
//!                              '--> parents, children sent as slots come free ---'
//!   poll   <-- answers of the queue pair, and of parents after their last child
//! ```

mod commands;
mod raw;
#[cfg(test)]
mod tests;
mod view;

use base::{
    Answer, Answers, Backend, Dma, Doorbell, DoorbellCounts, Durability, Instant, Limits,
    Operation, Outcome, Request, Segment,
};
use wire::sgl::Descriptor;
use wire::{Command, IoOpcode};

pub use commands::Stretch;
pub use raw::{CompareAndWrite, NotSubmitted};
pub use view::{BlocksMax, Metadata, NamespaceView, ProtectionChecks};

use crate::data_pointer::{Lists, SglSupport, contiguous};
use crate::link::Order;
use crate::queue_pair::QueuePair;
use crate::slot::{Mark, tick_of};
use crate::split::ParentTable;
use commands::{CommandBuilder, PRINFO_SHIFT, flag_bits};

/// A namespace behind a queue pair of its own.
pub struct NamespaceQueue<D: Dma, B: Doorbell> {
    queue: QueuePair<D, B>,
    dma: D,
    short_way: ShortWay,
    parents: ParentTable,
    /// Answers to requests that never became a command.
    ready: Vec<Answer>,
    builder: CommandBuilder<D>,
    limits: Limits,
    /// A flush has failed for lost writes, and nobody has been told yet.
    is_reporting: bool,
    /// What its thread may sleep on.
    vector: Option<Box<dyn base::Vector>>,
}

/// What the short way needs to know, and all that it needs to know.
#[derive(Clone, Copy, Debug)]
struct ShortWay {
    /// The first word of a read; that of a write is one less.
    read_word: u64,
    /// Or a number that no segment is a multiple of, if every request must take the long way.
    block_bytes: u64,
    /// The bits of a block number above the optimal boundary: requests whose first and last blocks
    /// differ in any of them take the long way.
    boundary_bits: u64,
    /// PRINFO in its place in CDW12, and all ones if reference tags are block numbers.
    prinfo_bits: u64,
    tag_mask: u64,
    /// Neither a boundary nor protection information.
    is_plain: bool,
    /// Memory that lies together is an SGL data block and not PRPs.
    is_sgl: bool,
    /// Of more bytes it takes several commands.
    len_bytes_max: u32,
}

/// Sizes of a namespace queue's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Requests that may be split at the same time.
    pub parents: u16,
    /// Segments in the largest request, data and metadata together.
    pub segments: u16,
}

impl Default for QueueSizes {
    fn default() -> Self {
        Self { parents: 16, segments: 128 }
    }
}

impl<D: Dma, B: Doorbell> NamespaceQueue<D, B> {
    /// Serves the namespace in `view` over `queue`. `None` if there is no device memory left for
    /// its lists.
    pub fn new(
        dma: &D,
        queue: QueuePair<D, B>,
        view: NamespaceView,
        sizes: QueueSizes,
    ) -> Option<Self> {
        let depth = queue.depth();
        let transfer_bytes_max =
            if view.transfer_bytes_max == 0 { u32::MAX } else { view.transfer_bytes_max };
        let lists = Lists::allocate(dma, depth, transfer_bytes_max, view.page_bytes, view.sgl)?;
        let builder = CommandBuilder::new(view, lists);
        let parents = ParentTable::new(usize::from(sizes.parents), usize::from(sizes.segments));
        Some(Self {
            queue,
            dma: dma.clone(),
            short_way: ShortWay::new(&view, builder.transfer_blocks_max()),
            parents,
            ready: Vec::with_capacity(depth as usize + usize::from(sizes.parents)),
            builder,
            limits: view.limits(depth, sizes.segments),
            is_reporting: false,
            vector: None,
        })
    }

    /// The queue's interrupt vector: the one that the queue pair was created with. Without it, a
    /// thread cannot sleep while the queue owes an answer.
    #[must_use]
    pub fn with_vector(mut self, vector: Box<dyn base::Vector>) -> Self {
        self.vector = Some(vector);
        self
    }

    /// The queue pair underneath: its counters, injections and order.
    pub fn queue(&self) -> &QueuePair<D, B> {
        &self.queue
    }

    /// As [`queue`](Self::queue), to inject errors and to arm interrupts.
    pub fn queue_mut(&mut self) -> &mut QueuePair<D, B> {
        &mut self.queue
    }

    /// The namespace has a new size. What is in flight is not affected.
    pub fn resize(&mut self, block_count: u64) {
        self.builder.view.block_count = block_count;
        self.limits.block_count = block_count;
    }

    /// Takes completions and tells nobody of them: for a queue that is about to be dropped. True once
    /// the device owes none, and so touches no memory of a request any more. What was split and not
    /// sent never is.
    ///
    /// The drop itself cannot wait. Whoever owns the queue as a [`Backend`] calls this until it is
    /// true, while its controller is looked after: that ends what the device never completes.
    pub fn abandon(&mut self, now: Instant) -> bool {
        let mut nowhere = Answers::with_capacity(ABANDONED_AT_ONCE);
        self.queue.flush();
        self.queue.poll_with(now, &mut nowhere, &mut self.parents);
        self.queue.in_flight() == 0
    }

    /// Requests that were split send nothing more: they end with [`Outcome::ABORTED_BY_HOST`], once
    /// what they have sent has ended.
    pub fn give_up_unsent(&mut self) {
        while self.parents.has_unsent() {
            self.ready.extend(self.parents.fail_unsent(Outcome::ABORTED_BY_HOST));
        }
    }

    /// Submits the requests at the front that are like the first one and go the short way: reads and
    /// writes of as many blocks, each with one segment within a page, in a namespace that wants
    /// nothing but an address in a command, on a queue that does nothing after each. Returns how
    /// many. What they have in common is looked at once.
    ///
    /// Not inlined: with its loop for itself, more of what the loop needs fits into registers. One
    /// loop for SGLs and one for PRPs, whose second word is always zero.
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
            // Not a flag, and a read or a write: both in one comparison.
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

    /// Submits one request, the short way or the long one. False if there is no room.
    #[inline(never)]
    fn submit_one(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.short_command(request, segments) {
            Some(command) => {
                let tick = tick_of(now);
                self.queue.enqueue(tick, request.token, Mark::NONE, command).is_some()
            }
            None => self.submit_slowly(now, request, segments),
        }
    }

    /// The command for a read or write of one segment that touches no limit.
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

    /// A dead queue answers what it cannot send. False if it is not dead, or has no room for that.
    #[cold]
    fn is_answered_dead(&mut self, token: u64) -> bool {
        self.queue.standing() == Order::Dead && self.refuse(token, Outcome::PATH_ERROR)
    }

    /// The long way. False if there is no room.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        match self.queue.standing() {
            Order::Run => {}
            Order::Quiesce | Order::Freeze | Order::Release | Order::Dead => return false,
        }
        if request.operation == Operation::Flush && self.has_lost_writes() {
            return self.report_lost_writes(request.token);
        }
        let Some(own) = segments_of(request, segments) else {
            return self.refuse(request.token, Outcome::INVALID_FIELD);
        };
        if own.len() > usize::from(self.limits.segments_max) {
            return self.refuse(request.token, Outcome::INVALID_FIELD);
        }
        if let Err(outcome) = self.builder.check(request, own) {
            return self.refuse(request.token, outcome);
        }
        let Some(index) = self.queue.next_index() else { return false };
        match self.builder.next_command(index, request, own, 0) {
            Err(outcome) => self.refuse(request.token, outcome),
            Ok((command, blocks)) if blocks >= request.blocks => {
                let tick = tick_of(now);
                self.queue.enqueue(tick, request.token, Mark::NONE, command).is_some()
            }
            Ok(_) => {
                let is_taken = self.parents.begin(request, own).is_some();
                self.send_children(now);
                is_taken
            }
        }
    }

    /// Whether a flush that is submitted now fails: what it is for may be gone with a cache of the
    /// controller, or another flush has failed for that and its owner does not know it yet.
    fn has_lost_writes(&self) -> bool {
        let has_cache = self.limits.durability == Durability::VolatileCache;
        has_cache && (self.is_reporting || self.queue.has_lost_writes())
    }

    fn report_lost_writes(&mut self, token: u64) -> bool {
        let is_answered = self.refuse(token, Outcome::WRITE_FAULT);
        if is_answered {
            self.queue.report_lost_writes();
            self.is_reporting = true;
        }
        is_answered
    }

    /// Answers a request without a command. False if there is no room for that.
    fn refuse(&mut self, token: u64, outcome: Outcome) -> bool {
        let has_room = self.ready.len() < self.limits.depth_max as usize;
        if has_room {
            self.ready.push(Answer { token, outcome, result: 0 });
        }
        has_room
    }

    /// Sends children as long as there are slots.
    fn send_children(&mut self, now: Instant) {
        while let Some(rest) = self.parents.next_unsent() {
            let Some(index) = self.queue.next_index() else { return };
            if self.queue.standing() != Order::Run {
                return;
            }
            let parent = rest.parent as u64;
            match self.builder.next_command(index, rest.request, rest.segments, rest.sent_blocks) {
                Ok((command, blocks)) => {
                    let tick = tick_of(now);
                    if self.queue.enqueue(tick, parent, Mark::CHILD, command).is_none() {
                        return;
                    }
                    self.parents.sent(blocks);
                }
                Err(outcome) => self.ready.extend(self.parents.fail_unsent(outcome)),
            }
        }
    }

    /// Children to be sent, and answers that need no completion.
    #[cold]
    fn poll_leftovers(&mut self, now: Instant, answers: &mut Answers) -> usize {
        if self.queue.standing() == Order::Dead {
            while self.parents.has_unsent() {
                self.ready.extend(self.parents.fail_unsent(Outcome::PATH_ERROR));
            }
        }
        self.send_children(now);
        self.queue.flush();
        let count = self.ready.len().min(answers.room());
        self.ready.drain(..count).for_each(|answer| answers.push(answer));
        self.is_reporting &= !self.ready.is_empty();
        count
    }
}

impl<D, B> Backend for NamespaceQueue<D, B>
where
    D: Dma<Submission: Send, Completion: Send>,
    B: Doorbell + Send,
{
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.heed(now);
        let mut has_runs = self.short_way.is_plain && !self.queue.is_eager();
        let mut taken = 0;
        while taken < requests.len() {
            if has_runs {
                let (tick, rest) = (tick_of(now), &requests[taken..]);
                let run = match self.short_way.is_sgl {
                    true => self.submit_run::<true>(tick, rest, segments),
                    false => self.submit_run::<false>(tick, rest, segments),
                };
                // Where not even one went that way, the next will hardly do.
                has_runs = run > 0;
                taken += run;
            }
            // What ended the run is special, or there is no room.
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

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let count = self.queue.poll_with(now, answers, &mut self.parents);
        if self.parents.has_unsent() || !self.ready.is_empty() {
            return count + self.poll_leftovers(now, answers);
        }
        count
    }

    fn doorbells(&self) -> DoorbellCounts {
        let stats = self.queue.stats();
        let (submission, completion) = (stats.submission_doorbells, stats.completion_doorbells);
        let (registers, cmb_commands) = (stats.doorbell_registers, stats.cmb_commands);
        DoorbellCounts { submission, completion, registers, cmb_commands }
    }

    fn wake_at(&self) -> Instant {
        // A child that could be sent, with no other in flight whose end would see to it.
        let can_send = self.queue.standing() == Order::Run && self.queue.next_index().is_some();
        let has_child = self.parents.has_unsent() && self.queue.in_flight() == 0 && can_send;
        if self.ready.is_empty() && !has_child { self.queue.wake_at() } else { Instant::default() }
    }

    fn wake_source(&self) -> base::WakeSource<'_> {
        let descriptor = self.vector.as_ref().map(|vector| vector.descriptor());
        descriptor.map_or(base::WakeSource::Nothing, base::WakeSource::Descriptor)
    }

    fn arm(&mut self) -> bool {
        let Some(vector) = &mut self.vector else { return true };
        let mut is_signalled = false;
        let armed = crate::arm(&mut self.queue, || is_signalled = vector.unmask());
        // What was answered without a command, or split and not sent, no interrupt tells of.
        let has_leftovers = self.wake_at() == Instant::default();
        !is_signalled || armed == crate::Armed::WorkPending || has_leftovers
    }

    fn disarm(&mut self) {
        if let Some(vector) = &mut self.vector {
            vector.mask();
        }
    }
}

impl<D: Dma, B: Doorbell> Drop for NamespaceQueue<D, B> {
    /// The memory for lists goes back, unless the device may still read it: then it stays. So does
    /// the memory of requests, if nobody has [abandoned](NamespaceQueue::abandon) them before.
    fn drop(&mut self) {
        if self.queue.in_flight() == 0 {
            self.builder.lists.release();
        }
    }
}

impl ShortWay {
    fn new(view: &NamespaceView, transfer_blocks_max: u32) -> Self {
        let boundary = u64::from(view.optimal_boundary_blocks);
        let block_bytes = u64::from(view.block_bytes());
        // MDTS counts pages in powers of two, so whatever it is, two pages are within it. What is
        // not so, and what would take a division to find out, is left to the long way.
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

/// Completions that [`NamespaceQueue::abandon`] takes in one call.
const ABANDONED_AT_ONCE: usize = 64;

/// The short way knows pages of this size only; no controller is known to want larger ones.
const PAGE_BYTES: u32 = 4096;
const PAGE_MASK: u64 = PAGE_BYTES as u64 - 1;

const _: () = assert!(
    Operation::Read as u8 == 0
        && Operation::Write as u8 == 1
        && IoOpcode::Read.code() - 1 == IoOpcode::Write.code(),
    "the first two operations count up as their opcodes count down"
);

/// What requests of one run have in common, in one word. It is loaded as one, too: the three fields
/// lie side by side.
#[inline(always)]
fn likeness(blocks: u32, segment_count: u16, metadata_count: u16) -> u64 {
    u64::from(blocks) | u64::from(segment_count) << 32 | u64::from(metadata_count) << 48
}

/// A request's own segments, data first, if they lie in the table.
fn segments_of<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    let first = request.segment_first as usize;
    let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
    if count == 0 { Some(&[]) } else { segments.get(first..first.checked_add(count)?) }
}
