//! Connector interface: opens transport connections without blocking.

use tenmil_base::{Instant, Stream, StreamError, WakeSource};
use tenmil_nvme_auth::TlsPsk;

/// Opens streams to one peer.
pub trait Connector: Send {
    /// Starts to open a stream, which has to be open by `until`.
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect>;

    /// Sets the keys that an authentication has generated, most preferred first: with keys, the streams that
    /// are begun from now on are secure channels with one of them; without, they are plaintext. Returns
    /// false if this connector makes no secure channels with generated keys.
    fn set_generated_keys(&mut self, keys: &[TlsPsk]) -> bool {
        let _ = keys;
        false
    }

    /// Name of the peer for messages.
    fn peer(&self) -> String;
}

/// A connect in progress. Dropping it cancels the connect.
pub trait PendingConnect: Send {
    /// The stream or the error; `None` while the connect is in progress. Not called again after a result.
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>>;

    /// Deadline of a handshake over a stream that is open, in place of that of the connect; `None` if there
    /// is none in progress.
    fn handshake_deadline(&self) -> Option<Instant> {
        None
    }

    /// Wake source for the thread that waits for it. Without one, it is polled every few milliseconds.
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }
}
