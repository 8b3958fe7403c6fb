//! Protection of secrets in memory, and input of a key.

use std::io::Read;

use tenmil_linux::secret_memory::SecretBuffer;
use tenmil_nvme_auth::{SecretMemory, set_secret_allocator};

use crate::KeyringError;
use crate::key::Key;
use crate::keyring::FILE_BYTES_MAX;

struct ProtectedMemory(SecretBuffer);

impl SecretMemory for ProtectedMemory {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Has all secrets that this process creates from now on lie in memory that is locked, and in no
/// core dump. [`Keyring`](crate::Keyring) does it; a program that gets its secrets otherwise calls
/// it first.
///
/// [`tenmil_linux::secret_memory::secret_memory_state`] shows whether the kernel permitted it.
pub fn protect_secrets() {
    set_secret_allocator(|len| {
        let buffer = SecretBuffer::allocate(len).ok()?;
        Some(Box::new(ProtectedMemory(buffer)))
    });
}

/// Reads a key from a file or a pipe, up to its end. `of` is what is read, for the error.
///
/// # Errors
///
/// If it cannot be read, or is no key.
pub fn key_of_input(of: &str, input: &mut dyn Read) -> Result<Key, KeyringError> {
    protect_secrets();
    let refuse = |why| KeyringError::Input { of: of.to_owned(), why };
    let mut bytes = SecretBuffer::allocate(FILE_BYTES_MAX + 1).map_err(refuse)?;
    let mut len = 0;
    while len < bytes.len() {
        match input.read(&mut bytes[len..]) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(refuse(error)),
        }
    }
    if len > FILE_BYTES_MAX {
        return Err(KeyringError::NoKey { of: format!("{of}: more than {FILE_BYTES_MAX} bytes") });
    }
    bytes.truncate(len);
    match std::str::from_utf8(&bytes) {
        Ok(text) => Key::parse(of, text),
        Err(_) => Err(KeyringError::NoKey { of: of.to_owned() }),
    }
}
