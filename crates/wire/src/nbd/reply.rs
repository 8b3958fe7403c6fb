//! Replies to requests: simple replies and structured chunks.
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

use super::codes::{codes, flags};
use super::{ByteReader, ByteWriter, ParseError};

/// Magic number of a simple reply ("Simple reply message").
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number of a chunk ("Structured reply chunk message").
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

flags! {
    /// Flags of a chunk.
    pub struct ChunkFlags(u16) in "Structured reply flags" {
        /// Last chunk of its request.
        DONE = 0 "NBD_REPLY_FLAG_DONE";
    }

    /// Flags of an extent, in context `base:allocation`.
    pub struct ExtentFlags(u32) in "Metadata contexts" {
        /// Not allocated.
        HOLE = 0 "NBD_STATE_HOLE";
        /// Reads as zeroes.
        ZERO = 1 "NBD_STATE_ZERO";
    }
}

codes! {
    /// Chunk type.
    pub struct ChunkCode(u16) in "Structured reply types" {
        /// Empty; the last chunk.
        NONE = 0 "NBD_REPLY_TYPE_NONE";
        /// Data from an offset on.
        OFFSET_DATA = 1 "NBD_REPLY_TYPE_OFFSET_DATA";
        /// Zeroes from an offset on.
        OFFSET_HOLE = 2 "NBD_REPLY_TYPE_OFFSET_HOLE";
        /// Block status.
        BLOCK_STATUS = 5 "NBD_REPLY_TYPE_BLOCK_STATUS";
        /// Error.
        ERROR = 0x8001 "NBD_REPLY_TYPE_ERROR";
        /// Error at an offset.
        ERROR_OFFSET = 0x8002 "NBD_REPLY_TYPE_ERROR_OFFSET";
    }

    /// Error code.
    pub struct ErrorCode(u32) in "Error values" {
        /// No error.
        NONE = 0 "success";
        /// Not permitted.
        EPERM = 1 "EPERM";
        /// I/O error.
        EIO = 5 "EIO";
        /// Out of memory.
        ENOMEM = 12 "ENOMEM";
        /// Invalid request.
        EINVAL = 22 "EINVAL";
        /// No space left.
        ENOSPC = 28 "ENOSPC";
        /// Too long.
        EOVERFLOW = 75 "EOVERFLOW";
        /// Not supported.
        ENOTSUP = 95 "ENOTSUP";
        /// The server is shutting down.
        ESHUTDOWN = 108 "ESHUTDOWN";
    }
}

impl ChunkCode {
    /// Whether it reports an error: bit 15 ("Structured reply types").
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 >> 15 == 1
    }
}

/// Simple reply, without the data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// Result.
    pub error: ErrorCode,
    /// Cookie of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Length in bytes.
    pub const BYTES: usize = 16;

    /// Encodes to bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(self.error.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .into_array()
    }

    /// Parses the reply.
    ///
    /// # Errors
    ///
    /// If the magic number differs, for instance if it is a chunk.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u32(SIMPLE_REPLY_MAGIC)?;
        Ok(Self { error: ErrorCode(reader.u32()?), cookie: reader.u64()? })
    }
}

/// Header of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Flags.
    pub flags: ChunkFlags,
    /// Chunk type.
    pub kind: ChunkCode,
    /// Cookie of the request.
    pub cookie: u64,
    /// Length of the payload.
    pub len_bytes: u32,
}

impl ChunkHeader {
    /// Length in bytes.
    pub const BYTES: usize = 20;

    /// Encodes to bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(CHUNK_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .put(self.kind.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .into_array()
    }

    /// Parses the header.
    ///
    /// # Errors
    ///
    /// If the magic number differs, for instance if it is a simple reply.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u32(CHUNK_MAGIC)?;
        Ok(Self {
            flags: ChunkFlags(reader.u16()?),
            kind: ChunkCode(reader.u16()?),
            cookie: reader.u64()?,
            len_bytes: reader.u32()?,
        })
    }
}

/// Header and offset of a read that is answered by a single chunk.
#[inline]
#[must_use]
pub fn encode_data_chunk_header(
    cookie: u64,
    offset: u64,
    len_bytes: u32,
) -> [u8; ChunkHeader::BYTES + 8] {
    let header = ChunkHeader {
        flags: ChunkFlags::DONE,
        kind: ChunkCode::OFFSET_DATA,
        cookie,
        len_bytes: len_bytes + 8,
    };
    ByteWriter::new().put(header.to_bytes()).put(offset.to_be_bytes()).into_array()
}

/// Whole reply to a read that is one hole.
#[inline]
#[must_use]
pub fn encode_hole_chunk(
    cookie: u64,
    offset: u64,
    len_bytes: u32,
) -> [u8; ChunkHeader::BYTES + 12] {
    let (flags, kind) = (ChunkFlags::DONE, ChunkCode::OFFSET_HOLE);
    let header = ChunkHeader { flags, kind, cookie, len_bytes: 12 };
    let payload = ByteWriter::<12>::new().put(offset.to_be_bytes()).put(len_bytes.to_be_bytes());
    ByteWriter::new().put(header.to_bytes()).put(payload.into_array()).into_array()
}

/// Run of bytes in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatusExtent {
    /// Length.
    pub len_bytes: u32,
    /// State.
    pub flags: ExtentFlags,
}

/// Payload of a chunk.
#[derive(Clone, Copy, Debug)]
pub enum ChunkPayload<'a> {
    /// Empty.
    None,
    /// Data.
    Data {
        /// Offset.
        offset: u64,
        /// The data.
        data: &'a [u8],
    },
    /// Hole, which reads as zeroes.
    Hole {
        /// Offset.
        offset: u64,
        /// Length.
        len_bytes: u32,
    },
    /// Block status.
    Status {
        /// Metadata context identifier.
        context: u32,
        /// Lengths and flags, eight bytes each.
        extents: BlockStatusExtents<'a>,
    },
    /// Error.
    Error {
        /// Error code.
        error: ErrorCode,
        /// Error text.
        text: &'a str,
        /// Offset, if known.
        offset: Option<u64>,
    },
}

/// Encoded extents of a payload.
#[derive(Clone, Copy, Debug)]
pub struct BlockStatusExtents<'a>(&'a [u8]);

impl BlockStatusExtents<'_> {
    /// Iterates over the extents.
    pub fn iter(&self) -> impl Iterator<Item = BlockStatusExtent> + '_ {
        let (entries, _) = self.0.as_chunks::<8>();
        entries.iter().map(|[a, b, c, d, rest @ ..]| BlockStatusExtent {
            len_bytes: u32::from_be_bytes([*a, *b, *c, *d]),
            flags: ExtentFlags(u32::from_be_bytes(*rest)),
        })
    }
}

impl<'a> ChunkPayload<'a> {
    /// Parses the payload of a chunk of this type.
    ///
    /// # Errors
    ///
    /// If the type is unknown, or the payload has a wrong length or contains invalid text.
    pub fn parse(kind: ChunkCode, payload: &'a [u8]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(payload);
        let parsed = match kind {
            ChunkCode::NONE => Self::None,
            ChunkCode::OFFSET_DATA => {
                let offset = reader.u64()?;
                if reader.0.is_empty() {
                    return Err(ParseError::Length);
                }
                Self::Data { offset, data: reader.bytes(reader.0.len())? }
            }
            ChunkCode::OFFSET_HOLE => {
                let (offset, len_bytes) = (reader.u64()?, reader.u32()?);
                if len_bytes == 0 {
                    return Err(ParseError::Length);
                }
                Self::Hole { offset, len_bytes }
            }
            ChunkCode::BLOCK_STATUS => {
                let context = reader.u32()?;
                let extents = BlockStatusExtents(reader.bytes(reader.0.len())?);
                let whole = extents.0.len().is_multiple_of(8) && !extents.0.is_empty();
                if !whole || extents.iter().any(|extent| extent.len_bytes == 0) {
                    return Err(ParseError::Length);
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
            _ => return Err(ParseError::Length),
        };
        reader.expect_end()?;
        Ok(parsed)
    }

    /// Chunk type of the payload.
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

    /// Appends the encoded payload.
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

/// Encodes one extent.
#[must_use]
pub fn encode_extent(extent: BlockStatusExtent) -> [u8; 8] {
    ByteWriter::new()
        .put(extent.len_bytes.to_be_bytes())
        .put(extent.flags.0.to_be_bytes())
        .into_array()
}
