//! Connection of a client: a Unix socket, or TCP with or without TLS.

use std::io;
use std::os::fd::BorrowedFd;

use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::tcp_connection::TcpConnection;

use super::endpoint::{ControlEndpoint, HttpEndpoint, share_of};
use crate::error::{ErrorCode, RpcError};
use crate::tls::TlsChannel;

/// Connection to a process. Nothing blocks but [`connect`](Self::connect) and the `wait_*` functions.
#[derive(Debug)]
pub(super) struct ClientConnection {
    socket: ClientSocket,
    tls: Option<Box<TlsChannel>>,
}

#[derive(Debug)]
enum ClientSocket {
    Local(LocalConnection),
    Tcp(TcpConnection),
}

/// Largest number of bytes that are encrypted before they are sent.
const PART_LEN: usize = 64 << 10;

impl ClientConnection {
    /// Connects, with the TLS handshake if there is one, before `end`.
    pub(super) fn connect(
        endpoint: &ControlEndpoint,
        clock: Clock,
        end: Instant,
    ) -> Result<Self, RpcError> {
        let time_limit = end.since(clock.now());
        let refused = |error: io::Error| connect_error(endpoint, &error, time_limit);
        match endpoint {
            ControlEndpoint::Socket(path) => {
                let connection = LocalConnection::connect(path, time_limit).map_err(refused)?;
                Ok(Self { socket: ClientSocket::Local(connection), tls: None })
            }
            ControlEndpoint::Http(http) => {
                let connection = connect_tcp(http, time_limit)?.map_err(refused)?;
                let tls = http.tls.as_ref().map(|tls| tls.channel().map(Box::new)).transpose();
                let tls = tls.map_err(refused)?;
                let mut new = Self { socket: ClientSocket::Tcp(connection), tls };
                new.complete_handshake(clock, end).map_err(|error| {
                    let text = format!("connect {}: {error}", endpoint.text());
                    match error.kind() {
                        io::ErrorKind::TimedOut => RpcError::remote(ErrorCode::Timeout, text),
                        _ => RpcError::remote(ErrorCode::Failed, text),
                    }
                })?;
                Ok(new)
            }
        }
    }

    fn complete_handshake(&mut self, clock: Clock, end: Instant) -> io::Result<()> {
        loop {
            let Some(tls) = &mut self.tls else { return Ok(()) };
            let progress = tls.handshake();
            while !self.flush()? {
                if clock.now() >= end {
                    return Err(handshake_timeout());
                }
                self.wait_to_send(end.since(clock.now()))?;
            }
            if progress? {
                return Ok(());
            }
            while !self.receive_encrypted()? {
                if clock.now() >= end {
                    return Err(handshake_timeout());
                }
                self.wait_to_receive(end.since(clock.now()))?;
            }
        }
    }

    /// Receives what is available, up to the length of `into`.
    pub(super) fn receive(&mut self, into: &mut [u8]) -> io::Result<RecvResult> {
        loop {
            let Some(tls) = &mut self.tls else { return self.socket.receive(into) };
            match tls.read(into)? {
                Some(0) => return Ok(RecvResult::Eof),
                Some(count) => return Ok(RecvResult::Bytes(count)),
                None if !self.receive_encrypted()? => return Ok(RecvResult::WouldBlock),
                None => {}
            }
        }
    }

    /// Sends as much of `bytes` as fits, and returns the number of bytes; unless it is zero, all of
    /// `files` were passed. With TLS, [`flush`](Self::flush) sends the rest.
    pub(super) fn send_files(
        &mut self,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<usize> {
        match (&self.socket, files) {
            (ClientSocket::Local(connection), _) => return connection.send_files(bytes, files),
            (ClientSocket::Tcp(connection), []) if self.tls.is_none() => {
                return connection.send(bytes);
            }
            (ClientSocket::Tcp(_), []) => {}
            (ClientSocket::Tcp(_), _) => {
                let text = "a file cannot be passed over TCP, expected the Unix socket";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        }
        if !self.flush()? {
            return Ok(0);
        }
        let part = &bytes[..bytes.len().min(PART_LEN)];
        if let Some(tls) = &mut self.tls {
            tls.write(part)?;
        }
        self.flush()?;
        Ok(part.len())
    }

    /// Sends what was encrypted. Returns whether that is all.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let Some(tls) = &mut self.tls else { return Ok(true) };
        while !tls.unsent().is_empty() {
            match self.socket.send(tls.unsent())? {
                0 => return Ok(false),
                count => tls.mark_sent(count),
            }
        }
        Ok(true)
    }

    /// Waits until something can be received.
    pub(super) fn wait_to_receive(&self, time_limit: Span) -> io::Result<bool> {
        match &self.socket {
            ClientSocket::Local(connection) => connection.wait_to_receive(time_limit),
            ClientSocket::Tcp(connection) => connection.wait_to_receive(time_limit),
        }
    }

    /// Waits until something can be sent.
    pub(super) fn wait_to_send(&self, time_limit: Span) -> io::Result<bool> {
        match &self.socket {
            ClientSocket::Local(connection) => connection.wait_to_send(time_limit),
            ClientSocket::Tcp(connection) => connection.wait_to_send(time_limit),
        }
    }

    /// Receives encrypted bytes, or their end. Returns whether there was anything.
    fn receive_encrypted(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let count = match self.socket.receive(&mut bytes)? {
            RecvResult::Bytes(count) => count,
            RecvResult::Eof => 0,
            RecvResult::WouldBlock => return Ok(false),
        };
        if let Some(tls) = &mut self.tls {
            tls.push_received(&bytes[..count]);
        }
        Ok(true)
    }
}

impl ClientSocket {
    fn receive(&self, into: &mut [u8]) -> io::Result<RecvResult> {
        match self {
            Self::Local(connection) => connection.receive(into),
            Self::Tcp(connection) => connection.receive(into),
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Local(connection) => connection.send(bytes),
            Self::Tcp(connection) => connection.send(bytes),
        }
    }
}

/// Connects to the first address that answers.
fn connect_tcp(
    endpoint: &HttpEndpoint,
    time_limit: Span,
) -> Result<io::Result<TcpConnection>, RpcError> {
    let addresses = endpoint.addresses()?;
    let mut failed = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in &addresses {
        match TcpConnection::connect(*address, share_of(time_limit, addresses.len())) {
            Err(error) => failed = Err(error),
            connected => return Ok(connected),
        }
    }
    Ok(failed)
}

fn handshake_timeout() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake has not ended in time")
}

fn connect_error(endpoint: &ControlEndpoint, error: &io::Error, time_limit: Span) -> RpcError {
    let shown = endpoint.text();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => RpcError::usage(
            ErrorCode::NoProcess,
            format!("connect {shown}: no process listens there"),
        ),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => RpcError::remote(
            ErrorCode::Timeout,
            format!("connect {shown}: not accepted within {time_limit}"),
        ),
        _ => RpcError::environment(ErrorCode::Failed, format!("connect {shown}: {error}")),
    }
}
