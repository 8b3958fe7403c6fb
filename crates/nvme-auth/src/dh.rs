//! Diffie-Hellman in the finite fields of RFC 7919: the work that an owner runs outside a reactor.

use core::fmt;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::Zeroize;

use crate::{Group, SecretBytes};

/// Length of a private exponent. RFC 7919 §5.2 requires 225 to 400 bits, by group.
pub(crate) const EXPONENT_BYTES: usize = 64;

/// Modular exponentiations that a state machine needs before it continues: its public value, the
/// secret that it shares with the peer, or both. Each takes from 1 ms (ffdhe2048) to 20 ms
/// (ffdhe8192), in a time that does not depend on the exponent.
#[derive(Debug)]
pub struct DhJob {
    /// Group, not the null group.
    group: Group,
    /// Private exponent.
    exponent: SecretBytes,
    /// Whether the public value is to be computed.
    public_value: bool,
    /// Public value of the peer, if the shared secret is to be computed.
    peer: Option<Vec<u8>>,
    /// Number by which the state machine recognizes the result.
    serial: u64,
}

/// Runs jobs outside the thread that serves I/O.
pub trait DhExecutor: Send + Sync {
    /// Runs `job` and hands its result to `done`, on any thread. If it has too much to do already, it
    /// drops both: the exchange then ends by its time limit.
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>);
}

/// Runs jobs at once on the calling thread: for tests and simulations.
#[derive(Clone, Copy, Debug, Default)]
pub struct InlineDhExecutor;

impl DhExecutor for InlineDhExecutor {
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>) {
        done(job.run());
    }
}

/// Result of a [`DhJob`], for the state machine that returned the job.
#[derive(Debug)]
pub struct DhResult {
    pub(crate) serial: u64,
    pub(crate) public_value: Option<Vec<u8>>,
    pub(crate) shared_secret: Option<SecretBytes>,
}

/// A public value is not acceptable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DhError {
    /// It is empty or longer than the prime of its group.
    Length {
        /// Group.
        group: Group,
        /// Bytes that were found.
        found_bytes: usize,
    },
    /// It is not in the range from 2 to p - 2, so the shared secret would be known.
    Range(Group),
}

impl fmt::Display for DhError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { group, found_bytes } => write!(
                out,
                "public value of {group} has {found_bytes} bytes, expected 1 to {}",
                group.len_bytes()
            ),
            Self::Range(group) => {
                write!(out, "public value of {group} is degenerate, expected 2 to p-2")
            }
        }
    }
}

impl core::error::Error for DhError {}

impl DhJob {
    pub(crate) const fn new(
        group: Group,
        exponent: SecretBytes,
        public_value: bool,
        peer: Option<Vec<u8>>,
        serial: u64,
    ) -> Self {
        Self { group, exponent, public_value, peer, serial }
    }

    /// Group of the exponentiation, from which its cost follows.
    #[must_use]
    pub const fn group(&self) -> Group {
        self.group
    }

    /// Computes.
    #[must_use]
    pub fn run(self) -> DhResult {
        let power = |base: &[u8]| mod_exp(self.group, base, &self.exponent);
        DhResult {
            serial: self.serial,
            // The generator of each group is 2 (RFC 7919 appendix A).
            public_value: self.public_value.then(|| power(&[2]).expose().to_vec()),
            shared_secret: self.peer.as_deref().map(power),
        }
    }
}

/// Checks the public value of a peer: at most as long as the prime, and 2 to p - 2.
pub(crate) fn check_public_value(group: Group, value: &[u8]) -> Result<(), DhError> {
    let len_bytes = group.len_bytes();
    if value.is_empty() || value.len() > len_bytes {
        return Err(DhError::Length { group, found_bytes: value.len() });
    }
    let value = pad(value, len_bytes);
    let mut below_two = vec![0; len_bytes];
    below_two[len_bytes - 1] = 1;
    // p is odd and ends with 64 ones, so p - 1 differs in its last bit only.
    let mut p_minus_one = group.prime().to_vec();
    p_minus_one[len_bytes - 1] ^= 1;
    if value <= below_two || value >= p_minus_one {
        return Err(DhError::Range(group));
    }
    Ok(())
}

/// Big-endian number in `len_bytes` bytes.
pub(crate) fn pad(value: &[u8], len_bytes: usize) -> Vec<u8> {
    let mut padded = vec![0; len_bytes.saturating_sub(value.len())];
    padded.extend_from_slice(value);
    padded
}

/// `base^exponent mod p`, as long as p, in a time that does not depend on the exponent. The base is
/// less than p.
fn mod_exp(group: Group, base: &[u8], exponent: &SecretBytes) -> SecretBytes {
    let len_bytes = group.len_bytes();
    let bits = group.len_bytes().try_into().map_or(0, |bytes: u32| 8 * bytes);
    let number = |bytes: &[u8]| BoxedUint::from_be_slice_truncated(bytes, bits);
    let Some(modulus) = Odd::new(number(group.prime())).into_option() else {
        unreachable!("a prime is odd")
    };
    let params = BoxedMontyParams::new(modulus);
    let mut exponent = BoxedUint::from_be_slice_truncated(exponent.expose(), EXPONENT_BITS);
    let mut power =
        BoxedMontyForm::new(number(base), &params).pow_bounded_exp(&exponent, EXPONENT_BITS);
    let mut value = power.retrieve();
    let mut bytes = value.to_be_bytes();
    let result = SecretBytes::new(pad(&bytes, len_bytes));
    exponent.zeroize();
    power.zeroize();
    value.zeroize();
    bytes.zeroize();
    result
}

/// Bits of a private exponent.
const EXPONENT_BITS: u32 = 512;
const _: () = assert!(EXPONENT_BITS as usize == 8 * EXPONENT_BYTES);
