//! The words that the mailbox and the handshake of a sleeper are written in.
//!
//! Both are compiled twice. Here the words mean the real thing; in `model`, which exists in tests
//! only, a module of the same name gives them the types of a model checker, and the very same lines
//! are run in every order that the memory model allows.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) use crate::barrier::Barrier;
pub(crate) use crate::thread::give_way;

/// A cell whose contents are reached through a pointer that lives no longer than a call. The model
/// checker's cell has the same face, and notices when two threads are in it at once.
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// For writing.
    #[inline]
    pub(crate) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}
