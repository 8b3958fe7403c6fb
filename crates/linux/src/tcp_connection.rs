//! TCP connection of a client that waits with a time limit, as [`crate::local_socket::LocalConnection`]
//! is one over a Unix socket. The data path has its own, [`crate::socket`].

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::PollFlags;
use tenmil_base::Span;

use crate::local_socket::{RecvResult, wait_for_poll_flags};

/// Connected TCP socket that does not block.
#[derive(Debug)]
pub struct TcpConnection {
    stream: TcpStream,
}

impl TcpConnection {
    /// Connects to `address`. Waits up to `time_limit`; then the error is `TimedOut`.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn connect(address: SocketAddr, time_limit: Span) -> io::Result<Self> {
        let time_limit = Duration::from_nanos(time_limit.ns.max(1_000_000));
        let stream = TcpStream::connect_timeout(&address, time_limit)?;
        // A request is one send, which must not wait for an acknowledgment.
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream })
    }

    /// Receives what is available, up to the length of `into`.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<RecvResult> {
        loop {
            return match (&self.stream).read(into) {
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
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            return match (&self.stream).write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                sent => sent,
            };
        }
    }

    /// Waits up to `timeout` until data can be received. Returns whether it can.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn wait_to_receive(&self, timeout: Span) -> io::Result<bool> {
        wait_for_poll_flags(self.stream.as_fd(), PollFlags::IN, timeout)
    }

    /// Waits up to `timeout` until data can be sent, or the peer has closed. Returns whether so.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn wait_to_send(&self, timeout: Span) -> io::Result<bool> {
        wait_for_poll_flags(self.stream.as_fd(), PollFlags::OUT, timeout)
    }
}
