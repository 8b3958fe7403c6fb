//! SSDs behind a network: `tcp://` names one, and whatever takes a device takes it.
//!
//! ```text
//!   RemoteMedium, RemoteChannel, … ─▶ Attached ── remote::Remote (locked to make a queue, or to tend)
//!                                        └── a thread that tends: connections, time-outs, events
//! ```
//!
//! A channel has a connection of its own, which is read and written by the thread of the channel.

mod ask;
mod attached;
mod channel;
mod dial;
mod discover;
mod kind;
mod maps;
mod name;
mod opening;
mod paths;
mod reservations;
mod sleep;
pub(crate) mod sockets;
mod teller;
mod tending;
#[cfg(test)]
mod tests;
mod wanted;

pub(crate) use ask::with_controller;
pub(crate) use discover::{Change, Discovered, Watch, discover, service as discovery_service};
pub use kind::Kind;
pub use maps::Maps;
pub use name::TcpName;
pub(crate) use name::{discovery_name, policy_of};
pub(crate) use teller::paths_of_all;
