//! SSDs on the PCI bus, by Linux's VFIO: `pcie:0000:5e:00.0` names one.
//!
//! ```text
//!   Attached ─▶ PcieBus ── vfio::Function: BAR 0, vectors, reset
//!                  ├ rings and data: memory that the IOMMU maps for it
//!                  └ doorbells: words of BAR 0
//! ```

mod bus;
mod kind;
mod name;
mod registers;
mod vector;

use dma::Regions;
use host::Clock;

use self::bus::PcieBus;
pub use self::kind::Kind;
pub use self::name::PcieName;
use crate::Refused;
use crate::attached::{self, Attached};
use crate::identify::Ask;

/// Takes the function from VFIO, and brings it up.
fn attach(name: &PcieName, regions: &Regions, clock: Clock) -> Result<Attached<PcieBus>, Refused> {
    let bus = PcieBus::open(name, regions)?;
    Attached::call(&bus, &name.wanted, regions, clock)
}

/// Lets `ask` ask the controller that `name` names.
pub(crate) fn with_controller(name: &PcieName, ask: Ask<'_>) -> Result<(), Refused> {
    attached::with_controller(attach(name, &Regions::new(8), Clock::start())?, ask)
}
