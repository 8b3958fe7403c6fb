//! SSDs over NVMe/TCP, named by `tcp://` URIs wherever a device is expected.
//!
//! ```text
//!   RemoteDevice ─▶ NamespacePaths ── controllers of one or several paths (under a lock: queue creation)
//!                      └── admin thread: connections, ANA states, timeouts, events
//!
//!   discover, identify, reservations ─▶ Attached ── one controller for admin commands, with its thread
//! ```
//!
//! Each channel has connections of its own, one on each path, which the thread of the channel reads and
//! writes.

mod admin_thread;
mod channel;
mod connector;
mod discover;
mod fabrics_controller;
mod key_arithmetic;
mod kind;
mod path_notifier;
mod paths;
mod queues_by_type;
mod remote_admin;
mod reservations;
mod security;
mod sockets;
mod tcp_uri;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls_connector;
mod wait_set;

pub use discover::{
    DiscoveryChange, DiscoveryLog, DiscoveryWatch, discover,
    parse_discovery_uri as discovery_service, security_name, transport_name, uri_of_entry,
};
pub use kind::TcpKind;
pub use path_notifier::paths_of_all;
pub use queues_by_type::QueueMapOptions;
pub use remote_admin::with_controller;
pub use security::{TcpSecurity, reload_keys, set_key_source};
pub use sockets::socket_options;
pub use tcp_uri::TcpUri;
pub use tcp_uri::{discovery_nqn_and_serial, timeout_rows_of_uri};
