//! The seam of sleeping: one thing to wait for, while streams come and go.

use std::sync::Arc;

use base::{Wake, WakeSource};

/// What the thread of a queue sleeps on.
pub trait Sleep: Send {
    /// What wakes the thread. Constant for as long as the queue lives.
    fn wake_source(&self) -> WakeSource<'_>;

    /// From now on it also wakes for what `stream` says, and for none of before. False if it cannot:
    /// then the thread must not sleep.
    fn watch(&mut self, stream: WakeSource<'_>) -> bool;

    /// What wakes it from another thread.
    fn bell(&self) -> Arc<dyn Wake + Send + Sync>;

    /// Takes away what has been rung so far. Whoever rings from now on wakes the thread.
    fn clear(&mut self);
}
