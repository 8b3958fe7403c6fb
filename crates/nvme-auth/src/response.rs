//! Responses to challenges, and the generated PSK (Base 2.2 §8.3.4.5.4, §8.3.4.5.9).
//!
//! ```text
//! Ks  = H(g^xy mod p)                       g^xy as long as p
//! Ca  = HMAC(Ks, C)                         C itself with the null group
//! R1  = HMAC(host key, Ca1 | S1 | T_ID | SC_C | "HostHost"   | HOSTNQN | 00 | SUBNQN)
//! R2  = HMAC(ctrl key, Ca2 | S2 | T_ID | SC_C | "Controller" | SUBNQN  | 00 | HOSTNQN)
//! PSK = HMAC(Ks, C1 | C2)
//! ```

use crate::{Concatenation, Hash, SecretBytes};

/// What both responses of an exchange are computed over.
#[derive(Clone, Debug)]
pub(crate) struct Transcript {
    pub(crate) hash: Hash,
    pub(crate) transaction: u16,
    pub(crate) concatenation: Concatenation,
    /// Ks, unless the group is null.
    pub(crate) session_key: Option<SecretBytes>,
}

/// A challenge and its sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NumberedChallenge {
    pub(crate) challenge: Vec<u8>,
    pub(crate) sequence: u32,
}

impl Transcript {
    /// R1, by which a host proves that it has the secret.
    pub(crate) fn host_response(
        &self,
        key: &SecretBytes,
        challenge: &NumberedChallenge,
        host_nqn: &str,
        subsystem_nqn: &str,
    ) -> SecretBytes {
        self.response(key, challenge, b"HostHost", host_nqn, subsystem_nqn)
    }

    /// R2, by which a controller proves that it has the secret.
    pub(crate) fn controller_response(
        &self,
        key: &SecretBytes,
        challenge: &NumberedChallenge,
        host_nqn: &str,
        subsystem_nqn: &str,
    ) -> SecretBytes {
        self.response(key, challenge, b"Controller", subsystem_nqn, host_nqn)
    }

    /// PSK of both challenges, or `None` with the null group.
    pub(crate) fn generated_psk(&self, c1: &[u8], c2: &[u8]) -> Option<SecretBytes> {
        let key = self.session_key.as_ref()?;
        Some(self.hash.hmac(key.expose(), &[c1, c2]))
    }

    fn response(
        &self,
        key: &SecretBytes,
        numbered: &NumberedChallenge,
        role: &[u8],
        own_nqn: &str,
        other_nqn: &str,
    ) -> SecretBytes {
        let NumberedChallenge { challenge, sequence } = numbered;
        let augmented = self.session_key.as_ref().map_or_else(
            || SecretBytes::new(challenge.clone()),
            |key| self.hash.hmac(key.expose(), &[challenge]),
        );
        let parts: [&[u8]; 8] = [
            augmented.expose(),
            &sequence.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            &[self.concatenation.code()],
            role,
            own_nqn.as_bytes(),
            &[0],
            other_nqn.as_bytes(),
        ];
        self.hash.hmac(key.expose(), &parts)
    }
}
