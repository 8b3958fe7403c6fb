//! Server side of ublk block devices: descriptors, rings and mapped tables. The protocol structures
//! are in [`tenmil_wire::ublk`].
//!
//! ```text
//!   /dev/ublk-control ── Control: a ring of its own, one command at a time, off the data path
//!   /dev/ublkcN ─┬────── Queue 0: a ring, the table of its requests
//!                └────── Queue 1: …                                     one thread each
//! ```
//!
//! The data of a request is read and written through the device's descriptor (user copy): the
//! kernel knows addresses of this process only during such a call.

mod ublk_control;
mod ublk_device;
mod ublk_queue;

pub use ublk_control::{CONTROL, ControlError, UblkControl};
pub use ublk_device::UblkCharDevice;
pub use ublk_queue::{FetchedTag, UblkQueue, UblkQueueRing};

use rustix::io::Errno;

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
