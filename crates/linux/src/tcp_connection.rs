//! TCP connection of a client that waits with a time limit, as [`crate::local_socket::LocalConnection`]
//! is one over a Unix socket. The data path has its own, [`crate::socket`].

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::PollFlags;
use tenmil_base::Span;

use crate::local_socket::RecvResult;
use crate::stream_socket::{receive_available, send_available, wait_for_poll_flags};

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
        receive_available(&self.stream, into)
    }

    /// Sends as much of `bytes` as fits, and returns the number of bytes.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        send_available(&self.stream, bytes)
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
