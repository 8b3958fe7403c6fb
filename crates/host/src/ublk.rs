//! Linux's ublk, the machine's side: the descriptors, rings and mapped tables by which a process
//! serves a local block device. What is said over them is in [`wire::ublk`].
//!
//! ```text
//!   /dev/ublk-control ── Control: a ring of its own, one command at a time, off the data path
//!   /dev/ublkcN ─┬────── Queue 0: a ring, the table of its requests
//!                └────── Queue 1: …                                     one thread each
//! ```
//!
//! The data of a request are read and written by way of the device's descriptor (user copy): the
//! kernel is never told where our memory lies but for the length of that call.

mod control;
mod device;
mod queue;

pub use control::{CONTROL, Control, NoControl};
pub use device::Device;
pub use queue::{Ended, Queue, Ring};

use rustix::io::Errno;

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
