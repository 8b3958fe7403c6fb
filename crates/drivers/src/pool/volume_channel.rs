//! I/O channel of a volume.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{
    ChannelGroup, ChannelWakeup, CompletionBatch, Error, Instant, InvalidSegment, IoChannel,
    IoCompletion, IoStatus, Limits, Memory, Operation, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_volume::format::BLOCKS_MAX;
use tenmil_volume::{DeviceAction, PoolError, PoolRequest, VolumeInfo};

use super::bounce_memory::BounceMemory;
use super::cached_extent_reads::{CachedExtentReads, token_slot};
use super::grow_pool::NewDeviceChannel;
use super::parent_image::ParentImage;
use super::parented_channel::ParentedChannel;
use super::pool_shared::{ClientInbox, ClientMessage, PoolSharedState, transfer_id};
use super::read_epochs::ReadEpochs;
use super::transfer_table::TransferTable;
use super::{OpenPool, PAGE_BYTES};
use crate::combined_wake_source::CombinedWakeSource;
use crate::request_validation::valid_request_segments;
use tenmil_block::CompletionQueue;
use tenmil_block::SegmentCursor;

/// I/O channel of a volume.
pub(super) struct VolumeChannel {
    open: Arc<OpenPool>,
    inbox: Arc<ClientInbox>,
    volume: u64,
    limits: Limits,
    /// Current number of blocks.
    block_count: Arc<AtomicU64>,
    /// Channel to the devices, and to the volume's parent past their end. `None` while it is being
    /// closed.
    below: Option<Box<dyn IoChannel>>,
    wake: CombinedWakeSource,
    requests: Box<[VolumeRequest]>,
    free: Vec<u32>,
    ready: CompletionQueue,
    transfers: TransferTable,
    /// Requests that the device has not accepted yet.
    queue: VecDeque<Request>,
    /// Segments: for each slot those of its request, followed by parts of them.
    table: Box<[Segment]>,
    messages: VecDeque<ClientMessage>,
    /// Some device that it waits for has no wake source.
    is_deaf: bool,
    /// Reads mapped by the extent cache.
    known: CachedExtentReads,
    /// Indices of the requests of a batch that need the pool.
    unknown: Vec<usize>,
    /// Bounce memory, if the data has checksums.
    bounce: Option<BounceMemory>,
    /// Requests to send to the pool.
    pool_requests: Vec<(u32, PoolRequest)>,
    /// Losses reported to the client by a failed flush; and in `telling`, those reported by flushes that
    /// have completed and not been polled yet.
    reported_losses: u64,
    telling: u64,
}

/// A slot of the request table.
#[derive(Clone, Copy, Debug)]
struct VolumeRequest {
    request: Request,
    /// Number of segments used in the slot's part of the table.
    used: u32,
    /// Status of a failure that the pool does not know of.
    status: IoStatus,
    /// [`IoCompletion::HOLE`], or zero.
    result: u32,
    stage: RequestState,
}

/// State of a request, named for what it awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestState {
    /// The slot is free.
    Idle,
    /// The response of the pool.
    Asked,
    /// The flush of a FUA request.
    Forced,
}

impl VolumeChannel {
    pub(super) fn open(
        open: &Arc<OpenPool>,
        info: &VolumeInfo,
        parent: Option<&ParentImage>,
        limits: &Limits,
        block_count: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let volume = info.id;
        let readers = ReadEpochs::new();
        let (inbox, below) = ChannelGroup::open_together(|| -> Result<_, Error> {
            let (inbox, mut below) =
                open.open_transfer_channel(Some(readers.register_channel()))?;
            if info.reach > 0 {
                below = Box::new(ParentedChannel::new(below, parent, &open.geometry)?);
            }
            Ok((inbox, below))
        })?;
        let epoch = open.shared.lock().run_invalidation_counter(volume);
        let per_block = u32::try_from(open.geometry.blocks_in_page).unwrap_or(1);
        let waker = inbox.waker.descriptor(0).map_or(WakeSource::None, WakeSource::Descriptor);
        let wake = CombinedWakeSource::from_sources([below.wake_source(), waker])?;
        let depth = limits.depth_max;
        let bounce = || BounceMemory::new(&open.regions, depth, limits.request_blocks_max);
        let bounce = info.has_checksums.then(bounce).transpose()?;
        let work = VolumeRequest {
            request: Request::PLACEHOLDER,
            used: 0,
            status: IoStatus::SUCCESS,
            result: 0,
            stage: RequestState::Idle,
        };
        Ok(Self {
            open: Arc::clone(open),
            inbox,
            volume,
            below: Some(below),
            wake,
            requests: vec![work; depth as usize].into(),
            free: (0..depth).rev().collect(),
            ready: CompletionQueue::with_depth(depth),
            transfers: TransferTable::with_capacity(2 * depth as usize),
            queue: VecDeque::with_capacity(2 * depth as usize),
            table: vec![Segment::default(); depth as usize * slot_segments_max(limits)].into(),
            messages: VecDeque::with_capacity(2 * depth as usize),
            is_deaf: false,
            known: CachedExtentReads::new(readers, epoch, limits, per_block),
            unknown: Vec::with_capacity(depth as usize),
            bounce,
            pool_requests: Vec::new(),
            reported_losses: open.shared.write_loss_count(),
            telling: 0,
            limits: limits.clone(),
            block_count,
        })
    }

    /// Divides requests into cached reads and those that need the pool.
    #[inline]
    fn batch_cached_reads(&mut self, requests: &[Request]) {
        for (index, request) in requests.iter().enumerate() {
            match self.known.cached_location(request) {
                Some(at) => self.batch_cached_read(request, at),
                None => self.unknown.push(index),
            }
        }
        // If the locations became invalid, all reads of the batch go to the pool as well.
        if !self.known.batch.is_empty() && !self.begin_batch_reads(0) {
            self.unknown.clear();
            self.unknown.extend(0..requests.len());
        }
    }

    /// Adds a read to the batch.
    #[inline]
    fn batch_cached_read(&mut self, request: &Request, at: u64) {
        if let Some(slot) = self.free.pop() {
            self.known.add_read(slot, request, at);
        }
    }

    /// Starts the reads of the batch from `first` on; on failure they have been removed from it.
    #[inline]
    fn begin_batch_reads(&mut self, first: usize) -> bool {
        self.known.begin_batch_reads(first, self.open.shared.transaction(), &mut self.free)
    }

    /// Looks up the location of a read in the locked pool, caches it, and adds the read to the batch.
    fn batch_read_by_lookup(&mut self, state: &mut PoolSharedState, request: &Request) -> bool {
        if request.operation != Operation::Read || request.blocks == 0 {
            return false;
        }
        let Some(run) = state.store.mapped_run(self.volume, request.lba) else { return false };
        self.known.cache_run(request.lba, run);
        let Some(at) = self.known.cached_location(request) else { return false };
        let first = self.known.batch.len();
        self.batch_cached_read(request, at);
        self.begin_batch_reads(first)
    }

    /// Submits the batch to the device, which validates its segments. Reads that it does not accept are
    /// queued.
    #[inline]
    fn submit_read_batch(&mut self, now: Instant, segments: &[Segment]) {
        let taken = match &mut self.below {
            Some(below) if self.queue.is_empty() => below.submit(now, &self.known.batch, segments),
            _ => 0,
        };
        if taken < self.known.batch.len() {
            self.defer_reads(taken, segments);
        }
        self.known.batch.clear();
    }

    /// Queues the reads of the batch from `first` on until the device accepts more.
    #[cold]
    fn defer_reads(&mut self, first: usize, segments: &[Segment]) {
        for index in first..self.known.batch.len() {
            let read = self.known.batch[index];
            let slot = token_slot(read.token);
            let own = read.segment_first as usize..;
            let own = segments.get(own).and_then(|own| own.get(..read.segment_count.into()));
            let Some(own) = own.filter(|own| own.len() <= self.limits.segments_max.into()) else {
                let (token, status) =
                    (self.known.abandon_read(read.token), IoStatus::INVALID_FIELD);
                self.free.push(slot);
                self.ready.push(IoCompletion { token, status, result: 0 });
                continue;
            };
            let first = self.segment_table_index(slot);
            self.table[first..][..own.len()].copy_from_slice(own);
            let segment_first = u32::try_from(first).unwrap_or(u32::MAX);
            self.queue.push_back(Request { segment_first, ..read });
        }
    }

    /// Sends requests with bounced data to the pool.
    fn send_to_pool_with_bounce(&mut self, requests: &[Request], segments: &[Segment]) {
        let mut unknown = std::mem::take(&mut self.unknown);
        let mut pool_requests = std::mem::take(&mut self.pool_requests);
        for request in unknown.drain(..).map(|index| &requests[index]) {
            let Some((slot, ask)) = self.build_pool_request(request, segments) else { continue };
            match self.copy_write_data_from_client(slot) {
                Ok(()) => pool_requests.push((slot, ask)),
                Err(InvalidSegment(_)) => self.complete_slot(slot, IoStatus::DATA_TRANSFER_ERROR),
            }
        }
        self.unknown = unknown;
        self.with_pool_locked(|state, inbox| {
            pool_requests.drain(..).for_each(|(slot, ask)| state.submit_request(inbox, slot, ask));
        });
        self.pool_requests = pool_requests;
        self.handle_pool_messages();
    }

    /// Copies write data from the client.
    fn copy_write_data_from_client(&self, slot: u32) -> Result<(), InvalidSegment> {
        let request = &self.requests[slot as usize].request;
        match &self.bounce {
            Some(bounce) if request.operation == Operation::Write => {
                bounce.copy_from_client(slot, request.blocks.into(), self.request_segments(slot))
            }
            _ => Ok(()),
        }
    }

    /// Copies verified read data to the client, or compares it.
    fn copy_or_compare_client_data(&self, slot: u32) -> IoStatus {
        let request = &self.requests[slot as usize].request;
        let Some(bounce) = &self.bounce else { return IoStatus::SUCCESS };
        let (blocks, own) = (request.blocks.into(), self.request_segments(slot));
        let done = match request.operation {
            Operation::Read => bounce.copy_to_client(slot, blocks, own).map(|()| true),
            Operation::Compare => bounce.equals_client_data(slot, blocks, own),
            _ => Ok(true),
        };
        match done {
            Ok(true) => IoStatus::SUCCESS,
            Ok(false) => IoStatus::COMPARE_FAILURE,
            Err(InvalidSegment(_)) => IoStatus::DATA_TRANSFER_ERROR,
        }
    }

    /// The segments of a request.
    fn request_segments(&self, slot: u32) -> &[Segment] {
        let count = self.requests[slot as usize].request.segment_count;
        &self.table[self.segment_table_index(slot)..][..usize::from(count)]
    }

    /// Accepts one request that needs the pool; there is a free slot.
    fn build_pool_request(
        &mut self,
        request: &Request,
        segments: &[Segment],
    ) -> Option<(u32, PoolRequest)> {
        let (slot, _) = self.assign_slot(request, segments, RequestState::Asked)?;
        let (volume, block, blocks) = (self.volume, request.lba, u64::from(request.blocks));
        let ask = match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => {
                PoolRequest::Read { volume, block, blocks }
            }
            Operation::Write => PoolRequest::Write { volume, block, blocks },
            Operation::Flush => PoolRequest::Flush,
            _ => PoolRequest::Trim { volume, block, blocks },
        };
        Some((slot, ask))
    }

    /// Assigns a slot to a request, and returns it with the number of segments; or completes the request
    /// if it needs none.
    #[inline]
    fn assign_slot(
        &mut self,
        request: &Request,
        segments: &[Segment],
        stage: RequestState,
    ) -> Option<(u32, u16)> {
        self.limits.block_count = self.block_count.load(Ordering::Relaxed);
        let own = match valid_request_segments(&self.limits, request, segments) {
            Ok(own) if request.blocks > 0 || request.operation == Operation::Flush => own,
            done => {
                let status = done.err().unwrap_or_default();
                self.ready.push(IoCompletion { token: request.token, status, result: 0 });
                return None;
            }
        };
        let slot = self.free.pop()?;
        let first = self.segment_table_index(slot);
        self.table[first..][..own.len()].copy_from_slice(own);
        let segment_count = u16::try_from(own.len()).unwrap_or(u16::MAX);
        self.requests[slot as usize] = VolumeRequest {
            request: Request { segment_count, ..*request },
            used: segment_count.into(),
            status: IoStatus::SUCCESS,
            result: 0,
            stage,
        };
        Some((slot, segment_count))
    }

    /// Index of the slot's part of the segment table.
    fn segment_table_index(&self, slot: u32) -> usize {
        slot as usize * slot_segments_max(&self.limits)
    }

    /// Sends the requests of a batch that need the pool.
    fn send_to_pool(&mut self, requests: &[Request], segments: &[Segment]) {
        if self.bounce.is_some() {
            return self.send_to_pool_with_bounce(requests, segments);
        }
        let open = Arc::clone(&self.open);
        let mut state = open.shared.lock_to_submit();
        let mut unknown = std::mem::take(&mut self.unknown);
        for request in unknown.drain(..).map(|index| &requests[index]) {
            if !self.batch_read_by_lookup(&mut state, request)
                && let Some((slot, ask)) = self.build_pool_request(request, segments)
            {
                state.submit_request(&self.inbox, slot, ask);
            }
        }
        self.unknown = unknown;
        open.shared.dispatch_actions(&mut state);
        state.take_messages(&self.inbox, &mut self.messages);
        drop(state);
        self.handle_pool_messages();
    }

    /// Calls `tell` under the lock, and takes the resulting messages.
    fn with_pool_locked(&mut self, tell: impl FnOnce(&mut PoolSharedState, &ClientInbox)) {
        let mut state = self.open.shared.lock_to_submit();
        tell(&mut state, &self.inbox);
        self.open.shared.dispatch_actions(&mut state);
        state.take_messages(&self.inbox, &mut self.messages);
    }

    /// Handles the messages of the pool.
    fn handle_pool_messages(&mut self) {
        while let Some(note) = self.messages.pop_front() {
            match note {
                ClientMessage::Do(
                    DeviceAction::ReadData { io, token, offset, at, blocks, .. }
                    | DeviceAction::WriteData { io, token, offset, at, blocks, .. },
                ) => self.queue_transfer(io, token, offset..offset + blocks, at),
                ClientMessage::Do(DeviceAction::ReadParent {
                    io,
                    token,
                    offset,
                    block,
                    blocks,
                }) => {
                    let at = BLOCKS_MAX + block;
                    self.queue_transfer(io, token, offset..offset + blocks, at);
                }
                ClientMessage::Do(DeviceAction::Zero { token, offset, blocks }) => {
                    self.fill_hole_part(token, offset..offset + blocks);
                }
                ClientMessage::Do(_) => {}
                ClientMessage::Ended(slot, status) => self.handle_pool_response(slot, status.err()),
                ClientMessage::More(more) => self.add_device_channel(more),
            }
        }
    }

    /// Adds the channel to a new device. Requests in flight are not affected.
    fn add_device_channel(&mut self, more: NewDeviceChannel) {
        let Some(below) = self.below.take() else { return };
        let reads = self.known.in_flight();
        let moves = self.transfers.in_flight_count();
        // The new source can end a sleep. One that cannot be added to the epoll set keeps the thread
        // awake.
        let source = more.channel.wake_source();
        let is_silent = matches!(source, WakeSource::None);
        self.is_deaf |= is_silent || self.wake.add_source(source).is_err();
        self.below = Some(more.combine_with_previous(below, reads + moves - self.queue.len()));
    }

    /// Queues a part of a request for the device.
    fn queue_transfer(&mut self, io: u64, token: u64, blocks: std::ops::Range<u64>, at: u64) {
        let operation = match self.requests[token_slot(token) as usize].request.operation {
            Operation::Compare | Operation::Verify if self.bounce.is_some() => Operation::Read,
            operation => operation,
        };
        let (first, count) = self.segments_of_blocks(token, &blocks);
        let through = if self.bounce.is_some() { self.table[first] } else { Segment::default() };
        let number = self.transfers.begin_transfer(io, through);
        let per_page = self.open.geometry.blocks_in_page;
        let blocks = (blocks.end - blocks.start) * per_page;
        self.queue.push_back(Request {
            token: number.into(),
            lba: at * per_page,
            operand: 0,
            segment_first: u32::try_from(first).unwrap_or(u32::MAX),
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            segment_count: u16::try_from(count).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        });
    }

    /// The segments of some blocks of a request: index and count.
    fn segments_of_blocks(&mut self, token: u64, blocks: &std::ops::Range<u64>) -> (usize, usize) {
        let slot = token_slot(token);
        let first = self.segment_table_index(slot);
        let VolumeRequest { request, used, .. } = self.requests[slot as usize];
        let own = usize::from(request.segment_count);
        if let Some(bounce) = &self.bounce {
            self.table[first + used as usize] = bounce.slot_segment(slot, blocks);
            self.requests[slot as usize].used = used + 1;
            return (first + used as usize, 1);
        }
        // A part is a copy of the segments, split at its start and end, in the slot's part of the table.
        if blocks.end - blocks.start == u64::from(request.blocks) {
            return (first, own);
        }
        let room = slot_segments_max(&self.limits);
        let (whole, cut) = self.table[first..first + room].split_at_mut(own);
        let mut pieces = SegmentCursor::new(whole);
        let page = u64::from(PAGE_BYTES);
        let Ok(()) = pieces.take_each_piece(blocks.start * page, |_, _| Ok::<(), Infallible>(()));
        let begin = used as usize - own;
        let mut end = begin;
        let Ok(()) = pieces.take_each_piece((blocks.end - blocks.start) * page, |piece, _| {
            cut[end] = piece;
            end += 1;
            Ok::<(), Infallible>(())
        });
        self.requests[slot as usize].used = u32::try_from(own + end).unwrap_or(u32::MAX);
        (first + own + begin, end - begin)
    }

    /// Executes a part of a request that is on unmapped blocks, which read as zeroes.
    fn fill_hole_part(&mut self, token: u64, blocks: std::ops::Range<u64>) {
        let work = &mut self.requests[token_slot(token) as usize];
        let is_whole = blocks.end - blocks.start == u64::from(work.request.blocks);
        if is_whole && self.bounce.is_none() && work.request.flags.has(RequestFlags::HOLES) {
            work.result = IoCompletion::HOLE;
            return;
        }
        let (first, count) = self.segments_of_blocks(token, &blocks);
        let work = &mut self.requests[token_slot(token) as usize];
        let regions = &self.open.regions;
        let is_compare = work.request.operation == Operation::Compare && self.bounce.is_none();
        for segment in &self.table[first..first + count] {
            let done = match is_compare {
                true => is_zero(regions, *segment),
                false => regions.fill(*segment, 0).map(|()| true),
            };
            match done {
                Ok(true) => {}
                Ok(false) => work.status = IoStatus::COMPARE_FAILURE,
                Err(_) => work.status = IoStatus::DATA_TRANSFER_ERROR,
            }
        }
    }

    /// Handles the response of the pool. A FUA write is followed by a flush.
    fn handle_pool_response(&mut self, slot: u32, error: Option<PoolError>) {
        let VolumeRequest { request, status, stage, .. } = self.requests[slot as usize];
        let is_flush = request.operation == Operation::Flush;
        let losses = self.open.shared.write_loss_count();
        let status = match error {
            // The pool has all durable data. Earlier writes of this channel may not be among them.
            None if is_flush && losses != self.reported_losses => IoStatus::WRITE_FAULT,
            Some(error) => error.status(),
            None if self.bounce.is_some() && status.is_success() => {
                self.copy_or_compare_client_data(slot)
            }
            None => status,
        };
        let changes = matches!(
            request.operation,
            Operation::Write | Operation::Deallocate | Operation::WriteZeroes
        );
        let is_forced = request.flags.has(RequestFlags::FUA) && changes;
        if is_forced && stage == RequestState::Asked && status.is_success() {
            self.requests[slot as usize].stage = RequestState::Forced;
            return self.with_pool_locked(|state, inbox| {
                state.submit_request(inbox, slot, PoolRequest::Flush)
            });
        }
        if is_flush && status == IoStatus::WRITE_FAULT {
            self.telling = losses;
        }
        self.complete_slot(slot, status);
    }

    /// Completes a request and frees its slot.
    fn complete_slot(&mut self, slot: u32, status: IoStatus) {
        let work = &mut self.requests[slot as usize];
        work.stage = RequestState::Idle;
        self.free.push(slot);
        let (token, result) = (work.request.token, work.result);
        self.ready.push(IoCompletion { token, status, result });
    }

    /// Polls the device. Completions of cached reads go directly to the caller.
    #[inline]
    fn poll_device(&mut self, now: Instant, completions: &mut CompletionBatch) {
        let Some(below) = &mut self.below else { return };
        let first = completions.len();
        if below.poll(now, completions) > 0 && self.open.shared.has_unrecovered_loss(&**below) {
            self.open.shared.handle_loss();
            CachedExtentReads::interrupt_reads_after_loss(completions.tail_mut(first));
        }
        let (transfers, bounce) = (&mut self.transfers, self.bounce.as_ref());
        self.known.handle_read_completions(completions, first, &mut self.free, |token, status| {
            transfers.handle_completion(token, status, bounce);
        });
    }

    /// Moves waiting completions to the client.
    #[inline(always)]
    fn drain_completions(&mut self, completions: &mut CompletionBatch) {
        if self.ready.is_empty() {
            return;
        }
        self.ready.drain_into(completions);
        if self.telling != 0 && self.ready.is_empty() {
            // Flushes from now on are submitted by a client that knows of the losses.
            self.reported_losses = self.reported_losses.max(std::mem::take(&mut self.telling));
        }
    }

    /// Submits queued requests, as the device accepts them.
    #[inline]
    fn submit_queued_requests(&mut self, now: Instant) {
        if let Some(below) = &mut self.below
            && !self.queue.is_empty()
        {
            let taken = below.submit(now, self.queue.make_contiguous(), &self.table);
            self.queue.drain(..taken);
        }
    }
}

impl IoChannel for VolumeChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // A completion that waits to be polled has freed its slot, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let count = requests.len().min(room);
        self.batch_cached_reads(&requests[..count]);
        if !self.unknown.is_empty() {
            self.send_to_pool(requests, segments);
        }
        self.submit_queued_requests(now);
        if !self.known.batch.is_empty() {
            self.submit_read_batch(now, segments);
        }
        count
    }

    fn flush_submissions(&mut self) {
        if let Some(below) = &mut self.below {
            below.flush_submissions();
        }
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let before = completions.len();
        // Waiting completions first, so that a device that always has completions cannot starve them.
        self.drain_completions(completions);
        self.poll_device(now, completions);
        if self.transfers.has_unreported() || self.inbox.has_messages() {
            let shared = &self.open.shared;
            let mut state = shared.lock_to_submit();
            self.transfers.report_ended(&mut state.store);
            shared.dispatch_actions(&mut state);
            state.take_messages(&self.inbox, &mut self.messages);
            drop(state);
            self.handle_pool_messages();
        }
        if !self.queue.is_empty() {
            self.submit_queued_requests(now);
            self.flush_submissions();
        }
        self.drain_completions(completions);
        completions.len() - before
    }

    fn known_write_loss_count(&self) -> u64 {
        self.open.shared.write_loss_count()
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.reported_losses = self.reported_losses.max(count.min(self.known_write_loss_count()));
    }
}

impl ChannelWakeup for VolumeChannel {
    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() || !self.queue.is_empty() {
            return Instant::default();
        }
        self.below.as_ref().map_or(Instant::NEVER, |below| below.wake_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_local_kernel(&self) -> bool {
        self.below.as_ref().is_some_and(|below| below.is_done_by_local_kernel())
    }

    fn arm(&mut self) -> bool {
        // The waker is armed before the inbox is checked.
        let hears = self.inbox.waker.unmask(0);
        let busy_below = self.below.as_mut().is_some_and(|below| below.arm());
        let busy = !self.ready.is_empty() || !self.queue.is_empty() || self.inbox.has_messages();
        !hears || busy || busy_below || self.is_deaf
    }

    fn disarm(&mut self) {
        self.inbox.waker.mask(0);
        if let Some(below) = &mut self.below {
            below.disarm();
        }
    }
}

impl Drop for VolumeChannel {
    /// Closes the device channel first, which ends its requests; then reports the open transfers to the
    /// pool as aborted.
    fn drop(&mut self) {
        self.below = None;
        let noted = self.messages.drain(..).filter_map(|note| match note {
            ClientMessage::Do(action) => transfer_id(&action),
            ClientMessage::Ended(..) | ClientMessage::More(_) => None,
        });
        let none = TransferTable::with_capacity(0);
        let untold = std::mem::replace(&mut self.transfers, none).into_unreported();
        self.open.shared.unregister_client(&self.inbox, noted.chain(untold));
    }
}

/// Whether a segment contains only zeroes.
fn is_zero(regions: &RegionTable, segment: Segment) -> Result<bool, InvalidSegment> {
    let (mut chunk, mut done) = ([0; 512], 0);
    while done < segment.len_bytes {
        let len = (segment.len_bytes - done).min(512);
        let part = segment.slice(done, len).ok_or(InvalidSegment(segment))?;
        let found = &mut chunk[..len as usize];
        regions.load(part, found)?;
        if found.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        done += len;
    }
    Ok(true)
}

type Infallible = std::convert::Infallible;

/// Segments of a slot: those of the request, and one more for each split at a block.
fn slot_segments_max(limits: &Limits) -> usize {
    2 * usize::from(limits.segments_max) + limits.request_blocks_max as usize
}
