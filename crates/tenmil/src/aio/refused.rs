//! Why an operation was not done.

use std::fmt;

use base::{Blame, Operation, Outcome};
use wire::Status;

/// An operation that was not done, with the buffer that went into it.
#[derive(Debug)]
pub struct NotDone {
    /// Why.
    pub why: Why,
    /// The buffer. It is missing if the device is gone that had it: nobody can say whether the
    /// device still touches it, so it is nobody's any more.
    pub buffer: Option<super::Buffer>,
}

/// Why an operation was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The device said so.
    Outcome(Outcome),
    /// The device has no such operation, and none that it could be made of; or whoever opened it
    /// may only read.
    Unsupported(Operation),
    /// The buffer is empty, or no whole number of blocks. Compare-and-write takes two for each
    /// block.
    Length {
        /// How long it is.
        len_bytes: u32,
        /// Of what it was expected to be a multiple: bytes in a block, or in two.
        block_size: u32,
    },
    /// The buffer is from a pool that the device may not reach.
    Stranger,
    /// The device is gone, or its light thread.
    Gone,
}

impl Why {
    /// Whose move it is.
    pub const fn blame(self) -> Blame {
        match self {
            Self::Outcome(_) => Blame::Peer,
            Self::Unsupported(_) | Self::Length { .. } | Self::Stranger => Blame::Caller,
            Self::Gone => Blame::Machine,
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outcome(Outcome(status)) => Status(*status).fmt(out),
            Self::Unsupported(operation) => {
                write!(out, "{}: the device has no such operation", operation.name())
            }
            Self::Length { len_bytes, block_size } => {
                write!(out, "a buffer of {len_bytes} bytes, expected blocks of {block_size}")
            }
            Self::Stranger => out.write_str("a buffer of a pool that the device cannot reach"),
            Self::Gone => out.write_str("the device is gone, or its thread"),
        }
    }
}

impl std::error::Error for Why {}

impl fmt::Display for NotDone {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(out)
    }
}

impl std::error::Error for NotDone {}
