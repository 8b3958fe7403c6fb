//! Servers that export block devices: NBD, NVMe/TCP, vfio-user, vhost-user and ublk.
//!
//! - [`nbd`] exports any [`tenmil_base::BlockDevice`] over the NBD protocol.
//! - [`tcp`] exports NVMe subsystems over NVMe/TCP.
//! - `vfio_user` presents NVMe controllers as PCI devices over vfio-user, with the feature `vfio-user`.
//! - `vhost_user` presents any block device as a virtio disk of virtual machines over vhost-user, with the
//!   feature `vhost-user`.
//! - [`ublk`] presents any block device as a disk of this machine's Linux.

#![forbid(unsafe_code)]

mod acceptor;
#[cfg(any(feature = "vfio-user", feature = "vhost-user"))]
mod endpoint_event;
#[cfg(feature = "tls")]
mod handshake;
pub mod nbd;
mod peer_network;
mod recv_backoff;
mod slow_io;
pub mod tcp;
#[cfg(test)]
#[cfg(any(feature = "vfio-user", feature = "vhost-user"))]
mod test_reactors;
pub mod ublk;
#[cfg(feature = "vfio-user")]
pub mod vfio_user;
#[cfg(feature = "vhost-user")]
pub mod vhost_user;

#[cfg(any(feature = "vfio-user", feature = "vhost-user"))]
pub use endpoint_event::EndpointEvent;
pub use peer_network::PeerNetwork;
pub use slow_io::{
    DeviceSlowIo, ExportSlowIo, SlowIo, SlowIoLog, SlowIoSource, SlowIoStages, SlowIoThresholds,
};

/// Whether servers accept TLS connections: the feature `tls` of this crate.
pub const HAS_TLS: bool = cfg!(feature = "tls");
