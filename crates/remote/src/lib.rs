//! An SSD behind a network, as `nvme` sees it: registers, and rings in memory.
//!
//! ```text
//!   nvme::Controller ── Front ─────── admin rings ──┐
//!   nvme::NamespaceQueue ── I/O rings ── Lane ──────┴─ tcp::Host ── base::Stream ── peer
//! ```
//!
//! TCP carries rings: the driver of this house stays as it is, and so do its recoveries. What stands
//! at the other end of its rings is not a device but a connection for each.
//!
//! Nothing here blocks, reads a clock or knows a socket. Streams come from [`Dial`], time is an
//! argument. A [`Remote`] belongs to one thread, which looks after the controller; a
//! [`RemoteQueue`] belongs to the thread that submits to it, with its own connection.

#![forbid(unsafe_code)]

mod berth;
mod caches;
mod dial;
mod exchange;
mod farewell;
mod flushes;
mod front;
mod hurry;
mod kept;
mod lane;
mod multipath;
mod opening;
mod options;
mod places;
mod policy;
mod queue;
mod reach;
mod remote;
mod rings;
mod silence;
mod sleep;
#[cfg(test)]
mod tests;
mod way;

pub use caches::Cache;
pub use dial::{Dial, Dialled};
pub use front::{Counts, Front};
#[doc(hidden)]
pub use hurry::begin_simulation;
pub use multipath::{
    Access, Multipath, MultipathOptions, MultipathQueue, PATHS_MAX, PathEvent, PathSetup,
    QueueTicket, Spread,
};
#[doc(hidden)]
pub use options::InjectedBugs;
pub use options::{NotAName, Options};
pub use policy::Policy;
pub use queue::RemoteQueue;
pub use reach::Reach;
pub use remote::{Calling, NotReached, Remote};
pub use rings::Bell;
pub use sleep::Sleep;
pub use tcp::DigestUse;
