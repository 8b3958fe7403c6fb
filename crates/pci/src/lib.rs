//! PCI functions through Linux VFIO: BARs, interrupts and DMA mappings.
//!
//! ```text
//!   Container ── IOMMU: functions can access what is mapped, and nothing else
//!       ▲
//!     group N ── all functions that the IOMMU cannot isolate from each other
//!       └── Function: configuration space, BARs, vectors, reset
//! ```
//!
//! A function is opened through its group, or by its device node with iommufd: see `open.rs`.
//!
//! Guarantees: a function can access only memory that was mapped for it, and mapped memory belongs
//! to a region table that the container keeps alive. [Without an IOMMU](IommuMode::None) only the
//! second half holds: the function is given addresses of such memory, but can access all memory. A
//! removed function reads as all ones and does not crash the process. Everything is returned to the
//! kernel when the last handle is dropped.

mod config_space;
mod error;
mod group;
mod iommu_context;
mod iommu_interface;
mod iommufd;
mod open_function;
mod vfio_function;
mod vfio_ioctl;

pub use config_space::PciConfigSpace;
pub use error::{AttachError, DmaMapFailure};
pub use iommu_context::IommuContext;
pub use vfio_function::{IommuMode, KernelFilesRoot, MappedBar, VfioFunction, VfioInterface};
