//! Sleep and wake-up interfaces.
//!
//! A thread may sleep once every source of work has declared a wake source. The protocol is always
//! the same: the sleeper announces its sleep, checks everything once more, and only then sleeps; a
//! producer stores its work and then checks the announcement. Each side stores before it loads, so
//! at least one of the two sees the other.

use std::os::fd::BorrowedFd;

/// Wakes a thread that may be asleep after a store that it must see.
pub trait Wake {
    /// Wakes the other side; call after the store. Costs one load while it is awake: it is on the
    /// I/O path.
    fn wake(&self);
}

/// The other side never sleeps: it polls continuously.
impl Wake for () {
    #[inline]
    fn wake(&self) {}
}

/// Wake source of a thread that waits for an I/O channel or a stream.
#[derive(Clone, Copy, Debug)]
pub enum WakeSource<'a> {
    /// None. A thread must not sleep while such a channel has outstanding requests.
    None,
    /// A deadline: everything outstanding has completed by
    /// [`IoChannel::wake_at`](crate::IoChannel::wake_at).
    Deadline,
    /// This descriptor becomes readable; the deadline applies as well.
    Descriptor(BorrowedFd<'a>),
}

/// Interrupt vector, as used by the host that sleeps on it.
pub trait InterruptVector: Send {
    /// Descriptor that becomes readable when the device signals. Constant during the vector's life.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Clears old signals and unmasks the vector. What the device stored before this returned is
    /// visible to a following check; for later stores it signals. False if that cannot be
    /// guaranteed now: then the host must keep polling.
    fn unmask(&mut self) -> bool;

    /// Masks the vector while the host polls.
    fn mask(&mut self);
}
