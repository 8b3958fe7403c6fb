//! Deterministic simulation of hosts, target processes and disks from one seed.
//!
//! ```text
//!   host: multipath driver  ──┬── network: delays, partitions, resets ──┬── target service
//!   host: …                 ──┘                                         └── …
//!     │                                                                      │
//!     └──▶ checker ◀── writes, flushes, reads                              disks: volatile cache,
//!                                                                          outlive the process
//! ```
//!
//! On a disk there is a namespace, a leg of a mirror, or a pool that two hosts have open one after the
//! other. A mirror is a target's over its own disks, or a host's over two targets. Tenants have subsystems of their own, and reservations.
//!
//! The code under test is the production code: controllers and multipath of the host, and service,
//! connections and queues of the target. Only sockets, disks, time and processes are simulated. One
//! thread polls all of them, so a seed repeats its run exactly.

#![forbid(unsafe_code)]

mod access_path;
mod cluster_authentication;
mod cluster_host;
mod cluster_network;
mod cluster_plan;
mod cluster_simulation;
mod consistency_checker;
mod disk_access;
mod exports;
mod injected_bugs;
mod mirror_legs;
mod pdu_recorder;
mod pool_host;
mod reservation_client;
mod run_history;
mod sim_disk;
mod target_process;

pub use cluster_plan::ClusterPlan;
pub use cluster_simulation::{RunOutcome, run_plan};
pub use injected_bugs::InjectedBugs;

#[cfg(test)]
mod tests;
