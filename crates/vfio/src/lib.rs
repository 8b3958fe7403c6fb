//! A PCI function that Linux's VFIO has handed to this process: its BARs, its interrupts, and which
//! memory it reaches.
//!
//! ```text
//!   Container ── IOMMU: what is mapped, and nothing else, is reached
//!       ▲
//!     group N ── every function that the IOMMU cannot tell apart
//!       └── Function: configuration space, BARs, vectors, reset
//! ```
//!
//! A function is taken through its group or by its own door with iommufd: `opening.rs` shows both.
//!
//! What is promised: a function reaches only what was mapped for it, and what was mapped stays memory
//! of a table of regions that the container keeps. Where there is [no IOMMU](Isolation::None) only the
//! second half is: it is given addresses of such memory, and reaches whatever it likes. A function that
//! is pulled reads as ones and does not end the process. Everything goes back to the kernel when the
//! last handle is dropped.

mod call;
mod configuration;
mod container;
mod error;
mod function;
mod group;
mod iommu;
mod iommufd;
mod opening;

pub use configuration::Configuration;
pub use container::Container;
pub use error::{NotAttached, NotMapped};
pub use function::{Bar, Function, Isolation, Place, Way};
