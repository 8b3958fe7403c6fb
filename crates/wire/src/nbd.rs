//! The NBD protocol: bytes to meaning and back, no state.
//!
//! Sections are those of `doc/proto.md` of the NetworkBlockDevice project. All numbers travel in
//! network byte order. What either side may send next is for `target` to know; here is only what
//! the bytes say.
//!
//! | module | what it holds |
//! |---|---|
//! | [`handshake`] | the greeting, options and their replies, until an export is chosen |
//! | [`option`] | what lies in the data of options and of their replies |
//! | [`request`] | what a client asks for once it has an export |
//! | [`reply`] | what it is answered: simple replies and structured chunks |

pub(crate) mod code;
pub mod handshake;
pub mod option;
pub mod reply;
pub mod request;
#[cfg(test)]
mod tests;

pub use handshake::{
    ClientFlags, Greeting, HandshakeFlags, InfoCode, OptionCode, OptionHeader, OptionReply,
    OptionReplyCode, TransmissionFlags,
};
pub use reply::{ChunkCode, ChunkFlags, ChunkHeader, ErrorCode, Extent, ExtentFlags, SimpleReply};
pub use request::{Command, CommandFlags, RequestHeader};

/// No string is longer ("Conventions").
pub const STRING_BYTES_MAX: usize = 4096;

/// What a request may carry if nobody said otherwise ("Block size constraints").
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// The first thing that is wrong with some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The magic number is another one.
    Magic {
        /// The one found.
        found: u64,
        /// The one expected.
        expected: u64,
    },
    /// A length says that there is more than there is, or less.
    Length,
    /// A string is not UTF-8, holds a NUL, or is longer than strings may be.
    Text,
}

impl core::fmt::Display for Malformed {
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

impl core::error::Error for Malformed {}

/// Takes numbers and strings off the front of some bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed::Length)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Length)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn magic_u32(&mut self, expected: u32) -> Result<(), Malformed> {
        let (found, expected) = (u64::from(self.u32()?), u64::from(expected));
        if found == expected { Ok(()) } else { Err(Malformed::Magic { found, expected }) }
    }

    pub(crate) fn magic_u64(&mut self, expected: u64) -> Result<(), Malformed> {
        let found = self.u64()?;
        if found == expected { Ok(()) } else { Err(Malformed::Magic { found, expected }) }
    }

    /// A string of `count` bytes.
    pub(crate) fn text(&mut self, count: usize) -> Result<&'a str, Malformed> {
        let bytes = self.bytes(count)?;
        let text = core::str::from_utf8(bytes).map_err(|_| Malformed::Text)?;
        let fits = text.len() <= STRING_BYTES_MAX && !text.contains('\0');
        if fits { Ok(text) } else { Err(Malformed::Text) }
    }

    /// A string with its length before it.
    pub(crate) fn text_u32(&mut self) -> Result<&'a str, Malformed> {
        let count = usize::try_from(self.u32()?).map_err(|_| Malformed::Length)?;
        self.text(count)
    }

    /// All has been read.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Length) }
    }
}

/// Puts numbers one behind the other into an array that they fill.
pub(crate) struct Writer<const N: usize> {
    bytes: [u8; N],
    done: usize,
}

impl<const N: usize> Writer<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], done: 0 }
    }

    pub(crate) fn put<const M: usize>(mut self, bytes: [u8; M]) -> Self {
        self.bytes[self.done..self.done + M].copy_from_slice(&bytes);
        self.done += M;
        self
    }

    pub(crate) fn finish(self) -> [u8; N] {
        debug_assert_eq!(self.done, N, "the fields fill the structure");
        self.bytes
    }
}
