//! One-shot channel: one value, received by a future, by polling, or by a blocked OS thread.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Sending end. Dropping it without a value completes the receiver with none.
pub struct OneshotSender<T>(Arc<Oneshot<T>>);

/// Receiving end. It may be dropped; the value is then dropped too.
pub struct OneshotReceiver<T>(Arc<Oneshot<T>>);

struct Oneshot<T> {
    inner: Mutex<SharedState<T>>,
    completed: Condvar,
}

struct SharedState<T> {
    state: State<T>,
    waker: Option<Waker>,
}

enum State<T> {
    AwaitingValue,
    Sent(T),
    /// The sender was dropped without a value, or the value has been taken.
    Closed,
}

/// Creates both ends.
pub fn oneshot<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let inner = Mutex::new(SharedState { state: State::AwaitingValue, waker: None });
    let channel = Arc::new(Oneshot { inner, completed: Condvar::new() });
    (OneshotSender(Arc::clone(&channel)), OneshotReceiver(channel))
}

impl<T> OneshotSender<T> {
    /// Completes the receiver with `value`.
    pub fn send(self, value: T) {
        self.0.complete(State::Sent(value));
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        self.0.complete(State::Closed);
    }
}

impl<T> OneshotReceiver<T> {
    /// Receiver that is complete already.
    pub fn already_complete(value: T) -> Self {
        let (sender, receiver) = oneshot();
        sender.send(value);
        receiver
    }

    /// Whether the value was sent, or the sender was dropped.
    pub fn is_complete(&self) -> bool {
        !matches!(self.0.lock().state, State::AwaitingValue)
    }

    /// Takes the value without waiting. None if the sender was dropped without a value, or the value
    /// has been taken.
    pub fn try_take(&self) -> Poll<Option<T>> {
        self.0.lock().take_value()
    }

    /// Blocks the calling OS thread until the channel is complete. None as for
    /// [`try_take`](Self::try_take).
    pub fn wait(&self) -> Option<T> {
        let mut inner = self.0.lock();
        loop {
            if let Poll::Ready(value) = inner.take_value() {
                return value;
            }
            inner = self.0.completed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Oneshot<T> {
    fn lock(&self) -> MutexGuard<'_, SharedState<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the final state. Only the first call has an effect.
    fn complete(&self, end: State<T>) {
        let mut inner = self.lock();
        if !matches!(inner.state, State::AwaitingValue) {
            return;
        }
        inner.state = end;
        let waker = inner.waker.take();
        drop(inner);
        self.completed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> SharedState<T> {
    fn take_value(&mut self) -> Poll<Option<T>> {
        match std::mem::replace(&mut self.state, State::Closed) {
            State::AwaitingValue => {
                self.state = State::AwaitingValue;
                Poll::Pending
            }
            State::Sent(value) => Poll::Ready(Some(value)),
            State::Closed => Poll::Ready(None),
        }
    }
}

impl<T> Future for OneshotReceiver<T> {
    /// None as for [`try_take`](OneshotReceiver::try_take).
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut inner = self.0.lock();
        let polled = inner.take_value();
        let old = match polled {
            Poll::Ready(_) => inner.waker.take(),
            Poll::Pending => inner.waker.replace(context.waker().clone()),
        };
        // The drop of a foreign waker may run any code, so it does not run under the lock.
        drop(inner);
        drop(old);
        polled
    }
}

impl<T> fmt::Debug for OneshotSender<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("OneshotSender").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for OneshotReceiver<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_complete = self.is_complete();
        out.debug_struct("OneshotReceiver").field("is_complete", &is_complete).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use super::{OneshotReceiver, oneshot};

    /// Counts its wake-ups.
    #[derive(Default)]
    struct WakeCounter(AtomicUsize);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn value_is_taken_once() {
        let (sender, receiver) = oneshot();
        assert!(!receiver.is_complete() && receiver.try_take().is_pending());
        sender.send(7);
        assert!(receiver.is_complete());
        assert_eq!(receiver.try_take(), Poll::Ready(Some(7)));
        assert_eq!(receiver.try_take(), Poll::Ready(None));
        assert_eq!(OneshotReceiver::already_complete(8).wait(), Some(8));
    }

    #[test]
    fn dropped_sender_completes_the_receiver() {
        let (sender, receiver) = oneshot::<u8>();
        drop(sender);
        assert!(receiver.is_complete());
        assert_eq!((receiver.try_take(), receiver.wait()), (Poll::Ready(None), None));
    }

    #[test]
    fn only_the_last_registered_waker_is_woken() {
        let (sender, receiver) = oneshot();
        let counters = [Arc::<WakeCounter>::default(), Arc::default()];
        let mut receiver = pin!(receiver);
        for counter in &counters {
            let waker = Waker::from(Arc::clone(counter));
            assert!(receiver.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        sender.send(7);
        let counts = counters.each_ref().map(|counter| counter.0.load(Ordering::Relaxed));
        assert_eq!(counts, [0, 1]);
        let polled = receiver.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(polled, Poll::Ready(Some(7)));
        assert_eq!(counters.map(|counter| Arc::strong_count(&counter)), [1, 1]);
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test may start a thread")]
    fn blocked_thread_receives_the_value() {
        let (sender, receiver) = oneshot();
        let waiting = std::thread::spawn(move || receiver.wait());
        sender.send(7);
        assert_eq!(waiting.join().unwrap(), Some(7));
    }
}
