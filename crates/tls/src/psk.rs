//! Pre-shared keys as a handshake uses them.

use tenmil_nvme_auth::{Derivation, Hash, SecretBytes, TlsPsk};

/// Pre-shared key of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Psk {
    /// Identity, as it is offered in a ClientHello.
    pub identity: Vec<u8>,
    /// Key.
    pub secret: SecretBytes,
    /// Hash of the handshake, which decides the cipher suite.
    pub hash: Hash,
    /// How the key was derived from a configured one; `None` if it is the configured one.
    pub derivation: Option<Derivation>,
}

/// Keys of a server, found when a client names one.
pub trait PskSource: Send + Sync {
    /// All keys that a client with this identity may have. Several keys have one identity if it is of
    /// version 0: the handshake finds out which of them the client has.
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk>;

    /// Where the keys are kept, for messages: `keyring /etc/tenmil/keys`.
    fn description(&self) -> String {
        "the configured keys".to_owned()
    }
}

impl From<TlsPsk> for Psk {
    fn from(psk: TlsPsk) -> Self {
        let TlsPsk { identity, key, hash, derivation, .. } = psk;
        Self { identity: identity.into_bytes(), secret: key, hash, derivation: Some(derivation) }
    }
}

/// A list of keys, for a server with few of them.
impl PskSource for Vec<Psk> {
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk> {
        self.iter().filter(|psk| psk.identity == identity).cloned().collect()
    }
}
