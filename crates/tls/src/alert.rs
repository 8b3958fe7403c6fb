//! Alerts (RFC 8446 §6).

use core::fmt;

/// Alert description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alert(pub u8);

impl Alert {
    /// End of the bytes of a side.
    pub const CLOSE_NOTIFY: Self = Self(0);
    /// A record or message that is not permitted here.
    pub const UNEXPECTED_MESSAGE: Self = Self(10);
    /// A record is not authentic.
    pub const BAD_RECORD_MAC: Self = Self(20);
    /// A record is too long.
    pub const RECORD_OVERFLOW: Self = Self(22);
    /// A field has no permitted value.
    pub const ILLEGAL_PARAMETER: Self = Self(47);
    /// An error that is not the peer's.
    pub const INTERNAL_ERROR: Self = Self(80);
    /// The peer gives up; close_notify follows.
    pub const USER_CANCELED: Self = Self(90);
    /// No acceptable parameters.
    pub const HANDSHAKE_FAILURE: Self = Self(40);
    /// A message has an invalid format.
    pub const DECODE_ERROR: Self = Self(50);
    /// A binder or signature is wrong.
    pub const DECRYPT_ERROR: Self = Self(51);
    /// No common version.
    pub const PROTOCOL_VERSION: Self = Self(70);
    /// A required extension is absent.
    pub const MISSING_EXTENSION: Self = Self(109);
    /// No offered identity is known.
    pub const UNKNOWN_PSK_IDENTITY: Self = Self(115);

    /// Whether a server sends it if it does not accept the key of the client. The specification's are
    /// the last two; GnuTLS and OpenSSL send the others.
    #[must_use]
    pub const fn refuses_key(self) -> bool {
        matches!(self.0, 40 | 47 | 51 | 115)
    }

    /// Record that carries the alert before encryption.
    pub(crate) const fn plaintext_record(self) -> [u8; 7] {
        [21, 3, 3, 0, 2, 2, self.0]
    }

    /// Content of a record: level and description. The level has no meaning in TLS 1.3, but the two
    /// that announce an end are warnings (RFC 8446 §6.1).
    pub(crate) const fn content(self) -> [u8; 2] {
        let is_warning = self.0 == Self::CLOSE_NOTIFY.0 || self.0 == Self::USER_CANCELED.0;
        [if is_warning { 1 } else { 2 }, self.0]
    }

    /// Name in the specification.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "close_notify",
            10 => "unexpected_message",
            20 => "bad_record_mac",
            22 => "record_overflow",
            40 => "handshake_failure",
            42 => "bad_certificate",
            43 => "unsupported_certificate",
            44 => "certificate_revoked",
            45 => "certificate_expired",
            46 => "certificate_unknown",
            47 => "illegal_parameter",
            48 => "unknown_ca",
            49 => "access_denied",
            50 => "decode_error",
            51 => "decrypt_error",
            70 => "protocol_version",
            71 => "insufficient_security",
            80 => "internal_error",
            86 => "inappropriate_fallback",
            90 => "user_canceled",
            109 => "missing_extension",
            110 => "unsupported_extension",
            112 => "unrecognized_name",
            113 => "bad_certificate_status_response",
            115 => "unknown_psk_identity",
            116 => "certificate_required",
            120 => "no_application_protocol",
            _ => return None,
        })
    }

    /// What it means for a user.
    const fn meaning(self) -> Option<&'static str> {
        Some(match self.0 {
            20 => "a record was changed on its way",
            40 | 71 => "no common parameters, or no acceptable key",
            45 => "a certificate has expired",
            48 => "the certificate authority is not trusted there",
            51 => "the two ends have different keys",
            70 => "no common TLS version",
            109 => "the peer expects a pre-shared key or certificate",
            115 => "the peer has no key for this identity",
            116 => "the peer requires a client certificate",
            _ => return None,
        })
    }
}

impl fmt::Display for Alert {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(out, "alert {name}")?,
            None => write!(out, "alert {}", self.0)?,
        }
        match self.meaning() {
            Some(meaning) => write!(out, " ({meaning})"),
            None => Ok(()),
        }
    }
}
