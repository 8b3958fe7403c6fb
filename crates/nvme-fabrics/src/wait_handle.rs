//! Wait handle interface: one wake source for a thread whose streams change.

use tenmil_base::{SharedWaker, WakeSource};

/// What the thread of a queue waits on.
pub trait WaitHandle: Send {
    /// The wake source of the thread. It does not change while the queue exists.
    fn wake_source(&self) -> WakeSource<'_>;

    /// Adds the wake source of the current stream, in place of the previous one. Returns false if that is
    /// not possible: then the thread must not sleep.
    fn watch(&mut self, stream: WakeSource<'_>) -> bool;

    /// Waker for other threads.
    fn waker(&self) -> SharedWaker;

    /// Clears past wake-ups. A later one wakes the thread.
    fn clear(&mut self);
}
