//! Factory for the streams of one thread.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{Counter, ErrorCategory, Stream};
use tenmil_dma::RegionTable;

use super::epoll_stream::EpollStream;
use super::napi_groups::NapiGroups;
use super::recv_buffer::RecvBufferPool;
use super::socket_options::{SocketOptionError, SocketOptions};
use super::socket_ring::{RingStream, SocketRing};
use super::stream_without_gather::StreamWithoutGather;
use super::zero_copy::ZeroCopyThreshold;
use rustix::io::Errno;

/// Factory for the streams of one thread: options, receive buffers and counters.
///
/// Cheap to clone; clones share all of it. A stream may be created by any thread, but is used by
/// one only, so that its receive buffers stay in that CPU's cache and its counters have one writer.
#[derive(Clone, Debug)]
pub struct SocketStreamFactory {
    options: Arc<SocketOptions>,
    regions: RegionTable,
    inboxes: RecvBufferPool,
    threshold: ZeroCopyThreshold,
    counts: Arc<SharedSocketStats>,
    groups: NapiGroups,
    ring: Option<SocketRing>,
    why_no_ring: Option<Errno>,
}

/// Socket engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketEngine {
    /// `recv` and `sendmsg`, and sleeping on `epoll`.
    #[default]
    Epoll,
    /// One `io_uring` for all sockets of the thread, or `epoll` where io_uring is denied.
    IoUring,
}

/// System call counters of one thread's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketStats {
    /// Receive calls.
    pub receives: u64,
    /// Receive calls that found nothing.
    pub receives_empty: u64,
    /// Send calls.
    pub sends: u64,
    /// Zero-copy sends.
    pub sends_zero_copy: u64,
    /// Zero-copy sends that the kernel copied after all.
    pub zero_copy_copied: u64,
    /// Polls skipped because no receive buffer was free.
    pub without_buffer: u64,
    /// Enter calls of the `io_uring` engine. With it, the other counters count received buffers and
    /// submitted sends.
    pub enters: u64,
}

/// A descriptor could not be made a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewStreamError {
    /// The kernel refused an option.
    Option(SocketOptionError),
    /// The system lacks a resource, for instance a descriptor.
    Os {
        /// Text of the error.
        found: String,
    },
}

/// Counters behind [`SocketStats`].
#[derive(Debug, Default)]
pub(super) struct SharedSocketStats {
    pub(super) receives: Counter,
    pub(super) receives_in_vain: Counter,
    pub(super) sends: Counter,
    pub(super) sends_by_reference: Counter,
    pub(super) copied_anyway: Counter,
    pub(super) without_inbox: Counter,
    pub(super) enters: Counter,
}

impl SocketStreamFactory {
    /// Creates a factory with an empty buffer pool. Segments of direct sends and receives refer to
    /// `regions`.
    ///
    /// # Panics
    ///
    /// If `inbox_bytes` is below 1024.
    pub fn new(regions: RegionTable, options: SocketOptions) -> Self {
        let inboxes = RecvBufferPool::new(options.recv_buffer_bytes, options.recv_buffers_max);
        let counts = Arc::<SharedSocketStats>::default();
        let ring = match options.engine {
            SocketEngine::Epoll => None,
            SocketEngine::IoUring => Some(SocketRing::new(&options, Arc::clone(&counts))),
        };
        let (ring, why_no_ring) = match ring.transpose() {
            Ok(ring) => (ring, None),
            Err(errno) => (None, Some(errno)),
        };
        let threshold = ZeroCopyThreshold::new(options.zero_copy_from_bytes);
        let options = Arc::new(options);
        let groups = NapiGroups::default();
        Self { options, regions, inboxes, threshold, counts, groups, ring, why_no_ring }
    }

    /// Clones the factory with separate counters, for streams of another thread.
    pub fn with_own_counters(&self) -> Self {
        Self { counts: Arc::default(), ..self.clone() }
    }

    /// Sets the smallest average segment length for zero-copy sends. `None`: all sends copy.
    pub fn set_zero_copy_from(&self, bytes: Option<usize>) {
        self.threshold.set(bytes);
    }

    /// Name of the engine: `epoll` or `io_uring`.
    pub fn engine(&self) -> &'static str {
        if self.ring.is_some() { "io_uring" } else { "epoll" }
    }

    /// Reason why the requested ring is not used, if so.
    pub fn io_uring_error(&self) -> Option<String> {
        self.why_no_ring.map(|errno| errno.to_string())
    }

    /// Makes a stream of a connected socket.
    ///
    /// # Errors
    ///
    /// If the kernel refuses an option, or no descriptor is left.
    pub fn new_stream(&self, socket: OwnedFd) -> Result<Box<dyn Stream>, NewStreamError> {
        self.options.apply(socket.as_fd()).map_err(NewStreamError::Option)?;
        let machine = |error: io::Error| NewStreamError::Os { found: error.to_string() };
        let regions = self.regions.clone();
        if let Some(ring) = &self.ring {
            let threshold = self.threshold.clone();
            let stream = RingStream::new(ring.clone(), socket, regions, threshold);
            let stream = stream.map_err(machine)?;
            return Ok(self.disable_stream_features(Box::new(stream)));
        }
        let busy = self.options.busy_poll;
        let member = busy.and_then(|busy| self.groups.join_group(socket.as_fd(), busy));
        let counts = Arc::clone(&self.counts);
        let (inboxes, threshold) = (self.inboxes.clone(), self.threshold.clone());
        let stream = EpollStream::new((socket, member), regions, inboxes, threshold, counts);
        Ok(self.disable_stream_features(Box::new(stream.map_err(machine)?)))
    }

    fn disable_stream_features(&self, stream: Box<dyn Stream>) -> Box<dyn Stream> {
        StreamWithoutGather::wrap_if_restricted(
            stream,
            self.options.batch_send,
            self.options.msg_more,
        )
    }

    /// Receive queues (NAPI identifiers) of its streams with `busy_poll`, with the number of
    /// streams on each: one of those polls for all. Streams without a receive queue, as on
    /// loopback, are not included.
    pub fn receive_queues(&self) -> Vec<(u32, usize)> {
        self.groups.group_sizes()
    }

    /// Counters of its streams.
    pub fn socket_stats(&self) -> SocketStats {
        let counts = &*self.counts;
        SocketStats {
            receives: counts.receives.get(),
            receives_empty: counts.receives_in_vain.get(),
            sends: counts.sends.get(),
            sends_zero_copy: counts.sends_by_reference.get(),
            zero_copy_copied: counts.copied_anyway.get(),
            without_buffer: counts.without_inbox.get(),
            enters: counts.enters.get(),
        }
    }
}

impl NewStreamError {
    /// Error category.
    pub fn category(&self) -> ErrorCategory {
        match self {
            Self::Option(refused) => refused.category(),
            Self::Os { .. } => ErrorCategory::Environment,
        }
    }

    /// Hint for the user, if any.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Option(refused) => refused.hint(),
            Self::Os { .. } => Some(
                "each connection takes two descriptors: raise the limit with `ulimit -n`; \
                     `tenmil doctor` looks at all limits",
            ),
        }
    }
}

impl fmt::Display for NewStreamError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(refused) => refused.fmt(out),
            Self::Os { found } => write!(out, "make a stream of a socket: {found}"),
        }
    }
}

impl std::error::Error for NewStreamError {}
