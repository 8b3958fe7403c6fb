//! Sockets as the seam [`base::Stream`] wants them: TCP and Unix, never blocking.
//!
//! ```text
//!   Dial ──┐                      ┌─ inboxes, lent while bytes wait in them
//!          ├─ descriptor ─▶ Sockets::stream ─▶ Box<dyn Stream>
//!   Door ──┘                      └─ regions, in which segments lie
//! ```
//!
//! A thread has one [`Sockets`] and makes all its streams with it. A stream that has nothing that
//! waits to be consumed owns no memory to receive into, so what a thousand idle connections take is
//! what the kernel takes for them and a few hundred bytes each.

mod curbed;
mod dial;
mod epoll;
mod gather;
mod groups;
mod inbox;
mod lent;
mod loopback;
mod options;
mod ring;
mod sockets;
#[cfg(test)]
mod tests;
mod waiter;
mod zero_copy;

pub use crate::stream::{Address, Door};
pub use dial::{Dial, DialError};
pub use loopback::{loopback, reset_at_end};
pub(crate) use options::notice_vanished_peer;
pub use options::{LOCAL_CONGESTION, OptionRefused, Placement, SocketOptions};
pub use sockets::{SocketCounts, SocketEngine, Sockets, StreamRefused};
