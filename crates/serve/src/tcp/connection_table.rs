//! Table of the current connections, for management.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::audit::{AuthenticationAudit, TlsKeyAudit};
use super::connection_handle::{ConnectionHandle, ConnectionInfo};

/// Entry of the connection table.
#[derive(Debug)]
pub(super) struct ConnectionEntry {
    pub(super) handle: Arc<ConnectionHandle>,
    pub(super) peer: String,
    pub(super) port: u16,
    /// Pool memory that the connection holds, in bytes.
    pub(super) held: Arc<AtomicU64>,
}

/// Snapshot of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionSample {
    /// Connection id, never reused.
    pub id: u64,
    /// Address of the peer.
    pub peer: String,
    /// Port number of the service that it connected to.
    pub port: u16,
    /// NQN of the host, once known.
    pub host: Option<String>,
    /// NQN of the subsystem, once known.
    pub subsystem: Option<String>,
    /// Controller identifier, once known.
    pub cntlid: Option<u16>,
    /// Queue identifier; 0 is the admin queue.
    pub queue: Option<u16>,
    /// Cipher suite of its secure channel; `None` for plaintext.
    pub cipher_suite: Option<&'static str>,
    /// Key of the secure channel.
    pub tls_key: Option<TlsKeyAudit>,
    /// Last authentication of its host, if there was one on this connection.
    pub authentication: Option<AuthenticationAudit>,
    /// Whether header digests are in use.
    pub header_digest: bool,
    /// Whether data digests are in use.
    pub data_digest: bool,
    /// Pool memory that the connection holds, in use or idle, in bytes.
    pub memory_bytes: u64,
    /// Index of the reactor that runs it.
    pub reactor: Option<u32>,
}

impl ConnectionEntry {
    pub(super) fn sample(&self, id: u64) -> ConnectionSample {
        let ConnectionInfo {
            header_digest,
            data_digest,
            queue,
            cipher_suite,
            tls_key,
            authentication,
        } = self.handle.lock_info().clone();
        ConnectionSample {
            id,
            peer: self.peer.clone(),
            port: self.port,
            host: queue.as_ref().map(|queue| queue.host.clone()),
            subsystem: queue.as_ref().map(|queue| queue.subsystem.clone()),
            cntlid: queue.as_ref().map(|queue| queue.cntlid),
            queue: queue.as_ref().map(|queue| queue.qid),
            cipher_suite,
            tls_key,
            authentication,
            header_digest,
            data_digest,
            memory_bytes: self.held.load(Ordering::Relaxed),
            reactor: self.handle.reactor(),
        }
    }
}
