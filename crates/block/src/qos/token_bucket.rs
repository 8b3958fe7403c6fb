//! Token bucket: a rate, and the time up to which its tokens are reserved.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Instant, Span};

use super::MINIMUM_PERCENT;

/// Time in sixteenths of a nanosecond, so that a byte of a fast device has a non-zero cost.
pub(super) type BucketTicks = u64;

/// A token bucket, served first come, first served.
#[derive(Debug)]
pub(super) struct TokenBucket {
    /// Units per second; zero means unlimited.
    current_rate: AtomicU64,
    /// Time up to which all tokens are reserved.
    reserved_until: AtomicU64,
    /// The same for the guaranteed minimum of the background.
    minimum_until: AtomicU64,
    /// How much unused past time can still be reserved; at least [`CREDIT`].
    burst: AtomicU64,
}

/// Smallest burst. It compensates for late wake-ups, and is less than 0.5 % of five seconds.
const CREDIT: BucketTicks = ns_to_ticks(Span::from_ms(20));
const TICKS_PER_NS: u64 = 16;
const TICKS_PER_SECOND: u128 = 1_000_000_000 * TICKS_PER_NS as u128;

pub(super) const fn ns_to_ticks(span: Span) -> BucketTicks {
    span.ns.saturating_mul(TICKS_PER_NS)
}

pub(super) const fn instant_to_ticks(now: Instant) -> BucketTicks {
    now.ns.saturating_mul(TICKS_PER_NS)
}

/// The first instant at or after a time in ticks.
pub(super) const fn ticks_to_instant(at: BucketTicks) -> Instant {
    Instant { ns: at.div_ceil(TICKS_PER_NS) }
}

impl TokenBucket {
    pub(super) fn new(rate: u64, burst: Span) -> Self {
        let (reserved_until, minimum_until) = (AtomicU64::new(0), AtomicU64::new(0));
        let burst = AtomicU64::new(burst_ticks(burst));
        Self { current_rate: AtomicU64::new(rate), reserved_until, minimum_until, burst }
    }

    pub(super) fn rate(&self) -> u64 {
        self.current_rate.load(Ordering::Relaxed)
    }

    /// Time up to which all tokens are reserved; in the past if tokens are available.
    pub(super) fn reserved_until(&self) -> BucketTicks {
        self.reserved_until.load(Ordering::Relaxed)
    }

    /// Units that can be reserved at once: those of `span` and recently unused ones.
    pub(super) fn burst_units(&self, now: BucketTicks, rate: u64, span: BucketTicks) -> u64 {
        let burst = self.burst.load(Ordering::Relaxed);
        let unused = now.saturating_sub(self.reserved_until()).min(burst);
        units_in_ticks(unused.max(span), rate)
    }

    /// Reserves `units` and returns when the reservation starts.
    pub(super) fn reserve_units(&self, now: BucketTicks, rate: u64, units: u64) -> BucketTicks {
        let burst = self.burst.load(Ordering::Relaxed);
        reserve_time(&self.reserved_until, now, cost_ticks(units, rate), burst)
    }

    /// Reserves `units` of the background's guaranteed minimum.
    pub(super) fn reserve_guaranteed(
        &self,
        now: BucketTicks,
        rate: u64,
        units: u64,
    ) -> BucketTicks {
        let cost = u128::from(cost_ticks(units, rate)) * 100 / u128::from(MINIMUM_PERCENT);
        reserve_time(&self.minimum_until, now, u64::try_from(cost).unwrap_or(u64::MAX), CREDIT)
    }

    /// Changes the rate and the burst. Reservations keep their units, not their time.
    pub(super) fn set_rate(&self, now: Instant, rate: u64, burst: Span) {
        self.burst.store(burst_ticks(burst), Ordering::Relaxed);
        let (now, old) = (instant_to_ticks(now), self.current_rate.swap(rate, Ordering::Relaxed));
        for until in [&self.reserved_until, &self.minimum_until] {
            let changed = |at: BucketTicks| Some(rescale_reservation_end(at, now, old, rate));
            // Always succeeds: the closure never returns `None`.
            let _ = until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
        }
    }
}

/// The new time of a reservation that ended at `at`, if the rate changes at `now`.
pub(super) fn rescale_reservation_end(
    at: BucketTicks,
    now: BucketTicks,
    old: u64,
    new: u64,
) -> BucketTicks {
    if at <= now || old == 0 || new == 0 {
        return at.min(now);
    }
    let wait = u128::from(at - now) * u128::from(old) / u128::from(new);
    now.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX))
}

fn burst_ticks(burst: Span) -> BucketTicks {
    ns_to_ticks(burst).max(CREDIT)
}

fn reserve_time(
    until: &AtomicU64,
    now: BucketTicks,
    cost: BucketTicks,
    burst: BucketTicks,
) -> BucketTicks {
    // A cost above the burst would add up to one more unit than the rate permits.
    let earliest = if cost > burst { now } else { now.saturating_sub(burst) };
    let moved = |until: BucketTicks| Some(until.max(earliest).saturating_add(cost));
    // Relaxed: the word orders no other data. Always succeeds.
    let before = until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved);
    before.unwrap_or_else(|before| before).max(earliest)
}

/// The cost of `units`, rounded up: a limit is never exceeded because of a fraction.
fn cost_ticks(units: u64, rate: u64) -> BucketTicks {
    let ticks = (u128::from(units) * TICKS_PER_SECOND).div_ceil(u128::from(rate.max(1)));
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

fn units_in_ticks(span: BucketTicks, rate: u64) -> u64 {
    let units = u128::from(span) * u128::from(rate) / TICKS_PER_SECOND;
    u64::try_from(units).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{
        CREDIT, TokenBucket, cost_ticks, instant_to_ticks, ns_to_ticks, rescale_reservation_end,
        ticks_to_instant, units_in_ticks,
    };

    #[test]
    fn reservations_are_spaced_by_the_rate() {
        let bucket = TokenBucket::new(10, Span::default());
        let now = ns_to_ticks(Span::from_secs(7));
        let tenth = ns_to_ticks(Span::from_ms(100));
        assert_eq!(bucket.reserve_units(now, 10, 1), now);
        assert_eq!(bucket.reserve_units(now, 10, 3), now + tenth);
        assert_eq!(bucket.reserve_units(now, 10, 1), now + 4 * tenth);
        assert_eq!(bucket.reserve_guaranteed(now, 10, 1), now, "the floor has a line of its own");
        assert_eq!(bucket.reserve_guaranteed(now, 10, 1), now + 20 * tenth);
    }

    #[test]
    fn unused_tokens_expire() {
        let bucket = TokenBucket::new(1_000, Span::default());
        let now = ns_to_ticks(Span::from_secs(7));
        assert_eq!(bucket.reserve_units(now, 1_000, 5), now - CREDIT);
        assert_eq!(bucket.burst_units(now, 1_000, 0), 15);
        let later = ns_to_ticks(Span::from_secs(9));
        assert_eq!(bucket.burst_units(later, 1_000, 0), 20);
    }

    #[test]
    fn unused_tokens_accumulate_up_to_the_burst() {
        let bucket = TokenBucket::new(1_000, Span::from_secs(2));
        let now = ns_to_ticks(Span::from_secs(7));
        assert_eq!(bucket.burst_units(now, 1_000, 0), 2_000);
        bucket.reserve_units(now, 1_000, 2_000);
        assert_eq!(bucket.reserve_units(now, 1_000, 1), now, "the burst is used up");
        let later = ns_to_ticks(Span::from_secs(8));
        assert_eq!(bucket.burst_units(later, 1_000, 0), 999);
        bucket.set_rate(Instant { ns: 8_000_000_000 }, 1_000, Span::default());
        assert_eq!(bucket.burst_units(later, 1_000, 0), 20, "the smallest burst");
    }

    #[test]
    fn fractional_tokens_are_exact() {
        assert_eq!(cost_ticks(1, 3), 5_333_333_334);
        assert_eq!(cost_ticks(4096, 100_000_000_000), 656);
        assert_eq!(cost_ticks(u64::MAX, 1), u64::MAX);
        assert_eq!(units_in_ticks(ns_to_ticks(Span::from_ms(1)), 1_000_000), 1_000);
        assert_eq!(units_in_ticks(ns_to_ticks(Span::from_ms(1)), 1), 0);
        assert_eq!(ticks_to_instant(instant_to_ticks(Instant { ns: 5 }) + 1), Instant { ns: 6 });
    }

    #[test]
    fn token_debt_is_kept_across_rate_changes() {
        let at = |ms| ns_to_ticks(Span::from_ms(ms));
        assert_eq!(rescale_reservation_end(at(1_100), at(1_000), 10, 1), at(2_000));
        assert_eq!(rescale_reservation_end(at(2_000), at(1_000), 1, 10), at(1_100));
        assert_eq!(rescale_reservation_end(at(900), at(1_000), 1, 10), at(900));
        assert_eq!(
            rescale_reservation_end(at(2_000), at(1_000), 1, 0),
            at(1_000),
            "no limit, no debt"
        );
        assert_eq!(rescale_reservation_end(at(2_000), at(1_000), 0, 1), at(1_000));
    }
}
