//! What a request needs to fit what is below: cutting, emulation, a detour for its memory.
//!
//! ```text
//!   request ─┬─ fits ──────────────────────────────────────────── below, as it is
//!            └─ does not ── parent ─┬─ part ─────────────────────── below
//!                                   ├─ part
//!                                   ├─ chunk ── buffer ── part
//!                                   └─ flush
//! ```
//!
//! Most requests fit, and are handed down with their batch: what they have in common is found out
//! once. The others become parents in a table, which is allocated at start, as are the buffers. A
//! parent is answered once, after its last part: with the first error, if there was one.

mod bounce;
mod device;
mod lock;
mod parent;
mod part;
mod rules;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;

use base::{
    Answer, Answers, Backend, Blame, DoorbellCounts, Instant, Limits, Operation, Request, Segment,
    WakeSource,
};

pub use self::bounce::{BounceBuffers, BounceMemory};
pub use self::device::{HoldLock, Shaped};
pub use self::lock::RangeLock;
use self::parent::{Parent, Stage, Step};
use self::rules::{Plan, Rules, changes};
use crate::MediumError;
use crate::backend::ready::Ready;
use crate::own::own_number;

/// Takes whatever makes sense, of any length up to 2^32 - 1 blocks, and hands down what the backend
/// below can do.
///
/// - Reads, writes and compares are cut at the optimal boundary, at the largest request and at the
///   number of segments. A write that the device below writes all or not at all is not cut, unless
///   there is a boundary: then the limits promise no more than a block.
/// - Write zeroes, compare, verify, copy and compare-and-write are made of reads and writes where
///   the device lacks them, unless its blocks carry metadata. Forced unit access is made of a flush
///   where that is what the device has. A flush is never invented.
/// - Memory that is not aligned as the device demands takes a detour through a buffer.
///
/// A compare-and-write that has to be emulated waits until all else of this channel is answered,
/// while nothing new is taken; then, until it is answered itself, requests that would change its
/// blocks stay with the caller. Against other channels it holds its blocks by a [`RangeLock`].
///
/// When the table is full, a request comes back to the caller. One free place below and one buffer
/// are enough for progress.
pub struct Shaper<B, L = ()> {
    below: B,
    lock: L,
    rules: Rules,
    limits: Limits,
    children_max: u16,
    parents: Box<[Parent]>,
    free: Vec<u16>,
    /// Parents that may have something to send, first come, first served.
    row: VecDeque<u16>,
    buffers: BounceBuffers,
    /// The segments of the part that is being made.
    slices: Vec<Segment>,
    ready: Ready,
    /// Requests that were handed down as they are, and not answered yet.
    passed: usize,
    /// The compare and write that wants its blocks for itself.
    exclusive: Option<u16>,
}

/// What the device below asks for beyond its limits, and how much room there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeOptions {
    /// Requests that are shaped at once.
    pub parents_max: u16,
    /// Parts of one of them that are under way at once.
    pub children_max: u16,
    /// Segments in the largest request, if the device below does not take more.
    pub segments_max: u16,
    /// What every segment that reaches the device keeps to.
    pub alignment: Alignment,
    /// What makes forced unit access.
    pub force: ForceUnitAccess,
    /// What becomes of a deallocation that the device does not have.
    pub deallocate: Deallocate,
}

/// What the memory of a request must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Offsets in a region are multiples of this power of two, at most a page.
    pub address_bytes: u32,
    /// Lengths are multiples of this power of two, at most a block.
    pub len_bytes: u32,
}

/// What makes forced unit access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForceUnitAccess {
    /// The device below does.
    #[default]
    Below,
    /// A flush does: after a write, before a read.
    ByFlush,
}

/// What becomes of a deallocation that the device does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deallocate {
    /// It is refused.
    #[default]
    Refuse,
    /// It is answered and nothing happens, which is one of the things that may.
    Ignore,
}

impl Default for ShapeOptions {
    fn default() -> Self {
        Self {
            parents_max: 64,
            children_max: 8,
            segments_max: 512,
            alignment: Alignment::ANY,
            force: ForceUnitAccess::default(),
            deallocate: Deallocate::default(),
        }
    }
}

impl Alignment {
    /// Any memory suits.
    pub const ANY: Self = Self { address_bytes: 1, len_bytes: 1 };

    /// Whether any memory suits.
    pub const fn is_any(self) -> bool {
        self.address_bytes == 1 && self.len_bytes == 1
    }

    /// Whether this memory does.
    pub const fn suits(self, segment: Segment) -> bool {
        segment.offset.is_multiple_of(self.address_bytes as u64)
            && segment.len_bytes.is_multiple_of(self.len_bytes)
    }
}

/// Pages are what regions begin on.
const PAGE_BYTES: u32 = 4096;

impl<B: Backend, L: RangeLock> Shaper<B, L> {
    /// Shapes for `below`, through `buffers` where memory needs a detour.
    ///
    /// # Errors
    ///
    /// If a block does not fit into a buffer, an alignment cannot be kept, there is room for nothing,
    /// or forced unit access is to be made of a flush that the device does not have.
    pub fn new(
        below: B,
        lock: L,
        mut buffers: BounceBuffers,
        options: &ShapeOptions,
    ) -> Result<Self, MediumError> {
        check_options(below.limits(), options, buffers.chunk_bytes())?;
        let chunk_blocks = buffers.chunk_bytes() / below.limits().block_size;
        let rules = Rules::new(below.limits(), options, chunk_blocks);
        let limits = rules.above(below.limits(), options);
        let parents = usize::from(options.parents_max);
        buffers.reserve(parents);
        Ok(Self {
            lock,
            children_max: options.children_max,
            parents: (0..parents).map(|_| Parent::idle(limits.segments_max)).collect(),
            free: (0..options.parents_max).rev().collect(),
            row: VecDeque::with_capacity(parents),
            buffers,
            slices: Vec::with_capacity(2 * usize::from(limits.segments_max)),
            ready: Ready::with_depth(u32::from(options.parents_max)),
            passed: 0,
            exclusive: None,
            below,
            rules,
            limits,
        })
    }

    /// Takes one request that does not fit. False if there is no room for it now.
    fn adopt(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        // An answer that waits to be polled has given its place back, and still counts.
        if self.free.len() <= self.ready.len() {
            return false;
        }
        let (plan, own) = match self.rules.plan(&self.limits, request, segments) {
            Ok(planned) => planned,
            Err(outcome) => {
                self.ready.push(Answer { token: request.token, outcome, result: 0 });
                return true;
            }
        };
        let is_exclusive = plan == Plan::CompareAndWrite;
        if is_exclusive && self.exclusive.is_some() {
            return false;
        }
        let Some(index) = self.free.pop() else { return false };
        let syncs = self.rules.must_sync(request);
        self.parents[usize::from(index)].begin(request, own, plan, syncs);
        if is_exclusive {
            self.exclusive = Some(index);
        }
        self.stand_in_row(index);
        self.send(now);
        true
    }

    /// How many requests at the front may go on beside a compare and write: none while it waits for
    /// the others to end, and afterwards those that leave its blocks as they are.
    fn beside_exclusive(&self, requests: &[Request]) -> usize {
        let Some(index) = self.exclusive else { return requests.len() };
        let Parent { stage, request: held, .. } = &self.parents[usize::from(index)];
        if *stage == Stage::Draining {
            return 0;
        }
        let touches = |request: &Request| {
            changes(request.operation)
                && request.lba < held.lba + u64::from(held.blocks)
                && held.lba < request.lba.saturating_add(u64::from(request.blocks))
        };
        requests.iter().take_while(|request| !touches(request)).count()
    }

    /// Takes an answer from below if it is one to a part.
    fn take_answer(&mut self, answer: &Answer) -> bool {
        let Some(number) = own_number(answer.token) else { return false };
        let (index, is_chunk) = part::read_number(number);
        let Some(parent) = self.parents.get_mut(usize::from(index)) else { return false };
        assert!(parent.under_way > 0, "a backend answers every request once");
        parent.under_way -= 1;
        let is_flush = matches!(parent.stage, Stage::SyncingBefore(_) | Stage::SyncingAfter(_));
        if parent.outcome.is_success() && !(is_flush && answer.outcome.is_success()) {
            (parent.outcome, parent.result) = (answer.outcome, answer.result);
        }
        if is_chunk {
            self.chunk_ended(index);
        }
        self.stand_in_row(index);
        true
    }

    fn stand_in_row(&mut self, index: u16) {
        let parent = &mut self.parents[usize::from(index)];
        if !parent.is_queued {
            parent.is_queued = true;
            self.row.push_back(index);
        }
    }

    /// Sends what there is to be sent, as far as there is room below. Returns whether it has sent
    /// anything.
    fn send(&mut self, now: Instant) -> bool {
        let mut has_sent = false;
        while let Some(&index) = self.row.front() {
            let (sent, is_full) = self.send_parts(now, index);
            has_sent |= sent;
            if is_full {
                break;
            }
            // The parent is first in the row still: only the end of it has grown.
            self.row.pop_front();
            self.parents[usize::from(index)].is_queued = false;
        }
        has_sent
    }

    /// Answers a parent and gives back what it held.
    fn end(&mut self, index: u16) {
        let parent = &mut self.parents[usize::from(index)];
        let Request { token, lba, blocks, .. } = parent.request;
        let (outcome, result) = (parent.outcome, parent.result);
        let held_range = !matches!(parent.stage, Stage::Draining | Stage::Locking);
        if parent.chunk.take().is_some_and(|chunk| chunk.step == Step::WaitsForBuffer) {
            self.buffers.leave(index);
        }
        if self.exclusive == Some(index) {
            self.exclusive = None;
            if held_range {
                self.lock.release(lba..lba + u64::from(blocks));
            }
        }
        self.give_buffer_back(index);
        self.free.push(index);
        self.ready.push(Answer { token, outcome, result });
    }

    fn parents_under_way(&self) -> usize {
        self.parents.len() - self.free.len()
    }

    /// Whether a parent waits for something that wakes nobody.
    fn must_look_again(&self) -> bool {
        let locking = self
            .exclusive
            .is_some_and(|index| self.parents[usize::from(index)].stage == Stage::Locking);
        let nothing_below =
            self.passed == 0 && self.parents.iter().all(|parent| parent.under_way == 0);
        locking || (!self.row.is_empty() && nothing_below)
    }
}

impl<B: Backend, L: RangeLock> Backend for Shaper<B, L> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        // Whoever stands in the row has found no room below, and comes first.
        while self.row.is_empty() && taken < requests.len() {
            let mut rest = &requests[taken..];
            if self.exclusive.is_some() {
                rest = &rest[..self.beside_exclusive(rest)];
            }
            let passing = self.rules.passing(rest, segments);
            if passing > 0 {
                let count = self.below.submit(now, &rest[..passing], segments);
                self.passed += count;
                taken += count;
                if count < passing {
                    break;
                }
            } else if rest.first().is_some_and(|request| self.adopt(now, request, segments)) {
                taken += 1;
            } else {
                break;
            }
        }
        taken
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let before = answers.as_slice().len();
        let polled = self.below.poll(now, answers);
        // The device may have become larger or smaller.
        self.limits.block_count = self.below.limits().block_count;
        if self.parents_under_way() == 0 && self.ready.len() == 0 {
            self.passed -= polled;
            return polled;
        }
        self.settle(now, answers, before, polled)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.below.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 { Instant::default() } else { self.below.wake_at() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.below.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.below.is_done_by_kernel()
    }

    fn arm(&mut self) -> bool {
        let must_look = self.must_look_again() && self.below.wake_at() == Instant::NEVER;
        self.ready.len() > 0 || must_look || self.below.arm()
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.below.acknowledge_losses()
    }
}

impl<B: Backend, L: RangeLock> Shaper<B, L> {
    /// What a poll does beyond polling: sorts out the answers to parts, and sends what they have
    /// made room for.
    #[inline(never)]
    fn settle(
        &mut self,
        now: Instant,
        answers: &mut Answers,
        before: usize,
        polled: usize,
    ) -> usize {
        self.passed -= polled - answers.sift(before, |answer| self.take_answer(answer));
        if let Some(index) = self.exclusive {
            self.stand_in_row(index);
        }
        if self.send(now) {
            self.below.flush();
        }
        self.ready.give(answers);
        answers.as_slice().len() - before
    }
}

fn check_options(
    below: &Limits,
    options: &ShapeOptions,
    chunk_bytes: u32,
) -> Result<(), MediumError> {
    let Alignment { address_bytes, len_bytes } = options.alignment;
    let block_size = below.block_size;
    let refuse = |text: String| Err(MediumError::new(Blame::Caller, format!("shape: {text}")));
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
    if options.force == ForceUnitAccess::ByFlush && !below.support.has(Operation::Flush) {
        return refuse("forced unit access by flush, and the device has no flush".into());
    }
    Ok(())
}
