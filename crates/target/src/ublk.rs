//! Any medium as a local block device, through Linux's ublk.
//!
//! ```text
//!   /dev/ublkb0 ── kernel ─┬─ queue 0: Driver ── Tags ── Backend     a light thread each, tied to
//!                          └─ queue 1: Driver ── Tags ── Backend     the reactor where it began
//!   /dev/ublk-control ──── Server: make it or take it over, show it, take it away
//! ```
//!
//! Data are copied between the request in the kernel and memory of ours by a call on the device
//! (user copy), so a backend has the same memory from the first request to the last. Where the kernel
//! lends them and the medium takes what is lent (zero copy), they are named by segments that have no
//! address here, and go all the way through the block layer as others do.
//!
//! A device whose medium outlives this process outlives it, too: if the process dies, what is asked
//! of the disk waits, and whoever serves the same thing at the same number goes on with it. What was
//! not answered is asked again. A device over memory has nothing to go on with, and fails at once.

mod claim;
mod disk;
mod driver;
mod poller;
mod refused;
mod server;
mod tags;
#[cfg(test)]
mod tests;

pub use refused::Refused;
pub use server::{Limits, News, Plan, Server, shaped, signature};
pub use tags::Done;
