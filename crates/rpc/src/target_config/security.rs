//! Security of a target: TLS of listeners, keys and rights of hosts, authentication.
//!
//! ```toml
//! keyring = "/etc/tenmil/keys"
//!
//! [[listener]]
//! address = "192.0.2.1:4420"
//! tls = "required"                              # allowed: TLS or plaintext; off
//!
//! [discovery]
//! authentication = "required"
//!
//! [[subsystem]]
//! nqn = "nqn.2026-01.org.example:disks"
//! allowed-hosts = [
//!     { nqn = "nqn.2014-08.org.example:db", dhchap = ["db-chap"], psk = ["db-tls", "db-tls-old"] },
//! ]
//! authentication = "required"
//! secure-channel = "required"
//! ```
//!
//! The file has names of keys; [`SecurityConfig::read_keys`] reads them from the keyring.

use std::collections::BTreeMap;

use tenmil_base::Error;
use tenmil_keyring::{KeyName, Keyring, KeyringError};
use tenmil_nvme_auth::Policy;
use tenmil_serve::PeerNetwork;
use tenmil_serve::tcp::{HostKeys, HostRights, PortSecurity, SubsystemSecurity};

use super::IgnoredLineNumber;

/// Security of a subsystem, or of the discovery service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityConfig {
    /// Hosts with keys or rights of their own.
    pub hosts: Vec<HostSecurityConfig>,
    /// Whether a host without a DH-HMAC-CHAP secret is rejected.
    pub authentication_required: bool,
    /// Whether a connection without TLS is rejected.
    pub secure_channel_required: bool,
    /// Whether each I/O queue is authenticated, too.
    pub authenticate_io_queues: bool,
    /// Hash functions, groups and concatenation of authentications.
    pub policy: Policy,
    /// Networks whose peers may connect; any if it is empty.
    pub networks: Vec<PeerNetwork>,
}

/// Keys and rights of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSecurityConfig {
    /// Host NQN.
    pub nqn: String,
    /// DH-HMAC-CHAP secrets of the host. Several allow for rotation.
    pub dhchap: Vec<KeyReference>,
    /// DH-HMAC-CHAP secret of the controller.
    pub dhchap_controller: Option<KeyReference>,
    /// Pre-shared keys of TLS. Several allow for rotation.
    pub psk: Vec<KeyReference>,
    /// Rights of the host.
    pub rights: HostRights,
}

/// Name of a key in the keyring, with its position in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyReference {
    /// Name of the key.
    pub name: KeyName,
    /// Line of the name.
    pub line: IgnoredLineNumber,
    /// Configuration key whose value it is.
    pub key: &'static str,
}

/// A key of the configuration cannot be read.
#[derive(Debug)]
pub struct UnreadableKey {
    /// What was found and what was expected. It has nothing of the key.
    pub error: Error,
    /// Line of its name.
    pub line: IgnoredLineNumber,
    /// Configuration key whose value it is.
    pub key: &'static str,
}

/// Names of [`PortSecurity`] in the file.
pub(super) const TLS_NAMES: [(&str, PortSecurity); 3] = [
    ("off", PortSecurity::Plaintext),
    ("allowed", PortSecurity::TlsAllowed),
    ("required", PortSecurity::TlsRequired),
];

impl Default for SecurityConfig {
    /// Nothing is required.
    fn default() -> Self {
        let SubsystemSecurity {
            authentication_required,
            secure_channel_required,
            authenticate_io_queues,
            policy,
            networks,
            ..
        } = SubsystemSecurity::default();
        Self {
            hosts: Vec::new(),
            authentication_required,
            secure_channel_required,
            authenticate_io_queues,
            policy,
            networks,
        }
    }
}

impl SecurityConfig {
    /// Whether it names any key.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        self.hosts.iter().any(HostSecurityConfig::has_keys)
    }

    /// Reads the keys, so that the values are those that the files have now. `keyring` is needed if
    /// the configuration names keys.
    ///
    /// # Errors
    ///
    /// The first key that cannot be read.
    pub fn read_keys(&self, keyring: Option<&Keyring>) -> Result<SubsystemSecurity, UnreadableKey> {
        let (mut hosts, mut rights) = (BTreeMap::new(), BTreeMap::new());
        for host in &self.hosts {
            if host.has_keys() {
                hosts.insert(host.nqn.clone(), host.read_keys(keyring)?);
            }
            if host.rights != HostRights::default() {
                rights.insert(host.nqn.clone(), host.rights.clone());
            }
        }
        Ok(SubsystemSecurity {
            hosts,
            authentication_required: self.authentication_required,
            secure_channel_required: self.secure_channel_required,
            authenticate_io_queues: self.authenticate_io_queues,
            policy: self.policy.clone(),
            networks: self.networks.clone(),
            rights,
        })
    }
}

impl HostSecurityConfig {
    /// Whether it has any key.
    pub(super) fn has_keys(&self) -> bool {
        !self.dhchap.is_empty() || self.dhchap_controller.is_some() || !self.psk.is_empty()
    }

    fn read_keys(&self, keyring: Option<&Keyring>) -> Result<HostKeys, UnreadableKey> {
        let secret = |key: &KeyReference| key.read(keyring, Keyring::chap_secret);
        let psk = |key: &KeyReference| key.read(keyring, Keyring::psk);
        Ok(HostKeys {
            chap_secrets: self.dhchap.iter().map(secret).collect::<Result<_, _>>()?,
            controller_secret: self.dhchap_controller.as_ref().map(secret).transpose()?,
            psks: self.psk.iter().map(psk).collect::<Result<_, _>>()?,
        })
    }
}

impl KeyReference {
    fn read<T>(
        &self,
        keyring: Option<&Keyring>,
        read: impl Fn(&Keyring, &KeyName) -> Result<T, KeyringError>,
    ) -> Result<T, UnreadableKey> {
        let refuse = |error: Error| UnreadableKey { error, line: self.line, key: self.key };
        let keyring = keyring.ok_or_else(|| {
            refuse(Error::usage(format!("key `{}`: no keyring is open, expected one", self.name)))
        })?;
        read(keyring, &self.name).map_err(|error| refuse(error.into()))
    }
}
