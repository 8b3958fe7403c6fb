//! The words the whole house shares, and the seams at which the real world and the simulated one
//! are exchanged.
//!
//! Words: [`Instant`] and [`Span`], [`Segment`] and [`RegionId`], [`Request`], [`Answer`],
//! [`Outcome`], [`Blame`], a seeded generator ([`Random`]) and a mergeable [`Histogram`].
//!
//! Seams, each with an implementation in the machine wing and one in the simulator:
//!
//! | seam | whose view | of what |
//! |---|---|---|
//! | [`Mmio`], [`Doorbell`] | the host's | a controller's registers |
//! | [`Dma`], [`SubmissionRing`], [`CompletionRing`] | the host's | memory a controller can reach |
//! | [`HostMemory`], [`HostEntries`] | a controller's | the host it serves |
//! | [`Interrupts`] | a controller's | the vectors of its host |
//! | [`Vector`] | the host's | a vector to sleep on |
//! | [`Wake`] | anyone's | the other side, which may sleep |
//! | [`Memory`] | anyone's | bytes behind segments |
//! | [`Stream`] | anyone's | a socket to a peer |
//! | [`Backend`], [`Medium`] | everyone's | a block device; the only dynamic dispatch of an I/O |
//!
//! There is deliberately no seam for time: time is an argument.

#![forbid(unsafe_code)]

mod backend;
mod blame;
mod count;
mod device;
mod histogram;
mod host_memory;
mod memory;
mod random;
mod request;
mod reservation;
mod stream;
pub mod text;
mod time;
mod wake;

pub use backend::{Backend, DoorbellCounts, Durability, Extent, Holds, Limits, Medium, Support};
pub use blame::Blame;
pub use count::Count;
pub use device::{
    BarPart, CompletionEntry, CompletionRing, Dma, Doorbell, Mmio, NoDeviceMemory, NotMapped,
    SubmissionRing, entry_from_dwords, entry_to_dwords,
};
pub use histogram::{Histogram, LiveHistogram};
pub use host_memory::{
    Ended, Fault, HostEntries, HostMemory, Interrupts, PLAIN_WORDS, Progress, Ticket, Window,
};
pub use memory::{Memory, NoSuchMemory, RegionId, Segment};
pub use random::Random;
pub use request::{Answer, Answers, Flags, Operation, Outcome, Request};
pub use reservation::{ReservationHolder, Reservations};
pub use stream::{Broken, Received, Stream, Stretch};
pub use time::{Instant, Span};
pub use wake::{Vector, Wake, WakeSource};
