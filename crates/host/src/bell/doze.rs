//! How one of many for whom a sleeper sleeps is left alone until somebody rings for it.
//!
//! A reactor with a thousand threads wakes for one of them, and should not have to look at the others.
//! So each may doze: it has been looked at once more after an announcement, nothing was there, and
//! from then on nobody looks at it before it was rung for. Whoever has something for it says so in
//! two words: that it was rung for, and that there is such a one.
//!
//! ```text
//!   who rings                              who sleeps
//!   ---------                              ----------
//!   store the message                      begin: is_dozing = true
//!   barrier, light half                    announce: asleep = true
//!   load is_dozing; if true:               announce: barrier, heavy half
//!       is_rung = true, is_called = true   look for messages; if any, end: is_dozing = false
//!       barrier, light half                load is_called; if set, cancel
//!   load asleep; if true, wake             block
//!                                          each turn: is_called? who of those that doze was rung for?
//! ```
//!
//! It is the handshake twice over. Either the first load sees that the other dozes, or the message is
//! seen by the look that follows the announcement. And either the second load sees that the sleeper
//! sleeps, or the call is seen before it does, or in a turn, if it is awake. Calls for nobody harm
//! nobody.

use super::sync::{AtomicBool, Ordering};

/// The words of one who may doze. Its sleeper begins and ends it; those with a
/// [`Bell`](crate::Bell) ring for it. It begins awake.
#[derive(Debug, Default)]
pub struct Doze {
    is_dozing: AtomicBool,
    is_rung: AtomicBool,
}

impl Doze {
    /// It dozes, or is about to: to be called before the announcement after which it is looked at for
    /// the last time.
    pub fn begin(&self) {
        // What somebody rang for whose ring is forgotten here can be seen after the announcement.
        self.is_rung.store(false, Ordering::Relaxed);
        self.is_dozing.store(true, Ordering::Relaxed);
    }

    /// It is looked at again. A ring that saw it doze may still come, and calls for nobody.
    pub fn end(&self) {
        self.is_dozing.store(false, Ordering::Relaxed);
    }

    /// Whether it dozes.
    #[inline]
    pub fn is_dozing(&self) -> bool {
        self.is_dozing.load(Ordering::Relaxed)
    }

    /// Whether somebody has rung for it since it began.
    pub fn is_rung(&self) -> bool {
        self.is_rung.load(Ordering::Acquire)
    }

    pub(super) fn rung(&self) {
        self.is_rung.store(true, Ordering::Release);
    }
}
