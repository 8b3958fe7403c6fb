//! Services: what makes a block device one of somebody else's.
//!
//! [`nbd`] serves any [`base::Medium`] over the NBD protocol, [`tcp`] NVMe subsystems over NVMe/TCP,
//! and [`vfu`] controllers as PCI devices over vfio-user.

#![forbid(unsafe_code)]

mod hall;
mod looks;
pub mod nbd;
pub mod tcp;
pub mod vfu;
