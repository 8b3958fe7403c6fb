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
//! The file has names of keys; [`SecurityConfig::read_keys`] reads them from the keyring. `.nvme` in place of
//! the name of a `psk` stands for all keys of the host in the kernel's keyring of that name.

use std::collections::BTreeMap;

use tenmil_base::Error;
use tenmil_keyring::{KernelPsks, KeyName, Keyring, KeyringError};
use tenmil_nvme_auth::{KERNEL_KEYRING, Policy, TlsPsk};
use tenmil_serve::PeerNetwork;
use tenmil_serve::tcp::{HostKeys, HostRights, NamedKey, PortSecurity, SubsystemSecurity};

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
    /// Position of [`KERNEL_KEYRING`] among these, if it is one of them.
    pub kernel_psks: Option<IgnoredLineNumber>,
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

/// Where the keys of a configuration are read from: each that it names must be open.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeySources<'a> {
    /// Keyring with the keys that have names.
    pub keyring: Option<&'a Keyring>,
    /// Keyring of the kernel.
    pub kernel: Option<&'a KernelPsks>,
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

    /// Whether it names keys of a keyring.
    pub(super) fn names_keys(&self) -> bool {
        self.hosts.iter().any(HostSecurityConfig::names_keys)
    }

    /// Reads the keys, so that the values are those that the keyrings have now. Keys of the kernel are those
    /// of this subsystem; without one, as for the discovery service, those of any, or none.
    ///
    /// # Errors
    ///
    /// The first key that cannot be read.
    pub fn read_keys(
        &self,
        sources: KeySources<'_>,
        subsystem_nqn: Option<&str>,
    ) -> Result<SubsystemSecurity, UnreadableKey> {
        let (mut hosts, mut rights) = (BTreeMap::new(), BTreeMap::new());
        for host in &self.hosts {
            if host.has_keys() {
                hosts.insert(host.nqn.clone(), host.read_keys(sources, subsystem_nqn)?);
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
        self.names_keys() || self.kernel_psks.is_some()
    }

    /// Whether it has a pre-shared key of TLS.
    pub(super) fn has_psk(&self) -> bool {
        !self.psk.is_empty() || self.kernel_psks.is_some()
    }

    /// Names of its pre-shared keys of TLS, and of the kernel's keyring.
    pub fn psk_names(&self) -> impl Iterator<Item = &str> {
        let names = self.psk.iter().map(|key| key.name.as_str());
        names.chain(self.kernel_psks.map(|_| KERNEL_KEYRING))
    }

    /// Whether it names keys of a keyring.
    fn names_keys(&self) -> bool {
        !self.dhchap.is_empty() || self.dhchap_controller.is_some() || !self.psk.is_empty()
    }

    fn read_keys(
        &self,
        sources: KeySources<'_>,
        subsystem_nqn: Option<&str>,
    ) -> Result<HostKeys, UnreadableKey> {
        let secret = |key: &KeyReference| key.read(sources.keyring, Keyring::chap_secret);
        let psk = |key: &KeyReference| key.read(sources.keyring, Keyring::psk);
        Ok(HostKeys {
            chap_secrets: self.dhchap.iter().map(secret).collect::<Result<_, _>>()?,
            controller_secret: self.dhchap_controller.as_ref().map(secret).transpose()?,
            psks: self.psk.iter().map(psk).collect::<Result<_, _>>()?,
            tls_psks: self.read_kernel_psks(sources.kernel, subsystem_nqn)?,
        })
    }

    fn read_kernel_psks(
        &self,
        kernel: Option<&KernelPsks>,
        subsystem_nqn: Option<&str>,
    ) -> Result<Vec<TlsPsk>, UnreadableKey> {
        let Some(line) = self.kernel_psks else { return Ok(Vec::new()) };
        let refuse = |error: Error| UnreadableKey { error, line, key: "psk" };
        let kernel = kernel.ok_or_else(|| {
            let text = format!("keyring {KERNEL_KEYRING} of the kernel is not open, expected it");
            refuse(Error::usage(text))
        })?;
        kernel.tls_psks(&self.nqn, subsystem_nqn).map_err(|error| refuse(error.into()))
    }
}

impl KeyReference {
    fn read<K>(
        &self,
        keyring: Option<&Keyring>,
        read: impl Fn(&Keyring, &KeyName) -> Result<K, KeyringError>,
    ) -> Result<NamedKey<K>, UnreadableKey> {
        let refuse = |error: Error| UnreadableKey { error, line: self.line, key: self.key };
        let keyring = keyring.ok_or_else(|| {
            refuse(Error::usage(format!("key `{}`: no keyring is open, expected one", self.name)))
        })?;
        let key = read(keyring, &self.name).map_err(|error| refuse(error.into()))?;
        Ok(NamedKey::new(self.name.as_str(), key))
    }
}
