//! Why a function is not taken from the kernel: what was found, what was expected, what mends it.

use std::fmt;

use base::Blame;

use super::{Address, Neighbour, VFIO};
use crate::holders::InUse;

/// One reason why a function is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// There is nothing at the address.
    NotThere {
        /// What there is instead.
        others: Vec<Address>,
    },
    /// It is something else than an NVMe function.
    OtherClass {
        /// Its class code.
        class: u32,
    },
    /// We may not write to a file that we would have to write to.
    NoPermission {
        /// Which file.
        path: String,
    },
    /// Somebody uses it.
    InUse {
        /// Who.
        uses: Vec<InUse>,
    },
    /// The kernel has a disk for itself, and does not say for whom.
    Claimed {
        /// Which disk.
        disk: String,
    },
    /// A disk is one of several that something is made of.
    Member {
        /// Which disk or partition.
        disk: String,
        /// The mark that it bears.
        mark: String,
    },
    /// Nobody can say what a disk holds.
    Unseen {
        /// Which disk or partition.
        disk: String,
        /// Why it cannot be read.
        why: String,
    },
    /// A disk is reached through other controllers, too.
    SeveralPaths {
        /// Which disk.
        disk: String,
        /// Through which.
        controllers: Vec<String>,
    },
    /// It has virtual functions that others may use.
    VirtualFunctions {
        /// The function.
        address: Address,
        /// How many.
        count: u32,
    },
    /// It is hidden behind a driver of its own.
    BehindVmd {
        /// Its domain.
        domain: u32,
    },
    /// The IOMMU cannot keep it apart from what others drive.
    SharedGroup {
        /// The group.
        group: u32,
        /// What others drive.
        others: Vec<Neighbour>,
    },
    /// There is no IOMMU.
    NoIommu,
    /// There is no IOMMU, and this kernel does not go without.
    NoIommuMode,
    /// The driver that would have it is not there.
    NoVfio {
        /// The kernel's release.
        release: String,
        /// Whether it could be loaded.
        is_loadable: bool,
    },
}

/// The switch of the kernel for life without an IOMMU.
pub(super) const NO_IOMMU_SWITCH: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

impl Obstacle {
    /// Whether saying the serial number takes it away.
    pub const fn yields_to_serial(&self) -> bool {
        matches!(
            self,
            Self::InUse { .. }
                | Self::Claimed { .. }
                | Self::Member { .. }
                | Self::Unseen { .. }
                | Self::SeveralPaths { .. }
        )
    }

    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self {
            Self::NoPermission { .. }
            | Self::BehindVmd { .. }
            | Self::SharedGroup { .. }
            | Self::NoIommu
            | Self::NoIommuMode
            | Self::NoVfio { .. } => Blame::Machine,
            _ => Blame::Caller,
        }
    }

    /// What to do about it: a sentence or two.
    pub fn remedy(&self) -> String {
        let mut remedy = self.mending();
        if self.yields_to_serial() {
            remedy += " To take it from whoever uses it all the same, add --even-if-in-use and the \
                       serial number that `tenmil list` shows.";
        }
        remedy
    }

    fn mending(&self) -> String {
        match self {
            Self::NotThere { .. } | Self::OtherClass { .. } => {
                "`tenmil list` shows what there is.".into()
            }
            Self::NoPermission { .. } => {
                "Run it under `sudo`; what is bound is given to whoever calls sudo, or to --owner."
                    .into()
            }
            Self::InUse { uses } => {
                let ends: Vec<String> = uses.iter().rev().map(InUse::remedy).collect();
                format!("End it with {}.", ends.join(", then "))
            }
            Self::Claimed { disk } => {
                format!("Look for it with `lsblk /dev/{disk}`, `zpool status` and `bcache`.")
            }
            Self::Member { disk, .. } => format!(
                "If nothing of it is wanted any more, erase the mark with `sudo wipefs -a \
                 /dev/{disk}`."
            ),
            Self::Unseen { disk, .. } => {
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
            Self::SharedGroup { others, .. } => shared_remedy(others),
            Self::NoIommu => {
                "Switch on VT-d, AMD-Vi or the SMMU in the firmware, and `intel_iommu=on` on the \
                 kernel's command line; `tenmil doctor` looks for it. With --unsafe-no-iommu the \
                 device, and so whoever drives it, can read and write all memory of this machine."
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

fn shared_remedy(others: &[Neighbour]) -> String {
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

impl fmt::Display for Obstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere { others } if others.is_empty() => {
                out.write_str("no such function, and this machine has no NVMe function at all")
            }
            Self::NotThere { others } => {
                write!(out, "no such function, expected one of {}", list(others))
            }
            Self::OtherClass { class } => {
                write!(out, "class is {class:06x}, expected 0108xx, that of NVMe")
            }
            Self::NoPermission { path } => {
                write!(out, "/{path} may not be written, expected to run as root")
            }
            Self::InUse { uses } => {
                let uses: Vec<String> = uses.iter().map(ToString::to_string).collect();
                write!(out, "{}, expected disks that nobody uses", uses.join(" and "))
            }
            Self::Claimed { disk } => {
                write!(out, "the kernel has {disk} in use, expected disks that nobody uses")
            }
            Self::Member { disk, mark } => {
                write!(out, "{disk} holds {mark}, expected no part of something larger")
            }
            Self::Unseen { disk, why } => write!(
                out,
                "{disk} cannot be looked at ({why}), expected to see that nobody needs it"
            ),
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
                let driver = |one: &Neighbour| one.driver.clone().unwrap_or_default();
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
                write!(out, "/{NO_IOMMU_SWITCH} is not there, expected vfio with that switch")
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

fn list(addresses: &[Address]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
