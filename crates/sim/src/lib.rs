//! Deterministic simulation of an NVMe host, bus, controller and medium with injected faults.

#![forbid(unsafe_code)]

pub mod block_stamp;
pub mod buffer_ownership;
pub mod controller_function;
pub mod data_oracle;
pub mod device_memory;
pub mod event_trace;
pub mod exhaustive_scenarios;
pub mod fault_injector;
pub mod host_memory;
pub mod injected_bug;
pub mod iommu;
pub mod random_scenarios;
pub mod scenario;
pub mod scenarios;
pub mod sim_bus;
pub mod sim_clock;
pub mod sim_host;
pub mod sim_medium;
pub mod sim_network;
pub mod sim_pci_device;
pub mod simulation;
pub mod test_run;
pub mod violation;
pub mod workload;
