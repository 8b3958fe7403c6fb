//! AES-GCM by AWS-LC, one record at a time, from memory where plaintext is to memory where it belongs.
//!
//! ```text
//!  seal   headers and segments ─(encrypted on the way)─► output buffer
//!  open   received record ─(decrypted on the way)─► segments, or a buffer
//! ```
//!
//! # Unsafe
//!
//! Guarantees of the safe interface:
//!
//! - A context is created, used and freed by its only owner, and never shared: methods that access
//!   it take `&mut self`, and it moves between threads only as a whole.
//! - The library is given exactly as many bytes as it reads and writes: AES-GCM writes as many as it
//!   reads.
//! - Source and destination are a [`GatherList`] and a [`ScatterList`], which hold borrowed slices and
//!   segments that a region table has resolved. Others may write to a segment meanwhile. The library
//!   reads plaintext once, to encrypt it, and computes tags of encrypted bytes, which are in memory of
//!   this process; it never reads what it has decrypted. So a segment that changes meanwhile changes
//!   what is sent and nothing else.
//! - Decrypted bytes reach the destination before their tag is compared, and are overwritten if it is
//!   wrong.

#![expect(unsafe_code, reason = "the library speaks C")]

mod pieces;

use std::ffi::c_int;
use std::ptr::{NonNull, null, null_mut};

use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_ctrl, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new,
    EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG, EVP_Cipher, EVP_CipherInit_ex, EVP_aes_128_gcm,
    EVP_aes_256_gcm,
};

use self::pieces::Piece;
pub(crate) use self::pieces::{GatherList, ScatterList, first_segment};
use crate::record::{HEADER_BYTES, OVERHEAD_BYTES, RecordHeader, TAG_BYTES};
use crate::suite::CipherSuite;

/// Key that encrypts records.
pub(crate) struct SealingKey(Context);

/// Key that decrypts records.
pub(crate) struct OpeningKey(Context);

/// The library has failed, which it does only if it is out of memory or used wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CipherFailure;

/// Nonce of AES-GCM.
type Nonce = [u8; 12];

/// Key in one direction, and the state of a record.
struct Context {
    raw: NonNull<EVP_CIPHER_CTX>,
    direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Decrypt = 0,
    Encrypt = 1,
}

// SAFETY: the context is memory of the library without thread affinity, and `Context` is its only
// owner.
unsafe impl Send for Context {}

impl SealingKey {
    pub(crate) fn new(suite: CipherSuite, key: &[u8]) -> Result<Self, CipherFailure> {
        Context::new(suite, key, Direction::Encrypt).map(Self)
    }

    /// Appends a record to `out`: its header, the next `content_len` bytes of `content` and
    /// `content_type`, encrypted, and the tag. A failure leaves `out` as it was.
    pub(crate) fn seal(
        &mut self,
        nonce: &Nonce,
        header: &RecordHeader,
        (content, content_len): (&mut GatherList<'_>, usize),
        content_type: u8,
        out: &mut Vec<u8>,
    ) -> Result<(), CipherFailure> {
        let total = content_len + OVERHEAD_BYTES;
        out.reserve(total);
        let space = &mut out.spare_capacity_mut()[..total];
        let (to_header, sealed) = space.split_at_mut(HEADER_BYTES);
        for (to, byte) in to_header.iter_mut().zip(header) {
            to.write(*byte);
        }
        self.0.start_record(nonce, header)?;
        let (to_content, behind) = sealed.split_at_mut(content_len);
        let mut at = 0;
        while at < content_len {
            let Piece { address, len_bytes } =
                content.pass(content_len - at).ok_or(CipherFailure)?;
            let to = to_content[at..at + len_bytes].as_mut_ptr().cast();
            // SAFETY: the list permits to read the piece. `to` has as many bytes, which are unused
            // capacity of a vector and so no part of the piece.
            unsafe { self.0.apply(address.as_ptr(), to, len_bytes) }?;
            at += len_bytes;
        }
        let (to_type, to_tag) = behind.split_at_mut(1);
        // SAFETY: one byte of this call, and one of unused capacity.
        unsafe { self.0.apply(&raw const content_type, to_type.as_mut_ptr().cast(), 1) }?;
        self.0.finish_record()?;
        let to_tag = to_tag[..TAG_BYTES].as_mut_ptr();
        // SAFETY: the record was finished, so there is a tag; `to_tag` has space for it.
        unsafe { self.0.control(EVP_CTRL_AEAD_GET_TAG, to_tag.cast()) }?;
        // SAFETY: header, content, type and tag are `total` bytes, which were all written above.
        unsafe { out.set_len(out.len() + total) };
        Ok(())
    }
}

impl OpeningKey {
    pub(crate) fn new(suite: CipherSuite, key: &[u8]) -> Result<Self, CipherFailure> {
        Context::new(suite, key, Direction::Decrypt).map(Self)
    }

    /// Decrypts `sealed`, all bytes of a record behind its header, to the next bytes of `content`, which
    /// do not count as filled, and returns the byte behind them: the content type, or padding. `None` if
    /// the tag is wrong, and then these bytes are zero, or if `content` has no space.
    ///
    /// # Errors
    ///
    /// If the library fails.
    pub(crate) fn open(
        &mut self,
        nonce: &Nonce,
        header: &RecordHeader,
        sealed: &[u8],
        content: &mut ScatterList<'_>,
    ) -> Result<Option<u8>, CipherFailure> {
        let Some((sealed, tag)) = sealed.split_last_chunk::<TAG_BYTES>() else { return Ok(None) };
        let Some((sealed_type, sealed)) = sealed.split_last() else { return Ok(None) };
        if content.left_bytes() < sealed.len() {
            return Ok(None);
        }
        self.0.start_record(nonce, header)?;
        let mut tag = *tag;
        // SAFETY: the library copies the tag from this variable.
        unsafe { self.0.control(EVP_CTRL_AEAD_SET_TAG, tag.as_mut_ptr()) }?;
        let mut rest = sealed;
        for Piece { address, len_bytes } in content.next_pieces(sealed.len()) {
            let (now, later) = rest.split_at(len_bytes);
            // SAFETY: `now` is a slice of `len_bytes`; the list permits to write as many to the piece,
            // which it has borrowed for writing, or which is a segment, so it is no part of `now`.
            unsafe { self.0.apply(now.as_ptr(), address.as_ptr(), len_bytes) }?;
            rest = later;
        }
        let mut last = 0;
        // SAFETY: one byte of a slice, and a variable of this call.
        unsafe { self.0.apply(sealed_type, &raw mut last, 1) }?;
        if self.0.finish_record().is_err() {
            content.overwrite_next(sealed.len());
            return Ok(None);
        }
        Ok(Some(last))
    }
}

impl Context {
    fn new(suite: CipherSuite, key: &[u8], direction: Direction) -> Result<Self, CipherFailure> {
        if key.len() != suite.key_bytes() {
            return Err(CipherFailure);
        }
        // SAFETY: the call has no premises; a null result is handled.
        let raw = NonNull::new(unsafe { EVP_CIPHER_CTX_new() }).ok_or(CipherFailure)?;
        let context = Self { raw, direction };
        let cipher = match suite {
            // SAFETY: the call has no premises; the result is static.
            CipherSuite::Aes128GcmSha256 => unsafe { EVP_aes_128_gcm() },
            // SAFETY: as above.
            CipherSuite::Aes256GcmSha384 => unsafe { EVP_aes_256_gcm() },
        };
        let (key, way) = (key.as_ptr(), direction as c_int);
        // SAFETY: the context is exclusively owned; the cipher reads 16 or 32 bytes of key, whose number
        // was checked; null means no engine, and a nonce that is set later.
        let done = unsafe { EVP_CipherInit_ex(raw.as_ptr(), cipher, null_mut(), key, null(), way) };
        if done == 1 { Ok(context) } else { Err(CipherFailure) }
    }

    /// Begins a record: sets its nonce, and passes its header, which only the tag covers.
    fn start_record(&mut self, nonce: &Nonce, header: &RecordHeader) -> Result<(), CipherFailure> {
        let (raw, way) = (self.raw.as_ptr(), self.direction as c_int);
        // SAFETY: the context is exclusively owned and has its key, so that null keeps cipher and key; a
        // nonce of AES-GCM has 12 bytes.
        let done =
            unsafe { EVP_CipherInit_ex(raw, null(), null_mut(), null(), nonce.as_ptr(), way) };
        if done != 1 {
            return Err(CipherFailure);
        }
        // SAFETY: the header is an array, and nothing is written without a destination.
        unsafe { self.apply(header.as_ptr(), null_mut(), HEADER_BYTES) }
    }

    /// Passes bytes through the cipher.
    ///
    /// # Safety
    ///
    /// `len_bytes` bytes at `from` can be read. As many at `to` can be written and do not overlap them,
    /// or `to` is null.
    unsafe fn apply(
        &mut self,
        from: *const u8,
        to: *mut u8,
        len_bytes: usize,
    ) -> Result<(), CipherFailure> {
        // SAFETY: the context is exclusively owned and has key and nonce; the rest is the contract.
        let count = unsafe { EVP_Cipher(self.raw.as_ptr(), to, from, len_bytes) };
        if usize::try_from(count) == Ok(len_bytes) { Ok(()) } else { Err(CipherFailure) }
    }

    /// Ends a record: computes its tag, or compares it with the one that was set, in constant time.
    fn finish_record(&mut self) -> Result<(), CipherFailure> {
        // SAFETY: the context is exclusively owned and has key and nonce. Null ends a record, and nothing
        // is read or written then.
        let done = unsafe { EVP_Cipher(self.raw.as_ptr(), null_mut(), null(), 0) };
        if done == 0 { Ok(()) } else { Err(CipherFailure) }
    }

    /// Reads or sets the tag.
    ///
    /// # Safety
    ///
    /// `tag` is an address of 16 bytes that can be read, or written, as `command` requires.
    unsafe fn control(&mut self, command: c_int, tag: *mut u8) -> Result<(), CipherFailure> {
        const LEN_BYTES: c_int = 16;
        const { assert!(TAG_BYTES == 16) };
        let (raw, tag) = (self.raw.as_ptr(), tag.cast());
        // SAFETY: the context is exclusively owned; the rest is the contract.
        let done = unsafe { EVP_CIPHER_CTX_ctrl(raw, command, LEN_BYTES, tag) };
        if done == 1 { Ok(()) } else { Err(CipherFailure) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is exclusively owned and not used afterwards. The library overwrites the
        // key in it.
        unsafe { EVP_CIPHER_CTX_free(self.raw.as_ptr()) };
    }
}
