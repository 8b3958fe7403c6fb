//! NVMe controllers of other processes, over vfio-user: `vfio-user:PATH` names one.
//!
//! ```text
//!   VfuMedium, VfuChannel, … ─▶ Attached ── nvme::Controller (locked to make a queue, or to tend)
//!         │                        └── a thread that tends: messages, time-outs, removal
//!         ├ rings and data: memory that the other process maps        (reach.rs)
//!         └ doorbells: a page that it lets us map, or messages        (registers.rs)
//! ```
//!
//! The driver is the one of every SSD. Data that lie in memory which cannot be shown to another
//! process are sent and fetched by message: right, and slow.

mod ask;
mod attached;
mod channel;
mod kind;
mod link;
mod name;
mod reach;
mod registers;
mod vector;

pub(crate) use ask::with_controller;
pub use kind::Kind;
pub use name::VfuName;
