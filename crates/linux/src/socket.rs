//! TCP and Unix sockets as non-blocking [`tenmil_base::Stream`]s.
//!
//! ```text
//!   ConnectOp ──────┐                      ┌─ receive buffers, assigned while bytes wait in them
//!                   ├─ descriptor ─▶ SocketFactory::new_stream ─▶ Box<dyn Stream>
//!   StreamListener ─┘                      └─ regions, which contain the segments
//! ```
//!
//! A thread has one [`SocketStreamFactory`] and creates all its streams with it. A stream without
//! unconsumed bytes owns no receive buffer, so a thousand idle connections cost the kernel's memory
//! and a few hundred bytes each.

mod connect_op;
mod epoll_stream;
mod gather_list;
mod handshake_socket;
mod kernel_buffers;
mod loopback;
mod napi_groups;
mod recv_buffer;
mod socket_options;
mod socket_ring;
mod socket_stream_factory;
mod socket_waiter;
mod stream_without_gather;
#[cfg(test)]
mod tests;
mod zero_copy;

pub use crate::socket_stream::{ListenAddress, StreamListener};
pub use connect_op::{ConnectError, ConnectOp};
pub use handshake_socket::HandshakeSocket;
pub use loopback::{loopback_pair, reset_on_close};
pub(crate) use socket_options::set_peer_timeouts;
pub use socket_options::{LOCAL_CONGESTION, RxPlacement, SocketOptionError, SocketOptions};
pub use socket_stream_factory::{NewStreamError, SocketEngine, SocketStats, SocketStreamFactory};
