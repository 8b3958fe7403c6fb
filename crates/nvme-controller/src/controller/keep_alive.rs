//! Keep-alive timer (Base 2.1 §3.9).
//!
//! The timer is traffic based (CTRATT.TBKAS): at the end of an interval, another one starts if any
//! command was fetched during it; otherwise the host is considered lost. Expiry therefore occurs between
//! one and two timeouts after the host's last command. A Keep Alive command restarts the interval.
//!
//! ```text
//!   |-- timeout ---|-- timeout ---|-- timeout ---|
//!      c     c           c            no command '-- expired
//! ```
//!
//! Fetching a command counts, not its completion: the execution time says nothing about the host, and a
//! host that waits for its controller to become quiescent counts from its last submission.

use tenmil_base::{Instant, Span};
use tenmil_wire::Status;

use super::config::ControllerConfig;

/// Keep-alive timer of one controller.
#[derive(Clone, Debug)]
pub(super) struct KeepAlive {
    /// Granularity of the timeout.
    granularity: Span,
    /// Longest timeout.
    max: Span,
    /// Interval for a host without a timeout; `None` disables the timer.
    idle_host_timeout: Option<Span>,
    /// Timeout; zero turns the timer off.
    timeout: Span,
    /// End of the interval; never while the timer is not active.
    deadline: Instant,
    /// A command was fetched in the interval.
    has_activity: bool,
}

/// Longest timeout that can be reported, in milliseconds.
const TIMEOUT_MS_MAX: u32 = u32::MAX;

impl KeepAlive {
    pub(super) const fn new(config: &ControllerConfig) -> Self {
        let ControllerConfig { keep_alive_granularity, keep_alive_max, idle_host_timeout, .. } =
            *config;
        Self {
            granularity: keep_alive_granularity,
            max: keep_alive_max,
            idle_host_timeout,
            timeout: Span { ns: 0 },
            deadline: Instant::NEVER,
            has_activity: false,
        }
    }

    /// KAS: the granularity in units of 100 ms (Base 2.1 §5.1.13.2.1).
    pub(super) fn granularity_100ms(&self) -> u16 {
        u16::try_from(self.granularity.ns / Span::from_ms(100).ns).unwrap_or(u16::MAX)
    }

    /// Sets the timeout, rounded up to the granularity; zero turns the timer off (Base 2.1 §5.1.25.1.8).
    /// A timeout above the maximum is rejected without effect.
    pub(super) fn set_timeout(&mut self, now: Instant, timeout_ms: u32) -> Result<(), Status> {
        let requested = Span::from_ms(timeout_ms.into());
        let timeout = Span { ns: requested.ns.div_ceil(self.granularity.ns) * self.granularity.ns };
        if requested > self.max || timeout.ns > Span::from_ms(TIMEOUT_MS_MAX.into()).ns {
            return Err(Status::KEEP_ALIVE_TIMEOUT_INVALID);
        }
        self.timeout = timeout;
        self.has_activity = false;
        self.restart(now);
        Ok(())
    }

    /// Timeout in milliseconds.
    pub(super) fn timeout_ms(&self) -> u32 {
        u32::try_from(self.timeout.ns / 1_000_000).unwrap_or(u32::MAX)
    }

    /// Records that a command was fetched.
    pub(super) const fn note_activity(&mut self) {
        self.has_activity = true;
    }

    /// Starts an interval: for a Keep Alive command, or when the controller is enabled. Commands fetched
    /// before still count in it, as in other controllers, because hosts are written to cope with that.
    pub(super) const fn restart(&mut self, now: Instant) {
        let interval =
            if self.timeout.ns == 0 { self.idle_host_timeout } else { Some(self.timeout) };
        self.deadline = match interval {
            Some(interval) => now.after(interval),
            None => Instant::NEVER,
        };
    }

    /// Deactivates the timer until it is restarted; the timeout is kept.
    pub(super) const fn suspend(&mut self) {
        self.deadline = Instant::NEVER;
        self.has_activity = false;
    }

    /// Whether an interval has passed without activity; reported once.
    pub(super) fn take_expiration(&mut self, now: Instant) -> bool {
        if self.deadline == Instant::NEVER || now < self.deadline {
            return false;
        }
        if core::mem::take(&mut self.has_activity) {
            self.restart(now);
            return false;
        }
        self.deadline = Instant::NEVER;
        true
    }

    /// Time of the next check.
    pub(super) const fn wake_at(&self) -> Instant {
        self.deadline
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};
    use tenmil_wire::Status;

    use super::{ControllerConfig, KeepAlive};

    const fn instant_at_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    fn keep_alive_timer(timeout_ms: u32) -> KeepAlive {
        let mut timer = KeepAlive::new(&ControllerConfig::default());
        timer.set_timeout(instant_at_ms(0), timeout_ms).unwrap();
        timer
    }

    #[test]
    fn keep_alive_timeout_is_reported_once_at_the_end_of_an_interval() {
        let mut timer = keep_alive_timer(1000);
        assert!(!timer.take_expiration(instant_at_ms(999)));
        assert!(timer.take_expiration(instant_at_ms(1000)));
        assert!(!timer.take_expiration(instant_at_ms(5000)));
    }

    #[test]
    fn command_extends_keep_alive_to_the_end_of_the_next_interval() {
        for fetched_at in [1, 500, 999] {
            let mut timer = keep_alive_timer(1000);
            assert!(!timer.take_expiration(instant_at_ms(fetched_at)));
            timer.note_activity();
            assert!(!timer.take_expiration(instant_at_ms(1000)), "something has come");
            assert_eq!(timer.wake_at(), instant_at_ms(2000));
            assert!(!timer.take_expiration(instant_at_ms(1999)));
            assert!(
                timer.take_expiration(instant_at_ms(2000)),
                "nothing has come since {fetched_at} ms"
            );
        }
    }

    /// Behavior of Linux 5.13 to 6.4: it checks every half timeout whether a command has completed, and
    /// sends Keep Alive if not.
    #[test]
    fn io_replaces_a_keep_alive_command() {
        let mut timer = keep_alive_timer(1000);
        timer.note_activity();
        timer.restart(instant_at_ms(0));
        // The completion of that command is seen at 500, so nothing is sent before 1000.
        assert!(!timer.take_expiration(instant_at_ms(1000)));
        timer.restart(instant_at_ms(1000));
        assert!(!timer.take_expiration(instant_at_ms(1999)));
        assert!(timer.take_expiration(instant_at_ms(2000)));
    }

    #[test]
    fn keep_alive_command_restarts_the_interval() {
        let mut timer = keep_alive_timer(1000);
        assert!(!timer.take_expiration(instant_at_ms(900)));
        timer.restart(instant_at_ms(900));
        assert!(!timer.take_expiration(instant_at_ms(1899)));
        assert!(timer.take_expiration(instant_at_ms(1900)));
    }

    #[test]
    fn suspended_keep_alive_timer_has_its_full_timeout_after_restart() {
        let mut timer = keep_alive_timer(1000);
        timer.note_activity();
        timer.suspend();
        assert_eq!((timer.wake_at(), timer.timeout_ms()), (Instant::NEVER, 1000));
        assert!(!timer.take_expiration(instant_at_ms(9000)));
        timer.restart(instant_at_ms(9000));
        assert!(!timer.take_expiration(instant_at_ms(9999)));
        assert!(timer.take_expiration(instant_at_ms(10_000)), "what was heard before is forgotten");
    }

    #[test]
    fn keep_alive_timeout_is_rounded_up_to_the_granularity() {
        for (requested, got) in [(0, 0), (1, 100), (100, 100), (101, 200), (120_000, 120_000)] {
            assert_eq!(keep_alive_timer(requested).timeout_ms(), got);
        }
        assert_eq!(keep_alive_timer(0).wake_at(), Instant::NEVER, "zero is off");
    }

    #[test]
    fn keep_alive_timeout_that_overflows_is_rejected() {
        let mut timer = keep_alive_timer(500);
        assert_eq!(
            timer.set_timeout(instant_at_ms(0), u32::MAX),
            Err(Status::KEEP_ALIVE_TIMEOUT_INVALID)
        );
        assert_eq!(timer.timeout_ms(), 500);
    }

    #[test]
    fn keep_alive_timeout_above_the_maximum_is_rejected() {
        let keep_alive_max = Span::from_secs(600);
        let config = ControllerConfig { keep_alive_max, ..ControllerConfig::default() };
        let mut timer = KeepAlive::new(&config);
        timer.set_timeout(instant_at_ms(0), 600_000).unwrap();
        assert_eq!(
            timer.set_timeout(instant_at_ms(9), 600_001),
            Err(Status::KEEP_ALIVE_TIMEOUT_INVALID)
        );
        assert_eq!((timer.timeout_ms(), timer.wake_at()), (600_000, instant_at_ms(600_000)));
    }

    #[test]
    fn zero_keep_alive_timeout_uses_the_maximum() {
        let idle_host_timeout = Some(Span::from_secs(600));
        let config = ControllerConfig { idle_host_timeout, ..ControllerConfig::default() };
        let mut timer = KeepAlive::new(&config);
        timer.set_timeout(instant_at_ms(0), 0).unwrap();
        timer.note_activity();
        assert!(!timer.take_expiration(instant_at_ms(600_000)), "something has come");
        assert_eq!(timer.timeout_ms(), 0, "the host reads the value that it has set");
        assert!(!timer.take_expiration(instant_at_ms(1_199_999)));
        assert!(timer.take_expiration(instant_at_ms(1_200_000)));
    }

    #[test]
    fn keep_alive_granularity_is_in_100_ms_units() {
        let keep_alive_granularity = Span::from_secs(1);
        let config = ControllerConfig { keep_alive_granularity, ..ControllerConfig::default() };
        assert_eq!(KeepAlive::new(&config).granularity_100ms(), 10);
    }
}
