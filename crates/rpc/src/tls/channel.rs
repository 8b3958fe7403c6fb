//! TLS session of one connection with its encrypted bytes, without a socket.
//!
//! ```text
//!   socket ─ push_received ─► incoming ─► TlsSession ─ read ──► HTTP
//!   socket ◄─ unsent ──────── outgoing ◄─ TlsSession ◄─ write ─ HTTP
//! ```
//!
//! The owner receives only when `read` returns nothing, and writes only when all is sent, so that each
//! direction holds a few records at most. It also decides how long a handshake may take.

use std::fmt;
use std::io;

use tenmil_base::{Error, StreamError};
use tenmil_tls::{CipherIo, ClientCertificate, Plaintext, Received, TlsError, TlsSession};

use super::ControlCertificate;

pub(super) use tenmil_tls::{ClientConfig, ServerConfig};

/// Channel of one connection.
pub(crate) struct TlsChannel {
    session: TlsSession,
    wire: Wire,
    is_closed: bool,
}

/// Encrypted bytes in both directions.
#[derive(Default)]
struct Wire {
    incoming: Vec<u8>,
    /// Number of bytes of those that the session has consumed.
    consumed: usize,
    has_ended: bool,
    outgoing: Vec<u8>,
    /// Number of bytes of those that were sent.
    sent: usize,
}

pub(super) fn server_config(
    certificate: &ControlCertificate,
    client_ca_pem: Option<&[u8]>,
) -> Result<ServerConfig, Error> {
    let ControlCertificate { chain_pem, key_pem } = certificate;
    Ok(ServerConfig::with_certificate(chain_pem, key_pem.expose(), client_ca_pem)?)
}

pub(super) fn client_config(
    ca_pem: &[u8],
    server_name: &str,
    certificate: Option<&ControlCertificate>,
) -> Result<ClientConfig, Error> {
    let own = certificate.map(|ControlCertificate { chain_pem, key_pem }| ClientCertificate {
        chain_pem,
        key_pem: key_pem.expose(),
    });
    Ok(ClientConfig::with_certificates(ca_pem, server_name, own)?)
}

impl TlsChannel {
    pub(super) fn server(config: &ServerConfig) -> io::Result<Self> {
        TlsSession::server(config).map(Self::new).map_err(stream_error)
    }

    pub(super) fn client(config: &ClientConfig) -> io::Result<Self> {
        TlsSession::client(config).map(Self::new).map_err(stream_error)
    }

    fn new(session: TlsSession) -> Self {
        Self { session, wire: Wire::default(), is_closed: false }
    }

    /// Makes progress with the handshake. True once it has ended; after an error, the alert for the peer
    /// is unsent.
    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        self.session.handshake(&mut self.wire).map_err(stream_error)
    }

    /// Whether the first byte is that of an HTTP request without TLS: its method.
    pub(crate) fn begins_with_http(&self) -> bool {
        self.wire.consumed == 0
            && self.session.secure_channel().is_none()
            && self.wire.incoming.first().is_some_and(u8::is_ascii_uppercase)
    }

    /// Takes over encrypted bytes of the peer; none are the end.
    pub(crate) fn push_received(&mut self, bytes: &[u8]) {
        let Wire { incoming, consumed, has_ended, .. } = &mut self.wire;
        incoming.drain(..std::mem::take(consumed));
        incoming.extend_from_slice(bytes);
        *has_ended |= bytes.is_empty();
    }

    /// Decrypts what has been received. `None` if more is needed, zero at the end.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match self.session.receive(&mut self.wire, into).map_err(stream_error)? {
            Plaintext::Bytes(count) => Ok(Some(count)),
            Plaintext::End => Ok(Some(0)),
            Plaintext::WouldBlock => {
                self.session.release_buffers();
                Ok(None)
            }
        }
    }

    /// Encrypts all of `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.session.send(&mut self.wire, bytes).map_err(stream_error)
    }

    /// Announces the end of this side's bytes.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true) {
            self.session.close_notify(&mut self.wire);
        }
    }

    /// Encrypted bytes to send.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.wire.outgoing[self.wire.sent..]
    }

    /// Removes the first `count` of those.
    pub(crate) fn mark_sent(&mut self, count: usize) {
        self.wire.sent += count;
        if self.wire.sent == self.wire.outgoing.len() {
            self.wire.outgoing = Vec::new();
            self.wire.sent = 0;
        }
    }
}

impl CipherIo for Wire {
    fn received(&mut self) -> Received<'_> {
        match &self.incoming[self.consumed..] {
            [] if self.has_ended => Received::End,
            [] => Received::WouldBlock,
            bytes => Received::Bytes(bytes),
        }
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
    }

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outgoing
    }
}

fn stream_error(error: TlsError) -> io::Error {
    let StreamError(text) = error.into();
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl fmt::Debug for TlsChannel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TlsChannel").field("session", &self.session).finish_non_exhaustive()
    }
}
