//! Stream with an optimization disabled, to measure its effect. Streams with all optimizations are
//! not wrapped.

use std::net::SocketAddr;

use tenmil_base::{RecvResult, Segment, SendSlice, Stream, StreamError, WakeSource};

/// Stream without gathering, or without `MSG_MORE`.
pub(super) struct StreamWithoutGather {
    stream: Box<dyn Stream>,
    gathers: bool,
    sends_more: bool,
}

impl StreamWithoutGather {
    /// Wraps `stream`, or returns it unchanged if nothing is disabled.
    pub(super) fn wrap_if_restricted(
        stream: Box<dyn Stream>,
        gathers: bool,
        sends_more: bool,
    ) -> Box<dyn Stream> {
        if gathers && sends_more { stream } else { Box::new(Self { stream, gathers, sends_more }) }
    }

    /// Sends each of `stretches` by a call of its own, as far as the socket has space.
    fn send_separately(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        let mut sent = 0;
        let mut parts =
            stretches.split_inclusive(|stretch| matches!(stretch, SendSlice::Memory(_)));
        let mut next = parts.next();
        while let Some(part) = next {
            next = parts.next();
            let more = self.sends_more && (has_more || next.is_some());
            let count = match self.stream.send(headers, part, more) {
                // Earlier progress is returned first, the error by the next call.
                Err(_) if sent > 0 => return Ok(sent),
                count => count?,
            };
            sent += count;
            if count < part.iter().map(SendSlice::len_bytes).sum() {
                break;
            }
        }
        Ok(sent)
    }
}

impl Stream for StreamWithoutGather {
    fn receive(&mut self) -> RecvResult {
        self.stream.receive()
    }

    fn receive_up_to(&mut self, count: usize) -> RecvResult {
        self.stream.receive_up_to(count)
    }

    fn buffered(&self) -> &[u8] {
        self.stream.buffered()
    }

    fn consume(&mut self, count: usize) {
        self.stream.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.stream.receive_into(into)
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        self.stream.receive_into_and_following(into, following)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        if self.gathers {
            return self.stream.send(headers, stretches, self.sends_more && has_more);
        }
        self.send_separately(headers, stretches, has_more)
    }

    fn released_bytes(&mut self) -> u64 {
        self.stream.released_bytes()
    }

    fn shutdown_write(&mut self) {
        self.stream.shutdown_write();
    }

    fn abort(&mut self) {
        self.stream.abort();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.stream.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        self.stream.arm(wants_bytes, wants_space)
    }

    fn is_fully_armed(&self) -> bool {
        self.stream.is_fully_armed()
    }

    fn disarm(&mut self) {
        self.stream.disarm();
    }

    fn is_thread_bound(&self) -> bool {
        self.stream.is_thread_bound()
    }

    fn detach_from_thread(&mut self) -> bool {
        self.stream.detach_from_thread()
    }

    fn peer_description(&self) -> String {
        self.stream.peer_description()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.stream.local_address()
    }
}
