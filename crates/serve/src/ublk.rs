//! ublk server: presents any block device as a disk of this machine's Linux.
//!
//! ```text
//!   /dev/ublkb0 ── kernel ─┬─ queue 0: Driver ── Tags ── I/O channel     light threads, pinned to
//!                          └─ queue 1: Driver ── Tags ── I/O channel     their first reactor
//!   /dev/ublk-control ──── Server: create or take over the device, start, stop and delete it
//! ```
//!
//! Data are copied between a kernel request and a buffer of the server with reads and writes on the
//! character device (user copy), so the I/O channel uses the same buffers for the lifetime of a
//! queue. If the kernel supports zero copy and the device accepts registered buffers, requests
//! carry segments without a local address, which pass through the block layer like any other.
//!
//! A disk over persistent storage survives the server: if the process dies, requests wait, and a
//! server that exports the same device under the same number takes over (user recovery). Requests
//! without a completion are issued again. A disk over volatile memory cannot be recovered, and its
//! requests fail at once.

mod disk;
mod error;
mod poller;
mod queue_driver;
mod server;
mod tags;
mod takeover;
#[cfg(test)]
mod tests;

pub use server::{QueueCountAndDepth, Server, ServerConfig, UblkEvent, adapt_device, uri_hash};
pub use tags::UblkStats;
