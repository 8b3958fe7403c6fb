//! Keys of NVMe/TCP TLS, and DH-HMAC-CHAP at both ends: bytes in, bytes out.
//!
//! ```text
//!  NVMeTLSkey-1:…  ConfiguredPsk ─► retained PSK ─┐
//!                                                 ├─► TlsPsk { identity, secret } ─► a TLS library
//!  Host, Controller ─► Authenticated ─► generated PSK ─┘
//!    ▲      │ DhJob                      (secure channel concatenation)
//!    │      ▼
//!  DhResult ◄─ DhJob::run, on a thread that may compute for milliseconds
//! ```
//!
//! - [`ConfiguredPsk`] is a pre-shared key as a user stores it, [`TlsPsk`] what TLS needs of it for
//!   a host and a subsystem; [`tls_psk_candidates`] lists all that a peer may use.
//! - [`ChapSecret`] is a `DHHC-1:` secret.
//! - [`KeySource`] finds the text of either by a name.
//! - [`Host`] and [`Controller`] are the ends of a DH-HMAC-CHAP exchange, [`Message`] is what they
//!   exchange in Authentication Send and Authentication Receive, [`Policy`] what they accept.
//! - [`SecretBytes`] holds the bytes of a secret, in memory of the program's choice.
//! - [`DhJob`] is a modular exponentiation that the owner runs where it harms no I/O, on a
//!   [`DhExecutor`].
//!
//! The crate has no clock, no random numbers and no I/O: random bytes are arguments, and the owner
//! ends an exchange that takes too long. A type that holds a secret overwrites it on drop and prints
//! nothing of it.
//!
//! References are to NVM Express Base 2.2 ("Base"), the NVMe/TCP transport 1.1 ("TCP") and RFC 7919.
#![forbid(unsafe_code)]

mod chap_secret;
mod configured_psk;
mod controller;
mod dh;
mod exchange;
mod failure;
mod group;
mod hash;
mod host;
mod key_source;
mod key_text;
mod message;
mod policy;
mod psk_identity;
mod response;
mod secret_bytes;
mod tls_psk;

#[cfg(test)]
mod tests;

pub use chap_secret::ChapSecret;
pub use configured_psk::ConfiguredPsk;
pub use controller::{Controller, ControllerConfig};
pub use dh::{DhError, DhExecutor, DhJob, DhResult, InlineDhExecutor};
pub use exchange::{Authenticated, ConfigError, Randomness, Step};
pub use failure::{Failure, FailureReason, FailureSide};
pub use group::Group;
pub use hash::{Derivation, Hash};
pub use host::{Host, HostConfig};
pub use key_source::{KERNEL_KEYRING, KeySource, KeyText};
pub use key_text::{KeyError, KeyHash};
pub use message::{
    CHALLENGE_BUFFER_BYTES, Challenge, DescriptorLists, FailureMessage, Message, MessageError,
    Negotiate, Reply, SECURITY_PROTOCOL, SECURITY_PROTOCOL_SPECIFIC, Success1,
};
pub use policy::{Concatenation, ConcatenationPolicy, Policy};
pub use psk_identity::PskIdentity;
pub use secret_bytes::{SecretAllocator, SecretBytes, SecretMemory, set_secret_allocator};
pub use tls_psk::{
    IdentityVersion, PskKind, TlsPsk, TlsPskError, generated_tls_psk, sort_tls_psks, tls_psk,
    tls_psk_candidates,
};
