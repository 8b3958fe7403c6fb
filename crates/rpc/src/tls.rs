//! TLS of the control API: credentials of both sides, and the channel between HTTP and a socket.
//!
//! It needs the feature `tls`. Without it, credentials cannot be made, and so no channel either.

#[cfg(feature = "tls")]
mod channel;
#[cfg(not(feature = "tls"))]
#[path = "tls/absent.rs"]
mod channel;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use tenmil_base::Error;
use tenmil_nvme_auth::SecretBytes;

pub(crate) use channel::TlsChannel;

/// Whether this program has TLS for the control API: the feature `tls` of this crate.
pub const HAS_CONTROL_TLS: bool = cfg!(feature = "tls");

/// Certificate of a server or a client, with its private key.
pub struct ControlCertificate {
    /// Certificate chain in PEM.
    pub chain_pem: Vec<u8>,
    /// Private key in PEM.
    pub key_pem: SecretBytes,
}

/// TLS of the clients of a listener. Clones share the certificate, so that it can be replaced while a server
/// uses it.
#[derive(Clone, Debug)]
pub struct ControlTls {
    config: Arc<RwLock<channel::ServerConfig>>,
    verifies_clients: bool,
}

/// TLS of a client.
#[derive(Clone, Debug)]
pub(crate) struct ClientTls(channel::ClientConfig);

impl ControlTls {
    /// The server has `certificate`. With `client_ca_pem`, each client needs a certificate that an
    /// authority of it has signed.
    ///
    /// # Errors
    ///
    /// If a certificate or the private key is not usable, or the feature `tls` is missing.
    pub fn new(
        certificate: &ControlCertificate,
        client_ca_pem: Option<&[u8]>,
    ) -> Result<Self, Error> {
        let config = channel::server_config(certificate, client_ca_pem)?;
        Ok(Self {
            config: Arc::new(RwLock::new(config)),
            verifies_clients: client_ca_pem.is_some(),
        })
    }

    /// Replaces the certificate and the authority of client certificates of all clones, for connections from
    /// now on.
    ///
    /// # Errors
    ///
    /// If a certificate or the private key is not usable; nothing has changed then.
    ///
    /// # Panics
    ///
    /// If an authority is given where there was none, or the reverse: the options of a process do not change.
    pub fn replace(
        &self,
        certificate: &ControlCertificate,
        client_ca_pem: Option<&[u8]>,
    ) -> Result<(), Error> {
        assert_eq!(
            client_ca_pem.is_some(),
            self.verifies_clients,
            "requests are checked by whether client certificates are"
        );
        let config = channel::server_config(certificate, client_ca_pem)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// Whether each client needs a certificate.
    pub(crate) fn verifies_clients(&self) -> bool {
        self.verifies_clients
    }

    /// Channel of an accepted connection.
    pub(crate) fn channel(&self) -> std::io::Result<TlsChannel> {
        TlsChannel::server(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ClientTls {
    /// Verifies that the server has a certificate for `server_name` of an authority in `ca_pem`, and
    /// sends `certificate` if the server requests one.
    pub(crate) fn new(
        ca_pem: &[u8],
        server_name: &str,
        certificate: Option<&ControlCertificate>,
    ) -> Result<Self, Error> {
        channel::client_config(ca_pem, server_name, certificate).map(Self)
    }

    /// Channel of a connection.
    pub(crate) fn channel(&self) -> std::io::Result<TlsChannel> {
        TlsChannel::client(&self.0)
    }
}

impl fmt::Debug for ControlCertificate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ControlCertificate").finish_non_exhaustive()
    }
}
