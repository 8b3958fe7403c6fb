//! State shared by both ends: negotiation, framing, termination and deadlines.

use tenmil_base::{Instant, Span};
use tenmil_wire::tcp::{FatalError, PduFraming, PduType, Role, TermReq};

use crate::pdu_body::PduBody;
use crate::send_queue::SendQueue;

/// Time limits for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From the start until ICReq or ICResp has arrived.
    pub connect: Span,
    /// From the first byte of a header to its last, and between two fragments of data.
    pub pdu: Span,
    /// From sending a TermReq until the connection is closed, whatever the peer does. The
    /// specification allows up to 30 s (TCP 1.0 §3.5); the default is shorter, since the connection
    /// holds a socket and the buffers of its commands until then.
    pub close: Span,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Span::from_secs(10), pdu: Span::from_secs(10), close: Span::from_secs(2) }
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The peer violated the protocol; a TermReq is being sent.
    ProtocolError(FatalError),
    /// The peer sent a TermReq with this reason.
    Terminated(FatalError),
    /// The peer sent an invalid TermReq (TCP 1.0 §3.5).
    InvalidTermination,
    /// The peer did not send ICReq or ICResp in time.
    ConnectTimeout,
    /// A PDU was not completed in time.
    PduTimeout,
    /// The stream ended between two PDUs.
    Closed,
    /// The stream ended within a PDU.
    TruncatedPdu,
}

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// Waiting for ICReq or ICResp.
    Connecting { until: Instant },
    /// Open.
    Open,
    /// TermReq queued; waiting for the peer to close.
    Terminating { until: Instant },
    /// The socket can be closed.
    Closed,
}

/// Header of a PDU: type, bytes, and length including its digest.
pub(crate) type PduHeader<'a> = (PduType, &'a [u8], usize);

/// Protocol violation and the header that it concerns.
pub(crate) type RejectedPdu<'a> = (FatalError, &'a [u8]);

/// State shared by both ends, used through [`Connection`](crate::Connection).
#[derive(Debug)]
pub struct ConnectionCore {
    role: Role,
    phase: ConnectionPhase,
    timeouts: Timeouts,
    /// Time at which a partly received PDU last received bytes.
    stalled_since: Option<Instant>,
    pub(crate) incoming: PduFraming,
    pub(crate) outgoing: PduFraming,
    pub(crate) send_queue: SendQueue,
    /// Body that is being received.
    pub(crate) body: Option<PduBody>,
}

impl ConnectionCore {
    pub(crate) fn new(role: Role, timeouts: Timeouts, send_queue: SendQueue, now: Instant) -> Self {
        Self {
            role,
            phase: ConnectionPhase::Connecting { until: now.after(timeouts.connect) },
            timeouts,
            stalled_since: None,
            incoming: PduFraming::default(),
            outgoing: PduFraming::default(),
            send_queue,
            body: None,
        }
    }

    #[inline]
    pub(crate) fn is_connecting(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Connecting { .. })
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.phase == ConnectionPhase::Open
    }

    /// Whether received bytes are parsed.
    #[inline]
    pub(crate) fn accepts_pdus(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Connecting { .. } | ConnectionPhase::Open)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.phase == ConnectionPhase::Closed
    }

    /// Whether nothing more will be sent.
    pub(crate) fn is_write_closed(&self) -> bool {
        match self.phase {
            ConnectionPhase::Connecting { .. } | ConnectionPhase::Open => false,
            ConnectionPhase::Terminating { .. } => self.send_queue.is_empty(),
            ConnectionPhase::Closed => true,
        }
    }

    pub(crate) fn set_open(&mut self, incoming: PduFraming, outgoing: PduFraming) {
        (self.incoming, self.outgoing) = (incoming, outgoing);
        self.phase = ConnectionPhase::Open;
    }

    /// Queues a TermReq for the PDU with this header.
    pub(crate) fn reject_pdu(
        &mut self,
        now: Instant,
        violation: FatalError,
        header: &[u8],
    ) -> CloseReason {
        let kind = match self.role {
            Role::Host => PduType::H2CTermReq,
            Role::Controller => PduType::C2HTermReq,
        };
        // The TermReq quotes the header; it has reserved space behind the header ring (§3.6.2.4).
        let (bytes, len) = TermReq::build(kind, violation, header);
        self.send_queue.push_termination(&bytes[..len]);
        self.phase = ConnectionPhase::Terminating { until: now.after(self.timeouts.close) };
        self.stalled_since = None;
        CloseReason::ProtocolError(violation)
    }

    /// Handles a TermReq of the peer.
    pub(crate) fn handle_termination(&mut self, request: &TermReq) -> CloseReason {
        self.close_connection();
        if request.is_valid() {
            CloseReason::Terminated(request.fatal_error())
        } else {
            CloseReason::InvalidTermination
        }
    }

    /// Handles the end of the stream. Returns the reason, unless it was reported before.
    pub(crate) fn handle_eof(&mut self, is_inside_pdu: bool) -> Option<CloseReason> {
        let reason = if is_inside_pdu { CloseReason::TruncatedPdu } else { CloseReason::Closed };
        let reason = self.accepts_pdus().then_some(reason);
        self.close_connection();
        reason
    }

    fn close_connection(&mut self) {
        self.phase = ConnectionPhase::Closed;
        self.stalled_since = None;
    }

    /// Updates the PDU timeout at the end of `receive`: whether a PDU is incomplete, and whether
    /// anything was consumed.
    #[inline]
    pub(crate) fn update_pdu_timer(
        &mut self,
        now: Instant,
        is_inside_pdu: bool,
        has_progressed: bool,
    ) {
        if !is_inside_pdu {
            self.stalled_since = None;
        } else if has_progressed || self.stalled_since.is_none() {
            self.stalled_since = Some(now);
        }
    }

    /// Restarts the PDU timeout, if a PDU is incomplete.
    pub(crate) fn restart_pdu_timeout(&mut self, now: Instant) {
        if self.stalled_since.is_some() {
            self.stalled_since = Some(now);
        }
    }

    /// Time at which [`handle_deadline`](Self::handle_deadline) must be called.
    #[inline]
    pub(crate) fn deadline(&self) -> Instant {
        let stalled_until =
            self.stalled_since.map_or(Instant::NEVER, |at| at.after(self.timeouts.pdu));
        match self.phase {
            ConnectionPhase::Connecting { until } => until.min(stalled_until),
            ConnectionPhase::Open => stalled_until,
            ConnectionPhase::Terminating { until } => until,
            ConnectionPhase::Closed => Instant::NEVER,
        }
    }

    /// Closes the connection after a timeout. Returns the reason, unless it was reported before.
    pub(crate) fn handle_deadline(&mut self, now: Instant) -> Option<CloseReason> {
        if now < self.deadline() || self.is_closed() {
            return None;
        }
        let reason = match self.phase {
            ConnectionPhase::Connecting { .. } => Some(CloseReason::ConnectTimeout),
            ConnectionPhase::Open => Some(CloseReason::PduTimeout),
            ConnectionPhase::Terminating { .. } | ConnectionPhase::Closed => None,
        };
        self.close_connection();
        reason
    }

    /// Queues a PDU header, with its digest and the padding in front of data at `data_at`. Inlined,
    /// so that the header is copied with a known length: together with that of `header`, a read
    /// takes the host 508 instructions instead of 601.
    #[inline(always)]
    pub(crate) fn queue_pdu_header(&mut self, header: &[u8], data_at: usize) {
        let digest = self.outgoing.header_digest.then(|| tenmil_wire::tcp::crc32c(header));
        let len_with_digest = header.len() + usize::from(self.outgoing.header_digest_bytes());
        self.send_queue.push_header(header, digest, data_at.max(len_with_digest));
    }

    /// Parses the header of the PDU at the start of `bytes`. Returns the header and its length including
    /// the digest, or `None` if more bytes are needed.
    ///
    /// The type is checked as soon as the common header is complete, and nothing else before the
    /// whole header is, so that the error does not depend on the fragmentation of the stream.
    #[inline(always)]
    pub(crate) fn parse_header<'a>(
        &self,
        bytes: &'a [u8],
    ) -> Result<Option<PduHeader<'a>>, RejectedPdu<'a>> {
        let Some(common) = bytes.get(..tenmil_wire::tcp::COMMON_BYTES) else { return Ok(None) };
        let kind = tenmil_wire::tcp::pdu_validation::received_pdu_type(self.role, bytes[0])
            .map_err(|why| (why, common))?;
        let len = usize::from(kind.header_bytes());
        if !self.incoming.header_digest || !kind.has_digest() {
            return Ok(bytes.get(..len).map(|header| (kind, header, len)));
        }
        let Some(found) = bytes.get(len..).and_then(|rest| rest.first_chunk::<4>()) else {
            return Ok(None);
        };
        let (header, found) = (&bytes[..len], u32::from_le_bytes(*found));
        if tenmil_wire::tcp::crc32c(header) != found {
            return Err((FatalError::header_digest_error(found), header));
        }
        Ok(Some((kind, header, len + 4)))
    }
}
