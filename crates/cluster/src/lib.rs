//! Hosts, target processes and disks in simulated time, from one seed.
//!
//! ```text
//!   host: remote::Multipath ──┬── network: delays, partitions, resets ──┬── target::tcp::Service
//!   host: …                 ──┘                                         └── …
//!     │                                                                      │
//!     └──▶ checker ◀── what was written, flushed, read                     disks: volatile cache,
//!                                                                          survive the process
//! ```
//!
//! On a disk there is a namespace, a leg of a mirror, or a pool that two hosts have open one after the
//! other. A mirror is a target's over its own disks, or a host's over two targets. Tenants have subsystems of their own, and reservations.
//!
//! The code under test is the product's own: the host's controllers and paths, and the target's
//! service, connections and queues. Only sockets, disks, time and processes are simulated. One thread
//! turns them all, so a seed repeats its run exactly.

#![forbid(unsafe_code)]

mod bugs;
mod checker;
mod disk;
mod exports;
mod history;
mod host;
mod legs;
mod link;
mod network;
mod plan;
mod pool;
mod process;
mod registrant;
mod tap;
mod way;
mod world;

pub use bugs::InjectedBugs;
pub use plan::Plan;
pub use world::{Outcome, run};

#[cfg(test)]
mod tests;
