//! Shares of a period, in whole numbers, so that a plan is the same on every machine.

/// A share of one core's time, in parts of [`WHOLE`].
pub(super) type Share = u64;

/// All of a core's time.
pub(super) const WHOLE: Share = 10_000;

/// What changes by itself from one period to the next. A move that nobody needs has to leave this
/// much room, and an idle thread has to do this much more before it counts as active, or a load
/// that lies on a limit would move to and fro for ever.
pub(super) const SLACK: Share = 5 * WHOLE / 100;

/// Below this a thread does nothing but look whether there is something to do: it fits everywhere,
/// and moving it away helps nobody.
pub(super) const NEGLIGIBLE: Share = WHOLE / 100;

/// What a busy sibling takes away from the other half of a physical core, as a part of its own
/// load: two halves do about as much as one and a quarter cores, so each costs the other a quarter
/// and more of what it does.
pub(super) const SIBLING_COST_PARTS: Share = 4;

/// The share of `elapsed` that `busy` is; all of it at most.
pub(super) fn of(busy: u64, elapsed: u64) -> Share {
    let wide = u128::from(busy) * u128::from(WHOLE) / u128::from(elapsed.max(1));
    Share::try_from(wide).unwrap_or(WHOLE).min(WHOLE)
}

#[cfg(test)]
mod tests {
    use super::{WHOLE, of};

    #[test]
    fn a_share_is_never_more_than_the_whole() {
        assert_eq!(of(1, 4), WHOLE / 4);
        assert_eq!(of(u64::MAX, u64::MAX), WHOLE);
        assert_eq!((of(9, 4), of(u64::MAX, 1), of(3, 0)), (WHOLE, WHOLE, WHOLE));
        assert_eq!(of(0, 0), 0);
    }
}
