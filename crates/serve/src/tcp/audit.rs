//! Audit of connections: who was accepted or refused, from where, on what proof and why.

use std::fmt;

use tenmil_base::SecureChannel;
use tenmil_nvme_auth::{Concatenation, Group, Hash};

use super::authentication::AuthenticationProof;
use super::security::SecurityState;

/// What is known about a connection, and what its peer has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionAudit {
    /// Connection id; `None` if the connection was refused before it had one.
    pub connection: Option<u64>,
    /// Address of the peer.
    pub peer: String,
    /// Port of the service.
    pub port: u16,
    /// NQN of the host, as it claims; empty if it is not known.
    pub host: String,
    /// NQN of the subsystem; empty if it is not known.
    pub subsystem: String,
    /// Queue, if Connect names one.
    pub queue: Option<u16>,
    /// Controller identifier, if a controller is concerned.
    pub cntlid: Option<u16>,
    /// Secure channel; `None` for plaintext.
    pub secure_channel: Option<SecureChannel>,
    /// Key of the secure channel.
    pub tls_key: Option<TlsKeyAudit>,
    /// Authentication, if the host has completed one on this connection.
    pub authentication: Option<AuthenticationAudit>,
}

/// Key of a TLS connection, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsKeyAudit {
    /// Names of the pre-shared keys with the identity of the connection, of which it uses one: several
    /// may have the same identity of version 0. Of a generated key, the name of the DH-HMAC-CHAP secret
    /// by which the host authenticated.
    pub names: Vec<String>,
    /// Whether an authentication generated the key.
    pub is_generated: bool,
}

/// A completed DH-HMAC-CHAP exchange. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthenticationAudit {
    /// Hash function.
    pub hash: Hash,
    /// Diffie-Hellman group.
    pub group: Group,
    /// Whether the controller has proved its identity, too.
    pub bidirectional: bool,
    /// Name of the secret that the host has proved to have, while it is configured.
    pub secret: Option<String>,
    /// Name of the secret of the controller, if the controller has proved its identity.
    pub controller_secret: Option<String>,
    /// Whether a TLS key was generated, and for what.
    pub concatenation: Concatenation,
}

/// Why a connection or a Connect was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusalReason {
    /// The address of the peer is in no permitted network.
    AddressNotPermitted,
    /// A limit of connections or of memory is reached.
    Limit,
    /// The host is not among those that may use the subsystem.
    HostNotAllowed,
    /// The subsystem is not exported at the port.
    NoSuchSubsystem,
    /// The connection has no secure channel, and one is required.
    SecureChannelRequired,
    /// The TLS handshake failed.
    TlsHandshakeFailed,
    /// The identity of the TLS key belongs to another host or subsystem.
    IdentityMismatch,
    /// The TLS key has expired or was removed.
    KeyNotValid,
    /// Authentication is required, and the host has no secret, or the controller has none.
    NoSecret,
    /// The DH-HMAC-CHAP exchange failed.
    AuthenticationFailed,
    /// The host did not complete the authentication in time.
    AuthenticationTimeout,
    /// The host identifier belongs to another host, or the host has another one.
    HostIdentifier,
    /// The requested controller or queue is not available.
    Unavailable,
    /// A field of the command is not valid.
    InvalidCommand,
    /// An error of the target.
    Internal,
}

impl RefusalReason {
    /// All reasons.
    pub const ALL: [Self; 15] = [
        Self::AddressNotPermitted,
        Self::Limit,
        Self::HostNotAllowed,
        Self::NoSuchSubsystem,
        Self::SecureChannelRequired,
        Self::TlsHandshakeFailed,
        Self::IdentityMismatch,
        Self::KeyNotValid,
        Self::NoSecret,
        Self::AuthenticationFailed,
        Self::AuthenticationTimeout,
        Self::HostIdentifier,
        Self::Unavailable,
        Self::InvalidCommand,
        Self::Internal,
    ];

    /// Stable identifier for programs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressNotPermitted => "address-not-permitted",
            Self::Limit => "limit",
            Self::HostNotAllowed => "host-not-allowed",
            Self::NoSuchSubsystem => "no-such-subsystem",
            Self::SecureChannelRequired => "secure-channel-required",
            Self::TlsHandshakeFailed => "tls-handshake-failed",
            Self::IdentityMismatch => "identity-mismatch",
            Self::KeyNotValid => "key-not-valid",
            Self::NoSecret => "no-secret",
            Self::AuthenticationFailed => "authentication-failed",
            Self::AuthenticationTimeout => "authentication-timeout",
            Self::HostIdentifier => "host-identifier",
            Self::Unavailable => "unavailable",
            Self::InvalidCommand => "invalid-command",
            Self::Internal => "internal-error",
        }
    }
}

impl ConnectionAudit {
    /// Audit of a connection that has sent nothing yet.
    #[must_use]
    pub fn of_peer(connection: Option<u64>, peer: &str, port: u16) -> Self {
        Self {
            connection,
            peer: peer.to_owned(),
            port,
            host: String::new(),
            subsystem: String::new(),
            queue: None,
            cntlid: None,
            secure_channel: None,
            tls_key: None,
            authentication: None,
        }
    }
}

impl AuthenticationAudit {
    /// Audit of a proof of `host_nqn`, with the names that its keys have.
    pub(super) fn of_proof(
        proof: &AuthenticationProof,
        host_nqn: &str,
        security: &SecurityState,
    ) -> Self {
        let AuthenticationProof { outcome, secret } = proof;
        let controller =
            security.controller_secret_name(host_nqn).filter(|_| outcome.bidirectional);
        Self {
            hash: outcome.hash,
            group: outcome.group,
            bidirectional: outcome.bidirectional,
            secret: security.secret_name(host_nqn, secret).map(str::to_owned),
            controller_secret: controller.map(str::to_owned),
            concatenation: outcome.concatenation,
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl fmt::Display for ConnectionAudit {
    /// Who it is and what it has proved: `192.0.2.7:41234 as nqn… (TLS_AES_128_GCM_SHA256, key db-tls;
    /// DH-HMAC-CHAP of the host, SHA-256, ffdhe3072, key db-chap)`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.peer)?;
        if !self.host.is_empty() {
            write!(out, " as {}", self.host)?;
        }
        match &self.secure_channel {
            Some(channel) => write!(out, " ({}", channel.cipher_suite)?,
            None => out.write_str(" (plaintext")?,
        }
        if let Some(key) = &self.tls_key {
            write!(out, ", {key}")?;
        }
        if let Some(authentication) = &self.authentication {
            write!(out, "; {authentication}")?;
        }
        out.write_str(")")
    }
}

impl fmt::Display for AuthenticationAudit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.bidirectional { "both ends" } else { "the host" };
        write!(out, "DH-HMAC-CHAP of {direction}, {}, {}", self.hash, self.group)?;
        match (&self.secret, &self.controller_secret) {
            (Some(host), Some(controller)) => write!(out, ", keys {host} and {controller}"),
            (Some(host), None) => write!(out, ", key {host}"),
            (None, _) => Ok(()),
        }
    }
}

impl fmt::Display for TlsKeyAudit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.join(" or ");
        match (self.is_generated, self.names.is_empty()) {
            (false, false) => write!(out, "key {names}"),
            (false, true) => out.write_str("a key that is configured no more"),
            (true, false) => write!(out, "key generated by {names}"),
            (true, true) => out.write_str("generated key"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::RefusalReason;

    #[test]
    fn every_refusal_reason_has_a_name_of_its_own() {
        let names: BTreeSet<_> = RefusalReason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), RefusalReason::ALL.len());
        let in_order = RefusalReason::ALL.windows(2).all(|pair| pair[0] < pair[1]);
        assert!(in_order, "each is listed once");
    }
}
