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

use super::doze::Doze;
use super::sync::{AtomicBool, Barrier, Ordering};

/// The flag of one sleeper.
#[derive(Debug)]
pub(crate) struct Handshake {
    asleep: AtomicBool,
    /// Somebody was rung for who dozes: see `doze.rs`.
    is_called: AtomicBool,
    barrier: Barrier,
}

impl Handshake {
    pub(crate) fn new(barrier: Barrier) -> Self {
        let (asleep, is_called) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { asleep, is_called, barrier }
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
        self.is_claimed()
    }

    /// As [`claim`](Self::claim), after a store that is for this one of those whom it sleeps for.
    #[inline]
    pub(crate) fn claim_for(&self, doze: &Doze) -> bool {
        self.barrier.light();
        if doze.is_dozing() {
            self.call(doze);
        }
        self.is_claimed()
    }

    #[inline]
    fn is_claimed(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel)
    }

    #[cold]
    fn call(&self, doze: &Doze) {
        doze.rung();
        // An exchange and no store: whoever takes the last of several calls away has to see for whom
        // each of them was.
        self.is_called.swap(true, Ordering::Release);
        self.barrier.light();
    }

    /// Whether somebody was rung for who dozes, as far as can be seen.
    #[inline]
    pub(crate) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Relaxed)
    }

    /// Whether somebody was rung for since this was last asked; who, can be seen afterwards.
    pub(crate) fn take_call(&self) -> bool {
        self.is_called.swap(false, Ordering::Acquire)
    }
}
