//! vhost-user-blk back end without I/O: bytes and descriptors in, events out.
//!
//! ```text
//!   socket ── bytes, files ──▶ Server ── Request ──▶ owner        ring addresses, memory regions
//!                                 ▲──── done, refuse ──┘
//!
//!   guest memory ── Space: guest addresses become segments
//!      └─ Ring ── chain ──▶ Chain ── blk::Header ──▶ owner        requests of the guest
//!          ▲──── push, publish ──────────────────┘
//!          └─ Record: requests in flight, in memory that outlives this process
//! ```
//!
//! Nothing here does I/O or uses file descriptors: a descriptor is an opaque value of type `F`, and
//! memory is any implementation of [`tenmil_base::Memory`].
//!
//! The input of front end and guest is validated. An invalid message is a [`Violation`], an invalid
//! ring is [`VringError`]; each names what was found and what was expected.
//!
//! Section names refer to the vhost-user protocol published by QEMU (`docs/interop/vhost-user.rst`)
//! and to the Virtual I/O Device specification 1.2 ("virtio"). All integers are little-endian: in
//! messages because the protocol uses the byte order of the machine and all supported machines are
//! little-endian, in rings because virtio 1 requires it.

#![forbid(unsafe_code)]

pub mod features;
pub mod fuzz;
mod guest_memory;
pub mod inflight;
mod message_parser;
mod message_types;
mod payload;
mod payload_reader;
mod request;
mod server;
#[cfg(test)]
mod tests;
mod violation;
pub mod virtio_blk;
mod vring;

pub use guest_memory::{GuestMemory, GuestRegion, InvalidAddress};
pub use message_types::{HEADER_BYTES, MessageType};
pub use request::{
    BackendConfig, InflightBuffer, MemoryChange, MemoryRegionDesc, OwnerRequest, PendingReply,
    QueueStartParams, ReplyDisposition,
};
pub use server::{CONFIG_CHANGED, Server};
pub use violation::Violation;
pub use vring::{DescriptorChain, QUEUE_SIZE_MAX, Vring, VringAddresses, VringError};
