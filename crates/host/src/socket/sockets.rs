//! What one thread makes its streams with.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use base::{Blame, Count, Stream};
use dma::Regions;

use super::curbed::Curbed;
use super::epoll::EpollStream;
use super::groups::Groups;
use super::inbox::Inboxes;
use super::options::{OptionRefused, SocketOptions};
use super::ring::{Ring, RingStream};
use super::zero_copy::Threshold;
use rustix::io::Errno;

/// What one thread makes its streams with: options, memory to receive into, and counters.
///
/// Cheap to clone; clones share all of it. Its streams may be made by any thread, but are to be used
/// by one, so that their inboxes stay in its cache and their counters count.
#[derive(Clone, Debug)]
pub struct Sockets {
    options: Arc<SocketOptions>,
    regions: Regions,
    inboxes: Inboxes,
    threshold: Threshold,
    counts: Arc<Counts>,
    groups: Groups,
    ring: Option<Ring>,
    why_no_ring: Option<Errno>,
}

/// Which engine carries the streams of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketEngine {
    /// `recv` and `sendmsg`, and sleeping on `epoll`.
    #[default]
    Epoll,
    /// One `io_uring` for all sockets of the thread, or `epoll` where the kernel refuses that.
    Ring,
}

/// What the streams of one thread have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCounts {
    /// System calls that received, or found nothing.
    pub receives: u64,
    /// Those of them that found nothing.
    pub receives_in_vain: u64,
    /// System calls that sent, or found no room.
    pub sends: u64,
    /// Sends whose memory was given to the kernel by reference.
    pub sends_by_reference: u64,
    /// Those of them of which the kernel reported that it had copied anyway.
    pub copied_anyway: u64,
    /// Looks that did not take place because all inboxes were lent.
    pub without_inbox: u64,
    /// System calls that did all that was due, of the `io_uring` engine. With it, the other counts
    /// are of buffers that came and of sends that were asked for.
    pub enters: u64,
}

/// A descriptor that could not be made a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamRefused {
    /// The kernel refuses an option.
    Option(OptionRefused),
    /// There is no descriptor left to wait with, for instance.
    Machine {
        /// What the kernel says.
        found: String,
    },
}

/// The counters behind [`SocketCounts`], as the streams see them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) receives: Count,
    pub(super) receives_in_vain: Count,
    pub(super) sends: Count,
    pub(super) sends_by_reference: Count,
    pub(super) copied_anyway: Count,
    pub(super) without_inbox: Count,
    pub(super) enters: Count,
}

impl Sockets {
    /// Makes nothing yet but the pool of inboxes. What is sent and received directly lies in
    /// `regions`.
    ///
    /// # Panics
    ///
    /// If `inbox_bytes` is below 1024.
    pub fn new(regions: Regions, options: SocketOptions) -> Self {
        let inboxes = Inboxes::new(options.inbox_bytes, options.inboxes_max);
        let counts = Arc::<Counts>::default();
        let ring = match options.engine {
            SocketEngine::Epoll => None,
            SocketEngine::Ring => Some(Ring::new(&options, Arc::clone(&counts))),
        };
        let (ring, why_no_ring) = match ring.transpose() {
            Ok(ring) => (ring, None),
            Err(errno) => (None, Some(errno)),
        };
        let threshold = Threshold::new(options.zero_copy_from_bytes);
        let options = Arc::new(options);
        let groups = Groups::default();
        Self { options, regions, inboxes, threshold, counts, groups, ring, why_no_ring }
    }

    /// The same with counters of its own, for streams that another thread may use.
    pub fn apart(&self) -> Self {
        Self { counts: Arc::default(), ..self.clone() }
    }

    /// From how many bytes on, on average over its pieces of memory, a send does not copy them, from
    /// now on. None: all copy.
    pub fn set_zero_copy_from(&self, bytes: Option<usize>) {
        self.threshold.set(bytes);
    }

    /// Which engine it is: `epoll` or `io_uring`.
    pub fn engine(&self) -> &'static str {
        if self.ring.is_some() { "io_uring" } else { "epoll" }
    }

    /// Why it is not the ring that was asked for, if it is not.
    pub fn why_no_ring(&self) -> Option<String> {
        self.why_no_ring.map(|errno| errno.to_string())
    }

    /// Makes a connected socket a stream.
    ///
    /// # Errors
    ///
    /// If the kernel refuses an option, or has no descriptors left.
    pub fn stream(&self, socket: OwnedFd) -> Result<Box<dyn Stream>, StreamRefused> {
        self.options.apply(socket.as_fd()).map_err(StreamRefused::Option)?;
        let machine = |error: io::Error| StreamRefused::Machine { found: error.to_string() };
        let regions = self.regions.clone();
        if let Some(ring) = &self.ring {
            let threshold = self.threshold.clone();
            let stream = RingStream::new(ring.clone(), socket, regions, threshold);
            let stream = stream.map_err(machine)?;
            return Ok(self.curbed(Box::new(stream)));
        }
        let busy = self.options.busy_poll;
        let member = busy.and_then(|busy| self.groups.join(socket.as_fd(), busy));
        let counts = Arc::clone(&self.counts);
        let (inboxes, threshold) = (self.inboxes.clone(), self.threshold.clone());
        let stream = EpollStream::new((socket, member), regions, inboxes, threshold, counts);
        Ok(self.curbed(Box::new(stream.map_err(machine)?)))
    }

    fn curbed(&self, stream: Box<dyn Stream>) -> Box<dyn Stream> {
        Curbed::around(stream, self.options.gathers, self.options.says_more)
    }

    /// The receive queues (NAPI) that its streams with `busy_poll` are behind, and how many each has:
    /// one of those polls for all. Streams that are behind none, as on loopback, are not among them.
    pub fn receive_queues(&self) -> Vec<(u32, usize)> {
        self.groups.sizes()
    }

    /// What its streams have done so far.
    pub fn counts(&self) -> SocketCounts {
        let counts = &*self.counts;
        SocketCounts {
            receives: counts.receives.get(),
            receives_in_vain: counts.receives_in_vain.get(),
            sends: counts.sends.get(),
            sends_by_reference: counts.sends_by_reference.get(),
            copied_anyway: counts.copied_anyway.get(),
            without_inbox: counts.without_inbox.get(),
            enters: counts.enters.get(),
        }
    }
}

impl StreamRefused {
    /// Whose move it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Option(refused) => refused.blame(),
            Self::Machine { .. } => Blame::Machine,
        }
    }

    /// What can be done about it, if anything can.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Option(refused) => refused.hint(),
            Self::Machine { .. } => Some(
                "each connection takes two descriptors: raise the limit with `ulimit -n`; \
                     `tenmil doctor` looks at all limits",
            ),
        }
    }
}

impl fmt::Display for StreamRefused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(refused) => refused.fmt(out),
            Self::Machine { found } => write!(out, "make a stream of a socket: {found}"),
        }
    }
}

impl std::error::Error for StreamRefused {}
