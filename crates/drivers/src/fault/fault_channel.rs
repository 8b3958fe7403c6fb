//! I/O channel with fault injection.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, InterruptVector, IoChannel,
    IoCompletion, IoStatus, Limits, Memory, Operation, Random, Request, Segment, WakeSource,
};
use tenmil_dma::Region;
use tenmil_linux::EventFdVectors;
use tenmil_linux::eventfd_vectors::EventFdVector;

use super::FaultShared;
use super::rule::{FaultEffect, MatchedRule};
use crate::combined_wake_source::CombinedWakeSource;
use crate::request_validation::valid_request_segments;
use tenmil_block::CompletionQueue;
use tenmil_block::SegmentCursor;

/// I/O channel of a fault device. Drop order: the inner channel first, which waits until its memory is no
/// longer accessed; then the memory.
pub(super) struct FaultChannel {
    inner: Box<dyn IoChannel>,
    limits: Limits,
    shared: Arc<FaultShared>,
    slots: Box<[FaultSlot]>,
    free: Vec<u32>,
    /// Hanging requests.
    hanging: Vec<u32>,
    /// Numbers of releases and aborts that were handled.
    seen: (u64, u64),
    batch: Vec<Request>,
    /// Segments of a request that is truncated or contains a replaced block.
    segments: Vec<Segment>,
    below: CompletionBatch,
    ready: CompletionQueue,
    /// A block for each corrupted write in flight.
    blocks: Region,
    free_blocks: Vec<u16>,
    wake: CombinedWakeSource,
    /// Wakes this thread when hanging requests are released.
    vector: EventFdVector,
    number: u64,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct FaultSlot {
    token: u64,
    then: CompletionAction,
}

/// Action at the completion from below.
#[derive(Clone, Copy, Debug)]
enum CompletionAction {
    /// Pass the completion on.
    Pass,
    /// Replace the status.
    Replace(IoStatus),
    /// Flip these bits first, if it succeeded.
    Flip(BitFlips),
    /// Free a block of the channel's memory.
    Take(u16),
    /// Hold the completion; `Some` once it has arrived.
    Keep(Option<IoCompletion>),
}

/// Bits of memory to flip.
#[derive(Clone, Copy, Debug, Default)]
struct BitFlips([Option<(Segment, u8)>; FLIPS_MAX]);

const FLIPS_MAX: usize = 3;
/// Maximum number of corrupted writes in flight.
const BLOCKS: u16 = 8;
/// Maximum number of requests submitted at once.
const BATCH: usize = 256;

impl FaultChannel {
    pub(super) fn open(
        medium: &dyn BlockDevice,
        shared: Arc<FaultShared>,
        limits: Limits,
    ) -> Result<Self, Error> {
        let inner = medium.channel()?;
        let refuse = |error: &dyn std::fmt::Display| format!("fault: {error}");
        let vectors =
            EventFdVectors::new(1).map_err(|error| refuse(&error)).map_err(Error::environment)?;
        let vector = vectors
            .vector(0)
            .ok_or("fault: no event descriptor, expected one")
            .map_err(Error::environment)?;
        let wake = CombinedWakeSource::from_sources([
            WakeSource::Descriptor(vector.descriptor()),
            inner.wake_source(),
        ])?;
        let blocks =
            shared.regions.allocate_region(usize::from(BLOCKS) * limits.block_size as usize);
        let blocks = blocks.map_err(|error| refuse(&error)).map_err(Error::environment)?;
        let depth = limits.depth_max as usize;
        Ok(Self {
            inner,
            slots: vec![FaultSlot { token: 0, then: CompletionAction::Pass }; depth].into(),
            free: (0..limits.depth_max).rev().collect(),
            hanging: Vec::with_capacity(depth),
            seen: (shared.releases.load(Ordering::Acquire), shared.aborts.load(Ordering::Acquire)),
            batch: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(medium.limits().segments_max.into()),
            below: CompletionBatch::with_capacity(depth),
            ready: CompletionQueue::with_depth(limits.depth_max),
            blocks,
            free_blocks: (0..BLOCKS).collect(),
            wake,
            vector,
            number: shared.register_waker(vectors),
            limits,
            shared,
        })
    }

    /// Number of requests that may still be accepted. A completion that waits to be polled has freed its
    /// slot, and still counts.
    fn free_count(&self) -> usize {
        self.free.len().saturating_sub(self.ready.len())
    }

    /// Submits requests unchanged.
    fn submit_unchanged(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut done = 0;
        while done < requests.len() {
            let rest = requests[done..].iter().zip(self.free.iter().rev()).take(BATCH);
            self.batch.clear();
            self.batch
                .extend(rest.map(|(request, slot)| Request { token: (*slot).into(), ..*request }));
            let taken = self.inner.submit(now, &self.batch, segments);
            for request in &requests[done..done + taken] {
                let Some(slot) = self.free.pop() else { break };
                self.slots[slot as usize] =
                    FaultSlot { token: request.token, then: CompletionAction::Pass };
            }
            done += taken;
            if taken < self.batch.len() {
                break;
            }
        }
        done
    }

    /// Accepts one request that matches a rule; returns false if there is no free slot.
    fn inject_fault(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
        strike: &MatchedRule,
    ) -> bool {
        let mut random = strike.random.clone();
        let own = match valid_request_segments(&self.limits, request, segments) {
            // The request is invalid; the device below rejects it with the precise status.
            Err(_) => {
                return self.submit_unchanged(now, std::slice::from_ref(request), segments) == 1;
            }
            Ok(own) => own,
        };
        match strike.effect {
            FaultEffect::Error(status) => {
                let status = status.unwrap_or(default_error_status(request.operation));
                self.ready.push(IoCompletion { token: request.token, status, result: 0 });
                true
            }
            FaultEffect::Drop => self.free.pop().is_some(),
            FaultEffect::Hang => {
                let slot = self.free.last().copied();
                let taken =
                    self.submit_with_action(now, request, segments, CompletionAction::Keep(None));
                if taken {
                    self.hanging.extend(slot);
                    self.shared.hanging.fetch_add(1, Ordering::Release);
                }
                taken
            }
            FaultEffect::Corrupt if request.operation == Operation::Read => {
                let flips = BitFlips::random_flips(&mut random, own);
                self.submit_with_action(now, request, segments, CompletionAction::Flip(flips))
            }
            FaultEffect::Corrupt => self.submit_corrupted_write(now, request, own, &mut random),
            FaultEffect::TornWrite => {
                self.submit_partial(now, request, own, &mut random, Some(IoStatus::WRITE_FAULT))
            }
            FaultEffect::Short => self.submit_partial(now, request, own, &mut random, None),
        }
    }

    /// Submits one request; returns false if it was not accepted.
    fn submit_with_action(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
        then: CompletionAction,
    ) -> bool {
        let Some(slot) = self.free.last().copied() else { return false };
        let child = Request { token: slot.into(), ..*request };
        if self.inner.submit(now, &[child], segments) == 0 {
            return false;
        }
        self.free.pop();
        self.slots[slot as usize] = FaultSlot { token: request.token, then };
        true
    }

    /// Submits a random number of leading blocks of a request, fewer than all, and completes it with
    /// `instead`.
    fn submit_partial(
        &mut self,
        now: Instant,
        request: &Request,
        own: &[Segment],
        random: &mut Random,
        instead: Option<IoStatus>,
    ) -> bool {
        let blocks = u32::try_from(random.below(request.blocks.into())).unwrap_or(0);
        if blocks == 0 {
            let status = instead.unwrap_or(IoStatus::SUCCESS);
            self.ready.push(IoCompletion { token: request.token, status, result: 0 });
            return true;
        }
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let len_bytes = u64::from(blocks) * u64::from(self.limits.block_size);
        SegmentCursor::new(own).take_into_list(len_bytes, &mut segments);
        let segment_count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let part = Request { blocks, segment_first: 0, segment_count, ..*request };
        let taken = self.submit_with_action(
            now,
            &part,
            &segments,
            instead.map_or(CompletionAction::Pass, CompletionAction::Replace),
        );
        self.segments = segments;
        taken
    }

    /// Submits a write with one of its blocks replaced by a corrupted copy.
    fn submit_corrupted_write(
        &mut self,
        now: Instant,
        request: &Request,
        own: &[Segment],
        random: &mut Random,
    ) -> bool {
        if request.blocks == 0 {
            return self.submit_with_action(now, request, &[], CompletionAction::Pass);
        }
        let Some(number) = self.free_blocks.last().copied() else { return false };
        let size = self.limits.block_size;
        let offset = u64::from(number) * u64::from(size);
        let ours = Segment { region: self.blocks.id(), offset, len_bytes: size };
        let before = random.below(request.blocks.into()) * u64::from(size);
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let mut pieces = SegmentCursor::new(own);
        pieces.take_into_list(before, &mut segments);
        let regions = &self.shared.regions;
        let copied = pieces.take_each_piece(size.into(), |piece, done| {
            let target = Segment { offset: offset + done, len_bytes: piece.len_bytes, ..ours };
            regions.copy_segment(piece, target)
        });
        if copied.is_ok() {
            segments.push(ours);
        } else {
            // Invalid memory is reported by the device below.
            segments.clear();
            pieces = SegmentCursor::new(own);
        }
        pieces.take_into_list(u64::MAX, &mut segments);
        BitFlips::random_flips(random, &[ours]).flip_memory(&self.shared);
        let segment_count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let child = Request { segment_first: 0, segment_count, ..*request };
        let taken = self.submit_with_action(now, &child, &segments, CompletionAction::Take(number));
        self.segments = segments;
        if taken {
            self.free_blocks.pop();
        }
        taken
    }

    /// Handles a completion from below.
    fn handle_completion(&mut self, completion: IoCompletion) {
        let Ok(number) = u32::try_from(completion.token) else { return };
        let FaultSlot { token, then } = &mut self.slots[number as usize];
        let mut completion = IoCompletion { token: *token, ..completion };
        match then {
            CompletionAction::Pass => {}
            CompletionAction::Replace(status) => completion.status = *status,
            CompletionAction::Flip(flips) if completion.status.is_success() => {
                flips.flip_memory(&self.shared)
            }
            CompletionAction::Flip(_) => {}
            CompletionAction::Take(block) => self.free_blocks.push(*block),
            CompletionAction::Keep(kept) => {
                *kept = Some(completion);
                return;
            }
        }
        self.free.push(number);
        self.ready.push(completion);
    }

    /// Releases hanging requests if that was ordered since the last call.
    fn release_hanging_if_signaled(&mut self) {
        let releases = self.shared.releases.load(Ordering::Acquire);
        if releases == self.seen.0 {
            return;
        }
        let aborts = self.shared.aborts.load(Ordering::Acquire);
        let aborted = aborts != self.seen.1;
        self.seen = (releases, aborts);
        self.shared.hanging.fetch_sub(self.hanging.len() as u64, Ordering::Release);
        for number in self.hanging.drain(..) {
            let slot = &mut self.slots[number as usize];
            let CompletionAction::Keep(kept) = slot.then else { continue };
            match kept {
                // The request is still below, where its memory may be accessed: it completes when that
                // ends.
                None if aborted => slot.then = CompletionAction::Replace(IoStatus::ABORTED),
                None => slot.then = CompletionAction::Pass,
                Some(completion) => {
                    let status = if aborted { IoStatus::ABORTED } else { completion.status };
                    self.ready.push(IoCompletion { status, ..completion });
                    self.free.push(number);
                }
            }
        }
    }

    /// Whether a release was ordered that has not been handled.
    fn is_release_pending(&self) -> bool {
        self.shared.releases.load(Ordering::Acquire) != self.seen.0
    }
}

impl IoChannel for FaultChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let requests = &requests[..requests.len().min(self.free_count())];
        if !self.shared.is_armed.load(Ordering::Acquire) {
            return self.submit_unchanged(now, requests, segments);
        }
        let shared = Arc::clone(&self.shared);
        let mut rules = shared.lock_rules();
        let take = |request: &&Request| {
            let strike = rules.rule_for_request(request);
            let taken = match &strike {
                None => self.submit_unchanged(now, std::slice::from_ref(*request), segments) == 1,
                Some(strike) => self.inject_fault(now, request, segments, strike),
            };
            if taken {
                rules.count_accepted(request, strike.as_ref());
            }
            taken
        };
        requests.iter().take_while(take).count()
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut below = std::mem::replace(&mut self.below, CompletionBatch::with_capacity(0));
        self.inner.poll(now, &mut below);
        below.drain().for_each(|completion| self.handle_completion(completion));
        self.below = below;
        self.release_hanging_if_signaled();
        self.ready.drain_into(completions)
    }
}

impl ChannelWakeup for FaultChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }

    fn wake_at(&self) -> Instant {
        let has_work = !self.ready.is_empty() || self.is_release_pending();
        if has_work { Instant::default() } else { self.inner.wake_at() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    /// Requests may hang here until they are released.
    fn is_done_by_local_kernel(&self) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        // Armed before the check of `was_released`: a release ordered in between raises the waker.
        let ordered = self.vector.unmask();
        let busy_below = self.inner.arm();
        !ordered || busy_below || !self.ready.is_empty() || self.is_release_pending()
    }

    fn disarm(&mut self) {
        self.vector.mask();
        self.inner.disarm();
    }
}

impl Drop for FaultChannel {
    fn drop(&mut self) {
        self.shared.hanging.fetch_sub(self.hanging.len() as u64, Ordering::Release);
        self.shared.unregister_waker(self.number);
    }
}

impl BitFlips {
    /// Draws one to three bits in the bytes of `segments`, each in another byte.
    fn random_flips(random: &mut Random, segments: &[Segment]) -> Self {
        let len_bytes: u64 = segments.iter().map(|segment| u64::from(segment.len_bytes)).sum();
        let count = (random.below(FLIPS_MAX as u64) + 1).min(len_bytes);
        let mut flips = Self::default();
        for (number, flip) in (0..count).zip(&mut flips.0) {
            // Each in a separate part of the range.
            let (from, to) = (len_bytes * number / count, len_bytes * (number + 1) / count);
            let mut skip = from + random.below(to - from);
            let byte = segments.iter().find_map(|segment| {
                let here = u32::try_from(skip).ok().and_then(|skip| segment.slice(skip, 1));
                skip = skip.saturating_sub(segment.len_bytes.into());
                here
            });
            *flip = byte.map(|byte| (byte, 1 << random.below(8)));
        }
        flips
    }

    /// Flips the bits. Invalid memory is skipped.
    fn flip_memory(&self, shared: &FaultShared) {
        for (byte, mask) in self.0.iter().flatten() {
            let mut value = [0];
            if shared.regions.load(*byte, &mut value).is_ok() {
                value[0] ^= mask;
                let stored = shared.regions.store(*byte, &value);
                debug_assert!(stored.is_ok(), "it was loaded just now");
            }
        }
    }
}

/// The default status of an injected error.
fn default_error_status(operation: Operation) -> IoStatus {
    match operation {
        Operation::Read | Operation::Compare | Operation::Verify => IoStatus::UNRECOVERED_READ,
        _ => IoStatus::WRITE_FAULT,
    }
}
