//! What a peer did that it may not.

use std::fmt;

use crate::Command;

/// A UNIX error number, as it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub u32);

impl Errno {
    /// There is nothing there.
    pub const NO_ENTRY: Self = Self(2);
    /// The device could not do it.
    pub const IO: Self = Self(5);
    /// There is not so much memory.
    pub const NO_MEMORY: Self = Self(12);
    /// Somebody else has it.
    pub const BUSY: Self = Self(16);
    /// Memory cannot be reached.
    pub const FAULT: Self = Self(14);
    /// Something is there already.
    pub const EXISTS: Self = Self(17);
    /// An argument makes no sense.
    pub const INVALID: Self = Self(22);
    /// There are too many.
    pub const NO_SPACE: Self = Self(28);
    /// It is not offered.
    pub const NOT_SUPPORTED: Self = Self(95);
}

/// What a peer sent that it may not send: what was found, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A message says that it is longer than any of its kind, or shorter than its header.
    Size {
        /// Whose it was.
        command: Command,
        /// Its size in bytes.
        found: u32,
        /// The most it may be.
        expected_max: u32,
    },
    /// A message is neither a command nor a reply.
    Type {
        /// Whose it was.
        command: Command,
        /// Its flags.
        found: u32,
    },
    /// A message came with more descriptors than were negotiated.
    TooManyFiles {
        /// Whose it was.
        command: Command,
        /// How many.
        found: usize,
        /// The most that are taken.
        expected_max: usize,
    },
    /// A message came with a number of descriptors that it cannot have.
    Files {
        /// Whose it was.
        command: Command,
        /// How many.
        found: usize,
        /// How many it has, in words.
        expected: &'static str,
    },
    /// A message that is not the one that has to come now.
    Order {
        /// What came.
        found: Command,
        /// What had to.
        expected: &'static str,
    },
    /// A reply to something that was not asked.
    Unasked {
        /// What it answers.
        command: Command,
        /// Which.
        id: u16,
    },
    /// A version that is not spoken here.
    Version {
        /// The major version.
        found: u16,
    },
    /// Capabilities that make no sense.
    Capabilities {
        /// Why.
        why: String,
    },
    /// Somebody else has the device.
    Busy,
    /// More commands than are kept while one is being executed.
    Crowd {
        /// The most that are kept.
        expected_max: usize,
        /// Of what.
        what: &'static str,
    },
    /// A command that is not offered.
    NotOffered {
        /// Which.
        command: Command,
    },
    /// A body that is too short, too long, or not as its fields say.
    Body {
        /// Whose it was.
        command: Command,
        /// Its length in bytes.
        found: usize,
        /// What it should be, in words.
        expected: &'static str,
    },
    /// A field with a value that makes no sense.
    Field {
        /// Whose it was.
        command: Command,
        /// Which.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it should be, in words.
        expected: &'static str,
    },
}

impl Violation {
    /// The number it is answered with; `None` if it ends the connection.
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
            Self::Order { found, expected } => write!(out, "{found}: expected {expected}"),
            Self::Unasked { command, id } => {
                write!(out, "{command}: a reply with number {id}, expected one that was asked for")
            }
            Self::Version { found } => write!(out, "VERSION: major {found}, expected 0"),
            Self::Capabilities { why } => write!(out, "VERSION: capabilities: {why}"),
            Self::Busy => out.write_str("VERSION: another client has the device, expected none"),
            Self::Crowd { expected_max, what } => {
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
