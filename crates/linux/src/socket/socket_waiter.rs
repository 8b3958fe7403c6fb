//! Wake-up descriptor of one socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::poll_set::{Interest, PollSet};

/// Descriptor that is readable while its socket is ready for the awaited events.
///
/// Level-triggered; the events are changed only when they differ from the last time, so a
/// connection that repeatedly waits for the same costs no system call for that. A condition that
/// holds already ends the sleep at once.
#[derive(Debug)]
pub(super) struct SocketReadinessDescriptor {
    watch: PollSet,
    /// Awaited events; `None`: not even errors.
    interest: Option<Interest>,
}

/// Reported in any case: errors, and with them the zero-copy notifications of the error queue.
pub(super) const ERRORS: Interest = Interest { readable: false, writable: false };
/// Token of the socket in the poll set.
const SOCKET: u64 = 0;

impl SocketReadinessDescriptor {
    /// Creates a waiter that awaits nothing.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { watch: PollSet::new()?, interest: None })
    }

    /// Awaits `wanted` on `socket`, which is the same in every call. `None` removes the socket:
    /// otherwise hang-up and errors are reported even if not requested.
    #[inline]
    pub(super) fn set_awaited_events(
        &mut self,
        socket: BorrowedFd<'_>,
        wanted: Option<Interest>,
    ) -> io::Result<()> {
        if wanted == self.interest { Ok(()) } else { self.set_interest(socket, wanted) }
    }

    fn set_interest(&mut self, socket: BorrowedFd<'_>, wanted: Option<Interest>) -> io::Result<()> {
        match (self.interest, wanted) {
            (_, None) => self.watch.remove(socket)?,
            (None, Some(wanted)) => self.watch.add(socket, SOCKET, wanted)?,
            (Some(_), Some(wanted)) => self.watch.modify(socket, SOCKET, wanted)?,
        }
        self.interest = wanted;
        Ok(())
    }
}

impl AsFd for SocketReadinessDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}
