//! QoS: rate limits of a device in requests and bytes per second, adjustable at run time.
//!
//! ```text
//!   channel ── slice ──┐
//!   channel ── slice ──┼── total, reads, writes: each a bucket of requests and one of bytes
//!   channel ── slice ──┘
//! ```
//!
//! A bucket is one word: the time up to which its tokens are reserved. A reservation advances the word by
//! the cost of its tokens and starts at the previous value. So channels are served first come, first
//! served, none starves, and there is no lock.
//! A channel reserves for a slice of time: the part of its batch that fits into 1 ms, but at least one
//! request of any size.
//!
//! A request that must wait stays with the caller, and `wake_at` of the channel returns when to submit it
//! again, at most [`RECHECK_INTERVAL`] ahead. That is also how soon a sleeping channel applies changed
//! limits.
//!
//! A [`RateGate`] applies several limits at once, to requests that are not on a channel yet: those of a
//! host, of a namespace and of a subsystem.

mod rate_gate;
mod rate_limited_channel;
mod token_bucket;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Instant, IoChannel, Span};

pub use self::rate_gate::{IoDirection, RateGate};
pub use self::rate_limited_channel::RateLimitedChannel;
use self::token_bucket::{TokenBucket, instant_to_ticks};

/// The rate limits of one device, shared by its channels. Clones refer to the same limits.
#[derive(Clone, Debug)]
pub struct QosLimiter {
    shared: Arc<SharedBuckets>,
}

/// The limits of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QosLimits {
    /// Limit of all requests together.
    pub total: RateLimit,
    /// Limit of reads.
    pub reads: RateLimit,
    /// Limit of writes and all other operations, except flushes, which are not limited.
    pub writes: RateLimit,
    /// Burst: unused tokens accumulate for this time, and may be used at once. At least 20 ms.
    pub burst: Span,
}

/// A rate limit. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Requests per second.
    pub iops: Option<NonZeroU64>,
    /// Bytes transferred per second.
    pub bytes: Option<NonZeroU64>,
}

/// I/O class of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoClass {
    /// I/O of applications.
    Foreground,
    /// Copy and resync I/O. It uses the rate that the foreground leaves, and at least [`MINIMUM_PERCENT`]
    /// of each limit.
    Background,
}

#[derive(Debug)]
struct SharedBuckets {
    buckets: [TokenBucket; BUCKETS],
    /// Burst in nanoseconds, as it was set.
    burst_ns: AtomicU64,
    /// Number of changes of the limits; the only word that a channel loads while they are unchanged.
    changes: AtomicU64,
    /// Time of the last change.
    changed_at: AtomicU64,
    /// Requests of channels that have waited, and the sum of the times that they waited.
    limited: AtomicU64,
    limit_wait_ns: AtomicU64,
}

/// Minimum share of the background, in percent of a limit.
pub const MINIMUM_PERCENT: u64 = 5;
/// Maximum sleep of a channel that waits for its reservation.
pub const RECHECK_INTERVAL: Span = Span::from_ms(50);

/// Total, reads and writes; of each the requests and then the bytes.
const BUCKETS: usize = 6;

impl QosLimiter {
    /// Creates the limits of a device.
    pub fn new(caps: QosLimits) -> Self {
        let buckets = bucket_rates(&caps).map(|rate| TokenBucket::new(rate, caps.burst));
        let (changes, changed_at) = (AtomicU64::new(1), AtomicU64::new(0));
        let burst_ns = AtomicU64::new(caps.burst.ns);
        let (limited, limit_wait_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared =
            SharedBuckets { buckets, burst_ns, changes, changed_at, limited, limit_wait_ns };
        Self { shared: Arc::new(shared) }
    }

    /// Changes the limits: at once for awake channels, within [`RECHECK_INTERVAL`] for sleeping ones.
    /// Tokens reserved under the old limits count against the new ones. No request is lost or completed
    /// twice.
    pub fn set(&self, now: Instant, caps: QosLimits) {
        for (bucket, rate) in self.shared.buckets.iter().zip(bucket_rates(&caps)) {
            bucket.set_rate(now, rate, caps.burst);
        }
        self.shared.burst_ns.store(caps.burst.ns, Ordering::Relaxed);
        self.shared.changed_at.store(instant_to_ticks(now), Ordering::Relaxed);
        // Pairs with the acquire in `RateLimitedChannel::submit`: a channel that sees the change sees the
        // rates.
        self.shared.changes.fetch_add(1, Ordering::Release);
    }

    /// The current limits.
    pub fn limits(&self) -> QosLimits {
        let rate = |first: usize| RateLimit {
            iops: NonZeroU64::new(self.shared.buckets[first].rate()),
            bytes: NonZeroU64::new(self.shared.buckets[first + 1].rate()),
        };
        let burst = Span { ns: self.shared.burst_ns.load(Ordering::Relaxed) };
        QosLimits { total: rate(0), reads: rate(2), writes: rate(4), burst }
    }

    /// Requests of channels that have waited, and the sum of the times that they waited.
    pub fn waits(&self) -> (u64, Span) {
        let ns = self.shared.limit_wait_ns.load(Ordering::Relaxed);
        (self.shared.limited.load(Ordering::Relaxed), Span { ns })
    }

    /// Whether anything else uses the limits: another handle, a channel or a gate.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// Applies the limits to a channel.
    pub fn wrap_channel<B: IoChannel>(&self, below: B, class: IoClass) -> RateLimitedChannel<B> {
        RateLimitedChannel::new(below, Arc::clone(&self.shared), class)
    }
}

impl QosLimits {
    /// Whether nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        bucket_rates(self) == [0; BUCKETS]
    }
}

/// The rates in bucket order; zero where unlimited.
fn bucket_rates(caps: &QosLimits) -> [u64; BUCKETS] {
    let QosLimits { total, reads, writes, burst: _ } = caps;
    [total.iops, total.bytes, reads.iops, reads.bytes, writes.iops, writes.bytes]
        .map(|rate| rate.map_or(0, NonZeroU64::get))
}
