//! State shared by both ends: negotiation, framing, termination and deadlines.

use tenmil_base::{Instant, Span};
use tenmil_wire::tcp::{FatalError, PduFraming, PduType, Role, TermReq};

use crate::pdu_body::PduBody;
use crate::send_queue::SendQueue;

/// Time limits for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From the start until ICReq or ICResp has arrived.
    pub opening: Span,
    /// From the first byte of a header to its last, and between two fragments of data.
    pub unit: Span,
    /// From sending a TermReq until the connection is closed, whatever the peer does. The
    /// specification allows up to 30 s (TCP 1.0 §3.5); a peer that does not close is not worth that
    /// long a wait.
    pub linger: Span,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { opening: Span::from_secs(10), unit: Span::from_secs(10), linger: Span::from_secs(2) }
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
    Opening { until: Instant },
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
    end: Role,
    life: ConnectionPhase,
    time_limit: Timeouts,
    /// Time of the last progress of a partly received PDU.
    stuck_since: Option<Instant>,
    pub(crate) incoming: PduFraming,
    pub(crate) outgoing: PduFraming,
    pub(crate) out: SendQueue,
    /// Body that is being received.
    pub(crate) body: Option<PduBody>,
}

impl ConnectionCore {
    pub(crate) fn new(end: Role, time_limit: Timeouts, out: SendQueue, now: Instant) -> Self {
        Self {
            end,
            life: ConnectionPhase::Opening { until: now.after(time_limit.opening) },
            time_limit,
            stuck_since: None,
            incoming: PduFraming::default(),
            outgoing: PduFraming::default(),
            out,
            body: None,
        }
    }

    #[inline]
    pub(crate) fn is_opening(&self) -> bool {
        matches!(self.life, ConnectionPhase::Opening { .. })
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.life == ConnectionPhase::Open
    }

    /// Whether received bytes are parsed.
    #[inline]
    pub(crate) fn is_listening(&self) -> bool {
        matches!(self.life, ConnectionPhase::Opening { .. } | ConnectionPhase::Open)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life == ConnectionPhase::Closed
    }

    /// Whether nothing more will be sent.
    pub(crate) fn is_spent(&self) -> bool {
        match self.life {
            ConnectionPhase::Opening { .. } | ConnectionPhase::Open => false,
            ConnectionPhase::Terminating { .. } => self.out.is_empty(),
            ConnectionPhase::Closed => true,
        }
    }

    pub(crate) fn opened(&mut self, incoming: PduFraming, outgoing: PduFraming) {
        (self.incoming, self.outgoing) = (incoming, outgoing);
        self.life = ConnectionPhase::Open;
    }

    /// Queues a TermReq for the PDU with this header.
    pub(crate) fn refuse(
        &mut self,
        now: Instant,
        refusal: FatalError,
        header: &[u8],
    ) -> CloseReason {
        let kind = match self.end {
            Role::Host => PduType::H2CTermReq,
            Role::Controller => PduType::C2HTermReq,
        };
        let (bytes, len) = TermReq::build(kind, refusal, header);
        self.out.push_termination(&bytes[..len]);
        self.life = ConnectionPhase::Terminating { until: now.after(self.time_limit.linger) };
        self.stuck_since = None;
        CloseReason::ProtocolError(refusal)
    }

    /// Handles a TermReq of the peer.
    pub(crate) fn terminated(&mut self, request: &TermReq) -> CloseReason {
        self.end();
        if request.is_valid() {
            CloseReason::Terminated(request.fatal_error())
        } else {
            CloseReason::InvalidTermination
        }
    }

    /// Handles the end of the stream. Returns the reason, unless it was reported before.
    pub(crate) fn closed(&mut self, is_within: bool) -> Option<CloseReason> {
        let cause = if is_within { CloseReason::TruncatedPdu } else { CloseReason::Closed };
        let cause = self.is_listening().then_some(cause);
        self.end();
        cause
    }

    fn end(&mut self) {
        self.life = ConnectionPhase::Closed;
        self.stuck_since = None;
    }

    /// Updates the PDU timeout at the end of `receive`: whether a PDU is incomplete, and whether
    /// anything was consumed.
    #[inline]
    pub(crate) fn note(&mut self, now: Instant, is_within: bool, progressed: bool) {
        if !is_within {
            self.stuck_since = None;
        } else if progressed || self.stuck_since.is_none() {
            self.stuck_since = Some(now);
        }
    }

    /// Time at which [`expired`](Self::expired) must be called.
    #[inline]
    pub(crate) fn deadline(&self) -> Instant {
        let stuck = self.stuck_since.map_or(Instant::NEVER, |at| at.after(self.time_limit.unit));
        match self.life {
            ConnectionPhase::Opening { until } => until.min(stuck),
            ConnectionPhase::Open => stuck,
            ConnectionPhase::Terminating { until } => until,
            ConnectionPhase::Closed => Instant::NEVER,
        }
    }

    /// Closes the connection after a timeout. Returns the reason, unless it was reported before.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<CloseReason> {
        if now < self.deadline() || self.is_over() {
            return None;
        }
        let cause = match self.life {
            ConnectionPhase::Opening { .. } => Some(CloseReason::ConnectTimeout),
            ConnectionPhase::Open => Some(CloseReason::PduTimeout),
            ConnectionPhase::Terminating { .. } | ConnectionPhase::Closed => None,
        };
        self.end();
        cause
    }

    /// Queues a PDU header, with its digest and the padding in front of data at `data_at`. Inlined,
    /// so that the header is copied with a known length: together with that of `header`, a read
    /// takes the host 508 instructions instead of 601.
    #[inline(always)]
    pub(crate) fn push(&mut self, header: &[u8], data_at: usize) {
        let digest = self.outgoing.header_digest.then(|| tenmil_wire::tcp::crc32c(header));
        let bare = header.len() + usize::from(self.outgoing.header_digest_bytes());
        self.out.push_header(header, digest, data_at.max(bare));
    }

    /// Parses the header of the PDU at the start of `bytes`. Returns it with its length including
    /// the digest, or `None` if more bytes are needed.
    ///
    /// The type is checked as soon as the common header is complete, and nothing else before the
    /// whole header is, so that the error does not depend on the fragmentation of the stream.
    #[inline(always)]
    pub(crate) fn header<'a>(
        &self,
        bytes: &'a [u8],
    ) -> Result<Option<PduHeader<'a>>, RejectedPdu<'a>> {
        let Some(common) = bytes.get(..tenmil_wire::tcp::COMMON_BYTES) else { return Ok(None) };
        let kind =
            tenmil_wire::tcp::check::pdu_type(self.end, bytes[0]).map_err(|why| (why, common))?;
        let len = usize::from(kind.header_bytes());
        if !self.incoming.header_digest || !kind.has_digest() {
            return Ok(bytes.get(..len).map(|header| (kind, header, len)));
        }
        let Some(found) = bytes.get(len..).and_then(|rest| rest.first_chunk::<4>()) else {
            return Ok(None);
        };
        let (header, found) = (&bytes[..len], u32::from_le_bytes(*found));
        if tenmil_wire::tcp::crc32c(header) != found {
            return Err((FatalError::digest(found), header));
        }
        Ok(Some((kind, header, len + 4)))
    }
}
