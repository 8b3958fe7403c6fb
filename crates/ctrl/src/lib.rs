//! The controller's half of NVMe: everything between a ring of commands and a medium.
//!
//! ```text
//!            registers, doorbells, vectors                     one thread
//!   host ──▶ front::MemoryFrontEnd ──▶ controller::Controller  admin, features, reservations
//!                 │                          │
//!                 │ creates, deletes         │ namespace::Namespaces, an immutable picture
//!                 ▼                          ▼
//!            queue::Queue ──────────▶ base::Backend            any reactor
//!            fetch, decode, check, translate, submit, poll, complete
//! ```
//!
//! A command is a state machine from the first day: a host memory that answers many turns later
//! and a medium that answers out of order are the normal case, and the one that answers at once is
//! the fast one. There is no transport in here; rings and registers reach it through the seams of
//! [`base`], and time is an argument.

#![forbid(unsafe_code)]

mod buffers;
pub mod controller;
mod doorbell;
pub mod front;
pub mod fuzz;
pub mod namespace;
pub mod queue;
mod transfer;

pub use buffers::Buffers;
pub use doorbell::{DoorbellPage, STRIDE, SharedDoorbell};
pub use transfer::SGLS;
