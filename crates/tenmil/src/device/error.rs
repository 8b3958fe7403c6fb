//! I/O errors.

use std::fmt;
use std::sync::Arc;

use tenmil_base::{Error, ErrorCategory, IoStatus, Operation};
use tenmil_wire::Status;

use super::operation_slots::SlotRequest;

/// A failed operation, with the buffer that was passed to it. It converts to an [`Error`], which drops
/// the buffer.
///
/// ```
/// # fn main() -> Result<(), tenmil::Error> {
/// # let rt = tenmil::Runtime::new()?;
/// let dev = rt.block_on(rt.open("ram:16m", tenmil::Access::ReadOnly))?;
/// let error = rt.block_on(dev.write(5, dev.buffer(512)?)).unwrap_err();
/// assert_eq!(error.to_string(), "ram:16m: write of block 5: the device has no such operation");
/// let buffer = error.buffer.expect("it comes back");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct IoError {
    /// Name by which the device was opened.
    pub device: Arc<str>,
    /// Operation that failed.
    pub operation: Operation,
    /// First block.
    pub lba: u64,
    /// Number of blocks. Zero if it is unknown, or if the operation concerns the whole device.
    pub blocks: u32,
    /// Cause.
    pub why: IoErrorKind,
    /// Buffer of the operation. None if the operation has no buffer, or if the device was removed while
    /// it had the buffer: the device may still access that memory, so it is leaked.
    pub buffer: Option<super::Buffer>,
}

/// Cause of a failed operation.
///
/// ```
/// use tenmil::{Access, IoErrorKind, Runtime, driver::IoStatus};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::new()?;
/// let dev = rt.block_on(rt.open("ram:16m", Access::ReadOnly))?;
/// let end = dev.limits().block_count;
/// let error = rt.block_on(dev.read(end, dev.buffer(512)?)).unwrap_err();
/// assert_eq!(error.why, IoErrorKind::Status(IoStatus::LBA_OUT_OF_RANGE));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The device completed the request with this status.
    Status(IoStatus),
    /// The device neither supports nor can emulate the operation, or it was opened read-only.
    Unsupported(Operation),
    /// The buffer is empty or its length is not a multiple of the block size. Compare-and-write
    /// needs two blocks of buffer for each block.
    Length {
        /// Length of the buffer.
        len_bytes: u32,
        /// Required multiple in bytes: one block, or two for compare-and-write.
        block_size: u32,
    },
    /// The buffer belongs to another runtime, so that the device cannot access it.
    ForeignBuffer,
    /// The device was removed, or its runtime was dropped.
    DeviceRemoved,
}

impl IoErrorKind {
    /// Error category.
    pub const fn category(self) -> ErrorCategory {
        match self {
            Self::Status(_) => ErrorCategory::Remote,
            Self::Unsupported(_) | Self::Length { .. } | Self::ForeignBuffer => {
                ErrorCategory::Usage
            }
            Self::DeviceRemoved => ErrorCategory::Environment,
        }
    }
}

impl fmt::Display for IoErrorKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(IoStatus(status)) => Status(*status).fmt(out),
            Self::Unsupported(_) => out.write_str("the device has no such operation"),
            Self::Length { len_bytes, block_size } => {
                write!(out, "a buffer of {len_bytes} bytes, expected blocks of {block_size}")
            }
            Self::ForeignBuffer => {
                out.write_str("a buffer of another runtime, expected one of `Device::buffer`")
            }
            Self::DeviceRemoved => {
                out.write_str("the device was removed, or its runtime was dropped")
            }
        }
    }
}

impl std::error::Error for IoErrorKind {}

impl IoError {
    pub(super) fn new(device: &Arc<str>, order: SlotRequest, why: IoErrorKind) -> Self {
        let SlotRequest { operation, lba, blocks, buffer, .. } = order;
        Self { device: Arc::clone(device), operation, lba, blocks, why, buffer }
    }
}

impl fmt::Display for IoError {
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

impl std::error::Error for IoError {}

impl From<IoError> for Error {
    fn from(error: IoError) -> Self {
        Self::new(error.why.category(), error.to_string())
    }
}
