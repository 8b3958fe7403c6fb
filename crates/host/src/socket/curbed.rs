//! A stream that goes without a technique, to measure what that is worth. Nobody else pays for the
//! switches: a stream with all techniques is not wrapped.

use std::net::SocketAddr;

use base::{Broken, Received, Segment, Stream, Stretch, WakeSource};

/// A stream that does not gather, or does not say that more follows.
pub(super) struct Curbed {
    stream: Box<dyn Stream>,
    gathers: bool,
    says_more: bool,
}

impl Curbed {
    /// The stream itself, if nothing is taken from it.
    pub(super) fn around(
        stream: Box<dyn Stream>,
        gathers: bool,
        says_more: bool,
    ) -> Box<dyn Stream> {
        if gathers && says_more { stream } else { Box::new(Self { stream, gathers, says_more }) }
    }

    /// Sends a call's worth of `stretches` by a call of its own each, as far as there is room.
    fn send_apart(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        let mut sent = 0;
        let mut parts = stretches.split_inclusive(|stretch| matches!(stretch, Stretch::Memory(_)));
        let mut next = parts.next();
        while let Some(part) = next {
            next = parts.next();
            let more = self.says_more && (has_more || next.is_some());
            let count = match self.stream.send(headers, part, more) {
                // What went before is told first, and the end with the next call.
                Err(_) if sent > 0 => return Ok(sent),
                count => count?,
            };
            sent += count;
            if count < part.iter().map(Stretch::len_bytes).sum() {
                break;
            }
        }
        Ok(sent)
    }
}

impl Stream for Curbed {
    fn receive(&mut self) -> Received {
        self.stream.receive()
    }

    fn receive_at_most(&mut self, count: usize) -> Received {
        self.stream.receive_at_most(count)
    }

    fn bytes(&self) -> &[u8] {
        self.stream.bytes()
    }

    fn consume(&mut self, count: usize) {
        self.stream.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        self.stream.receive_into(into)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        if self.gathers {
            return self.stream.send(headers, stretches, self.says_more && has_more);
        }
        self.send_apart(headers, stretches, has_more)
    }

    fn released(&mut self) -> u64 {
        self.stream.released()
    }

    fn shut_down(&mut self) {
        self.stream.shut_down();
    }

    fn abandon(&mut self) {
        self.stream.abandon();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.stream.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        self.stream.arm(wants_bytes, wants_room)
    }

    fn is_heard(&self) -> bool {
        self.stream.is_heard()
    }

    fn disarm(&mut self) {
        self.stream.disarm();
    }

    fn is_tied(&self) -> bool {
        self.stream.is_tied()
    }

    fn let_go(&mut self) -> bool {
        self.stream.let_go()
    }

    fn peer(&self) -> String {
        self.stream.peer()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.stream.local_address()
    }
}
