//! Reactors: threads that poll while busy and sleep while idle.
//!
//! A *reactor* is an OS thread, pinned to a core, that iterates over its *light threads*. A light
//! thread has a name, a mailbox and some *pollers*: components that do a bounded amount of work per
//! poll and never block. The state of a light thread is accessed by no other thread, so it needs no
//! locks; other threads send it messages. A light thread may migrate to another reactor between two
//! iterations, with its pollers, its mailbox and its channels.
//!
//! ```
//! use tenmil_base::Span;
//! use tenmil_linux::{Clock, CpuList};
//! use tenmil_reactor::{Context, PollResult, PollerBuilder, ReactorOptions, Reactors, ThreadBuilder};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactors = Reactors::start_on_cores(&CpuList::allowed_cpus(), &ReactorOptions::default(), &Clock::start())?;
//! let beat = PollerBuilder::polled_each_period("beat", Span::from_ms(10), |_: &mut Context<'_>| PollResult::Busy);
//! let thread = reactors.spawn(ThreadBuilder::new("heart").add_poller(beat))?;
//! let (send, reply) = std::sync::mpsc::channel();
//! thread.send_closure(move |context| drop(send.send(context.name().to_owned()))).map_err(|_| "full")?;
//! assert_eq!(reply.recv()?, "heart");
//! reactors.stop();
//! # Ok(())
//! # }
//! ```
//!
//! | task | items |
//! |---|---|
//! | write a component | [`Poller`], [`PollerBuilder`], [`PollerWake`], [`Context`] |
//! | start light threads, and send | [`Reactors`], [`ThreadBuilder`], [`ThreadHandle`], [`Message`] |
//! | write with async and await | [`task`] |
//! | use one object from many threads | [`SharedProvider`], [`ChannelProvider`], [`Channel`] |
//! | monitor and control | [`Registry`], [`StatisticsSample`], [`Event`], [`PollMode`] |
//! | diagnose | [`flight_recorder`], [`Watchdog`], [`Reactors::start_watchdog`] |
//! | place threads and set frequencies | [`thread_scheduler`], [`frequency_governor`], [`load_balancer`] |
//! | run everything in simulated time | [`UnstartedReactors`], [`TimeSource`], [`tenmil_linux::EventLoop`] |
//! | spin adaptively, as a reactor does | [`AdaptiveSpin`] |
//!
//! `reactor/idle.rs` describes when a reactor sleeps, and why no wake-up is lost.

#![forbid(unsafe_code)]

mod adaptive_spin;
mod context;
mod error;
mod event;
pub mod flight_recorder;
pub mod frequency_governor;
mod light_thread;
pub mod load_balancer;
mod mean_latency;
mod message;
mod panic_text;
mod poller;
mod reactor;
mod reactors;
mod registry;
#[cfg(test)]
mod simulation;
pub mod task;
mod thread_channel;
pub mod thread_scheduler;
mod time_accounting;
mod timer_heap;
mod watchdog;

pub use adaptive_spin::{AdaptiveSpin, PAUSE_MAX, PAUSE_MIN, PollMode, SPIN_MAX, SPIN_MIN};
pub use context::{AddPollerError, Context};
pub use error::ReactorError;
pub use event::{Event, EventBatch, EventRecord, PollerPanicked, SlowIterationCause};
pub use light_thread::ThreadBuilder;
pub use mean_latency::{LONG_LATENCY, MeanLatency};
pub use message::{Message, MessageFn, ThreadHandle};
pub use poller::{DetachReason, PollResult, Poller, PollerBuilder, PollerId, PollerWake, WakeKind};
pub use reactor::{Reactor, ReactorOptions, UnstartedReactors};
pub use reactors::{Reactors, ReactorsHandle};
pub use registry::{
    PollerSample, ReactorId, ReactorSample, Registry, SpawnError, StatisticsSample, ThreadId,
    ThreadSample,
};
pub use thread_channel::{Channel, ChannelProvider, SharedProvider};
pub use time_accounting::TimeSource;
pub use watchdog::{ProgressCheck, STALL_THRESHOLD, StallReport, StalledReactor, Watchdog};
