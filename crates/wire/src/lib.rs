//! NVMe bytes to meaning and back.
//!
//! This crate holds no state and does no I/O. It knows what the bits of NVM Express Base 2.1 and
//! NVM Command Set 1.1 mean, and nothing about what to do with them.
//!
//! - [`Command`], [`Completion`] and [`Status`] are what travels in queues; [`admin`] and [`io`]
//!   give each command a structure of its own.
//! - [`register`] is what lies in a controller's BAR.
//! - [`identify`], [`log`] and [`feature`] are the pages a controller answers with.
//! - [`pointer`], [`sgl`] and [`protection`] say where data lie and how they are guarded.
//! - [`layout`] declares structures: each field once, with its place and its meaning.
#![forbid(unsafe_code)]

pub mod command;
pub mod completion;
#[doc(hidden)]
pub mod element;
pub mod layout;
pub mod opcode;
pub mod register;
pub mod sgl;
pub mod status;

pub use command::{Command, DataPointer, Fuse};
pub use completion::Completion;
pub use layout::{Layout, Short};
pub use opcode::{AdminOpcode, FabricsType, IoOpcode, Transfer};
pub use status::Status;
