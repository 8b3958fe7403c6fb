//! Channel of a [`Bdev`](crate::Bdev): the software queue of one thread.
//!
//! ```text
//!   submit   check range and claim ─> assign tags ─> requests, tags as tokens ──────> context
//!   poll     completions with original tokens <─ free tags, count <────────────────── context
//! ```
//!
//! Submission and completion are batched; a single request has a path without the setup of a batch.
//! The slow path handles everything else: quiesced, resized or removed devices, operations other than
//! read and write, and requests that must be rejected.

mod fence_wait;
mod lost_writes;
mod slow_path;
mod tag_table;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    ChannelGroup, ChannelWakeup, CompletionBatch, DoorbellStats, Error, Instant, IoChannel, Limits,
    Operation, OperationSet, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_linux::poll_set::{Interest, PollSet};

pub(crate) use self::lost_writes::LostWriteCounter;
use self::tag_table::{BatchTraits, TagTable};
use crate::bdev::{ChannelId, ChannelMode, ChannelShared, ClaimGuard};
use crate::completion_queue::CompletionQueue;
use crate::context::{HardwareContextRef, SharedContext};
use crate::queue_map::ContextType;
use crate::quiesce::QuiesceEntry;
use crate::write_fence::{FencedRequest, WriteFence};

/// The I/O channel of one thread to a bdev.
pub struct Channel {
    tags: TagTable,
    /// The default context, and those for reads and polled requests if they differ.
    lanes: Vec<HardwareContextRef>,
    gate: FastPathCheck,
    /// Requests that are being submitted to a context.
    outgoing: Vec<Request>,
    port: Arc<ChannelShared>,
    grant: Arc<ClaimGuard>,
    /// Value of `attention` when the channel last handled changes.
    seen: u64,
    block_shift: u32,
    read_lane: u8,
    poll_context: u8,
    /// Every request takes the slow path.
    is_slow: bool,
    /// Every completion is checked: `is_slow`, or flushes are in flight.
    is_careful: bool,
    /// Flushes in flight.
    flushes: usize,
    /// Write losses of the device that were reported to the client or precede its open.
    reported_values: u64,
    /// The waker of the device cannot be armed.
    is_deaf: bool,
    is_removed: bool,
    /// Completions of requests that were rejected or aborted.
    refused: CompletionQueue,
    holds: Vec<QuiesceEntry>,
    fences: Vec<WriteFence>,
    /// Id of the fence around this channel's writes, once its client has closed it.
    fence: Option<u64>,
    /// Requests that wait for a fence.
    waiting: Vec<FencedRequest>,
    limits: Limits,
    wake: ChannelWakeSource,
}

/// Precomputed checks of a batch for the fast path.
#[derive(Clone, Copy, Debug)]
struct FastPathCheck {
    /// Kind bits that no request of the batch may have.
    banned: u16,
    block_count: u64,
    /// Operations that the device supports and the claim permits.
    support: OperationSet,
    is_read_only: bool,
}

/// Wake source of the thread of a channel.
enum ChannelWakeSource {
    /// The waker of the device alone.
    Bell,
    /// An epoll descriptor over that waker and those of the contexts.
    Several(OwnedFd),
}

/// Requests prepared at once. They and their tag entries fit into the L1 cache.
const BATCH_MAX: usize = 128;
/// The bit of a kind that stands for [`RequestFlags::POLLED`].
const POLLED_KIND: u16 = (RequestFlags::POLLED.0 as u16) << 8;
const _: () = assert!(
    Operation::Read as u8 == 0 && Operation::Write as u8 == 1,
    "of these two and no other operation no bit is set but the lowest"
);

/// LBAs from here on could overflow when a block count is added.
const LBA_HIGH: u64 = 1 << 63;

/// Operations that change blocks.
pub(crate) const WRITING: OperationSet = OperationSet::from_operations(&[
    Operation::Write,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::WriteUncorrectable,
    Operation::Copy,
    Operation::CompareAndWrite,
]);

impl Channel {
    /// Opens a channel under this claim.
    pub(crate) fn open(grant: Arc<ClaimGuard>, limits: Limits) -> Result<Self, Error> {
        let shared = Arc::clone(&grant.shared);
        let port = shared.register_channel(&grant.holder)?;
        // From here on, dropping the channel releases the index.
        let tags = limits.depth_max;
        let support = limits.operations;
        let gate = FastPathCheck {
            banned: fast_path_excluded_kinds(support),
            block_count: 0,
            support,
            is_read_only: grant.claim.is_read_only(),
        };
        let mut channel = Self {
            tags: TagTable::new(tags),
            lanes: Vec::with_capacity(3),
            gate,
            outgoing: Vec::new(),
            port,
            grant,
            seen: 0,
            block_shift: limits.block_size.trailing_zeros(),
            read_lane: 0,
            poll_context: 0,
            is_slow: true,
            is_careful: true,
            flushes: 0,
            reported_values: shared.losses.count(),
            is_deaf: false,
            is_removed: false,
            refused: CompletionQueue::with_depth(tags),
            holds: Vec::new(),
            fences: Vec::new(),
            fence: None,
            waiting: Vec::new(),
            limits,
            wake: ChannelWakeSource::Bell,
        };
        channel.open_contexts()?;
        channel.wake = channel.combine_wake_sources()?;
        channel.port.is_open.store(true, Ordering::Release);
        channel.handle_changes();
        Ok(channel)
    }

    fn open_contexts(&mut self) -> Result<(), Error> {
        let options = &self.grant.shared.options;
        let (is_mq, map) = (options.mode != ChannelMode::SingleQueue, options.map);
        for of in [ContextType::Default, ContextType::Read, ContextType::Poll] {
            // Mode `single`: one context behind one lock.
            let context = if is_mq { map.context_of_channel(of, self.port.index) } else { Some(0) };
            let is_wanted = is_mq || of == ContextType::Default;
            let Some(context) = context.filter(|_| is_wanted) else { continue };
            let is_owned = is_mq && map.is_exclusive(of, context, options.channels_max);
            let lane = self.open_context(of, context, is_owned)?;
            let index = u8::try_from(self.lanes.len()).unwrap_or(0);
            match of {
                ContextType::Default => {}
                ContextType::Read => self.read_lane = index,
                ContextType::Poll => self.poll_context = index,
            }
            self.lanes.push(lane);
        }
        Ok(())
    }

    fn open_context(
        &self,
        of: ContextType,
        context: u32,
        is_owned: bool,
    ) -> Result<HardwareContextRef, Error> {
        let shared = &self.grant.shared;
        let is_polled = of == ContextType::Poll;
        if is_owned {
            return Ok(HardwareContextRef::owned(shared.open_channel()?, is_polled));
        }
        let context = shared.shared_context(of, context);
        let member = SharedContext::add_member(context, &self.port, self.limits.depth_max, || {
            // Other threads use it, too.
            ChannelGroup::open_alone(|| shared.open_channel())
        })?;
        Ok(HardwareContextRef::shared(member, is_polled))
    }

    /// Combines all wake sources of the thread in one epoll descriptor.
    fn combine_wake_sources(&self) -> Result<ChannelWakeSource, Error> {
        let refuse = |error: std::io::Error| format!("wait for a channel: {error}");
        let watch = PollSet::new().map_err(refuse).map_err(Error::environment)?;
        let readable = Interest { readable: true, writable: false };
        let mut added = Vec::new();
        let mut add = |descriptor: BorrowedFd<'_>| added.push(watch.add(descriptor, 0, readable));
        self.lanes.iter().for_each(|lane| lane.for_each_wake_descriptor(&mut add));
        if added.is_empty() {
            return Ok(ChannelWakeSource::Bell);
        }
        added.extend(self.port.waker.descriptor(0).map(|waker| watch.add(waker, 0, readable)));
        added.into_iter().collect::<Result<(), _>>().map_err(refuse).map_err(Error::environment)?;
        Ok(ChannelWakeSource::Several(watch.into()))
    }

    /// The index of this channel on its device.
    pub fn id(&self) -> ChannelId {
        ChannelId(self.port.index)
    }

    /// The context of the first request, and how many leading requests use the same.
    #[inline]
    fn context_of_leading_requests(&self, requests: &[Request]) -> (usize, usize) {
        if self.lanes.len() <= 1 {
            return (0, requests.len());
        }
        let Some(lane) = requests.first().map(|first| self.context_index_of(first)) else {
            return (0, 0);
        };
        let same = requests.iter().take_while(|request| self.context_index_of(request) == lane);
        (lane, same.count())
    }

    #[inline]
    fn context_index_of(&self, request: &Request) -> usize {
        let lane = if request.flags.has(RequestFlags::POLLED) && self.poll_context > 0 {
            self.poll_context
        } else if request.operation as u8 == Operation::Read as u8 {
            self.read_lane
        } else {
            0
        };
        usize::from(lane)
    }

    /// The number of free tags, grown for `count` requests if permitted.
    #[inline]
    pub(super) fn grow_free_tags(&mut self, count: usize) -> usize {
        if self.tags.free_tag_count() < count + self.refused.len() && self.tags.may_grow() {
            self.tags.grow(count + self.refused.len());
        }
        self.tags.free_tag_count().saturating_sub(self.refused.len())
    }

    /// Whether a single request has a free tag and qualifies for the fast path.
    #[inline]
    fn can_submit_single(&self, request: &Request) -> bool {
        !self.is_slow
            && self.tags.free_tag_count() > self.refused.len()
            && self.gate.allows(BatchTraits::from_requests(request))
    }

    /// Submits a single request without the setup of a batch.
    #[inline]
    fn submit_single(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> usize {
        let mut sent = self.tags.assign_tag(now, request);
        let lane = match self.lanes.as_mut_slice() {
            [lane] => lane,
            _ => {
                let lane = self.context_index_of(request);
                &mut self.lanes[lane]
            }
        };
        if sent.flags.has(RequestFlags::POLLED) {
            // The flag selected the context; the device below must not see it.
            sent.flags.0 &= !RequestFlags::POLLED.0;
        }
        let taken = lane.submit(now, std::slice::from_mut(&mut sent), segments);
        if taken == 0 {
            self.publish_in_flight();
        } else {
            self.tags.mark_one_in_use();
        }
        taken
    }

    /// Submits in batches of requests for the same context. Not inlined: a single request does not pay
    /// for the stack frame.
    #[inline(never)]
    fn submit_batches(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut taken = 0;
        while taken < requests.len() {
            let rest = &requests[taken..];
            let room = self.grow_free_tags(rest.len());
            let (lane, same) =
                self.context_of_leading_requests(&rest[..rest.len().min(room).min(BATCH_MAX)]);
            if same == 0 {
                break;
            }
            let batch = &rest[..same];
            let fast = match self.is_slow {
                true => None,
                false => self.submit_batch(now, lane, batch, segments),
            };
            let count = fast.unwrap_or_else(|| self.submit_slow_path(now, lane, batch, segments));
            taken += count;
            if count < same {
                break;
            }
        }
        self.publish_in_flight();
        taken
    }

    /// Submits requests for one context. The caller has ensured that there are enough tags.
    #[inline]
    fn submit_batch(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> Option<usize> {
        let traits = self.tags.assign_tags(now, requests, &mut self.outgoing);
        if !self.gate.allows(traits) {
            return None;
        }
        Some(self.submit_to_context(now, lane, traits, segments))
    }

    /// Submits the prepared requests and returns how many were accepted.
    #[inline]
    fn submit_to_context(
        &mut self,
        now: Instant,
        lane: usize,
        traits: BatchTraits,
        segments: &[Segment],
    ) -> usize {
        if traits.kinds & POLLED_KIND != 0 {
            // The flag selected the context; the device below must not see it.
            let kept = !RequestFlags::POLLED.0;
            self.outgoing.iter_mut().for_each(|request| request.flags.0 &= kept);
        }
        let count = self.outgoing.len();
        let taken = self.lanes[lane].submit(now, &mut self.outgoing, segments);
        self.tags.mark_in_use(count, taken);
        taken
    }

    /// Polls one context and restores the original tokens of its completions.
    #[inline(always)]
    fn poll_context(
        &mut self,
        lane: usize,
        now: Instant,
        completions: &mut CompletionBatch,
    ) -> usize {
        let Self { tags, lanes, port, block_shift, .. } = self;
        let start = completions.len();
        if lanes[lane].poll(now, completions) == 0 {
            return 0;
        }
        let given = completions.tail_mut(start);
        let count = given.len();
        match given {
            [completion] => tags.release_one(now, completion, *block_shift, &port.meter),
            given => tags.release_tags(now, given, *block_shift, &port.meter),
        }
        count
    }

    /// Not inlined: a channel with one context does not pay for a loop.
    #[inline(never)]
    fn poll_contexts(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        (0..self.lanes.len()).map(|lane| self.poll_context(lane, now, completions)).sum()
    }

    /// Not inlined, as [`poll_contexts`](Self::poll_contexts).
    #[inline(never)]
    fn flush_contexts(&mut self) {
        self.lanes.iter_mut().for_each(HardwareContextRef::flush_submissions);
    }

    /// Publishes the upper bound of requests in flight in this iteration. Returns whether the device has
    /// changed.
    #[inline]
    fn publish_in_flight_bound(&self, more: usize) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "both are depths")]
        let upper = (self.tags.in_flight() + more) as u32;
        self.port.in_flight.store(upper, Ordering::Relaxed);
        let shared = &self.grant.shared;
        // Store-load barrier between `in_flight` and `attention`: see `quiesce`.
        shared.barrier.notifier_barrier();
        shared.attention.0.load(Ordering::Relaxed) != self.seen
    }

    /// Publishes the number of requests in flight.
    #[inline]
    fn publish_in_flight(&self) {
        #[expect(clippy::cast_possible_truncation, reason = "a depth")]
        let count = self.tags.in_flight() as u32;
        self.port.in_flight.store(count, Ordering::Release);
    }
}

impl IoChannel for Channel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.publish_in_flight_bound(requests.len()) {
            self.handle_changes();
        }
        match requests {
            [request] if self.can_submit_single(request) => {
                self.submit_single(now, request, segments)
            }
            _ => self.submit_batches(now, requests, segments),
        }
    }

    #[inline]
    fn flush_submissions(&mut self) {
        match self.lanes.as_mut_slice() {
            [lane] => lane.flush_submissions(),
            _ => self.flush_contexts(),
        }
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        if self.grant.shared.attention.0.load(Ordering::Relaxed) != self.seen {
            self.handle_changes();
        }
        if self.is_careful {
            return self.poll_checking_losses(now, completions);
        }
        let depth = self.tags.in_flight();
        let mut found = match self.lanes.len() {
            1 => self.poll_context(0, now, completions),
            _ => self.poll_contexts(now, completions),
        };
        if found > 0 {
            self.port.meter.count_queue_depth(depth as u64);
            self.publish_in_flight();
        }
        if !self.refused.is_empty() {
            found += self.poll_slow_path(now, completions);
        }
        found
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.lanes
            .iter()
            .map(HardwareContextRef::doorbell_stats)
            .fold(DoorbellStats::default(), DoorbellStats::plus)
    }

    fn fence_writes(&mut self) {
        self.fence_client_writes();
    }

    fn accept_write_losses(&mut self) -> Result<(), Error> {
        self.lanes.iter_mut().try_for_each(HardwareContextRef::accept_write_losses)
    }
}

impl ChannelWakeup for Channel {
    fn wake_at(&self) -> Instant {
        if !self.refused.is_empty() {
            return Instant::default();
        }
        let lanes =
            self.lanes.iter().map(HardwareContextRef::wake_at).min().unwrap_or(Instant::NEVER);
        let waits = self.waiting.iter().map(|waiting| waiting.until).min();
        lanes.min(waits.unwrap_or(Instant::NEVER))
    }

    fn wake_source(&self) -> WakeSource<'_> {
        match &self.wake {
            ChannelWakeSource::Several(descriptor) => WakeSource::Descriptor(descriptor.as_fd()),
            ChannelWakeSource::Bell => {
                let waker = self.port.waker.descriptor(0);
                waker.map_or(WakeSource::None, WakeSource::Descriptor)
            }
        }
    }

    fn is_done_by_local_kernel(&self) -> bool {
        self.lanes.iter().all(HardwareContextRef::is_kernel_io)
    }

    fn arm(&mut self) -> bool {
        if self.grant.shared.attention.0.load(Ordering::Acquire) != self.seen {
            // A quiesce or fence has ended, or the device was removed.
            self.handle_changes();
            return true;
        }
        if !self.refused.is_empty() || self.is_deaf || self.can_proceed() {
            return true;
        }
        self.lanes.iter_mut().any(HardwareContextRef::arm)
    }

    fn disarm(&mut self) {
        self.lanes.iter_mut().for_each(HardwareContextRef::disarm);
    }
}

impl FastPathCheck {
    /// Whether every request of a batch qualifies for the fast path.
    #[inline]
    fn allows(&self, traits: BatchTraits) -> bool {
        traits.kinds & self.banned == 0 && traits.lbas < LBA_HIGH && traits.end <= self.block_count
    }
}

/// The fast path accepts supported reads and writes with any flags. A claim that permits writes also
/// permits reads.
fn fast_path_excluded_kinds(support: OperationSet) -> u16 {
    let has = |operation| support.has(operation);
    match (has(Operation::Read), has(Operation::Write)) {
        (true, true) => 0xfe,
        (true, false) => 0xff,
        (false, _) => 0xffff,
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.lanes.clear();
        self.publish_in_flight();
        // A fence around writes that have not completed remains after the channel is dropped.
        self.grant.shared.unregister_channel(&self.port);
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.tags.in_flight();
        out.debug_struct("Channel")
            .field("device", &self.grant.shared.name)
            .field("port", &self.port.index)
            .field("in_flight", &in_flight)
            .finish_non_exhaustive()
    }
}
