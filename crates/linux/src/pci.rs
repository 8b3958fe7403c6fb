//! NVMe functions on the PCI bus: discovery, users, and binding to vfio-pci and back.
//!
//! ```text
//!   plan_bind ──> BindPlan: obstacles, or steps
//!   bind  ──> BindRecords (original driver, recorded first) ──> steps: override, unbind, probe, chown
//!   unbind ─> BindRecords ──> the same steps towards the original state
//! ```
//!
//! A disk in use is not unbound, unless its serial number is given explicitly. A bound function can
//! be restored after a crash at any step: [`unbind()`] depends on the current state, not on how far
//! [`bind()`] had come.

mod address;
mod bind;
mod bind_records;
mod error;
mod function;
mod kernel;
mod obstacle;
mod plan;
mod step;
#[cfg(test)]
mod tests;
mod unbind;

pub use self::address::{Address, ParseAddressError};
pub use self::bind::{BoundDevice, bind};
pub use self::bind_records::recorded;
pub use self::error::BindError;
pub use self::function::{Controller, Disk, Function, GroupMember, IommuGroup};
pub use self::kernel::Kernel;
pub use self::obstacle::BindObstacle;
pub use self::plan::{BindPlan, BindRequest, DiskSignature, plan_bind};
pub use self::step::BindStep;
pub use self::unbind::{UnbindSelection, plan_unbind, unbind};

/// Kernel driver that gives a function to a user-space program.
pub const VFIO: &str = "vfio-pci";
