//! Why an operation was not done.

use std::fmt;
use std::sync::Arc;

use base::{Blame, Operation, Outcome};
use wire::Status;

use super::place::Order;

/// An operation that was not done, with the buffer that went into it.
#[derive(Debug)]
pub struct NotDone {
    /// Which device was to do it, by the name that it was opened by.
    pub device: Arc<str>,
    /// What.
    pub operation: Operation,
    /// From which block on.
    pub lba: u64,
    /// With how many blocks; none if that is not known, or it is about all of them.
    pub blocks: u32,
    /// Why.
    pub why: Why,
    /// The buffer. It is missing if the device is gone that had it: nobody can say whether the
    /// device still touches it, so it is nobody's any more. And what needs none has none.
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
            Self::Unsupported(_) => out.write_str("the device has no such operation"),
            Self::Length { len_bytes, block_size } => {
                write!(out, "a buffer of {len_bytes} bytes, expected blocks of {block_size}")
            }
            Self::Stranger => out.write_str("a buffer of a pool that the device cannot reach"),
            Self::Gone => out.write_str("the device is gone, or its thread"),
        }
    }
}

impl std::error::Error for Why {}

impl NotDone {
    pub(super) fn new(device: &Arc<str>, order: Order, why: Why) -> Self {
        let Order { operation, lba, blocks, buffer, .. } = order;
        Self { device: Arc::clone(device), operation, lba, blocks, why, buffer }
    }
}

impl fmt::Display for NotDone {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, operation, lba, blocks, why, .. } = self;
        let name = operation.name();
        match blocks {
            0 if *operation == Operation::Flush => write!(out, "{device}: {name}: {why}"),
            0 | 1 => write!(out, "{device}: {name} of block {lba}: {why}"),
            _ => write!(out, "{device}: {name} of {blocks} blocks from {lba} on: {why}"),
        }
    }
}

impl std::error::Error for NotDone {}
