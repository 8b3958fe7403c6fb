//! The handshake: a greeting, then options and their replies until an export is chosen.
//!
//! ```text
//!   S  greeting        | NBDMAGIC  | IHAVEOPT  | flags |           0   8   16  18
//!   C                  | flags     |                               0   4
//!   C  option          | IHAVEOPT  | option | length | data …      0   8   12  16
//!   S  option reply    | magic     | option | kind | length | data 0   8   12  16  20
//!   S  after EXPORT_NAME   | size | flags | 124 zeroes, unless declined |
//! ```

use super::code::{codes, flags};
use super::{Malformed, Reader, Writer};

/// `NBDMAGIC` ("Newstyle negotiation").
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT` ("Newstyle negotiation").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Before every reply to an option ("Fixed newstyle negotiation").
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Zeroes behind the answer to `NBD_OPT_EXPORT_NAME` ("Newstyle negotiation").
pub const EXPORT_NAME_ZEROES: usize = 124;

flags! {
    /// What a server says of its handshake.
    pub struct HandshakeFlags(u16) in "Handshake flags" {
        /// Options are answered one by one.
        FIXED_NEWSTYLE = 0 "NBD_FLAG_FIXED_NEWSTYLE";
        /// The zeroes at the end may be left out.
        NO_ZEROES = 1 "NBD_FLAG_NO_ZEROES";
    }

    /// What a client says of its handshake.
    pub struct ClientFlags(u32) in "Client flags" {
        /// It knows that options are answered one by one.
        FIXED_NEWSTYLE = 0 "NBD_FLAG_C_FIXED_NEWSTYLE";
        /// It does not want the zeroes at the end.
        NO_ZEROES = 1 "NBD_FLAG_C_NO_ZEROES";
    }

    /// What an export can do.
    pub struct TransmissionFlags(u16) in "Transmission flags" {
        /// Always set.
        HAS_FLAGS = 0 "NBD_FLAG_HAS_FLAGS";
        /// Nothing can be written.
        READ_ONLY = 1 "NBD_FLAG_READ_ONLY";
        /// There is `NBD_CMD_FLUSH`.
        SEND_FLUSH = 2 "NBD_FLAG_SEND_FLUSH";
        /// There is `NBD_CMD_FLAG_FUA`.
        SEND_FUA = 3 "NBD_FLAG_SEND_FUA";
        /// It turns.
        ROTATIONAL = 4 "NBD_FLAG_ROTATIONAL";
        /// There is `NBD_CMD_TRIM`.
        SEND_TRIM = 5 "NBD_FLAG_SEND_TRIM";
        /// There is `NBD_CMD_WRITE_ZEROES`.
        SEND_WRITE_ZEROES = 6 "NBD_FLAG_SEND_WRITE_ZEROES";
        /// There is `NBD_CMD_FLAG_DF`.
        SEND_DF = 7 "NBD_FLAG_SEND_DF";
        /// A flush on one connection covers all of them.
        CAN_MULTI_CONN = 8 "NBD_FLAG_CAN_MULTI_CONN";
        /// There is `NBD_CMD_RESIZE`.
        SEND_RESIZE = 9 "NBD_FLAG_SEND_RESIZE";
        /// There is `NBD_CMD_CACHE`.
        SEND_CACHE = 10 "NBD_FLAG_SEND_CACHE";
        /// There is `NBD_CMD_FLAG_FAST_ZERO`.
        SEND_FAST_ZERO = 11 "NBD_FLAG_SEND_FAST_ZERO";
    }
}

codes! {
    /// What a client asks for before it has an export.
    pub struct OptionCode(u32) in "Option types" {
        /// Choose an export, and be sent away if it cannot be had.
        EXPORT_NAME = 1 "NBD_OPT_EXPORT_NAME";
        /// End.
        ABORT = 2 "NBD_OPT_ABORT";
        /// Name the exports.
        LIST = 3 "NBD_OPT_LIST";
        /// Withdrawn.
        PEEK_EXPORT = 4 "NBD_OPT_PEEK_EXPORT";
        /// Go on over TLS.
        STARTTLS = 5 "NBD_OPT_STARTTLS";
        /// Describe an export.
        INFO = 6 "NBD_OPT_INFO";
        /// Describe and choose an export.
        GO = 7 "NBD_OPT_GO";
        /// Answer requests by chunks.
        STRUCTURED_REPLY = 8 "NBD_OPT_STRUCTURED_REPLY";
        /// Name the metadata contexts of an export.
        LIST_META_CONTEXT = 9 "NBD_OPT_LIST_META_CONTEXT";
        /// Choose among them.
        SET_META_CONTEXT = 10 "NBD_OPT_SET_META_CONTEXT";
        /// Use headers with lengths of 64 bits.
        EXTENDED_HEADERS = 11 "NBD_OPT_EXTENDED_HEADERS";
    }

    /// What an option is answered.
    pub struct OptionReplyCode(u32) in "Option reply types" {
        /// Done.
        ACK = 1 "NBD_REP_ACK";
        /// An export.
        SERVER = 2 "NBD_REP_SERVER";
        /// Something about an export.
        INFO = 3 "NBD_REP_INFO";
        /// A metadata context.
        META_CONTEXT = 4 "NBD_REP_META_CONTEXT";
        /// The option is not known here.
        ERR_UNSUP = 0x8000_0001 "NBD_REP_ERR_UNSUP";
        /// The option is not allowed here.
        ERR_POLICY = 0x8000_0002 "NBD_REP_ERR_POLICY";
        /// The data of the option make no sense.
        ERR_INVALID = 0x8000_0003 "NBD_REP_ERR_INVALID";
        /// The option does not exist on this machine.
        ERR_PLATFORM = 0x8000_0004 "NBD_REP_ERR_PLATFORM";
        /// Not without TLS.
        ERR_TLS_REQD = 0x8000_0005 "NBD_REP_ERR_TLS_REQD";
        /// There is no such export.
        ERR_UNKNOWN = 0x8000_0006 "NBD_REP_ERR_UNKNOWN";
        /// The server is about to end.
        ERR_SHUTDOWN = 0x8000_0007 "NBD_REP_ERR_SHUTDOWN";
        /// Not without asking for the block size.
        ERR_BLOCK_SIZE_REQD = 0x8000_0008 "NBD_REP_ERR_BLOCK_SIZE_REQD";
        /// The data of the option are too long.
        ERR_TOO_BIG = 0x8000_0009 "NBD_REP_ERR_TOO_BIG";
        /// Not without extended headers.
        ERR_EXT_HEADER_REQD = 0x8000_000a "NBD_REP_ERR_EXT_HEADER_REQD";
    }

    /// What can be told about an export.
    pub struct InfoCode(u16) in "Option types, NBD_OPT_INFO" {
        /// Its size and flags.
        EXPORT = 0 "NBD_INFO_EXPORT";
        /// What it is called.
        NAME = 1 "NBD_INFO_NAME";
        /// What it is.
        DESCRIPTION = 2 "NBD_INFO_DESCRIPTION";
        /// What it wants requests to be multiples of.
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

/// What a server says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// What it knows.
    pub flags: HandshakeFlags,
}

impl Greeting {
    /// How long it is.
    pub const BYTES: usize = 18;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(NBD_MAGIC.to_be_bytes())
            .put(OPTION_MAGIC.to_be_bytes())
            .put(self.flags.0.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If a magic number is another one: an old server greets differently.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u64(NBD_MAGIC)?;
        reader.magic_u64(OPTION_MAGIC)?;
        Ok(Self { flags: HandshakeFlags(reader.u16()?) })
    }
}

/// What comes before the data of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub option: OptionCode,
    /// How long its data are.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// How long it is.
    pub const BYTES: usize = 16;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(OPTION_MAGIC.to_be_bytes())
            .put(self.option.0.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If the magic number is another one.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u64(OPTION_MAGIC)?;
        Ok(Self { option: OptionCode(reader.u32()?), len_bytes: reader.u32()? })
    }
}

/// What comes before the data of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// Which option is answered.
    pub option: OptionCode,
    /// What the answer is.
    pub kind: OptionReplyCode,
    /// How long its data are.
    pub len_bytes: u32,
}

impl OptionReply {
    /// How long it is.
    pub const BYTES: usize = 20;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        Writer::new()
            .put(OPTION_REPLY_MAGIC.to_be_bytes())
            .put(self.option.0.to_be_bytes())
            .put(self.kind.0.to_be_bytes())
            .put(self.len_bytes.to_be_bytes())
            .finish()
    }

    /// What the bytes say.
    ///
    /// # Errors
    ///
    /// If the magic number is another one.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.magic_u64(OPTION_REPLY_MAGIC)?;
        Ok(Self {
            option: OptionCode(reader.u32()?),
            kind: OptionReplyCode(reader.u32()?),
            len_bytes: reader.u32()?,
        })
    }
}

/// What `NBD_OPT_EXPORT_NAME` is answered, without the zeroes ("Newstyle negotiation").
#[must_use]
pub fn export_name_reply(size_bytes: u64, flags: TransmissionFlags) -> [u8; 10] {
    Writer::new().put(size_bytes.to_be_bytes()).put(flags.0.to_be_bytes()).finish()
}
