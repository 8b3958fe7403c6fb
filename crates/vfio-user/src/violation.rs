//! Protocol violations of a peer.

use std::fmt;

use crate::Command;

/// UNIX error number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub u32);

impl Errno {
    /// ENOENT: no such object.
    pub const NO_ENTRY: Self = Self(2);
    /// EIO: the device failed.
    pub const IO: Self = Self(5);
    /// ENOMEM: out of memory.
    pub const NO_MEMORY: Self = Self(12);
    /// EBUSY: in use by another client.
    pub const BUSY: Self = Self(16);
    /// EFAULT: memory cannot be accessed.
    pub const FAULT: Self = Self(14);
    /// EEXIST: the object exists already.
    pub const EXISTS: Self = Self(17);
    /// EINVAL: invalid argument.
    pub const INVALID: Self = Self(22);
    /// ENOSPC: a limit was reached.
    pub const NO_SPACE: Self = Self(28);
    /// ENOTSUP: not supported.
    pub const NOT_SUPPORTED: Self = Self(95);
}

/// Protocol violation: what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The size of a message exceeds its limit or is below the header size.
    Size {
        /// Command.
        command: Command,
        /// Size in bytes.
        found: u32,
        /// Largest size.
        expected_max: u32,
    },
    /// A message is neither a command nor a reply.
    Type {
        /// Command.
        command: Command,
        /// Flags.
        found: u32,
    },
    /// A message carries more descriptors than negotiated.
    TooManyFiles {
        /// Command.
        command: Command,
        /// Number of descriptors.
        found: usize,
        /// Largest number.
        expected_max: usize,
    },
    /// A message carries a wrong number of descriptors.
    Files {
        /// Command.
        command: Command,
        /// Number of descriptors.
        found: usize,
        /// Expected number, as text.
        expected: &'static str,
    },
    /// A message is not allowed in the current state.
    OutOfSequence {
        /// Received command.
        found: Command,
        /// Expected message, as text.
        expected: &'static str,
    },
    /// A reply has no outstanding request.
    UnsolicitedReply {
        /// Command of the reply.
        command: Command,
        /// Id of the reply.
        id: u16,
    },
    /// The major version is not supported.
    Version {
        /// Major version.
        found: u16,
    },
    /// The capabilities are invalid.
    Capabilities {
        /// Reason.
        why: String,
    },
    /// Another client has the device.
    Busy,
    /// Too many commands are queued.
    TooManyPending {
        /// Limit.
        expected_max: usize,
        /// Limited quantity.
        what: &'static str,
    },
    /// The command is not supported.
    NotOffered {
        /// Command.
        command: Command,
    },
    /// A body has a wrong length, or contradicts its fields.
    Body {
        /// Command.
        command: Command,
        /// Length in bytes.
        found: usize,
        /// Expected length, as text.
        expected: &'static str,
    },
    /// A field has an invalid value.
    Field {
        /// Command.
        command: Command,
        /// Field.
        field: &'static str,
        /// Value.
        found: u64,
        /// Expected value, as text.
        expected: &'static str,
    },
}

impl Violation {
    /// Errno of the reply; `None` if the violation ends the connection.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::NotOffered { .. } => Some(Errno::NOT_SUPPORTED),
            Self::Files { .. } | Self::Body { .. } | Self::Field { .. } => Some(Errno::INVALID),
            _ => None,
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { command, found, expected_max } => {
                write!(out, "{command}: {found} bytes, expected 16 to {expected_max}")
            }
            Self::Type { command, found } => {
                write!(out, "{command}: flags {found:#x}, expected a command or a reply")
            }
            Self::TooManyFiles { command, found, expected_max } => {
                write!(out, "{command}: {found} descriptors, expected at most {expected_max}")
            }
            Self::Files { command, found, expected } => {
                write!(out, "{command}: {found} descriptors, expected {expected}")
            }
            Self::OutOfSequence { found, expected } => write!(out, "{found}: expected {expected}"),
            Self::UnsolicitedReply { command, id } => {
                write!(out, "{command}: a reply with number {id}, expected one that was requested")
            }
            Self::Version { found } => write!(out, "VERSION: major {found}, expected 0"),
            Self::Capabilities { why } => write!(out, "VERSION: capabilities: {why}"),
            Self::Busy => out.write_str("VERSION: another client has the device, expected none"),
            Self::TooManyPending { expected_max, what } => {
                write!(out, "more {what} at once than expected, which is at most {expected_max}")
            }
            Self::NotOffered { command } => {
                write!(out, "{command}: expected a command that this end takes")
            }
            Self::Body { command, found, expected } => {
                write!(out, "{command}: a body of {found} bytes, expected {expected}")
            }
            Self::Field { command, field, found, expected } => {
                write!(out, "{command}: {field} is {found:#x}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for Violation {}

impl fmt::Display for Errno {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "error {}", self.0)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::DeviceGetInfo => "DEVICE_GET_INFO",
            Self::DeviceGetRegionInfo => "DEVICE_GET_REGION_INFO",
            Self::DeviceGetRegionIoFds => "DEVICE_GET_REGION_IO_FDS",
            Self::DeviceGetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::DeviceSetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DmaRead => "DMA_READ",
            Self::DmaWrite => "DMA_WRITE",
            Self::DeviceReset => "DEVICE_RESET",
            Self::Other(number) => return write!(out, "command {number}"),
        };
        out.write_str(name)
    }
}
