//! NBD connection without its socket: bytes in, requests out; completions in, bytes out.

use std::sync::Arc;

use tenmil_base::{Instant, IoCompletion, Memory, Request, Segment};
use tenmil_dma::RegionTable;
#[cfg(feature = "tls")]
use tenmil_wire::nbd::ClientFlags;
use tenmil_wire::nbd::{BlockStatusExtent, ErrorCode, ServerGreeting};

use super::buffer_pool::BufferPool;
use super::connection_memory::{ConnectionMemory, subsegment};
use super::export::Export;
use super::export_set::OfferedExports;
use super::negotiation::{FLAGS, Negotiation, NegotiationStep};
use super::receive_buffer::ReceiveBuffer;
use super::send_queue::SendQueue;
use super::transmission::{NbdStats, SlowQuery, SlowRequest, Transmission};

/// Server side of an NBD connection. It does no I/O: the owner moves bytes between a socket and the
/// segments that the connection names, and requests between the connection and an I/O channel.
#[derive(Debug)]
pub struct Connection {
    /// Exports that the client may select.
    offered: OfferedExports,
    /// The one that it has selected.
    selected: Option<Arc<Export>>,
    regions: RegionTable,
    layout: ConnectionMemory,
    /// Shared pool that memory for large requests is leased from.
    pool: Arc<BufferPool>,
    inbox: ReceiveBuffer,
    outbox: SendQueue,
    phase: ConnectionState,
    /// Scatter list of the next receive call, rebuilt for each call.
    into: Vec<Segment>,
    /// Whether something changed since the last step, so that it may make progress.
    may_step: bool,
    close_mode: Option<CloseMode>,
    /// How the client ended the connection, if it did.
    client_close: Option<ClientCloseReason>,
}

#[derive(Debug)]
enum ConnectionState {
    Negotiation(Negotiation),
    Transmission(Box<Transmission>),
}

/// Where a connection begins.
#[derive(Clone, Debug)]
pub(super) enum NegotiationStart {
    /// Nothing has been sent.
    Greeting,
    /// The greeting has been sent, and the client has sent these bytes, without TLS.
    #[cfg(feature = "tls")]
    Plaintext(Vec<u8>),
    /// The client has sent its flags and started TLS.
    #[cfg(feature = "tls")]
    Secure(ClientFlags),
}

/// How a connection ends. In both modes nothing more is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CloseMode {
    /// Outstanding requests complete and their replies are sent.
    InOrder,
    /// Nothing can be sent; only completions of the I/O channel are awaited.
    Broken,
}

/// How a client ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientCloseReason {
    /// With `NBD_CMD_DISC`.
    Disconnected,
    /// During negotiation: with `NBD_OPT_ABORT`, with an unknown export name or with an invalid
    /// option.
    NoExport,
    /// With an invalid request.
    ProtocolError,
}

/// Longest scatter list of a receive call: the largest payload, and the inbox.
const INTO: usize = 160;

impl Connection {
    /// Creates a connection with its greeting queued. `memory` is
    /// [`MEMORY_BYTES`](super::MEMORY_BYTES) of `regions` and belongs to the connection for its
    /// lifetime; `pool` lies in the same regions.
    ///
    /// # Panics
    ///
    /// If the memory is too short or does not exist.
    pub fn new(
        export: Arc<Export>,
        regions: RegionTable,
        memory: Segment,
        pool: Arc<BufferPool>,
    ) -> Self {
        Self::with_greeting(OfferedExports::One(export), regions, memory, pool)
    }

    fn with_greeting(
        offered: OfferedExports,
        regions: RegionTable,
        memory: Segment,
        pool: Arc<BufferPool>,
    ) -> Self {
        let mut connection =
            Self::with_negotiation(offered, regions, memory, pool, Negotiation::new());
        connection.queue_negotiation_bytes(&ServerGreeting { flags: FLAGS }.to_bytes());
        connection
    }

    /// Creates a connection that begins at `start`.
    pub(super) fn starting_at(
        offered: OfferedExports,
        regions: RegionTable,
        memory: Segment,
        pool: Arc<BufferPool>,
        start: NegotiationStart,
    ) -> Self {
        match start {
            NegotiationStart::Greeting => Self::with_greeting(offered, regions, memory, pool),
            #[cfg(feature = "tls")]
            NegotiationStart::Secure(flags) => {
                let negotiation = Negotiation::after_start_tls(flags);
                Self::with_negotiation(offered, regions, memory, pool, negotiation)
            }
            #[cfg(feature = "tls")]
            NegotiationStart::Plaintext(received) => {
                let negotiation = Negotiation::without_tls();
                let mut connection =
                    Self::with_negotiation(offered, regions, memory, pool, negotiation);
                connection.push_received(&received);
                connection
            }
        }
    }

    /// Receives bytes that were received before the connection existed. There is space for them.
    #[cfg(feature = "tls")]
    fn push_received(&mut self, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).expect("a few bytes");
        let segment = subsegment(self.inbox.free_segment(), 0, len_bytes);
        self.regions
            .store(segment, bytes)
            .expect("a connection has its memory as long as it lives");
        self.record_received(bytes.len());
    }

    fn with_negotiation(
        offered: OfferedExports,
        regions: RegionTable,
        memory: Segment,
        pool: Arc<BufferPool>,
        negotiation: Negotiation,
    ) -> Self {
        let layout = ConnectionMemory::new(memory);
        Self {
            offered,
            selected: None,
            regions,
            layout,
            pool,
            inbox: ReceiveBuffer::new(layout.receive_buffer()),
            outbox: SendQueue::new(),
            phase: ConnectionState::Negotiation(negotiation),
            into: Vec::with_capacity(INTO),
            may_step: false,
            close_mode: None,
            client_close: None,
        }
    }

    /// Queues bytes of the negotiation phase. All earlier ones have been sent.
    fn queue_negotiation_bytes(&mut self, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).expect("replies to options are short");
        let segment = subsegment(self.layout.negotiation_buffer(), 0, len_bytes);
        self.regions
            .store(segment, bytes)
            .expect("a connection has its memory as long as it lives");
        self.outbox.push(segment);
    }

    /// Segments that the next bytes are to be received into. If empty, nothing must be received:
    /// either all buffers are in use, or nothing more is expected.
    #[inline]
    pub fn receive_segments(&mut self) -> &[Segment] {
        self.into.clear();
        if self.close_mode.is_none() {
            self.inbox.compact(&self.regions);
            if let ConnectionState::Transmission(transmission) = &self.phase {
                transmission.append_payload_segments(&mut self.into);
            }
            let room = self.inbox.free_segment();
            if room.len_bytes > 0 {
                self.into.push(room);
            }
        }
        &self.into
    }

    /// Records that `count` bytes were received into those segments.
    #[inline]
    pub fn record_received(&mut self, count: usize) {
        let count = u32::try_from(count).expect("within the buffer");
        let rest = match &mut self.phase {
            ConnectionState::Transmission(transmission) => {
                transmission.record_payload_received(count)
            }
            ConnectionState::Negotiation(_) => count,
        };
        self.inbox.record_received(rest);
        self.may_step = true;
    }

    /// Handles the end of the stream. Outstanding requests still complete.
    pub fn handle_stream_end(&mut self) {
        self.close(CloseMode::InOrder);
    }

    /// Handles a send error. Outstanding requests are dropped once the I/O channel has completed
    /// them.
    pub fn handle_send_error(&mut self) {
        self.close(CloseMode::Broken);
    }

    fn close(&mut self, close_mode: CloseMode) {
        if self.close_mode.is_none()
            && let ConnectionState::Transmission(transmission) = &mut self.phase
        {
            transmission.discard_partial_request();
        }
        if self.close_mode != Some(CloseMode::Broken) {
            self.close_mode = Some(close_mode);
        }
    }

    /// Makes as much progress as possible with the available bytes and buffers. Returns the number of
    /// steps made.
    #[inline]
    pub fn step(&mut self) -> usize {
        if !self.may_step {
            return 0;
        }
        self.may_step = false;
        match &mut self.phase {
            ConnectionState::Transmission(_) => self.step_transmission(),
            ConnectionState::Negotiation(_) => self.step_negotiation(),
        }
    }

    fn step_transmission(&mut self) -> usize {
        let ConnectionState::Transmission(transmission) = &mut self.phase else { return 0 };
        let mut count = 0;
        if self.close_mode.is_none() {
            match transmission.parse_requests(&mut self.inbox, &mut self.outbox) {
                Ok(taken) => count += taken,
                // The start of the next request is unknown ("Terminating the transmission phase").
                Err(_) => {
                    self.client_close = Some(ClientCloseReason::ProtocolError);
                    self.close(CloseMode::InOrder);
                }
            }
        }
        let ConnectionState::Transmission(transmission) = &mut self.phase else { return count };
        count += transmission.build_batch();
        if transmission.has_client_disconnected() && self.close_mode.is_none() {
            self.close_mode = Some(CloseMode::InOrder);
            self.client_close = Some(ClientCloseReason::Disconnected);
        }
        count
    }

    fn step_negotiation(&mut self) -> usize {
        let mut count = 0;
        let mut words = Vec::new();
        let exports = self.offered.list();
        // Each option reply reuses one buffer, so the previous one must have been sent.
        while self.outbox.is_empty() && self.close_mode.is_none() {
            let ConnectionState::Negotiation(negotiation) = &mut self.phase else { return count };
            words.clear();
            let step = negotiation.step(&mut self.inbox, &self.regions, &exports, &mut words);
            if !words.is_empty() {
                self.queue_negotiation_bytes(&words);
            }
            match step {
                NegotiationStep::Nothing => break,
                NegotiationStep::Step => {}
                NegotiationStep::Abort => {
                    self.client_close = Some(ClientCloseReason::NoExport);
                    self.close(CloseMode::InOrder);
                }
                NegotiationStep::Selected(options, export) => {
                    let (regions, selected) = (self.regions.clone(), Arc::clone(&export));
                    self.selected = Some(selected);
                    let pool = Arc::clone(&self.pool);
                    let transmission =
                        Transmission::new(export, options, regions, self.layout, pool);
                    self.phase = ConnectionState::Transmission(Box::new(transmission));
                    self.may_step = true;
                }
            }
            count += 1;
        }
        count
    }

    /// Whether [`step`](Self::step) may make progress.
    #[inline]
    pub fn can_step(&self) -> bool {
        self.may_step
    }

    /// The export that the client has selected.
    pub(super) fn selected_export(&self) -> Option<&Arc<Export>> {
        self.selected.as_ref()
    }

    /// Whether the client has not selected an export yet.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, ConnectionState::Negotiation(_))
    }

    /// Requests to submit to the I/O channel, and their segment table.
    #[inline]
    pub fn pending_requests(&self) -> (&[Request], &[Segment]) {
        match &self.phase {
            ConnectionState::Transmission(transmission)
                if self.close_mode != Some(CloseMode::Broken) =>
            {
                transmission.pending_requests()
            }
            _ => (&[], &[]),
        }
    }

    /// Records that the I/O channel accepted the first `count` of these requests.
    #[inline]
    pub fn record_submitted(&mut self, count: usize) {
        let ConnectionState::Transmission(transmission) = &mut self.phase else { return };
        transmission.record_submitted(count);
        self.may_step |= transmission.has_unbuilt_requests();
    }

    /// Number of requests that the I/O channel has not completed. While it is not zero, the device
    /// may access the connection's memory.
    #[inline]
    pub fn in_flight_requests(&self) -> usize {
        match &self.phase {
            ConnectionState::Transmission(transmission) => transmission.in_flight_pieces(),
            ConnectionState::Negotiation(_) => 0,
        }
    }

    /// Handles the completion of a request.
    #[inline]
    pub fn handle_completion(&mut self, completion: IoCompletion) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.handle_completion(completion, &mut self.outbox);
            self.may_step |= transmission.has_unbuilt_requests();
        }
    }

    /// Next query that has to be executed off the reactor.
    pub fn next_slow_query(&mut self) -> Option<SlowQuery> {
        match &mut self.phase {
            ConnectionState::Transmission(transmission) => transmission.next_slow_query(),
            ConnectionState::Negotiation(_) => None,
        }
    }

    /// Completes the block status query of `slot`. The extents are contiguous from its first byte;
    /// an empty list means that they could not be determined.
    pub fn complete_block_status(&mut self, slot: u16, extents: &[BlockStatusExtent]) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.complete_block_status(slot, extents, &mut self.outbox);
        }
    }

    /// Completes the resize query of `slot`.
    pub fn complete_resize(&mut self, slot: u16, done: Result<(), ErrorCode>) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.complete_resize(slot, done, &mut self.outbox);
        }
    }

    /// Sets the time of the iteration, and the time from which a request is slow.
    #[inline]
    pub(super) fn set_time(&mut self, now: Instant, threshold_ns: u64) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.set_time(now, threshold_ns);
        }
    }

    /// Whether there are slow requests.
    #[inline]
    pub(super) fn has_slow_requests(&self) -> bool {
        match &self.phase {
            ConnectionState::Transmission(transmission) => transmission.has_slow_requests(),
            ConnectionState::Negotiation(_) => false,
        }
    }

    /// Next slow request whose reply was sent, or with `is_ended` one whose reply was not.
    pub(super) fn next_slow_request(&mut self, is_ended: bool) -> Option<SlowRequest> {
        match &mut self.phase {
            ConnectionState::Transmission(transmission) => transmission.next_slow_request(is_ended),
            ConnectionState::Negotiation(_) => None,
        }
    }

    /// Segments to send.
    #[inline]
    pub fn unsent_segments(&self) -> &[Segment] {
        self.outbox.unsent_segments()
    }

    /// Records that `count` bytes of them were sent.
    #[inline]
    pub fn record_sent(&mut self, count: usize) {
        match &mut self.phase {
            ConnectionState::Transmission(transmission) => {
                let may_step = &mut self.may_step;
                self.outbox.record_sent(count, |slot| {
                    transmission.free_slot(slot);
                    *may_step = true;
                });
            }
            ConnectionState::Negotiation(_) => {
                self.outbox.record_sent(count, |_| {});
                self.may_step |= self.outbox.is_empty();
            }
        }
    }

    /// Number of the request that was received in part, the rest of which is awaited from the
    /// client.
    #[inline]
    pub fn partial_request_number(&self) -> Option<u64> {
        match &self.phase {
            ConnectionState::Transmission(transmission) if self.close_mode.is_none() => {
                transmission.partial_request_number(&self.inbox)
            }
            _ => None,
        }
    }

    /// Whether a request waits for memory that other connections hold. The owner calls
    /// [`retry_allocation`](Self::retry_allocation) after a while.
    #[inline]
    pub fn is_waiting_for_memory(&self) -> bool {
        matches!(&self.phase, ConnectionState::Transmission(transmission) if transmission.is_waiting_for_memory())
    }

    /// Makes the next step request memory again.
    pub fn retry_allocation(&mut self) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.retry_allocation();
            self.may_step = true;
        }
    }

    /// Returns unused memory to the pool before the session goes idle.
    pub fn release_unused_memory(&mut self) {
        if let ConnectionState::Transmission(transmission) = &mut self.phase {
            transmission.release_unused_memory();
        }
    }

    /// How the client ended the connection, if it did.
    pub(super) fn client_close_reason(&self) -> Option<ClientCloseReason> {
        self.client_close
    }

    /// Completed requests.
    #[inline]
    pub fn completed_stats(&self) -> NbdStats {
        match &self.phase {
            ConnectionState::Transmission(transmission) => *transmission.completed_stats(),
            ConnectionState::Negotiation(_) => NbdStats::default(),
        }
    }

    /// Number of requests whose replies have not been sent.
    #[inline]
    pub fn outstanding_requests(&self) -> usize {
        match &self.phase {
            ConnectionState::Transmission(transmission) => transmission.outstanding_requests(),
            ConnectionState::Negotiation(_) => 0,
        }
    }

    /// Whether the connection is closing: nothing more is received.
    pub fn is_closing(&self) -> bool {
        self.close_mode.is_some()
    }

    /// Whether everything is done and the socket can be closed.
    #[inline]
    pub fn is_finished(&self) -> bool {
        let idle = match &self.phase {
            ConnectionState::Transmission(transmission) => transmission.is_idle(),
            ConnectionState::Negotiation(_) => true,
        };
        match self.close_mode {
            None => false,
            Some(CloseMode::InOrder) => idle && self.outbox.is_empty(),
            Some(CloseMode::Broken) => self.in_flight_requests() == 0,
        }
    }
}
