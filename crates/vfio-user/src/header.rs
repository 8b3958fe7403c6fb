//! Message header and commands.

use crate::Violation;
use crate::body_codec::{BodyReader, BodyWriter};
use crate::violation::Errno;

/// Header of a message.
///
/// ```text
///   0       2          4               8        12       16
///   | id    | command  | size in bytes | flags  | errno  |
/// ```
///
/// The size is that of the whole message (Protocol Specification, Header).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: u16,
    pub(crate) command: Command,
    pub(crate) body_bytes: u32,
    pub(crate) kind: MessageKind,
}

/// Size of a header in bytes.
pub const HEADER_BYTES: usize = 16;
/// The same, in the type of the size field.
pub(crate) const HEADER_SIZE: u32 = 16;

/// Whether a message is a command or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Command { wants_reply: bool },
    Reply { error: Option<Errno> },
}

/// Flags; bits 0 to 3 are the type.
const TYPE: u32 = 0xf;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Command of a message (Protocol Specification, Commands). Missing ones are never offered:
/// migration, multiple writes per message, and features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's nouns")]
pub enum Command {
    Version,
    DmaMap,
    DmaUnmap,
    DeviceGetInfo,
    DeviceGetRegionInfo,
    DeviceGetRegionIoFds,
    DeviceGetIrqInfo,
    DeviceSetIrqs,
    RegionRead,
    RegionWrite,
    DmaRead,
    DmaWrite,
    DeviceReset,
    /// Unknown or unsupported command.
    Other(u16),
}

impl Command {
    pub(crate) const fn from_number(number: u16) -> Self {
        match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::DeviceGetInfo,
            5 => Self::DeviceGetRegionInfo,
            6 => Self::DeviceGetRegionIoFds,
            7 => Self::DeviceGetIrqInfo,
            8 => Self::DeviceSetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            11 => Self::DmaRead,
            12 => Self::DmaWrite,
            13 => Self::DeviceReset,
            number => Self::Other(number),
        }
    }

    pub(crate) const fn number(self) -> u16 {
        match self {
            Self::Version => 1,
            Self::DmaMap => 2,
            Self::DmaUnmap => 3,
            Self::DeviceGetInfo => 4,
            Self::DeviceGetRegionInfo => 5,
            Self::DeviceGetRegionIoFds => 6,
            Self::DeviceGetIrqInfo => 7,
            Self::DeviceSetIrqs => 8,
            Self::RegionRead => 9,
            Self::RegionWrite => 10,
            Self::DmaRead => 11,
            Self::DmaWrite => 12,
            Self::DeviceReset => 13,
            Self::Other(number) => number,
        }
    }
}

impl Header {
    /// Parses a header whose body may have up to `body_bytes_max` bytes.
    pub(crate) fn parse(
        bytes: &[u8; HEADER_BYTES],
        body_bytes_max: u32,
    ) -> Result<Self, Violation> {
        let mut reader = BodyReader(bytes);
        let mut next16 = || reader.u16().unwrap_or(0);
        let (id, command) = (next16(), Command::from_number(next16()));
        let mut next32 = || reader.u32().unwrap_or(0);
        let (size, flags, error) = (next32(), next32(), next32());
        let body_bytes = size
            .checked_sub(HEADER_SIZE)
            .filter(|body| *body <= body_bytes_max)
            .ok_or(Violation::Size {
                command,
                found: size,
                expected_max: body_bytes_max + HEADER_SIZE,
            })?;
        let kind = match flags & TYPE {
            0 => MessageKind::Command { wants_reply: flags & NO_REPLY == 0 },
            REPLY => MessageKind::Reply { error: (flags & ERROR != 0).then_some(Errno(error)) },
            _ => return Err(Violation::Type { command, found: flags }),
        };
        Ok(Self { id, command, body_bytes, kind })
    }

    /// Encodes a whole message.
    pub(crate) fn encode_message(self, body: &[u8]) -> Vec<u8> {
        let size = HEADER_BYTES + body.len();
        let (flags, error) = match self.kind {
            MessageKind::Command { wants_reply: true } => (0, 0),
            MessageKind::Command { wants_reply: false } => (NO_REPLY, 0),
            MessageKind::Reply { error: None } => (REPLY, 0),
            MessageKind::Reply { error: Some(error) } => (REPLY | ERROR, error.0),
        };
        BodyWriter(Vec::with_capacity(size))
            .u16(self.id)
            .u16(self.command.number())
            .u32(u32::try_from(size).unwrap_or(u32::MAX))
            .u32(flags)
            .u32(error)
            .slice(body)
            .into_bytes()
    }
}
