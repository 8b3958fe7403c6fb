//! What a thread sleeps on for one socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::watch::{Interest, Watch};

/// A descriptor that is readable while its socket has what is waited for.
///
/// It is level-triggered, and what it waits for is changed only when it differs from the last time:
/// a connection that sleeps for the same thing again and again costs no system call for that. What
/// is there before the sleep ends it at once.
#[derive(Debug)]
pub(super) struct Waiter {
    watch: Watch,
    /// What the watch waits for; none: not even for errors.
    interest: Option<Interest>,
}

/// What is reported in any case: errors, and with them memory that was sent by reference and is
/// released.
pub(super) const ERRORS: Interest = Interest { readable: false, writable: false };
/// The one descriptor of the watch.
const SOCKET: u64 = 0;

impl Waiter {
    /// Waits for nothing yet.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { watch: Watch::new()?, interest: None })
    }

    /// Waits for `wanted` of `socket`, which is the same each time. For nothing at all if that is
    /// none: else an end and an error are reported unasked.
    #[inline]
    pub(super) fn wait_for(
        &mut self,
        socket: BorrowedFd<'_>,
        wanted: Option<Interest>,
    ) -> io::Result<()> {
        if wanted == self.interest { Ok(()) } else { self.change(socket, wanted) }
    }

    fn change(&mut self, socket: BorrowedFd<'_>, wanted: Option<Interest>) -> io::Result<()> {
        match (self.interest, wanted) {
            (_, None) => self.watch.remove(socket)?,
            (None, Some(wanted)) => self.watch.add(socket, SOCKET, wanted)?,
            (Some(_), Some(wanted)) => self.watch.change(socket, SOCKET, wanted)?,
        }
        self.interest = wanted;
        Ok(())
    }
}

impl AsFd for Waiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}
