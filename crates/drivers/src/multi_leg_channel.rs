//! I/O channel of a device over several legs, each of which stores some of the blocks.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Error, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Operation, OperationSet, Request, Segment, WakeSource,
};

use crate::combined_wake_source::CombinedWakeSource;
use crate::request_validation::valid_request_segments;
use tenmil_block::CompletionQueue;
use tenmil_block::SegmentCursor;

/// I/O channel that distributes the blocks of each request over legs. Requests that a leg does not accept
/// stay in its outbox. While an outbox is not empty, no more requests are accepted, so an outbox is as
/// large as a batch and no larger.
pub(crate) struct MultiLegChannel<D> {
    legs: Box<[LegChannel]>,
    deal: D,
    limits: Limits,
    parents: Box<[ParentRequest]>,
    free: Vec<u32>,
    /// Completions polled from a leg.
    below: CompletionBatch,
    ready: CompletionQueue,
    wake: CombinedWakeSource,
}

/// Maps blocks to legs.
pub(crate) trait BlockLayout: Send {
    /// Bits set in the tokens of children but not in those of requests that the first leg accepted from
    /// another submitter; zero if there are none.
    const MARK: u64 = 0;

    /// The leg of a block, and the number of consecutive blocks from there on that are on it.
    fn leg_of_block(&self, lba: u64) -> (usize, u64);

    /// The range of `leg` that stores its part of `blocks` blocks from `lba` on: first block and count.
    fn range_on_leg(&self, leg: usize, lba: u64, blocks: u32) -> (u64, u32);
}

/// A leg and its outbox.
struct LegChannel {
    channel: Box<dyn IoChannel>,
    /// Children, with the index of their parent as token.
    requests: Vec<Request>,
    /// Number of children that the leg has accepted.
    sent: usize,
    segments: Vec<Segment>,
    /// Children accepted and not completed by the leg.
    outstanding: usize,
}

/// A request in flight.
#[derive(Clone, Copy, Debug, Default)]
struct ParentRequest {
    token: u64,
    /// Children that have not completed.
    left: u32,
    /// The first error.
    status: IoStatus,
}

/// Maximum number of requests split at once.
const BATCH: usize = 64;
/// Maximum number of requests in flight: each has an entry on every leg.
const DEPTH_MAX: u32 = 4096;

/// The limits that all legs can meet: those of the first, lowered to stricter ones of the others. The
/// legs have blocks of equal size.
pub(crate) fn common_leg_limits<'a>(legs: impl IntoIterator<Item = &'a Limits>) -> Option<Limits> {
    let mut legs = legs.into_iter();
    let mut limits = legs.next()?.clone();
    for leg in legs {
        limits.request_blocks_max = limits.request_blocks_max.min(leg.request_blocks_max);
        limits.segments_max = limits.segments_max.min(leg.segments_max);
        limits.depth_max = limits.depth_max.min(leg.depth_max);
        limits.durability = limits.durability.weaker(leg.durability);
        limits.operations = limits.operations.intersection(leg.operations);
        limits.atomic_write_blocks = limits.atomic_write_blocks.min(leg.atomic_write_blocks);
    }
    limits.depth_max = limits.depth_max.min(DEPTH_MAX);
    limits.operations =
        limits.operations.without(OperationSet::from_operations(&[Operation::CompareAndWrite]));
    Some(limits)
}

impl<D: BlockLayout> MultiLegChannel<D> {
    pub(crate) fn new(
        legs: Vec<Box<dyn IoChannel>>,
        deal: D,
        limits: Limits,
    ) -> Result<Self, Error> {
        let wake = CombinedWakeSource::from_sources(legs.iter().map(|leg| leg.wake_source()))?;
        let depth = limits.depth_max as usize;
        let leg = |channel: Box<dyn IoChannel>| {
            // A batch ends before the table could overflow, and one request always fits.
            let segments = usize::from(channel.limits().segments_max) + 4 * BATCH;
            LegChannel {
                channel,
                requests: Vec::with_capacity(BATCH),
                sent: 0,
                segments: Vec::with_capacity(segments),
                outstanding: 0,
            }
        };
        Ok(Self {
            legs: legs.into_iter().map(leg).collect(),
            deal,
            parents: vec![ParentRequest::default(); depth].into(),
            free: (0..limits.depth_max).rev().collect(),
            below: CompletionBatch::with_capacity(depth),
            ready: CompletionQueue::with_depth(limits.depth_max),
            limits,
            wake,
        })
    }

    /// Replaces the channel of the first leg, which has not been used yet, by one with completions
    /// pending for another submitter; their tokens lack [`BlockLayout::MARK`].
    pub(crate) fn replace_first_channel(
        &mut self,
        channel: Box<dyn IoChannel>,
        outstanding: usize,
    ) {
        // A source that cannot be added to the epoll set keeps the thread awake.
        if self.wake.add_source(channel.wake_source()).is_err() {
            self.wake = CombinedWakeSource::Nothing;
        }
        let depth =
            u32::try_from(outstanding).unwrap_or(u32::MAX).saturating_add(self.limits.depth_max);
        self.ready = CompletionQueue::with_depth(depth);
        (self.legs[0].channel, self.legs[0].outstanding) = (channel, outstanding);
    }

    /// Splits leading `requests` until a batch is full; returns their number.
    fn accept_and_split_requests(&mut self, requests: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in requests.iter().take(BATCH) {
            // A completion that waits to be polled has freed its entry, and still counts.
            if self.free.len() <= self.ready.len() || !self.has_space_for() {
                break;
            }
            count += 1;
            match valid_request_segments(&self.limits, request, segments) {
                Err(status) => self.queue_completion(request.token, status),
                Ok(own) => self.split_request(request, own),
            }
        }
        count
    }

    /// Whether every outbox has space for a child with the maximum number of segments.
    fn has_space_for(&self) -> bool {
        self.legs.iter().all(|leg| {
            let room = leg.segments.capacity() - leg.segments.len();
            room >= usize::from(leg.channel.limits().segments_max)
        })
    }

    /// Adds the part of each leg to its outbox.
    fn split_request(&mut self, request: &Request, own: &[Segment]) {
        let is_flush = request.operation == Operation::Flush;
        if request.blocks == 0 && !is_flush {
            return self.queue_completion(request.token, IoStatus::SUCCESS);
        }
        let Some(number) = self.free.pop() else { return };
        let mut left = 0;
        for (index, leg) in self.legs.iter_mut().enumerate() {
            let (lba, blocks) = match is_flush {
                true => (request.lba, request.blocks),
                false => self.deal.range_on_leg(index, request.lba, request.blocks),
            };
            if blocks > 0 || is_flush {
                let segment_first = u32::try_from(leg.segments.len()).unwrap_or(u32::MAX);
                let (token, segment_count) = (D::MARK | u64::from(number), 0);
                // The source of a copy is not mapped: copies are only supported with a single leg.
                let child =
                    Request { token, lba, blocks, segment_first, segment_count, ..*request };
                leg.requests.push(child);
                left += 1;
            }
        }
        self.parents[number as usize] =
            ParentRequest { token: request.token, left, status: IoStatus::SUCCESS };
        self.distribute_segments(request, own);
    }

    /// Distributes the memory of a request, split at chunk boundaries, to the children just created.
    fn distribute_segments(&mut self, request: &Request, own: &[Segment]) {
        if let [leg] = &mut *self.legs {
            leg.segments.extend_from_slice(own);
            if let Some(child) = leg.requests.last_mut() {
                child.segment_count = request.segment_count;
            }
            return;
        }
        let mut pieces = SegmentCursor::new(own);
        let (mut lba, end) = (request.lba, request.lba + u64::from(request.blocks));
        while lba < end && !own.is_empty() {
            let (leg, left) = self.deal.leg_of_block(lba);
            let blocks = left.min(end - lba);
            let len_bytes = blocks * u64::from(self.limits.block_size);
            let leg = &mut self.legs[leg];
            let before = leg.segments.len();
            pieces.take_into_list(len_bytes, &mut leg.segments);
            if let Some(child) = leg.requests.last_mut() {
                let more = u16::try_from(leg.segments.len() - before).unwrap_or(u16::MAX);
                child.segment_count = child.segment_count.saturating_add(more);
            }
            lba += blocks;
        }
    }

    /// Submits the outboxes as the legs accept them. Returns whether all were submitted.
    fn submit_queued_children(&mut self, now: Instant) -> bool {
        let mut all = true;
        for leg in &mut self.legs {
            let taken = leg.channel.submit(now, &leg.requests[leg.sent..], &leg.segments);
            leg.sent += taken;
            leg.outstanding += taken;
            if leg.sent == leg.requests.len() {
                leg.requests.clear();
                leg.segments.clear();
                leg.sent = 0;
            } else {
                all = false;
            }
        }
        all
    }

    fn has_queued_children(&self) -> bool {
        self.legs.iter().any(|leg| !leg.requests.is_empty())
    }

    fn queue_completion(&mut self, token: u64, status: IoStatus) {
        self.ready.push(IoCompletion { token, status, result: 0 });
    }

    /// Accounts for the completions of a leg.
    fn handle_leg_completions(&mut self) {
        let Self { parents, free, ready, below, .. } = self;
        for completion in below.drain() {
            if completion.token & D::MARK != D::MARK {
                ready.push(completion);
                continue;
            }
            let Ok(number) = u32::try_from(completion.token ^ D::MARK) else { continue };
            let parent = &mut parents[number as usize];
            parent.left -= 1;
            if parent.status.is_success() {
                parent.status = completion.status;
            }
            if parent.left == 0 {
                free.push(number);
                let ParentRequest { token, status, .. } = *parent;
                ready.push(IoCompletion { token, status, result: 0 });
            }
        }
    }
}

impl<D: BlockLayout> IoChannel for MultiLegChannel<D> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut done = 0;
        if self.has_queued_children() && !self.submit_queued_children(now) {
            return done;
        }
        while done < requests.len() {
            let count = self.accept_and_split_requests(&requests[done..], segments);
            done += count;
            if count == 0 || !self.submit_queued_children(now) {
                break;
            }
        }
        done
    }

    fn flush_submissions(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.channel.flush_submissions());
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        for index in 0..self.legs.len() {
            let leg = &mut self.legs[index];
            leg.outstanding -= leg.channel.poll(now, &mut self.below);
            self.handle_leg_completions();
        }
        if self.has_queued_children() {
            self.submit_queued_children(now);
            self.flush_submissions();
        }
        self.ready.drain_into(completions)
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        let each = self.legs.iter().map(|leg| leg.channel.doorbell_stats());
        each.fold(DoorbellStats::default(), DoorbellStats::plus)
    }

    fn known_write_loss_count(&self) -> u64 {
        self.legs.iter().map(|leg| leg.channel.known_write_loss_count()).sum()
    }

    /// All losses so far, or none: a smaller count does not identify the leg.
    fn ack_repaired_write_losses(&mut self, count: u64) {
        let counts: Vec<u64> =
            self.legs.iter().map(|leg| leg.channel.known_write_loss_count()).collect();
        if counts.iter().sum::<u64>() <= count {
            for (leg, count) in self.legs.iter_mut().zip(counts) {
                leg.channel.ack_repaired_write_losses(count);
            }
        }
    }

    /// All legs, and if one cannot, why: the owner goes on with all or none.
    fn accept_write_losses(&mut self) -> Result<(), Error> {
        self.legs.iter_mut().try_for_each(|leg| leg.channel.accept_write_losses())
    }
}

impl<D: BlockLayout> ChannelWakeup for MultiLegChannel<D> {
    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() {
            return Instant::default();
        }
        self.legs.iter().map(|leg| leg.channel.wake_at()).min().unwrap_or(Instant::NEVER)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_local_kernel(&self) -> bool {
        self.legs.iter().all(|leg| leg.channel.is_done_by_local_kernel())
    }

    fn arm(&mut self) -> bool {
        // A leg that has not accepted everything wakes the thread with its next completion. If none
        // is pending, there is no wake-up, so the thread must stay awake.
        let mut busy = !self.ready.is_empty();
        for leg in &mut self.legs {
            busy |= leg.channel.arm() || (!leg.requests.is_empty() && leg.outstanding == 0);
        }
        busy
    }

    fn disarm(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.channel.disarm());
    }
}
