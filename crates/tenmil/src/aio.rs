//! Block devices for programs written with async and await.
//!
//! ```text
//!   a task on the same light thread ─┐
//!   a task of tokio or smol ─────────┼─ Device ── a place in a table, a number in a mailbox ─┐
//!   any OS thread ───────────────────┘    ▲                                                 ▼
//!                                         └── the waker of the place ── the device's poller: Backend
//! ```
//!
//! An [`Opener`] opens whatever has a name, and waits where others may. A [`Device`] stands for a
//! backend that lives on a light thread. It is the same handle everywhere:
//! it knows no runtime, only [`core::future`]. What an operation needs lies in a table that is made
//! when the device is attached; its index is the token of the request. An operation costs no
//! allocation, and a system call only if the light thread sleeps.
//!
//! Memory is owned by a [`Buffer`], which goes into an operation and comes out with its result. A
//! future may be dropped at any time: the buffer then stays in the table until the device has
//! answered, and goes back to its pool after that. What was asked for may happen or not.
//!
//! If more operations are begun than there are places, futures wait in the order in which they came.

mod buffer;
mod device;
mod io;
mod later;
mod line;
mod open;
mod place;
mod poller;
mod refused;
mod shelf;
#[cfg(test)]
mod tests;

pub use block::Claim;
pub use block::uri::Uri;
pub use buffer::{Buffer, Buffers};
pub use device::{Closing, Device};
pub use open::{Opener, Opening};
pub use refused::{NotDone, Why};
