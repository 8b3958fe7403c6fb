//! Any medium as a disk of virtual machines, over vhost-user.
//!
//! ```text
//!   Unix socket ── Connection ── vhost::Server ──▶ Guest ──▶ Table: memory of the front end
//!                                                    │
//!                                                    └─▶ a Lane for each queue that runs, a light
//!                                                        thread: Slots ── ring, record, requests
//!                                                                  └───── Backend
//! ```
//!
//! The data of a request lie in the guest's memory, and that is where the backend reads and writes
//! them. A lane that has nothing to do asks its ring for a kick and sleeps; while it looks, it wants
//! none. It calls when the driver asked for it.
//!
//! One front end at a time has the disk. What it had is gone with it: its lanes end once the medium
//! has answered, its memory is let go, and the next is let in.
//!
//! What is in flight is recorded in memory that the front end keeps, if it wants that: then a server
//! that was killed and started again does again what was not answered, and nobody sees an error.

mod disk;
mod guest;
mod lane;
mod memory;
mod poller;
mod post;
mod server;
mod slots;
mod stand;
#[cfg(test)]
mod tests;

pub use server::{Plan, Server, id, shaped};
