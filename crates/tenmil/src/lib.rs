//! A user-space NVMe storage stack: the face.
//!
//! | module | what it is |
//! |---|---|
//! | [`aio`] | block devices for programs written with async and await |
//! | [`cli`] | the command line of the one executable |
//! | [`copy`] | a whole device to another |
//! | [`perf`] | load SSDs and say what they, and the driver, can do |
//! | [`emu`] | emulated SSDs, on threads of their own |
//! | [`identify`] | ask a controller what it is, and decode all it answers |
//! | [`pcie`] | SSDs on the PCI bus, over VFIO |
//! | [`tcp`] | SSDs behind a network, over NVMe/TCP |
//! | [`vfu`] | NVMe controllers of other processes, over vfio-user |
//! | [`simulation`] | what the simulator is asked to do |
//!
//! A device is named by a [`Uri`]; why something was not done, and whose move it is, is a
//! [`Refused`].

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod aio;
mod attached;
mod balance;
pub mod cli;
pub mod copy;
pub mod emu;
mod evidence;
mod growth;
pub mod identify;
mod log;
#[cfg(not(feature = "crypt"))]
mod no_crypt;
pub mod pcie;
pub mod perf;
pub mod proxy;
mod refused;
pub mod simulation;
pub mod tcp;
mod top;
mod uri;
pub mod vfu;

// What programs that live on reactors need beside this.
pub use {base, host, reactor};

pub use attached::Wanted;
pub use pcie::PcieName;
pub use refused::Refused;
pub use tcp::TcpName;
pub use uri::{COUNT_MAX, EmuMedium, EmuSpec, MODELS, Uri};
pub use vfu::VfuName;

/// Kinds of block devices that the block layer does not know by itself: what to open a device with.
pub const KINDS: &[(&str, &dyn block::Kind)] = &[
    (EmuSpec::SCHEME, &emu::Kind { fills: false }),
    (TcpName::SCHEME, &tcp::Kind),
    (VfuName::SCHEME, &vfu::Kind),
    (PcieName::SCHEME, &pcie::Kind),
    ("crypt", CRYPT),
];

/// The same for who measures: what is in memory was written before it is there, since a read of what
/// was never written moves no bytes from anywhere.
pub(crate) const FILLED_KINDS: &[(&str, &dyn block::Kind)] = &[
    ("ram", &block::open_ram_filled),
    (EmuSpec::SCHEME, &emu::Kind { fills: true }),
    (TcpName::SCHEME, &tcp::Kind),
    (VfuName::SCHEME, &vfu::Kind),
    (PcieName::SCHEME, &pcie::Kind),
    ("crypt", CRYPT),
];

#[cfg(feature = "crypt")]
const CRYPT: &dyn block::Kind = &crypt::open;
#[cfg(not(feature = "crypt"))]
const CRYPT: &dyn block::Kind = &no_crypt::open;

/// The examples of the first page, compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FirstPage;
