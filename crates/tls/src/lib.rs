//! TLS 1.3 for NVMe/TCP, NBD and the control API: a session as a state machine, and a stream over a stream.
//!
//! ```text
//!   owner ─ plaintext ─► TlsStream ─► TlsSession ─► s2n-tls until the handshake has ended
//!                            │            │ └► ClientHello: which of several keys the client has
//!                            ▼ records    └──► record layer from then on ─► AES-GCM of AWS-LC
//!                     Box<dyn Stream>: a socket
//! ```
//!
//! - [`TlsStream`] implements [`tenmil_base::Stream`], so its owner sees no difference but
//!   [`secure_channel`](tenmil_base::Stream::secure_channel).
//! - [`TlsSession`] has neither socket nor clock nor threads: encrypted bytes come from and go to a
//!   [`CipherIo`], and the owner decides how long a handshake may take.
//! - [`PskSource`] finds the keys of a server when a client names one; a client has a list of [`Psk`].
//!   With certificates, a client verifies that of the server, and a server those of its clients if it has
//!   an authority for them.
//!
//! Two cipher suites are accepted, TLS_AES_128_GCM_SHA256 and TLS_AES_256_GCM_SHA384, with a
//! pre-shared key and an ephemeral key exchange (`psk_dhe_ke`), so that a key that becomes known later
//! decrypts nothing. There is no renegotiation, resumption or early data. Keys are updated when the peer
//! does it, and before one has encrypted too much.
//!
//! # Secrets
//!
//! s2n-tls hands the traffic secrets of both directions over when the handshake has ended, and its
//! connection is freed, which erases its keys. From then on a secret of each direction is a
//! [`SecretBytes`](tenmil_nvme_auth::SecretBytes), and its key is in a context of AWS-LC, which
//! overwrites it when it is freed: at a KeyUpdate, and with the session.
//!
//! # Unsafe
//!
//! Only [`s2n_tls`], around s2n-tls, and [`cipher`], around AES-GCM, contain unsafe code; their
//! guarantees are stated at their tops. All other modules forbid unsafe code.

#[forbid(unsafe_code)]
mod alert;
mod cipher;
#[forbid(unsafe_code)]
mod cipher_io;
#[forbid(unsafe_code)]
mod client_hello;
#[forbid(unsafe_code)]
mod error;
#[forbid(unsafe_code)]
pub mod fuzz;
#[forbid(unsafe_code)]
mod key_schedule;
#[forbid(unsafe_code)]
mod psk;
#[forbid(unsafe_code)]
mod record;
#[forbid(unsafe_code)]
mod record_layer;
mod s2n_tls;
#[forbid(unsafe_code)]
mod session;
#[forbid(unsafe_code)]
mod stream;
#[forbid(unsafe_code)]
mod suite;
#[cfg(test)]
mod tests;

pub use alert::Alert;
pub use cipher_io::{CipherIo, Received, ReceivedMore};
pub use error::TlsError;
pub use psk::{Psk, PskSource};
pub use record::RecordViolation;
pub use record_layer::Plaintext;
pub use session::{ClientCertificate, ClientConfig, ServerConfig, TlsSession};
pub use stream::TlsStream;
pub use suite::CipherSuite;
