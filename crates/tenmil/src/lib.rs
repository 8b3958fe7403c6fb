//! User-space NVMe storage stack: the library and the command-line program.
//!
//! | module | contents |
//! |---|---|
//! | [`aio`] | block devices for programs written with async and await |
//! | [`cli`] | command-line interface of the program `tenmil` |
//! | [`copy`] | copy of one block device to another |
//! | [`perf`] | I/O workloads and their measurement |
//! | [`emu`] | emulated SSDs, each set on device threads of its own |
//! | [`identify`] | registers, Identify data, log pages and features of a controller, decoded |
//! | [`pcie`] | NVMe SSDs on the PCI bus, over VFIO |
//! | [`proxy`] | TCP proxy with fault injection |
//! | [`tcp`] | remote NVMe controllers, over NVMe/TCP |
//! | [`vfu`] | NVMe controllers of other processes, over vfio-user |
//! | [`simulation`] | runs of the simulator |
//!
//! A device is named by a [`Uri`]; a failure is a [`Error`] with a category.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod aio;
mod attached;
mod balance;
pub mod cli;
pub mod copy;
pub mod emu;
mod error;
pub mod identify;
mod log;
#[cfg(not(feature = "crypt"))]
mod no_crypt;
pub mod pcie;
pub mod perf;
pub mod proxy;
mod reproduce;
pub mod simulation;
mod size_watch;
pub mod tcp;
mod top;
mod uri;
pub mod vfu;

// Dependencies that a program on reactors also needs.
pub use {tenmil_base as base, tenmil_linux as linux, tenmil_reactor as reactor};

pub use attached::AttachOptions;
pub use pcie::PcieName;
pub use tcp::TcpName;
pub use tenmil_base::Error;
pub use uri::{COUNT_MAX, EmuMedium, EmuSpec, MODELS, Uri};
pub use vfu::VfuName;

/// Block device kinds beyond those of the block layer, for opening devices.
pub const KINDS: &[(&str, &dyn tenmil_block::DeviceType)] = &[
    (EmuSpec::SCHEME, &emu::Kind { fills: false }),
    (TcpName::SCHEME, &tcp::Kind),
    (VfuName::SCHEME, &vfu::Kind),
    (PcieName::SCHEME, &pcie::Kind),
    ("crypt", CRYPT),
];

/// The same kinds with RAM devices filled at open, for measurements: a read of memory that was never
/// written moves no data.
pub(crate) const FILLED_KINDS: &[(&str, &dyn tenmil_block::DeviceType)] = &[
    ("ram", &tenmil_block::open_ram_filled),
    (EmuSpec::SCHEME, &emu::Kind { fills: true }),
    (TcpName::SCHEME, &tcp::Kind),
    (VfuName::SCHEME, &vfu::Kind),
    (PcieName::SCHEME, &pcie::Kind),
    ("crypt", CRYPT),
];

#[cfg(feature = "crypt")]
const CRYPT: &dyn tenmil_block::DeviceType = &tenmil_crypt::open;
#[cfg(not(feature = "crypt"))]
const CRYPT: &dyn tenmil_block::DeviceType = &no_crypt::open;

/// Compiles and runs the examples of README.md as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FirstPage;
