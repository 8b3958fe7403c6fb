//! A vfio-user connection, both ends: bytes and descriptors in, events out.
//!
//! ```text
//!            Client                                        Server
//!   map, read, set_irqs … ──▶ outbox ─▶ bytes, files ─▶ inbox ──▶ Call ──▶ owner
//!   Answer ◀── inbox ◀─ bytes, files ◀─ outbox ◀──────── done, data, refuse ──┘
//!                                                 ◀───── dma_read, dma_write
//! ```
//!
//! Nothing here does I/O or knows what a file descriptor is: a descriptor is an `F` that is handed
//! through. An end says by `wanted` how many bytes it wants next, and never asks for bytes of two
//! messages at once: that is how a descriptor is known to belong to the message with which it came,
//! for the kernel gives it out with the first byte it was sent with.
//!
//! The peer is not believed. Whatever it sends has a limit, and each [`Violation`] says what was
//! found and what was expected. One that leaves the stream readable is answered with an error
//! number; one that does not ends the connection.
//!
//! [`function`] is what an NVMe controller looks like as a PCI function: its configuration space.
//!
//! Sections are those of the vfio-user Protocol Specification as QEMU publishes it
//! (`docs/interop/vfio-user.rst`), version 0.1. Numbers of structures that it takes from the kernel
//! are those of `linux/vfio.h`.

#![forbid(unsafe_code)]

mod bytes;
mod capabilities;
pub mod client;
pub mod function;
pub mod fuzz;
mod header;
mod inbox;
mod irq;
mod outbox;
mod region;
pub mod server;
#[cfg(test)]
mod tests;
mod violation;

pub use capabilities::Capabilities;
pub use client::{Answer, Client};
pub use header::{Command, HEADER_BYTES};
pub use irq::{IrqAction, IrqData, IrqSet, IrqShape};
pub use outbox::Outgoing;
pub use region::{Area, RegionShape};
pub use server::{Call, Device, Request, Server};
pub use violation::{Errno, Violation};

/// Indices of regions of a PCI device (`VFIO_PCI_*_REGION_INDEX`).
pub mod region_index {
    /// BAR 0.
    pub const BAR0: u32 = 0;
    /// Configuration space.
    pub const CONFIGURATION: u32 = 7;
    /// How many a PCI device has.
    pub const COUNT: u32 = 9;
}

/// Indices of interrupts of a PCI device (`VFIO_PCI_*_IRQ_INDEX`).
pub mod irq_index {
    /// The pin.
    pub const INTX: u32 = 0;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// The device has had an error.
    pub const ERROR: u32 = 3;
    /// The device wants to be released.
    pub const REQUEST: u32 = 4;
    /// How many a PCI device has.
    pub const COUNT: u32 = 5;
}
