//! File descriptor attached to a request.
//!
//! Volume data are not sent as JSON. A client attaches one end of a stream to its request
//! (`SCM_RIGHTS`), which the next method that needs one consumes. A connection holds at most one
//! descriptor; further ones are closed, and so is one that was not consumed when the connection
//! ends.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

/// Holder of the descriptor until a method consumes it.
#[derive(Debug, Default)]
pub struct PassedFd(RefCell<Option<OwnedFd>>);

impl PassedFd {
    /// Stores a received descriptor, closing a previous one.
    pub(crate) fn store_fd(&self, file: OwnedFd) {
        self.0.replace(Some(file));
    }

    /// Removes the descriptor.
    pub(crate) fn take_fd(&self) -> Option<OwnedFd> {
        self.0.take()
    }
}
