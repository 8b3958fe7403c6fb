//! Connected socket as plain bytes, for what precedes its stream: a handshake on a thread of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::local_socket::RecvResult;
use crate::socket_stream::name_of_peer;

/// Connected non-blocking socket before it becomes a stream.
#[derive(Debug)]
pub struct HandshakeSocket {
    socket: OwnedFd,
    peer: String,
}

impl HandshakeSocket {
    /// Takes over a connected socket, and makes it non-blocking.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let peer = name_of_peer(socket.as_fd());
        Ok(Self { socket, peer })
    }

    /// Name of the peer for messages: `127.0.0.1:4711`, or its process identifier.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// First byte that has not been received, which stays in the socket. `None`: nothing has arrived.
    ///
    /// # Errors
    ///
    /// The error of the system call, or `UnexpectedEof` if the peer has closed.
    pub fn peek_byte(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        match self.receive_with(&mut byte, RecvFlags::PEEK)? {
            RecvResult::Bytes(_) => Ok(Some(byte[0])),
            RecvResult::WouldBlock => Ok(None),
            RecvResult::Eof => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Receives what is available.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<RecvResult> {
        self.receive_with(into, RecvFlags::empty())
    }

    fn receive_with(&self, into: &mut [u8], flags: RecvFlags) -> io::Result<RecvResult> {
        loop {
            let found = rustix::net::recv(&self.socket, &mut *into, flags | RecvFlags::DONTWAIT);
            return match found.map(|(count, _)| count) {
                Ok(0) | Err(Errno::CONNRESET) => Ok(RecvResult::Eof),
                Ok(count) => Ok(RecvResult::Bytes(count)),
                Err(Errno::AGAIN) => Ok(RecvResult::WouldBlock),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
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
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            return match rustix::net::send(&self.socket, bytes, flags) {
                Err(Errno::AGAIN) => Ok(0),
                Err(Errno::INTR) => continue,
                sent => sent.map_err(io::Error::from),
            };
        }
    }

    /// Shuts the write side down, so that the peer sees the end after the bytes that were sent.
    pub fn shutdown_write(&self) {
        // Fails if the peer has closed already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }
}

impl AsFd for HandshakeSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<HandshakeSocket> for OwnedFd {
    fn from(socket: HandshakeSocket) -> Self {
        socket.socket
    }
}

#[cfg(test)]
mod tests {
    use super::super::loopback_pair;
    use super::HandshakeSocket;
    use crate::local_socket::RecvResult;

    #[test]
    fn peeked_byte_is_still_received() {
        let [one, other] = loopback_pair().unwrap().map(|end| HandshakeSocket::new(end).unwrap());
        assert_eq!(other.peek_byte().unwrap(), None);
        assert_eq!(one.send(b"\x16abc").unwrap(), 4);
        assert_eq!(other.peek_byte().unwrap(), Some(0x16));
        let mut into = [0; 8];
        assert_eq!(other.receive(&mut into).unwrap(), RecvResult::Bytes(4));
        assert_eq!(other.receive(&mut into).unwrap(), RecvResult::WouldBlock);
        one.shutdown_write();
        assert_eq!(other.receive(&mut into).unwrap(), RecvResult::Eof);
        assert!(other.peek_byte().is_err());
    }
}
