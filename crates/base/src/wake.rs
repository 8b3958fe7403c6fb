//! The seams of sleeping: who is woken by what.
//!
//! A thread may sleep once everything it works for has said what will wake it. The handshake is the
//! same everywhere: the sleeper announces that it is about to sleep, looks at everything once more,
//! and only then sleeps; who has work for it stores the work and then looks whether it has
//! announced. Each side stores before it loads, so at least one of the two sees the other.

use std::os::fd::BorrowedFd;

/// Whoever may be asleep when something is stored for it to see.
pub trait Wake {
    /// To be called after the store. While nobody sleeps this costs one load: it is on the way of
    /// an I/O.
    fn wake(&self);
}

/// Nobody sleeps: the other side looks by itself, for ever.
impl Wake for () {
    #[inline]
    fn wake(&self) {}
}

/// What wakes a thread that waits for a backend.
#[derive(Clone, Copy, Debug)]
pub enum WakeSource<'a> {
    /// Nothing does. A thread must not sleep while such a backend owes an answer.
    Nothing,
    /// Time does: whatever the backend owes is there by [`Backend::wake_at`](crate::Backend::wake_at).
    Deadline,
    /// This descriptor becomes readable, and time does as well.
    Descriptor(BorrowedFd<'a>),
}

/// One interrupt vector, as the host sees it that sleeps on it.
pub trait Vector: Send {
    /// Becomes readable when the device signals. It stays the same for as long as the vector lives.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Takes old signals away and asks for the next one. What the device stored before this returned
    /// is there to be seen by a look that follows; for what it stores later it signals. False if
    /// that cannot be promised just now: then the host must go on looking by itself.
    fn unmask(&mut self) -> bool;

    /// Asks for no more signals, as long as the host looks by itself.
    fn mask(&mut self);
}
