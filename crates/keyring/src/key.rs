//! A key of either kind, and its generation.

use std::fmt;

use tenmil_nvme_auth::{
    ChapSecret, ConfiguredPsk, KeyHash, SecretBytes, TlsPsk, tls_psk_candidates,
};
use zeroize::Zeroizing;

use crate::KeyringError;

/// Kind of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyKind {
    /// Pre-shared key of TLS, `NVMeTLSkey-1:…`.
    Psk,
    /// DH-HMAC-CHAP secret, `DHHC-1:…`.
    Dhchap,
}

/// A key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// Pre-shared key of TLS.
    Psk(ConfiguredPsk),
    /// DH-HMAC-CHAP secret.
    Dhchap(ChapSecret),
}

impl KeyKind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Psk, Self::Dhchap];

    /// Name of the kind.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Psk => "psk",
            Self::Dhchap => "dhchap",
        }
    }

    /// First word of its text form.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Psk => "NVMeTLSkey-1",
            Self::Dhchap => "DHHC-1",
        }
    }
}

impl Key {
    /// Creates a random key of `len_bytes`; by default as many as the hash has, or 32 without one.
    ///
    /// # Errors
    ///
    /// If the kind permits no such hash or length, or the kernel supplies no random numbers.
    pub fn generate(
        kind: KeyKind,
        hash: KeyHash,
        len_bytes: Option<usize>,
    ) -> Result<Self, KeyringError> {
        let usual = hash.hash().map_or(32, tenmil_nvme_auth::Hash::len_bytes);
        let mut random = Zeroizing::new(vec![0; len_bytes.unwrap_or(usual)]);
        tenmil_linux::fill_secure_random(&mut random).map_err(KeyringError::Random)?;
        let random = SecretBytes::new(std::mem::take(&mut *random));
        match kind {
            KeyKind::Psk => ConfiguredPsk::generate(hash, random).map(Self::Psk),
            KeyKind::Dhchap => ChapSecret::generate(hash, random).map(Self::Dhchap),
        }
        .map_err(|why| KeyringError::Syntax { of: "generate".to_owned(), why })
    }

    /// Parses the text form of either kind. White space around it is ignored. `of` is what the text
    /// is, for the error: `read /etc/tenmil/keys/db`.
    ///
    /// # Errors
    ///
    /// If the text is no key.
    pub fn parse(of: &str, text: &str) -> Result<Self, KeyringError> {
        let text = text.trim_ascii();
        let lines = text.lines().count();
        if lines != 1 {
            return Err(KeyringError::Lines { of: of.to_owned(), found: lines });
        }
        let is_kind = |kind: &KeyKind| text.split(':').next() == Some(kind.prefix());
        let parsed = match KeyKind::ALL.into_iter().find(is_kind) {
            Some(KeyKind::Psk) => ConfiguredPsk::parse(text).map(Self::Psk),
            Some(KeyKind::Dhchap) => ChapSecret::parse(text).map(Self::Dhchap),
            None => return Err(KeyringError::NoKey { of: of.to_owned() }),
        };
        parsed.map_err(|why| KeyringError::Syntax { of: of.to_owned(), why })
    }

    /// Text form, which holds the key.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        match self {
            Self::Psk(psk) => psk.to_text(),
            Self::Dhchap(secret) => secret.to_text(),
        }
    }

    /// Its kind.
    #[must_use]
    pub const fn kind(&self) -> KeyKind {
        match self {
            Self::Psk(_) => KeyKind::Psk,
            Self::Dhchap(_) => KeyKind::Dhchap,
        }
    }

    /// Hash by which it is transformed before use.
    #[must_use]
    pub const fn hash(&self) -> KeyHash {
        match self {
            Self::Psk(psk) => psk.transform(),
            Self::Dhchap(secret) => secret.transform(),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        match self {
            Self::Psk(psk) => psk.len_bytes(),
            Self::Dhchap(secret) => secret.len_bytes(),
        }
    }

    /// TLS PSKs that a host and a subsystem may use with the key, the preferred ones first. A
    /// DH-HMAC-CHAP secret has none.
    #[must_use]
    pub fn tls_psks(&self, host_nqn: &str, subsystem_nqn: &str) -> Vec<TlsPsk> {
        match self {
            Self::Psk(psk) => {
                tls_psk_candidates(std::slice::from_ref(psk), host_nqn, subsystem_nqn)
            }
            Self::Dhchap(_) => Vec::new(),
        }
    }
}

impl fmt::Display for KeyKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Psk => "TLS PSK",
            Self::Dhchap => "DH-HMAC-CHAP secret",
        })
    }
}
