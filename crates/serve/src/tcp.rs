//! NVMe/TCP target: exports NVMe subsystems over byte streams.
//!
//! ```text
//!   Service           subsystems, their access lists, and the memory of all connections
//!   Server            listeners, and the threads that assign accepted connections to reactors
//!   TargetConnection  Stream → tenmil_nvme_tcp::Controller → admin queue or I/O queue → Stream
//! ```
//!
//! The target also runs without threads and sockets: [`Service::accept_stream`] takes any [`tenmil_base::Stream`]
//! and returns a [`TargetConnection`], whose [`step`](TargetConnection::poll_once) does all work that is
//! possible now, until it [is over](TargetConnection::is_closed).
//!
//! A command begins in the [`Executor`](tenmil_nvme_controller::executor::Executor) of its queue once it has
//! a buffer and, for a write, all its data have been received. The device therefore accesses data in
//! place, without a copy. An R2T is sent only when a buffer for the data has been allocated.

mod admin_queue;
mod admission;
mod association;
mod audit;
mod authentication;
mod buffer_pool;
mod command_table;
mod connect_validation;
mod connection;
mod connection_handle;
mod connection_table;
mod dh_threads;
mod discovery;
mod event;
mod fair_shares;
pub mod fuzz;
#[cfg(test)]
mod injected_bug;
mod injected_bugs;
mod io_queue;
mod poller;
mod rate_limits;
mod refusal_limiter;
mod reservation_store;
mod security;
mod send_state;
mod server;
mod service;
mod subsystem_export;
#[cfg(test)]
mod tests;

pub use admission::AdmissionLimits;
pub use audit::{AuthenticationAudit, ConnectionAudit, RefusalReason, TlsKeyAudit};
pub use buffer_pool::BufferPool;
pub use connection::TargetConnection;
pub use connection_table::ConnectionSample;
pub use event::{
    AcceptedCounts, AssociationTotals, DisconnectReason, EndedAssociation, EventCounts, TargetEvent,
};
pub use injected_bugs::InjectedBugs;
pub use rate_limits::ExportLimits;
pub use reservation_store::{MemoryDirectory, StateDirectory};
pub use security::{
    HostKeys, HostRights, NamedKey, NamespaceSelection, PortSecurity, SubsystemSecurity,
};
pub use server::{PlacementPolicy, Server, ServerConfig};
pub use service::{DiscoveryName, GatewayGroupView, Port, Service, ServiceLimits};
pub use subsystem_export::{
    AllowedHosts, ControllerModel, SubsystemExportConfig, SubsystemExportUpdate,
};
