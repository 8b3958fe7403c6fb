//! Adapts requests to the device below: splitting, emulation, bounce buffers.
//!
//! ```text
//!   request ─┬─ fits ──────────────────────────────────────────── below, unchanged
//!            └─ does not ── parent ─┬─ part ─────────────────────── below
//!                                   ├─ part
//!                                   ├─ chunk ── buffer ── part
//!                                   └─ flush
//! ```
//!
//! Most requests fit and are submitted with their batch; the properties of a batch are checked once. The
//! others become parents in a table. The table and the buffers are allocated at start.
//! A parent completes once, after its last part, with the first error if there was one.

mod adapted_device;
mod bounce;
mod constraints;
mod range_lock;
mod split_request;
mod subrequest;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, ErrorCategory, Instant, IoChannel, IoCompletion, Limits,
    Operation, Request, Segment,
};

pub use self::adapted_device::{AdaptedDevice, QuiesceRangeLock};
pub use self::bounce::{BounceBufferAllocator, BounceBuffers};
use self::constraints::{AdaptationPlan, DeviceConstraints, changes_blocks};
pub use self::range_lock::RangeLock;
use self::split_request::{ChunkStep, SplitRequest, SplitStage};
use crate::completion_queue::CompletionQueue;
use crate::internal_token::index_of_internal_token;
use tenmil_base::Error;

/// Channel that accepts every valid request of up to 2^32 - 1 blocks, and submits what the channel below
/// supports.
///
/// - Reads, writes and compares are split at the optimal boundary, the maximum transfer size and the
///   maximum segment count. A write that the device below performs atomically is not split, unless there
///   is a boundary: then the limits promise no more than one block.
/// - Write zeroes, compare, verify, copy and compare-and-write are emulated by reads and writes where the
///   device lacks them, unless its blocks carry metadata. FUA is emulated by a flush where the device
///   supports only that. A flush is never emulated.
/// - Memory without the alignment of the device goes through a bounce buffer.
///
/// An emulated compare-and-write waits until all other requests of this channel have completed, while no
/// new ones are accepted. Then, until it completes, requests that would change its blocks stay with the
/// caller. Against other channels it locks its blocks by a [`RangeLock`].
///
/// When the table is full, a request returns to the caller. One free entry below and one buffer are
/// enough for progress.
pub struct AdaptedChannel<B, L = ()> {
    below: B,
    lock: L,
    rules: DeviceConstraints,
    limits: Limits,
    children_max: u16,
    parents: Box<[SplitRequest]>,
    free: Vec<u16>,
    /// Parents that may have something to send, first come, first served.
    row: VecDeque<u16>,
    buffers: BounceBuffers,
    /// Segments of the part that is being built.
    slices: Vec<Segment>,
    ready: CompletionQueue,
    /// Requests passed down unchanged and not completed.
    passed: usize,
    /// The compare-and-write that needs exclusive access to its blocks.
    exclusive: Option<u16>,
}

/// Requirements of the device below beyond its limits, and table sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptationOptions {
    /// Maximum number of adapted requests in flight.
    pub parents_max: u16,
    /// Maximum number of parts of one of them in flight.
    pub children_max: u16,
    /// Segments in the largest request, unless the device below accepts more.
    pub segments_max: u16,
    /// Alignment of every segment that reaches the device.
    pub alignment: MemoryAlignment,
    /// How FUA is implemented.
    pub force: FuaMode,
    /// What happens to a deallocate that the device does not support.
    pub deallocate: DeallocateEmulation,
}

/// Alignment of request memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAlignment {
    /// Offsets in a region are multiples of this power of two, at most a page.
    pub address_bytes: u32,
    /// Lengths are multiples of this power of two, at most a block.
    pub len_bytes: u32,
}

/// How FUA is implemented.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FuaMode {
    /// By the device below.
    #[default]
    Native,
    /// By a flush: after a write, before a read.
    Flush,
}

/// What happens to a deallocate that the device does not support.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeallocateEmulation {
    /// It is rejected.
    #[default]
    Refuse,
    /// It completes without effect, which the NVMe specification permits.
    Ignore,
}

impl Default for AdaptationOptions {
    fn default() -> Self {
        Self {
            parents_max: 64,
            children_max: 8,
            segments_max: 512,
            alignment: MemoryAlignment::ANY,
            force: FuaMode::default(),
            deallocate: DeallocateEmulation::default(),
        }
    }
}

impl MemoryAlignment {
    /// No requirement.
    pub const ANY: Self = Self { address_bytes: 1, len_bytes: 1 };

    /// Whether there is no requirement.
    pub const fn is_any(self) -> bool {
        self.address_bytes == 1 && self.len_bytes == 1
    }

    /// Whether this segment is aligned.
    pub const fn is_aligned(self, segment: Segment) -> bool {
        segment.offset.is_multiple_of(self.address_bytes as u64)
            && segment.len_bytes.is_multiple_of(self.len_bytes)
    }
}

/// Regions begin on page boundaries.
const PAGE_BYTES: u32 = 4096;

impl<B: IoChannel, L: RangeLock> AdaptedChannel<B, L> {
    /// Adapts `below`, with `buffers` for unaligned memory.
    ///
    /// # Errors
    ///
    /// If a block does not fit into a buffer, an alignment cannot be satisfied, a table size is zero, or
    /// FUA is to be emulated by a flush that the device does not support.
    pub fn new(
        below: B,
        lock: L,
        mut buffers: BounceBuffers,
        options: &AdaptationOptions,
    ) -> Result<Self, Error> {
        check_options(below.limits(), options, buffers.chunk_bytes())?;
        let chunk_blocks = buffers.chunk_bytes() / below.limits().block_size;
        let rules = DeviceConstraints::new(below.limits(), options, chunk_blocks);
        let limits = rules.limits_above(below.limits(), options);
        let parents = usize::from(options.parents_max);
        buffers.reserve_buffers(parents);
        Ok(Self {
            lock,
            children_max: options.children_max,
            parents: (0..parents).map(|_| SplitRequest::free_entry(limits.segments_max)).collect(),
            free: (0..options.parents_max).rev().collect(),
            row: VecDeque::with_capacity(parents),
            buffers,
            slices: Vec::with_capacity(2 * usize::from(limits.segments_max)),
            ready: CompletionQueue::with_depth(u32::from(options.parents_max)),
            passed: 0,
            exclusive: None,
            below,
            rules,
            limits,
        })
    }

    /// Accepts one request that does not fit. Returns false if the table is full.
    fn accept_split_request(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
    ) -> bool {
        // A completion that waits to be polled has freed its entry, and still counts.
        if self.free.len() <= self.ready.len() {
            return false;
        }
        let (plan, own) = match self.rules.plan_request(&self.limits, request, segments) {
            Ok(planned) => planned,
            Err(status) => {
                self.ready.push(IoCompletion { token: request.token, status, result: 0 });
                return true;
            }
        };
        let is_exclusive = plan == AdaptationPlan::CompareAndWrite;
        if is_exclusive && self.exclusive.is_some() {
            return false;
        }
        let Some(index) = self.free.pop() else { return false };
        let syncs = self.rules.must_emulate_fua(request);
        self.parents[usize::from(index)].init(request, own, plan, syncs);
        if is_exclusive {
            self.exclusive = Some(index);
        }
        self.queue_parent(index);
        self.send_parts_below(now);
        true
    }

    /// The number of leading requests that may proceed beside a compare-and-write: none while it waits
    /// for the others to complete, and afterwards those that do not change its blocks.
    fn count_allowed_beside_compare_and_write(&self, requests: &[Request]) -> usize {
        let Some(index) = self.exclusive else { return requests.len() };
        let SplitRequest { stage, request: held, .. } = &self.parents[usize::from(index)];
        if *stage == SplitStage::Draining {
            return 0;
        }
        let touches = |request: &Request| {
            changes_blocks(request.operation)
                && request.lba < held.lba + u64::from(held.blocks)
                && held.lba < request.lba.saturating_add(u64::from(request.blocks))
        };
        requests.iter().take_while(|request| !touches(request)).count()
    }

    /// Consumes a completion from below if it belongs to a part.
    fn handle_part_completion(&mut self, completion: &IoCompletion) -> bool {
        let Some(number) = index_of_internal_token(completion.token) else { return false };
        let (index, is_chunk) = subrequest::parent_and_is_chunk_of(number);
        let Some(parent) = self.parents.get_mut(usize::from(index)) else { return false };
        assert!(parent.under_way > 0, "a backend completes every request once");
        parent.under_way -= 1;
        let is_flush =
            matches!(parent.stage, SplitStage::SyncingBefore(_) | SplitStage::SyncingAfter(_));
        // A successful flush must not replace the result of the data.
        if parent.status.is_success() && !(is_flush && completion.status.is_success()) {
            (parent.status, parent.result) = (completion.status, completion.result);
        }
        if is_chunk {
            self.handle_chunk_completion(index);
        }
        self.queue_parent(index);
        true
    }

    fn queue_parent(&mut self, index: u16) {
        let parent = &mut self.parents[usize::from(index)];
        if !parent.is_queued {
            parent.is_queued = true;
            self.row.push_back(index);
        }
    }

    /// Sends parts as the channel below accepts them. Returns whether any was sent.
    fn send_parts_below(&mut self, now: Instant) -> bool {
        let mut has_sent = false;
        while let Some(&index) = self.row.front() {
            let (sent, is_full) = self.submit_parts_of(now, index);
            has_sent |= sent;
            if is_full {
                break;
            }
            // The parent is still first in the queue: only its tail has grown.
            self.row.pop_front();
            self.parents[usize::from(index)].is_queued = false;
        }
        has_sent
    }

    /// Completes a parent and releases its resources.
    fn complete_parent(&mut self, index: u16) {
        let parent = &mut self.parents[usize::from(index)];
        let Request { token, lba, blocks, .. } = parent.request;
        let (status, result) = (parent.status, parent.result);
        let held_range = !matches!(parent.stage, SplitStage::Draining | SplitStage::Locking);
        if parent.chunk.take().is_some_and(|chunk| chunk.step == ChunkStep::WaitsForBuffer) {
            self.buffers.leave_wait_queue(index);
        }
        if self.exclusive == Some(index) {
            self.exclusive = None;
            if held_range {
                self.lock.release(lba..lba + u64::from(blocks));
            }
        }
        self.release_buffer(index);
        self.free.push(index);
        self.ready.push(IoCompletion { token, status, result });
    }

    fn parents_in_flight(&self) -> usize {
        self.parents.len() - self.free.len()
    }

    /// Whether a parent waits for something without a wake-up.
    fn needs_polling_without_wake(&self) -> bool {
        let locking = self
            .exclusive
            .is_some_and(|index| self.parents[usize::from(index)].stage == SplitStage::Locking);
        let nothing_below =
            self.passed == 0 && self.parents.iter().all(|parent| parent.under_way == 0);
        locking || (!self.row.is_empty() && nothing_below)
    }
}

impl<B: IoChannel, L: RangeLock> IoChannel for AdaptedChannel<B, L> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        // Queued parents found the channel below full, and come first.
        while self.row.is_empty() && taken < requests.len() {
            let mut rest = &requests[taken..];
            if self.exclusive.is_some() {
                rest = &rest[..self.count_allowed_beside_compare_and_write(rest)];
            }
            let passing = self.rules.passing_count(rest, segments);
            if passing > 0 {
                let count = self.below.submit(now, &rest[..passing], segments);
                self.passed += count;
                taken += count;
                if count < passing {
                    break;
                }
            } else if rest
                .first()
                .is_some_and(|request| self.accept_split_request(now, request, segments))
            {
                taken += 1;
            } else {
                break;
            }
        }
        taken
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let before = completions.as_slice().len();
        let polled = self.below.poll(now, completions);
        // The device may have been resized.
        self.limits.block_count = self.below.limits().block_count;
        if self.parents_in_flight() == 0 && self.ready.is_empty() {
            self.passed -= polled;
            return polled;
        }
        self.handle_polled_parts(now, completions, before, polled)
    }
}

impl<B: IoChannel, L: RangeLock> ChannelWakeup for AdaptedChannel<B, L> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.below)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.below)
    }

    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() { Instant::default() } else { self.below.wake_at() }
    }

    fn arm(&mut self) -> bool {
        let must_look = self.needs_polling_without_wake() && self.below.wake_at() == Instant::NEVER;
        !self.ready.is_empty() || must_look || self.below.arm()
    }
}

impl<B: IoChannel, L: RangeLock> AdaptedChannel<B, L> {
    /// Second part of a poll: handles completions of parts and sends more.
    #[inline(never)]
    fn handle_polled_parts(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
        before: usize,
        polled: usize,
    ) -> usize {
        self.passed -= polled
            - completions.remove_if(before, |completion| self.handle_part_completion(completion));
        if let Some(index) = self.exclusive {
            self.queue_parent(index);
        }
        if self.send_parts_below(now) {
            self.below.flush_submissions();
        }
        self.ready.drain_into(completions);
        completions.as_slice().len() - before
    }
}

fn check_options(
    below: &Limits,
    options: &AdaptationOptions,
    chunk_bytes: u32,
) -> Result<(), Error> {
    let MemoryAlignment { address_bytes, len_bytes } = options.alignment;
    let block_size = below.block_size;
    let refuse = |text: String| Err(Error::new(ErrorCategory::Usage, format!("shape: {text}")));
    if options.parents_max == 0 || options.children_max == 0 {
        return refuse(format!(
            "{} requests of {} parts, expected at least one of one",
            options.parents_max, options.children_max
        ));
    }
    if chunk_bytes < block_size {
        return refuse(format!(
            "a buffer of {chunk_bytes} bytes, expected a block of {block_size}"
        ));
    }
    if !address_bytes.is_power_of_two() || address_bytes > PAGE_BYTES.min(chunk_bytes) {
        return refuse(format!(
            "an address alignment of {address_bytes} bytes, expected a power of two up to a page"
        ));
    }
    if !len_bytes.is_power_of_two() || len_bytes > block_size {
        return refuse(format!(
            "a length alignment of {len_bytes} bytes, expected a power of two up to a block of \
             {block_size}"
        ));
    }
    if options.force == FuaMode::Flush && !below.operations.has(Operation::Flush) {
        return refuse("forced unit access by flush, and the device has no flush".into());
    }
    Ok(())
}
