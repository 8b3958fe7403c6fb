//! Stream of a connection, as hyper uses it.
//!
//! File descriptors that come with the bytes of a request (`SCM_RIGHTS`) are put where the method finds
//! them. A client that receives nothing for a while is disconnected.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Sleep;

use super::admission::ConnectionState;
use super::watch_descriptor;

/// Stream of a connection.
pub(super) struct ControlStream {
    socket: AsyncFd<ControlSocket>,
    state: Rc<ConnectionState>,
    /// Time limit of a send that has made no progress.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// Non-blocking socket.
pub(super) enum ControlSocket {
    Local(LocalConnection),
    Tcp(TcpStream),
}

/// Largest number of file descriptors per receive call.
const FILES_MAX: usize = 1;
/// Largest number of bytes per receive call.
const READ_LEN: usize = 8 << 10;
/// Time limit for unsent bytes without progress.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

impl ControlStream {
    /// Registers the socket with the runtime.
    pub(super) fn new(socket: ControlSocket, state: Rc<ConnectionState>) -> io::Result<Self> {
        Ok(Self {
            socket: watch_descriptor(socket, Interest::READABLE | Interest::WRITABLE)?,
            state,
            stalled: None,
        })
    }

    /// Receives into `bytes`. `None` if nothing is available.
    fn receive(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        match self.socket.get_ref() {
            ControlSocket::Local(connection) => {
                let mut files = Vec::new();
                let received = connection.receive_files(bytes, &mut files, FILES_MAX)?;
                files.into_iter().for_each(|file| self.state.passed.store_fd(file));
                Ok(match received {
                    RecvResult::Bytes(count) => Some(count),
                    RecvResult::Eof => Some(0),
                    RecvResult::WouldBlock => None,
                })
            }
            ControlSocket::Tcp(stream) => without_blocking(|| (&*stream).read(bytes)),
        }
    }

    /// Waits for the time limit of a send that cannot proceed.
    fn poll_stall(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(SEND_TIMEOUT)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl ControlSocket {
    /// Sends what fits. `None` if nothing does.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Local(connection) => Ok(Some(connection.send(bytes)?).filter(|sent| *sent > 0)),
            Self::Tcp(stream) => without_blocking(|| (&*stream).write(bytes)),
        }
    }
}

fn without_blocking(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        return match call() {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
    }
}

impl Read for ControlStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_LEN];
        let room = into.remaining().min(READ_LEN);
        loop {
            let mut readable = ready!(self.socket.poll_read_ready(context))?;
            match self.receive(&mut bytes[..room])? {
                Some(count) => {
                    into.put_slice(&bytes[..count]);
                    return Poll::Ready(Ok(()));
                }
                None => readable.clear_ready(),
            }
        }
    }
}

impl Write for ControlStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            let Poll::Ready(writable) = this.socket.poll_write_ready(context) else {
                return this.poll_stall(context);
            };
            let mut writable = writable?;
            match this.socket.get_ref().send(bytes)? {
                Some(count) => {
                    this.stalled = None;
                    return Poll::Ready(Ok(count));
                }
                None => writable.clear_ready(),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match self.socket.get_ref() {
            ControlSocket::Local(connection) => connection.shutdown_write(),
            ControlSocket::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
        })
    }
}

impl AsRawFd for ControlSocket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Local(connection) => connection.as_fd().as_raw_fd(),
            Self::Tcp(stream) => stream.as_raw_fd(),
        }
    }
}
