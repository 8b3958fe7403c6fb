//! The seam of byte streams: a connected socket, as the owner of a connection uses it.
//!
//! Nothing blocks, and each call that moves bytes is at most one system call. What comes is read
//! where it lies, so that headers are parsed in place; payload is either copied once from there, or
//! received straight to where it belongs. What goes is one gathered list per call.

use core::fmt;
use core::net::SocketAddr;

use crate::{Segment, WakeSource};

/// One end of a stream to a peer.
pub trait Stream: Send {
    /// Takes what has come, behind what has not been consumed, as far as there is room.
    fn receive(&mut self) -> Received;

    /// As [`receive`](Self::receive), but no more than `count` bytes, at least one, if it can tell
    /// itself so: what is behind them is to be received elsewhere.
    fn receive_at_most(&mut self, count: usize) -> Received {
        let _ = count;
        self.receive()
    }

    /// What has come and has not been consumed, oldest first.
    fn bytes(&self) -> &[u8];

    /// The first `count` of [`bytes`](Self::bytes) are needed no more.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    fn consume(&mut self, count: usize);

    /// Takes what comes next straight to `into`, first one first, as far as they reach.
    ///
    /// # Panics
    ///
    /// If there are [`bytes`](Self::bytes) that have not been consumed: they come before.
    fn receive_into(&mut self, into: &[Segment]) -> Received;

    /// Sends `stretches` in their order, as far as there is room, and returns how many bytes were
    /// taken. `headers` is read during the call only; memory that segments name must neither change
    /// nor be used for anything else before it is [`released`](Self::released). `has_more` says that
    /// more will follow at once, so that what is sent need not be a packet of its own.
    ///
    /// # Errors
    ///
    /// If nothing can be sent any more.
    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken>;

    /// Of all bytes that were ever taken by [`send`](Self::send), so many, from the first on, are
    /// read by nobody any more. A stream that copies releases at once.
    fn released(&mut self) -> u64;

    /// Sends nothing any more: the peer sees the end of the stream behind what was taken.
    fn shut_down(&mut self);

    /// Throws away what was taken and has not gone, and all that still comes: the peer sees the stream
    /// break. What a machine may read nevertheless is [`released`](Self::released) when it does so no
    /// more: whoever uses that memory again waits for it before the stream is dropped, and looks by the
    /// clock, for [`arm`](Self::arm) has nothing to signal any more. A stream that copies only ends.
    fn abandon(&mut self) {
        self.shut_down();
    }

    /// What wakes a thread that waits for this stream. Constant for as long as the stream lives.
    fn wake_source(&self) -> WakeSource<'_>;

    /// Gets ready for a sleep of its thread: has the wake source signal when there is something to
    /// receive (`wants_bytes`), room to send (`wants_room`) or memory released. True if something is
    /// known to be there already: then the thread must not sleep. What is there and is not known yet
    /// ends the sleep at once.
    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool;

    /// Whether all that [`arm`](Self::arm) was last asked for is signalled, whatever its thread does
    /// with other streams meanwhile: it need not be armed again as long as it is not used.
    fn is_heard(&self) -> bool {
        false
    }

    /// The thread looks by itself again.
    fn disarm(&mut self) {}

    /// Whether it belongs to the thread that uses it for as long as it lives.
    fn is_tied(&self) -> bool {
        false
    }

    /// Gives back what it has of its thread's own, so that another thread may use it from now on.
    /// False if it cannot just now, because much waits to be consumed, or ever, because it
    /// [is tied](Self::is_tied).
    fn let_go(&mut self) -> bool {
        !self.is_tied()
    }

    /// Who is at the other end, for people.
    fn peer(&self) -> String;

    /// The address at which the peer has reached it; none if what carries it has none.
    fn local_address(&self) -> Option<SocketAddr> {
        None
    }
}

/// A part of what is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// So many bytes of the headers, from there on.
    Headers {
        /// The first.
        at: u32,
        /// How many.
        len_bytes: u32,
    },
    /// This memory.
    Memory(Segment),
}

impl Stretch {
    /// How many bytes it is.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        match *self {
            Self::Headers { len_bytes, .. } => len_bytes as usize,
            Self::Memory(segment) => segment.len_bytes as usize,
        }
    }
}

/// What there was to receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now, or no room for it.
    Nothing,
    /// Nothing, and there will never be more: the peer has closed its end.
    End,
    /// Nothing, and there will never be more: the stream has failed.
    Broken(Broken),
}

/// A stream that has failed, in the words of whoever carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken(pub String);

impl fmt::Display for Broken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl core::error::Error for Broken {}
