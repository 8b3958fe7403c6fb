//! Linux ublk protocol structures: a block device served by a user-space program.
//!
//! Names and numbers are those of `include/uapi/linux/ublk_cmd.h`; all structures are in native
//! byte order, as between a program and its own kernel.
//!
//! | module | content |
//! |---|---|
//! | [`control`] | commands to `/dev/ublk-control`, and the description of a device |
//! | [`parameters`] | disk parameters: size, blocks, cache, discard |
//! | [`queue`] | queue commands on `/dev/ublkcN`, and request descriptors |

pub mod control;
pub mod parameters;
pub mod queue;
#[cfg(test)]
mod tests;

pub use control::{ControlCommand, ControlOp, DeviceInfo, DeviceState, Features};
pub use parameters::{Discard, DiskAttributes, Parameters};
pub use queue::{IoDescriptor, IoFlags, IoOp, QueueCommand, QueueOp};

/// Unit of disk sizes and offsets, independent of the block size (`SECTOR_SIZE`).
pub const SECTOR_BYTES: u32 = 512;
/// Maximum number of requests per queue (`UBLK_MAX_QUEUE_DEPTH`).
pub const DEPTH_MAX: u16 = 4096;

/// Code of an `ioctl` of type `u` (`asm-generic/ioctl.h`): direction, argument size, type, number.
/// Both kinds of commands use such codes (`UBLK_F_CMD_IOCTL_ENCODE`).
const fn ioctl_code(direction: u32, size: u16, number: u8) -> u32 {
    direction << 30 | (size as u32 & 0x3fff) << 16 | (b'u' as u32) << 8 | number as u32
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Copies `from` to offset `at`.
fn put_bytes(into: &mut [u8], at: usize, from: &[u8]) {
    into[at..at + from.len()].copy_from_slice(from);
}

/// Returns the `N` bytes at `at`.
fn bytes_at<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&from[at..at + N]);
    bytes
}
