//! The two cipher suites of NVMe/TCP (TCP 1.1 §3.6.1.2), and nothing else.

use tenmil_nvme_auth::Hash;

/// Cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherSuite {
    /// TLS_AES_128_GCM_SHA256, of 32-byte keys.
    Aes128GcmSha256,
    /// TLS_AES_256_GCM_SHA384, of 48-byte keys.
    Aes256GcmSha384,
}

impl CipherSuite {
    /// Suite of a key with this hash. There is none for SHA-512, and no key has it.
    #[must_use]
    pub const fn of_hash(hash: Hash) -> Self {
        match hash {
            Hash::Sha256 => Self::Aes128GcmSha256,
            Hash::Sha384 | Hash::Sha512 => Self::Aes256GcmSha384,
        }
    }

    /// Suite with an IANA number.
    #[must_use]
    pub const fn from_id(id: u16) -> Option<Self> {
        match id {
            0x1301 => Some(Self::Aes128GcmSha256),
            0x1302 => Some(Self::Aes256GcmSha384),
            _ => None,
        }
    }

    /// Hash of the key schedule.
    #[must_use]
    pub const fn hash(self) -> Hash {
        match self {
            Self::Aes128GcmSha256 => Hash::Sha256,
            Self::Aes256GcmSha384 => Hash::Sha384,
        }
    }

    /// Length of the key of its cipher.
    #[must_use]
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128GcmSha256 => 16,
            Self::Aes256GcmSha384 => 32,
        }
    }

    /// IANA number.
    #[must_use]
    pub const fn id(self) -> u16 {
        match self {
            Self::Aes128GcmSha256 => 0x1301,
            Self::Aes256GcmSha384 => 0x1302,
        }
    }

    /// IANA name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes128GcmSha256 => "TLS_AES_128_GCM_SHA256",
            Self::Aes256GcmSha384 => "TLS_AES_256_GCM_SHA384",
        }
    }
}
