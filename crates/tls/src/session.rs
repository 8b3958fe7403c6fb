//! One TLS session without a socket: encrypted bytes in and out, plaintext in and out.
//!
//! ```text
//!  server   AwaitingClientHello ─► key selected ─► Handshake ─► Open ─► Failed
//!  client                                          Handshake ─► Open ─► Failed
//! ```
//!
//! A session has no clock and no threads. The owner calls it when bytes have arrived, and ends it if the
//! handshake takes too long.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use tenmil_base::{SecureChannel, Segment};
use tenmil_dma::RegionTable;
use tenmil_nvme_auth::Derivation;

use crate::alert::Alert;
use crate::client_hello::{CLIENT_HELLO_BYTES_MAX, ClientHello, reassemble};
use crate::error::TlsError;
use crate::library::{
    CipherIo, Config, Connection, ErrorClass, GatherList, LibraryError, Mode, Received,
};
use crate::psk::{Psk, PskSource};
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
    psks: Arc<[Psk]>,
}

/// TLS session of one connection.
pub struct TlsSession {
    connection: Connection,
    phase: Phase,
    role: Role,
    channel: Option<SecureChannel>,
}

enum Phase {
    /// The server collects the records of the first message.
    AwaitingClientHello(Vec<u8>),
    Handshake,
    Open,
    Failed(TlsError),
}

enum Role {
    Server { config: ServerConfig, selected: Option<(Vec<u8>, Option<Derivation>)> },
    Client(ClientConfig),
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plaintext {
    /// Number of bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    WouldBlock,
    /// The peer has announced the end of its bytes.
    End,
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
        Ok(Self { psks: offered.into() })
    }

    fn identities(&self) -> Vec<Vec<u8>> {
        self.psks.iter().map(|psk| psk.identity.clone()).collect()
    }
}

impl TlsSession {
    /// Creates the server side.
    ///
    /// # Errors
    ///
    /// If the library is out of memory.
    pub fn server(config: &ServerConfig) -> Result<Self, TlsError> {
        let connection = Connection::new(Mode::Server, &config.config).map_err(handshake_error)?;
        let role = Role::Server { config: config.clone(), selected: None };
        let phase = Phase::AwaitingClientHello(Vec::new());
        Ok(Self { connection, phase, role, channel: None })
    }

    /// Creates the client side.
    ///
    /// # Errors
    ///
    /// If a key is not usable, or the library is out of memory.
    pub fn client(config: &ClientConfig) -> Result<Self, TlsError> {
        let mut connection =
            Connection::new(Mode::Client, &psk_config()?).map_err(handshake_error)?;
        for psk in config.psks.iter() {
            connection.append_psk(psk).map_err(|error| config_error("pre-shared key", &error))?;
        }
        let role = Role::Client(config.clone());
        Ok(Self { connection, phase: Phase::Handshake, role, channel: None })
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

    /// Whether decrypted bytes, or encrypted ones that were not looked at, may be left.
    #[must_use]
    pub fn may_have_more(&self) -> bool {
        !self.connection.is_drained() || self.connection.has_decrypted()
    }

    /// Encrypted bytes that were received before those of the next calls' `io`.
    pub fn push_received(&mut self, bytes: &[u8]) {
        self.connection.push_received(bytes);
    }

    /// Frees buffers that hold nothing; called when the session is idle.
    pub fn release_buffers(&mut self) {
        self.connection.release_buffers();
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
        self.send_list(io, &list)
    }

    /// Encrypts and sends all of `list`.
    pub(crate) fn send_list(
        &mut self,
        io: &mut dyn CipherIo,
        list: &GatherList<'_>,
    ) -> Result<(), TlsError> {
        self.check_open()?;
        match self.connection.send(io, list) {
            Poll::Ready(Ok(count)) if count == list.len_bytes() => Ok(()),
            Poll::Ready(Err(error)) => Err(self.fail_with(&error)),
            // The sink accepts everything, so the library is never blocked.
            Poll::Ready(Ok(_)) | Poll::Pending => {
                Err(self.fail(TlsError::BadRecord { name: "send was blocked".into() }))
            }
        }
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
        self.check_open()?;
        if into.is_empty() {
            return Ok(Plaintext::WouldBlock);
        }
        let received = self.connection.receive(io, into);
        self.convert_received(received)
    }

    /// Receives decrypted bytes into a segment. `None`: it has no address in this process.
    pub(crate) fn receive_into_segment(
        &mut self,
        io: &mut dyn CipherIo,
        regions: &RegionTable,
        segment: Segment,
    ) -> Option<Result<Plaintext, TlsError>> {
        if let Err(error) = self.check_open() {
            return Some(Err(error));
        }
        let received = self.connection.receive_into_segment(io, regions, segment)?;
        Some(self.convert_received(received))
    }

    /// Announces the end of this side's bytes. The peer may go on to send.
    pub fn close_notify(&mut self, io: &mut dyn CipherIo) {
        if matches!(self.phase, Phase::Open) {
            // A failure is that of the stream, which is about to be closed.
            let _ = self.connection.close_notify(io);
        }
    }

    /// Encrypts with new keys from the next send on.
    ///
    /// # Errors
    ///
    /// If the session has failed, or its handshake has not ended.
    pub fn update_keys(&mut self) -> Result<(), TlsError> {
        self.check_open()?;
        self.connection.request_key_update().map_err(|error| self.fail_with(&error))
    }

    fn check_open(&self) -> Result<(), TlsError> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Failed(error) => Err(error.clone()),
            _ => Err(TlsError::Config("TLS: the handshake has not ended".into())),
        }
    }

    fn try_handshake(&mut self, io: &mut dyn CipherIo) -> Result<bool, TlsError> {
        if matches!(self.phase, Phase::Open) {
            return Ok(true);
        }
        if !self.receive_client_hello(io)? {
            return Ok(false);
        }
        match self.connection.negotiate(io) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(())) => {
                self.channel = Some(self.check_negotiated()?);
                self.connection.free_handshake();
                self.phase = Phase::Open;
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(self.explain(&error)),
        }
    }

    /// Collects the ClientHello and selects its key. True once this is done.
    fn receive_client_hello(&mut self, io: &mut dyn CipherIo) -> Result<bool, TlsError> {
        let Phase::AwaitingClientHello(collected) = &mut self.phase else { return Ok(true) };
        let message = loop {
            let bytes = match io.received() {
                Received::Bytes(bytes) => bytes,
                Received::WouldBlock => return Ok(false),
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
        let collected = std::mem::take(collected);
        let Role::Server { config, selected } = &mut self.role else { return Ok(true) };
        let hello = ClientHello::parse(&message)?;
        if let Some(source) = &config.psks
            && (hello.offers_psk() || !config.has_certificate)
        {
            let psk = hello.select_psk(&**source)?;
            self.connection.append_psk(&psk).map_err(handshake_error)?;
            *selected = Some((psk.identity, psk.derivation));
        }
        self.connection.push_received(&collected);
        self.phase = Phase::Handshake;
        Ok(true)
    }

    /// Checks that what was negotiated is permitted.
    fn check_negotiated(&self) -> Result<SecureChannel, TlsError> {
        let not_permitted = |found: String| Err(TlsError::NotPermitted(found));
        if !self.connection.is_tls13() {
            return not_permitted("the version is older than TLS 1.3".into());
        }
        let id = self.connection.cipher_suite().unwrap_or_default();
        let Some(suite) = CipherSuite::from_id(id) else {
            return not_permitted(format!(
                "cipher suite {id:#06x} was selected, expected TLS_AES_128_GCM_SHA256 or \
                 TLS_AES_256_GCM_SHA384"
            ));
        };
        let identity = self.connection.psk_identity();
        let expected = match &self.role {
            Role::Server { selected, .. } => {
                selected.as_ref().is_none_or(|(selected, _)| Some(selected) == identity.as_ref())
            }
            Role::Client(config) => identity
                .as_ref()
                .is_some_and(|used| config.psks.iter().any(|psk| psk.identity == *used)),
        };
        if !expected {
            return not_permitted("the pre-shared key was not used".into());
        }
        let psk_identity = identity.map(|identity| String::from_utf8_lossy(&identity).into_owned());
        Ok(SecureChannel { cipher_suite: suite.name(), psk_identity })
    }

    fn convert_received(
        &mut self,
        received: Poll<Result<usize, LibraryError>>,
    ) -> Result<Plaintext, TlsError> {
        match received {
            Poll::Pending => Ok(Plaintext::WouldBlock),
            Poll::Ready(Ok(0)) => Ok(Plaintext::End),
            Poll::Ready(Ok(count)) => Ok(Plaintext::Bytes(count)),
            Poll::Ready(Err(error)) => Err(self.fail_with(&error)),
        }
    }

    fn fail_with(&mut self, error: &LibraryError) -> TlsError {
        let error = self.explain(error);
        self.fail(error)
    }

    fn fail(&mut self, error: TlsError) -> TlsError {
        self.phase = Phase::Failed(error.clone());
        error
    }

    /// Cause of an error of the library.
    fn explain(&self, error: &LibraryError) -> TlsError {
        let is_open = matches!(self.phase, Phase::Open);
        let name = error.name.clone();
        match error.class {
            ErrorClass::Closed if is_open => TlsError::Truncated,
            ErrorClass::Alert | ErrorClass::Closed if !is_open => {
                let alert = self.connection.alert().map(Alert).filter(|alert| alert.0 != 0);
                let refused = alert.is_none_or(Alert::refuses_key);
                match (&self.role, alert) {
                    (Role::Client(config), alert) if refused => {
                        TlsError::KeyRefused { alert, identities: config.identities() }
                    }
                    (_, Some(alert)) => TlsError::PeerAlert(alert),
                    (_, None) => TlsError::ClosedInHandshake,
                }
            }
            ErrorClass::Alert => self
                .connection
                .alert()
                .map_or(TlsError::Truncated, |alert| TlsError::PeerAlert(Alert(alert))),
            _ if is_open => TlsError::BadRecord { name },
            _ => TlsError::Handshake { name, text: error.text.clone() },
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

impl fmt::Debug for TlsSession {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TlsSession").field("channel", &self.channel).finish_non_exhaustive()
    }
}
