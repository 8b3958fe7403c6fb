//! Time until which a member may serve by its own clock.
//!
//! ```text
//!   member:  sent ─────────────────────────────────── serving until ┃
//!   store:        renewed ────────────────────────────────────────────────── lease ends
//!            │◀──────────── lease · (1 − drift) − margin ──────────▶│◀ margin ▶│
//! ```
//!
//! The store counts from a moment at or after the one at which the member has sent the renewal, so a member
//! that counts from the sending ends first. Clocks may run at rates that differ by the drift.

use tenmil_base::{Instant, Span};

/// Times of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Lease in the store.
    pub lease: Span,
    /// Time between the end of serving and the earliest end of the lease: for writes that are on their way to
    /// the medium.
    pub margin: Span,
    /// Largest difference between the rates of the clocks of store and member, in parts per thousand.
    pub drift_permille: u32,
}

impl LeaseTiming {
    /// Default lease. With it, the owner of an ANA group is replaced within 5 s.
    pub const LEASE: Span = Span::from_secs(3);

    /// Timing of a lease: a margin of a sixth, and a drift of 1 %.
    #[must_use]
    pub const fn of_lease(lease: Span) -> Self {
        Self { lease, margin: Span { ns: lease.ns / 6 }, drift_permille: 10 }
    }

    /// Time for which a member may serve after it has sent a renewal that succeeded.
    #[must_use]
    pub const fn serving_time(&self) -> Span {
        let drift_ns = self.lease.ns / 1000 * self.drift_permille as u64;
        Span { ns: self.lease.ns.saturating_sub(drift_ns).saturating_sub(self.margin.ns) }
    }

    /// Interval of renewals.
    #[must_use]
    pub const fn renewal_interval(&self) -> Span {
        Span { ns: self.lease.ns / 6 }
    }

    /// Instant until which a member may serve that has sent its last successful renewal at `sent`.
    pub(crate) const fn serving_until(&self, sent: Instant) -> Instant {
        sent.after(self.serving_time())
    }
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self::of_lease(Self::LEASE)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::LeaseTiming;

    #[test]
    fn member_stops_before_the_lease_ends_on_the_fastest_store() {
        let timing = LeaseTiming::default();
        let sent = Instant { ns: 1_000 };
        // The store's clock runs faster by the drift, and it has renewed at once.
        let ends = sent.after(Span { ns: timing.lease.ns * 1000 / 1010 });
        assert!(ends.since(timing.serving_until(sent)) >= timing.margin);
        assert!(timing.serving_time() > timing.renewal_interval());
    }
}
