//! Stream of a connection, as hyper uses it.
//!
//! File descriptors that come with the bytes of a request (`SCM_RIGHTS`) are put where the method finds
//! them. A client that receives nothing for a while is disconnected. With TLS, bytes pass through the
//! channel of the connection:
//!
//! ```text
//!   socket ──poll_receive──► TlsChannel ──poll_read───► hyper
//!   socket ◄──poll_send_all─ TlsChannel ◄──poll_write── hyper
//! ```
//!
//! A write is accepted only when everything before it has been sent, and no more than one record, so that
//! a connection with TLS holds no more than one without.

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
use crate::tls::TlsChannel;

/// Stream of a connection.
pub(super) struct ControlStream {
    socket: AsyncFd<ControlSocket>,
    tls: Option<Box<TlsChannel>>,
    state: Rc<ConnectionState>,
    /// Time limit of a send that has made no progress.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// Non-blocking socket.
pub(super) enum ControlSocket {
    Local(LocalConnection),
    Tcp(TcpStream),
}

/// Why a handshake has ended without a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandshakeEnd {
    /// The client sends HTTP without TLS.
    PlainHttp,
    /// It has failed.
    Failed,
}

/// Largest number of file descriptors per receive call.
const FILES_MAX: usize = 1;
/// Largest number of bytes per receive call.
const READ_LEN: usize = 8 << 10;
/// Largest number of bytes that are encrypted at a time: the content of a record (RFC 8446, section 5.1).
const RECORD_LEN: usize = 16 << 10;
/// Time limit for unsent bytes without progress.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

impl ControlStream {
    /// Registers the socket with the runtime.
    pub(super) fn new(
        socket: ControlSocket,
        tls: Option<TlsChannel>,
        state: Rc<ConnectionState>,
    ) -> io::Result<Self> {
        Ok(Self {
            socket: watch_descriptor(socket, Interest::READABLE | Interest::WRITABLE)?,
            tls: tls.map(Box::new),
            state,
            stalled: None,
        })
    }

    pub(super) fn socket(&self) -> &ControlSocket {
        self.socket.get_ref()
    }

    /// Makes progress with the TLS handshake. Without TLS there is none.
    pub(super) fn poll_handshake(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), HandshakeEnd>> {
        loop {
            let Some(tls) = &mut self.tls else { return Poll::Ready(Ok(())) };
            if tls.begins_with_http() {
                return Poll::Ready(Err(HandshakeEnd::PlainHttp));
            }
            let progress = tls.handshake();
            // The next message, or the alert of an error, as far as it fits.
            let sent = self.poll_send_all(context);
            match progress {
                Ok(true) => return Poll::Ready(Ok(())),
                Ok(false) => {}
                Err(_) => return Poll::Ready(Err(HandshakeEnd::Failed)),
            }
            let failed = |_| HandshakeEnd::Failed;
            ready!(sent).map_err(failed)?;
            ready!(self.poll_receive(context)).map_err(failed)?;
        }
    }

    /// Receives encrypted bytes.
    fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_LEN];
        loop {
            let mut readable = ready!(self.socket.poll_read_ready(context))?;
            let Some(count) = self.receive(&mut bytes)? else {
                readable.clear_ready();
                continue;
            };
            if let Some(tls) = &mut self.tls {
                tls.push_received(&bytes[..count]);
            }
            return Poll::Ready(Ok(()));
        }
    }

    /// Sends all encrypted bytes.
    fn poll_send_all(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let unsent = self.tls.as_ref().map_or(&[][..], |tls| tls.unsent());
            if unsent.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let Poll::Ready(writable) = self.socket.poll_write_ready(context) else {
                return self.poll_stall(context).map(|stalled| stalled.map(drop));
            };
            let mut writable = writable?;
            let Some(count) = self.socket.get_ref().send(unsent)? else {
                writable.clear_ready();
                continue;
            };
            self.stalled = None;
            if let Some(tls) = &mut self.tls {
                tls.mark_sent(count);
            }
        }
    }

    /// Decrypts into `bytes`, and receives what that needs.
    fn poll_read_tls(
        &mut self,
        context: &mut Context<'_>,
        bytes: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let Some(tls) = &mut self.tls else { return Poll::Ready(Ok(0)) };
            match tls.read(bytes) {
                Ok(Some(count)) => return Poll::Ready(Ok(count)),
                Ok(None) => ready!(self.poll_receive(context))?,
                Err(error) => {
                    // The alert, as far as it fits.
                    let _ = self.poll_send_all(context);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    /// Encrypts a part of `bytes`, once everything before it has been sent.
    fn poll_write_tls(
        &mut self,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_send_all(context))?;
        let part = &bytes[..bytes.len().min(RECORD_LEN)];
        if let Some(tls) = &mut self.tls {
            tls.write(part)?;
        }
        match self.poll_send_all(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // The rest is sent by the next write or flush.
            _ => Poll::Ready(Ok(part.len())),
        }
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
        let this = self.get_mut();
        if this.tls.is_some() {
            let count = ready!(this.poll_read_tls(context, &mut bytes[..room]))?;
            into.put_slice(&bytes[..count]);
            return Poll::Ready(Ok(()));
        }
        loop {
            let mut readable = ready!(this.socket.poll_read_ready(context))?;
            match this.receive(&mut bytes[..room])? {
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
        if this.tls.is_some() {
            return this.poll_write_tls(context, bytes);
        }
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

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_send_all(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(tls) = &mut this.tls {
            tls.close();
            ready!(this.poll_send_all(context))?;
        }
        Poll::Ready(match this.socket.get_ref() {
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
