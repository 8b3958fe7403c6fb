//! What an end accepts in a DH-HMAC-CHAP exchange.

use crate::{Group, Hash};

/// Secure channel concatenation of an exchange: the SC_C field (Base 2.2 §8.3.4.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concatenation {
    /// `00`: authentication only.
    None,
    /// `02`: generate a PSK, to open a TLS connection with it.
    NewTlsPsk,
    /// `03`: generate a PSK in place of the one of this TLS connection.
    ReplaceTlsPsk,
}

/// Whether a controller generates PSKs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConcatenationPolicy {
    /// A host that requests it is refused.
    Refused,
    /// A host may request it.
    Allowed,
    /// A host must request it on an admin queue that has no secure channel.
    Required,
}

/// What an end accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Permitted hash functions, the preferred ones first. A host offers them in this order; a
    /// controller selects the first that is offered.
    pub hashes: Vec<Hash>,
    /// Permitted groups, likewise.
    pub groups: Vec<Group>,
    /// Whether the controller must prove its identity too.
    pub bidirectional_required: bool,
    /// Whether a controller generates PSKs. No effect at a host.
    pub concatenation: ConcatenationPolicy,
}

impl Default for Policy {
    /// All hash functions and groups, the null group last.
    fn default() -> Self {
        Self {
            hashes: vec![Hash::Sha384, Hash::Sha256, Hash::Sha512],
            groups: vec![
                Group::Ffdhe3072,
                Group::Ffdhe4096,
                Group::Ffdhe2048,
                Group::Ffdhe6144,
                Group::Ffdhe8192,
                Group::Null,
            ],
            bidirectional_required: false,
            concatenation: ConcatenationPolicy::Allowed,
        }
    }
}

impl Concatenation {
    /// Concatenation with a code. `01` is obsolete.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            2 => Some(Self::NewTlsPsk),
            3 => Some(Self::ReplaceTlsPsk),
            _ => None,
        }
    }

    /// Value of SC_C.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::None => 0,
            Self::NewTlsPsk => 2,
            Self::ReplaceTlsPsk => 3,
        }
    }

    /// Whether a PSK is generated.
    #[must_use]
    pub const fn generates_psk(self) -> bool {
        !matches!(self, Self::None)
    }
}

impl Policy {
    /// Hash functions for an exchange. TLS has no cipher suite for a PSK of SHA-512.
    pub(crate) fn hashes_for(&self, concatenation: Concatenation) -> impl Iterator<Item = Hash> {
        let excluded = concatenation.generates_psk().then_some(Hash::Sha512);
        self.hashes.iter().copied().filter(move |&hash| Some(hash) != excluded)
    }

    /// Groups for an exchange. A PSK needs the secret of a Diffie-Hellman exchange.
    pub(crate) fn groups_for(&self, concatenation: Concatenation) -> impl Iterator<Item = Group> {
        let excluded = concatenation.generates_psk().then_some(Group::Null);
        self.groups.iter().copied().filter(move |&group| Some(group) != excluded)
    }
}
