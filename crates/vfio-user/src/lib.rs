//! vfio-user protocol, both ends, without I/O: bytes and descriptors in, events out.
//!
//! ```text
//!            Client                                        Server
//!   map, read, set_irqs … ──▶ outbox ─▶ bytes, files ─▶ inbox ──▶ Call ──▶ owner
//!   Answer ◀── inbox ◀─ bytes, files ◀─ outbox ◀──────── done, data, refuse ──┘
//!                                                 ◀───── dma_read, dma_write
//! ```
//!
//! Nothing here does I/O or uses file descriptors: a descriptor is an opaque value of type `F`. An
//! end announces with `receive_len` how many bytes it can receive next, and never spans two messages:
//! this is how a descriptor is attributed to its message, because the kernel delivers it with the
//! first byte that it was sent with.
//!
//! The input of the peer is validated and bounded, and each [`Violation`] names what was found and
//! what was expected. A violation that leaves the stream parseable is answered with an errno; any
//! other one ends the connection.
//!
//! [`config_space`] is the PCI configuration space of an NVMe controller.
//!
//! Section names refer to the vfio-user Protocol Specification published by QEMU
//! (`docs/interop/vfio-user.rst`), version 0.1. Structures that it takes from the kernel use the
//! values of `linux/vfio.h`.

#![forbid(unsafe_code)]

mod body_codec;
pub mod client;
pub mod config_space;
pub mod fuzz;
mod header;
mod irq;
mod message_parser;
mod region;
mod send_queue;
pub mod server;
#[cfg(test)]
mod tests;
mod version_capabilities;
mod violation;

pub use client::{Client, ClientEvent};
pub use header::{Command, HEADER_BYTES};
pub use irq::{IrqAction, IrqInfo, IrqSelection, IrqSet};
pub use region::{RegionInfo, SparseMmapArea};
pub use send_queue::OutgoingMessage;
pub use server::{DeviceInfo, PendingReply, Request, Server};
pub use version_capabilities::VersionCapabilities;
pub use violation::{Errno, Violation};

/// Region indices of a PCI device (`VFIO_PCI_*_REGION_INDEX`).
pub mod region_index {
    /// BAR 0.
    pub const BAR0: u32 = 0;
    /// Configuration space.
    pub const CONFIGURATION: u32 = 7;
    /// Number of regions of a PCI device.
    pub const COUNT: u32 = 9;
}

/// Interrupt indices of a PCI device (`VFIO_PCI_*_IRQ_INDEX`).
pub mod irq_index {
    /// INTx.
    pub const INTX: u32 = 0;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Device error.
    pub const ERROR: u32 = 3;
    /// Request to release the device.
    pub const REQUEST: u32 = 4;
    /// Number of interrupt kinds of a PCI device.
    pub const COUNT: u32 = 5;
}
