//! Gate: admits requests one by one under several limits, such as those of a host and of a namespace.
//!
//! The request at the head of a direction reserves its tokens in every bucket at once and is admitted when
//! the latest of these reservations starts. A gate has at most one reservation for reads and one for
//! writes, so gates that share a limit are served in turn, however many requests each of them holds.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Operation};

use super::token_bucket::{
    BucketTicks, instant_to_ticks, rescale_reservation_end, ticks_to_instant,
};
use super::{BUCKETS, QosLimiter, RECHECK_INTERVAL, SharedBuckets};

/// Gate of one queue: the limits that apply to its requests.
#[derive(Debug)]
pub struct RateGate {
    limits: Box<[GateLimit]>,
    /// By direction: the bytes that the reservation has paid for, if there is one.
    reserved: [Option<u64>; 2],
    /// By direction: bytes paid for by requests that were withdrawn.
    surplus: [u64; 2],
}

/// Direction of a request, which selects its limits beside those of the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoDirection {
    /// It reads blocks.
    Read = 0,
    /// It writes blocks, or changes them otherwise.
    Write = 1,
}

/// One of the limits, and the reservation in its buckets.
#[derive(Debug)]
struct GateLimit {
    shared: Arc<SharedBuckets>,
    /// The value of `changes` that was applied, and the rates as of it.
    seen: u64,
    rates: [u64; BUCKETS],
    /// Start of the reservation, by direction and bucket.
    starts: [[BucketTicks; BUCKETS]; 2],
}

impl IoDirection {
    /// Direction of an operation; `None` for flushes, which are not limited.
    pub const fn of_operation(operation: Operation) -> Option<Self> {
        match operation {
            Operation::Flush => None,
            Operation::Read | Operation::Compare | Operation::Verify => Some(Self::Read),
            _ => Some(Self::Write),
        }
    }

    /// The buckets of the direction: those of the total, and its own.
    const fn buckets(self) -> [usize; 4] {
        let own = 2 + 2 * (self as usize);
        [0, 1, own, own + 1]
    }
}

impl RateGate {
    /// Creates a gate with these limits.
    pub fn new(limiters: &[QosLimiter]) -> Self {
        let limits = limiters.iter().map(|limiter| GateLimit {
            shared: Arc::clone(&limiter.shared),
            seen: 0,
            rates: [0; BUCKETS],
            starts: [[0; BUCKETS]; 2],
        });
        Self { limits: limits.collect(), reserved: [None; 2], surplus: [0; 2] }
    }

    /// Whether the gate has exactly these limits.
    pub fn has_limiters(&self, limiters: &[QosLimiter]) -> bool {
        self.limits.len() == limiters.len()
            && self
                .limits
                .iter()
                .zip(limiters)
                .all(|(mine, other)| Arc::ptr_eq(&mine.shared, &other.shared))
    }

    /// Admits a request that transfers `bytes`.
    ///
    /// # Errors
    ///
    /// When to try again, with this request or with another one of the direction: at most
    /// [`RECHECK_INTERVAL`] ahead, because the limits may change until then.
    pub fn admit(
        &mut self,
        now: Instant,
        direction: IoDirection,
        bytes: u64,
    ) -> Result<(), Instant> {
        let ticks = instant_to_ticks(now);
        self.apply_changes();
        let side = direction as usize;
        let paid = match self.reserved[side] {
            Some(paid) => paid,
            None => self.reserve(ticks, direction, bytes),
        };
        let starts = self.limits.iter().flat_map(|limit| limit.starts[side]);
        let start = starts.max().unwrap_or_default();
        if start > ticks {
            return Err(ticks_to_instant(start).min(now.after(RECHECK_INTERVAL)));
        }
        self.reserved[side] = None;
        // The request may be another one than the reservation was made for.
        self.surplus[side] += paid.saturating_sub(bytes);
        let unpaid = bytes.saturating_sub(paid);
        if unpaid > 0 {
            self.pay(ticks, direction, 0, unpaid);
        }
        Ok(())
    }

    /// Charges a request that does not wait: those after it wait longer.
    pub fn charge(&mut self, now: Instant, direction: IoDirection, count: u64, bytes: u64) {
        self.apply_changes();
        self.pay(instant_to_ticks(now), direction, count, bytes);
    }

    /// Applies changed limits: a reservation keeps its tokens, and starts when the new rate permits it.
    fn apply_changes(&mut self) {
        for limit in &mut self.limits {
            // Pairs with the release in `QosLimiter::set`: who sees the change sees the rates.
            let changes = limit.shared.changes.load(Ordering::Acquire);
            if changes != limit.seen {
                limit.apply(changes);
            }
        }
    }

    /// Reserves the tokens of a request in every bucket. Returns the bytes that are paid for.
    fn reserve(&mut self, now: BucketTicks, direction: IoDirection, bytes: u64) -> u64 {
        let side = direction as usize;
        let from_surplus = self.surplus[side].min(bytes);
        self.surplus[side] -= from_surplus;
        for limit in &mut self.limits {
            limit.starts[side] = [0; BUCKETS];
            for index in direction.buckets() {
                let units = if index % 2 == 0 { 1 } else { bytes - from_surplus };
                limit.starts[side][index] = limit.reserve(now, index, units);
            }
        }
        self.reserved[side] = Some(bytes);
        bytes
    }

    fn pay(&mut self, now: BucketTicks, direction: IoDirection, count: u64, bytes: u64) {
        for limit in &self.limits {
            for index in direction.buckets() {
                limit.reserve(now, index, if index % 2 == 0 { count } else { bytes });
            }
        }
    }
}

impl GateLimit {
    /// Reserves units in a bucket, and returns when the reservation starts.
    fn reserve(&self, now: BucketTicks, index: usize, units: u64) -> BucketTicks {
        let rate = self.rates[index];
        if rate == 0 || units == 0 {
            return 0;
        }
        self.shared.buckets[index].reserve_units(now, rate, units)
    }

    #[cold]
    fn apply(&mut self, changes: u64) {
        self.seen = changes;
        let old = self.rates;
        self.rates = std::array::from_fn(|index| self.shared.buckets[index].rate());
        let changed_at = self.shared.changed_at.load(Ordering::Relaxed);
        for starts in &mut self.starts {
            for (index, start) in starts.iter_mut().enumerate() {
                *start = rescale_reservation_end(*start, changed_at, old[index], self.rates[index]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use tenmil_base::{Instant, Span};

    use super::{IoDirection, RateGate};
    use crate::{QosLimiter, QosLimits, RateLimit};

    const START: Instant = Instant { ns: 100_000_000_000 };

    fn rate(iops: u64, bytes: u64) -> RateLimit {
        RateLimit { iops: NonZeroU64::new(iops), bytes: NonZeroU64::new(bytes) }
    }

    fn total(iops: u64, bytes: u64) -> QosLimiter {
        QosLimiter::new(QosLimits { total: rate(iops, bytes), ..QosLimits::default() })
    }

    /// Admits requests for a time, on each gate as fast as it permits; returns their numbers.
    fn run(
        gates: &mut [RateGate],
        from: Instant,
        time: Span,
        direction: IoDirection,
        bytes: u64,
    ) -> Vec<u64> {
        let mut counts = vec![0; gates.len()];
        let mut now = from;
        while now < from.after(time) {
            for (gate, count) in gates.iter_mut().zip(&mut counts) {
                while gate.admit(now, direction, bytes).is_ok() {
                    *count += 1;
                }
            }
            now = now.after(Span::from_us(100));
        }
        counts
    }

    #[test]
    fn requests_are_admitted_at_the_lowest_of_the_rates() {
        let limits = [total(1_000, 0), total(0, 4096 * 500), total(5_000, 0)];
        let mut gates = [RateGate::new(&limits)];
        let count = run(&mut gates, START, Span::from_secs(4), IoDirection::Read, 4096)[0];
        // And the burst of 20 ms.
        assert!((2_000..=2_011).contains(&count), "{count}");
    }

    #[test]
    fn gates_that_share_a_limit_get_the_same_rate() {
        let host = total(1_000, 0);
        let mut gates = [1, 2, 3, 4].map(|_| RateGate::new(std::slice::from_ref(&host)));
        let counts = run(&mut gates, START, Span::from_secs(4), IoDirection::Read, 512);
        assert!((4_000..=4_021).contains(&counts.iter().sum::<u64>()), "{counts:?}");
        assert!(counts.iter().all(|count| (990..=1_022).contains(count)), "{counts:?}");
    }

    #[test]
    fn reads_and_writes_have_limits_of_their_own_and_together() {
        let limits = QosLimits {
            total: rate(300, 0),
            reads: rate(100, 0),
            writes: rate(1_000, 0),
            ..QosLimits::default()
        };
        let mut gates = [RateGate::new(&[QosLimiter::new(limits)])];
        let reads = run(&mut gates, START, Span::from_secs(2), IoDirection::Read, 512)[0];
        assert!((200..=203).contains(&reads), "{reads}");
        let later = START.after(Span::from_secs(10));
        let writes = run(&mut gates, later, Span::from_secs(2), IoDirection::Write, 512)[0];
        assert!((600..=607).contains(&writes), "{writes}");
    }

    #[test]
    fn burst_is_admitted_at_once_after_idle_time() {
        let limits =
            QosLimits { total: rate(100, 0), burst: Span::from_secs(5), ..QosLimits::default() };
        let mut gate = RateGate::new(&[QosLimiter::new(limits)]);
        let at_once = |gate: &mut RateGate, now| {
            (0..10_000).take_while(|_| gate.admit(now, IoDirection::Write, 512).is_ok()).count()
        };
        assert_eq!(at_once(&mut gate, START), 501);
        assert_eq!(at_once(&mut gate, START.after(Span::from_secs(2))), 200);
        // And the one that had reserved before.
        assert_eq!(at_once(&mut gate, START.after(Span::from_secs(60))), 502);
    }

    #[test]
    fn changed_limits_move_the_reservation() {
        let limiter = total(1, 0);
        let mut gate = RateGate::new(std::slice::from_ref(&limiter));
        assert!(gate.admit(START, IoDirection::Read, 512).is_ok());
        assert!(gate.admit(START, IoDirection::Read, 512).is_err());
        let half = START.after(Span::from_ms(500));
        assert!(gate.admit(half, IoDirection::Read, 512).is_err());
        let ten = QosLimits { total: rate(10, 0), ..QosLimits::default() };
        limiter.set(half, ten);
        assert!(gate.admit(half, IoDirection::Read, 512).is_err());
        let soon = half.after(Span::from_ms(50));
        assert!(gate.admit(soon, IoDirection::Read, 512).is_ok(), "a tenth of what was left");
        limiter.set(soon, QosLimits::default());
        for _ in 0..1_000 {
            assert!(gate.admit(soon, IoDirection::Read, 512).is_ok(), "unlimited");
        }
    }

    #[test]
    fn withdrawn_request_leaves_its_bytes_to_the_next() {
        let mut gate = RateGate::new(&[total(0, 1_000_000)]);
        let (start, million) = (START, 1_000_000);
        assert!(gate.admit(start, IoDirection::Write, million).is_ok());
        assert!(gate.admit(start, IoDirection::Write, million).is_err());
        // The request for a million bytes is aborted; the next ones are smaller, and are paid for.
        let later = start.after(Span::from_secs(1));
        for _ in 0..10 {
            assert!(gate.admit(later, IoDirection::Write, 100_000).is_ok());
        }
        assert!(gate.admit(later, IoDirection::Write, 100_000).is_err());
    }

    #[test]
    fn charged_requests_delay_those_after_them() {
        let mut gate = RateGate::new(&[total(100, 0)]);
        gate.charge(START, IoDirection::Write, 12, 0);
        assert!(gate.admit(START, IoDirection::Write, 512).is_err());
        assert!(gate.admit(START.after(Span::from_ms(120)), IoDirection::Write, 512).is_ok());
    }
}
