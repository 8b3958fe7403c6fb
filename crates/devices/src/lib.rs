//! NVMe devices as block devices, opened by URI.
//!
//! | module | URI | contents |
//! |---|---|---|
//! | [`pcie`] | `pcie:` | NVMe SSDs on the PCI bus, over VFIO |
//! | [`tcp`] | `tcp:` | remote NVMe controllers, over NVMe/TCP |
//! | [`vfio_user`] | `vfio-user:` | NVMe controllers of other processes |
//! | [`emu`] | `emu:` | emulated SSDs, each set on device threads of its own |
//! | [`identify`] | | registers, Identify data, log pages and features of a controller, decoded |
//!
//! [`KINDS`] is the argument that makes the block layer open them.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod attached_controller;
pub mod emu;
mod fast_path_switches;
pub mod identify;
pub mod pcie;
mod size_watch;
pub mod tcp;
mod uri;
pub mod vfio_user;

use tenmil_block::{NamedDeviceType, join_device_types};

pub use attached_controller::AttachOptions;
pub use fast_path_switches::{CompletionDoorbell, FastPathSwitches};
pub use pcie::PcieUri;
pub use tcp::TcpUri;
pub use uri::{COUNT_MAX, EmuMedium, EmuSpec, MODELS, Uri};
pub use vfio_user::VfioUserUri;

/// The device types of this crate and of the drivers, by URI scheme.
pub const KINDS: &[NamedDeviceType<'static>] = &join_device_types::<
    { tenmil_drivers::KINDS.len() + NVME_KINDS.len() },
>(tenmil_drivers::KINDS, NVME_KINDS);

const NVME_KINDS: &[NamedDeviceType<'static>] = &[
    (EmuSpec::SCHEME, &emu::EmulatedSsdKind { fills: false }),
    (TcpUri::SCHEME, &tcp::TcpKind),
    (VfioUserUri::SCHEME, &vfio_user::VfioUserKind),
    (PcieUri::SCHEME, &pcie::PcieKind),
];
