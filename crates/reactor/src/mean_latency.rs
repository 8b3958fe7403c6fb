//! Mean completion time of requests, without a timestamp per request.
//!
//! By Little's law the mean time in flight is the integral of the number in flight over time,
//! divided by the number of completions: two counters, whatever the queue depth.

use tenmil_base::{Instant, Span};

/// Mean completion time of one owner's requests, for
/// [`Poller::expected_latency`](crate::Poller::expected_latency).
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanLatency {
    /// Time of the last update.
    last: Instant,
    /// Time in flight summed over requests, and the number of completions, since the mean was last
    /// computed.
    occupied_ns: u64,
    ended: u64,
    mean: Span,
}

/// Completions per mean.
const WINDOW: u64 = 64;
/// Completion time of which a wake-up is some hundredths.
pub const LONG_LATENCY: Span = Span::from_us(400);

impl MeanLatency {
    /// Accounts that `in_flight` requests were in flight from the last call up to `now`.
    #[inline]
    pub fn account_in_flight(&mut self, now: Instant, in_flight: usize) {
        let passed = now.since(self.last).ns;
        self.last = now;
        self.occupied_ns = self.occupied_ns.saturating_add(passed.saturating_mul(in_flight as u64));
    }

    /// Counts completions.
    #[inline]
    pub fn record_completions(&mut self, count: usize) {
        self.ended += count as u64;
        if self.ended >= WINDOW {
            self.mean = Span { ns: self.occupied_ns / self.ended };
            (self.occupied_ns, self.ended) = (0, 0);
        }
    }

    /// Whether requests take so long that spinning for them is not worth the processor time.
    pub fn is_long(&self) -> bool {
        self.mean >= LONG_LATENCY
    }

    /// Recent mean completion time, if known.
    pub fn mean_latency(&self) -> Option<Span> {
        (self.mean.ns > 0).then_some(self.mean)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tenmil_base::{Instant, Random, Span};

    use super::MeanLatency;

    #[test]
    fn mean_latency_is_correct_at_any_depth() {
        for (depth, us) in [(1, 80), (7, 80), (128, 80), (7, 390), (7, 410)] {
            let mut random = Random::new(depth);
            let mut now = Instant { ns: 1_000_000 };
            let mut latency = MeanLatency::default();
            let mut ends = VecDeque::new();
            assert_eq!(latency.mean_latency(), None);
            for _ in 0..100_000 {
                now = now.after(Span { ns: random.below(500) });
                latency.account_in_flight(now, ends.len());
                let before = ends.len();
                while ends.front().is_some_and(|end| *end <= now) {
                    ends.pop_front();
                }
                latency.record_completions(before - ends.len());
                // Occasional idle time is no latency.
                if ends.is_empty() && random.chance(1, 10) {
                    now = now.after(Span::from_ms(10));
                    latency.account_in_flight(now, 0);
                }
                while (ends.len() as u64) < depth {
                    ends.push_back(now.after(Span::from_us(us)));
                }
            }
            let mean = latency.mean_latency().unwrap();
            // Its end is observed a little late.
            assert!((us * 1_000..us * 1_000 + 1_000).contains(&mean.ns), "depth {depth}: {mean}");
            assert_eq!(latency.is_long(), us > 400, "{mean}");
        }
    }
}
