//! The simulated world.

#![forbid(unsafe_code)]

pub mod bus;
pub mod clock;
pub mod course;
pub mod device;
pub mod device_memory;
pub mod enumeration;
pub mod evil;
pub mod failure;
pub mod function;
pub mod host;
pub mod host_memory;
pub mod iommu;
pub mod ledger;
pub mod medium;
pub mod network;
pub mod oracle;
pub mod planted;
pub mod scenario;
pub mod scenarios;
pub mod stamp;
pub mod swarm;
pub mod trace;
pub mod workload;
pub mod world;
