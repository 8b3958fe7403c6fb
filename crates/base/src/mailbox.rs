//! Mailbox for rare messages to a thread that polls.
//!
//! ```text
//!   sender     lock ── change the contents ── pending = true ── unlock ── wake
//!   receiver   pending? (one load per poll) ── lock ── pending = false ── take the contents ── unlock
//! ```
//!
//! The contents are any type that accumulates messages until the receiver takes them: a list, a bit
//! mask, one field per kind of message. A receiver that sleeps checks [`Mailbox::is_pending`] after it
//! has announced its sleep, as [`Wake`] requires.

use std::fmt;
use std::sync::{Arc, PoisonError};

use super::Wake;
use super::sync::{AtomicBool, Mutex, MutexGuard, Ordering};

/// Messages from any thread to one that polls.
pub struct Mailbox<T> {
    /// The contents were changed since they were last received. Stored under the lock.
    is_pending: AtomicBool,
    contents: Mutex<T>,
    /// Waker of the receiver.
    waker: Mutex<Option<SharedWaker>>,
}

/// Waker that any thread may use.
pub type SharedWaker = Arc<dyn Wake + Send + Sync>;

impl<T> Mailbox<T> {
    /// Mailbox with nothing pending and no waker.
    pub fn new(contents: T) -> Self {
        let (is_pending, waker) = (AtomicBool::new(false), Mutex::new(None));
        Self { is_pending, contents: Mutex::new(contents), waker }
    }

    /// Sets the waker of the receiver, and wakes it if a message is pending already.
    pub fn set_waker(&self, waker: SharedWaker) {
        *lock_ignoring_poison(&self.waker) = Some(Arc::clone(&waker));
        if self.is_pending() {
            waker.wake();
        }
    }

    /// Changes the contents, and wakes the receiver.
    pub fn send(&self, change: impl FnOnce(&mut T)) {
        let mut contents = self.lock_contents();
        change(&mut contents);
        // Pairs with the load in `is_pending`.
        self.is_pending.store(true, Ordering::Release);
        drop(contents);
        // Without a lock: the waker may run any code.
        let waker = lock_ignoring_poison(&self.waker).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether a message is pending.
    #[inline]
    pub fn is_pending(&self) -> bool {
        // Pairs with the store in `send`: what the sender stored before is visible, also outside of
        // the contents.
        self.is_pending.load(Ordering::Acquire)
    }

    /// Passes the contents to `take` if a message is pending; otherwise it costs one load.
    #[inline]
    pub fn receive<R>(&self, take_pending: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.is_pending().then(|| {
            let mut contents = self.lock_contents();
            // Under the lock: this clears no flag of a message that `take` does not see.
            self.is_pending.store(false, Ordering::Relaxed);
            take_pending(&mut contents)
        })
    }

    /// Takes the contents if a message is pending, and leaves the default.
    #[inline]
    pub fn take(&self) -> Option<T>
    where
        T: Default,
    {
        self.receive(std::mem::take)
    }

    /// The contents, for access that sends and receives nothing.
    pub fn lock_contents(&self) -> MutexGuard<'_, T> {
        lock_ignoring_poison(&self.contents)
    }
}

fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Default> Default for Mailbox<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for Mailbox<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let contents = self.lock_contents();
        out.debug_struct("Mailbox").field("contents", &*contents).finish_non_exhaustive()
    }
}
