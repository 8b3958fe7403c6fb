//! What a client asks for once it has an export.
//!
//! ```text
//!   0        4        6      8         16        24       28
//!   | magic  | flags  | type | cookie  | offset  | length |  then the data of a write
//! ```

use super::code::{codes, flags};
use super::{Malformed, Reader, Writer};

/// Before every request ("Request message").
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

codes! {
    /// What is to be done.
    pub struct Command(u16) in "Request types" {
        /// Export to client.
        READ = 0 "NBD_CMD_READ";
        /// Client to export; the data follow the header.
        WRITE = 1 "NBD_CMD_WRITE";
        /// End; no reply.
        DISC = 2 "NBD_CMD_DISC";
        /// What was answered before is on stable storage when this is answered.
        FLUSH = 3 "NBD_CMD_FLUSH";
        /// The data are no longer needed.
        TRIM = 4 "NBD_CMD_TRIM";
        /// The data will be needed.
        CACHE = 5 "NBD_CMD_CACHE";
        /// The data are zeroes afterwards.
        WRITE_ZEROES = 6 "NBD_CMD_WRITE_ZEROES";
        /// What is where.
        BLOCK_STATUS = 7 "NBD_CMD_BLOCK_STATUS";
        /// The export is to have another size.
        RESIZE = 8 "NBD_CMD_RESIZE";
    }
}

flags! {
    /// How it is to be done.
    pub struct CommandFlags(u16) in "Command flags" {
        /// Not answered before it is on stable storage.
        FUA = 0 "NBD_CMD_FLAG_FUA";
        /// Of write zeroes: leave no hole.
        NO_HOLE = 1 "NBD_CMD_FLAG_NO_HOLE";
        /// Of reads: in one chunk.
        DF = 2 "NBD_CMD_FLAG_DF";
        /// Of block status: one extent is enough.
        REQ_ONE = 3 "NBD_CMD_FLAG_REQ_ONE";
        /// Of write zeroes: fast or not at all.
        FAST_ZERO = 4 "NBD_CMD_FLAG_FAST_ZERO";
        /// With extended headers: the length is that of a payload.
        PAYLOAD_LEN = 5 "NBD_CMD_FLAG_PAYLOAD_LEN";
    }
}

/// A request, without the data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// How.
    pub flags: CommandFlags,
    /// What.
    pub command: Command,
    /// Returned with the reply, unread.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub len_bytes: u32,
}

impl RequestHeader {
    /// How long it is.
    pub const BYTES: usize = 28;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(REQUEST_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .put(self.command.0.to_be_bytes())
            .put(self.cookie.to_be_bytes())
            .put(self.offset.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If the magic number is another one: then nobody knows where the next request begins.
    #[inline]
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u32(REQUEST_MAGIC)?;
        Ok(Self {
            flags: CommandFlags(reader.u16()?),
            command: Command(reader.u16()?),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len_bytes: reader.u32()?,
        })
    }

    /// How many bytes of data follow.
    #[inline]
    #[must_use]
    pub fn payload_bytes(&self) -> u32 {
        if self.command == Command::WRITE { self.len_bytes } else { 0 }
    }
}
