//! Throttle: limits background work to a rate in bytes per second.

use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;

/// The throttle of one background job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Throttle {
    /// Bytes per second; `None` is unlimited.
    pub(super) rate: Option<u64>,
    pub(super) clock: Clock,
}

impl Throttle {
    /// Minimum time of a transfer.
    fn least(&self, bytes: u64) -> Span {
        let rate = self.rate.map_or(u64::MAX, |rate| rate.max(1));
        Span::from_us(bytes.saturating_mul(1_000_000) / rate)
    }

    /// Sleeps until `bytes` have taken at least their minimum time since `began`. Calls `continues` at
    /// intervals, and returns its last result.
    pub(super) fn rest(
        &self,
        bytes: u64,
        began: Instant,
        continues: &mut dyn FnMut() -> bool,
    ) -> bool {
        let until = began.after(self.least(bytes));
        loop {
            let left = until.since(self.clock.now());
            if left == Span::default() {
                return true;
            }
            tenmil_linux::named_thread::sleep(left.min(REST_MAX));
            if !continues() {
                return false;
            }
        }
    }
}

/// Interval of the calls of `continues`.
const REST_MAX: Span = Span::from_ms(100);

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::Clock;

    use super::Throttle;

    #[test]
    fn a_rate_says_how_long_bytes_take_and_without_one_they_take_no_time() {
        let pace = |rate| Throttle { rate, clock: Clock::start() };
        assert_eq!(pace(Some(1 << 20)).least(1 << 19), Span::from_ms(500));
        assert_eq!(pace(Some(0)).least(2), Span::from_secs(2), "a byte a second at least");
        assert_eq!(pace(None).least(1 << 40), Span::from_us(0));
        let began = Clock::start();
        let pace = Throttle { rate: Some(1000), clock: began };
        let from = began.now();
        assert!(pace.rest(50, from, &mut || true));
        assert!(began.now().since(from) >= Span::from_ms(50));
        assert!(pace.rest(50, from, &mut || false), "what is due is not waited for");
    }

    #[test]
    fn whoever_says_no_does_not_wait_for_the_end_of_a_long_rest() {
        let clock = Clock::start();
        let pace = Throttle { rate: Some(1), clock };
        let mut asked = 0;
        let continues = pace.rest(1 << 20, clock.now(), &mut || {
            asked += 1;
            asked < 3
        });
        assert!(!continues && asked == 3, "{asked}");
    }
}
