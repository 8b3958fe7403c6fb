//! TLS handshakes of connections to the target.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tenmil_base::Error;
use tenmil_linux::Clock;
use tenmil_tls::{Psk, PskSource, ServerConfig, TlsStream};

use super::ReactorSelector;
use crate::handshake::{
    FinishedHandshake, FirstBytePrelude, HandshakeLimits, HandshakeOwner, HandshakeThread, Refusal,
};
use crate::tcp::audit::{ConnectionAudit, RefusalReason};
use crate::tcp::security::PortSecurity;
use crate::tcp::service::Service;

/// Thread that runs the handshakes of all ports.
#[derive(Debug)]
pub(super) struct TlsHandshakes {
    thread: HandshakeThread<u16>,
}

/// Receiver of the connections.
struct ConnectionOpener {
    dispatcher: Arc<ReactorSelector>,
    config: ServerConfig,
}

/// Keys of the service.
struct ServiceKeys {
    service: Service,
    clock: Clock,
}

impl TlsHandshakes {
    pub(super) fn start(dispatcher: &Arc<ReactorSelector>) -> io::Result<Self> {
        let super::ServerConfig { service, clock, .. } = &dispatcher.config;
        let keys = ServiceKeys { service: service.clone(), clock: *clock };
        let config = ServerConfig::with_psks(Arc::new(keys))
            .map_err(|error| io::Error::other(error.to_string()))?;
        let admission = service.limits().admission_limits();
        let limits = HandshakeLimits {
            all_max: service.limits().connections_max,
            per_address_max: admission.unconnected_per_address_max,
            ..HandshakeLimits::default()
        };
        let opener = ConnectionOpener { dispatcher: Arc::clone(dispatcher), config };
        let thread = HandshakeThread::start("nvme-tcp-tls", opener, limits, *clock)?;
        Ok(Self { thread })
    }

    /// Starts the handshake of a socket that was accepted at `port`.
    ///
    /// # Errors
    ///
    /// If too many sockets wait for theirs.
    pub(super) fn add(
        &self,
        socket: OwnedFd,
        port: u16,
        security: PortSecurity,
    ) -> Result<(), Error> {
        let prelude = FirstBytePrelude { accepts_plaintext: security.accepts_plaintext() };
        self.thread.add(socket, Box::new(prelude), port)
    }
}

impl HandshakeOwner for ConnectionOpener {
    type Origin = u16;

    fn tls_config(&self, _: u16) -> Result<ServerConfig, Error> {
        Ok(self.config.clone())
    }

    fn open(&mut self, finished: FinishedHandshake<u16>) -> Result<(), Error> {
        let FinishedHandshake { socket, session, origin: port, .. } = finished;
        let regions = self.dispatcher.config.regions.clone();
        self.dispatcher.open_connection(socket, port, |stream| match session {
            Some(session) => Box::new(TlsStream::new(stream, session, regions)),
            None => stream,
        })
    }

    fn permits(&self, peer: &str, port: u16) -> bool {
        self.dispatcher.config.service.permits_peer(port, peer)
    }

    fn report_refused(&self, peer: &str, port: u16, why: &Refusal) {
        let super::ServerConfig { service, clock, .. } = &self.dispatcher.config;
        let audit = ConnectionAudit::of_peer(None, peer, port);
        service.emit_refusal(clock.now(), audit, refusal_reason(why), why.to_string());
    }
}

const fn refusal_reason(why: &Refusal) -> RefusalReason {
    match why {
        Refusal::Address => RefusalReason::AddressNotPermitted,
        Refusal::Plaintext => RefusalReason::SecureChannelRequired,
        Refusal::Limit { .. } => RefusalReason::Limit,
        Refusal::Error(_) => RefusalReason::Internal,
        Refusal::Tls(_) | Refusal::Protocol(_) | Refusal::Closed | Refusal::Timeout { .. } => {
            RefusalReason::TlsHandshakeFailed
        }
    }
}

impl PskSource for ServiceKeys {
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk> {
        let Ok(identity) = str::from_utf8(identity) else { return Vec::new() };
        let found = self.service.tls_psks_of_identity(self.clock.now(), identity);
        found.into_iter().map(Psk::from).collect()
    }

    fn description(&self) -> String {
        "the keys of this target's hosts".to_owned()
    }
}
