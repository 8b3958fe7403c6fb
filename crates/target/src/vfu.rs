//! Controllers as PCI devices for virtual machines and other drivers, over vfio-user.
//!
//! ```text
//!   Unix socket ── Connection ── vfu::Server ──▶ Guest ──▶ Device: registers, configuration space
//!                                                  │            └─ ctrl front ── medium
//!                                                  ├──▶ Maps: memory of the client, by address
//!                                                  └──▶ Lines: event descriptors of the client
//! ```
//!
//! One client at a time has the device; another is told so and sent away, and is let in once the
//! first has left. What a client had is gone with it: its memory is let go once nothing touches it any
//! more, and the controller is disabled.
//!
//! A client that shares its memory by descriptor has it read and written where it lies. What it does
//! not share so is asked for and sent by message.
//!
//! Whether doorbells can be mapped is fixed when the server starts. If they can, whoever serves looks
//! at them for ever; if not, a write of one comes by the socket, which wakes him.

mod device;
mod doorbells;
mod guest;
mod lines;
mod memory;
mod poller;
mod server;
#[cfg(test)]
mod tests;
mod visitors;

pub use device::DeviceOptions;
pub use server::{Plan, Server};
