//! Throttle: limits background work to a rate in bytes per second.

use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;

/// The throttle of one background job.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateThrottle {
    /// Bytes per second; `None` is unlimited.
    pub(super) rate: Option<u64>,
    pub(super) clock: Clock,
}

impl RateThrottle {
    /// Minimum time of a transfer.
    fn transfer_time_min(&self, bytes: u64) -> Span {
        let rate = self.rate.map_or(u64::MAX, |rate| rate.max(1));
        Span::from_us(bytes.saturating_mul(1_000_000) / rate)
    }

    /// Sleeps until `bytes` have taken at least their minimum time since `began`. Calls `continues` at
    /// intervals, and returns its last result.
    pub(super) fn sleep_to_rate(
        &self,
        bytes: u64,
        began: Instant,
        continues: &mut dyn FnMut() -> bool,
    ) -> bool {
        let until = began.after(self.transfer_time_min(bytes));
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

    use super::RateThrottle;

    #[test]
    fn throttle_time_follows_the_rate() {
        let pace = |rate| RateThrottle { rate, clock: Clock::start() };
        assert_eq!(pace(Some(1 << 20)).transfer_time_min(1 << 19), Span::from_ms(500));
        assert_eq!(
            pace(Some(0)).transfer_time_min(2),
            Span::from_secs(2),
            "a byte a second at least"
        );
        assert_eq!(pace(None).transfer_time_min(1 << 40), Span::from_us(0));
        let began = Clock::start();
        let pace = RateThrottle { rate: Some(1000), clock: began };
        let from = began.now();
        assert!(pace.sleep_to_rate(50, from, &mut || true));
        assert!(began.now().since(from) >= Span::from_ms(50));
        assert!(pace.sleep_to_rate(50, from, &mut || false), "what is due is not waited for");
    }

    #[test]
    fn throttle_sleep_can_be_interrupted() {
        let clock = Clock::start();
        let pace = RateThrottle { rate: Some(1), clock };
        let mut asked = 0;
        let continues = pace.sleep_to_rate(1 << 20, clock.now(), &mut || {
            asked += 1;
            asked < 3
        });
        assert!(!continues && asked == 3, "{asked}");
    }
}
