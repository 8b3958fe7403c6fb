//! The keep-alive timer (Base 2.1 §3.9).
//!
//! Commands count as signs of life (traffic based, CTRATT.TBKAS): whatever arrives moves the
//! deadline, and Keep Alive is only needed when nothing else does.

use base::{Instant, Span};
use wire::Status;

/// The timer of one controller.
#[derive(Clone, Debug)]
pub(super) struct KeepAlive {
    /// Time-outs are multiples of this.
    step: Span,
    /// Zero: the timer is off.
    timeout: Span,
    deadline: Instant,
}

/// The longest time-out: what a host can ask for in milliseconds.
const TIMEOUT_MS_MAX: u32 = u32::MAX;

impl KeepAlive {
    pub(super) const fn new(step: Span) -> Self {
        Self { step, timeout: Span { ns: 0 }, deadline: Instant::NEVER }
    }

    /// KAS: the step in units of 100 ms (Base 2.1 §5.1.13.2.1).
    pub(super) fn granularity(&self) -> u16 {
        u16::try_from(self.step.ns / Span::from_ms(100).ns).unwrap_or(u16::MAX)
    }

    /// Sets the time-out, rounded up to the step; zero turns the timer off
    /// (Base 2.1 §5.1.25.1.8).
    pub(super) fn set(&mut self, now: Instant, timeout_ms: u32) -> Result<(), Status> {
        let steps = Span::from_ms(timeout_ms.into()).ns.div_ceil(self.step.ns);
        let timeout = Span { ns: steps * self.step.ns };
        if timeout.ns > Span::from_ms(TIMEOUT_MS_MAX.into()).ns {
            return Err(Status::KEEP_ALIVE_TIMEOUT_INVALID);
        }
        self.timeout = timeout;
        self.heard(now);
        Ok(())
    }

    /// The time-out in milliseconds.
    pub(super) fn timeout_ms(&self) -> u32 {
        u32::try_from(self.timeout.ns / 1_000_000).unwrap_or(u32::MAX)
    }

    /// The host is alive.
    pub(super) const fn heard(&mut self, now: Instant) {
        self.deadline = if self.timeout.ns == 0 { Instant::NEVER } else { now.after(self.timeout) };
    }

    /// Whether the host has been silent for too long; said once.
    pub(super) fn expired(&mut self, now: Instant) -> bool {
        let expired = self.deadline != Instant::NEVER && now >= self.deadline;
        if expired {
            self.deadline = Instant::NEVER;
        }
        expired
    }

    /// When to look again.
    pub(super) const fn wake_at(&self) -> Instant {
        self.deadline
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};
    use wire::Status;

    use super::KeepAlive;

    const fn at_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    fn timer(timeout_ms: u32) -> KeepAlive {
        let mut timer = KeepAlive::new(Span::from_ms(100));
        timer.set(at_ms(0), timeout_ms).unwrap();
        timer
    }

    #[test]
    fn silence_is_noticed_once_and_at_the_deadline() {
        let mut timer = timer(1000);
        assert!(!timer.expired(at_ms(999)));
        timer.heard(at_ms(999));
        assert_eq!(timer.wake_at(), at_ms(1999));
        assert!(!timer.expired(at_ms(1998)));
        assert!(timer.expired(at_ms(1999)));
        assert!(!timer.expired(at_ms(5000)));
    }

    #[test]
    fn a_time_out_is_rounded_up_to_the_step() {
        for (asked, got) in [(0, 0), (1, 100), (100, 100), (101, 200), (120_000, 120_000)] {
            assert_eq!(timer(asked).timeout_ms(), got);
        }
        assert_eq!(timer(0).wake_at(), Instant::NEVER, "zero is off");
    }

    #[test]
    fn a_time_out_that_cannot_be_rounded_up_is_refused_and_changes_nothing() {
        let mut timer = timer(500);
        assert_eq!(timer.set(at_ms(0), u32::MAX), Err(Status::KEEP_ALIVE_TIMEOUT_INVALID));
        assert_eq!(timer.timeout_ms(), 500);
    }

    #[test]
    fn the_granularity_is_told_in_tenths_of_a_second() {
        assert_eq!(KeepAlive::new(Span::from_secs(1)).granularity(), 10);
    }
}
