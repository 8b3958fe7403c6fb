//! Synchronization primitives of the mailbox, the biased lock and the sleep/wake-up protocol.
//!
//! That code is compiled twice. Here the primitives are the real ones; in `loom_tests`, a module of
//! the same name supplies the types of the loom model checker, which runs the same source in every
//! order that the memory model permits.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use crate::asymmetric_barrier::AsymmetricBarrier;
pub(crate) use crate::named_thread::yield_cpu;

/// Cell that passes a pointer to its contents to a closure. The model checker's cell has the same
/// interface and detects concurrent access.
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Passes a pointer for writing to `body`.
    #[inline]
    pub(crate) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}
