//! NVMe devices as block devices, opened by URI.
//!
//! | module | URI | contents |
//! |---|---|---|
//! | [`pcie`] | `pcie:` | NVMe SSDs on the PCI bus, over VFIO |
//! | [`tcp`] | `tcp:` | remote NVMe controllers, over NVMe/TCP |
//! | `vfio_user` | `vfio-user:` | NVMe controllers of other processes, with the feature `vfio-user` |
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
#[cfg(not(feature = "vfio-user"))]
mod no_vfio_user;
pub mod pcie;
mod size_watch;
pub mod tcp;
mod uri;
#[cfg(feature = "vfio-user")]
pub mod vfio_user;

use tenmil_block::{NamedDeviceType, join_device_types};

pub use attached_controller::AttachOptions;
pub use fast_path_switches::{CompletionDoorbell, FastPathSwitches};
pub use pcie::PcieUri;
pub use tcp::TcpUri;
pub use uri::{COUNT_MAX, EmuMedium, EmuSpec, MODELS, Uri};
#[cfg(feature = "vfio-user")]
pub use vfio_user::VfioUserUri;

/// The device types of this crate and of the drivers, by URI scheme.
pub const KINDS: &[NamedDeviceType<'static>] = &join_device_types::<
    { tenmil_drivers::KINDS.len() + NVME_KINDS.len() },
>(tenmil_drivers::KINDS, NVME_KINDS);

const NVME_KINDS: &[NamedDeviceType<'static>] = &[
    (EmuSpec::SCHEME, &emu::EmulatedSsdKind { fills: false }),
    (TcpUri::SCHEME, &tcp::TcpKind),
    (VFIO_USER_SCHEME, VFIO_USER),
    (PcieUri::SCHEME, &pcie::PcieKind),
];

/// URI scheme of NVMe controllers of other processes.
pub(crate) const VFIO_USER_SCHEME: &str = "vfio-user";

#[cfg(feature = "vfio-user")]
const VFIO_USER: &dyn tenmil_block::DeviceType = &vfio_user::VfioUserKind;
#[cfg(not(feature = "vfio-user"))]
const VFIO_USER: &dyn tenmil_block::DeviceType = &no_vfio_user::open;
