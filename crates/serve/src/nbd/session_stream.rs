//! Stream of a session: a socket, or TLS over one. A session is compiled for each, so that one in
//! plaintext pays nothing for the other.

use std::io;

use tenmil_base::Segment;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket_stream::{RecvResult, SocketStream};

/// Stream of a session.
pub(super) trait SessionStream: Send + 'static {
    /// Receives what is available into `segments`, in order.
    fn receive(&mut self, segments: &[Segment]) -> io::Result<RecvResult>;

    /// Sends from `segments` as far as there is space, and returns the number of bytes.
    fn send(&mut self, segments: &[Segment]) -> io::Result<usize>;

    /// Adds its descriptor to a set.
    fn watch(&self, watch: &PollSet, token: u64) -> io::Result<()>;

    /// Arms its descriptor for `wanted`; it was armed for `before`. True if one of these is known
    /// already.
    fn arm(
        &mut self,
        watch: &PollSet,
        token: u64,
        before: Interest,
        wanted: Interest,
    ) -> io::Result<bool>;

    /// Whether everything that was accepted has been handed to the kernel.
    fn is_flushed(&mut self) -> bool {
        true
    }

    /// Releases what belongs to the thread. False if it cannot now.
    fn detach_from_thread(&mut self) -> bool {
        true
    }

    /// Announces the end of this side's bytes.
    fn shut_down(&mut self) {}
}

impl SessionStream for SocketStream {
    #[inline]
    fn receive(&mut self, segments: &[Segment]) -> io::Result<RecvResult> {
        Self::receive(self, segments)
    }

    #[inline]
    fn send(&mut self, segments: &[Segment]) -> io::Result<usize> {
        Self::send(self, segments)
    }

    fn watch(&self, watch: &PollSet, token: u64) -> io::Result<()> {
        watch.add(self, token, READABLE)
    }

    fn arm(
        &mut self,
        watch: &PollSet,
        token: u64,
        before: Interest,
        wanted: Interest,
    ) -> io::Result<bool> {
        if wanted != before {
            watch.modify(&*self, token, wanted)?;
        }
        Ok(false)
    }
}

/// Readiness that a descriptor is watched for at first.
pub(super) const READABLE: Interest = Interest { readable: true, writable: false };

#[cfg(feature = "tls")]
mod tls {
    use std::io;

    use tenmil_base::{RecvResult as Received, Segment, SendSlice, Stream, WakeSource};
    use tenmil_linux::poll_set::{Interest, PollSet};
    use tenmil_linux::socket_stream::RecvResult;
    use tenmil_tls::TlsStream;

    use super::{READABLE, SessionStream};

    impl SessionStream for TlsStream {
        fn receive(&mut self, segments: &[Segment]) -> io::Result<RecvResult> {
            match self.receive_into(segments) {
                Received::Bytes(count) => Ok(RecvResult::Bytes(count)),
                Received::WouldBlock => Ok(RecvResult::WouldBlock),
                Received::Eof => Ok(RecvResult::Eof),
                Received::Failed(error) => Err(io::Error::other(error)),
            }
        }

        fn send(&mut self, segments: &[Segment]) -> io::Result<usize> {
            let slices: Vec<SendSlice> = segments.iter().copied().map(SendSlice::Memory).collect();
            Stream::send(self, &[], &slices, false).map_err(io::Error::other)
        }

        fn watch(&self, watch: &PollSet, token: u64) -> io::Result<()> {
            match self.wake_source() {
                WakeSource::Descriptor(descriptor) => watch.add(descriptor, token, READABLE),
                _ => Err(io::ErrorKind::Unsupported.into()),
            }
        }

        fn arm(&mut self, _: &PollSet, _: u64, _: Interest, wanted: Interest) -> io::Result<bool> {
            Ok(Stream::arm(self, wanted.readable, wanted.writable))
        }

        fn is_flushed(&mut self) -> bool {
            self.released_bytes() == self.accepted_bytes()
        }

        fn detach_from_thread(&mut self) -> bool {
            Stream::detach_from_thread(self)
        }

        fn shut_down(&mut self) {
            self.shutdown_write();
        }
    }
}
