//! The back end's half of a vhost-user block device: bytes and descriptors in, events out.
//!
//! ```text
//!   socket ── bytes, files ──▶ Server ── Request ──▶ owner        what the rings are, where memory lies
//!                                 ▲──── done, refuse ──┘
//!
//!   guest memory ── Space: guest addresses become segments
//!      └─ Ring ── chain ──▶ Chain ── blk::Ask ──▶ owner           what the guest asks for
//!          ▲──── push, publish ──────────────────┘
//!          └─ Record: what is in flight, in memory that outlives this process
//! ```
//!
//! Nothing here does I/O or knows what a file descriptor is: a descriptor is an `F` that is handed
//! through, and memory is whatever implements [`base::Memory`].
//!
//! Neither the front end nor the guest is believed. A message that cannot be followed is a
//! [`Violation`], a ring that makes no sense is [`Broken`]; each says what was found and what was
//! expected.
//!
//! Sections are those of the vhost-user protocol as QEMU publishes it
//! (`docs/interop/vhost-user.rst`), and of the Virtual I/O Device specification 1.2 ("virtio"). All
//! numbers have their low byte first: in messages, which are in the order of the machine, because there
//! are only such machines, and in rings because virtio 1 says so.

#![forbid(unsafe_code)]

pub mod blk;
mod bytes;
mod code;
pub mod features;
pub mod fuzz;
mod inbox;
pub mod inflight;
mod payload;
mod request;
mod ring;
mod server;
mod space;
#[cfg(test)]
mod tests;
mod violation;

pub use code::{Code, HEADER_BYTES};
pub use request::{Answer, Call, InflightArea, MemoryArea, MemoryChange, Offer, Request, Start};
pub use ring::{Broken, Chain, QUEUE_SIZE_MAX, Ring, RingPlace};
pub use server::{CONFIG_CHANGED, Server};
pub use space::{Area, Outside, Space};
pub use violation::Violation;
