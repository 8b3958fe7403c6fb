//! Text form of keys, `PREFIX:HH:BASE64:`, which PSKs and DH-HMAC-CHAP secrets share.
//!
//! ```text
//! NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:
//! └ prefix ──┘ │  └ base64 of the key and its CRC-32, little-endian ┘
//!              └ hash: 00 none, 01 SHA-256, 02 SHA-384, 03 SHA-512
//! ```

use core::fmt;

use base64ct::{Base64, Encoding};
use zeroize::Zeroizing;

use crate::{Hash, SecretBytes};

/// Hash that the text form of a key names, by which the key is transformed before use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyHash {
    /// `00`: the key is used as it is.
    None,
    /// `01` to `03`: the key is transformed with this hash.
    Transform(Hash),
}

impl KeyHash {
    /// Identifier in the text form.
    #[must_use]
    pub const fn id(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Transform(hash) => hash.id(),
        }
    }

    /// Hash of the transformation, if there is one.
    #[must_use]
    pub const fn hash(self) -> Option<Hash> {
        match self {
            Self::None => None,
            Self::Transform(hash) => Some(hash),
        }
    }
}

/// Syntax error of a key. Holds nothing of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// The text has another prefix.
    Prefix {
        /// Prefix of the expected kind of key.
        expected: &'static str,
        /// Kind of key that the text is instead, if it is a known one.
        found: Option<&'static str>,
    },
    /// The text does not consist of a prefix, a hash and a key, each followed by a colon.
    Form {
        /// Prefix of the kind of key.
        kind: &'static str,
        /// Colons in the text.
        colons: usize,
    },
    /// The hash is not one of the permitted identifiers.
    Hash {
        /// Prefix of the kind of key.
        kind: &'static str,
        /// Number that was found, or `None` if the field is not two hexadecimal digits.
        found: Option<u8>,
        /// Highest permitted identifier.
        max: u8,
    },
    /// The key is not base64 with padding.
    Base64 {
        /// Prefix of the kind of key.
        kind: &'static str,
        /// Characters of the field.
        characters: usize,
    },
    /// The key has a length that its kind or its hash does not permit.
    Length {
        /// Prefix of the kind of key.
        kind: &'static str,
        /// Bytes that were found, without the CRC.
        found_bytes: usize,
        /// Permitted lengths.
        expected: &'static str,
    },
    /// The CRC does not match the key.
    Crc {
        /// Prefix of the kind of key.
        kind: &'static str,
        /// CRC in the text.
        found: u32,
    },
}

impl fmt::Display for KeyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefix { expected, found: Some(found) } => {
                write!(out, "parse key: found a {found} key, expected {expected}:HH:BASE64:")
            }
            Self::Prefix { expected, found: None } => {
                write!(out, "parse key: found another prefix, expected {expected}:HH:BASE64:")
            }
            Self::Form { kind, colons } => {
                write!(out, "parse {kind} key: found {colons} colons, expected 3, one at the end")
            }
            Self::Hash { kind, found: Some(found), max } => {
                write!(out, "parse {kind} key: found hash {found:02x}, expected 00 to {max:02x}")
            }
            Self::Hash { kind, found: None, max } => {
                write!(out, "parse {kind} key: hash is not two digits, expected 00 to {max:02x}")
            }
            Self::Base64 { kind, characters } => write!(
                out,
                "parse {kind} key: its {characters} characters are not base64 with padding"
            ),
            Self::Length { kind, found_bytes, expected } => {
                write!(out, "parse {kind} key: found {found_bytes} bytes, expected {expected}")
            }
            Self::Crc { kind, found } => {
                write!(out, "parse {kind} key: found CRC {found:08x}, expected that of the key")
            }
        }
    }
}

impl core::error::Error for KeyError {}

impl From<KeyError> for tenmil_base::Error {
    fn from(error: KeyError) -> Self {
        Self::usage(error)
    }
}

/// Prefixes of keys that are mistaken for each other.
const KINDS: [&str; 2] = ["NVMeTLSkey-1", "DHHC-1"];

/// Parses a key of a kind, whose hash has an identifier up to `hash_max`. The caller checks the
/// length.
pub(crate) fn parse(
    kind: &'static str,
    hash_max: u8,
    text: &str,
) -> Result<(KeyHash, SecretBytes), KeyError> {
    let colons = text.bytes().filter(|&byte| byte == b':').count();
    let prefix = text.split(':').next();
    if prefix != Some(kind) {
        let found = KINDS.into_iter().find(|&other| prefix == Some(other));
        return Err(KeyError::Prefix { expected: kind, found });
    }
    let mut fields = text.split(':').skip(1);
    let (Some(hash), Some(encoded), Some(""), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err(KeyError::Form { kind, colons });
    };
    let hash = parse_hash(hash)
        .ok_or(KeyError::Hash { kind, found: None, max: hash_max })
        .and_then(|id| hash_of(kind, id, hash_max))?;
    let malformed = || KeyError::Base64 { kind, characters: encoded.chars().count() };
    let bytes = Zeroizing::new(Base64::decode_vec(encoded).map_err(|_| malformed())?);
    let Some((key, crc)) = bytes.split_last_chunk::<4>() else { return Err(malformed()) };
    let found = u32::from_le_bytes(*crc);
    if crc32(key) != found {
        return Err(KeyError::Crc { kind, found });
    }
    Ok((hash, SecretBytes::new(key.to_vec())))
}

/// Text of a key.
pub(crate) fn format(kind: &str, hash: KeyHash, key: &SecretBytes) -> Zeroizing<String> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(key.len() + 4));
    bytes.extend_from_slice(key.expose());
    bytes.extend_from_slice(&crc32(key.expose()).to_le_bytes());
    let encoded = Zeroizing::new(Base64::encode_string(&bytes));
    // One allocation, so that no shorter copy of the key stays behind.
    let mut text = Zeroizing::new(String::with_capacity(kind.len() + encoded.len() + 5));
    let id = hash.id();
    for part in [kind, ":0", ["0", "1", "2", "3"][usize::from(id)], ":", &encoded, ":"] {
        text.push_str(part);
    }
    text
}

/// CRC-32 of IEEE 802.3, as zlib computes it.
fn crc32(bytes: &[u8]) -> u32 {
    let add = |state: u32, byte: &u8| {
        let shift = |state: u32, _| (state >> 1) ^ (0xedb8_8320 & (state & 1).wrapping_neg());
        (0..8).fold(state ^ u32::from(*byte), shift)
    };
    !bytes.iter().fold(!0, add)
}

fn parse_hash(digits: &str) -> Option<u8> {
    let is_number = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

fn hash_of(kind: &'static str, id: u8, max: u8) -> Result<KeyHash, KeyError> {
    match (id, Hash::from_id(id)) {
        (0, _) => Ok(KeyHash::None),
        (_, Some(hash)) if id <= max => Ok(KeyHash::Transform(hash)),
        _ => Err(KeyError::Hash { kind, found: Some(id), max }),
    }
}
