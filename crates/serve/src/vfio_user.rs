//! vfio-user server: presents NVMe controllers as PCI devices to virtual machines and other
//! drivers.
//!
//! ```text
//!   Unix socket ── Connection ── tenmil_vfio_user::Server ──▶ Endpoint ──▶ Device: registers, configuration space
//!                                                   │            └─ controller front end ── block devices
//!                                                   ├──▶ DmaMappings: client memory by address
//!                                                   └──▶ IrqEventFds: eventfds of the client
//! ```
//!
//! One client at a time has the device. Further clients are rejected with `EBUSY` until it has
//! disconnected. A disconnect disables the controller and releases the client's memory once no DMA
//! to it is outstanding.
//!
//! Memory that a client shares by file descriptor is accessed directly. Other memory is accessed
//! with DMA_READ and DMA_WRITE messages.
//!
//! Whether doorbells can be mapped is fixed when the server starts. With mapped doorbells the
//! reactor must poll them and never sleeps; without, a doorbell write is a message on the socket,
//! which wakes it.

mod client_memory;
mod doorbells;
mod endpoint;
mod irq_eventfds;
mod nvme_pci_function;
mod poller;
mod rejected_clients;
mod server;
#[cfg(test)]
mod tests;

pub use nvme_pci_function::ControllerOptions;
pub use server::{Server, ServerConfig};
