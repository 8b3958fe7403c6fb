//! TCP and Unix sockets as non-blocking [`tenmil_base::Stream`]s.
//!
//! ```text
//!   ConnectOp ──────┐                      ┌─ receive buffers, assigned while bytes wait in them
//!                   ├─ descriptor ─▶ SocketFactory::stream ─▶ Box<dyn Stream>
//!   StreamListener ─┘                      └─ regions, which contain the segments
//! ```
//!
//! A thread has one [`SocketFactory`] and creates all its streams with it. A stream without
//! unconsumed bytes owns no receive buffer, so a thousand idle connections cost the kernel's memory
//! and a few hundred bytes each.

mod connect;
mod epoll;
mod factory;
mod gather;
mod kernel_buffers;
mod loopback;
mod napi_groups;
mod options;
mod recv_buffer;
mod restricted;
mod ring;
#[cfg(test)]
mod tests;
mod waiter;
mod zero_copy;

pub use crate::stream::{Address, StreamListener};
pub use connect::{ConnectError, ConnectOp};
pub use factory::{SocketEngine, SocketFactory, SocketStats, StreamError};
pub use loopback::{loopback, reset_at_end};
pub(crate) use options::notice_vanished_peer;
pub use options::{LOCAL_CONGESTION, OptionError, RxPlacement, SocketOptions};
