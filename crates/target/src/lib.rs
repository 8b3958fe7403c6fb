//! Services: what makes a block device one of somebody else's.
//!
//! [`nbd`] serves any [`base::Medium`] over the NBD protocol, [`tcp`] NVMe subsystems over NVMe/TCP,
//! [`vfu`] controllers as PCI devices over vfio-user, [`vhost`] any medium as a disk of virtual
//! machines over vhost-user, and [`ublk`] any medium as a disk of this machine's Linux.

#![forbid(unsafe_code)]

mod address;
mod hall;
mod looks;
pub mod nbd;
mod news;
pub mod tcp;
pub mod ublk;
pub mod vfu;
pub mod vhost;

pub use news::News;
