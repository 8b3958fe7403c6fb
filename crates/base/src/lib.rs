//! Common types, and the interfaces behind which real and simulated implementations are exchanged.
//!
//! Types: [`Instant`] and [`Span`], [`Segment`] and [`RegionId`], [`Request`], [`IoCompletion`],
//! [`IoStatus`], [`ErrorCategory`], a seeded generator ([`Random`]), a mergeable [`Histogram`], a
//! one-shot channel ([`oneshot()`]), a [`Mailbox`] for rare messages to a thread that polls.
//!
//! Interfaces, each implemented for real hardware or sockets and in the simulator:
//!
//! | interface | side | subject |
//! |---|---|---|
//! | [`Mmio`], [`Doorbell`] | host | registers of a controller |
//! | [`Dma`], [`SubmissionRing`], [`CompletionRing`] | host | memory accessible by a controller |
//! | [`HostMemory`], [`RingMemory`], [`RingEntries`] | controller | memory of its host, and rings in it |
//! | [`Interrupts`] | controller | interrupt vectors of its host |
//! | [`InterruptVector`] | host | vector to sleep on |
//! | [`Wake`] | any | wakes the other side |
//! | [`Memory`] | any | bytes behind segments |
//! | [`Stream`] | any | connected socket |
//! | [`IoChannel`], [`BlockDevice`] | any | block device; the only dynamic dispatch of an I/O |
//! | [`ChannelWakeup`] | any | sleep and wake-up of the thread that polls an I/O channel |
//!
//! Channels that one owner uses together may share resources of their drivers ([`ChannelGroup`]).
//!
//! There is deliberately no interface for time: time is an argument.

#![forbid(unsafe_code)]

mod block_device;
mod channel_group;
mod controller_access;
mod counter;
mod error;
mod error_category;
mod histogram;
mod host_memory;
mod io_stats;
mod mailbox;
#[cfg(test)]
mod mailbox_tests;
mod memory;
mod oneshot;
mod random;
mod request;
mod reservation;
mod stream;
mod sync;
pub mod text;
mod time;
mod utc_time;
mod wake;

pub use block_device::{
    BlockDevice, BlockExtent, DoorbellStats, Durability, ExtentKind, HoleReporting, IoChannel,
    Limits, MediumGuard, MediumMemory, OperationSet,
};
pub use channel_group::ChannelGroup;
pub use controller_access::{
    BarMapError, BarRange, CompletionEntry, CompletionRing, Dma, DmaMapError, Doorbell, Mmio,
    SubmissionRing, entry_from_dwords, entry_to_dwords,
};
pub use counter::Counter;
pub use error::Error;
pub use error_category::ErrorCategory;
pub use histogram::{
    CoarseHistogram, Histogram, LiveCoarseHistogram, LiveHistogram, LiveLogLinearHistogram,
    LogLinearHistogram,
};
pub use host_memory::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, DirectAccessWindow, HostMemory,
    Interrupts, RingEntries, RingMemory, SIMPLE_IO_WORDS,
};
pub use io_stats::{IoCounters, IoStats, OperationStats, QueueDepthSamples};
pub use mailbox::{Mailbox, SharedWaker};
pub use memory::{InvalidSegment, Memory, RegionId, Segment};
pub use oneshot::{OneshotReceiver, OneshotSender, oneshot};
pub use random::Random;
pub use request::{CompletionBatch, IoCompletion, IoStatus, Operation, Request, RequestFlags};
pub use reservation::{ReservationControl, ReservationHolder};
pub use stream::{RecvResult, SecureChannel, SendSlice, Stream, StreamError};
pub use time::{Instant, Span};
pub use utc_time::UtcTime;
pub use wake::{ChannelWakeup, InterruptVector, Wake, WakeSource};
