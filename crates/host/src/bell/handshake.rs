//! What keeps a wake-up from being lost: one flag, and a barrier of two halves.
//!
//! ```text
//!   who sends                          who sleeps
//!   ---------                          ----------
//!   store the message                  announce: asleep = true
//!   barrier, light half                announce: barrier, heavy half
//!   load asleep; if true, wake         look for messages; if none, block
//! ```
//!
//! Either the load comes late enough to see the flag, or the message was stored early enough to be
//! seen. Both may happen; then a wake-up is one too many and harms nobody.

use super::sync::{AtomicBool, Barrier, Ordering};

/// The flag of one sleeper.
#[derive(Debug)]
pub(crate) struct Handshake {
    asleep: AtomicBool,
    barrier: Barrier,
}

impl Handshake {
    pub(crate) fn new(barrier: Barrier) -> Self {
        Self { asleep: AtomicBool::new(false), barrier }
    }

    /// The sleeper says that it is going to block. What was stored before a
    /// [`claim`](Self::claim) that returned false can be seen once this has returned true. If it
    /// returns false, the kernel refused the barrier and a claim may be missed.
    pub(crate) fn announce(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        self.barrier.heavy()
    }

    /// The sleeper says that it is awake. A claim that was made before is still followed by its
    /// wake-up.
    pub(crate) fn withdraw(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Asked after a store that the sleeper should see: whether the caller has to wake it. Of those
    /// who ask while it sleeps, one is told so.
    #[inline]
    pub(crate) fn claim(&self) -> bool {
        self.barrier.light();
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel)
    }
}
