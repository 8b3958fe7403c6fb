//! Connector interface: opens transport connections without blocking.

use tenmil_base::{Instant, Stream, StreamError, WakeSource};

/// Opens streams to one peer.
pub trait Connector: Send {
    /// Starts to open a stream, which has to be open by `until`.
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect>;

    /// Name of the peer for messages.
    fn peer(&self) -> String;
}

/// A connect in progress. Dropping it cancels the connect.
pub trait PendingConnect: Send {
    /// The stream or the error; `None` while the connect is in progress. Not called again after a result.
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>>;

    /// Wake source for the thread that waits for it. Without one, it is polled every few milliseconds.
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }
}
