//! Future of work in the thread pool of a runtime.

use std::pin::Pin;
use std::task::{Context, Poll};

use tenmil_base::Error;

use tenmil_base::{OneshotReceiver, oneshot};

/// Future of blocking work. If it is dropped, the result is dropped too.
#[must_use = "a future does nothing unless it is awaited"]
pub(super) struct PendingResult<T> {
    /// The work, for its error.
    what: String,
    later: OneshotReceiver<Result<T, Error>>,
}

impl<T> PendingResult<T> {
    pub(super) const fn new(what: String, later: OneshotReceiver<Result<T, Error>>) -> Self {
        Self { what, later }
    }

    /// Work that has failed already.
    pub(super) fn ready_error(error: Error) -> Self {
        let (promise, later) = oneshot();
        promise.send(Err(error));
        Self::new(String::new(), later)
    }
}

impl<T> Future for PendingResult<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = Pin::new(&mut self.later).poll(context);
        polled.map(|done| {
            done.unwrap_or_else(|| {
                let text = format!("{}: the thread that did it panicked", self.what);
                Err(Error::environment(text))
            })
        })
    }
}
