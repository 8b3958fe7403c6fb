//! NBD protocol: encoding and decoding, without state.
//!
//! Sections are those of `doc/proto.md` of the NetworkBlockDevice project. All numbers are in
//! network byte order. The crate `target` implements the sequence of messages; this module only
//! their encoding.
//!
//! | module | content |
//! |---|---|
//! | [`handshake`] | server greeting, options and their replies, until an export is chosen |
//! | [`option`] | data of options and of their replies |
//! | [`request`] | requests of the transmission phase |
//! | [`reply`] | replies: simple replies and structured chunks |

pub(crate) mod codes;
pub mod handshake;
pub mod option;
pub mod reply;
pub mod request;
#[cfg(test)]
mod tests;

pub use handshake::{
    ClientFlags, HandshakeFlags, InfoCode, OptionCode, OptionHeader, OptionReply, OptionReplyCode,
    ServerGreeting, TransmissionFlags,
};
pub use reply::{
    BlockStatusExtent, ChunkCode, ChunkFlags, ChunkHeader, ErrorCode, ExtentFlags, SimpleReply,
};
pub use request::{Command, CommandFlags, RequestHeader};

/// Maximum length of a string ("Conventions").
pub const STRING_BYTES_MAX: usize = 4096;

/// Default maximum payload of a request ("Block size constraints").
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// First error in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// Wrong magic number.
    Magic {
        /// Value found.
        found: u64,
        /// Value expected.
        expected: u64,
    },
    /// A length does not match the available bytes.
    Length,
    /// A string is not UTF-8, contains a NUL, or is too long.
    Text,
}

impl core::fmt::Display for ParseError {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Magic { found, expected } => {
                write!(out, "magic is {found:#x}, expected {expected:#x}")
            }
            Self::Length => out.write_str("a length does not fit what it is the length of"),
            Self::Text => write!(
                out,
                "a string is no UTF-8, holds a NUL or is longer than {STRING_BYTES_MAX} bytes"
            ),
        }
    }
}

impl core::error::Error for ParseError {}

/// Reads numbers and strings from the front of a byte slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteReader<'a>(pub(crate) &'a [u8]);

impl<'a> ByteReader<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], ParseError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(ParseError::Length)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(ParseError::Length)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, ParseError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ParseError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ParseError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn expect_magic_u32(&mut self, expected: u32) -> Result<(), ParseError> {
        let (found, expected) = (u64::from(self.u32()?), u64::from(expected));
        if found == expected { Ok(()) } else { Err(ParseError::Magic { found, expected }) }
    }

    pub(crate) fn expect_magic_u64(&mut self, expected: u64) -> Result<(), ParseError> {
        let found = self.u64()?;
        if found == expected { Ok(()) } else { Err(ParseError::Magic { found, expected }) }
    }

    /// Reads a string of `count` bytes.
    pub(crate) fn text(&mut self, count: usize) -> Result<&'a str, ParseError> {
        let bytes = self.bytes(count)?;
        let text = core::str::from_utf8(bytes).map_err(|_| ParseError::Text)?;
        let fits = text.len() <= STRING_BYTES_MAX && !text.contains('\0');
        if fits { Ok(text) } else { Err(ParseError::Text) }
    }

    /// Reads a string preceded by its length.
    pub(crate) fn take_length_prefixed_text(&mut self) -> Result<&'a str, ParseError> {
        let count = usize::try_from(self.u32()?).map_err(|_| ParseError::Length)?;
        self.text(count)
    }

    /// Succeeds if everything has been read.
    pub(crate) fn expect_end(&self) -> Result<(), ParseError> {
        if self.0.is_empty() { Ok(()) } else { Err(ParseError::Length) }
    }
}

/// Writes consecutive numbers into an array that they fill.
pub(crate) struct ByteWriter<const N: usize> {
    bytes: [u8; N],
    done: usize,
}

impl<const N: usize> ByteWriter<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], done: 0 }
    }

    pub(crate) fn put<const M: usize>(mut self, bytes: [u8; M]) -> Self {
        self.bytes[self.done..self.done + M].copy_from_slice(&bytes);
        self.done += M;
        self
    }

    pub(crate) fn into_array(self) -> [u8; N] {
        debug_assert_eq!(self.done, N, "the fields fill the structure");
        self.bytes
    }
}
