//! The NVMe/TCP door: subsystems, served over streams of bytes.
//!
//! ```text
//!   Service   subsystems, who may use them, the memory for all of it
//!   Server    doors, and a thread that finds each guest a reactor
//!   Guest     a connection: Stream → tcp::Controller → an admin queue or an I/O queue → Stream
//! ```
//!
//! Without a thread and without a socket: [`Service::accept`] takes any [`base::Stream`] and returns
//! a [`Guest`], whose [`turn`](Guest::turn) does everything that can be done just now, until it
//! [is over](Guest::is_over).
//!
//! A command enters the ring of its [`ctrl::queue::Queue`] when its buffer is there and, if it
//! writes, all its data have come; so the medium reaches all data where they lie. A host is asked for
//! data when there is room for them, and not before.

mod admin;
mod admission;
mod association;
mod connect;
mod discovery;
pub mod fuzz;
mod guest;
mod injected_bugs;
mod io;
mod kept;
mod memory;
mod news;
mod offer;
mod outgoing;
#[cfg(test)]
mod plant;
mod poller;
mod rooms;
mod roster;
mod seat;
mod server;
mod service;
#[cfg(test)]
mod tests;

pub use admission::AdmissionLimits;
pub use guest::Guest;
pub use injected_bugs::InjectedBugs;
pub use kept::{MemoryDirectory, StateDirectory};
pub use memory::Budget;
pub use news::{News, Reason};
pub use offer::{ControllerModel, Hosts, OfferChange, OfferPlan};
pub use roster::ConnectionSample;
pub use server::{Placement, Server, ServerPlan};
pub use service::{DiscoveryName, Limits, Port, Service};
