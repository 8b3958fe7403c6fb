//! vhost-user-blk server: presents any block device as a virtio disk of virtual machines.
//!
//! ```text
//!   Unix socket ── Connection ── tenmil_vhost_user::Server ──▶ Endpoint ──▶ Table: memory of the front end
//!                                                     │
//!                                                     └─▶ a Virtqueue for each running queue, on
//!                                                         a light thread of its own:
//!                                                         RequestTable ── ring, record
//!                                                              └───────── I/O channel
//! ```
//!
//! Data of a request are read and written in guest memory, without a copy. An idle virtqueue
//! enables kicks and sleeps; while it polls, it disables them. It signals the call eventfd when the
//! driver has requested an interrupt.
//!
//! One front end at a time has the disk. When it disconnects, its virtqueues end once the device
//! has completed their requests; then its memory is released and the next front end is accepted.
//!
//! If the front end supports it, requests in flight are recorded in memory that the front end
//! keeps. A server that was killed and restarted then executes again what had not completed, and
//! the guest sees no error.

mod disk;
mod endpoint;
mod guest_memory_table;
mod poller;
mod queue_mailbox;
mod request_table;
mod server;
#[cfg(test)]
mod tests;
mod vhost_block_device;
mod virtqueue;

pub use server::{Server, ServerConfig, adapt_device, device_id_of_uri};
