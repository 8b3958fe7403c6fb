//! What somebody else will have done: awaited as a future, or waited for on a plain thread.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The side of whoever does it. One that is dropped before it is kept never will be, and says so.
pub(super) struct Promise<T>(Arc<Link<T>>);

/// The side of whoever waits. It may be dropped: then what comes is dropped too.
pub(super) struct Later<T>(Arc<Link<T>>);

struct Link<T> {
    desk: Mutex<Desk<T>>,
    over: Condvar,
}

struct Desk<T> {
    stage: Stage<T>,
    waker: Option<Waker>,
}

enum Stage<T> {
    Open,
    Kept(T),
    Broken,
}

/// Both sides.
pub(super) fn pair<T>() -> (Promise<T>, Later<T>) {
    let desk = Mutex::new(Desk { stage: Stage::Open, waker: None });
    let link = Arc::new(Link { desk, over: Condvar::new() });
    (Promise(Arc::clone(&link)), Later(link))
}

impl<T> Promise<T> {
    pub(super) fn keep(self, value: T) {
        self.0.end(Stage::Kept(value));
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.0.end(Stage::Broken);
    }
}

impl<T> Later<T> {
    /// What has come already.
    pub(super) fn of(value: T) -> Self {
        let (promise, later) = pair();
        promise.keep(value);
        later
    }

    /// Waits on an OS thread that has nothing else to do. None if the promise was broken.
    pub(super) fn wait(self) -> Option<T> {
        let mut desk = self.0.desk();
        loop {
            if let Poll::Ready(value) = desk.take() {
                return value;
            }
            desk = self.0.over.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Link<T> {
    fn desk(&self) -> MutexGuard<'_, Desk<T>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first end counts.
    fn end(&self, end: Stage<T>) {
        let mut desk = self.desk();
        if !matches!(desk.stage, Stage::Open) {
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

impl<T> Desk<T> {
    fn take(&mut self) -> Poll<Option<T>> {
        match std::mem::replace(&mut self.stage, Stage::Broken) {
            Stage::Open => {
                self.stage = Stage::Open;
                Poll::Pending
            }
            Stage::Kept(value) => Poll::Ready(Some(value)),
            Stage::Broken => Poll::Ready(None),
        }
    }
}

impl<T> Future for Later<T> {
    /// None if the promise was broken, or has been taken.
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut desk = self.0.desk();
        let polled = desk.take();
        let old = match polled {
            Poll::Ready(_) => desk.waker.take(),
            Poll::Pending => desk.waker.replace(context.waker().clone()),
        };
        // What a waker does when it goes is not known: not under the lock.
        drop(desk);
        drop(old);
        polled
    }
}

impl<T> fmt::Debug for Later<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_over = !matches!(self.0.desk().stage, Stage::Open);
        out.debug_struct("Later").field("is_over", &is_over).finish()
    }
}
