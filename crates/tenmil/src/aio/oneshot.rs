//! One-shot channel whose receiver is a future or blocks an OS thread.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Sending end. Dropping it without a value completes the receiver with none.
pub(super) struct OneshotSender<T>(Arc<Oneshot<T>>);

/// Receiving end. It may be dropped; the value is then dropped too.
pub(super) struct OneshotReceiver<T>(Arc<Oneshot<T>>);

struct Oneshot<T> {
    desk: Mutex<OneshotCell<T>>,
    over: Condvar,
}

struct OneshotCell<T> {
    stage: OneshotState<T>,
    waker: Option<Waker>,
}

enum OneshotState<T> {
    Open,
    Kept(T),
    Broken,
}

/// Creates both ends.
pub(super) fn pair<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let desk = Mutex::new(OneshotCell { stage: OneshotState::Open, waker: None });
    let link = Arc::new(Oneshot { desk, over: Condvar::new() });
    (OneshotSender(Arc::clone(&link)), OneshotReceiver(link))
}

impl<T> OneshotSender<T> {
    pub(super) fn keep(self, value: T) {
        self.0.end(OneshotState::Kept(value));
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        self.0.end(OneshotState::Broken);
    }
}

impl<T> OneshotReceiver<T> {
    /// Receiver that is complete already.
    pub(super) fn of(value: T) -> Self {
        let (promise, later) = pair();
        promise.keep(value);
        later
    }

    /// Blocks the calling OS thread. Returns none if the sender was dropped without a value.
    pub(super) fn wait(self) -> Option<T> {
        let mut desk = self.0.lock();
        loop {
            if let Poll::Ready(value) = desk.take() {
                return value;
            }
            desk = self.0.over.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Oneshot<T> {
    fn lock(&self) -> MutexGuard<'_, OneshotCell<T>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the final state. Only the first call has an effect.
    fn end(&self, end: OneshotState<T>) {
        let mut desk = self.lock();
        if !matches!(desk.stage, OneshotState::Open) {
            return;
        }
        desk.stage = end;
        let waker = desk.waker.take();
        drop(desk);
        self.over.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> OneshotCell<T> {
    fn take(&mut self) -> Poll<Option<T>> {
        match std::mem::replace(&mut self.stage, OneshotState::Broken) {
            OneshotState::Open => {
                self.stage = OneshotState::Open;
                Poll::Pending
            }
            OneshotState::Kept(value) => Poll::Ready(Some(value)),
            OneshotState::Broken => Poll::Ready(None),
        }
    }
}

impl<T> Future for OneshotReceiver<T> {
    /// None if the sender was dropped without a value, or the value has been taken.
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut desk = self.0.lock();
        let polled = desk.take();
        let old = match polled {
            Poll::Ready(_) => desk.waker.take(),
            Poll::Pending => desk.waker.replace(context.waker().clone()),
        };
        // The drop of a foreign waker may run any code, so it does not run under the lock.
        drop(desk);
        drop(old);
        polled
    }
}

impl<T> fmt::Debug for OneshotReceiver<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_over = !matches!(self.0.lock().stage, OneshotState::Open);
        out.debug_struct("Later").field("is_over", &is_over).finish()
    }
}
