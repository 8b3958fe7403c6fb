//! NVMe controller: everything between the commands of a host and a block device.
//!
//! ```text
//!            registers, doorbells, vectors                     one thread
//!   host ──▶ transport::MemoryTransport ──▶ controller::Controller  admin, features, reservations
//!                 │                          │
//!                 │ creates, deletes         │ namespace::Namespaces, immutable snapshot
//!                 ▼                          ▼
//!   queue::Queue ──▶ executor::Executor ──▶ tenmil_base::BlockDevice  any reactor
//!   rings: fetch, post   decode, check, translate, submit, poll
//! ```
//!
//! Every command is a state machine: host memory that completes an access many iterations later and a
//! block device that completes out of order are the normal case; synchronous completion is the fast path.
//! The crate contains no wire transport. Rings and registers reach it through the traits of [`tenmil_base`], and
//! the current time is an argument.

#![forbid(unsafe_code)]

mod bounce_pool;
pub mod controller;
mod data_pointer_walk;
mod doorbell;
pub mod executor;
pub mod fuzz;
mod io_stats;
pub mod namespace;
pub mod queue;
pub mod transport;

pub use bounce_pool::BouncePool;
pub use data_pointer_walk::SGLS;
pub use doorbell::{DoorbellHandle, DoorbellPage, STRIDE};
pub use io_stats::{IoStatsSample, IoStatsSource, IoStatsTable, QueueIoStats};
