//! Calls of stream sockets that do not block: receive, send, and wait with a time limit.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tenmil_base::Span;

use crate::local_socket::RecvResult;

/// Receives what is available, up to the length of `into`. A reset connection is at its end.
pub(crate) fn receive_available(mut stream: impl Read, into: &mut [u8]) -> io::Result<RecvResult> {
    loop {
        return match stream.read(into) {
            Ok(0) => Ok(RecvResult::Eof),
            Ok(count) => Ok(RecvResult::Bytes(count)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => Ok(RecvResult::WouldBlock),
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::ConnectionReset => Ok(RecvResult::Eof),
                _ => Err(error),
            },
        };
    }
}

/// Sends as much of `bytes` as fits, and returns the number of bytes.
pub(crate) fn send_available(mut stream: impl Write, bytes: &[u8]) -> io::Result<usize> {
    loop {
        return match stream.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            sent => sent,
        };
    }
}

/// Waits up to `timeout` for one of `flags`. Returns whether one is set.
pub(crate) fn wait_for_poll_flags(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    timeout: Span,
) -> io::Result<bool> {
    let mut entries = [PollFd::new(&socket, flags)];
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(timeout.ns % 1_000_000_000).unwrap_or(0),
    };
    match poll(&mut entries, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        // Interrupted by a signal handler: a spurious return.
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
