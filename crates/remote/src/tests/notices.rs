//! A stream that says that memory is released as a socket does: again and again, until it is asked;
//! and that believes who says that more follows.

use base::{Broken, Received, Segment, Stream, Stretch, WakeSource};
use sim::network::End;

/// An end of a network that keeps its thread awake with notices that nobody has taken.
pub(super) struct Noticing {
    end: End,
    /// What whoever has asked was told.
    told: u64,
    /// Times that something was looked for since it was said that more follows at once.
    since_promise: Option<u32>,
}

/// Looks at a stream that go by before what was promised has to be sent.
const LOOKS_MAX: u32 = 1;

impl Noticing {
    pub(super) const fn new(end: End) -> Self {
        Self { end, told: 0, since_promise: None }
    }
}

impl Stream for Noticing {
    fn receive(&mut self) -> Received {
        if let Some(looks) = &mut self.since_promise {
            *looks += 1;
            assert!(*looks <= LOOKS_MAX, "a socket would hold back what was sent");
        }
        self.end.receive()
    }

    fn bytes(&self) -> &[u8] {
        self.end.bytes()
    }

    fn consume(&mut self, count: usize) {
        self.end.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        self.end.receive_into(into)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        self.since_promise = has_more.then_some(0);
        self.end.send(headers, stretches, has_more)
    }

    fn released(&mut self) -> u64 {
        self.told = self.end.released();
        self.told
    }

    fn shut_down(&mut self) {
        self.end.shut_down();
    }

    fn abandon(&mut self) {
        self.end.abandon();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.end.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        self.end.arm(wants_bytes, wants_room) || self.end.released() > self.told
    }

    fn peer(&self) -> String {
        self.end.peer()
    }
}
