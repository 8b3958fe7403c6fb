//! Errors of a session, in words that name the fix, and the alert that the peer gets for each.

use core::fmt;

use tenmil_base::{ErrorCategory, StreamError};

use crate::alert::Alert;
use crate::record::RecordViolation;
use crate::suite::CipherSuite;

/// Why a session has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsError {
    /// The peer does not begin with a TLS record.
    NotTls {
        /// First byte that was received.
        first_byte: u8,
    },
    /// The ClientHello violates its format.
    MalformedClientHello(&'static str),
    /// The client does not offer TLS 1.3.
    NoTls13,
    /// The client offers no pre-shared key.
    NoPsk,
    /// The client does not offer a key exchange with its pre-shared key.
    NoPskDheKe,
    /// The client sends early data, which can be replayed.
    EarlyData,
    /// No key has an identity that the client offers.
    UnknownIdentity {
        /// Offered identities.
        identities: Vec<Vec<u8>>,
        /// Where keys were searched.
        searched: String,
    },
    /// The client has another key of this identity.
    WrongKey {
        /// The identity.
        identity: Vec<u8>,
    },
    /// The client does not offer the cipher suite of its key.
    NoCommonSuite {
        /// Offered suites.
        offered: Vec<u16>,
        /// Suite of the key.
        expected: CipherSuite,
    },
    /// The server has refused the offered identities, with this alert or by closing the connection.
    KeyRefused {
        /// Alert; `None` if the server has closed the connection.
        alert: Option<Alert>,
        /// Offered identities.
        identities: Vec<Vec<u8>>,
    },
    /// The peer has selected something that was not offered or is not permitted.
    NotPermitted(String),
    /// The peer has ended the session with this alert.
    PeerAlert(Alert),
    /// The peer has closed the connection during the handshake.
    ClosedInHandshake,
    /// The connection ended without the alert that announces its end: data may be missing.
    Truncated,
    /// A record is not authentic, or violates the protocol.
    BadRecord(RecordViolation),
    /// The cipher of the library has failed.
    Cipher,
    /// The handshake has failed in the library.
    Handshake {
        /// Name of the library's error.
        name: String,
        /// Text of the library.
        text: String,
    },
    /// A certificate, private key or configuration is not usable.
    Config(String),
    /// The stream below has failed.
    Stream(StreamError),
}

impl TlsError {
    /// Alert that the peer is sent, if the peer can be told.
    pub(crate) const fn alert(&self) -> Option<Alert> {
        Some(match self {
            Self::MalformedClientHello(_) => Alert::DECODE_ERROR,
            Self::NoTls13 => Alert::PROTOCOL_VERSION,
            Self::NoPsk => Alert::MISSING_EXTENSION,
            Self::NoPskDheKe | Self::EarlyData | Self::NoCommonSuite { .. } => {
                Alert::HANDSHAKE_FAILURE
            }
            Self::UnknownIdentity { .. } => Alert::UNKNOWN_PSK_IDENTITY,
            Self::WrongKey { .. } => Alert::DECRYPT_ERROR,
            Self::BadRecord(violation) => violation.alert(),
            Self::Cipher => Alert::INTERNAL_ERROR,
            _ => return None,
        })
    }

    /// Short name of the cause, the same for all errors of one kind, for counters and events.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NotTls { .. } => "not-tls",
            Self::MalformedClientHello(_) => "malformed-client-hello",
            Self::NoTls13 => "no-tls-1.3",
            Self::NoPsk => "no-psk",
            Self::NoPskDheKe => "no-psk-dhe-ke",
            Self::EarlyData => "early-data",
            Self::UnknownIdentity { .. } => "unknown-identity",
            Self::WrongKey { .. } => "wrong-key",
            Self::NoCommonSuite { .. } => "no-common-suite",
            Self::KeyRefused { .. } => "key-refused",
            Self::NotPermitted(_) => "not-permitted",
            Self::PeerAlert(_) => "peer-alert",
            Self::ClosedInHandshake => "closed-in-handshake",
            Self::Truncated => "truncated",
            Self::BadRecord(_) => "bad-record",
            Self::Cipher => "cipher",
            Self::Handshake { .. } => "handshake",
            Self::Config(_) => "config",
            Self::Stream(_) => "stream",
        }
    }

    /// Next step, if one is known.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NotTls { .. } => "the peer has to use TLS: `--tls` of `nvme connect`",
            Self::NoPsk => "the peer needs a key: `nvme gen-tls-key --insert` on a Linux host",
            Self::UnknownIdentity { .. } => {
                "give both ends the same key for this host NQN and subsystem NQN"
            }
            Self::WrongKey { .. } => {
                "give both ends the same key; both derivations, the specification's and that of \
                 libnvme before 1.15, were tried"
            }
            Self::KeyRefused { .. } => {
                "give both ends the same key; a peer with libnvme before 1.15 derives other keys \
                 and identities from it: use derivation=libnvme-1.13 in the URI, or a newer \
                 libnvme there"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTls { first_byte } => write!(
                out,
                "TLS handshake: the first byte is {first_byte:#04x}, expected 0x16, a TLS record"
            ),
            Self::MalformedClientHello(what) => {
                write!(out, "TLS handshake: ClientHello is malformed: {what}")
            }
            Self::NoTls13 => out.write_str("TLS handshake: the client does not offer TLS 1.3"),
            Self::NoPsk => out.write_str("TLS handshake: the client offers no pre-shared key"),
            Self::NoPskDheKe => out.write_str(
                "TLS handshake: the client does not offer psk_dhe_ke, a key exchange with its \
                 pre-shared key",
            ),
            Self::EarlyData => {
                out.write_str("TLS handshake: the client sends early data, expected none")
            }
            Self::UnknownIdentity { identities, searched } => {
                out.write_str("TLS handshake: no key for identity ")?;
                write_identities(out, identities)?;
                write!(out, " in {searched}")
            }
            Self::WrongKey { identity } => {
                out.write_str("TLS handshake: the client has another key for identity ")?;
                write_identities(out, std::slice::from_ref(identity))
            }
            Self::NoCommonSuite { offered, expected } => {
                out.write_str("TLS handshake: the client offers cipher suites")?;
                for suite in offered.iter().take(16) {
                    match CipherSuite::from_id(*suite) {
                        Some(suite) => write!(out, " {}", suite.name())?,
                        None => write!(out, " {suite:#06x}")?,
                    }
                }
                write!(out, ", expected {}, which its key requires", expected.name())
            }
            Self::KeyRefused { alert, identities } => {
                match alert {
                    Some(alert) => write!(out, "TLS handshake: the server refused with {alert} ")?,
                    None => out.write_str("TLS handshake: the server closed the connection ")?,
                }
                out.write_str("when offered identity ")?;
                write_identities(out, identities)
            }
            Self::NotPermitted(found) => write!(out, "TLS handshake: {found}"),
            Self::PeerAlert(alert) => write!(out, "TLS: the peer ended the session with {alert}"),
            Self::ClosedInHandshake => {
                out.write_str("TLS handshake: the peer closed the connection before its end")
            }
            Self::Truncated => out.write_str(
                "TLS: the connection ended without close_notify: data of the peer may be missing",
            ),
            Self::BadRecord(RecordViolation::NotAuthentic) => out.write_str(
                "TLS: a record is not authentic: its tag is wrong, it was changed on its way",
            ),
            Self::BadRecord(violation) => {
                write!(out, "TLS: a record violates the protocol: {violation}")
            }
            Self::Cipher => out.write_str("TLS: the cipher of the library failed"),
            Self::Handshake { name, text } => write!(out, "TLS handshake: {text} ({name})"),
            Self::Config(what) => out.write_str(what),
            Self::Stream(error) => error.fmt(out),
        }
    }
}

impl core::error::Error for TlsError {}

impl From<TlsError> for StreamError {
    fn from(error: TlsError) -> Self {
        match error {
            TlsError::Stream(error) => error,
            error => Self(match error.hint() {
                Some(hint) => format!("{error}; fix: {hint}"),
                None => error.to_string(),
            }),
        }
    }
}

impl From<TlsError> for tenmil_base::Error {
    fn from(error: TlsError) -> Self {
        let category = match error {
            TlsError::Config(_) => ErrorCategory::Usage,
            _ => ErrorCategory::Remote,
        };
        let made = Self::new(category, &error);
        match error.hint() {
            Some(hint) => made.with_hint(hint),
            None => made,
        }
    }
}

/// Writes identities, which a peer may have chosen: escaped, and not all of many.
fn write_identities(out: &mut fmt::Formatter<'_>, identities: &[Vec<u8>]) -> fmt::Result {
    const IDENTITIES_MAX: usize = 4;
    const BYTES_MAX: usize = 600;
    for (index, identity) in identities.iter().take(IDENTITIES_MAX).enumerate() {
        let separator = if index == 0 { "" } else { " or " };
        let shown = &identity[..identity.len().min(BYTES_MAX)];
        let rest = if shown.len() < identity.len() { "…" } else { "" };
        write!(out, "{separator}\"{}{rest}\"", shown.escape_ascii())?;
    }
    match identities.len().checked_sub(IDENTITIES_MAX) {
        Some(more) if more > 0 => write!(out, " or {more} more"),
        _ => Ok(()),
    }
}
