//! Simulated network between two ends, in memory and in simulated time.
//!
//! ```text
//!   End ── send ─▶ link ─ splits, delays, faults at a byte ─▶ receive ── End
//!   End ◀ receive ─ link ◀──────────────────────────────────── send ──── End
//!                          Network: time, and faults on demand
//! ```
//!
//! Both ends are [`tenmil_base::Stream`]s. Memory passed to a send is read as late as possible, which is
//! when the other end receives it, and it is [`released`](tenmil_base::Stream::released_bytes) no earlier.
//! Memory that is reused too early therefore arrives with other contents, which a test of the
//! received data detects. Data that have arrived or were discarded may be read once more before
//! they are released, like a retransmission: [`SimNetwork::changed_unreleased_memory`] reports contents that have
//! changed.

mod link_direction;
mod sim_stream;
pub mod stream_conformance_tests;
mod zero_copy_tracker;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Instant, Memory, Random, Span};

pub use link_direction::{LinkDirection, LinkFault, LinkFaults, LinkOptions, ReadResult};
pub use sim_stream::SimStream;
use zero_copy_tracker::ZeroCopyTracker;

/// Configuration of a network.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Seed of all random numbers.
    pub seed: u64,
    /// From the first end to the second.
    pub there: LinkOptions,
    /// From the second end to the first.
    pub back: LinkOptions,
    /// Receive buffer of an end, in bytes.
    pub inbox_bytes: usize,
    /// Minimum time from the arrival of data, or their loss, to the release of their memory.
    pub release_lag: Span,
    /// Maximum additional time until the release.
    pub release_jitter: Span,
    /// Shorter segments are copied when they are sent.
    pub copied_below: u32,
}

/// Control of the network between two ends: advances the time and injects faults. Cheap to clone.
#[derive(Clone)]
pub struct SimNetwork {
    shared: Arc<Mutex<SimNetworkState>>,
}

/// Direction of transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkTransferDirection {
    /// From the first end to the second.
    Upstream,
    /// From the second end to the first.
    Downstream,
}

/// State of both directions, and the time.
struct SimNetworkState {
    now: Instant,
    lines: [LinkDirection; 2],
    /// Sent memory that is not released, by direction.
    unreleased: [ZeroCopyTracker; 2],
    /// Why the connection is broken, if it is.
    cut: Option<&'static str>,
    /// Whether the sender of each direction was dropped.
    gone: [bool; 2],
}

impl Default for NetworkOptions {
    /// No splits, no delays and no faults, with a capacity of 1 MiB in each direction.
    fn default() -> Self {
        Self {
            seed: 0,
            there: LinkOptions::default(),
            back: LinkOptions::default(),
            inbox_bytes: 256 << 10,
            release_lag: Span::default(),
            release_jitter: Span::default(),
            copied_below: 0,
        }
    }
}

impl NetworkOptions {
    /// Network on which every receive and send transfers a random number of bytes.
    pub fn with_splitting(seed: u64) -> Self {
        let line = LinkOptions { splits: true, ..LinkOptions::default() };
        Self { seed, there: line.clone(), back: line, ..Self::default() }
    }
}

/// Creates two ends with a network between them. Each end sends from the memory passed for it.
pub fn connected_pair(
    options: NetworkOptions,
    first: Arc<dyn Memory>,
    second: Arc<dyn Memory>,
) -> (SimStream, SimStream, SimNetwork) {
    let NetworkOptions { seed, there, back, release_lag, release_jitter, .. } = options;
    let mut random = Random::new(seed);
    let lines = [LinkDirection::new(there, random.fork()), LinkDirection::new(back, random.fork())];
    let mut unreleased = || ZeroCopyTracker::new(release_lag, release_jitter, random.fork());
    let unreleased = [unreleased(), unreleased()];
    let now = Instant { ns: 1_000_000 };
    let cables = SimNetworkState { now, lines, unreleased, cut: None, gone: [false; 2] };
    let network = SimNetwork { shared: Arc::new(Mutex::new(cables)) };
    let (inbox_bytes, copied_below) = (options.inbox_bytes, options.copied_below);
    let end =
        |sends, memory| SimStream::new(network.clone(), sends, memory, inbox_bytes, copied_below);
    let ends = (
        end(LinkTransferDirection::Upstream, first),
        end(LinkTransferDirection::Downstream, second),
    );
    (ends.0, ends.1, network)
}

impl SimNetwork {
    /// Current time of the network.
    pub fn now(&self) -> Instant {
        self.lock_state().now
    }

    /// Advances the time. It never goes back.
    pub fn advance(&self, now: Instant) {
        let mut cables = self.lock_state();
        cables.now = cables.now.max(now);
        cables.released_bytes_of(LinkTransferDirection::Upstream);
        cables.released_bytes_of(LinkTransferDirection::Downstream);
    }

    /// Time of the next arrival or release.
    pub fn wake_at(&self) -> Instant {
        let cables = self.lock_state();
        let [there, back] = &cables.lines;
        there.wake_at(cables.now).min(back.wake_at(cables.now))
    }

    /// Breaks the connection now. Data in flight never arrive.
    pub fn cut_links(&self) {
        self.lock_state().cut_link("the network was cut");
    }

    /// Injects `fault` in one direction before the next byte arrives.
    pub fn inject_fault(&self, direction: LinkTransferDirection, fault: LinkFault) {
        self.lock_state().lines[direction as usize].inject_fault(fault);
    }

    /// Number of bytes that have arrived.
    pub fn arrived_byte_count(&self, direction: LinkTransferDirection) -> u64 {
        self.lock_state().lines[direction as usize].delivered_bytes()
    }

    /// Segments whose contents changed after they had arrived, or after the end of the connection:
    /// memory that was reused before it was [`released`](tenmil_base::Stream::released_bytes).
    pub fn changed_unreleased_memory(&self) -> Vec<String> {
        let cables = self.lock_state();
        cables.unreleased.iter().flat_map(ZeroCopyTracker::changed_segments).cloned().collect()
    }

    fn lock_state(&self) -> MutexGuard<'_, SimNetworkState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimNetworkState {
    fn cut_link(&mut self, by: &'static str) {
        self.cut.get_or_insert(by);
        for line in &mut self.lines {
            line.discard_in_flight();
        }
    }

    /// Number of released bytes in a direction.
    fn released_bytes_of(&mut self, direction: LinkTransferDirection) -> u64 {
        let given = self.lines[direction as usize].delivered_bytes();
        self.unreleased[direction as usize].release_delivered(self.now, given)
    }
}

impl fmt::Debug for SimNetwork {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cables = self.lock_state();
        out.debug_struct("Network")
            .field("now", &cables.now)
            .field("lines", &cables.lines)
            .field("cut", &cables.cut)
            .finish_non_exhaustive()
    }
}

impl LinkTransferDirection {
    /// Opposite direction.
    #[must_use]
    pub fn reverse(self) -> Self {
        match self {
            Self::Upstream => Self::Downstream,
            Self::Downstream => Self::Upstream,
        }
    }
}

#[cfg(test)]
mod tests;
