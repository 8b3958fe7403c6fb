//! Deterministic simulation of an NVMe host, bus, controller and medium with injected faults.

#![forbid(unsafe_code)]

pub mod bus;
pub mod clock;
pub mod device;
pub mod device_memory;
pub mod enumeration;
pub mod failure;
pub mod fault_injector;
pub mod function;
pub mod host;
pub mod host_memory;
pub mod injected_bug;
pub mod iommu;
pub mod medium;
pub mod network;
pub mod oracle;
pub mod ownership;
pub mod scenario;
pub mod scenarios;
pub mod stamp;
pub mod swarm;
pub mod test_run;
pub mod trace;
pub mod workload;
pub mod world;
