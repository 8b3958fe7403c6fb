//! The host's half of NVMe: bringing a controller up, keeping it well, and talking to it.
//!
//! ```text
//!   cold, one per controller                      hot, one per thread
//!   ------------------------                      -------------------
//!   Bringup     registers, reset, ready           QueuePair      rings, slots, doorbells
//!   Controller  identify, queues, namespaces,     NamespaceQueue blocks to commands
//!               events, deadlines, shutdown
//!         \________________________ link ________________________/
//!                run, quiesce, freeze, release; overdue
//! ```
//!
//! Nothing in this crate blocks, reads a clock or starts a thread. Time comes in as an argument;
//! [`Controller::poll`] does a bounded amount of work and says when it wants to be called again.
//! Registers and memory come in as [`base::Mmio`] and [`base::Dma`], so the same code drives a real
//! function, an emulated one and a simulated one.
//!
//! What a controller says is checked and not believed. A memory that a controller may still touch
//! is not handed back: an unanswered command ends only when the controller completes it, when the
//! controller has been disabled, or when it has been cut off from memory.

#![forbid(unsafe_code)]

pub mod bringup;
mod controller;
mod data_pointer;
mod error;
mod event;
#[cfg(test)]
mod fake;
mod link;
mod namespace;
mod namespace_queue;
mod queue_pair;
mod slot;
mod split;
mod techniques;

pub use controller::{
    Armed, Controller, ControllerLimits, ControllerOptions, FirmwareChunks, Identity, IoCommands,
    MemoryBufferUse, NotInBuffer, QueuePairOptions, Quirks, Shutdown, ShutdownNotification, State,
    arm,
};
pub use data_pointer::{MemoryRefused, SglSupport};
pub use error::{BufferLie, ControllerError, Lie, Refusal, ResetCause};
pub use event::{Event, Unusable};
pub use link::{ABORTS_MAX, ControllerEnd, Order, Overdue, QueueEnd, ResetReason, link};
pub use namespace::{CopyLimits, INSTANCE, Names, Namespace, Preferences, Protection};
pub use namespace_queue::{
    BlocksMax, CompareAndWrite, Metadata, NamespaceQueue, NamespaceView, NotSubmitted,
    ProtectionChecks, QueueSizes, Stretch,
};
pub use queue_pair::{
    Full, Injection, InjectionSide, QueueDoorbell, QueueMemory, QueuePair, QueueSetup, QueueStats,
    ShadowDoorbell, ShadowPlace, Side,
};
pub use slot::Nonsense;
pub use techniques::{CompletionCopy, CompletionDoorbell, Techniques};
