//! What a request is answered: a simple reply, or chunks.
//!
//! ```text
//!   simple     | magic  | error  | cookie  |  then the data of a read     0  4  8  16
//!   chunk      | magic  | flags | type | cookie  | length | payload       0  4  6  8  16  20
//!
//!   payloads   OFFSET_DATA    | offset  | data …
//!              OFFSET_HOLE    | offset  | length |
//!              BLOCK_STATUS   | context | length | flags | length | flags | …
//!              ERROR          | error | length of text | text |
//!              ERROR_OFFSET   | error | length of text | text | offset  |
//! ```

use super::code::{codes, flags};
use super::{Malformed, Reader, Writer};

/// Before a simple reply ("Simple reply message").
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Before a chunk ("Structured reply chunk message").
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

flags! {
    /// What is to be known of a chunk.
    pub struct ChunkFlags(u16) in "Structured reply flags" {
        /// It is the last of its request.
        DONE = 0 "NBD_REPLY_FLAG_DONE";
    }

    /// What is known of an extent, in context `base:allocation`.
    pub struct ExtentFlags(u32) in "Metadata contexts" {
        /// It takes no room.
        HOLE = 0 "NBD_STATE_HOLE";
        /// It reads as zeroes.
        ZERO = 1 "NBD_STATE_ZERO";
    }
}

codes! {
    /// What a chunk holds.
    pub struct ChunkCode(u16) in "Structured reply types" {
        /// Nothing; it is the last.
        NONE = 0 "NBD_REPLY_TYPE_NONE";
        /// Data from an offset on.
        OFFSET_DATA = 1 "NBD_REPLY_TYPE_OFFSET_DATA";
        /// Zeroes from an offset on.
        OFFSET_HOLE = 2 "NBD_REPLY_TYPE_OFFSET_HOLE";
        /// What is where.
        BLOCK_STATUS = 5 "NBD_REPLY_TYPE_BLOCK_STATUS";
        /// It went wrong.
        ERROR = 0x8001 "NBD_REPLY_TYPE_ERROR";
        /// It went wrong here.
        ERROR_OFFSET = 0x8002 "NBD_REPLY_TYPE_ERROR_OFFSET";
    }

    /// What went wrong.
    pub struct ErrorCode(u32) in "Error values" {
        /// Nothing.
        NONE = 0 "success";
        /// Not permitted.
        EPERM = 1 "EPERM";
        /// The device could not.
        EIO = 5 "EIO";
        /// No memory.
        ENOMEM = 12 "ENOMEM";
        /// It makes no sense.
        EINVAL = 22 "EINVAL";
        /// No room.
        ENOSPC = 28 "ENOSPC";
        /// Too long.
        EOVERFLOW = 75 "EOVERFLOW";
        /// Not known here, or not in this way.
        ENOTSUP = 95 "ENOTSUP";
        /// The server is about to end.
        ESHUTDOWN = 108 "ESHUTDOWN";
    }
}

impl ChunkCode {
    /// Whether it tells of an error: bit 15 ("Structured reply types").
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 >> 15 == 1
    }
}

/// A simple reply, without the data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// How it went.
    pub error: ErrorCode,
    /// The request's.
    pub cookie: u64,
}

impl SimpleReply {
    /// How long it is.
    pub const BYTES: usize = 16;

    /// Its bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(self.error.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If the magic number is another one, such as that of a chunk.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u32(SIMPLE_REPLY_MAGIC)?;
        Ok(Self { error: ErrorCode(reader.u32()?), cookie: reader.u64()? })
    }
}

/// What comes before the payload of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// What is to be known of it.
    pub flags: ChunkFlags,
    /// What it holds.
    pub kind: ChunkCode,
    /// The request's.
    pub cookie: u64,
    /// How long the payload is.
    pub len_bytes: u32,
}

impl ChunkHeader {
    /// How long it is.
    pub const BYTES: usize = 20;

    /// Its bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(CHUNK_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .put(self.kind.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If the magic number is another one, such as that of a simple reply.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u32(CHUNK_MAGIC)?;
        Ok(Self {
            flags: ChunkFlags(reader.u16()?),
            kind: ChunkCode(reader.u16()?),
            cookie: reader.u64()?,
            len_bytes: reader.u32()?,
        })
    }
}

/// The header and the offset before the data of a read that is answered by one chunk.
#[inline]
#[must_use]
pub fn data_chunk(cookie: u64, offset: u64, len_bytes: u32) -> [u8; ChunkHeader::BYTES + 8] {
    let header = ChunkHeader {
        flags: ChunkFlags::DONE,
        kind: ChunkCode::OFFSET_DATA,
        cookie,
        len_bytes: len_bytes + 8,
    };
    Writer::new().put(header.to_bytes()).put(offset.to_be_bytes()).finish()
}

/// Blocks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many bytes.
    pub len_bytes: u32,
    /// What is known of them.
    pub flags: ExtentFlags,
}

/// The payload of a chunk.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Nothing.
    None,
    /// Data.
    Data {
        /// Where they begin.
        offset: u64,
        /// The data.
        data: &'a [u8],
    },
    /// Zeroes.
    Hole {
        /// Where they begin.
        offset: u64,
        /// How many bytes.
        len_bytes: u32,
    },
    /// What is where.
    Status {
        /// The number of the metadata context.
        context: u32,
        /// Lengths and flags, eight bytes each.
        extents: Extents<'a>,
    },
    /// It went wrong.
    Error {
        /// What.
        error: ErrorCode,
        /// In words.
        text: &'a str,
        /// Where, if that is known.
        offset: Option<u64>,
    },
}

/// Extents as they lie in a payload.
#[derive(Clone, Copy, Debug)]
pub struct Extents<'a>(&'a [u8]);

impl Extents<'_> {
    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        let (entries, _) = self.0.as_chunks::<8>();
        entries.iter().map(|[a, b, c, d, rest @ ..]| Extent {
            len_bytes: u32::from_be_bytes([*a, *b, *c, *d]),
            flags: ExtentFlags(u32::from_be_bytes(*rest)),
        })
    }
}

impl<'a> Payload<'a> {
    /// What the payload of a chunk of this kind says.
    ///
    /// # Errors
    ///
    /// If the chunk is of no known kind, or its payload is too long, too short or no text where it
    /// should be.
    pub fn parse(kind: ChunkCode, payload: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(payload);
        let parsed = match kind {
            ChunkCode::NONE => Self::None,
            ChunkCode::OFFSET_DATA => {
                let offset = reader.u64()?;
                if reader.0.is_empty() {
                    return Err(Malformed::Length);
                }
                Self::Data { offset, data: reader.bytes(reader.0.len())? }
            }
            ChunkCode::OFFSET_HOLE => {
                let (offset, len_bytes) = (reader.u64()?, reader.u32()?);
                if len_bytes == 0 {
                    return Err(Malformed::Length);
                }
                Self::Hole { offset, len_bytes }
            }
            ChunkCode::BLOCK_STATUS => {
                let context = reader.u32()?;
                let extents = Extents(reader.bytes(reader.0.len())?);
                let whole = extents.0.len().is_multiple_of(8) && !extents.0.is_empty();
                if !whole || extents.iter().any(|extent| extent.len_bytes == 0) {
                    return Err(Malformed::Length);
                }
                Self::Status { context, extents }
            }
            ChunkCode::ERROR | ChunkCode::ERROR_OFFSET => {
                let error = ErrorCode(reader.u32()?);
                let count = usize::from(reader.u16()?);
                let text = reader.text(count)?;
                let has_offset = kind == ChunkCode::ERROR_OFFSET;
                let offset = if has_offset { Some(reader.u64()?) } else { None };
                Self::Error { error, text, offset }
            }
            _ => return Err(Malformed::Length),
        };
        reader.end()?;
        Ok(parsed)
    }

    /// The kind of chunk that it is the payload of.
    #[must_use]
    pub const fn kind(&self) -> ChunkCode {
        match self {
            Self::None => ChunkCode::NONE,
            Self::Data { .. } => ChunkCode::OFFSET_DATA,
            Self::Hole { .. } => ChunkCode::OFFSET_HOLE,
            Self::Status { .. } => ChunkCode::BLOCK_STATUS,
            Self::Error { offset: None, .. } => ChunkCode::ERROR,
            Self::Error { offset: Some(_), .. } => ChunkCode::ERROR_OFFSET,
        }
    }

    /// Appends its bytes.
    pub fn emit(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => {}
            Self::Data { offset, data } => {
                out.extend(offset.to_be_bytes());
                out.extend(*data);
            }
            Self::Hole { offset, len_bytes } => {
                out.extend(offset.to_be_bytes());
                out.extend(len_bytes.to_be_bytes());
            }
            Self::Status { context, extents } => {
                out.extend(context.to_be_bytes());
                out.extend(extents.0);
            }
            Self::Error { error, text, offset } => {
                let len = u16::try_from(text.len()).expect("words for people are short");
                out.extend(error.0.to_be_bytes());
                out.extend(len.to_be_bytes());
                out.extend(text.as_bytes());
                offset.iter().for_each(|offset| out.extend(offset.to_be_bytes()));
            }
        }
    }
}

/// One extent as it lies in the payload of a chunk.
#[must_use]
pub fn extent_bytes(extent: Extent) -> [u8; 8] {
    Writer::new().put(extent.len_bytes.to_be_bytes()).put(extent.flags.0.to_be_bytes()).finish()
}
