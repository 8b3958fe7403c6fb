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
mod bugs;
mod checker;
mod disk;
mod exports;
mod history;
mod host;
mod legs;
mod link;
mod network;
mod pdu_recorder;
mod plan;
mod pool;
mod process;
mod registrant;
mod world;

pub use bugs::InjectedBugs;
pub use plan::Plan;
pub use world::{Outcome, run};

#[cfg(test)]
mod tests;
