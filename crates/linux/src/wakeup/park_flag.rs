//! Parking flag of a light thread: it is not polled until it is notified.
//!
//! A reactor with a thousand light threads that wakes for one of them should not poll the others.
//! Therefore each of them may park: after a final check that follows an announcement of the sleep
//! and finds nothing, it is skipped until it is notified. A notifier sets two flags: that this
//! thread was notified, and that some parked thread was.
//!
//! ```text
//!   notifier                               sleeper
//!   --------                               -------
//!   store the message                      begin: is_dozing = true
//!   barrier, light half                    announce: asleep = true
//!   load is_dozing; if true:               announce: barrier, heavy half
//!       is_rung = true, is_called = true   check for messages; if any, end: is_dozing = false
//!       barrier, light half                load is_called; if set, cancel
//!   load asleep; if true, wake             block
//!                                          each iteration: is_called? which parked threads were notified?
//! ```
//!
//! It is the sleep/wake-up protocol applied twice. Either the first load sees the thread parked, or
//! the message is seen by the check that follows the announcement. Either the second load sees the
//! sleeper asleep, or `is_called` is seen before it sleeps or, if it is awake, in an iteration. A
//! notification for a thread that is not parked is harmless.

use super::sync::{AtomicBool, Ordering};

/// Flags of one light thread that may park. Its reactor begins and ends parking; holders of a
/// [`Notifier`](crate::Notifier) notify it. Initially not parked.
#[derive(Debug, Default)]
pub struct ParkFlag {
    is_parked: AtomicBool,
    is_notified: AtomicBool,
}

impl ParkFlag {
    /// Marks the thread as parked. Call before the announcement that precedes its final check.
    pub fn mark_parked(&self) {
        // Work whose notification is erased here is visible to the check after the announcement.
        self.is_notified.store(false, Ordering::Relaxed);
        self.is_parked.store(true, Ordering::Relaxed);
    }

    /// Marks the thread as runnable. A notifier that saw it parked may still notify it, without
    /// effect.
    pub fn mark_runnable(&self) {
        self.is_parked.store(false, Ordering::Relaxed);
    }

    /// Whether the thread is parked.
    #[inline]
    pub fn is_parked(&self) -> bool {
        self.is_parked.load(Ordering::Relaxed)
    }

    /// Whether the thread was notified since it was parked.
    pub fn is_notified(&self) -> bool {
        self.is_notified.load(Ordering::Acquire)
    }

    pub(super) fn set_notified(&self) {
        self.is_notified.store(true, Ordering::Release);
    }
}
