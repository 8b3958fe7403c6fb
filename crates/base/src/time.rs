//! Time as a plain value.
//!
//! Nothing in this file reads a clock. The reactor reads the clock once per iteration and passes
//! the result as an argument, so a test can pass any value and a simulated hour costs nothing.

use core::fmt;

/// Point in time: nanoseconds since an origin that depends on the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant {
    /// Nanoseconds since the clock's origin.
    pub ns: u64,
}

/// Duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Nanoseconds.
    pub ns: u64,
}

impl Span {
    /// Duration of `count` milliseconds.
    pub const fn from_ms(count: u64) -> Self {
        Self { ns: count.saturating_mul(1_000_000) }
    }

    /// Duration of `count` microseconds.
    pub const fn from_us(count: u64) -> Self {
        Self { ns: count.saturating_mul(1_000) }
    }

    /// Duration of `count` seconds.
    pub const fn from_secs(count: u64) -> Self {
        Self { ns: count.saturating_mul(1_000_000_000) }
    }

    /// Duration in seconds, for display and rates.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn as_secs_f64(self) -> f64 {
        self.ns as f64 / 1e9
    }
}

impl Instant {
    /// Instant `span` later. Saturates.
    #[must_use]
    pub const fn after(self, span: Span) -> Self {
        Self { ns: self.ns.saturating_add(span.ns) }
    }

    /// Last representable instant: a deadline that never passes.
    pub const NEVER: Self = Self { ns: u64::MAX };

    /// Time since `earlier`. Zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span { ns: self.ns.saturating_sub(earlier.ns) }
    }
}

impl fmt::Display for Span {
    /// Formats the duration with the largest unit that keeps it whole: `1500 ms`, `3 s`, `7 ns`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns")];
        for (unit_ns, name) in UNITS {
            if self.ns.is_multiple_of(unit_ns) && (self.ns > 0 || unit_ns == 1) {
                return write!(out, "{} {name}", self.ns / unit_ns);
            }
        }
        unreachable!("every span is a whole number of nanoseconds")
    }
}

#[cfg(test)]
mod tests {
    use super::{Instant, Span};

    #[test]
    fn span_is_printed_in_its_largest_whole_unit() {
        assert_eq!(Span::from_ms(1_500).to_string(), "1500 ms");
        assert_eq!(Span::from_ms(3_000).to_string(), "3 s");
        assert_eq!(Span { ns: 7 }.to_string(), "7 ns");
        assert_eq!(Span { ns: 0 }.to_string(), "0 ns");
    }

    #[test]
    fn time_arithmetic_saturates() {
        let end = Instant { ns: u64::MAX };
        assert_eq!(end.after(Span::from_ms(1)), end);
        assert_eq!(Instant { ns: 1 }.since(end), Span { ns: 0 });
    }
}
