//! NVMe over Fabrics host transport (NVMe/TCP) for the driver `tenmil_nvme_host`.
//!
//! ```text
//!   tenmil_nvme_host::Controller ──── HostTransport: registers, admin queue ──┐
//!   tenmil_nvme_host::NamespaceQueue ── TcpTransport ─────────────────────────┴─ QueueConnection ── tenmil_base::Stream ── peer
//! ```
//!
//! A queue pair of the driver has a connection as its transport, instead of rings in memory, and the
//! registers of the controller are properties that [`HostTransport`] gets and sets over the admin
//! connection. So the driver and its error recovery are the same as for PCIe.
//!
//! Nothing here blocks, reads a clock or uses sockets directly. Streams come from a [`Connector`], and
//! time is an argument. A [`Multipath`] manages the controllers of one or several paths to a namespace; it
//! belongs to one thread. A [`FabricsChannel`] belongs to the thread that submits to it, with a connection
//! of its own on each path. A [`FabricsController`] alone serves for admin commands.

#![forbid(unsafe_code)]

mod admin_transport;
mod authentication;
mod cache_tracker;
mod command_table;
mod connector;
mod fabrics_controller;
mod fabrics_queue_pair;
mod flush_fanout;
mod host_transport;
mod inflight_requests;
mod multipath;
mod options;
mod path_table;
mod queue_authentication;
mod queue_connect;
mod queue_connection;
mod queue_report;
mod remote_dma;
mod resumption;
mod segment_lists;
mod stall_detector;
mod tcp_transport;
#[cfg(test)]
mod tests;
mod timeout_policy;
mod wait_handle;
mod write_pacing;
mod zero_copy_drain;

pub use admin_transport::AdminTransport;
pub use authentication::{Authentication, ChapSecrets, KeyLookup, SecureRandom};
pub use cache_tracker::CacheScope;
pub use connector::{Connector, PendingConnect};
pub use fabrics_controller::{
    ConnectError, ConnectingController, FabricsController, RemoteController,
};
pub use fabrics_queue_pair::FabricsQueuePair;
pub use host_transport::{ConnectionQueues, ConnectionStats, HostTransport, NoDoorbell};
pub use multipath::{
    FabricsChannel, IoPolicy, Multipath, MultipathOptions, PATHS_MAX, PathAnaState, PathEvent,
    PathSetup, QueueRequest,
};
#[doc(hidden)]
pub use options::InjectedBugs;
pub use options::{InvalidNqn, Options, SecureChannelMode};
pub use path_table::{
    DevicePaths, PathChange, PathCounters, PathObserver, PathRow, PathSecurity, PathTable,
};
pub use remote_dma::RemoteDma;
pub use segment_lists::{SegmentLists, SegmentPointer};
pub use tcp_transport::{AttachedQueue, TcpTransport};
pub use tenmil_nvme_tcp::DigestMode;
pub use timeout_policy::TimeoutPolicy;
pub use wait_handle::WaitHandle;
#[doc(hidden)]
pub use write_pacing::reset_for_simulation;
