//! Threads that turn: poll while busy, sleep while idle.
//!
//! A *reactor* is an OS thread on a core of its own that turns for ever. On it live *light threads*:
//! a name, a mailbox and some *pollers*, which are components that do a bounded amount of work when
//! they are polled and never block. What belongs to a light thread is touched by nobody else, so
//! nothing in it is locked; whoever wants something from it sends it a message. A light thread may be
//! moved to another reactor between two turns, with its pollers, its mailbox and its channels.
//!
//! ```
//! use base::Span;
//! use host::{Clock, Cores};
//! use tenmil_reactor::{Context, Found, ReactorOptions, Reactors, Registration, ThreadPlan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &Clock::start())?;
//! let beat = Registration::timed("beat", Span::from_ms(10), |_: &mut Context<'_>| Found::Work);
//! let thread = reactors.spawn(ThreadPlan::new("heart").poller(beat))?;
//! let (send, answer) = std::sync::mpsc::channel();
//! thread.call(move |context| drop(send.send(context.name().to_owned()))).map_err(|_| "full")?;
//! assert_eq!(answer.recv()?, "heart");
//! reactors.stop();
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | write a component | [`Poller`], [`Registration`], [`WokenBy`], [`Context`] |
//! | start threads and talk to them | [`Reactors`], [`ThreadPlan`], [`Handle`], [`Message`] |
//! | write with async and await | [`task`] |
//! | use one object from many threads | [`Object`], [`Shared`], [`Channel`] |
//! | watch and steer | [`Directory`], [`Sample`], [`Event`], [`PollMode`] |
//! | decide who lives where, and how fast | [`schedule`], [`governor`], [`balance`] |
//! | run it all in simulated time | [`Assembly`], [`Stopwatch`], [`host::Turn`] |
//! | look for work as patiently as a reactor | [`Spell`] |
//!
//! Who sleeps, when, and why nothing is forgotten meanwhile is told in `reactor/idle.rs`.

#![forbid(unsafe_code)]

pub mod balance;
mod channel;
mod context;
mod directory;
mod event;
pub mod governor;
mod latency;
mod lookout;
mod message;
mod panicked;
mod poller;
mod reactor;
mod reactors;
mod refused;
pub mod schedule;
mod spell;
pub mod task;
mod thread;
mod timers;
mod watch;
#[cfg(test)]
mod world;

pub use channel::{Channel, Object, Shared};
pub use context::{Context, NotAdded};
pub use directory::{
    Directory, NotSpawned, PollerSample, ReactorId, ReactorSample, Sample, ThreadId, ThreadSample,
};
pub use event::{Culprit, Event, Events, Noted, PollerPanicked};
pub use latency::MeanLatency;
pub use lookout::{ENDLESS, Lookout};
pub use message::{Call, Handle, Message};
pub use poller::{Found, Parting, Poller, PollerId, Registration, WakeKind, WokenBy};
pub use reactor::{Assembly, Reactor, ReactorOptions};
pub use reactors::Reactors;
pub use refused::Refused;
pub use spell::{PollMode, REST_MAX, REST_MIN, SPELL_MAX, SPELL_MIN, Spell};
pub use thread::ThreadPlan;
pub use watch::Stopwatch;
