//! Diffie-Hellman groups of DH-HMAC-CHAP: none, and the finite fields of RFC 7919.
//!
//! A prime is computed from its definition (RFC 7919 appendix A),
//! `p = 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1`, when a group is first used. The tests
//! compare all five with those of OpenSSL.

use core::fmt;
use std::sync::OnceLock;

/// Diffie-Hellman group. The discriminants are its identifiers (Base 2.2 §8.3.4.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// No Diffie-Hellman exchange.
    Null = 0,
    /// A prime of 2048 bits.
    Ffdhe2048 = 1,
    /// A prime of 3072 bits.
    Ffdhe3072 = 2,
    /// A prime of 4096 bits.
    Ffdhe4096 = 3,
    /// A prime of 6144 bits.
    Ffdhe6144 = 4,
    /// A prime of 8192 bits.
    Ffdhe8192 = 5,
}

impl Group {
    /// All groups, in the order of their identifiers.
    pub const ALL: [Self; 6] = [
        Self::Null,
        Self::Ffdhe2048,
        Self::Ffdhe3072,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
    ];

    /// Group with an identifier.
    #[must_use]
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.id() == id)
    }

    /// Identifier in messages.
    #[must_use]
    pub const fn id(self) -> u8 {
        self as u8
    }

    /// Length of its prime, and of a public value: 0 for the null group.
    #[must_use]
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 256,
            Self::Ffdhe3072 => 384,
            Self::Ffdhe4096 => 512,
            Self::Ffdhe6144 => 768,
            Self::Ffdhe8192 => 1024,
        }
    }

    /// Number X of the definition (RFC 7919 appendix A.1 to A.5).
    const fn x(self) -> u64 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 560_316,
            Self::Ffdhe3072 => 2_625_351,
            Self::Ffdhe4096 => 5_736_041,
            Self::Ffdhe6144 => 15_705_020,
            Self::Ffdhe8192 => 10_965_728,
        }
    }

    /// Prime of the group, big-endian; empty for the null group.
    #[must_use]
    pub fn prime(self) -> &'static [u8] {
        static PRIMES: [OnceLock<Vec<u8>>; 6] = [const { OnceLock::new() }; 6];
        if self == Self::Null {
            return &[];
        }
        PRIMES[usize::from(self.id())].get_or_init(|| compute_prime(self.len_bytes() / 8, self.x()))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Null => "null",
            Self::Ffdhe2048 => "ffdhe2048",
            Self::Ffdhe3072 => "ffdhe3072",
            Self::Ffdhe4096 => "ffdhe4096",
            Self::Ffdhe6144 => "ffdhe6144",
            Self::Ffdhe8192 => "ffdhe8192",
        })
    }
}

/// The prime of `limbs` 64-bit limbs whose number X is `x`.
///
/// ```text
/// limb  n-1        n-2 … 1                              0
///       all ones   floor(2^(b-130) e) + X - 1           all ones
/// ```
///
/// The last term of the definition, -1, borrows from the middle and leaves ones below. The number in
/// the middle has b-128 bits, since 2 < e < 4.
fn compute_prime(limbs: usize, x: u64) -> Vec<u8> {
    let mut middle = euler_bits(limbs - 2);
    let mut carry = x - 1;
    for limb in &mut middle {
        let (sum, overflow) = limb.overflowing_add(carry);
        (*limb, carry) = (sum, u64::from(overflow));
    }
    let ones = [u64::MAX];
    let limbs = ones.iter().chain(middle.iter().rev()).chain(&ones);
    limbs.flat_map(|limb| limb.to_be_bytes()).collect()
}

/// `floor(2^(64 n - 2) e)` in n limbs, the lowest first: the sum of `2^(64 n - 2) / k!`. Two more
/// limbs below absorb the errors of fewer than 2^64 divisions.
fn euler_bits(limbs: usize) -> Vec<u64> {
    const GUARD: usize = 2;
    let mut term = vec![0; limbs + GUARD];
    term[limbs + GUARD - 1] = 1 << 62;
    let mut sum = term.clone();
    for divisor in 1.. {
        divide(&mut term, divisor);
        if term.iter().all(|&limb| limb == 0) {
            break;
        }
        add(&mut sum, &term);
    }
    sum.split_off(GUARD)
}

fn divide(number: &mut [u64], divisor: u64) {
    let mut remainder = 0;
    for limb in number.iter_mut().rev() {
        let dividend = u128::from(remainder) << 64 | u128::from(*limb);
        // The remainder is less than the divisor, so the quotient has 64 bits.
        *limb = u64::try_from(dividend / u128::from(divisor)).unwrap_or(u64::MAX);
        remainder = u64::try_from(dividend % u128::from(divisor)).unwrap_or(u64::MAX);
    }
}

fn add(sum: &mut [u64], term: &[u64]) {
    let mut carry = false;
    for (limb, &term) in sum.iter_mut().zip(term) {
        let (partial, first) = limb.overflowing_add(term);
        let (total, second) = partial.overflowing_add(u64::from(carry));
        (*limb, carry) = (total, first || second);
    }
}
