//! DH-HMAC-CHAP secret, `DHHC-1:HH:BASE64:` (Base 2.2 §8.3.4.5).

use zeroize::Zeroizing;

use crate::{Hash, KeyError, KeyHash, SecretBytes, key_text};

const KIND: &str = "DHHC-1";
const LENGTHS: &str = "32, 48 or 64 bytes";

/// Secret of a host or a subsystem: 32, 48 or 64 bytes, and the hash by which it is transformed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapSecret {
    transform: KeyHash,
    secret: SecretBytes,
}

impl ChapSecret {
    /// Creates a secret from random bytes: as many as the hash has, or 32, 48 or 64 without one.
    ///
    /// # Errors
    ///
    /// If `random` has another length.
    pub fn generate(transform: KeyHash, random: SecretBytes) -> Result<Self, KeyError> {
        let expected = match transform {
            KeyHash::None => LENGTHS,
            KeyHash::Transform(Hash::Sha256) => "32 bytes for hash 01",
            KeyHash::Transform(Hash::Sha384) => "48 bytes for hash 02",
            KeyHash::Transform(Hash::Sha512) => "64 bytes for hash 03",
        };
        match transform.hash() {
            Some(hash) if hash.len_bytes() != random.len() => {
                Err(KeyError::Length { kind: KIND, found_bytes: random.len(), expected })
            }
            _ => Self::checked(transform, random),
        }
    }

    /// Parses a secret. Like Linux, it accepts each length with each hash.
    ///
    /// # Errors
    ///
    /// If the text is not of this form, its CRC is wrong, or the secret has another length.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let (transform, secret) = key_text::parse(KIND, Hash::Sha512.id(), text)?;
        Self::checked(transform, secret)
    }

    /// Text of the secret, which holds it.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        key_text::format(KIND, self.transform, &self.secret)
    }

    /// Hash by which the secret is transformed.
    #[must_use]
    pub const fn transform(&self) -> KeyHash {
        self.transform
    }

    /// Length of the secret.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.secret.len()
    }

    /// Key of a response. `nqn` names the owner of the secret: the host for a secret of a host, the
    /// subsystem for one of a controller.
    #[must_use]
    pub fn response_key(&self, nqn: &str) -> SecretBytes {
        match self.transform {
            KeyHash::None => self.secret.clone(),
            KeyHash::Transform(hash) => {
                hash.hmac(self.secret.expose(), &[nqn.as_bytes(), b"NVMe-over-Fabrics"])
            }
        }
    }

    fn checked(transform: KeyHash, secret: SecretBytes) -> Result<Self, KeyError> {
        if matches!(secret.len(), 32 | 48 | 64) {
            Ok(Self { transform, secret })
        } else {
            Err(KeyError::Length { kind: KIND, found_bytes: secret.len(), expected: LENGTHS })
        }
    }
}
