//! How fast work in the background may go: so many bytes in a second, and no more.

use base::{Instant, Span};
use host::Clock;

/// The pace of one piece of work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Bytes in a second; as fast as it goes if there is none.
    pub(super) rate: Option<u64>,
    pub(super) clock: Clock,
}

impl Pace {
    /// How long so many bytes take at least.
    fn least(&self, bytes: u64) -> Span {
        let rate = self.rate.map_or(u64::MAX, |rate| rate.max(1));
        Span::from_us(bytes.saturating_mul(1_000_000) / rate)
    }

    /// Rests, so that so many bytes have taken as long as they must since `began`.
    pub(super) fn rest(&self, bytes: u64, began: Instant) {
        let left = began.after(self.least(bytes)).since(self.clock.now());
        if left > Span::from_ms(0) {
            host::thread::rest(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Span;
    use host::Clock;

    use super::Pace;

    #[test]
    fn a_rate_says_how_long_bytes_take_and_without_one_they_take_no_time() {
        let pace = |rate| Pace { rate, clock: Clock::start() };
        assert_eq!(pace(Some(1 << 20)).least(1 << 19), Span::from_ms(500));
        assert_eq!(pace(Some(0)).least(2), Span::from_secs(2), "a byte a second at least");
        assert_eq!(pace(None).least(1 << 40), Span::from_us(0));
        let began = Clock::start();
        let pace = Pace { rate: Some(1000), clock: began };
        let from = began.now();
        pace.rest(50, from);
        assert!(began.now().since(from) >= Span::from_ms(50));
        pace.rest(50, from);
        assert!(began.now().since(from) < Span::from_secs(5), "what is due is not waited for");
    }
}
