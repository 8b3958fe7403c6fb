//! TLS PSKs in the keyring of the kernel, where NVMe/TCP of Linux looks for them.

use tenmil_linux::kernel_keyring::{KernelKey, KernelKeyring};
use tenmil_nvme_auth::{SecretBytes, TlsPsk};

use crate::KeyringError;

/// Keyring of the kernel with TLS PSKs by identity.
#[derive(Clone, Debug)]
pub struct KernelPsks {
    keyring: KernelKeyring,
    /// Type of its keys: that of the kernel, and another one in tests.
    kind: &'static str,
}

/// TLS PSK in the keyring of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPsk {
    key: KernelKey,
}

/// Keyring and type of the kernel's NVMe keys (drivers/nvme/common/keyring.c).
const KEYRING: &str = ".nvme";
const KIND: &str = "psk";

type Result<T, E = KeyringError> = std::result::Result<T, E>;

impl KernelPsks {
    /// Finds the keyring, which the kernel's NVMe modules create.
    ///
    /// # Errors
    ///
    /// If the kernel has none, or this user cannot see it.
    pub fn open() -> Result<Self> {
        Ok(Self { keyring: KernelKeyring::find(KEYRING)?, kind: KIND })
    }

    #[cfg(test)]
    pub(crate) fn of_process(name: &str) -> Result<Self> {
        Ok(Self { keyring: KernelKeyring::create_for_process(name)?, kind: "user" })
    }

    /// All TLS PSKs, in the order of their identities.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn psks(&self) -> Result<Vec<KernelPsk>> {
        let keys = self.keyring.keys()?.into_iter().filter(|key| key.kind == self.kind);
        let mut psks: Vec<_> = keys.map(|key| KernelPsk { key }).collect();
        psks.sort_by(|one, other| one.identity().cmp(other.identity()));
        Ok(psks)
    }

    /// TLS PSK with an identity.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn find(&self, identity: &str) -> Result<Option<KernelPsk>> {
        let found = self.keyring.find_key(self.kind, identity)?;
        Ok(found.map(|key| KernelPsk { key }))
    }

    /// Inserts a TLS PSK; one with the same identity is replaced.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn insert(&self, psk: &TlsPsk) -> Result<KernelPsk> {
        let key = self.keyring.insert(self.kind, &psk.identity, psk.key.expose())?;
        Ok(KernelPsk { key })
    }

    /// Reads the key of the handshake.
    ///
    /// # Errors
    ///
    /// If this user may not read it.
    pub fn read(&self, psk: &KernelPsk) -> Result<SecretBytes> {
        crate::protect_secrets();
        Ok(SecretBytes::new(self.keyring.read_key(&psk.key)?.to_vec()))
    }

    /// Revokes a TLS PSK: no handshake begins with it from now on.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn revoke(&self, psk: &KernelPsk) -> Result<()> {
        Ok(self.keyring.revoke_key(&psk.key)?)
    }
}

impl KernelPsk {
    /// Identity of the key.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.key.description
    }

    /// Serial number in the kernel, as `keyctl` and `nvme connect --tls_key` name it.
    #[must_use]
    pub const fn serial(&self) -> i32 {
        self.key.serial
    }
}
