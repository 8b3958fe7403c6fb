//! Linux's ublk: a block device of this machine that a program serves. Bytes to meaning and back,
//! no state.
//!
//! Names and numbers are those of `include/uapi/linux/ublk_cmd.h`; all of them lie in the byte order
//! of the machine, as between a program and its own kernel.
//!
//! | module | what it holds |
//! |---|---|
//! | [`control`] | commands to `/dev/ublk-control`, and what a device says about itself |
//! | [`parameters`] | what its disk is like: size, blocks, cache, discard |
//! | [`queue`] | what a queue is told on `/dev/ublkcN`, and what the kernel asks it for |

pub mod control;
pub mod parameters;
pub mod queue;
#[cfg(test)]
mod tests;

pub use control::{ControlCommand, ControlOp, DeviceInfo, DeviceState, Features};
pub use parameters::{Attributes, Discard, Parameters};
pub use queue::{Descriptor, IoFlags, IoOp, QueueCommand, QueueOp};

/// Sizes and places of a disk are told in these, whatever its blocks are (`SECTOR_SIZE`).
pub const SECTOR_BYTES: u32 = 512;
/// So many requests a queue may have (`UBLK_MAX_QUEUE_DEPTH`).
pub const DEPTH_MAX: u16 = 4096;

/// The code of an `ioctl` of type `u` (`asm-generic/ioctl.h`): direction, size of its argument, type,
/// number. Both kinds of commands are numbered so (`UBLK_F_CMD_IOCTL_ENCODE`).
const fn code(direction: u32, size: u16, number: u8) -> u32 {
    direction << 30 | (size as u32 & 0x3fff) << 16 | (b'u' as u32) << 8 | number as u32
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Copies `from` to `at`.
fn put(into: &mut [u8], at: usize, from: &[u8]) {
    into[at..at + from.len()].copy_from_slice(from);
}

/// The `N` bytes at `at`.
fn take<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&from[at..at + N]);
    bytes
}
