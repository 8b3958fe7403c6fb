//! Why an authentication failed (Base 2.2 §8.3.4.5.8).

use core::fmt;

/// Reason code explanation of a failure message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// `01`: a response did not match, so the peers do not have the same secret.
    AuthenticationFailed,
    /// `02`: no authentication protocol of the offer is usable.
    ProtocolNotUsable,
    /// `03`: secure channel concatenation is required, not permitted or not possible.
    ConcatenationMismatch,
    /// `04`: no hash function of the offer is usable.
    HashNotUsable,
    /// `05`: no Diffie-Hellman group of the offer is usable.
    GroupNotUsable,
    /// `06`: a field of a message is wrong.
    IncorrectPayload,
    /// `07`: a message was not expected.
    IncorrectMessage,
    /// Another code.
    Other(u8),
}

impl FailureReason {
    /// Reason with a code.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            1 => Self::AuthenticationFailed,
            2 => Self::ProtocolNotUsable,
            3 => Self::ConcatenationMismatch,
            4 => Self::HashNotUsable,
            5 => Self::GroupNotUsable,
            6 => Self::IncorrectPayload,
            7 => Self::IncorrectMessage,
            other => Self::Other(other),
        }
    }

    /// Code in a failure message.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::AuthenticationFailed => 1,
            Self::ProtocolNotUsable => 2,
            Self::ConcatenationMismatch => 3,
            Self::HashNotUsable => 4,
            Self::GroupNotUsable => 5,
            Self::IncorrectPayload => 6,
            Self::IncorrectMessage => 7,
            Self::Other(code) => code,
        }
    }
}

impl fmt::Display for FailureReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::AuthenticationFailed => "authentication failed",
            Self::ProtocolNotUsable => "authentication protocol not usable",
            Self::ConcatenationMismatch => "secure channel concatenation mismatch",
            Self::HashNotUsable => "hash function not usable",
            Self::GroupNotUsable => "Diffie-Hellman group not usable",
            Self::IncorrectPayload => "incorrect payload",
            Self::IncorrectMessage => "incorrect protocol message",
            Self::Other(code) => return write!(out, "reason {code:#04x}"),
        })
    }
}

/// End that ended the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureSide {
    /// This one.
    Local,
    /// The peer, with a failure message.
    Peer,
}

/// Failed authentication. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason in the failure message.
    pub reason: FailureReason,
    /// End that ended the exchange.
    pub side: FailureSide,
    /// What was found and what was expected; empty if the peer ended the exchange.
    pub detail: String,
}

impl Failure {
    pub(crate) fn local(reason: FailureReason, detail: impl fmt::Display) -> Self {
        Self { reason, side: FailureSide::Local, detail: detail.to_string() }
    }

    pub(crate) const fn by_peer(code: u8) -> Self {
        let reason = FailureReason::from_code(code);
        Self { reason, side: FailureSide::Peer, detail: String::new() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, side, detail } = self;
        match side {
            FailureSide::Local => write!(out, "DH-HMAC-CHAP: {reason}: {detail}"),
            FailureSide::Peer => write!(out, "DH-HMAC-CHAP: peer reports: {reason}"),
        }
    }
}

impl core::error::Error for Failure {}

impl From<Failure> for tenmil_base::Error {
    fn from(failure: Failure) -> Self {
        let reason = failure.reason;
        let error = Self::remote(failure);
        match reason {
            FailureReason::AuthenticationFailed => {
                error.with_hint("compare the DHHC-1 secrets and the NQNs of both ends")
            }
            FailureReason::HashNotUsable | FailureReason::GroupNotUsable => {
                error.with_hint("compare the hash functions and groups that both ends permit")
            }
            _ => error,
        }
    }
}
