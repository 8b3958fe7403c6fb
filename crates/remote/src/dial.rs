//! The seam of dialling: how a stream to the peer is opened, without anybody waiting for it.

use base::{Broken, Instant, Stream, WakeSource};

/// Opens streams to one peer.
pub trait Dial: Send {
    /// Begins to open a stream, which has to be open by `until`.
    fn dial(&mut self, now: Instant, until: Instant) -> Box<dyn Dialled>;

    /// Who is called, for people.
    fn peer(&self) -> String;
}

/// A stream that is being opened. To drop it is to give it up.
pub trait Dialled: Send {
    /// The stream, or why there is none; `None` as long as neither is known. Not asked again after
    /// either.
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, Broken>>;

    /// What wakes a thread that waits for it. Without one it is asked every few milliseconds.
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }
}
