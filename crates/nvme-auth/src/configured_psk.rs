//! Pre-shared key in the interchange format `NVMeTLSkey-1:HH:BASE64:` (TCP 1.1 §3.6.1.5).

use zeroize::Zeroizing;

use crate::{Derivation, Hash, KeyError, KeyHash, SecretBytes, key_text};

const KIND: &str = "NVMeTLSkey-1";

/// Configured PSK: 32 or 48 bytes, and the hash by which the retained PSK is made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredPsk {
    transform: KeyHash,
    psk: SecretBytes,
}

impl ConfiguredPsk {
    /// Creates a key from random bytes, 32 for SHA-256, 48 for SHA-384, either for none.
    ///
    /// # Errors
    ///
    /// If the hash is SHA-512, or `random` has a length that the hash does not permit.
    pub fn generate(transform: KeyHash, random: SecretBytes) -> Result<Self, KeyError> {
        let expected = match transform {
            KeyHash::None => "32 or 48 bytes",
            KeyHash::Transform(Hash::Sha256) => "32 bytes for hash 01",
            KeyHash::Transform(Hash::Sha384) => "48 bytes for hash 02",
            KeyHash::Transform(Hash::Sha512) => {
                return Err(KeyError::Hash { kind: KIND, found: Some(Hash::Sha512.id()), max: 2 });
            }
        };
        let permitted = match transform {
            KeyHash::None => matches!(random.len(), 32 | 48),
            KeyHash::Transform(hash) => random.len() == hash.len_bytes(),
        };
        if permitted {
            Ok(Self { transform, psk: random })
        } else {
            Err(KeyError::Length { kind: KIND, found_bytes: random.len(), expected })
        }
    }

    /// Parses the interchange format.
    ///
    /// # Errors
    ///
    /// If the text is not of this form, its CRC is wrong, or the key has a length that its hash does
    /// not permit.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let (transform, psk) = key_text::parse(KIND, Hash::Sha384.id(), text)?;
        Self::generate(transform, psk)
    }

    /// Text in the interchange format, which holds the key.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        key_text::format(KIND, self.transform, &self.psk)
    }

    /// Hash by which the retained PSK is made.
    #[must_use]
    pub const fn transform(&self) -> KeyHash {
        self.transform
    }

    /// Length of the key.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.psk.len()
    }

    /// Hash of identity, TLS PSK and cipher suite. The length of the key decides it.
    #[must_use]
    pub fn tls_hash(&self) -> Hash {
        if self.psk.len() == Hash::Sha384.len_bytes() { Hash::Sha384 } else { Hash::Sha256 }
    }

    /// Retained PSK for a host (TCP 1.1 §3.6.1.3), or `None` if the name of the host is longer than
    /// 255 bytes.
    #[must_use]
    pub fn retained(&self, derivation: Derivation, host_nqn: &str) -> Option<SecretBytes> {
        let KeyHash::Transform(hash) = self.transform else { return Some(self.psk.clone()) };
        hash.extract_and_expand_label(
            derivation,
            self.psk.expose(),
            "HostNQN",
            host_nqn.as_bytes(),
            self.psk.len(),
        )
    }
}
