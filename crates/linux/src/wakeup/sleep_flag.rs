//! Sleep flag: one flag and an asymmetric barrier that prevent lost wake-ups.
//!
//! ```text
//!   notifier                           sleeper
//!   --------                           -------
//!   store the message                  announce: asleep = true
//!   barrier, light half                announce: barrier, heavy half
//!   load asleep; if true, wake         check for messages; if none, block
//! ```
//!
//! Either the load sees the flag, or the check sees the message. Both may happen; then one wake-up
//! is superfluous and harmless.

use super::park_flag::ParkFlag;
use super::sync::{AsymmetricBarrier, AtomicBool, Ordering};

/// Sleep flag of one sleeper.
#[derive(Debug)]
pub(crate) struct SleepFlag {
    asleep: AtomicBool,
    /// A parked thread was notified: see `park_flag.rs`.
    has_parked_notify: AtomicBool,
    barrier: AsymmetricBarrier,
}

impl SleepFlag {
    pub(crate) fn new(barrier: AsymmetricBarrier) -> Self {
        let (asleep, is_called) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { asleep, has_parked_notify: is_called, barrier }
    }

    /// Announces that the sleeper is about to block.
    ///
    /// What was stored before a [`claim_wakeup`](Self::claim_wakeup) that returned false is visible
    /// once this has returned true. If this returns false, the kernel refused the barrier and a
    /// notification may be missed.
    pub(crate) fn announce(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        self.barrier.sleeper_barrier()
    }

    /// Marks the sleeper awake. A `claim_wakeup` that returned true before is still followed by its
    /// wake-up.
    pub(crate) fn cancel(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Whether the caller must wake the sleeper; called after a store that it must see. Of several
    /// callers during one sleep, at most one gets true.
    #[inline]
    pub(crate) fn claim_wakeup(&self) -> bool {
        self.barrier.notifier_barrier();
        self.claim_wakeup_after_barrier()
    }

    /// As [`claim_wakeup`](Self::claim_wakeup), after a store for one parked light thread.
    #[inline]
    pub(crate) fn notify_parked_and_claim_wakeup(&self, doze: &ParkFlag) -> bool {
        self.barrier.notifier_barrier();
        if doze.is_parked() {
            self.notify_parked(doze);
        }
        self.claim_wakeup_after_barrier()
    }

    #[inline]
    fn claim_wakeup_after_barrier(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel)
    }

    #[cold]
    fn notify_parked(&self, doze: &ParkFlag) {
        doze.set_notified();
        // An exchange, not a store: a reader that clears the last of several notifications must see
        // the flags that all of them set.
        self.has_parked_notify.swap(true, Ordering::Release);
        self.barrier.notifier_barrier();
    }

    /// Whether a parked thread was notified; relaxed, so possibly late.
    #[inline]
    pub(crate) fn has_notified_parked_thread(&self) -> bool {
        self.has_parked_notify.load(Ordering::Relaxed)
    }

    /// Clears the notification flag and returns it; which threads were notified is visible
    /// afterwards.
    pub(crate) fn clear_notified_parked_thread(&self) -> bool {
        self.has_parked_notify.swap(false, Ordering::Acquire)
    }
}
