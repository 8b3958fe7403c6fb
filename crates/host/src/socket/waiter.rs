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
    /// What the watch waits for.
    interest: Interest,
}

pub(super) const NOTHING: Interest = Interest { readable: false, writable: false };
/// The one descriptor of the watch.
const SOCKET: u64 = 0;

impl Waiter {
    /// Waits for nothing yet.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { watch: Watch::new()?, interest: NOTHING })
    }

    /// Waits for `wanted` of `socket`, which is the same each time.
    #[inline]
    pub(super) fn wait_for(&mut self, socket: BorrowedFd<'_>, wanted: Interest) -> io::Result<()> {
        if wanted == self.interest { Ok(()) } else { self.change(socket, wanted) }
    }

    fn change(&mut self, socket: BorrowedFd<'_>, wanted: Interest) -> io::Result<()> {
        if wanted == NOTHING {
            // Out of the set altogether: an end and an error are reported unasked.
            self.watch.remove(socket)?;
        } else if self.interest == NOTHING {
            self.watch.add(socket, SOCKET, wanted)?;
        } else {
            self.watch.change(socket, SOCKET, wanted)?;
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
