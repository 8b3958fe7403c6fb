//! What both ends have in common: opening, framing, terminating, and deadlines.

use base::{Instant, Span};
use wire::tcp::{End, Framing, PduType, Refusal, TermReq};

use crate::body::Body;
use crate::outbox::Outbox;

/// How long an end waits for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// From the beginning until the peer's ICReq or ICResp.
    pub opening: Span,
    /// From the first byte of a header to its last, and between two pieces of data.
    pub unit: Span,
    /// From a termination request until the connection is closed whatever the peer does. The
    /// specification allows it after 30 s (TCP 1.0 §3.5); a peer that does not close is not worth
    /// that long.
    pub linger: Span,
}

impl Default for Patience {
    fn default() -> Self {
        Self { opening: Span::from_secs(10), unit: Span::from_secs(10), linger: Span::from_secs(2) }
    }
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer sent what is refused, and is being told so.
    Refused(Refusal),
    /// The peer has terminated the connection, and says why.
    Terminated(Refusal),
    /// The peer has terminated the connection by a request that is none (TCP 1.0 §3.5).
    TerminatedUnsoundly,
    /// The peer has not opened the connection in time.
    NotOpened,
    /// A unit was begun and has not come to its end in time.
    Stalled,
    /// The stream has ended between two units.
    Closed,
    /// The stream has ended within a unit.
    Cut,
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// The peer's ICReq or ICResp is awaited.
    Opening { until: Instant },
    /// Anything may come.
    Open,
    /// The peer is told that this is the end, and its closing is awaited.
    Ending { until: Instant },
    /// The socket can be closed.
    Over,
}

/// A header: its unit's type, itself, and its length with its digest.
pub(crate) type Header<'a> = (PduType, &'a [u8], usize);

/// What is refused, and the header that it is about.
pub(crate) type Refused<'a> = (Refusal, &'a [u8]);

/// The half of an end that both have in common. It is used through [`Connection`](crate::Connection).
#[derive(Debug)]
pub struct Line {
    end: End,
    life: Life,
    patience: Patience,
    /// When the unit that has come in part last got further.
    stuck_since: Option<Instant>,
    pub(crate) incoming: Framing,
    pub(crate) outgoing: Framing,
    pub(crate) out: Outbox,
    /// The data that are being read.
    pub(crate) body: Option<Body>,
}

impl Line {
    pub(crate) fn new(end: End, patience: Patience, out: Outbox, now: Instant) -> Self {
        Self {
            end,
            life: Life::Opening { until: now.after(patience.opening) },
            patience,
            stuck_since: None,
            incoming: Framing::default(),
            outgoing: Framing::default(),
            out,
            body: None,
        }
    }

    #[inline]
    pub(crate) fn is_opening(&self) -> bool {
        matches!(self.life, Life::Opening { .. })
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    /// Whether what comes is read.
    #[inline]
    pub(crate) fn is_listening(&self) -> bool {
        matches!(self.life, Life::Opening { .. } | Life::Open)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life == Life::Over
    }

    /// Whether all has been sent that ever will be.
    pub(crate) fn is_spent(&self) -> bool {
        match self.life {
            Life::Opening { .. } | Life::Open => false,
            Life::Ending { .. } => self.out.is_empty(),
            Life::Over => true,
        }
    }

    pub(crate) fn opened(&mut self, incoming: Framing, outgoing: Framing) {
        (self.incoming, self.outgoing) = (incoming, outgoing);
        self.life = Life::Open;
    }

    /// Tells the peer that the unit with this header is refused.
    pub(crate) fn refuse(&mut self, now: Instant, refusal: Refusal, header: &[u8]) -> Cause {
        let kind = match self.end {
            End::Host => PduType::H2CTermReq,
            End::Controller => PduType::C2HTermReq,
        };
        let (bytes, len) = TermReq::whole(kind, refusal, header);
        self.out.push_termination(&bytes[..len]);
        self.life = Life::Ending { until: now.after(self.patience.linger) };
        self.stuck_since = None;
        Cause::Refused(refusal)
    }

    /// The peer has terminated the connection.
    pub(crate) fn terminated(&mut self, request: &TermReq) -> Cause {
        self.end();
        if request.is_sound() {
            Cause::Terminated(request.refusal())
        } else {
            Cause::TerminatedUnsoundly
        }
    }

    /// The stream has ended. Why, if that was not known before.
    pub(crate) fn closed(&mut self, is_within: bool) -> Option<Cause> {
        let cause = if is_within { Cause::Cut } else { Cause::Closed };
        let cause = self.is_listening().then_some(cause);
        self.end();
        cause
    }

    fn end(&mut self) {
        self.life = Life::Over;
        self.stuck_since = None;
    }

    /// A call of `receive` is at its end: whether a unit has come in part, and whether anything was
    /// taken.
    #[inline]
    pub(crate) fn note(&mut self, now: Instant, is_within: bool, progressed: bool) {
        if !is_within {
            self.stuck_since = None;
        } else if progressed || self.stuck_since.is_none() {
            self.stuck_since = Some(now);
        }
    }

    /// When [`expired`](Self::expired) is to be asked.
    pub(crate) fn deadline(&self) -> Instant {
        let stuck = self.stuck_since.map_or(Instant::NEVER, |at| at.after(self.patience.unit));
        match self.life {
            Life::Opening { until } => until.min(stuck),
            Life::Open => stuck,
            Life::Ending { until } => until,
            Life::Over => Instant::NEVER,
        }
    }

    /// Ends what has taken too long. Why, if that was not known before.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<Cause> {
        if now < self.deadline() || self.is_over() {
            return None;
        }
        let cause = match self.life {
            Life::Opening { .. } => Some(Cause::NotOpened),
            Life::Open => Some(Cause::Stalled),
            Life::Ending { .. } | Life::Over => None,
        };
        self.end();
        cause
    }

    /// Queues the header of a unit, with its digest and the padding in front of data at `data_at`.
    /// Inlined, so that a header is copied with its length known: with that of `header`, a read takes
    /// the host 508 instructions and not 601.
    #[inline(always)]
    pub(crate) fn push(&mut self, header: &[u8], data_at: usize) {
        let digest = self.outgoing.header_digest.then(|| wire::tcp::crc32c(header));
        let bare = header.len() + usize::from(self.outgoing.header_digest_bytes());
        self.out.push_header(header, digest, data_at.max(bare));
    }

    /// The header of the unit that begins `bytes`, and how long it is with its digest. `None` if
    /// more bytes are needed.
    ///
    /// The type is looked at as soon as a common header is there, and nothing else before the whole
    /// header is, so that a refusal does not depend on where the stream was cut.
    #[inline(always)]
    pub(crate) fn header<'a>(&self, bytes: &'a [u8]) -> Result<Option<Header<'a>>, Refused<'a>> {
        let Some(common) = bytes.get(..wire::tcp::COMMON_BYTES) else { return Ok(None) };
        let kind = wire::tcp::check::pdu_type(self.end, bytes[0]).map_err(|why| (why, common))?;
        let len = usize::from(kind.header_bytes());
        if !self.incoming.header_digest || !kind.has_digest() {
            return Ok(bytes.get(..len).map(|header| (kind, header, len)));
        }
        let Some(found) = bytes.get(len..).and_then(|rest| rest.first_chunk::<4>()) else {
            return Ok(None);
        };
        let (header, found) = (&bytes[..len], u32::from_le_bytes(*found));
        if wire::tcp::crc32c(header) != found {
            return Err((Refusal::digest(found), header));
        }
        Ok(Some((kind, header, len + 4)))
    }
}
