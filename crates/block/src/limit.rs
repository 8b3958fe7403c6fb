//! Limits on what a device is asked for: requests and bytes per second, changed while it runs.
//!
//! ```text
//!   channel ── slice ──┐
//!   channel ── slice ──┼── total, reads, writes: each a bucket of requests and one of bytes
//!   channel ── slice ──┘
//! ```
//!
//! A bucket is one word: the time up to which it is given away. Who wants so many units moves the
//! word on by what they cost and has a place in line: the time at which the word was before. So
//! channels are served in the order in which they came, none is passed over, and there is no lock. A
//! channel takes a place for a slice at a time: for what its batch has of up to a millisecond, which
//! is at least one request, whatever its size.
//!
//! A request that may not go yet stays with the caller, and the channel's `wake_at` says when to try
//! again. That is never more than [`LOOK_AGAIN`] ahead, which is how soon a sleeper sees a change.

mod bucket;
mod channel;
#[cfg(test)]
mod tests;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Backend, Instant, Span};

use self::bucket::{Bucket, ticks_of};
pub use self::channel::Limited;

/// The limits of one device, shared by its channels. Clones are of the same device.
#[derive(Clone, Debug)]
pub struct Limiter {
    shared: Arc<Shared>,
}

/// What a device may be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// All together.
    pub total: Rate,
    /// What reads.
    pub reads: Rate,
    /// What writes, and everything else but a flush, which is never held back.
    pub writes: Rate,
}

/// How much per second. `None` means any amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Requests.
    pub iops: Option<NonZeroU64>,
    /// Bytes that move.
    pub bytes: Option<NonZeroU64>,
}

/// Who a channel works for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Whoever waits for the answer.
    Foreground,
    /// Copies and rebuilds: they get what the foreground leaves, and [`FLOOR_PERCENT`] of each
    /// limit in any case.
    Background,
}

#[derive(Debug)]
struct Shared {
    buckets: [Bucket; BUCKETS],
    /// How often the limits were changed: all that a channel looks at while they were not.
    changes: AtomicU64,
    /// When they were changed last.
    changed_at: AtomicU64,
}

/// What the background gets even if the foreground wants everything, in per cent of a limit.
pub const FLOOR_PERCENT: u64 = 5;
/// How far ahead a channel that waits for its turn sleeps at most.
pub const LOOK_AGAIN: Span = Span::from_ms(50);

/// Total, reads and writes; of each the requests and then the bytes.
const BUCKETS: usize = 6;

impl Limiter {
    /// Limits for a device.
    pub fn new(caps: Caps) -> Self {
        let buckets = rates(&caps).map(Bucket::new);
        let (changes, changed_at) = (AtomicU64::new(1), AtomicU64::new(0));
        Self { shared: Arc::new(Shared { buckets, changes, changed_at }) }
    }

    /// Changes the limits, at once for whoever is awake and within [`LOOK_AGAIN`] for all others.
    /// What was taken from the old limits and not yet paid off is owed to the new ones; requests
    /// are neither lost nor answered twice.
    pub fn set(&self, now: Instant, caps: Caps) {
        for (bucket, rate) in self.shared.buckets.iter().zip(rates(&caps)) {
            bucket.change(now, rate);
        }
        self.shared.changed_at.store(ticks_of(now), Ordering::Relaxed);
        // Pairs with the acquire in `Limited::submit`: who sees the change sees the rates.
        self.shared.changes.fetch_add(1, Ordering::Release);
    }

    /// The limits now.
    pub fn caps(&self) -> Caps {
        let rate = |first: usize| Rate {
            iops: NonZeroU64::new(self.shared.buckets[first].rate()),
            bytes: NonZeroU64::new(self.shared.buckets[first + 1].rate()),
        };
        Caps { total: rate(0), reads: rate(2), writes: rate(4) }
    }

    /// Holds a channel to the limits.
    pub fn over<B: Backend>(&self, below: B, class: Class) -> Limited<B> {
        Limited::new(below, Arc::clone(&self.shared), class)
    }
}

/// The rates of the buckets in their order; zero where there is no limit.
fn rates(caps: &Caps) -> [u64; BUCKETS] {
    let Caps { total, reads, writes } = caps;
    [total.iops, total.bytes, reads.iops, reads.bytes, writes.iops, writes.bytes]
        .map(|rate| rate.map_or(0, NonZeroU64::get))
}
