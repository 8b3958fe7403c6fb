//! SSDs over NVMe/TCP, named by `tcp://` URIs wherever a device is expected.
//!
//! ```text
//!   RemoteDevice, RemoteChannel, … ─▶ Attached ── remote controller (under a lock: queue creation, admin)
//!                                        └── admin thread: connections, timeouts, events
//! ```
//!
//! Each channel has a connection of its own, which the thread of the channel reads and writes.

mod admin_thread;
mod attached;
mod channel;
mod connector;
mod discover;
mod kind;
mod name;
mod opening;
mod path_notifier;
mod paths;
mod pending_queues;
mod queue_map;
mod remote_admin;
mod reservations;
mod sockets;
#[cfg(test)]
mod tests;
mod wait_set;

pub use discover::{
    DiscoveryChange, DiscoveryLog, DiscoveryWatch, discover, service as discovery_service,
};
pub use kind::Kind;
pub use name::TcpName;
pub use name::{discovery_name, policy_of};
pub use path_notifier::paths_of_all;
pub use queue_map::QueueMapOptions;
pub use remote_admin::with_controller;
pub use sockets::of as socket_options;
