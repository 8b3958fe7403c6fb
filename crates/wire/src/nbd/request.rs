//! Requests of the transmission phase.
//!
//! ```text
//!   0        4        6      8         16        24       28
//!   | magic  | flags  | type | cookie  | offset  | length |  then the data of a write
//! ```

use super::codes::{codes, flags};
use super::{ByteReader, ByteWriter, ParseError};

/// Magic number of a request ("Request message").
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

codes! {
    /// Request type.
    pub struct Command(u16) in "Request types" {
        /// Export to client.
        READ = 0 "NBD_CMD_READ";
        /// Client to export; the data follows the header.
        WRITE = 1 "NBD_CMD_WRITE";
        /// Disconnect; no reply.
        DISC = 2 "NBD_CMD_DISC";
        /// Makes everything that was completed before persistent.
        FLUSH = 3 "NBD_CMD_FLUSH";
        /// The data is no longer needed.
        TRIM = 4 "NBD_CMD_TRIM";
        /// The data will be needed (prefetch).
        CACHE = 5 "NBD_CMD_CACHE";
        /// The range reads as zeroes afterwards.
        WRITE_ZEROES = 6 "NBD_CMD_WRITE_ZEROES";
        /// Query the block status.
        BLOCK_STATUS = 7 "NBD_CMD_BLOCK_STATUS";
        /// Change the size of the export.
        RESIZE = 8 "NBD_CMD_RESIZE";
    }
}

flags! {
    /// Request flags.
    pub struct CommandFlags(u16) in "Command flags" {
        /// Force unit access: complete only when on stable storage.
        FUA = 0 "NBD_CMD_FLAG_FUA";
        /// Write zeroes: do not create a hole.
        NO_HOLE = 1 "NBD_CMD_FLAG_NO_HOLE";
        /// Read: do not fragment the reply.
        DF = 2 "NBD_CMD_FLAG_DF";
        /// Block status: return one extent only.
        REQ_ONE = 3 "NBD_CMD_FLAG_REQ_ONE";
        /// Write zeroes: fail if it would not be fast.
        FAST_ZERO = 4 "NBD_CMD_FLAG_FAST_ZERO";
        /// Extended headers: the length is that of a payload.
        PAYLOAD_LEN = 5 "NBD_CMD_FLAG_PAYLOAD_LEN";
    }
}

/// Request header, without the data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags.
    pub flags: CommandFlags,
    /// Request type.
    pub command: Command,
    /// Opaque value returned in the reply.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len_bytes: u32,
}

impl RequestHeader {
    /// Length of the header.
    pub const BYTES: usize = 28;

    /// Encodes to bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(REQUEST_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .put(self.command.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.offset.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .into_array()
    }

    /// Parses the header.
    ///
    /// # Errors
    ///
    /// If the magic number differs: then the position of the next request is unknown.
    #[inline]
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u32(REQUEST_MAGIC)?;
        Ok(Self {
            flags: CommandFlags(reader.u16()?),
            command: Command(reader.u16()?),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len_bytes: reader.u32()?,
        })
    }

    /// Length of the data that follows.
    #[inline]
    #[must_use]
    pub fn payload_bytes(&self) -> u32 {
        if self.command == Command::WRITE { self.len_bytes } else { 0 }
    }
}
