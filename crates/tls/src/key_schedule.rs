//! Traffic secrets, the keys of records, and their update (RFC 8446 §7.2, §7.3).

use tenmil_nvme_auth::{Hash, SecretBytes};
use zeroize::Zeroizing;

use crate::suite::CipherSuite;

/// Secret of one direction, from which its keys are derived.
#[derive(Clone, Debug)]
pub(crate) struct TrafficSecret {
    suite: CipherSuite,
    secret: SecretBytes,
}

/// Key and initialization vector of one direction.
pub(crate) struct TrafficKeys {
    pub(crate) key: SecretBytes,
    pub(crate) iv: Zeroizing<[u8; IV_BYTES]>,
}

/// Length of an initialization vector of AES-GCM.
pub(crate) const IV_BYTES: usize = 12;

impl TrafficSecret {
    /// `None` if the length is not that of the hash of `suite`.
    pub(crate) fn new(suite: CipherSuite, secret: SecretBytes) -> Option<Self> {
        (secret.len() == suite.hash().len_bytes()).then_some(Self { suite, secret })
    }

    pub(crate) const fn suite(&self) -> CipherSuite {
        self.suite
    }

    /// Keys of the records.
    pub(crate) fn keys(&self) -> Option<TrafficKeys> {
        let key = self.expand("key", self.suite.key_bytes())?;
        let iv = self.expand("iv", IV_BYTES)?;
        let mut keys = TrafficKeys { key, iv: Zeroizing::new([0; IV_BYTES]) };
        keys.iv.copy_from_slice(iv.expose());
        Some(keys)
    }

    /// Secret after a KeyUpdate.
    pub(crate) fn next(&self) -> Option<Self> {
        let secret = self.expand("traffic upd", self.suite.hash().len_bytes())?;
        Some(Self { suite: self.suite, secret })
    }

    fn expand(&self, label: &str, len_bytes: usize) -> Option<SecretBytes> {
        let hash: Hash = self.suite.hash();
        hash.expand_label(self.secret.expose(), label, &[], len_bytes)
    }
}
