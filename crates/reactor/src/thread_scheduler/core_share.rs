//! Shares of a period in integers, so that a plan is the same on every machine.

/// Share of one core's time, in units of 1/[`WHOLE`].
pub(super) type CoreShare = u64;

/// The whole time of a core.
pub(super) const WHOLE: CoreShare = 10_000;

/// Normal variation between periods. An optional migration must leave this much capacity, and an idle
/// thread must exceed its limit by this much before it counts as active; otherwise a load at a
/// limit would oscillate.
pub(super) const SLACK: CoreShare = 5 * WHOLE / 100;

/// Below this a thread only polls without work: it fits everywhere, and moving it relieves nothing.
pub(super) const NEGLIGIBLE: CoreShare = WHOLE / 100;

/// Capacity that a busy sibling takes from the other hardware thread, as 1 over this part of its
/// own load: two hardware threads together do about as much as 1.25 cores.
pub(super) const SIBLING_COST_PARTS: CoreShare = 4;

/// Share of `busy` in `elapsed`; at most the whole.
pub(super) fn share_of_elapsed(busy: u64, elapsed: u64) -> CoreShare {
    let wide = u128::from(busy) * u128::from(WHOLE) / u128::from(elapsed.max(1));
    CoreShare::try_from(wide).unwrap_or(WHOLE).min(WHOLE)
}

#[cfg(test)]
mod tests {
    use super::{WHOLE, share_of_elapsed};

    #[test]
    fn share_never_exceeds_the_whole() {
        assert_eq!(share_of_elapsed(1, 4), WHOLE / 4);
        assert_eq!(share_of_elapsed(u64::MAX, u64::MAX), WHOLE);
        assert_eq!(
            (share_of_elapsed(9, 4), share_of_elapsed(u64::MAX, 1), share_of_elapsed(3, 0)),
            (WHOLE, WHOLE, WHOLE)
        );
        assert_eq!(share_of_elapsed(0, 0), 0);
    }
}
