//! NVMe host: initialization, supervision and use of a controller.
//!
//! ```text
//!   cold, one per controller                      hot, one per thread
//!   ------------------------                      -------------------
//!   Bringup     registers, reset, ready           QueuePair      rings, slots, doorbells
//!   Controller  identify, queues, namespaces,     NamespaceQueue blocks to commands
//!               events, deadlines, shutdown
//!         \_____________________ queue_link _____________________/
//!            running with a connection, quiescing, frozen, released; timeouts
//! ```
//!
//! Nothing in this crate blocks, reads a clock or starts a thread. The time is an argument;
//! [`Controller::poll`] performs a bounded amount of work, and [`Controller::wake_at`] returns the time
//! of the next call. Registers and memory are accessed through [`tenmil_base::Mmio`] and [`tenmil_base::Dma`], so the
//! same code drives a physical, an emulated and a simulated function.
//!
//! All data from a controller are checked. Memory that a controller may still access is not returned to
//! its owner: a command ends only when the controller completes it, when the controller has been
//! disabled, or when its DMA has been revoked.

#![forbid(unsafe_code)]

pub mod bringup;
mod controller;
mod data_pointer;
mod error;
mod event;
#[cfg(test)]
mod fake_device;
mod fast_path_options;
mod namespace;
mod namespace_queue;
mod queue_link;
#[cfg(test)]
mod queue_link_tests;
mod queue_pair;
mod slot_table;
mod split;
mod sync;

pub use controller::{
    AdminQueueSetup, ArmResult, CmbMode, CmbUnavailable, Controller, ControllerLimits,
    ControllerOptions, ControllerState, FirmwareDownloadCommands, Identity, IoQueueParams,
    IoQueueSetup, OptionalIoCommands, QueuePairOptions, QueueStep, QueueTransports, Quirks,
    RingQueues, Shutdown, ShutdownNotification, StepResult, arm_interrupt,
};
pub use data_pointer::{
    BuiltDataPointer, DataPointerError, ListPool, Pointer, SegmentListCursor, SglSupport,
};
pub use error::{CmbRegisterError, ControllerError, InvalidValue, RequestError, ResetCause};
pub use event::{Event, NamespaceError};
pub use fast_path_options::{CompletionDoorbell, FastPathOptions};
pub use namespace::{CopyLimits, INSTANCE, IoPreferences, Namespace, NamespaceIds, Protection};
pub use namespace_queue::{
    BlockRange, BlocksMax, CompareAndWrite, Metadata, NamespaceQueue, NamespaceView,
    ProtectionChecks, QueueSizes, RawSubmitError,
};
pub use queue_link::{
    ABORTS_MAX, ControllerLinkEnd, LinkSignals, QueueLinkEnd, QueueState, ResetReason,
    TimedOutCommand, create_link,
};
pub use queue_pair::{
    AttachmentOf, CompletionSink, DataPointers, DoorbellSide, Injection, InjectionSide, PointerOf,
    QueueDoorbell, QueueFull, QueueMemory, QueuePair, QueueSetup, QueueStats, RingTransport,
    ShadowDoorbell, ShadowSlot, SplitTracker, Transport,
};
pub use slot_table::{InvalidCompletion, slot_mask};
