//! Errors of attaching a function and of mapping memory.

use std::fmt;
use std::io;

/// Action text for using the IOMMU, which also requires interrupt remapping.
pub(crate) const USE_IOMMU: &str = "use its IOMMU";
/// Action text for binding to iommufd, which requires exclusive ownership of the function.
pub(crate) const BIND_IOMMUFD: &str = "bind it to iommufd";

/// A function could not be attached.
#[derive(Debug)]
pub enum AttachError {
    /// No function at that address.
    NotFound {
        /// Given address.
        address: String,
    },
    /// Another driver than vfio-pci is bound.
    Driver {
        /// Given address.
        address: String,
        /// Bound driver, if any.
        found: Option<String>,
    },
    /// The machine has no IOMMU, or it is off.
    NoIommu {
        /// Given address.
        address: String,
    },
    /// There is an IOMMU although no-IOMMU mode was requested.
    HasIommu {
        /// Given address.
        address: String,
    },
    /// The kernel offers no device node for iommufd.
    NoIommufd {
        /// Given address.
        address: String,
    },
    /// A VFIO file could not be opened.
    Open {
        /// Given address.
        address: String,
        /// Path of the file.
        path: String,
        /// Error of the system call.
        error: io::Error,
    },
    /// Another function of the IOMMU group is still bound to its driver.
    NotViable {
        /// Given address.
        address: String,
        /// IOMMU group of both.
        group: u32,
    },
    /// Not an NVMe controller.
    Class {
        /// Given address.
        address: String,
        /// Class, subclass and programming interface.
        found: u32,
    },
    /// A VFIO ioctl failed.
    Ioctl {
        /// Given address.
        address: String,
        /// Action that failed.
        what: &'static str,
        /// Error of the system call.
        error: io::Error,
    },
}

/// Memory could not be mapped.
#[derive(Debug)]
pub struct DmaMapFailure {
    /// I/O virtual address.
    pub iova: u64,
    /// Length.
    pub len_bytes: u64,
    /// Error of the system call.
    pub error: io::Error,
    /// Limit of lockable memory, if that is the cause.
    pub lockable_bytes: Option<u64>,
    /// Bytes and number of the existing mappings.
    pub mapped: (u64, usize),
}

impl DmaMapFailure {
    pub(crate) fn new(iova: u64, len_bytes: u64, error: io::Error) -> Self {
        // Error when the locked memory limit is exceeded (drivers/vfio/vfio_iommu_type1.c).
        let is_locked_out = error.raw_os_error() == Some(libc::ENOMEM);
        let lockable_bytes = is_locked_out.then(memlock_limit_bytes).flatten();
        Self { iova, len_bytes, error, lockable_bytes, mapped: (0, 0) }
    }

    pub(crate) fn with_mapped(self, mapped: (u64, usize)) -> Self {
        Self { mapped, ..self }
    }

    /// Fix, if a command exists.
    pub fn hint(&self) -> Option<String> {
        // Error when the number of mappings of a container is exceeded (vfio_iommu_type1.c).
        if self.error.raw_os_error() == Some(libc::ENOSPC) {
            let text = "Let more be mapped: `echo 1048576 | sudo tee \
                        /sys/module/vfio_iommu_type1/parameters/dma_entry_limit`, before you open \
                        an SSD; or open fewer devices in one process.";
            return Some(text.to_owned());
        }
        self.lockable_bytes?;
        let text = "Let more be locked: `sudo prlimit --pid $$ --memlock=unlimited` for this shell, \
                    LimitMEMLOCK=infinity for a service; or ask for less: `queues=2&depth=63` in the \
                    URI.";
        Some(text.to_owned())
    }
}

/// Limit of lockable memory; `None` is unlimited.
fn memlock_limit_bytes() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

impl AttachError {
    /// Whether the only cause is missing permission to open a file.
    pub(crate) fn is_permission_denied(&self) -> bool {
        matches!(self, Self::Open { error, .. } if error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Fix, if a command exists.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NotFound { .. } => Some("`tenmil list` shows which there are.".to_owned()),
            Self::Driver { address, .. } => Some(format!(
                "`tenmil bind {address}` binds it to vfio-pci, if it is not in use."
            )),
            Self::NoIommu { address } => Some(format!(
                "Turn it on in the firmware, and `intel_iommu=on` on Intel's; `tenmil doctor` looks. \
                 Without one the device can access all memory of the machine, if you allow it: `tenmil \
                 bind {address} --unsafe-no-iommu`, then `pcie:{address}?unsafe-no-iommu=yes`."
            )),
            Self::HasIommu { .. } => Some(
                "Leave `unsafe-no-iommu=yes` out: the IOMMU keeps it from all other memory."
                    .to_owned(),
            ),
            Self::NoIommufd { .. } => Some(
                "It takes a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV (Linux 6.6 or \
                 newer); without `vfio=iommufd` it is driven through its group."
                    .to_owned(),
            ),
            Self::Open { path, .. } if self.is_permission_denied() && path.contains("noiommu") => {
                Some("Without an IOMMU only root may drive it (CAP_SYS_RAWIO).".to_owned())
            }
            Self::Open { path, .. } if self.is_permission_denied() => {
                Some(format!("Give {path} to the user, or ask root; `tenmil doctor` looks."))
            }
            Self::Open { error, .. } if error.raw_os_error() == Some(libc::EBUSY) => {
                Some("Another process has it; end that first.".to_owned())
            }
            Self::Open { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                Some("Load the driver with `sudo modprobe vfio-pci`.".to_owned())
            }
            Self::Ioctl { what: USE_IOMMU, error, .. }
                if error.kind() == io::ErrorKind::PermissionDenied =>
            {
                let text = "Interrupts are not isolated: switch on interrupt remapping (VT-d, \
                            AMD-Vi) in the firmware; or, if you trust all processes that drive such devices, \
                            `echo 1 | sudo tee \
                            /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts`.";
                Some(text.to_owned())
            }
            Self::Ioctl { what: BIND_IOMMUFD, error, .. } => match error.raw_os_error() {
                Some(libc::EINVAL | libc::EBUSY) => Some(
                    "Another process has it, or another function of its IOMMU group has a driver of \
                     the kernel's: see `tenmil list`."
                        .to_owned(),
                ),
                Some(libc::EPERM) => Some(
                    "Another process has a function of its IOMMU group, see `tenmil list`; or \
                     interrupts are not isolated: switch on interrupt remapping (VT-d, AMD-Vi) in \
                     the firmware, or, if you trust all processes that drive such devices, `echo 1 | sudo tee \
                     /sys/module/iommufd/parameters/allow_unsafe_interrupts`."
                        .to_owned(),
                ),
                _ => None,
            },
            Self::NotViable { address, .. } => {
                Some(format!("`tenmil bind {address}` names the others in its group."))
            }
            _ => None,
        }
    }
}

impl fmt::Display for AttachError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { address } => write!(out, "attach {address}: no PCI function is there"),
            Self::Driver { address, found } => {
                let found =
                    found.as_ref().map_or_else(|| "none".to_owned(), |it| format!("'{it}'"));
                write!(out, "attach {address}: driver is {found}, expected 'vfio-pci'")
            }
            Self::NoIommu { address } => {
                write!(out, "attach {address}: it is in no IOMMU group, expected one")
            }
            Self::HasIommu { address } => {
                write!(out, "attach {address}: it is behind an IOMMU, expected none")
            }
            Self::NoIommufd { address } => {
                write!(
                    out,
                    "attach {address}: it has no device node in /dev/vfio/devices, expected one"
                )
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
            Self::Ioctl { address, what, error } => {
                write!(out, "attach {address}: {what}: {error}")
            }
        }
    }
}

impl fmt::Display for DmaMapFailure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { iova, len_bytes, error, lockable_bytes, mapped: (bytes, pieces) } = self;
        write!(out, "map {len_bytes} bytes for a device at {iova:#x}: {error}")?;
        if *pieces > 0 {
            write!(out, ", beside {bytes} bytes in {pieces} pieces")?;
        }
        match lockable_bytes {
            Some(limit) => write!(out, ", with {limit} bytes that may be locked"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for AttachError {}
impl std::error::Error for DmaMapFailure {}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{AttachError, BIND_IOMMUFD, DmaMapFailure, USE_IOMMU};

    #[test]
    fn locked_memory_limit_error_names_the_limit_and_the_fix() {
        let memory = io::Error::from_raw_os_error(libc::ENOMEM);
        let limited =
            DmaMapFailure { lockable_bytes: Some(8 << 20), ..DmaMapFailure::new(4096, 1, memory) };
        assert!(
            limited.to_string().ends_with("with 8388608 bytes that may be locked"),
            "{limited}"
        );
        assert!(limited.hint().unwrap().contains("LimitMEMLOCK=infinity"));
        let other = DmaMapFailure::new(4096, 1, io::Error::from_raw_os_error(libc::EEXIST));
        assert_eq!((other.lockable_bytes, other.hint()), (None, None));
        let many = DmaMapFailure::new(4096, 1, io::Error::from_raw_os_error(libc::ENOSPC));
        let many = many.with_mapped((8192, 2));
        assert!(many.to_string().ends_with(", beside 8192 bytes in 2 pieces"), "{many}");
        assert!(many.hint().unwrap().contains("dma_entry_limit"));
    }

    #[test]
    fn missing_kernel_feature_error_names_the_fix() {
        let address = || "0000:5e:00.0".to_owned();
        let error = io::Error::from_raw_os_error(libc::EPERM);
        let remapping = AttachError::Ioctl { address: address(), what: USE_IOMMU, error };
        assert!(remapping.hint().unwrap().contains("interrupt remapping"));
        let error = io::Error::from_raw_os_error(libc::ENOENT);
        let path = "/dev/vfio/vfio".to_owned();
        let unloaded = AttachError::Open { address: address(), path, error };
        assert!(unloaded.hint().unwrap().contains("modprobe vfio-pci"));
    }

    #[test]
    fn process_using_the_device_is_named_if_known() {
        let call = |number| {
            let error = io::Error::from_raw_os_error(number);
            AttachError::Ioctl { address: "0000:5e:00.0".to_owned(), what: BIND_IOMMUFD, error }
        };
        for number in [libc::EINVAL, libc::EBUSY] {
            assert!(call(number).hint().unwrap().contains("Another process has it"));
        }
        let apart = call(libc::EPERM);
        assert!(apart.hint().unwrap().contains("iommufd/parameters/allow_unsafe_interrupts"));
        assert!(!apart.is_permission_denied(), "another way would not help");
        assert_eq!(call(libc::ENOMEM).hint(), None);
        let open = |number| {
            let (address, path) = ("0000:5e:00.0".to_owned(), "/dev/iommu".to_owned());
            AttachError::Open { address, path, error: io::Error::from_raw_os_error(number) }
        };
        assert!(
            open(libc::EACCES).is_permission_denied() && open(libc::EPERM).is_permission_denied()
        );
        assert!(
            !open(libc::ENODEV).is_permission_denied() && !open(libc::EBUSY).is_permission_denied()
        );
    }

    #[test]
    fn no_iommu_error_says_that_root_is_required() {
        let error = io::Error::from_raw_os_error(libc::EPERM);
        let path = "/dev/vfio/noiommu-0".to_owned();
        let user = AttachError::Open { address: "0000:5e:00.0".to_owned(), path, error };
        assert!(user.hint().unwrap().contains("only root"));
    }
}
