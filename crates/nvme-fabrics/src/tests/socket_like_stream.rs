//! A stream that reports released memory like a socket: repeatedly, until it is queried; and that relies
//! on the announcement that more data follows.

use tenmil_base::{RecvResult, SecureChannel, Segment, SendSlice, Stream, StreamError, WakeSource};
use tenmil_sim::sim_network::SimStream;

/// An end of a network that keeps its thread awake with unread notices.
pub(super) struct SocketLikeStream {
    end: SimStream,
    /// Result of the last query.
    reported: u64,
    /// Number of receive calls since the announcement that more follows at once.
    since_promise: Option<u32>,
    channel: Option<SecureChannel>,
}

/// Maximum number of receive calls before announced data has to be sent.
const LOOKS_MAX: u32 = 1;

impl SocketLikeStream {
    /// With the identity of a key it claims to be a secure channel.
    pub(super) fn new(end: SimStream, psk_identity: Option<String>) -> Self {
        let cipher_suite = "TLS_AES_128_GCM_SHA256";
        let channel = psk_identity
            .map(|identity| SecureChannel { cipher_suite, psk_identity: Some(identity) });
        Self { end, reported: 0, since_promise: None, channel }
    }
}

impl Stream for SocketLikeStream {
    fn receive(&mut self) -> RecvResult {
        if let Some(looks) = &mut self.since_promise {
            *looks += 1;
            assert!(*looks <= LOOKS_MAX, "a socket would hold back what was sent");
        }
        self.end.receive()
    }

    fn buffered(&self) -> &[u8] {
        self.end.buffered()
    }

    fn consume(&mut self, count: usize) {
        self.end.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.end.receive_into(into)
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        self.end.receive_into_and_following(into, following)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        self.since_promise = has_more.then_some(0);
        self.end.send(headers, stretches, has_more)
    }

    fn released_bytes(&mut self) -> u64 {
        self.reported = self.end.released_bytes();
        self.reported
    }

    fn shutdown_write(&mut self) {
        self.end.shutdown_write();
    }

    fn abort(&mut self) {
        self.end.abort();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.end.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        self.end.arm(wants_bytes, wants_space) || self.end.released_bytes() > self.reported
    }

    fn secure_channel(&self) -> Option<&SecureChannel> {
        self.channel.as_ref()
    }

    fn peer_description(&self) -> String {
        self.end.peer_description()
    }
}
