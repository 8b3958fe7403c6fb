//! Keyring: keys of NVMe/TCP TLS and DH-HMAC-CHAP by name, in a directory of files, and TLS PSKs in
//! the keyring of the kernel.
//!
//! ```text
//!   /etc/tenmil/keys/db-host     NVMeTLSkey-1:01:…:    ┐ Keyring: KeyName → Key
//!   /etc/tenmil/keys/db-chap     DHHC-1:01:…:          ┘      │ host NQN, subsystem NQN
//!                                                             ▼
//!   .nvme of the kernel          identity → TLS PSK      KernelPsks
//! ```
//!
//! A file holds one key, in the text form that `nvme gen-tls-key` and `nvme gen-dhchap-key` print.
//!
//! Opening a [`Keyring`] has all secrets of this process lie in memory that is locked and in no core
//! dump ([`protect_secrets`]). No error, and no `Debug` output, holds anything of a key.
#![forbid(unsafe_code)]

mod error;
mod kernel_psks;
mod key;
mod key_name;
mod keyring;
mod protection;
#[cfg(test)]
mod tests;

pub use error::KeyringError;
pub use kernel_psks::{KernelPsk, KernelPsks};
pub use key::{Key, KeyKind};
pub use key_name::{KeyName, contains_key_text};
pub use keyring::{Keyring, KeyringAtPath, KeyringEntry, default_path};
pub use protection::{key_of_input, protect_secrets};
pub use tenmil_linux::key_directory::Overwrite;
