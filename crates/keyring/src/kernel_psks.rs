//! TLS PSKs in the keyring of the kernel, where NVMe/TCP of Linux looks for them.
//!
//! Its keys are no configured keys: `nvme check-tls-key --insert`, `tenmil key insert` and others derive them
//! for one host and one subsystem, and the handshake uses them as they are.

use tenmil_linux::kernel_keyring::{KernelKey, KernelKeyring, KernelKeyringProblem};
use tenmil_nvme_auth::{
    Derivation, KERNEL_KEYRING, PskIdentity, PskKind, SecretBytes, TlsPsk, sort_tls_psks,
};

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

/// Type of the kernel's NVMe keys (drivers/nvme/common/keyring.c).
const KIND: &str = "psk";

type Result<T, E = KeyringError> = std::result::Result<T, E>;

impl KernelPsks {
    /// Finds the keyring, which the kernel's NVMe modules create.
    ///
    /// # Errors
    ///
    /// If the kernel has none, or this user cannot see it.
    pub fn open() -> Result<Self> {
        Ok(Self { keyring: KernelKeyring::find(KERNEL_KEYRING)?, kind: KIND })
    }

    /// Creates a keyring that exists as long as this process, with keys of the type `user`, for tests: a
    /// process can create none of the kernel's type.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn create_for_process(name: &str) -> Result<Self> {
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
        psks.sort_unstable_by(|one, other| one.identity().cmp(other.identity()));
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

    /// TLS PSKs of a host, and of one of its subsystems if that is given, in the order in which Linux prefers
    /// them. Keys that an authentication has generated belong to connections of the kernel and are left out.
    ///
    /// # Errors
    ///
    /// If there is none of the host and the subsystem, this user may not read one, or one has the wrong
    /// length. Without a subsystem, there may be none.
    pub fn tls_psks(&self, host_nqn: &str, subsystem_nqn: Option<&str>) -> Result<Vec<TlsPsk>> {
        let mut found = Vec::new();
        for psk in self.psks()? {
            let is_wanted = |identity: &PskIdentity<'_>| {
                identity.kind == PskKind::Retained
                    && identity.host_nqn == host_nqn
                    && subsystem_nqn.is_none_or(|nqn| identity.subsystem_nqn == nqn)
            };
            if let Some(identity) = PskIdentity::parse(psk.identity()).filter(is_wanted) {
                found.extend(self.tls_psk(&psk, &identity)?);
            }
        }
        sort_tls_psks(&mut found);
        match subsystem_nqn {
            Some(subsystem_nqn) if found.is_empty() => Err(KeyringError::NoKernelPsk {
                host_nqn: host_nqn.to_owned(),
                subsystem_nqn: subsystem_nqn.to_owned(),
            }),
            _ => Ok(found),
        }
    }

    /// Reads a TLS PSK; `None` if it is not valid any more.
    fn tls_psk(&self, psk: &KernelPsk, identity: &PskIdentity<'_>) -> Result<Option<TlsPsk>> {
        let key = match self.read(psk) {
            Ok(key) => key,
            Err(KeyringError::Kernel(error))
                if matches!(error.found, KernelKeyringProblem::Gone) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let PskIdentity { text, version, kind, hash, .. } = *identity;
        let (found_bytes, expected_bytes) = (key.len(), hash.len_bytes());
        if found_bytes != expected_bytes {
            let identity = text.to_owned();
            return Err(KeyringError::KernelPskLength { identity, found_bytes, expected_bytes });
        }
        let (identity, derivation) = (text.to_owned(), Derivation::Specification);
        Ok(Some(TlsPsk { identity, key, hash, version, kind, derivation }))
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
