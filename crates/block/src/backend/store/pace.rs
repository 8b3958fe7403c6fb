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

    /// Rests, so that so many bytes have taken as long as they must since `began`. Asks now and then
    /// whether to go on, and says what was answered last.
    pub(super) fn rest(
        &self,
        bytes: u64,
        began: Instant,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let until = began.after(self.least(bytes));
        loop {
            let left = until.since(self.clock.now());
            if left == Span::default() {
                return true;
            }
            host::thread::rest(left.min(REST_MAX));
            if !goes_on() {
                return false;
            }
        }
    }
}

/// How long nobody is asked whether to go on.
const REST_MAX: Span = Span::from_ms(100);

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
        assert!(pace.rest(50, from, &mut || true));
        assert!(began.now().since(from) >= Span::from_ms(50));
        assert!(pace.rest(50, from, &mut || false), "what is due is not waited for");
    }

    #[test]
    fn whoever_says_no_does_not_wait_for_the_end_of_a_long_rest() {
        let clock = Clock::start();
        let pace = Pace { rate: Some(1), clock };
        let mut asked = 0;
        let goes_on = pace.rest(1 << 20, clock.now(), &mut || {
            asked += 1;
            asked < 3
        });
        assert!(!goes_on && asked == 3, "{asked}");
    }
}
