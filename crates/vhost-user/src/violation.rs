//! Protocol violations of a front end.

use core::fmt;

use crate::MessageType;

/// Protocol violation: what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The header has an unsupported version, or is a reply.
    Flags {
        /// Message type.
        code: MessageType,
        /// Flags.
        found: u32,
    },
    /// The payload has a wrong length.
    Size {
        /// Message type.
        code: MessageType,
        /// Length in bytes.
        found: u32,
        /// Smallest and largest length.
        expected: (u32, u32),
    },
    /// The message carries a wrong number of descriptors.
    Files {
        /// Message type.
        code: MessageType,
        /// Number of descriptors.
        found: usize,
        /// Smallest and largest number.
        expected: (usize, usize),
    },
    /// The message is unknown, not offered, or belongs to a feature that was not negotiated.
    NotOffered {
        /// Message type.
        code: MessageType,
    },
    /// A field has a value that is invalid, or invalid in this state.
    Field {
        /// Message type.
        code: MessageType,
        /// Field.
        field: &'static str,
        /// Value.
        found: u64,
        /// Expected value, as text.
        expected: &'static str,
    },
}

impl Violation {
    /// Whether the stream can still be parsed.
    pub(crate) fn leaves_stream_readable(&self) -> bool {
        !matches!(self, Self::Flags { .. } | Self::Size { .. })
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flags { code, found } => {
                write!(out, "{code}: flags {found:#x}, expected version 1 and no reply")
            }
            Self::Size { code, found, expected: (least, most) } if least == most => {
                write!(out, "{code}: {found} bytes, expected {least}")
            }
            Self::Size { code, found, expected: (least, most) } => {
                write!(out, "{code}: {found} bytes, expected {least} to {most}")
            }
            Self::Files { code, found, expected: (least, most) } if least == most => {
                write!(out, "{code}: {found} descriptors, expected {least}")
            }
            Self::Files { code, found, expected: (least, most) } => {
                write!(out, "{code}: {found} descriptors, expected {least} to {most}")
            }
            Self::NotOffered { code } => {
                write!(out, "{code}: not offered, or not negotiated, expected what is")
            }
            Self::Field { code, field, found, expected } => {
                write!(out, "{code}: {field} is {found:#x}, expected {expected}")
            }
        }
    }
}

impl core::error::Error for Violation {}
