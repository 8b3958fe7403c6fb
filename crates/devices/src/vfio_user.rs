//! NVMe controllers of other processes over vfio-user, named `vfio-user:PATH`.
//!
//! ```text
//!   AttachedController ─▶ VfioUserBus ── ConnectionHandle: the connection and its requests
//!                           ├ rings and data: memory that the server maps
//!                           └ doorbells: a page mapped from the server, or messages      (registers.rs)
//! ```
//!
//! The driver is the same as for every SSD. Data in memory that cannot be shared with another
//! process are transferred by messages, which is correct but slow.

mod bus;
mod connection;
mod kind;
mod registers;
#[cfg(test)]
mod tests;
mod vector;
mod vfio_user_uri;

use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, StepTimer};

use self::bus::VfioUserBus;
use crate::attached_controller::{self, AttachedController};
use crate::identify::AdminAccessFn;
use tenmil_base::Error;

pub use kind::VfioUserKind;
pub use vfio_user_uri::VfioUserUri;

/// Connects to the server and initializes the controller.
fn attach(
    name: &VfioUserUri,
    regions: &RegionTable,
    clock: Clock,
) -> Result<AttachedController<VfioUserBus>, Error> {
    let bus = VfioUserBus::connect(name, regions, clock)?;
    AttachedController::attach(&bus, &name.wanted, regions, &mut StepTimer::begin(clock))
}

/// Runs `ask` with admin access to the controller that `name` names.
pub fn with_controller(name: &VfioUserUri, ask: AdminAccessFn<'_>) -> Result<(), Error> {
    attached_controller::with_controller(attach(name, &RegionTable::new(4), Clock::start())?, ask)
}
