//! Why a function cannot be had, or memory not be reached by it.

use std::fmt;
use std::io;

/// A function that cannot be had.
#[derive(Debug)]
pub enum NotAttached {
    /// There is none at that address.
    Absent {
        /// What was asked for.
        address: String,
    },
    /// It is not VFIO that drives it.
    Driver {
        /// What was asked for.
        address: String,
        /// What drives it, if anything does.
        found: Option<String>,
    },
    /// The machine has no IOMMU, or it is off.
    NoIommu {
        /// What was asked for.
        address: String,
    },
    /// A file of VFIO cannot be opened.
    Open {
        /// What was asked for.
        address: String,
        /// Which.
        path: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// Another function that the IOMMU cannot tell from it still has its driver.
    NotViable {
        /// What was asked for.
        address: String,
        /// The group of both.
        group: u32,
    },
    /// It is no NVMe controller.
    Class {
        /// What was asked for.
        address: String,
        /// Class, subclass and interface.
        found: u32,
    },
    /// A call of VFIO was refused.
    Call {
        /// What was asked for.
        address: String,
        /// What was to be done.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
}

/// Memory that a function cannot be given.
#[derive(Debug)]
pub struct NotMapped {
    /// Where the function would have had it.
    pub iova: u64,
    /// How much.
    pub len_bytes: u64,
    /// What the kernel said.
    pub error: io::Error,
}

impl NotAttached {
    /// What mends it, if a command does.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Absent { .. } => Some("`tenmil list` shows which there are.".to_owned()),
            Self::Driver { address, .. } => {
                Some(format!("`tenmil bind {address}` takes it from its driver, if nobody uses it."))
            }
            Self::NoIommu { .. } => Some(
                "Turn it on in the firmware, and `intel_iommu=on` on Intel's; `tenmil doctor` looks."
                    .to_owned(),
            ),
            Self::Open { error, path, .. } if error.kind() == io::ErrorKind::PermissionDenied => {
                Some(format!("Give {path} to the user, or ask root; `tenmil doctor` looks."))
            }
            Self::Open { error, .. } if error.raw_os_error() == Some(libc::EBUSY) => {
                Some("Another process has it; end that first.".to_owned())
            }
            Self::NotViable { address, .. } => {
                Some(format!("`tenmil bind {address}` names the others in its group."))
            }
            _ => None,
        }
    }
}

impl fmt::Display for NotAttached {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { address } => write!(out, "attach {address}: no PCI function is there"),
            Self::Driver { address, found } => {
                let found =
                    found.as_ref().map_or_else(|| "none".to_owned(), |it| format!("'{it}'"));
                write!(out, "attach {address}: driver is {found}, expected 'vfio-pci'")
            }
            Self::NoIommu { address } => {
                write!(out, "attach {address}: it is in no IOMMU group, expected one")
            }
            Self::Open { address, path, error } => {
                write!(out, "attach {address}: open {path}: {error}")
            }
            Self::NotViable { address, group } => write!(
                out,
                "attach {address}: another function of IOMMU group {group} has its driver, \
                 expected none or 'vfio-pci'"
            ),
            Self::Class { address, found } => {
                write!(out, "attach {address}: class is {found:06x}, expected 010802")
            }
            Self::Call { address, what, error } => write!(out, "attach {address}: {what}: {error}"),
        }
    }
}

impl fmt::Display for NotMapped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { iova, len_bytes, error } = self;
        write!(out, "map {len_bytes} bytes for a device at {iova:#x}: {error}")
    }
}

impl std::error::Error for NotAttached {}
impl std::error::Error for NotMapped {}
