//! What a front end did that it may not.

use core::fmt;

use crate::Code;

/// What a front end sent that it may not send: what was found, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A header that is of no version that there is, or answers what was not asked.
    Flags {
        /// Whose it was.
        code: Code,
        /// The flags.
        found: u32,
    },
    /// A payload that is longer or shorter than one of its kind.
    Size {
        /// Whose it was.
        code: Code,
        /// Its length in bytes.
        found: u32,
        /// At least and at most.
        expected: (u32, u32),
    },
    /// More or fewer descriptors than a message of its kind has.
    Files {
        /// With which they came.
        code: Code,
        /// How many.
        found: usize,
        /// At least and at most.
        expected: (usize, usize),
    },
    /// A message that is not known, or not offered, or belongs to a feature that was not negotiated.
    NotOffered {
        /// Which.
        code: Code,
    },
    /// A field with a value that makes no sense, or none now.
    Field {
        /// Whose it was.
        code: Code,
        /// Which.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it should be, in words.
        expected: &'static str,
    },
}

impl Violation {
    /// Whether what follows can still be understood.
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
