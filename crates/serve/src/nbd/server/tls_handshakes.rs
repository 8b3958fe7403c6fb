//! TLS handshakes of NBD clients.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Error;
use tenmil_linux::socket::{SocketOptions, SocketStreamFactory};
use tenmil_nvme_auth::Hash;
use tenmil_tls::{Psk, PskSource, ServerConfig, TlsError, TlsStream};
use tenmil_wire::nbd::ClientFlags;

use super::SessionStarter;
use crate::handshake::{
    FinishedHandshake, HandshakeLimits, HandshakeOwner, HandshakeThread, Refusal,
};
use crate::nbd::connection::NegotiationStart;
use crate::nbd::session_handle::NbdEvent;
use crate::nbd::tls_config::{NbdPsk, NbdTls};
use crate::nbd::tls_prelude::NbdPrelude;

/// Thread that runs the handshakes of a server.
pub(super) struct TlsHandshakes {
    /// The origin of a connection is the number of its listener.
    thread: HandshakeThread<u16>,
}

/// Receiver of the connections.
struct ConnectionOpener {
    starter: Arc<SessionStarter>,
    sockets: SocketStreamFactory,
    credentials: TlsCredentials,
}

/// Certificate and keys of the handshakes that begin. A handle, cheap to clone.
#[derive(Clone)]
pub(super) struct TlsCredentials(Arc<Mutex<ServerConfig>>);

/// Keys of clients.
struct ClientKeys(Vec<NbdPsk>);

impl TlsHandshakes {
    pub(super) fn start(
        starter: &Arc<SessionStarter>,
        credentials: TlsCredentials,
    ) -> io::Result<Self> {
        let super::ServerConfig { regions, clock, connections_max, per_address_max, .. } =
            &starter.config;
        let limits = HandshakeLimits {
            all_max: *connections_max,
            per_address_max: *per_address_max,
            ..HandshakeLimits::default()
        };
        let sockets = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
        let opener = ConnectionOpener { starter: Arc::clone(starter), sockets, credentials };
        let thread = HandshakeThread::start("nbd-tls", opener, limits, *clock)?;
        Ok(Self { thread })
    }

    /// Starts the handshake of a socket that was accepted at a listener, whose clients must use TLS if
    /// `required`.
    ///
    /// # Errors
    ///
    /// If too many sockets wait for theirs.
    pub(super) fn add(&self, socket: OwnedFd, listener: u16, required: bool) -> Result<(), Error> {
        self.thread.add(socket, Box::new(NbdPrelude::new(required)), listener)
    }
}

impl TlsCredentials {
    pub(super) fn new(tls: &NbdTls) -> Result<Self, TlsError> {
        Ok(Self(Arc::new(Mutex::new(server_config(tls)?))))
    }

    /// Replaces them for handshakes that begin from now on. After an error nothing has changed.
    pub(super) fn replace(&self, tls: &NbdTls) -> Result<(), TlsError> {
        let config = server_config(tls)?;
        *self.lock() = config;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ServerConfig> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn server_config(tls: &NbdTls) -> Result<ServerConfig, TlsError> {
    let keys = || Arc::new(ClientKeys(tls.psks.clone()));
    match &tls.certificate {
        None => ServerConfig::with_psks(keys()),
        Some(certificate) => {
            let config = ServerConfig::with_certificate(
                &certificate.chain_pem,
                certificate.key_pem.expose(),
                certificate.client_ca_pem.as_deref(),
            )?;
            Ok(if tls.psks.is_empty() { config } else { config.and_psks(keys()) })
        }
    }
}

impl HandshakeOwner for ConnectionOpener {
    type Origin = u16;

    fn tls_config(&self, _: u16) -> Result<ServerConfig, Error> {
        Ok(self.credentials.lock().clone())
    }

    fn open(&mut self, finished: FinishedHandshake<u16>) -> Result<(), Error> {
        let FinishedHandshake { socket, session, received, flags, origin, .. } = finished;
        let Some(session) = session else {
            let start = NegotiationStart::Plaintext(received);
            return self.starter.start_plaintext(socket, origin, start);
        };
        let below = self.sockets.new_stream(socket).map_err(Error::environment)?;
        let peer = below.peer_description();
        let stream = TlsStream::new(below, session, self.starter.config.regions.clone());
        let start = NegotiationStart::Secure(ClientFlags(flags));
        self.starter.start_session(stream, &peer, origin, start)
    }

    fn report_refused(&self, peer: &str, _: u16, why: &Refusal) {
        self.starter.emit(NbdEvent::Error(format!("connection of {peer} is refused: {why}")));
    }
}

impl PskSource for ClientKeys {
    /// GnuTLS, which the usual clients use, has SHA-256 for all keys.
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk> {
        let found = self.0.iter().filter(|key| key.identity.as_bytes() == identity);
        let psk = |key: &NbdPsk| Psk {
            identity: identity.to_vec(),
            secret: key.secret.clone(),
            hash: Hash::Sha256,
            derivation: None,
        };
        found.map(psk).collect()
    }

    fn description(&self) -> String {
        "the key file of this server".to_owned()
    }
}
