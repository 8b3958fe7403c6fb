//! A stream over a TLS session over a stream.
//!
//! ```text
//!  send     headers and segments ─(encrypted on the way)─► records ─► stream below
//!                                                           └► pending, if it has no space
//!  receive  stream below ─(decrypted on the way)─► segments, or `plain`
//! ```
//!
//! The handshake happens inside of `receive` and `send`, which return nothing until it has ended. All
//! slices of one send are one sequence of full records, so several PDUs share a record. Accepted bytes
//! are released once their records have been accepted by the stream below: a peer that reads nothing is
//! noticed by its owner as without TLS.

mod below_io;
mod pending_records;
mod plain_buffer;

use std::fmt;
use std::net::SocketAddr;

use tenmil_base::{
    Memory, RecvResult, SecureChannel, Segment, SendSlice, Stream, StreamError, WakeSource,
};
use tenmil_dma::RegionTable;

use self::below_io::{Lower, Receives};
use self::plain_buffer::PlainBuffer;
use crate::cipher::{GatherList, ScatterList, first_segment};
use crate::error::TlsError;
use crate::record_layer::Plaintext;
use crate::session::TlsSession;

/// Stream whose bytes are encrypted on the stream below.
pub struct TlsStream {
    lower: Lower,
    regions: RegionTable,
    plain: PlainBuffer,
    /// Bytes accepted, and the part of these whose records the stream below has accepted.
    accepted: u64,
    released: u64,
    /// Released bytes that the owner knows of.
    reported: u64,
    /// Why nothing more is received.
    end: Option<RecvResult>,
    traffic: TrafficMeter,
    /// Whether an end, or the end of the handshake, has not been reported to the owner.
    has_news: bool,
    is_write_shut: bool,
    /// Whether the write side below is to be shut once nothing is pending.
    shuts_below: bool,
}

/// Bytes since the stream was armed last, to find connections whose buffers are worth freeing.
#[derive(Debug, Default)]
struct TrafficMeter {
    bytes: u64,
    quiet_sleeps: u32,
}

/// Bytes between two sleeps of a connection that is idle: a keep-alive and its response.
const QUIET_BYTES_MAX: u64 = 512;
/// Number of such intervals, one after the other, after which the buffers are freed.
const QUIET_SLEEPS: u32 = 3;

/// Largest number of bytes that one send accepts: what the stream below does not accept at once is
/// stored here.
const SEND_BYTES_MAX: usize = 256 << 10;

impl TlsStream {
    /// Creates a stream whose segments refer to `regions`. The handshake may have ended already.
    #[must_use]
    pub fn new(below: Box<dyn Stream>, session: TlsSession, regions: RegionTable) -> Self {
        Self {
            lower: Lower::new(below, session),
            regions,
            plain: PlainBuffer::default(),
            accepted: 0,
            released: 0,
            reported: 0,
            end: None,
            traffic: TrafficMeter::default(),
            has_news: false,
            is_write_shut: false,
            shuts_below: false,
        }
    }

    /// Makes progress with the handshake. True once it has ended.
    ///
    /// # Errors
    ///
    /// The reason why it has failed. The peer was sent an alert, if there is one for it.
    pub fn poll_handshake(&mut self) -> Result<bool, TlsError> {
        if self.lower.session.secure_channel().is_some() {
            return Ok(true);
        }
        let result = self.lower.with_io(Receives::Unlimited, |session, io| session.handshake(io));
        // The caller may do nothing but poll, so what was sent goes to the stream below now. An error of the
        // handshake comes before one of that.
        let flushed = self.flush_pending();
        let result = result.and_then(|is_open| flushed.map(|()| is_open).map_err(TlsError::Stream));
        match &result {
            Ok(is_open) => {
                self.has_news |= is_open;
                if *is_open && self.is_write_shut {
                    self.close_session();
                }
            }
            Err(error) => {
                self.record_end(RecvResult::Failed(error.clone().into()));
                self.shuts_below |= self.is_write_shut;
            }
        }
        result
    }

    /// Session, for its counters.
    #[must_use]
    pub const fn session(&self) -> &TlsSession {
        &self.lower.session
    }

    /// Number of bytes that were accepted for sending.
    #[must_use]
    pub const fn accepted_bytes(&self) -> u64 {
        self.accepted
    }

    /// Encrypts with new keys from the next send on.
    ///
    /// # Errors
    ///
    /// If the session has failed, or its handshake has not ended.
    pub fn update_keys(&mut self) -> Result<(), TlsError> {
        self.lower.session.update_keys()
    }

    /// Sends a record with a changed bit.
    #[cfg(test)]
    pub(crate) fn break_record(&mut self, bytes: &[u8]) {
        let sent = self.lower.with_io(Receives::None, |session, io| {
            session.send(io, bytes)?;
            let outgoing = io.outgoing();
            let at = outgoing.len() - 1;
            outgoing[at] ^= 1;
            Ok(())
        });
        sent.unwrap();
        self.flush_pending().unwrap();
    }

    /// Announces the end of this side's bytes, and shuts the stream below once that has been sent.
    fn close_session(&mut self) {
        let _ = self.lower.with_io(Receives::None, |session, io| {
            session.close_notify(io);
            Ok(())
        });
        self.shuts_below = true;
        let _ = self.flush_pending();
    }

    /// Sends pending records, as far as there is space.
    #[inline]
    fn flush_pending(&mut self) -> Result<(), StreamError> {
        self.flush(false)
    }

    #[inline]
    fn flush(&mut self, has_more: bool) -> Result<(), StreamError> {
        let Lower { below, pending, .. } = &mut self.lower;
        if !pending.is_empty() || pending.failure().is_some() {
            pending.send_to(&mut **below, has_more)?;
        }
        if pending.is_empty() {
            self.released = self.accepted;
            if std::mem::take(&mut self.shuts_below) {
                below.shutdown_write();
            }
        }
        Ok(())
    }

    /// Ends the handshake and flushes, before bytes are received. `Err`: nothing can be received now.
    #[inline]
    fn prepare_receive(&mut self) -> Result<(), RecvResult> {
        if self.lower.session.secure_channel().is_none() {
            match self.poll_handshake() {
                Ok(true) => {}
                Ok(false) if self.end.is_none() => {
                    // An alert or answer of the handshake may be pending; an error comes back below.
                    let _ = self.flush_pending();
                    return Err(RecvResult::WouldBlock);
                }
                _ => {
                    let _ = self.flush_pending();
                }
            }
        }
        self.has_news = false;
        // If the stream below is broken, it is when bytes are received too: those that have arrived
        // come first.
        let _ = self.flush_pending();
        match &self.end {
            Some(end) => Err(end.clone()),
            None => Ok(()),
        }
    }

    /// Receives up to `count_max` bytes behind the unconsumed ones.
    #[inline]
    fn receive_at_most(&mut self, count_max: usize) -> RecvResult {
        if let Err(nothing) = self.prepare_receive() {
            return nothing;
        }
        let received = self.fill_plain(count_max);
        self.convert_received(received)
    }

    fn fill_plain(&mut self, count_max: usize) -> Result<Plaintext, TlsError> {
        let space = self.plain.free_space();
        let count_max = count_max.min(space.len());
        let received = self
            .lower
            .with_io(Receives::One, |session, io| session.receive(io, &mut space[..count_max]));
        if let Ok(Plaintext::Bytes(count)) = received {
            self.plain.mark_filled(count);
            self.traffic.bytes += count as u64;
        }
        received
    }

    #[inline]
    fn convert_received(&mut self, received: Result<Plaintext, TlsError>) -> RecvResult {
        match received {
            Ok(Plaintext::Bytes(count)) => RecvResult::Bytes(count),
            Ok(Plaintext::WouldBlock) => RecvResult::WouldBlock,
            Ok(Plaintext::End) => self.record_end(RecvResult::Eof),
            Err(error) => {
                // The alert for the peer.
                let _ = self.flush_pending();
                self.record_end(RecvResult::Failed(error.into()))
            }
        }
    }

    #[cold]
    fn record_end(&mut self, end: RecvResult) -> RecvResult {
        self.has_news |= self.end.is_none();
        self.end.get_or_insert(end).clone()
    }

    /// Receives into `segments`, and behind them up to `following` bytes into the buffer.
    fn receive_into_segments(&mut self, segments: &[Segment], following: usize) -> RecvResult {
        let Self { lower, regions, plain, .. } = self;
        let mut list = ScatterList::new();
        let added = list.add_segments(regions, segments);
        let direct = list.left_bytes();
        if direct == 0 {
            let first = segments.iter().find(|segment| segment.len_bytes > 0).copied();
            return match (added, first) {
                (Err(_), Some(segment)) => {
                    let received = self.receive_into_kernel_buffer(segment);
                    self.convert_received(received)
                }
                _ => RecvResult::WouldBlock,
            };
        }
        let asked: usize = segments.iter().map(|segment| segment.len_bytes as usize).sum();
        let has_all = asked == direct;
        if has_all && following > 0 {
            let space = plain.free_space();
            let count_max = following.min(space.len());
            list.add_bytes(&mut space[..count_max]);
        }
        let received =
            lower.with_io(Receives::One, |session, io| session.receive_list(io, &mut list));
        if let Ok(Plaintext::Bytes(count)) = received {
            plain.mark_filled(count.saturating_sub(direct));
            self.traffic.bytes += count as u64;
        }
        self.convert_received(received)
    }

    /// Receives into a segment without an address: decrypted here, and copied there.
    #[cold]
    fn receive_into_kernel_buffer(&mut self, segment: Segment) -> Result<Plaintext, TlsError> {
        const BOUNCE_BYTES: usize = 16 << 10;
        let mut bounce = vec![0; BOUNCE_BYTES.min(segment.len_bytes as usize)];
        let received =
            self.lower.with_io(Receives::One, |session, io| session.receive(io, &mut bounce))?;
        if let Plaintext::Bytes(count) = received {
            let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
            let stored = part.map(|part| self.regions.store(part, &bounce[..count]));
            if !matches!(stored, Some(Ok(()))) {
                return Err(self.invalid_segment("receive from", segment));
            }
        }
        Ok(received)
    }

    #[cold]
    fn invalid_segment(&self, doing: &str, segment: Segment) -> TlsError {
        let peer = self.lower.below.peer_description();
        let Segment { region, offset, len_bytes } = segment;
        TlsError::Stream(StreamError(format!(
            "{doing} {peer}: region {} has no {len_bytes} bytes at {offset}",
            region.0
        )))
    }

    /// Sends the start of a segment without an address.
    #[cold]
    fn send_kernel_buffer(&mut self, segment: Segment) -> Result<usize, TlsError> {
        let len_bytes = segment.len_bytes.min(16 << 10);
        let mut bounce = vec![0; len_bytes as usize];
        if self.regions.load(Segment { len_bytes, ..segment }, &mut bounce).is_err() {
            return Err(self.invalid_segment("send to", segment));
        }
        self.lower.with_io(Receives::None, |session, io| session.send(io, &bounce))?;
        Ok(bounce.len())
    }

    /// Encrypts what one call accepts of `slices`.
    #[inline]
    fn encrypt(&mut self, headers: &[u8], slices: &[SendSlice]) -> Result<usize, TlsError> {
        let Self { lower, regions, .. } = self;
        let mut list = GatherList::new();
        let added = list.add_all(regions, headers, slices, SEND_BYTES_MAX);
        let count = list.left_bytes();
        if count > 0 {
            lower.with_io(Receives::None, |session, io| session.send_list(io, &mut list))?;
            return Ok(count);
        }
        match (added, first_segment(slices)) {
            (Err(_), Some(segment)) => self.send_kernel_buffer(segment),
            _ => Ok(0),
        }
    }
}

impl Stream for TlsStream {
    #[inline]
    fn receive(&mut self) -> RecvResult {
        self.receive_at_most(usize::MAX)
    }

    fn receive_up_to(&mut self, count: usize) -> RecvResult {
        self.receive_at_most(count.max(1))
    }

    #[inline]
    fn buffered(&self) -> &[u8] {
        self.plain.unconsumed()
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        self.plain.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        assert!(self.plain.is_empty(), "bytes that came before have not been consumed");
        match self.prepare_receive() {
            Ok(()) => self.receive_into_segments(into, 0),
            Err(nothing) => nothing,
        }
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        assert!(self.plain.is_empty(), "bytes that came before have not been consumed");
        match self.prepare_receive() {
            Ok(()) => self.receive_into_segments(into, following),
            Err(nothing) => nothing,
        }
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        if self.is_write_shut {
            let peer = self.lower.below.peer_description();
            return Err(StreamError(format!("send to {peer}: this side was shut down")));
        }
        if self.lower.session.secure_channel().is_none() {
            let is_open = self.poll_handshake();
            self.flush_pending()?;
            if !is_open? {
                return Ok(0);
            }
        }
        self.flush_pending()?;
        if !self.lower.pending.is_empty() {
            return Ok(0);
        }
        let count = self.encrypt(headers, stretches)?;
        self.accepted += count as u64;
        self.traffic.bytes += count as u64;
        // The records are lost with the stream below, if it fails.
        self.flush(has_more)?;
        Ok(count)
    }

    #[inline]
    fn released_bytes(&mut self) -> u64 {
        if self.released < self.accepted || !self.lower.pending.is_empty() {
            // An error comes back with the next send or receive.
            let _ = self.flush_pending();
        }
        self.reported = self.released;
        self.released
    }

    fn shutdown_write(&mut self) {
        if std::mem::replace(&mut self.is_write_shut, true) {
            return;
        }
        // Bytes of the peer that arrive during the handshake are still its own; the end follows it.
        if self.end.is_some() || self.lower.session.secure_channel().is_some() {
            self.close_session();
        }
    }

    fn abort(&mut self) {
        self.lower.pending = Default::default();
        self.released = self.accepted;
        self.is_write_shut = true;
        self.lower.below.abort();
        let peer = self.lower.below.peer_description();
        let abandoned = format!("receive from {peer}: the connection was abandoned");
        self.record_end(RecvResult::Failed(StreamError(abandoned)));
        self.has_news = false;
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.lower.below.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        let is_handshaking = self.lower.session.secure_channel().is_none() && self.end.is_none();
        if is_handshaking {
            let _ = self.poll_handshake();
        }
        let is_broken = self.flush_pending().is_err();
        let has_space = self.plain.has_space();
        let is_open = self.lower.session.secure_channel().is_some();
        let has_bytes = self.end.is_none() && is_open && self.lower.has_more();
        let is_space_known = wants_space && is_open && self.lower.pending.is_empty();
        if std::mem::take(&mut self.has_news)
            || wants_bytes && has_space && has_bytes
            || is_space_known
            || self.reported < self.released
            || is_broken && self.end.is_none()
        {
            return true;
        }
        if is_open && self.traffic.is_idle_at_sleep() {
            self.plain.release_if_empty();
            self.lower.session.release_buffers();
        }
        self.lower.store_partial_record();
        let awaits_bytes = self.end.is_none() && (is_handshaking || wants_bytes && has_space);
        self.lower.below.arm(awaits_bytes, !self.lower.pending.is_empty())
    }

    fn is_fully_armed(&self) -> bool {
        self.lower.below.is_fully_armed() && self.plain.has_space()
    }

    fn disarm(&mut self) {
        self.lower.below.disarm();
    }

    fn is_thread_bound(&self) -> bool {
        self.lower.below.is_thread_bound()
    }

    fn detach_from_thread(&mut self) -> bool {
        let _ = self.flush_pending();
        self.lower.store_partial_record();
        self.lower.below.detach_from_thread()
    }

    fn peer_description(&self) -> String {
        self.lower.below.peer_description()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.lower.below.local_address()
    }

    fn secure_channel(&self) -> Option<&SecureChannel> {
        self.lower.session.secure_channel()
    }
}

/// Announces the end of this side's bytes, unless there is an error or something was not sent: only then
/// the peer cannot tell an end from an interruption.
impl Drop for TlsStream {
    fn drop(&mut self) {
        let has_failed = matches!(self.end, Some(RecvResult::Failed(_)));
        if !has_failed && self.lower.pending.is_empty() {
            self.shutdown_write();
        }
    }
}

impl TrafficMeter {
    /// Records that the stream is armed. Returns whether it has been quiet for long: then its buffers,
    /// of up to 160 KiB, are freed. This costs microseconds, so not at every sleep.
    fn is_idle_at_sleep(&mut self) -> bool {
        let is_quiet = std::mem::take(&mut self.bytes) <= QUIET_BYTES_MAX;
        self.quiet_sleeps = if is_quiet { self.quiet_sleeps.saturating_add(1) } else { 0 };
        self.quiet_sleeps == QUIET_SLEEPS
    }
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TlsStream")
            .field("session", &self.lower.session)
            .field("pending_bytes", &self.lower.pending.len_bytes())
            .finish_non_exhaustive()
    }
}
