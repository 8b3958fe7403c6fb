//! Simulated time. It stands still while there is progress, and then jumps to the next wake-up.

use tenmil_base::Instant;

/// Clock of one world.
#[derive(Clone, Copy, Debug)]
pub struct SimClock {
    now: Instant,
}

/// Minimum of several wake-up times.
#[derive(Clone, Copy, Debug)]
pub struct NextWakeup(Instant);

impl Default for SimClock {
    /// Does not start at zero, so that zero is not a valid time.
    fn default() -> Self {
        Self { now: Instant { ns: 1_000_000 } }
    }
}

impl SimClock {
    /// Current time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Jumps ahead. A target in the past advances the time by the smallest step, so time never
    /// stands still for ever.
    pub fn jump_to(&mut self, to: Instant) {
        self.now = to.max(Instant { ns: self.now.ns + 1 });
    }
}

impl Default for NextWakeup {
    fn default() -> Self {
        Self(Instant::NEVER)
    }
}

impl NextWakeup {
    /// Adds a wake-up time.
    #[must_use]
    pub fn with_wakeup_at(self, other: Instant) -> Self {
        Self(self.0.min(other))
    }

    /// Earliest wake-up time. `None` if there is none.
    pub fn earliest(self) -> Option<Instant> {
        (self.0 != Instant::NEVER).then_some(self.0)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{NextWakeup, SimClock};

    #[test]
    fn time_jumps_ahead_and_never_stands_still() {
        let mut clock = SimClock::default();
        let start = clock.now();
        clock.jump_to(Instant { ns: start.ns + 1000 });
        assert_eq!(clock.now().ns, start.ns + 1000);
        clock.jump_to(start);
        assert_eq!(clock.now().ns, start.ns + 1001);
    }

    #[test]
    fn no_wakeup_has_no_earliest_time() {
        assert_eq!(NextWakeup::default().with_wakeup_at(Instant::NEVER).earliest(), None);
        let both = NextWakeup::default()
            .with_wakeup_at(Instant { ns: 9 })
            .with_wakeup_at(Instant { ns: 4 });
        assert_eq!(both.earliest(), Some(Instant { ns: 4 }));
    }
}
