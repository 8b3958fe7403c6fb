//! Block devices for `async`/`await` programs, independent of the executor.
//!
//! ```text
//!   task on the same lightweight thread ─┐
//!   task of tokio or smol ───────────────┼─ Device ── slot of a table, its index in a mailbox ─┐
//!   any OS thread ───────────────────────┘    ▲                                               ▼
//!                                             └── waker of the slot ── poller of the device: I/O channel
//! ```
//!
//! An [`Opener`] opens a device by URI and does the blocking work on its own threads. A [`Device`]
//! is a handle of an I/O channel that lives on a lightweight thread. The handle depends on
//! [`core::future`] alone, so it works under any executor. The state of an operation lies in a slot
//! of a table that is allocated when the device is attached; the index of the slot is the token of
//! the request. An operation allocates nothing, and costs a system call only if the reactor of the
//! thread sleeps.
//!
//! A [`Buffer`] owns its memory. It moves into an operation and comes back with the result. A
//! future may be dropped at any time: the buffer then stays in its slot until the device has
//! completed the request, and returns to its pool afterwards. Whether a dropped operation takes
//! effect is not defined.
//!
//! If all slots are in use, further operations wait in the order in which they were first polled.

mod buffer;
mod device;
mod error;
mod io;
mod open;
mod open_devices;
mod poller;
mod slot;
#[cfg(test)]
mod tests;
mod wait_queue;

pub use buffer::{Buffer, BufferPool};
pub use device::{CloseFuture, Device};
pub use error::{IoError, IoErrorKind};
pub use open::{OpenFuture, Opener};
pub use tenmil_block::Claim;
pub use tenmil_block::uri::Uri;
