//! Simulated time: it stands still while anything moves, and then jumps to the next wake-up.

use base::Instant;

/// The clock of one world.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    now: Instant,
}

/// The earliest of many wake-ups.
#[derive(Clone, Copy, Debug)]
pub struct Earliest(Instant);

impl Default for Clock {
    /// Worlds do not begin at zero, so that nobody takes zero for a time.
    fn default() -> Self {
        Self { now: Instant { ns: 1_000_000 } }
    }
}

impl Clock {
    /// What time it is.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Jumps ahead. A wake-up that lies in the past is one that is due: time moves by the smallest
    /// step, so that it never stands still for ever.
    pub fn jump(&mut self, to: Instant) {
        self.now = to.max(Instant { ns: self.now.ns + 1 });
    }
}

impl Default for Earliest {
    fn default() -> Self {
        Self(Instant::NEVER)
    }
}

impl Earliest {
    /// Takes one more wake-up into account.
    #[must_use]
    pub fn or(self, other: Instant) -> Self {
        Self(self.0.min(other))
    }

    /// When that is; `None` if nobody wants to be woken.
    pub fn wake(self) -> Option<Instant> {
        (self.0 != Instant::NEVER).then_some(self.0)
    }
}

#[cfg(test)]
mod tests {
    use base::Instant;

    use super::{Clock, Earliest};

    #[test]
    fn time_jumps_ahead_and_never_stands_still() {
        let mut clock = Clock::default();
        let start = clock.now();
        clock.jump(Instant { ns: start.ns + 1000 });
        assert_eq!(clock.now().ns, start.ns + 1000);
        clock.jump(start);
        assert_eq!(clock.now().ns, start.ns + 1001);
    }

    #[test]
    fn the_earliest_of_nothing_is_no_wake_up() {
        assert_eq!(Earliest::default().or(Instant::NEVER).wake(), None);
        let both = Earliest::default().or(Instant { ns: 9 }).or(Instant { ns: 4 });
        assert_eq!(both.wake(), Some(Instant { ns: 4 }));
    }
}
