//! NVMe controllers of other processes, over vfio-user: `vfio-user:PATH` names one.
//!
//! ```text
//!   Attached ─▶ VfuBus ── Link: the connection, and what is asked over it
//!                  ├ rings and data: memory that the other process maps
//!                  └ doorbells: a page that it lets us map, or messages        (registers.rs)
//! ```
//!
//! The driver is the one of every SSD. Data that lie in memory which cannot be shown to another
//! process are sent and fetched by message: right, and slow.

mod bus;
mod kind;
mod link;
mod name;
mod registers;
#[cfg(test)]
mod tests;
mod vector;

use dma::Regions;
use host::{Clock, Steps};

use self::bus::VfuBus;
use crate::Refused;
use crate::attached::{self, Attached};
use crate::identify::Ask;

pub use kind::Kind;
pub use name::VfuName;

/// Connects to whoever serves the controller, and brings it up.
fn attach(name: &VfuName, regions: &Regions, clock: Clock) -> Result<Attached<VfuBus>, Refused> {
    let bus = VfuBus::connect(name, regions, clock)?;
    Attached::call(&bus, &name.wanted, regions, &mut Steps::begin(clock))
}

/// Lets `ask` ask the controller that `name` names.
pub(crate) fn with_controller(name: &VfuName, ask: Ask<'_>) -> Result<(), Refused> {
    attached::with_controller(attach(name, &Regions::new(4), Clock::start())?, ask)
}
