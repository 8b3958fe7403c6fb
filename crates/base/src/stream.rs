//! Byte stream interface: a connected socket, as used by the owner of a connection.
//!
//! Nothing blocks, and each call that moves bytes is at most one system call. Received bytes are
//! read in place, so headers are parsed without a copy; payload is either copied once from there,
//! or received directly into its destination. A send takes one gathered list per call.

use core::fmt;
use core::net::SocketAddr;

use crate::{Segment, WakeSource};

/// One end of a stream to a peer.
pub trait Stream: Send {
    /// Receives available bytes behind the unconsumed ones, as far as there is space.
    fn receive(&mut self) -> RecvResult;

    /// As [`receive`](Self::receive), but limited to `count` bytes, at least one, where supported:
    /// the bytes after these are to be received elsewhere.
    fn receive_up_to(&mut self, count: usize) -> RecvResult {
        let _ = count;
        self.receive()
    }

    /// Received and unconsumed bytes, oldest first.
    fn buffered(&self) -> &[u8];

    /// Consumes the first `count` bytes of [`buffered`](Self::buffered).
    ///
    /// # Panics
    ///
    /// If there are fewer.
    fn consume(&mut self, count: usize);

    /// Receives the next bytes directly into `into`, in order.
    ///
    /// # Panics
    ///
    /// If there are unconsumed [`buffered`](Self::buffered) bytes: they come first.
    fn receive_into(&mut self, into: &[Segment]) -> RecvResult;

    /// As [`receive_into`](Self::receive_into), and in the same call up to `following` of the bytes
    /// after them, behind which they are [`buffered`](Self::buffered), where supported: usually the
    /// next header. The number of bytes includes both.
    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        let _ = following;
        self.receive_into(into)
    }

    /// Sends `stretches` in order, as far as the stream has space, and returns the number of bytes
    /// accepted.
    ///
    /// `headers` is read during the call only. Memory named by segments must not be reused before
    /// it is [released](Self::released_bytes); of bytes that change before that, the peer receives
    /// the old or the new ones. `has_more` announces that more data follows at once, so that this
    /// part need not be a packet of its own.
    ///
    /// # Errors
    ///
    /// If nothing can be sent any more.
    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError>;

    /// Number of accepted bytes, from the first on, whose memory is no longer read. A stream that
    /// copies releases at once.
    fn released_bytes(&mut self) -> u64;

    /// Shuts down the write side: the peer sees the end of the stream after the accepted bytes.
    fn shutdown_write(&mut self);

    /// Aborts the stream: discards accepted bytes that have not been sent, and everything still
    /// received. The peer sees a reset.
    ///
    /// Memory that the kernel or device may still read is reported by
    /// [`released_bytes`](Self::released_bytes) as usual: before reusing it, poll until it is
    /// released, and only then drop the stream. Poll by time, since [`arm`](Self::arm) signals
    /// nothing any more. On a stream that copies, this only ends it.
    fn abort(&mut self) {
        self.shutdown_write();
    }

    /// Wake source for a thread that waits for this stream. Constant during the stream's life.
    fn wake_source(&self) -> WakeSource<'_>;

    /// Arms the wake source before its thread sleeps: it signals when data arrives (`wants_bytes`),
    /// the stream has space to send (`wants_space`) or memory is released. True if one of these is
    /// known already: then the thread must not sleep. An event that has occurred but is not known
    /// yet ends the sleep at once.
    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool;

    /// Whether everything requested in the last [`arm`](Self::arm) signals by itself, whatever its
    /// thread does with other streams: it need not be armed again until it is used.
    fn is_fully_armed(&self) -> bool {
        false
    }

    /// Disarms the wake source: the thread polls again.
    fn disarm(&mut self) {}

    /// Whether it is bound to the thread that uses it, for its whole life.
    fn is_thread_bound(&self) -> bool {
        false
    }

    /// Releases per-thread resources, so that another thread may use it from now on. False if it
    /// cannot now, because many bytes are unconsumed, or never, because it [is bound to its
    /// thread](Self::is_thread_bound).
    fn detach_from_thread(&mut self) -> bool {
        !self.is_thread_bound()
    }

    /// Description of the peer, for messages.
    fn peer_description(&self) -> String;

    /// Local address on which the peer has reached it; `None` if the transport has none.
    fn local_address(&self) -> Option<SocketAddr> {
        None
    }

    /// Secure channel that carries the stream; `None` for plaintext, and until the handshake has ended.
    fn secure_channel(&self) -> Option<&SecureChannel> {
        None
    }
}

/// Encrypted and authenticated channel of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecureChannel {
    /// IANA name of the cipher suite.
    pub cipher_suite: &'static str,
    /// Identity of the pre-shared key of both ends; `None` if certificates were used.
    pub psk_identity: Option<String>,
}

/// Part of a gathered send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendSlice {
    /// Bytes of the headers.
    Headers {
        /// Offset of the first byte.
        at: u32,
        /// Length.
        len_bytes: u32,
    },
    /// Region memory.
    Memory(Segment),
}

impl SendSlice {
    /// Length in bytes.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        match *self {
            Self::Headers { len_bytes, .. } => len_bytes as usize,
            Self::Memory(segment) => segment.len_bytes as usize,
        }
    }
}

/// Result of a receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecvResult {
    /// Number of bytes, at least one.
    Bytes(usize),
    /// Nothing now, or no space for it.
    WouldBlock,
    /// End of the stream: the peer has closed its side.
    Eof,
    /// The stream has failed.
    Failed(StreamError),
}

/// Error text of a failed stream, from its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError(pub String);

impl fmt::Display for StreamError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl core::error::Error for StreamError {}
