//! NBD connection without its socket: bytes in, requests out; completions in, bytes out.

use std::sync::Arc;

use tenmil_base::{IoCompletion, Memory, Request, Segment};
use tenmil_dma::RegionTable;
use tenmil_wire::nbd::{ErrorCode, ServerGreeting, StatusExtent};

use super::export::Export;
use super::inbox::Inbox;
use super::memory::{Layout, cut};
use super::negotiation::{FLAGS, Negotiation, NegotiationStep};
use super::outbox::Outbox;
use super::pool::Pool;
use super::transmission::{NbdStats, SlowQuery, Transmission};

/// Server side of an NBD connection. It does no I/O: the owner moves bytes between a socket and the
/// segments that the connection names, and requests between the connection and an I/O channel.
#[derive(Debug)]
pub struct Connection {
    export: Arc<Export>,
    regions: RegionTable,
    layout: Layout,
    /// Shared pool that memory for large requests is leased from.
    pool: Arc<Pool>,
    inbox: Inbox,
    outbox: Outbox,
    phase: ConnectionState,
    /// Scatter list of the next receive call, rebuilt for each call.
    into: Vec<Segment>,
    /// Whether something changed since the last step, so that it may make progress.
    may_step: bool,
    close_mode: Option<CloseMode>,
    /// How the client ended the connection, if it did.
    client_close: Option<ClientClose>,
}

#[derive(Debug)]
enum ConnectionState {
    Negotiation(Negotiation),
    Transmission(Box<Transmission>),
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
pub(super) enum ClientClose {
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
        pool: Arc<Pool>,
    ) -> Self {
        let layout = Layout::new(memory);
        let mut connection = Self {
            export,
            regions,
            layout,
            pool,
            inbox: Inbox::new(layout.inbox()),
            outbox: Outbox::new(),
            phase: ConnectionState::Negotiation(Negotiation::new()),
            into: Vec::with_capacity(INTO),
            may_step: false,
            close_mode: None,
            client_close: None,
        };
        connection.queue_reply(&ServerGreeting { flags: FLAGS }.to_bytes());
        connection
    }

    /// Queues bytes of the negotiation phase. All earlier ones have been sent.
    fn queue_reply(&mut self, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).expect("replies to options are short");
        let segment = cut(self.layout.words(), 0, len_bytes);
        self.regions
            .store(segment, bytes)
            .expect("a connection has its memory as long as it lives");
        self.outbox.push(segment);
    }

    /// Segments that the next bytes are to be received into. If empty, nothing must be received:
    /// either all buffers are in use, or nothing more is expected.
    #[inline]
    pub fn receive_into(&mut self) -> &[Segment] {
        self.into.clear();
        if self.close_mode.is_none() {
            self.inbox.compact(&self.regions);
            if let ConnectionState::Transmission(exchange) = &self.phase {
                exchange.payload_into(&mut self.into);
            }
            let room = self.inbox.room();
            if room.len_bytes > 0 {
                self.into.push(room);
            }
        }
        &self.into
    }

    /// Records that `count` bytes were received into those segments.
    #[inline]
    pub fn received(&mut self, count: usize) {
        let count = u32::try_from(count).expect("within the buffer");
        let rest = match &mut self.phase {
            ConnectionState::Transmission(exchange) => exchange.payload_received(count),
            ConnectionState::Negotiation(_) => count,
        };
        self.inbox.received(rest);
        self.may_step = true;
    }

    /// Handles the end of the stream. Outstanding requests still complete.
    pub fn receive_end(&mut self) {
        self.end(CloseMode::InOrder);
    }

    /// Handles a send error. Outstanding requests are dropped once the I/O channel has completed
    /// them.
    pub fn broken(&mut self) {
        self.end(CloseMode::Broken);
    }

    fn end(&mut self, close_mode: CloseMode) {
        if self.close_mode.is_none()
            && let ConnectionState::Transmission(exchange) = &mut self.phase
        {
            exchange.stop_receiving();
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
        let ConnectionState::Transmission(exchange) = &mut self.phase else { return 0 };
        let mut count = 0;
        if self.close_mode.is_none() {
            match exchange.parse_requests(&mut self.inbox, &mut self.outbox) {
                Ok(taken) => count += taken,
                // The start of the next request is unknown ("Terminating the transmission phase").
                Err(_) => {
                    self.client_close = Some(ClientClose::ProtocolError);
                    self.end(CloseMode::InOrder);
                }
            }
        }
        let ConnectionState::Transmission(exchange) = &mut self.phase else { return count };
        count += exchange.fill();
        if exchange.is_ended() && self.close_mode.is_none() {
            self.close_mode = Some(CloseMode::InOrder);
            self.client_close = Some(ClientClose::Disconnected);
        }
        count
    }

    fn step_negotiation(&mut self) -> usize {
        let mut count = 0;
        let mut words = Vec::new();
        // Each option reply reuses one buffer, so the previous one must have been sent.
        while self.outbox.is_empty() && self.close_mode.is_none() {
            let ConnectionState::Negotiation(negotiation) = &mut self.phase else { return count };
            words.clear();
            let step = negotiation.step(&mut self.inbox, &self.regions, &self.export, &mut words);
            if !words.is_empty() {
                self.queue_reply(&words);
            }
            match step {
                NegotiationStep::Nothing => break,
                NegotiationStep::Step => {}
                NegotiationStep::Abort => {
                    self.client_close = Some(ClientClose::NoExport);
                    self.end(CloseMode::InOrder);
                }
                NegotiationStep::Selected(options) => {
                    let (export, regions) = (Arc::clone(&self.export), self.regions.clone());
                    let pool = Arc::clone(&self.pool);
                    let exchange = Transmission::new(export, options, regions, self.layout, pool);
                    self.phase = ConnectionState::Transmission(Box::new(exchange));
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

    /// Whether the client has not selected an export yet.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, ConnectionState::Negotiation(_))
    }

    /// Requests to submit to the I/O channel, and their segment table.
    #[inline]
    pub fn requests(&self) -> (&[Request], &[Segment]) {
        match &self.phase {
            ConnectionState::Transmission(exchange)
                if self.close_mode != Some(CloseMode::Broken) =>
            {
                exchange.requests()
            }
            _ => (&[], &[]),
        }
    }

    /// Records that the I/O channel accepted the first `count` of these requests.
    #[inline]
    pub fn taken(&mut self, count: usize) {
        let ConnectionState::Transmission(exchange) = &mut self.phase else { return };
        exchange.taken(count);
        self.may_step |= exchange.has_queue();
    }

    /// Number of requests that the I/O channel has not completed. While it is not zero, the device
    /// may access the connection's memory.
    #[inline]
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            ConnectionState::Transmission(exchange) => exchange.in_flight(),
            ConnectionState::Negotiation(_) => 0,
        }
    }

    /// Handles the completion of a request.
    #[inline]
    pub fn handle_completion(&mut self, completion: IoCompletion) {
        if let ConnectionState::Transmission(exchange) = &mut self.phase {
            exchange.handle_completion(completion, &mut self.outbox);
            self.may_step |= exchange.has_queue();
        }
    }

    /// Next query that has to be executed off the reactor.
    pub fn next_slow_query(&mut self) -> Option<SlowQuery> {
        match &mut self.phase {
            ConnectionState::Transmission(exchange) => exchange.next_slow_query(),
            ConnectionState::Negotiation(_) => None,
        }
    }

    /// Completes the block status query of `slot`. The extents are contiguous from its first byte;
    /// an empty list means that they could not be determined.
    pub fn block_status_done(&mut self, slot: u16, extents: &[StatusExtent]) {
        if let ConnectionState::Transmission(exchange) = &mut self.phase {
            exchange.complete_block_status(slot, extents, &mut self.outbox);
        }
    }

    /// Completes the resize query of `slot`.
    pub fn resized(&mut self, slot: u16, done: Result<(), ErrorCode>) {
        if let ConnectionState::Transmission(exchange) = &mut self.phase {
            exchange.resized(slot, done, &mut self.outbox);
        }
    }

    /// Segments to send.
    #[inline]
    pub fn to_send(&self) -> &[Segment] {
        self.outbox.to_send()
    }

    /// Records that `count` bytes of them were sent.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        match &mut self.phase {
            ConnectionState::Transmission(exchange) => {
                let may_step = &mut self.may_step;
                self.outbox.sent(count, |slot| {
                    exchange.free_slot(slot);
                    *may_step = true;
                });
            }
            ConnectionState::Negotiation(_) => {
                self.outbox.sent(count, |_| {});
                self.may_step |= self.outbox.is_empty();
            }
        }
    }

    /// Number of the request that was received in part, the rest of which is awaited from the
    /// client.
    #[inline]
    pub fn partial_request(&self) -> Option<u64> {
        match &self.phase {
            ConnectionState::Transmission(exchange) if self.close_mode.is_none() => {
                exchange.partial_request(&self.inbox)
            }
            _ => None,
        }
    }

    /// Whether a request waits for memory that other connections hold. The owner calls
    /// [`try_again`](Self::try_again) after a while.
    #[inline]
    pub fn waits_for_memory(&self) -> bool {
        matches!(&self.phase, ConnectionState::Transmission(exchange) if exchange.waits_for_memory())
    }

    /// Makes the next step request memory again.
    pub fn try_again(&mut self) {
        if let ConnectionState::Transmission(exchange) = &mut self.phase {
            exchange.try_again();
            self.may_step = true;
        }
    }

    /// Returns unused memory to the pool before the session goes idle.
    pub fn release(&mut self) {
        if let ConnectionState::Transmission(exchange) = &mut self.phase {
            exchange.release();
        }
    }

    /// How the client ended the connection, if it did.
    pub(super) fn client_close(&self) -> Option<ClientClose> {
        self.client_close
    }

    /// Completed requests.
    #[inline]
    pub fn done(&self) -> NbdStats {
        match &self.phase {
            ConnectionState::Transmission(exchange) => *exchange.done(),
            ConnectionState::Negotiation(_) => NbdStats::default(),
        }
    }

    /// Number of requests whose replies have not been sent.
    #[inline]
    pub fn outstanding(&self) -> usize {
        match &self.phase {
            ConnectionState::Transmission(exchange) => exchange.outstanding(),
            ConnectionState::Negotiation(_) => 0,
        }
    }

    /// Whether the connection is closing: nothing more is received.
    pub fn is_closing(&self) -> bool {
        self.close_mode.is_some()
    }

    /// Whether everything is done and the socket can be closed.
    #[inline]
    pub fn is_over(&self) -> bool {
        let idle = match &self.phase {
            ConnectionState::Transmission(exchange) => exchange.is_idle(),
            ConnectionState::Negotiation(_) => true,
        };
        match self.close_mode {
            None => false,
            Some(CloseMode::InOrder) => idle && self.outbox.is_empty(),
            Some(CloseMode::Broken) => self.in_flight() == 0,
        }
    }
}
