//! One TLS session without a socket: encrypted bytes in and out, plaintext in and out.
//!
//! ```text
//!  server   AwaitingClientHello ─► key selected ─► Handshake ─► Open ─► Failed
//!  client                                          Handshake ─► Open ─► Failed
//!                                   s2n-tls ───────┘            └─ RecordLayer
//! ```
//!
//! A session has no clock and no threads. The owner calls it when bytes have arrived, and ends it if the
//! handshake takes too long.

use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use tenmil_base::SecureChannel;
use tenmil_nvme_auth::Derivation;

use crate::alert::Alert;
use crate::cipher::{GatherList, ScatterList};
use crate::cipher_io::{CipherIo, Received};
use crate::client_hello::{CLIENT_HELLO_BYTES_MAX, ClientHello, reassemble};
use crate::error::TlsError;
use crate::psk::{Psk, PskSource};
use crate::record_layer::{Handover, Plaintext, RecordLayer, Side};
use crate::s2n_tls::{Config, Connection, ErrorClass, LibraryError};
use crate::suite::CipherSuite;

/// Configuration of the server side: keys, certificate, or both.
#[derive(Clone)]
pub struct ServerConfig {
    config: Arc<Config>,
    psks: Option<Arc<dyn PskSource>>,
    has_certificate: bool,
}

/// Configuration of the client side.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    authentication: ClientAuthentication,
}

/// How client and server authenticate each other.
#[derive(Clone, Debug)]
enum ClientAuthentication {
    /// Both with one of these pre-shared keys.
    Psks(Arc<[Psk]>),
    /// The server with a certificate for this name, and the client with its own if that is requested.
    Certificates { config: Arc<Config>, server_name: CString },
}

/// Certificate chain and private key of a client, in PEM.
#[derive(Clone, Copy)]
pub struct ClientCertificate<'a> {
    /// The client's certificate, and those up to its authority.
    pub chain_pem: &'a [u8],
    /// Private key of the first.
    pub key_pem: &'a [u8],
}

/// TLS session of one connection.
pub struct TlsSession {
    phase: Phase,
    role: Role,
    channel: Option<SecureChannel>,
}

enum Phase {
    /// The server collects the records of the first message.
    AwaitingClientHello {
        connection: Connection,
        collected: Vec<u8>,
    },
    Handshake(Connection),
    Open(Box<RecordLayer>),
    Failed(TlsError),
}

enum Role {
    Server { config: ServerConfig, selected: Option<(Vec<u8>, Option<Derivation>)> },
    Client(ClientConfig),
}

impl ServerConfig {
    /// Clients authenticate with pre-shared keys.
    ///
    /// # Errors
    ///
    /// If the library is out of memory.
    pub fn with_psks(source: Arc<dyn PskSource>) -> Result<Self, TlsError> {
        Ok(Self { config: psk_config()?, psks: Some(source), has_certificate: false })
    }

    /// The server authenticates with a certificate, and clients with one of `client_ca_pem`, if it is
    /// given.
    ///
    /// # Errors
    ///
    /// If a certificate or the private key is not usable.
    pub fn with_certificate(
        chain_pem: &[u8],
        key_pem: &[u8],
        client_ca_pem: Option<&[u8]>,
    ) -> Result<Self, TlsError> {
        let mut config = Config::new().map_err(|error| config_error("configuration", &error))?;
        config
            .add_certificate(chain_pem, key_pem)
            .map_err(|error| config_error("certificate and its private key", &error))?;
        if let Some(ca) = client_ca_pem {
            config
                .require_client_certificate(ca)
                .map_err(|error| config_error("certificate authority of clients", &error))?;
        }
        Ok(Self { config: Arc::new(config), psks: None, has_certificate: true })
    }

    /// Clients may also authenticate with pre-shared keys.
    #[must_use]
    pub fn and_psks(self, source: Arc<dyn PskSource>) -> Self {
        Self { psks: Some(source), ..self }
    }
}

impl ClientConfig {
    /// Offers these keys, the preferred ones first. Of keys with one identity the first is offered.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn with_psks(psks: impl IntoIterator<Item = impl Into<Psk>>) -> Result<Self, TlsError> {
        let mut offered: Vec<Psk> = Vec::new();
        for psk in psks {
            let psk = psk.into();
            if offered.iter().all(|other| other.identity != psk.identity) {
                offered.push(psk);
            }
        }
        if offered.is_empty() {
            return Err(TlsError::Config("TLS: no pre-shared key, expected at least one".into()));
        }
        Ok(Self { authentication: ClientAuthentication::Psks(offered.into()) })
    }

    /// The server has to have a certificate for `server_name`, a host name or an IP address, which an
    /// authority of `ca_pem` has signed. The client sends `own` if the server requests a certificate.
    ///
    /// # Errors
    ///
    /// If a certificate or the private key is not usable.
    pub fn with_certificates(
        ca_pem: &[u8],
        server_name: &str,
        own: Option<ClientCertificate<'_>>,
    ) -> Result<Self, TlsError> {
        let server_name = CString::new(server_name).map_err(|_| {
            TlsError::Config("TLS: the name of the server contains a null byte".into())
        })?;
        let mut config = Config::new().map_err(|error| config_error("configuration", &error))?;
        config
            .trust(ca_pem)
            .map_err(|error| config_error("certificate authority of the server", &error))?;
        if let Some(ClientCertificate { chain_pem, key_pem }) = own {
            config
                .add_certificate(chain_pem, key_pem)
                .and_then(|()| config.offer_client_certificate())
                .map_err(|error| config_error("client certificate and its private key", &error))?;
        }
        let config = Arc::new(config);
        Ok(Self { authentication: ClientAuthentication::Certificates { config, server_name } })
    }
}

impl TlsSession {
    /// Creates the server side.
    ///
    /// # Errors
    ///
    /// If the library is out of memory.
    pub fn server(config: &ServerConfig) -> Result<Self, TlsError> {
        let connection = Connection::new(Side::Server, &config.config).map_err(handshake_error)?;
        let role = Role::Server { config: config.clone(), selected: None };
        let phase = Phase::AwaitingClientHello { connection, collected: Vec::new() };
        Ok(Self { phase, role, channel: None })
    }

    /// Creates the client side.
    ///
    /// # Errors
    ///
    /// If a key is not usable, or the library is out of memory.
    pub fn client(config: &ClientConfig) -> Result<Self, TlsError> {
        let connection = match &config.authentication {
            ClientAuthentication::Psks(psks) => {
                let connection = Connection::new(Side::Client, &psk_config()?);
                let mut connection = connection.map_err(handshake_error)?;
                for psk in psks.iter() {
                    let appended = connection.append_psk(psk);
                    appended.map_err(|error| config_error("pre-shared key", &error))?;
                }
                connection
            }
            ClientAuthentication::Certificates { config, server_name } => {
                let connection = Connection::new(Side::Client, config);
                let mut connection = connection.map_err(handshake_error)?;
                let named = connection.set_server_name(server_name);
                named.map_err(|error| config_error("name of the server", &error))?;
                connection
            }
        };
        let role = Role::Client(config.clone());
        Ok(Self { phase: Phase::Handshake(connection), role, channel: None })
    }

    /// Channel, once the handshake has ended.
    #[must_use]
    pub const fn secure_channel(&self) -> Option<&SecureChannel> {
        self.channel.as_ref()
    }

    /// How the key of the client was derived, on a server.
    #[must_use]
    pub fn derivation(&self) -> Option<Derivation> {
        match &self.role {
            Role::Server { selected: Some((_, derivation)), .. } => *derivation,
            _ => None,
        }
    }

    /// Whether decrypted bytes or whole records are left.
    #[must_use]
    pub fn may_have_more(&self) -> bool {
        self.has_more(&[])
    }

    /// Whether the next receive makes progress with `received` and nothing more from below.
    pub(crate) fn has_more(&self, received: &[u8]) -> bool {
        matches!(&self.phase, Phase::Open(records) if records.has_more(received))
    }

    /// Encrypted bytes that were received before those of the next calls' `io`.
    pub fn push_received(&mut self, bytes: &[u8]) {
        match &mut self.phase {
            Phase::AwaitingClientHello { connection, .. } | Phase::Handshake(connection) => {
                connection.push_received(bytes);
            }
            Phase::Open(records) => records.push_received(bytes),
            Phase::Failed(_) => {}
        }
    }

    /// Copies the start of a record from `io`, which need not store it then.
    pub(crate) fn store_partial_record(&mut self, io: &mut dyn CipherIo) {
        if let Phase::Open(records) = &mut self.phase {
            records.store_partial_record(io);
        }
    }

    /// Frees buffers that hold nothing; called when the session is idle.
    pub fn release_buffers(&mut self) {
        if let Phase::Open(records) = &mut self.phase {
            records.release_buffers();
        }
    }

    /// Makes progress with the handshake. True once it has ended.
    ///
    /// # Errors
    ///
    /// If it has failed. The alert for the peer was sent to `io`.
    pub fn handshake(&mut self, io: &mut dyn CipherIo) -> Result<bool, TlsError> {
        if let Phase::Failed(error) = &self.phase {
            return Err(error.clone());
        }
        self.try_handshake(io).map_err(|error| {
            error.send_alert(io);
            self.fail(error)
        })
    }

    /// Encrypts and sends `bytes`.
    ///
    /// # Errors
    ///
    /// If the session has failed, or its handshake has not ended.
    pub fn send(&mut self, io: &mut dyn CipherIo, bytes: &[u8]) -> Result<(), TlsError> {
        let mut list = GatherList::new();
        list.add_bytes(bytes);
        self.send_list(io, &mut list)
    }

    /// Encrypts and sends all of `list`.
    #[inline]
    pub(crate) fn send_list(
        &mut self,
        io: &mut dyn CipherIo,
        list: &mut GatherList<'_>,
    ) -> Result<(), TlsError> {
        let sent = self.records()?.send(io, list);
        sent.map_err(|error| self.fail(error))
    }

    /// Receives decrypted bytes.
    ///
    /// # Errors
    ///
    /// If the session has failed, or its handshake has not ended.
    pub fn receive(
        &mut self,
        io: &mut dyn CipherIo,
        into: &mut [u8],
    ) -> Result<Plaintext, TlsError> {
        let mut list = ScatterList::new();
        list.add_bytes(into);
        self.receive_list(io, &mut list)
    }

    /// Receives decrypted bytes into `list`.
    #[inline]
    pub(crate) fn receive_list(
        &mut self,
        io: &mut dyn CipherIo,
        list: &mut ScatterList<'_>,
    ) -> Result<Plaintext, TlsError> {
        let received = self.records()?.receive(io, list);
        received.map_err(|error| self.fail(error))
    }

    /// Announces the end of this side's bytes. The peer may go on to send.
    pub fn close_notify(&mut self, io: &mut dyn CipherIo) {
        if let Phase::Open(records) = &mut self.phase {
            records.close(io);
        }
    }

    /// Encrypts with new keys from the next send on.
    ///
    /// # Errors
    ///
    /// If the session has failed, or its handshake has not ended.
    pub fn update_keys(&mut self) -> Result<(), TlsError> {
        self.records().map(RecordLayer::update_keys)
    }

    /// Records of an open session.
    #[inline]
    pub(crate) fn records(&mut self) -> Result<&mut RecordLayer, TlsError> {
        match &mut self.phase {
            Phase::Open(records) => Ok(records),
            Phase::Failed(error) => Err(error.clone()),
            _ => Err(TlsError::Config("TLS: the handshake has not ended".into())),
        }
    }

    fn try_handshake(&mut self, io: &mut dyn CipherIo) -> Result<bool, TlsError> {
        self.receive_client_hello(io)?;
        let connection = match &mut self.phase {
            Phase::Handshake(connection) => connection,
            Phase::Open(_) => return Ok(true),
            Phase::AwaitingClientHello { .. } | Phase::Failed(_) => return Ok(false),
        };
        match connection.negotiate(io) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(())) => {
                let channel = self.role.check_negotiated(connection)?;
                self.open()?;
                self.channel = Some(channel);
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(self.role.explain(connection, &error)),
        }
    }

    /// Ends the handshake: the library hands over the secrets, and its connection is freed.
    fn open(&mut self) -> Result<(), TlsError> {
        let failed = Phase::Failed(TlsError::Cipher);
        let Phase::Handshake(connection) = std::mem::replace(&mut self.phase, failed) else {
            return Err(TlsError::Cipher);
        };
        let (secrets, received) = connection.hand_over().map_err(handshake_error)?;
        let handover = Handover::parse(&secrets).ok_or_else(|| {
            let text = "the library handed over an unknown format".to_owned();
            TlsError::Handshake { name: "handover".to_owned(), text }
        })?;
        let records = RecordLayer::new(self.role.side(), &handover, received)?;
        self.phase = Phase::Open(Box::new(records));
        Ok(())
    }

    /// Collects the ClientHello and selects its key.
    fn receive_client_hello(&mut self, io: &mut dyn CipherIo) -> Result<(), TlsError> {
        let Phase::AwaitingClientHello { collected, .. } = &mut self.phase else { return Ok(()) };
        let message = loop {
            let bytes = match io.received() {
                Received::Bytes(bytes) => bytes,
                Received::WouldBlock => return Ok(()),
                Received::End => return Err(TlsError::ClosedInHandshake),
            };
            // What is beyond the limit stays where it is: a ClientHello within it is complete.
            let count = bytes.len().min(CLIENT_HELLO_BYTES_MAX - collected.len());
            collected.extend_from_slice(&bytes[..count]);
            io.consume(count);
            if let Some(message) = reassemble(collected)? {
                break message;
            }
        };
        let failed = Phase::Failed(TlsError::ClosedInHandshake);
        let Phase::AwaitingClientHello { mut connection, collected } =
            std::mem::replace(&mut self.phase, failed)
        else {
            return Ok(());
        };
        let hello = ClientHello::parse(&message)?;
        if let Role::Server { config, selected } = &mut self.role
            && let Some(source) = &config.psks
            && (hello.offers_psk() || !config.has_certificate)
        {
            let psk = hello.select_psk(&**source)?;
            connection.append_psk(&psk).map_err(handshake_error)?;
            *selected = Some((psk.identity, psk.derivation));
        }
        connection.push_received(&collected);
        self.phase = Phase::Handshake(connection);
        Ok(())
    }

    fn fail(&mut self, error: TlsError) -> TlsError {
        self.phase = Phase::Failed(error.clone());
        error
    }
}

impl Role {
    const fn side(&self) -> Side {
        match self {
            Self::Server { .. } => Side::Server,
            Self::Client(_) => Side::Client,
        }
    }

    /// Checks that what was negotiated is permitted.
    fn check_negotiated(&self, connection: &Connection) -> Result<SecureChannel, TlsError> {
        let not_permitted = |found: String| Err(TlsError::NotPermitted(found));
        if !connection.is_tls13() {
            return not_permitted("the version is older than TLS 1.3".into());
        }
        let id = connection.cipher_suite().unwrap_or_default();
        let Some(suite) = CipherSuite::from_id(id) else {
            return not_permitted(format!(
                "cipher suite {id:#06x} was selected, expected TLS_AES_128_GCM_SHA256 or \
                 TLS_AES_256_GCM_SHA384"
            ));
        };
        let identity = connection.psk_identity();
        let expected = match self {
            Self::Server { selected, .. } => {
                selected.as_ref().is_none_or(|(selected, _)| Some(selected) == identity.as_ref())
            }
            Self::Client(ClientConfig { authentication }) => match authentication {
                ClientAuthentication::Psks(psks) => identity
                    .as_ref()
                    .is_some_and(|used| psks.iter().any(|psk| psk.identity == *used)),
                // The library has verified the certificate.
                ClientAuthentication::Certificates { .. } => identity.is_none(),
            },
        };
        if !expected {
            return not_permitted("the pre-shared key was not used".into());
        }
        let psk_identity = identity.map(|identity| String::from_utf8_lossy(&identity).into_owned());
        Ok(SecureChannel { cipher_suite: suite.name(), psk_identity })
    }

    /// Cause of an error of the library during the handshake.
    fn explain(&self, connection: &Connection, error: &LibraryError) -> TlsError {
        if !matches!(error.class, ErrorClass::Alert | ErrorClass::Closed) {
            return handshake_error(error.clone());
        }
        let alert = connection.alert().map(Alert).filter(|alert| alert.0 != 0);
        let refused = alert.is_none_or(Alert::refuses_key);
        match (self, alert) {
            (
                Self::Client(ClientConfig { authentication: ClientAuthentication::Psks(psks) }),
                alert,
            ) if refused => {
                let identities = psks.iter().map(|psk| psk.identity.clone()).collect();
                TlsError::KeyRefused { alert, identities }
            }
            (_, Some(alert)) => TlsError::PeerAlert(alert),
            (_, None) => TlsError::ClosedInHandshake,
        }
    }
}

impl TlsError {
    /// Sends the alert of this error, if its cause was found before anything was encrypted.
    pub(crate) fn send_alert(&self, io: &mut dyn CipherIo) {
        if let Some(alert) = self.alert() {
            io.send(&alert.plaintext_record());
        }
    }
}

/// Configuration without certificates, which all connections with pre-shared keys share.
fn psk_config() -> Result<Arc<Config>, TlsError> {
    static CONFIG: OnceLock<Result<Arc<Config>, LibraryError>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| Config::new().map(Arc::new));
    config.clone().map_err(|error| config_error("configuration", &error))
}

fn config_error(what: &str, error: &LibraryError) -> TlsError {
    TlsError::Config(format!("TLS {what}: {} ({})", error.text, error.name))
}

fn handshake_error(error: LibraryError) -> TlsError {
    TlsError::Handshake { name: error.name, text: error.text }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerConfig")
            .field("has_psks", &self.psks.is_some())
            .field("has_certificate", &self.has_certificate)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ClientCertificate<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ClientCertificate").finish_non_exhaustive()
    }
}

impl fmt::Debug for TlsSession {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TlsSession").field("channel", &self.channel).finish_non_exhaustive()
    }
}
