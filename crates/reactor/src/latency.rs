//! How long what is in flight takes, without a stamp on any of it.
//!
//! By Little's law the mean time that things are under way is the sum of how many there are at each
//! moment, over time, divided by how many have ended: two numbers, whatever the depth.

use base::{Instant, Span};

/// The mean time that requests of one owner take, for
/// [`Poller::expected_latency`](crate::Poller::expected_latency).
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanLatency {
    /// When it was told last how many were in flight.
    last: Instant,
    /// Time in flight, summed over requests, and how many of them have ended, since the mean was
    /// taken.
    occupied_ns: u64,
    ended: u64,
    mean: Span,
}

/// So many have to end before a mean is taken.
const WINDOW: u64 = 64;

impl MeanLatency {
    /// Up to `now`, so many were in flight since this was said last.
    #[inline]
    pub fn pass(&mut self, now: Instant, in_flight: usize) {
        let passed = now.since(self.last).ns;
        self.last = now;
        self.occupied_ns = self.occupied_ns.saturating_add(passed.saturating_mul(in_flight as u64));
    }

    /// So many have ended.
    #[inline]
    pub fn end(&mut self, count: usize) {
        self.ended += count as u64;
        if self.ended >= WINDOW {
            self.mean = Span { ns: self.occupied_ns / self.ended };
            (self.occupied_ns, self.ended) = (0, 0);
        }
    }

    /// What one of them took on average lately, if that is known.
    pub fn mean(&self) -> Option<Span> {
        (self.mean.ns > 0).then_some(self.mean)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use base::{Instant, Random, Span};

    use super::MeanLatency;

    #[test]
    fn the_mean_is_what_requests_take_at_any_depth() {
        for depth in [1, 7, 128] {
            let mut random = Random::new(depth);
            let mut now = Instant { ns: 1_000_000 };
            let mut latency = MeanLatency::default();
            let mut ends = VecDeque::new();
            assert_eq!(latency.mean(), None);
            for _ in 0..100_000 {
                now = now.after(Span { ns: random.below(500) });
                latency.pass(now, ends.len());
                let before = ends.len();
                while ends.front().is_some_and(|end| *end <= now) {
                    ends.pop_front();
                }
                latency.end(before - ends.len());
                // Now and then there is nothing to do for long, which is no latency.
                if ends.is_empty() && random.chance(1, 10) {
                    now = now.after(Span::from_ms(10));
                    latency.pass(now, 0);
                }
                while (ends.len() as u64) < depth {
                    ends.push_back(now.after(Span::from_us(80)));
                }
            }
            let mean = latency.mean().unwrap();
            // It is seen to end a little later than it does.
            assert!((80_000..81_000).contains(&mean.ns), "depth {depth}: {mean}");
        }
    }
}
