//! NVMe functions on the PCI bus: discovery, users, and binding to vfio-pci and back.
//!
//! ```text
//!   plan_bind ──> BindPlan: obstacles, or steps
//!   bind  ──> BindRecords (original driver, recorded first) ──> steps: override, unbind, probe, chown
//!   unbind ─> BindRecords ──> the same steps towards the original state
//! ```
//!
//! A disk in use is not unbound, unless its serial number is given explicitly. A bound function can
//! be restored after a crash at any step: [`unbind_functions()`] depends on the current state, not on how far
//! [`bind_functions()`] had come.

mod bind;
mod bind_kernel;
mod bind_obstacle;
mod bind_plan;
mod bind_records;
mod bind_step;
mod error;
mod nvme_function;
mod pci_address;
#[cfg(test)]
mod tests;
mod unbind;

pub use self::bind::{BoundDevice, bind_functions};
pub use self::bind_kernel::BindKernel;
pub use self::bind_obstacle::BindObstacle;
pub use self::bind_plan::{BindPlan, BindRequest, DiskSignature, plan_bind};
pub use self::bind_records::functions_bound_by_tenmil;
pub use self::bind_step::BindStep;
pub use self::error::BindError;
pub use self::nvme_function::{
    GroupMember, IommuGroup, KernelController, KernelDisk, NvmeFunction,
};
pub use self::pci_address::{ParseAddressError, PciAddress};
pub use self::unbind::{UnbindSelection, plan_unbind, unbind_functions};

/// Kernel driver that gives a function to a user-space program.
pub const VFIO: &str = "vfio-pci";
