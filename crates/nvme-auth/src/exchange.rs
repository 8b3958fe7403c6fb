//! What both ends of a DH-HMAC-CHAP exchange have in common.

use core::fmt;
use std::collections::VecDeque;

use ctutils::CtEq;
use tenmil_wire::nqn::{NqnError, check_host_nqn};

use crate::dh::EXPONENT_BYTES;
use crate::{
    Concatenation, DhJob, Failure, Group, Hash, IdentityVersion, SecretBytes, TlsPsk,
    generated_tls_psk,
};

/// Random values for one exchange of one end: a challenge, a private exponent, and the first
/// sequence number. They are used once.
#[derive(Debug)]
pub struct Randomness {
    challenge: SecretBytes,
    exponent: SecretBytes,
    sequence: u32,
}

/// What the owner of an end does next.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Run the job and hand its result to `handle_dh_result`. A controller keeps an Authentication
    /// Receive waiting meanwhile.
    Compute(DhJob),
    /// Transfer a message. The exchange continues with the peer's next one.
    Message(Vec<u8>),
    /// The exchange succeeded.
    Authenticated {
        /// Last message to transfer, if one is left.
        message: Option<Vec<u8>>,
        /// Result.
        outcome: Authenticated,
    },
    /// The exchange failed. The owner transfers the message and ends the connection.
    Failed {
        /// Failure message for the peer, unless the peer ended the exchange.
        message: Option<Vec<u8>>,
        /// Reason.
        failure: Failure,
    },
}

/// Result of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authenticated {
    /// Hash function of the exchange.
    pub hash: Hash,
    /// Group of the exchange.
    pub group: Group,
    /// Whether the controller is authenticated too.
    pub bidirectional: bool,
    /// Index, in the configuration, of the secret that the peer has proved to have. A host that did
    /// not ask for a proof has none.
    pub peer_secret: Option<usize>,
    /// Secure channel concatenation of the exchange.
    pub concatenation: Concatenation,
    /// Generated PSK, with concatenation.
    pub generated_psk: Option<SecretBytes>,
}

/// An end cannot be configured so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// The name of the host or the subsystem is not valid.
    Nqn(NqnError),
    /// The controller has no secret of the host.
    NoHostSecret,
    /// The policy requires that the controller proves its identity, and it has no secret.
    NoControllerSecret,
    /// No hash function is permitted, or only SHA-512 for a generated PSK.
    NoHash,
    /// No group is permitted, or only the null group for a generated PSK.
    NoGroup,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("configure DH-HMAC-CHAP: ")?;
        match self {
            Self::Nqn(error) => error.fmt(out),
            Self::NoHostSecret => out.write_str("no secret of the host, expected at least one"),
            Self::NoControllerSecret => {
                out.write_str("no secret of the controller, expected one for both directions")
            }
            Self::NoHash => {
                out.write_str("no usable hash function, expected SHA-256 or SHA-384 for a TLS key")
            }
            Self::NoGroup => {
                out.write_str("no usable group, expected other than null for a TLS key")
            }
        }
    }
}

impl core::error::Error for ConfigError {}

impl From<ConfigError> for tenmil_base::Error {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl Randomness {
    /// Random bytes for one exchange.
    pub const BYTES: usize = CHALLENGE_BYTES + EXPONENT_BYTES + SEQUENCE_BYTES;

    /// Divides random bytes, from a generator that is fit for keys, among the values.
    #[must_use]
    pub fn new(random: &[u8; Self::BYTES]) -> Self {
        let (challenge, rest) = random.split_at(CHALLENGE_BYTES);
        let (exponent, sequence) = rest.split_at(EXPONENT_BYTES);
        Self {
            challenge: SecretBytes::new(challenge.to_vec()),
            exponent: SecretBytes::new(exponent.to_vec()),
            sequence: sequence.iter().fold(0, |number, &byte| number << 8 | u32::from(byte)),
        }
    }

    /// Challenge for a hash function.
    pub(crate) fn challenge(&self, hash: Hash) -> Vec<u8> {
        self.challenge.expose()[..hash.len_bytes()].to_vec()
    }

    pub(crate) fn exponent(&self) -> SecretBytes {
        self.exponent.clone()
    }
}

/// Length of the longest challenge.
const CHALLENGE_BYTES: usize = 64;
const SEQUENCE_BYTES: usize = 4;

impl Authenticated {
    /// TLS PSK of the generated PSK, with an identity of version 1, which is the only one that Linux
    /// makes of it.
    #[must_use]
    pub fn tls_psk(&self, host_nqn: &str, subsystem_nqn: &str) -> Option<TlsPsk> {
        let psk = self.generated_psk.as_ref()?;
        generated_tls_psk(psk, self.hash, IdentityVersion::One, host_nqn, subsystem_nqn).ok()
    }
}

/// Numbers of an end that never repeat: those of its challenges and those of its jobs.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sequence: Option<u32>,
    serial: u64,
}

impl Counters {
    /// Sequence number of a challenge: a random one first, then one more each time, never 0.
    pub(crate) fn next_sequence(&mut self, randomness: &Randomness) -> u32 {
        let next = self.sequence.map_or(randomness.sequence, |last| last.wrapping_add(1));
        let next = if next == 0 { 1 } else { next };
        self.sequence = Some(next);
        next
    }

    /// Number of a job.
    pub(crate) const fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }
}

/// The last challenges that an end has made. A peer that sends one of them back reflects it, to have
/// the response computed by whom it cannot impersonate.
#[derive(Debug, Default)]
pub(crate) struct OwnChallenges(VecDeque<Vec<u8>>);

impl OwnChallenges {
    const COUNT_MAX: usize = 8;

    pub(crate) fn record(&mut self, challenge: &[u8]) {
        if self.0.len() == Self::COUNT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(challenge.to_vec());
    }

    /// Whether a challenge is one of them, or the beginning of one: the hash may have changed.
    pub(crate) fn contains(&self, challenge: &[u8]) -> bool {
        let is_same = |own: &Vec<u8>| {
            let len = own.len().min(challenge.len());
            own[..len] == challenge[..len]
        };
        self.0.iter().any(is_same)
    }
}

/// Checks both names. The zero byte between them in a response makes them unambiguous, and control
/// characters are not permitted.
pub(crate) fn check_names(host_nqn: &str, subsystem_nqn: &str) -> Result<(), ConfigError> {
    check_host_nqn(host_nqn).and_then(|()| check_host_nqn(subsystem_nqn)).map_err(ConfigError::Nqn)
}

/// Index of the expected response that equals `found`. All are compared, in constant time each.
pub(crate) fn matching_response(expected: &[SecretBytes], found: &SecretBytes) -> Option<usize> {
    let mut matching = None;
    for (index, expected) in expected.iter().enumerate() {
        let is_equal = expected.expose().ct_eq(found.expose()).to_bool();
        if is_equal && matching.is_none() {
            matching = Some(index);
        }
    }
    matching
}
