//! Security of exports: keys of hosts, what they must prove, and which TLS keys belong to an identity.
//!
//! ```text
//!   Port                PortSecurity          plaintext, TLS, or both
//!   SubsystemExport     SubsystemSecurity     by host NQN: CHAP secrets, PSKs, rights
//!   discovery service   SubsystemSecurity
//!   GeneratedPsks       one per secure channel concatenation, for an hour
//!        └── Service::tls_psks_of_identity ──► TLS handshake
//! ```

mod generated_psks;
mod requirement;
mod secret_removal;

use std::collections::BTreeMap;

use tenmil_base::{Error, Instant};
use tenmil_nvme_auth::{
    ChapSecret, ConfiguredPsk, Controller, ControllerConfig, Policy, PskKind, TlsPsk,
    tls_psk_candidates,
};
use tenmil_nvme_controller::controller::NamespaceRights;
pub use tenmil_nvme_controller::controller::NamespaceSelection;
use tenmil_wire::log::discovery::{SecureChannel, SecurityType};

use crate::peer_network::PeerNetwork;

pub(super) use generated_psks::GeneratedPsks;
pub(super) use requirement::{
    ConnectedQueue, ConnectingQueue, Credentials, Refusal, Requirement, Verdict,
};
#[cfg(test)]
pub(super) use secret_removal::REMOVAL_GRACE;
pub(super) use secret_removal::SecretRemoval;
pub(super) use tenmil_nvme_auth::PskIdentity;

/// Keys of a host for one subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostKeys {
    /// DH-HMAC-CHAP secrets of the host, of which it must prove that it has one. Several allow for
    /// rotation. A host that has any must authenticate.
    pub chap_secrets: Vec<NamedKey<ChapSecret>>,
    /// Secret by which the controller proves its identity to the host, if the host asks for that.
    pub controller_secret: Option<NamedKey<ChapSecret>>,
    /// Pre-shared keys of TLS connections. Several allow for rotation.
    pub psks: Vec<NamedKey<ConfiguredPsk>>,
    /// Pre-shared keys that are derived already, as those of the kernel's keyring: of this host, and of any
    /// subsystem.
    pub tls_psks: Vec<TlsPsk>,
}

/// Key with its name in the keyring, by which events and management report it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedKey<K> {
    /// Name.
    pub name: String,
    /// Key.
    pub key: K,
}

/// Security of a subsystem, or of the discovery service. The default requires nothing of a host
/// without CHAP secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemSecurity {
    /// Keys by host NQN. They do not restrict which hosts may connect:
    /// [`AllowedHosts`](super::AllowedHosts) does.
    pub hosts: BTreeMap<String, HostKeys>,
    /// A host without a CHAP secret is rejected.
    pub authentication_required: bool,
    /// A connection without TLS is rejected, unless its host generates a key for a TLS connection by
    /// authentication (secure channel concatenation).
    pub secure_channel_required: bool,
    /// Each I/O queue is authenticated, too, and not the admin queue only; the default. Without it, a
    /// plaintext I/O queue proves no more than that it knows the controller and host identifiers.
    pub authenticate_io_queues: bool,
    /// Hash functions, groups and concatenation of authentications.
    pub policy: Policy,
    /// Networks whose peers may connect; any if it is empty.
    pub networks: Vec<PeerNetwork>,
    /// Rights by host NQN; a host that is not listed has all.
    pub rights: BTreeMap<String, HostRights>,
}

/// Rights of a host in a subsystem. The default is unlimited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRights {
    /// Namespaces that the host may only read: it changes no data and no reservations of them.
    pub read_only: NamespaceSelection,
    /// Whether the host may register and hold reservations.
    pub reservations: bool,
    /// Connections of the host, to all subsystems together. Applies to new connections.
    pub connections_max: Option<usize>,
    /// Buffer memory of all connections of the host in bytes, beside two pages of each. Its largest
    /// command gets memory even so, once the host holds none. Applies from the host's next connection.
    pub memory_bytes_max: Option<u64>,
}

/// Which connections a port accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortSecurity {
    /// Only plaintext.
    #[default]
    Plaintext,
    /// TLS and plaintext: the first byte of a connection decides.
    TlsAllowed,
    /// Only TLS.
    TlsRequired,
}

/// Security of an export, with the keys that were generated.
#[derive(Debug, Default)]
pub(super) struct SecurityState {
    pub(super) security: SubsystemSecurity,
    pub(super) generated: GeneratedPsks,
}

impl SecurityState {
    pub(super) fn new(security: SubsystemSecurity) -> Self {
        Self { security, generated: GeneratedPsks::default() }
    }

    /// Replaces the configuration. Keys are removed that were generated with a secret that is gone.
    pub(super) fn replace(&mut self, security: SubsystemSecurity) {
        self.security = security;
        let mut generated = std::mem::take(&mut self.generated);
        generated.retain_secrets(|host_nqn, secret| self.has_secret(host_nqn, secret));
        self.generated = generated;
    }

    /// TLS PSKs with an identity, configured and generated.
    pub(super) fn tls_psks(&self, now: Instant, identity: &PskIdentity<'_>) -> Vec<TlsPsk> {
        match identity.kind {
            PskKind::Retained => self.security.configured_tls_psks(identity),
            PskKind::Generated => self.generated.tls_psks(now, identity),
        }
    }
}

impl<K> NamedKey<K> {
    /// Creates a key with this name.
    pub fn new(name: impl Into<String>, key: K) -> Self {
        Self { name: name.into(), key }
    }
}

impl HostKeys {
    /// DH-HMAC-CHAP secrets of the host, without their names.
    fn chap_secrets(&self) -> Vec<ChapSecret> {
        self.chap_secrets.iter().map(|secret| secret.key.clone()).collect()
    }

    /// Secret of the controller, without its name.
    fn controller_secret(&self) -> Option<ChapSecret> {
        self.controller_secret.as_ref().map(|secret| secret.key.clone())
    }

    /// Pre-shared keys, without their names.
    fn psks(&self) -> Vec<ConfiguredPsk> {
        self.psks.iter().map(|psk| psk.key.clone()).collect()
    }

    fn has_chap_secret(&self, secret: &ChapSecret) -> bool {
        self.chap_secrets.iter().any(|known| known.key == *secret)
    }
}

impl Default for SubsystemSecurity {
    fn default() -> Self {
        Self {
            hosts: BTreeMap::new(),
            authentication_required: false,
            secure_channel_required: false,
            authenticate_io_queues: true,
            policy: Policy::default(),
            networks: Vec::new(),
            rights: BTreeMap::new(),
        }
    }
}

impl Default for HostRights {
    fn default() -> Self {
        Self {
            read_only: NamespaceSelection::None,
            reservations: true,
            connections_max: None,
            memory_bytes_max: None,
        }
    }
}

impl HostRights {
    /// Rights to namespaces.
    pub(super) fn namespace_rights(&self) -> NamespaceRights {
        NamespaceRights { read_only: self.read_only.clone(), reservations: self.reservations }
    }
}

impl PortSecurity {
    /// Whether the port accepts plaintext connections.
    #[must_use]
    pub const fn accepts_plaintext(self) -> bool {
        !matches!(self, Self::TlsRequired)
    }

    /// Whether the port accepts TLS connections.
    #[must_use]
    pub const fn accepts_tls(self) -> bool {
        !matches!(self, Self::Plaintext)
    }

    /// SECTYPE of a discovery log page entry (TCP 1.1 §3.6.1.1).
    pub(super) const fn security_type(self) -> SecurityType {
        if self.accepts_tls() { SecurityType::Tls13 } else { SecurityType::None }
    }

    /// TREQ of a discovery log page entry, for a subsystem that requires a secure channel or not.
    pub(super) const fn secure_channel(self, is_required: bool) -> SecureChannel {
        match self {
            Self::TlsRequired => SecureChannel::Required,
            Self::Plaintext | Self::TlsAllowed if is_required => SecureChannel::Required,
            Self::Plaintext | Self::TlsAllowed => SecureChannel::NotRequired,
        }
    }
}

impl SubsystemSecurity {
    /// Checks that each host with CHAP secrets can authenticate.
    ///
    /// # Errors
    ///
    /// If the policy permits no hash function or group that is needed, or requires a secret of the
    /// controller that a host lacks. The error names the host.
    pub fn check(&self, subsystem_nqn: &str) -> Result<(), Error> {
        for (host_nqn, keys) in self.hosts.iter().filter(|(_, keys)| !keys.chap_secrets.is_empty())
        {
            Controller::new(ControllerConfig {
                host_nqn: host_nqn.clone(),
                subsystem_nqn: subsystem_nqn.to_owned(),
                host_secrets: keys.chap_secrets(),
                controller_secret: keys.controller_secret(),
                admin_queue: true,
                secure_channel: false,
                policy: self.policy.clone(),
            })
            .map_err(|error| {
                Error::usage(format!("export {subsystem_nqn} to {host_nqn}: {error}"))
            })?;
        }
        Ok(())
    }

    /// Keys of a host, if it has any.
    pub(super) fn keys_of_host(&self, host_nqn: &str) -> Option<&HostKeys> {
        self.hosts.get(host_nqn)
    }

    /// Rights of a host.
    pub(super) fn rights_of_host(&self, host_nqn: &str) -> HostRights {
        self.rights.get(host_nqn).cloned().unwrap_or_default()
    }

    /// Configured TLS PSKs with an identity.
    pub(super) fn configured_tls_psks(&self, identity: &PskIdentity<'_>) -> Vec<TlsPsk> {
        let Some(keys) = self.keys_of_host(identity.host_nqn) else { return Vec::new() };
        let mut psks = tls_psk_candidates(&keys.psks(), identity.host_nqn, identity.subsystem_nqn);
        psks.extend_from_slice(&keys.tls_psks);
        psks.retain(|psk| psk.identity == identity.text);
        psks
    }
}
