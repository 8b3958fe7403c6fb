//! Arrival times of an open-loop load.
//!
//! In an open loop, I/Os start independently of earlier completions, as from independent clients.
//! The latency of an I/O counts from its intended start, so it includes the time that the I/O waits
//! for submission. Otherwise a stalled device would stop the arrivals that measure the stall
//! (coordinated omission).

use tenmil_base::{Instant, Random};

use super::perf_options::{ArrivalProcess, OpenLoop};

/// Sequence of intended start times.
#[derive(Clone, Debug)]
pub struct ArrivalTimes {
    random: Random,
    law: ArrivalProcess,
    /// Mean interval, in units of 1/[`TICKS`] ns.
    mean: u64,
    /// Next intended start, in the same unit.
    next: u64,
}

/// Ticks per nanosecond: whole nanoseconds would distort a rate of 10 M per second by several
/// percent. A run may last 2^54 ns, which is 208 days.
const TICKS: u64 = 1 << TICK_BITS;
const TICK_BITS: u32 = 10;

impl ArrivalTimes {
    /// Arrivals of one of `parts` threads that share the rate, from `start` on. Uniform arrivals of
    /// different threads are interleaved.
    ///
    /// # Panics
    ///
    /// If the rate or `parts` is zero, which the check of the options excludes.
    pub fn new(rate: OpenLoop, part: u64, parts: u64, start: Instant, seed: u64) -> Self {
        assert!(rate.per_second > 0 && parts > 0 && part < parts);
        let mean = 1_000_000_000 * TICKS * parts / rate.per_second;
        let mut arrivals = Self {
            random: Random::new(seed),
            law: rate.arrivals,
            mean,
            next: (start.ns << TICK_BITS) + mean / parts * part,
        };
        if rate.arrivals == ArrivalProcess::Poisson {
            arrivals.draw_next();
        }
        arrivals
    }

    /// Consumes the next intended start if it is not after `now`.
    #[inline]
    pub fn take_due(&mut self, now: Instant) -> Option<Instant> {
        let next = self.next_due();
        if next > now {
            return None;
        }
        self.draw_next();
        Some(next)
    }

    /// Next intended start.
    #[inline]
    pub fn next_due(&self) -> Instant {
        Instant { ns: self.next >> TICK_BITS }
    }

    /// Number of arrivals due at `now` and not consumed; an estimate for random arrivals.
    pub fn due_count(&self, now: Instant) -> u64 {
        (now.ns << TICK_BITS).checked_sub(self.next).map_or(0, |late| late / self.mean + 1)
    }

    #[inline]
    fn draw_next(&mut self) {
        self.next += match self.law {
            ArrivalProcess::Uniform => self.mean,
            ArrivalProcess::Poisson => self.exponential_interval(),
        };
    }

    /// Draws an exponentially distributed interval.
    #[expect(clippy::cast_possible_truncation, reason = "at most 37 times the mean")]
    #[expect(clippy::cast_sign_loss, reason = "the logarithm of at most one, negated")]
    #[expect(clippy::cast_precision_loss, reason = "a mean of 2^53 ticks would be 100 days")]
    fn exponential_interval(&mut self) -> u64 {
        // `unit` is below one, so the argument is never zero.
        let logarithm = (1.0 - self.random.next_f64()).ln();
        (-logarithm * self.mean as f64) as u64
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{ArrivalProcess, ArrivalTimes, OpenLoop};

    const SECOND: Instant = Instant { ns: 1_000_000_000 };

    fn arrivals_at_rate(per_second: u64, arrivals: ArrivalProcess) -> ArrivalTimes {
        ArrivalTimes::new(OpenLoop { per_second, arrivals }, 0, 1, Instant { ns: 0 }, 9)
    }

    fn arrival_intervals(arrivals: &mut ArrivalTimes, until: Instant) -> Vec<u64> {
        let mut last = Instant::default();
        let mut intervals = Vec::new();
        while let Some(start) = arrivals.take_due(until) {
            intervals.push(start.since(last).ns);
            last = start;
        }
        intervals
    }

    #[test]
    fn rate_is_exact_for_both_distributions_even_with_fractional_intervals() {
        // A tick is 1/34133 of the shorter interval; a random count varies by its square root.
        for (law, slack) in [(ArrivalProcess::Uniform, 5), (ArrivalProcess::Poisson, 5 * 548)] {
            for (rate, until_ns) in [(300_000, 1_000_000_000), (30_000_000, 10_000_000)] {
                let until = Instant { ns: until_ns };
                let count = arrival_intervals(&mut arrivals_at_rate(rate, law), until).len() as u64;
                assert!(count.abs_diff(300_000) <= slack, "{law:?} {rate}: {count}");
            }
        }
    }

    #[test]
    fn uniform_arrivals_have_equal_intervals() {
        let intervals =
            arrival_intervals(&mut arrivals_at_rate(1000, ArrivalProcess::Uniform), SECOND);
        assert!(intervals[1..].iter().all(|interval| *interval == 1_000_000));
    }

    #[test]
    fn poisson_arrivals_have_exponential_intervals() {
        let intervals =
            arrival_intervals(&mut arrivals_at_rate(100_000, ArrivalProcess::Poisson), SECOND);
        // Fraction exp(-x) of exponential intervals exceeds x times the mean.
        for (times_mean, share) in [(0.1, 0.9048), (1.0, 0.3679), (3.0, 0.0498)] {
            let longer = intervals.iter().filter(|ns| **ns as f64 > times_mean * 10_000.0).count();
            let found = longer as f64 / intervals.len() as f64;
            assert!((found - share).abs() < 0.01, "{times_mean}: {found}");
        }
    }

    #[test]
    fn late_arrival_keeps_its_intended_start() {
        let mut arrivals = arrivals_at_rate(1000, ArrivalProcess::Uniform);
        assert_eq!(arrivals.due_count(SECOND), 1001);
        assert_eq!(arrivals.take_due(SECOND), Some(Instant { ns: 0 }));
        assert_eq!(arrivals.take_due(SECOND), Some(Instant { ns: 1_000_000 }));
        assert_eq!(arrivals.take_due(Instant { ns: 1_999_999 }), None, "not before its time");
        assert_eq!(arrivals.due_count(Instant { ns: 0 }), 0);
    }

    #[test]
    fn threads_sharing_a_rate_alternate() {
        let rate = OpenLoop { per_second: 1000, arrivals: ArrivalProcess::Uniform };
        let starts: Vec<u64> = (0..4)
            .map(|part| ArrivalTimes::new(rate, part, 4, SECOND, part).next_due().ns - SECOND.ns)
            .collect();
        assert_eq!(starts, [0, 1_000_000, 2_000_000, 3_000_000]);
        let mut last = ArrivalTimes::new(rate, 3, 4, SECOND, 3);
        assert!(last.take_due(Instant::NEVER).is_some());
        assert_eq!(last.next_due().since(SECOND).ns, 7_000_000, "a quarter of the rate each");
    }
}
