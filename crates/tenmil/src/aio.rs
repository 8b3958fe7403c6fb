//! Block devices for programs written with async and await.
//!
//! ```text
//!   a task on the same light thread ─┐
//!   a task of tokio or smol ─────────┼─ Device ── a place in a table, a number in a mailbox ─┐
//!   any OS thread ───────────────────┘    ▲                                                 ▼
//!                                         └── the waker of the place ── the device's poller: Backend
//! ```
//!
//! A [`Device`] stands for a backend that lives on a light thread. It is the same handle everywhere:
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
mod line;
mod open;
mod place;
mod poller;
mod refused;
#[cfg(test)]
mod tests;

pub use buffer::{Buffer, Buffers};
pub use device::Device;
pub use open::open;
pub use refused::{NotDone, Why};
