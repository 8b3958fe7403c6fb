//! I/O channel of one queue to one namespace's block device: batches requests and submits them.

use core::iter::Zip;
use core::slice::IterMut;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, Error, Instant, IoChannel, IoCounters, Limits,
    MediumMemory, Operation, Request, Segment, WakeSource,
};

use crate::controller::transport_interface::IoTotals;
use crate::io_stats::RegisteredCounters;
use crate::namespace::RevocableCacheInstance;

/// I/O channel to the block device of one namespace.
pub(super) struct NamespaceChannel {
    pub(super) nsid: u32,
    pub(super) limits: Limits,
    device: Arc<dyn BlockDevice>,
    backend: Box<dyn IoChannel>,
    /// Memory of the blocks, if reads may leave their data there.
    pub(super) medium: Option<MediumMemory>,
    /// Requests batched in this poll, and those rejected because the block device was full.
    requests: Box<[Request]>,
    /// Segment of the request with the same index: a batched request has at most one.
    segments: Box<[Segment]>,
    /// Capacity of the two arrays, which are allocated at first use.
    depth: usize,
    /// Number of batched requests.
    batched: usize,
    /// Cache instance, revoked when a flush fails.
    pub(super) cache: Option<Arc<RevocableCacheInstance>>,
    pub(super) counters: ChannelCounters,
    /// Block size of the namespace, as a power of two.
    pub(super) block_shift: u8,
    /// Since when requests are in flight.
    busy_since: Instant,
    /// Requests in flight at the block device.
    outstanding: u32,
    /// The namespace was removed or has another block device: no new command uses this channel.
    pub(super) is_retired: bool,
    wants_flush: bool,
    /// Completion signals are enabled: the thread sleeps, or is about to.
    is_armed: bool,
    /// The descriptor of the block device has been passed to the caller.
    is_known: bool,
}

/// Counters of the commands of a channel.
pub(super) enum ChannelCounters {
    /// Registered for readers. Commands are counted when they complete, with their latency.
    Registered(RegisteredCounters),
    /// For the health log only. Commands of one request are counted when they begin: those of the fast path
    /// in runs, which costs nothing per command.
    HealthLog(Box<IoCounters>),
}

/// State of a loop that batches alike requests, with the changing values in registers.
pub(super) struct RequestBatchBuilder<'a> {
    places: Zip<IterMut<'a, Request>, IterMut<'a, Segment>>,
    /// Index of the next entry.
    at: u32,
    batched: &'a mut usize,
    template: Request,
}

impl NamespaceChannel {
    /// Opens a channel that can batch `depth` requests.
    pub(super) fn open(
        nsid: u32,
        device: &Arc<dyn BlockDevice>,
        depth: usize,
        counters: ChannelCounters,
    ) -> Result<Self, Error> {
        let backend = device.channel()?;
        Ok(Self {
            nsid,
            limits: backend.limits().clone(),
            device: device.clone(),
            backend,
            medium: device.medium_memory(),
            requests: Box::default(),
            segments: Box::default(),
            depth,
            batched: 0,
            cache: None,
            counters,
            block_shift: 0,
            busy_since: Instant::default(),
            outstanding: 0,
            is_retired: false,
            wants_flush: false,
            is_armed: false,
            is_known: false,
        })
    }

    /// Whether this channel belongs to `device`.
    pub(super) fn belongs_to(&self, device: &Arc<dyn BlockDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Totals of its commands.
    pub(super) fn io_totals(&self) -> IoTotals {
        IoTotals::of_stats(&self.counters.counters().totals())
    }

    /// Whether no request is batched or in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.batched == 0
    }

    /// Whether the block device supports Flush.
    pub(super) fn can_flush(&self) -> bool {
        self.limits.operations.has(Operation::Flush)
    }

    /// Whether unflushed writes are lost at power loss.
    pub(super) fn loses_unflushed_writes(&self) -> bool {
        self.limits.durability == Durability::VolatileCache
    }

    /// Batches a request with at most one segment. The slot table is not larger than the capacity given
    /// when the channel was opened, so there is always space.
    pub(super) fn batch_request(&mut self, request: Request, segment: Segment) {
        let (mut batch, _) = self.start_batch(request);
        batch.add_request(request.token, request.lba, segment);
        batch.finish(1);
    }

    /// Counts a command that begins with one request and is not part of a run, unless it is counted when it
    /// completes.
    pub(super) fn count_single(&self, request: &Request) {
        if let ChannelCounters::HealthLog(counters) = &self.counters {
            let bytes = u64::from(request.blocks) * u64::from(self.limits.block_size);
            counters.count_success(request.operation as usize, 1, bytes, 0);
        }
    }

    /// Starts a loop that batches requests equal to this one except for token, first block and memory. Also
    /// returns the counters of commands that are counted when they begin.
    #[inline(always)]
    pub(super) fn start_batch(
        &mut self,
        template: Request,
    ) -> (RequestBatchBuilder<'_>, Option<&IoCounters>) {
        if self.requests.is_empty() {
            self.allocate_batch();
        }
        let Self { requests, segments, batched, counters, .. } = self;
        let places = requests[*batched..].iter_mut().zip(segments[*batched..].iter_mut());
        let at = truncate_to_u32(*batched);
        let begun = match counters {
            ChannelCounters::Registered(_) => None,
            ChannelCounters::HealthLog(counters) => Some(&**counters),
        };
        (RequestBatchBuilder { places, at, batched, template }, begun)
    }

    #[cold]
    fn allocate_batch(&mut self) {
        self.requests = vec![Request::PLACEHOLDER; self.depth].into();
        self.segments = vec![Segment::default(); self.depth].into();
    }

    /// Submits a single request with its own segments. Returns false if the block device is full.
    pub(super) fn submit_unbatched(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
    ) -> bool {
        let is_taken = self.backend.submit(now, core::slice::from_ref(request), segments) > 0;
        if self.outstanding == 0 {
            self.busy_since = now;
        }
        self.outstanding += u32::from(is_taken);
        self.wants_flush |= is_taken;
        is_taken
    }

    /// Submits the batched requests.
    #[inline]
    pub(super) fn submit(&mut self, now: Instant) {
        if self.batched > 0 {
            let requests = &self.requests[..self.batched];
            let taken = self.backend.submit(now, requests, &self.segments);
            if self.outstanding == 0 {
                self.busy_since = now;
            }
            self.record_submitted(taken.min(self.batched));
        }
        if self.wants_flush {
            self.wants_flush = false;
            self.backend.flush_submissions();
        }
    }

    /// Polls for completions.
    #[inline]
    pub(super) fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) {
        if self.outstanding > 0 {
            let before = completions.as_slice().len();
            self.backend.poll(now, completions);
            let count = truncate_to_u32(completions.as_slice().len() - before);
            self.outstanding = self.outstanding.saturating_sub(count);
            if self.outstanding == 0 {
                self.counters.counters().add_busy(now.since(self.busy_since));
            }
        }
    }

    /// Removes the batched requests that were not submitted and returns their tokens.
    pub(super) fn take_unsubmitted_tokens(&mut self) -> Vec<u64> {
        let count = core::mem::take(&mut self.batched);
        self.requests[..count].iter().map(|request| request.token).collect()
    }

    /// Blocks all access to the blocks with writes in flight until these complete.
    pub(super) fn fence_writes(&mut self) {
        if self.outstanding > 0 {
            self.backend.fence_writes();
        }
    }

    /// Latest time of the next poll of the block device, even without activity.
    pub(super) fn wake_at(&self) -> Instant {
        if self.outstanding > 0 { self.backend.wake_at() } else { Instant::NEVER }
    }

    /// Enables completion signals before the thread sleeps. Returns true if it must stay awake: a
    /// completion is available or would not be signalled, or requests are batched that no completion will
    /// make space for.
    pub(super) fn arm_wakeup(&mut self) -> bool {
        if self.outstanding == 0 {
            return self.batched > 0;
        }
        if matches!(self.backend.wake_source(), WakeSource::None) {
            return true;
        }
        self.is_armed = true;
        self.backend.arm()
    }

    /// Whether a completion is pending that would not be signalled.
    pub(super) fn has_pending_without_wakeup(&self) -> bool {
        self.outstanding > 0 && !self.is_armed
    }

    /// Disables completion signals after the thread has woken.
    pub(super) fn disarm_wakeup(&mut self) {
        if core::mem::take(&mut self.is_armed) {
            self.backend.disarm();
        }
    }

    /// Descriptor of the block device, if it has one, at the first call only.
    pub(super) fn take_new_wake_fd(&mut self) -> Option<BorrowedFd<'_>> {
        let is_known = core::mem::replace(&mut self.is_known, true);
        match self.backend.wake_source() {
            WakeSource::Descriptor(descriptor) if !is_known => Some(descriptor),
            _ => None,
        }
    }

    #[inline]
    fn record_submitted(&mut self, taken: usize) {
        self.outstanding += truncate_to_u32(taken);
        self.wants_flush |= taken > 0;
        if taken < self.batched {
            self.remove_submitted(taken);
        }
        self.batched -= taken;
    }

    /// Moves the requests that were not submitted to the front.
    #[cold]
    fn remove_submitted(&mut self, taken: usize) {
        self.requests.copy_within(taken..self.batched, 0);
        self.segments.copy_within(taken..self.batched, 0);
        for (place, request) in (0..).zip(&mut self.requests[..self.batched - taken]) {
            request.segment_first = place;
        }
    }
}

impl ChannelCounters {
    /// The counters.
    #[inline]
    pub(super) fn counters(&self) -> &IoCounters {
        match self {
            Self::Registered(registered) => registered.counters(),
            Self::HealthLog(counters) => counters,
        }
    }
}

impl RequestBatchBuilder<'_> {
    /// Batches one request.
    #[inline(always)]
    pub(super) fn add_request(&mut self, token: u64, lba: u64, segment: Segment) {
        let place = self.places.next();
        let (request, place) =
            place.expect("the batch has an entry for every command of the slot table");
        *request = Request { token, lba, segment_first: self.at, ..self.template };
        *place = segment;
        self.at += 1;
    }

    /// Ends the loop, in which `count` requests were batched.
    #[inline(always)]
    pub(super) fn finish(self, count: u32) {
        *self.batched += count as usize;
    }
}

impl core::fmt::Debug for NamespaceChannel {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("Channel")
            .field("nsid", &self.nsid)
            .field("gathered", &self.batched)
            .field("outstanding", &self.outstanding)
            .field("is_retired", &self.is_retired)
            .finish_non_exhaustive()
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "bounded by the table of commands")]
fn truncate_to_u32(len: usize) -> u32 {
    len as u32
}
