//! Obstacles to binding a function: what was found, what was expected, and the fix.

use std::fmt;

use tenmil_base::ErrorCategory;

use super::{GroupMember, PciAddress, VFIO};
use crate::device_users::DeviceUser;

/// One reason not to bind a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindObstacle {
    /// No function at the address.
    NotFound {
        /// NVMe functions that exist.
        others: Vec<PciAddress>,
    },
    /// Not an NVMe function.
    NotNvme {
        /// Class code.
        class: u32,
    },
    /// A required file is not writable.
    NoPermission {
        /// Path of the file.
        path: String,
    },
    /// The function is in use.
    InUse {
        /// Its users.
        uses: Vec<DeviceUser>,
    },
    /// The kernel has claimed a disk for an unknown user.
    Claimed {
        /// The disk.
        disk: String,
    },
    /// A disk is a member of an array or pool.
    Member {
        /// Disk or partition.
        disk: String,
        /// Signature found.
        signature: String,
    },
    /// The content of a disk cannot be examined.
    Unreadable {
        /// Disk or partition.
        disk: String,
        /// Reason.
        why: String,
    },
    /// A disk is reached through other controllers too.
    SeveralPaths {
        /// The disk.
        disk: String,
        /// The controllers.
        controllers: Vec<String>,
    },
    /// Virtual functions are enabled and may be in use.
    VirtualFunctions {
        /// The physical function.
        address: PciAddress,
        /// Number of virtual functions.
        count: u32,
    },
    /// The function is behind Intel VMD.
    BehindVmd {
        /// PCI domain.
        domain: u32,
    },
    /// The IOMMU cannot isolate it from functions bound to other drivers.
    SharedGroup {
        /// IOMMU group.
        group: u32,
        /// Functions bound to other drivers.
        others: Vec<GroupMember>,
    },
    /// There is no IOMMU.
    NoIommu,
    /// There is no IOMMU, and this kernel lacks the no-IOMMU mode.
    NoIommuMode,
    /// The vfio-pci driver is not loaded.
    NoVfio {
        /// Kernel release.
        release: String,
        /// Whether it could be loaded.
        is_loadable: bool,
    },
}

/// Kernel parameter that enables the no-IOMMU mode.
pub(super) const NO_IOMMU_PARAMETER: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

impl BindObstacle {
    /// Whether naming the serial number overrides the obstacle.
    pub const fn is_overridden_by_serial(&self) -> bool {
        matches!(
            self,
            Self::InUse { .. }
                | Self::Claimed { .. }
                | Self::Member { .. }
                | Self::Unreadable { .. }
                | Self::SeveralPaths { .. }
        )
    }

    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::NoPermission { .. }
            | Self::BehindVmd { .. }
            | Self::SharedGroup { .. }
            | Self::NoIommu
            | Self::NoIommuMode
            | Self::NoVfio { .. } => ErrorCategory::Environment,
            _ => ErrorCategory::Usage,
        }
    }

    /// Fix: one or two sentences.
    pub fn fix(&self) -> String {
        let mut remedy = self.fix_text();
        if self.is_overridden_by_serial() {
            remedy += " To unbind it although it is in use, add --even-if-in-use and the \
                       serial number that `tenmil list` shows.";
        }
        remedy
    }

    fn fix_text(&self) -> String {
        match self {
            Self::NotFound { .. } | Self::NotNvme { .. } => {
                "`tenmil list` shows what there is.".into()
            }
            Self::NoPermission { .. } => {
                "Run it under `sudo`; the owner becomes the user who called sudo, or --owner."
                    .into()
            }
            Self::InUse { uses } => {
                let ends: Vec<String> = uses.iter().rev().map(DeviceUser::release_command).collect();
                format!("End it with {}.", ends.join(", then "))
            }
            Self::Claimed { disk } => {
                format!("Look for it with `lsblk /dev/{disk}`, `zpool status` and `bcache`.")
            }
            Self::Member { disk, .. } => format!(
                "If its data is not needed any more, erase the signature with `sudo wipefs -a \
                 /dev/{disk}`."
            ),
            Self::Unreadable { disk, .. } => {
                format!("See that `sudo head -c 1 /dev/{disk}` can read it.")
            }
            Self::SeveralPaths { .. } => "Name the functions of all of them together.".into(),
            Self::VirtualFunctions { address, .. } => format!(
                "Switch them off with `echo 0 | sudo tee \
                 /sys/bus/pci/devices/{address}/sriov_numvfs`."
            ),
            Self::BehindVmd { .. } => {
                "Switch VMD off for its slot in the firmware's set-up.".into()
            }
            Self::SharedGroup { others, .. } => shared_group_fix(others),
            Self::NoIommu => {
                "Switch on VT-d, AMD-Vi or the SMMU in the firmware, and `intel_iommu=on` on the \
                 kernel's command line; `tenmil doctor` looks for it. With --unsafe-no-iommu the \
                 device, and so the process that drives it, can read and write all memory of this machine."
                    .into()
            }
            Self::NoIommuMode => "Load it with `sudo modprobe vfio`, or use a kernel with \
                 CONFIG_VFIO_NOIOMMU; better, switch the IOMMU on."
                .into(),
            Self::NoVfio { is_loadable: true, .. } => {
                format!("Load it with `sudo modprobe {VFIO}`.")
            }
            Self::NoVfio { .. } => {
                "Use a kernel that is built with CONFIG_VFIO_PCI, such as that of the distribution."
                    .into()
            }
        }
    }
}

fn shared_group_fix(others: &[GroupMember]) -> String {
    let away: Vec<String> = others
        .iter()
        .map(|one| {
            let address = &one.address;
            format!("`echo {address} | sudo tee /sys/bus/pci/devices/{address}/driver/unbind`")
        })
        .collect();
    format!(
        "Put it into a slot with a group of its own, name all NVMe functions of the group together, \
         or take the others from their drivers: {}.",
        away.join(", ")
    )
}

impl fmt::Display for BindObstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { others } if others.is_empty() => {
                out.write_str("no such function, and this machine has no NVMe function at all")
            }
            Self::NotFound { others } => {
                write!(out, "no such function, expected one of {}", address_list(others))
            }
            Self::NotNvme { class } => {
                write!(out, "class is {class:06x}, expected 0108xx, that of NVMe")
            }
            Self::NoPermission { path } => {
                write!(out, "/{path} may not be written, expected to run as root")
            }
            Self::InUse { uses } => {
                let uses: Vec<String> = uses.iter().map(ToString::to_string).collect();
                write!(out, "{}, expected disks that are not in use", uses.join(" and "))
            }
            Self::Claimed { disk } => {
                write!(out, "the kernel has {disk} in use, expected disks that are not in use")
            }
            Self::Member { disk, signature: mark } => {
                write!(out, "{disk} holds {mark}, expected no part of something larger")
            }
            Self::Unreadable { disk, why } => {
                write!(out, "{disk} cannot be read ({why}), expected to see whether it is in use")
            }
            Self::SeveralPaths { disk, controllers } => write!(
                out,
                "{disk} is reached through {}, expected this controller alone",
                controllers.join(" and ")
            ),
            Self::VirtualFunctions { count, .. } => {
                write!(out, "virtual functions are {count}, expected none")
            }
            Self::BehindVmd { domain } => write!(
                out,
                "it is in domain {domain:x}, behind Intel VMD, expected a slot of the machine itself"
            ),
            Self::SharedGroup { group, others } => {
                let driver = |one: &GroupMember| one.driver.clone().unwrap_or_default();
                let others: Vec<String> = others
                    .iter()
                    .map(|one| format!("{} (driver {})", one.address, driver(one)))
                    .collect();
                let others = others.join(" and ");
                write!(
                    out,
                    "IOMMU group {group} has {others}, too, expected nothing that others drive"
                )
            }
            Self::NoIommu => out.write_str("it has no IOMMU group, expected an IOMMU that is on"),
            Self::NoIommuMode => {
                write!(out, "/{NO_IOMMU_PARAMETER} is not there, expected vfio with that switch")
            }
            Self::NoVfio { release, is_loadable: true } => {
                write!(out, "driver {VFIO} is not loaded in kernel {release}, expected it to be")
            }
            Self::NoVfio { release, .. } => {
                write!(out, "kernel {release} has no driver {VFIO}, expected one that has")
            }
        }
    }
}

fn address_list(addresses: &[PciAddress]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
