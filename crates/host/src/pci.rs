//! NVMe functions on the PCI bus: which there are, who uses them, and taking one from the kernel and
//! giving it back.
//!
//! ```text
//!   judge ──> Verdict: obstacles, or steps
//!   bind  ──> Ledger (former driver, written down first) ──> steps: override, unbind, probe, give
//!   unbind ─> Ledger ──> the same steps towards what was before
//! ```
//!
//! A disk that anybody uses is not taken, unless its serial number is said. What is taken can be
//! given back after a crash at any step: [`unbind()`] looks at what there is, and not at how far
//! [`bind()`] had come.

mod address;
mod bind;
mod function;
mod kernel;
mod ledger;
mod obstacle;
mod refused;
mod step;
#[cfg(test)]
mod tests;
mod unbind;
mod verdict;

pub use self::address::{Address, NotAnAddress};
pub use self::bind::{Bound, bind};
pub use self::function::{Controller, Disk, Function, Group, Neighbour};
pub use self::kernel::Kernel;
pub use self::ledger::recorded;
pub use self::obstacle::Obstacle;
pub use self::refused::BindError;
pub use self::step::Step;
pub use self::unbind::{Which, plan_back, unbind};
pub use self::verdict::{Mark, Terms, Verdict, judge};

/// The kernel's driver that lets a program have a function.
pub const VFIO: &str = "vfio-pci";
