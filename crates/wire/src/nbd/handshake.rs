//! Handshake: server greeting, then options and replies until an export is chosen.
//!
//! ```text
//!   S  greeting        | NBDMAGIC  | IHAVEOPT  | flags |           0   8   16  18
//!   C                  | flags     |                               0   4
//!   C  option          | IHAVEOPT  | option | length | data …      0   8   12  16
//!   S  option reply    | magic     | option | kind | length | data 0   8   12  16  20
//!   S  after EXPORT_NAME   | size | flags | 124 zeroes, unless declined |
//! ```

use super::codes::{codes, flags};
use super::{ByteReader, ByteWriter, ParseError};

/// `NBDMAGIC` ("Newstyle negotiation").
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT` ("Newstyle negotiation").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic number of every option reply ("Fixed newstyle negotiation").
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Zeroes after the reply to `NBD_OPT_EXPORT_NAME` ("Newstyle negotiation").
pub const EXPORT_NAME_ZEROES: usize = 124;

flags! {
    /// Handshake flags of the server.
    pub struct HandshakeFlags(u16) in "Handshake flags" {
        /// Fixed newstyle negotiation is supported.
        FIXED_NEWSTYLE = 0 "NBD_FLAG_FIXED_NEWSTYLE";
        /// The trailing zeroes may be omitted.
        NO_ZEROES = 1 "NBD_FLAG_NO_ZEROES";
    }

    /// Handshake flags of the client.
    pub struct ClientFlags(u32) in "Client flags" {
        /// Fixed newstyle negotiation is supported.
        FIXED_NEWSTYLE = 0 "NBD_FLAG_C_FIXED_NEWSTYLE";
        /// The trailing zeroes are omitted.
        NO_ZEROES = 1 "NBD_FLAG_C_NO_ZEROES";
    }

    /// Capabilities of an export.
    pub struct TransmissionFlags(u16) in "Transmission flags" {
        /// Always set.
        HAS_FLAGS = 0 "NBD_FLAG_HAS_FLAGS";
        /// Read-only.
        READ_ONLY = 1 "NBD_FLAG_READ_ONLY";
        /// `NBD_CMD_FLUSH` is supported.
        SEND_FLUSH = 2 "NBD_FLAG_SEND_FLUSH";
        /// `NBD_CMD_FLAG_FUA` is supported.
        SEND_FUA = 3 "NBD_FLAG_SEND_FUA";
        /// The medium is rotational.
        ROTATIONAL = 4 "NBD_FLAG_ROTATIONAL";
        /// `NBD_CMD_TRIM` is supported.
        SEND_TRIM = 5 "NBD_FLAG_SEND_TRIM";
        /// `NBD_CMD_WRITE_ZEROES` is supported.
        SEND_WRITE_ZEROES = 6 "NBD_FLAG_SEND_WRITE_ZEROES";
        /// `NBD_CMD_FLAG_DF` is supported.
        SEND_DF = 7 "NBD_FLAG_SEND_DF";
        /// A flush on one connection covers all of them.
        CAN_MULTI_CONN = 8 "NBD_FLAG_CAN_MULTI_CONN";
        /// `NBD_CMD_RESIZE` is supported.
        SEND_RESIZE = 9 "NBD_FLAG_SEND_RESIZE";
        /// `NBD_CMD_CACHE` is supported.
        SEND_CACHE = 10 "NBD_FLAG_SEND_CACHE";
        /// `NBD_CMD_FLAG_FAST_ZERO` is supported.
        SEND_FAST_ZERO = 11 "NBD_FLAG_SEND_FAST_ZERO";
    }
}

codes! {
    /// Option type.
    pub struct OptionCode(u32) in "Option types" {
        /// Choose an export; the connection is closed if it is not available.
        EXPORT_NAME = 1 "NBD_OPT_EXPORT_NAME";
        /// End the negotiation.
        ABORT = 2 "NBD_OPT_ABORT";
        /// List the exports.
        LIST = 3 "NBD_OPT_LIST";
        /// Withdrawn.
        PEEK_EXPORT = 4 "NBD_OPT_PEEK_EXPORT";
        /// Switch to TLS.
        STARTTLS = 5 "NBD_OPT_STARTTLS";
        /// Describe an export.
        INFO = 6 "NBD_OPT_INFO";
        /// Describe and choose an export.
        GO = 7 "NBD_OPT_GO";
        /// Use structured replies.
        STRUCTURED_REPLY = 8 "NBD_OPT_STRUCTURED_REPLY";
        /// List the metadata contexts of an export.
        LIST_META_CONTEXT = 9 "NBD_OPT_LIST_META_CONTEXT";
        /// Select metadata contexts.
        SET_META_CONTEXT = 10 "NBD_OPT_SET_META_CONTEXT";
        /// Use extended headers with 64-bit lengths.
        EXTENDED_HEADERS = 11 "NBD_OPT_EXTENDED_HEADERS";
    }

    /// Option reply type.
    pub struct OptionReplyCode(u32) in "Option reply types" {
        /// Success.
        ACK = 1 "NBD_REP_ACK";
        /// One export of a list.
        SERVER = 2 "NBD_REP_SERVER";
        /// Information about an export.
        INFO = 3 "NBD_REP_INFO";
        /// A metadata context.
        META_CONTEXT = 4 "NBD_REP_META_CONTEXT";
        /// Unsupported option.
        ERR_UNSUP = 0x8000_0001 "NBD_REP_ERR_UNSUP";
        /// Option not permitted by policy.
        ERR_POLICY = 0x8000_0002 "NBD_REP_ERR_POLICY";
        /// Invalid option data.
        ERR_INVALID = 0x8000_0003 "NBD_REP_ERR_INVALID";
        /// Option not supported on this platform.
        ERR_PLATFORM = 0x8000_0004 "NBD_REP_ERR_PLATFORM";
        /// TLS is required.
        ERR_TLS_REQD = 0x8000_0005 "NBD_REP_ERR_TLS_REQD";
        /// No such export.
        ERR_UNKNOWN = 0x8000_0006 "NBD_REP_ERR_UNKNOWN";
        /// The server is shutting down.
        ERR_SHUTDOWN = 0x8000_0007 "NBD_REP_ERR_SHUTDOWN";
        /// The client must request the block size constraints.
        ERR_BLOCK_SIZE_REQD = 0x8000_0008 "NBD_REP_ERR_BLOCK_SIZE_REQD";
        /// The option data is too long.
        ERR_TOO_BIG = 0x8000_0009 "NBD_REP_ERR_TOO_BIG";
        /// Extended headers are required.
        ERR_EXT_HEADER_REQD = 0x8000_000a "NBD_REP_ERR_EXT_HEADER_REQD";
    }

    /// Information type of an export.
    pub struct InfoCode(u16) in "Option types, NBD_OPT_INFO" {
        /// Size and flags.
        EXPORT = 0 "NBD_INFO_EXPORT";
        /// Name.
        NAME = 1 "NBD_INFO_NAME";
        /// Description.
        DESCRIPTION = 2 "NBD_INFO_DESCRIPTION";
        /// Block size constraints.
        BLOCK_SIZE = 3 "NBD_INFO_BLOCK_SIZE";
    }
}

impl OptionReplyCode {
    /// Whether it is an error: bit 31 ("Option reply types").
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 >> 31 == 1
    }
}

/// Initial server message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerGreeting {
    /// Supported handshake features.
    pub flags: HandshakeFlags,
}

impl ServerGreeting {
    /// Length in bytes.
    pub const BYTES: usize = 18;

    /// Encodes to bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(NBD_MAGIC.to_be_bytes())
            .put(OPTION_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .into_array()
    }

    /// Parses the message.
    ///
    /// # Errors
    ///
    /// If a magic number differs: an oldstyle server has another greeting.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u64(NBD_MAGIC)?;
        reader.expect_magic_u64(OPTION_MAGIC)?;
        Ok(Self { flags: HandshakeFlags(reader.u16()?) })
    }
}

/// Header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Option type.
    pub option: OptionCode,
    /// Length of the data.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// Length in bytes.
    pub const BYTES: usize = 16;

    /// Encodes to bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(OPTION_MAGIC.to_be_bytes())
            .put(self.option.0.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .into_array()
    }

    /// Parses the header.
    ///
    /// # Errors
    ///
    /// If the magic number differs.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u64(OPTION_MAGIC)?;
        Ok(Self { option: OptionCode(reader.u32()?), len_bytes: reader.u32()? })
    }
}

/// Header of an option reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// Option that is replied to.
    pub option: OptionCode,
    /// Reply type.
    pub kind: OptionReplyCode,
    /// Length of the data.
    pub len_bytes: u32,
}

impl OptionReply {
    /// Length in bytes.
    pub const BYTES: usize = 20;

    /// Encodes to bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        ByteWriter::new()
            .put(OPTION_REPLY_MAGIC.to_be_bytes())
            .put(self.option.0.to_be_bytes())
            .put(self.kind.0.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .into_array()
    }

    /// Parses the header.
    ///
    /// # Errors
    ///
    /// If the magic number differs.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(bytes);
        reader.expect_magic_u64(OPTION_REPLY_MAGIC)?;
        Ok(Self {
            option: OptionCode(reader.u32()?),
            kind: OptionReplyCode(reader.u32()?),
            len_bytes: reader.u32()?,
        })
    }
}

/// Reply to `NBD_OPT_EXPORT_NAME`, without the zeroes ("Newstyle negotiation").
#[must_use]
pub fn export_name_reply(size_bytes: u64, flags: TransmissionFlags) -> [u8; 10] {
    ByteWriter::new().put(size_bytes.to_be_bytes()).put(flags.0.to_be_bytes()).into_array()
}
