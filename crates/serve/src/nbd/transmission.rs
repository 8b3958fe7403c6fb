//! Transmission phase: requests in, replies out, one slot each.
//!
//! ```text
//!   header ─→ validate ─→ invalid: its payload is skipped, and an error is replied
//!                      └─→ slot and memory, or wait ─→ payload, for a write
//!                            ─→ pieces ─→ I/O channel ─→ last completion ─→ outbox ─→ sent: slot free
//! ```

mod receive;
mod slow_requests;
mod split;
mod validate;

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{
    Instant, IoCompletion, IoCounters, IoStats, IoStatus, Memory, Operation, Request, RequestFlags,
    Segment, Span,
};
use tenmil_dma::RegionTable;
use tenmil_wire::nbd::reply::encode_extent;
use tenmil_wire::nbd::{
    BlockStatusExtent, ChunkHeader, Command, CommandFlags, ErrorCode, RequestHeader,
};

use super::buffer_pool::BufferPool;
use super::connection_memory::{
    ConnectionMemory, LargeBuffers, RequestBuffer, SLOTS, SMALL_BYTES, subsegment,
};
use super::export::Export;
use super::negotiation::{ALLOCATION, NegotiatedOptions};
use super::receive_buffer::ReceiveBuffer;
use super::reply::{ReplyHeader, RequestFailure};
use super::send_queue::SendQueue;
use receive::RequestState;
use slow_requests::RequestTimes;
pub(super) use slow_requests::SlowRequest;

/// Requests of a connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Transmission {
    export: Arc<Export>,
    options: NegotiatedOptions,
    regions: RegionTable,
    layout: ConnectionMemory,
    store: LargeBuffers,
    slots: Box<[RequestSlot]>,
    free: Vec<u16>,
    awaits: RequestState,
    /// Slots whose pieces have not all been submitted, in order.
    queue: VecDeque<u16>,
    /// Pieces that the I/O channel has not accepted yet, and their segment table.
    requests: Vec<Request>,
    segments: Vec<Segment>,
    queries: VecDeque<SlowQuery>,
    /// Pieces submitted and not completed.
    in_flight: usize,
    /// Number of request headers parsed.
    headers: u64,
    /// Whether the client sent `NBD_CMD_DISC`.
    is_ended: bool,
    done: NbdStats,
    times: RequestTimes,
}

/// Completed requests by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdStats {
    /// Successful reads.
    pub reads: u64,
    /// Bytes read by them.
    pub read_bytes: u64,
    /// Successful writes.
    pub writes: u64,
    /// Bytes written by them.
    pub written_bytes: u64,
    /// Other successful requests.
    pub others: u64,
    /// Failed requests.
    pub errors: u64,
}

impl NbdStats {
    /// Adds the requests of another connection.
    pub(super) fn add(&mut self, more: &Self) {
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.writes += more.writes;
        self.written_bytes += more.written_bytes;
        self.others += more.others;
        self.errors += more.errors;
    }

    /// As I/O statistics without latencies. Failed requests, whose operation is not known, are those of
    /// reads; other requests are those of flushes.
    pub(super) fn to_io_stats(self) -> IoStats {
        let counters = IoCounters::new(false);
        let success = |operation, count, bytes| {
            counters.count_success(operation as usize, count, bytes, 0);
        };
        success(Operation::Read, self.reads, self.read_bytes);
        success(Operation::Write, self.writes, self.written_bytes);
        success(Operation::Flush, self.others, 0);
        (0..self.errors).for_each(|_| {
            counters.count_failure(Operation::Read as usize, IoStatus::INTERNAL_ERROR);
        });
        counters.snapshot(|_| Span::default())
    }
}

/// Outstanding NBD request.
#[derive(Clone, Copy, Debug)]
struct RequestSlot {
    header: RequestHeader,
    buffer: RequestBuffer,
    operation: Operation,
    flags: RequestFlags,
    /// Offset of the next piece from the start of the request, in bytes.
    next_byte: u32,
    /// Pieces not yet completed, including those not yet built.
    pieces: u32,
    failure: Option<RequestFailure>,
    /// Whether a read found nothing but unallocated blocks: its data are not in memory.
    is_hole: bool,
    /// Whether a flush follows the last piece: a trim with FUA, which has no NVMe equivalent.
    then_flush: bool,
    received_at: Instant,
    /// When all of its data were there.
    ready_at: Instant,
    /// When its first piece was submitted. Set only while there is a threshold for slow requests.
    submitted_at: Instant,
}

/// Client request that is executed off the reactor, because it may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowQuery {
    /// Slot of the request, passed back with the result.
    pub slot: u16,
    /// Query to execute.
    pub kind: QueryKind,
}

/// Kind of a slow query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKind {
    /// Block status of a range.
    Extents {
        /// First byte.
        offset: u64,
        /// Length of the range in bytes.
        len_bytes: u32,
        /// Largest number of extents to return.
        extents_max: usize,
    },
    /// Resize of the export.
    Size {
        /// New size in bytes, not zero and a multiple of the block size.
        bytes: u64,
    },
}

/// Largest number of requests built for one submission.
const BATCH: usize = 256;
/// Segment table capacity: each piece of 1 MiB in large buffers takes four segments.
const SEGMENTS: usize = BATCH * 4;
/// Largest number of extents in one block status reply.
const EXTENTS_MAX: usize = SMALL_BYTES as usize / 8;

impl Transmission {
    pub(super) fn new(
        export: Arc<Export>,
        options: NegotiatedOptions,
        regions: RegionTable,
        layout: ConnectionMemory,
        pool: Arc<BufferPool>,
    ) -> Self {
        let nothing = RequestSlot {
            header: RequestHeader {
                flags: CommandFlags::NONE,
                command: Command::READ,
                cookie: 0,
                offset: 0,
                len_bytes: 0,
            },
            buffer: RequestBuffer::Small,
            operation: Operation::Read,
            flags: RequestFlags::NONE,
            next_byte: 0,
            pieces: 0,
            failure: None,
            is_hole: false,
            then_flush: false,
            received_at: Instant::NEVER,
            ready_at: Instant::NEVER,
            submitted_at: Instant::NEVER,
        };
        // Every table has its final size, so that requests allocate nothing.
        Self {
            export,
            options,
            regions,
            layout,
            store: LargeBuffers::new(layout, pool),
            slots: vec![nothing; usize::from(SLOTS)].into(),
            free: (0..SLOTS).rev().collect(),
            awaits: RequestState::Header,
            queue: VecDeque::with_capacity(usize::from(SLOTS)),
            requests: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(SEGMENTS),
            queries: VecDeque::with_capacity(usize::from(SLOTS)),
            in_flight: 0,
            headers: 0,
            is_ended: false,
            done: NbdStats::default(),
            times: RequestTimes::default(),
        }
    }

    /// Whether the client sent `NBD_CMD_DISC`.
    pub(super) fn has_client_disconnected(&self) -> bool {
        self.is_ended
    }

    /// Whether no request is outstanding.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Number of requests whose replies have not been sent.
    #[inline]
    pub(super) fn outstanding_requests(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Completed requests.
    pub(super) fn completed_stats(&self) -> &NbdStats {
        &self.done
    }

    /// Pieces submitted and not completed.
    pub(super) fn in_flight_pieces(&self) -> usize {
        self.in_flight
    }

    /// Number of the request that was received in part, the rest of which is awaited from the
    /// client.
    #[inline]
    pub(super) fn partial_request_number(&self, inbox: &ReceiveBuffer) -> Option<u64> {
        let is_begun = match self.awaits {
            RequestState::Header => {
                (1..RequestHeader::BYTES).contains(&(inbox.unparsed_bytes() as usize))
            }
            RequestState::Payload { .. } | RequestState::DiscardPayload { .. } => true,
        };
        is_begun.then_some(self.headers)
    }

    /// Whether a request waits for memory that other connections hold.
    #[inline]
    pub(super) fn is_waiting_for_memory(&self) -> bool {
        self.store.is_lease_refused()
    }

    /// Allows the next request to try allocating again.
    pub(super) fn retry_allocation(&mut self) {
        self.store.allow_lease();
    }

    /// Returns unused memory to the pool.
    pub(super) fn release_unused_memory(&mut self) {
        self.store.release_idle_leases();
    }

    /// Drops a request that was received in part: nothing more will arrive.
    pub(super) fn discard_partial_request(&mut self) {
        if let RequestState::Payload { slot, .. } | RequestState::DiscardPayload { slot, .. } =
            self.awaits
        {
            self.free_slot(slot);
        }
        self.awaits = RequestState::Header;
        self.is_ended = true;
    }

    /// Requests to submit, and their segment table.
    #[inline]
    pub(super) fn pending_requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// Records that the I/O channel accepted the first `count` of them.
    #[inline]
    pub(super) fn record_submitted(&mut self, count: usize) {
        self.in_flight += count;
        if self.times.threshold_ns != u64::MAX {
            self.record_submit_time(count);
        }
        self.requests.drain(..count);
        let Some(first) = self.requests.first().map(|request| request.segment_first) else {
            return;
        };
        self.segments.drain(..first as usize);
        self.requests.iter_mut().for_each(|request| request.segment_first -= first);
    }

    /// Handles the completion of a piece.
    #[inline]
    pub(super) fn handle_completion(&mut self, completion: IoCompletion, outbox: &mut SendQueue) {
        let slot = u16::try_from(completion.token & 0xffff).unwrap_or(0);
        let memory = &mut self.slots[usize::from(slot)];
        self.in_flight -= 1;
        memory.pieces -= 1;
        memory.is_hole |=
            memory.flags.has(RequestFlags::HOLES) && completion.result == IoCompletion::HOLE;
        if !completion.status.is_success() {
            // A flush has no offset, and a client that receives one for it closes the connection.
            let offset = (memory.operation != Operation::Flush)
                .then(|| memory.header.offset + (completion.token >> 16));
            let writes = memory.operation != Operation::Read;
            let failure = RequestFailure::from_io_status(completion.status, writes, offset);
            // Of several errors, the one at the lowest offset is reported.
            if memory.failure.is_none_or(|earlier| earlier.offset > failure.offset) {
                memory.failure = Some(failure);
            }
        }
        if memory.pieces == 0 {
            if memory.then_flush && memory.failure.is_none() {
                return self.flush_after_trim(slot);
            }
            self.queue_reply(slot, outbox);
        }
    }

    /// Submits the flush that makes a trim with FUA durable before it completes.
    #[cold]
    fn flush_after_trim(&mut self, slot: u16) {
        let memory = &mut self.slots[usize::from(slot)];
        (memory.operation, memory.flags, memory.then_flush) =
            (Operation::Flush, RequestFlags::NONE, false);
        self.queue_request(slot);
    }

    /// Queues the reply to a completed request.
    #[inline]
    fn queue_reply(&mut self, slot: u16, outbox: &mut SendQueue) {
        if self.times.now.since(self.slots[usize::from(slot)].received_at).ns
            >= self.times.threshold_ns
        {
            self.record_slow_request(slot);
        }
        let memory = &self.slots[usize::from(slot)];
        let RequestHeader { command, cookie, offset, len_bytes, .. } = memory.header;
        let structured = self.options.structured;
        let reads = command == Command::READ;
        let is_hole = memory.is_hole && memory.failure.is_none();
        let header = match memory.failure {
            Some(failure) => ReplyHeader::failure(structured, cookie, failure),
            None if is_hole => ReplyHeader::read_hole(cookie, offset, len_bytes),
            None => ReplyHeader::success(structured, cookie, reads.then_some((offset, len_bytes))),
        };
        self.done.count_request(command, memory.failure.is_some(), len_bytes);
        self.queue_header(slot, &header, outbox);
        if reads && memory.failure.is_none() && !is_hole {
            self.store
                .for_each_segment((slot, memory.buffer), 0, len_bytes, |part| outbox.push(part));
        }
        outbox.mark_reply_end(slot);
    }

    fn queue_header(&self, slot: u16, header: &ReplyHeader, outbox: &mut SendQueue) {
        let bytes = header.as_slice();
        let len_bytes = u32::try_from(bytes.len()).expect("a header is short");
        let segment = subsegment(self.layout.reply_header(slot), 0, len_bytes);
        let stored = self.regions.store(segment, bytes);
        stored.expect("a connection has its memory as long as it lives");
        outbox.push(segment);
    }

    /// Frees a slot after its reply was sent, or will not be sent.
    #[inline]
    pub(super) fn free_slot(&mut self, slot: u16) {
        let memory = &mut self.slots[usize::from(slot)];
        self.store.release_buffer(std::mem::replace(&mut memory.buffer, RequestBuffer::Small));
        self.free.push(slot);
    }

    /// Next query to be executed off the reactor.
    pub(super) fn next_slow_query(&mut self) -> Option<SlowQuery> {
        self.queries.pop_front()
    }

    /// Completes a block status query. An empty list of extents is an error.
    pub(super) fn complete_block_status(
        &mut self,
        slot: u16,
        extents: &[BlockStatusExtent],
        outbox: &mut SendQueue,
    ) {
        let cookie = self.slots[usize::from(slot)].header.cookie;
        if extents.is_empty() {
            let failure = RequestFailure::new(ErrorCode::EIO, "it is not known what is where");
            self.slots[usize::from(slot)].failure = Some(failure);
            return self.queue_reply(slot, outbox);
        }
        self.done.others += 1;
        let count = extents.len().min(EXTENTS_MAX);
        let bytes: Vec<u8> =
            extents[..count].iter().flat_map(|extent| encode_extent(*extent)).collect();
        self.queue_header(
            slot,
            &ReplyHeader::block_status_chunk(cookie, ALLOCATION, count),
            outbox,
        );
        let len_bytes = u32::try_from(bytes.len()).expect("no more than small memory");
        self.store.for_each_segment((slot, RequestBuffer::Small), 0, len_bytes, |part| {
            let stored = self.regions.store(part, &bytes);
            stored.expect("a connection has its memory as long as it lives");
            outbox.push(part);
        });
        outbox.mark_reply_end(slot);
    }

    /// Completes a resize query.
    pub(super) fn complete_resize(
        &mut self,
        slot: u16,
        done: Result<(), ErrorCode>,
        outbox: &mut SendQueue,
    ) {
        let failure = done.err().map(|error| RequestFailure::new(error, "its size cannot be that"));
        self.slots[usize::from(slot)].failure = failure;
        self.queue_reply(slot, outbox);
    }

    /// Whether pieces are waiting that did not fit into the last batch.
    pub(super) fn has_unbuilt_requests(&self) -> bool {
        !self.queue.is_empty()
    }
}

impl Drop for Transmission {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            self.store.leak_buffers_in_use();
        }
    }
}

impl NbdStats {
    #[inline]
    fn count_request(&mut self, command: Command, is_failure: bool, len_bytes: u32) {
        if is_failure {
            self.errors += 1;
        } else if command == Command::READ {
            self.reads += 1;
            self.read_bytes += u64::from(len_bytes);
        } else if command == Command::WRITE {
            self.writes += 1;
            self.written_bytes += u64::from(len_bytes);
        } else {
            self.others += 1;
        }
    }
}

const _: () = assert!(RequestHeader::BYTES == 28 && ChunkHeader::BYTES + 4 + 14 < 256);
