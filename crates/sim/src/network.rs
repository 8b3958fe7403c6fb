//! A network between two ends, in memory and in simulated time, that does what networks do.
//!
//! ```text
//!   End ── send ─▶ line ─ splits, delays, faults at a byte ─▶ receive ── End
//!   End ◀ receive ─ line ◀──────────────────────────────────── send ──── End
//!                          Network: the time, and faults from outside
//! ```
//!
//! Both ends are [`base::Stream`]s. Memory that an end is given to send is read as late as can be:
//! when the other end receives it; and it is [`released`](base::Stream::released) no earlier. So
//! whoever uses memory again too early sends something else, and a test that looks at what arrives
//! notices. What has arrived, or was thrown away, may leave once more before it is released, to where
//! nobody looks: [`Network::strays`] tells of that.

pub mod conformance;
mod end;
mod line;
mod unreleased;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Memory, Random, Span};

pub use end::End;
pub use line::{Arrival, Fault, Faults, Line, LineOptions};
use unreleased::Unreleased;

/// What a network is like.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Everything that is drawn comes from here.
    pub seed: u64,
    /// From the first end to the second.
    pub there: LineOptions,
    /// From the second end to the first.
    pub back: LineOptions,
    /// How much an end takes out of the network before it is consumed.
    pub inbox_bytes: usize,
    /// How long memory is held that has arrived or was thrown away.
    pub release_lag: Span,
    /// By up to so much longer each piece of it is held.
    pub release_jitter: Span,
    /// Shorter pieces of memory are copied when they are sent.
    pub copied_below: u32,
}

/// The network between two ends: moves time on, and does harm. Cheap to clone.
#[derive(Clone)]
pub struct Network {
    shared: Arc<Mutex<Cables>>,
}

/// One of the two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first end to the second.
    There,
    /// From the second end to the first.
    Back,
}

/// Both directions, and what time it is.
struct Cables {
    now: Instant,
    lines: [Line; 2],
    /// What was sent there and is not released.
    unreleased: [Unreleased; 2],
    /// Whether both directions are broken, and by what.
    cut: Option<&'static str>,
    /// Which ends have been dropped, by what they send.
    gone: [bool; 2],
}

impl Default for NetworkOptions {
    /// No splits, no delays and no faults; room for 1 MiB in each direction.
    fn default() -> Self {
        Self {
            seed: 0,
            there: LineOptions::default(),
            back: LineOptions::default(),
            inbox_bytes: 256 << 10,
            release_lag: Span::default(),
            release_jitter: Span::default(),
            copied_below: 0,
        }
    }
}

impl NetworkOptions {
    /// A network whose every receive and send moves an arbitrary number of bytes.
    pub fn splitting(seed: u64) -> Self {
        let line = LineOptions { splits: true, ..LineOptions::default() };
        Self { seed, there: line.clone(), back: line, ..Self::default() }
    }
}

/// Two ends with a network between them. What each sends lies in the memory of its own that it is
/// given here.
pub fn pair(
    options: NetworkOptions,
    first: Arc<dyn Memory>,
    second: Arc<dyn Memory>,
) -> (End, End, Network) {
    let NetworkOptions { seed, there, back, release_lag, release_jitter, .. } = options;
    let mut random = Random::new(seed);
    let lines = [Line::new(there, random.fork()), Line::new(back, random.fork())];
    let mut unreleased = || Unreleased::new(release_lag, release_jitter, random.fork());
    let unreleased = [unreleased(), unreleased()];
    let now = Instant { ns: 1_000_000 };
    let cables = Cables { now, lines, unreleased, cut: None, gone: [false; 2] };
    let network = Network { shared: Arc::new(Mutex::new(cables)) };
    let (inbox_bytes, copied_below) = (options.inbox_bytes, options.copied_below);
    let end = |sends, memory| End::new(network.clone(), sends, memory, inbox_bytes, copied_below);
    let ends = (end(Direction::There, first), end(Direction::Back, second));
    (ends.0, ends.1, network)
}

impl Network {
    /// What time it is in the network.
    pub fn now(&self) -> Instant {
        self.cables().now
    }

    /// Moves time on. It never goes back.
    pub fn advance(&self, now: Instant) {
        let mut cables = self.cables();
        cables.now = cables.now.max(now);
        cables.released(Direction::There);
        cables.released(Direction::Back);
    }

    /// When something arrives that is under way, if something is.
    pub fn wake_at(&self) -> Instant {
        let cables = self.cables();
        let [there, back] = &cables.lines;
        there.wake_at(cables.now).min(back.wake_at(cables.now))
    }

    /// Breaks the connection now: what has not arrived never will.
    pub fn cut(&self) {
        self.cables().cut("the network was cut");
    }

    /// Does `fault` in one direction as soon as the next byte would arrive.
    pub fn harm(&self, direction: Direction, fault: Fault) {
        self.cables().lines[direction as usize].harm(fault);
    }

    /// How many bytes have arrived.
    pub fn arrived(&self, direction: Direction) -> u64 {
        self.cables().lines[direction as usize].given()
    }

    /// What has left this network after its arrival, or after the end of the connection, and was not
    /// what had been sent: memory that was given to somebody else before it was
    /// [`released`](base::Stream::released).
    pub fn strays(&self) -> Vec<String> {
        let cables = self.cables();
        cables.unreleased.iter().flat_map(Unreleased::strays).cloned().collect()
    }

    fn cables(&self) -> MutexGuard<'_, Cables> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cables {
    fn cut(&mut self, by: &'static str) {
        self.cut.get_or_insert(by);
        for line in &mut self.lines {
            line.discard();
        }
    }

    /// So many bytes of what was sent there are released.
    fn released(&mut self, direction: Direction) -> u64 {
        let given = self.lines[direction as usize].given();
        self.unreleased[direction as usize].settle(self.now, given)
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cables = self.cables();
        out.debug_struct("Network")
            .field("now", &cables.now)
            .field("lines", &cables.lines)
            .field("cut", &cables.cut)
            .finish_non_exhaustive()
    }
}

impl Direction {
    /// The other one.
    #[must_use]
    pub fn reverse(self) -> Self {
        match self {
            Self::There => Self::Back,
            Self::Back => Self::There,
        }
    }
}

#[cfg(test)]
mod tests;
