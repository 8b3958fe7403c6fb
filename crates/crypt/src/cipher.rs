//! AES-256-XTS by AWS-LC, one data unit at a time.
//!
//! # Unsafe
//!
//! Guarantees of the safe interface:
//!
//! - A context is created, used and freed by its only owner, and never shared: methods that access
//!   it take `&mut self`, and it moves between threads only as a whole.
//! - The library is given exactly as many bytes of key, tweak and data as it reads and writes.

#![expect(unsafe_code, reason = "the library speaks C")]

use std::ptr::{NonNull, null, null_mut};

use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_CipherInit_ex, EVP_CipherUpdate,
    EVP_aes_256_xts,
};

use crate::key::XtsKey;

/// Cipher in one direction, with its key.
pub(crate) struct XtsCipher {
    context: NonNull<EVP_CIPHER_CTX>,
    direction: CipherDirection,
}

/// Direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CipherDirection {
    Decrypt = 0,
    Encrypt = 1,
}

/// Length of a data unit in bytes.
pub(crate) const UNIT_BYTES: usize = 512;

// SAFETY: the context is memory of the library without thread affinity, and `XtsCipher` is its only
// owner.
unsafe impl Send for XtsCipher {}

impl XtsCipher {
    /// Creates a cipher with this key; `None` if the library is out of memory.
    pub(crate) fn new(key: &XtsKey, direction: CipherDirection) -> Option<Self> {
        // SAFETY: the call has no premises; a null result is handled.
        let context = NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?;
        let xts = Self { context, direction };
        // SAFETY: the call has no premises; the result is static.
        let cipher = unsafe { EVP_aes_256_xts() };
        let key = key.bytes().as_ptr();
        // SAFETY: the context is exclusively owned; AES-256-XTS reads 64 bytes of key, the length
        // of a `XtsKey`; null means no engine, and a tweak that is set later.
        let done = unsafe {
            EVP_CipherInit_ex(context.as_ptr(), cipher, null_mut(), key, null(), direction as i32)
        };
        (done == 1).then_some(xts)
    }

    /// Encrypts or decrypts whole units in place; the first has number `unit`. False if the library
    /// fails, which does not happen for units of 512 bytes.
    #[must_use]
    pub(crate) fn apply_to_units(&mut self, unit: u64, bytes: &mut [u8]) -> bool {
        (unit..)
            .zip(bytes.chunks_exact_mut(UNIT_BYTES))
            .all(|(unit, bytes)| self.apply_to_unit(unit, bytes))
    }

    fn apply_to_unit(&mut self, unit: u64, bytes: &mut [u8]) -> bool {
        let mut tweak = [0; 16];
        tweak[..8].copy_from_slice(&unit.to_le_bytes());
        let context = self.context.as_ptr();
        // SAFETY: the context is exclusively owned and has its key; XTS reads 16 bytes of tweak;
        // null keeps cipher and key.
        let ready = unsafe {
            let way = self.direction as i32;
            EVP_CipherInit_ex(context, null(), null_mut(), null(), tweak.as_ptr(), way)
        };
        let (data, mut written) = (bytes.as_mut_ptr(), 0);
        let Ok(len) = i32::try_from(bytes.len()) else { return false };
        if ready != 1 {
            return false;
        }
        // SAFETY: XTS writes as many bytes as it reads, in place if both pointers are equal, and
        // `data` is a slice of `len` bytes.
        let done = unsafe { EVP_CipherUpdate(context, data, &raw mut written, data, len) };
        done == 1 && written == len
    }
}

impl Drop for XtsCipher {
    fn drop(&mut self) {
        // SAFETY: the context is exclusively owned and not used afterwards. The library overwrites
        // the key in it.
        unsafe { EVP_CIPHER_CTX_free(self.context.as_ptr()) };
    }
}
