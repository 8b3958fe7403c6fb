//! Hash functions of authentication and TLS keys: HMAC and HKDF-Expand-Label.

use core::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256, Sha384, Sha512};
use zeroize::Zeroize;

use crate::SecretBytes;

/// Hash function. The discriminants are the identifiers of DH-HMAC-CHAP (Base 2.2 §8.3.4.5.2) and,
/// up to SHA-384, of PSK identities (TCP 1.1 §3.6.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hash {
    /// SHA-256, 32 bytes.
    Sha256 = 1,
    /// SHA-384, 48 bytes.
    Sha384 = 2,
    /// SHA-512, 64 bytes. No TLS cipher suite of NVMe/TCP uses it.
    Sha512 = 3,
}

/// Variant of HKDF-Expand-Label by which retained and TLS keys are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Derivation {
    /// The specification's (TCP 1.1 §3.6.1.3, RFC 8446 §7.1).
    Specification,
    /// That of libnvme before 1.15: the length is little-endian, and label and context are not
    /// preceded by their lengths. Later releases offer it as `--compat`.
    LibnvmeBefore115,
}

impl Hash {
    /// All hash functions, in the order of their identifiers.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    /// Hash function with an identifier.
    #[must_use]
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.id() == id)
    }

    /// Identifier in messages, secrets and identities.
    #[must_use]
    pub const fn id(self) -> u8 {
        self as u8
    }

    /// Length of its output.
    #[must_use]
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// HMAC over the concatenation of `parts`.
    #[must_use]
    pub fn hmac(self, key: &[u8], parts: &[&[u8]]) -> SecretBytes {
        match self {
            Self::Sha256 => hmac_with::<Hmac<Sha256>>(key, parts),
            Self::Sha384 => hmac_with::<Hmac<Sha384>>(key, parts),
            Self::Sha512 => hmac_with::<Hmac<Sha512>>(key, parts),
        }
    }

    /// Hash of `bytes`.
    #[must_use]
    pub fn digest(self, bytes: &[u8]) -> SecretBytes {
        match self {
            Self::Sha256 => take(&mut Sha256::digest(bytes)),
            Self::Sha384 => take(&mut Sha384::digest(bytes)),
            Self::Sha512 => take(&mut Sha512::digest(bytes)),
        }
    }

    /// `HKDF-Expand-Label(HKDF-Extract(0, secret), label, context, len_bytes)`. `len_bytes` is at
    /// most the output of the hash, so HKDF-Expand has one block (RFC 5869 §2.3).
    ///
    /// Returns `None` if `context` is longer than the specification's derivation permits: 255 bytes.
    pub(crate) fn extract_and_expand_label(
        self,
        derivation: Derivation,
        secret: &[u8],
        label: &str,
        context: &[u8],
        len_bytes: usize,
    ) -> Option<SecretBytes> {
        debug_assert!(len_bytes <= self.len_bytes(), "one block of HKDF-Expand");
        let pseudorandom_key = self.hmac(&[0; 64][..self.len_bytes()], &[secret]);
        let key = pseudorandom_key.expose();
        match derivation {
            Derivation::Specification => self.expand_label(key, label, context, len_bytes),
            Derivation::LibnvmeBefore115 => {
                let len = u16::try_from(len_bytes).ok()?.to_le_bytes();
                let label = format!("tls13 {label}");
                Some(first_bytes(
                    &self.hmac(key, &[&len, label.as_bytes(), context, &[1]]),
                    len_bytes,
                ))
            }
        }
    }

    /// `HKDF-Expand-Label(secret, label, context, len_bytes)` (RFC 8446 §7.1).
    ///
    /// Returns `None` if `len_bytes` is larger than the output of the hash, so that HKDF-Expand would
    /// need a second block (RFC 5869 §2.3), or if `context` is longer than 255 bytes.
    #[must_use]
    pub fn expand_label(
        self,
        secret: &[u8],
        label: &str,
        context: &[u8],
        len_bytes: usize,
    ) -> Option<SecretBytes> {
        if len_bytes > self.len_bytes() {
            return None;
        }
        let len = u16::try_from(len_bytes).ok()?.to_be_bytes();
        let label = format!("tls13 {label}");
        let label_len = u8::try_from(label.len()).ok()?;
        let context_len = u8::try_from(context.len()).ok()?;
        let parts: [&[u8]; 6] =
            [&len, &[label_len], label.as_bytes(), &[context_len], context, &[1]];
        Some(first_bytes(&self.hmac(secret, &parts), len_bytes))
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Sha256 => "SHA-256",
            Self::Sha384 => "SHA-384",
            Self::Sha512 => "SHA-512",
        })
    }
}

impl fmt::Display for Derivation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Specification => "specification",
            Self::LibnvmeBefore115 => "libnvme before 1.15",
        })
    }
}

fn hmac_with<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> SecretBytes {
    let Ok(mut mac) = <M as KeyInit>::new_from_slice(key) else {
        unreachable!("HMAC accepts keys of every length")
    };
    for part in parts {
        mac.update(part);
    }
    take(&mut mac.finalize().into_bytes())
}

fn first_bytes(block: &SecretBytes, len_bytes: usize) -> SecretBytes {
    SecretBytes::new(block.expose()[..len_bytes].to_vec())
}

/// Copies an output, and overwrites it where it was.
fn take(output: &mut [u8]) -> SecretBytes {
    let bytes = SecretBytes::new(output.to_vec());
    output.zeroize();
    bytes
}
