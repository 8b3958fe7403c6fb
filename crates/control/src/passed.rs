//! A descriptor that came beside a request.
//!
//! Bytes of a volume do not go through lines of JSON. Whoever wants them sends one end of a stream with
//! the bytes of his request, and it goes to the first method behind that takes one. A connection keeps
//! one at a time; the rest are closed, and so is one that nobody has taken when the connection ends.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

/// Where it lies until a method takes it.
#[derive(Debug, Default)]
pub struct Passed(RefCell<Option<OwnedFd>>);

impl Passed {
    /// It has come.
    pub(crate) fn put(&self, file: OwnedFd) {
        self.0.replace(Some(file));
    }

    /// It goes to whoever asks.
    pub(crate) fn take(&self) -> Option<OwnedFd> {
        self.0.take()
    }
}
