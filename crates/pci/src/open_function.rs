//! The two ways to open a function: through its group into a VFIO container, and by its device node
//! into an iommufd address space.
//!
//! ```text
//!   group     /dev/vfio/vfio = container ◀─ /dev/vfio/N ─▶ function
//!   iommufd   /dev/iommu = address space ◀─ bind, attach ── /dev/vfio/devices/vfioN = function
//! ```

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use tenmil_dma::RegionTable;

use crate::error::{AttachError, BIND_IOMMUFD, USE_IOMMU};
use crate::group::{self, GroupMember};
use crate::iommu_context::IommuContext;
use crate::iommu_interface::IommuInterface;
use crate::iommufd::Ioas;
use crate::vfio_function::{IommuMode, KernelFilesRoot, VfioInterface};
use crate::vfio_ioctl::{self, GroupStatus, IoctlArgument};

/// Function being opened, which is known to be bound to vfio-pci.
pub(crate) struct OpenRequest<'a> {
    pub(crate) place: &'a KernelFilesRoot,
    pub(crate) address: &'a str,
    /// Group number.
    pub(crate) number: u32,
    pub(crate) regions: &'a RegionTable,
}

/// Opened function.
pub(crate) struct OpenedFunction {
    pub(crate) device: File,
    pub(crate) group: GroupMember,
    /// Reason why iommufd is not used, although the kernel supports it and no interface was
    /// requested.
    pub(crate) iommufd_error: Option<String>,
}

const IOMMU: &str = "dev/iommu";

impl OpenRequest<'_> {
    pub(crate) fn open_function(
        &self,
        isolation: IommuMode,
    ) -> Result<OpenedFunction, AttachError> {
        match isolation {
            IommuMode::Iommu { by: Some(VfioInterface::Iommufd) } => self.open_by_iommufd(),
            IommuMode::Iommu { by: None } if self.has_iommufd() => match self.open_by_iommufd() {
                Err(why) if why.is_permission_denied() => Ok(OpenedFunction {
                    iommufd_error: Some(why.to_string()),
                    ..self.open_by_group(isolation)?
                }),
                taken => taken,
            },
            _ => self.open_by_group(isolation),
        }
    }

    fn open_by_group(&self, isolation: IommuMode) -> Result<OpenedFunction, AttachError> {
        let (number, root) = (self.number, self.place.root_path());
        let (node, iommu) = match isolation {
            IommuMode::Iommu { .. } => (format!("dev/vfio/{number}"), vfio_ioctl::TYPE1V2_IOMMU),
            IommuMode::None => (format!("dev/vfio/noiommu-{number}"), vfio_ioctl::NOIOMMU_IOMMU),
        };
        let group = group::open_or_share_group(
            root,
            number,
            self.address,
            (self.regions, VfioInterface::Group),
            || {
                let container = self.open_file(root.join("dev/vfio/vfio"))?;
                check_container_iommu_type(&container, isolation)
                    .map_err(self.ioctl_error_mapper("look at VFIO"))?;
                let group = self.open_file(root.join(&node))?;
                let mut status = GroupStatus { argsz: GroupStatus::BYTES, flags: 0 };
                vfio_ioctl::ioctl_with(group.as_fd(), vfio_ioctl::GROUP_GET_STATUS, &mut status)
                    .map_err(self.ioctl_error_mapper("look at its group"))?;
                // Viable: every function of the group is unbound or bound to a VFIO driver.
                if status.flags & vfio_ioctl::GROUP_VIABLE == 0 {
                    let address = self.address.to_owned();
                    return Err(AttachError::NotViable { address, group: number });
                }
                // The IOMMU type can be set only after a group has joined the container.
                vfio_ioctl::set_container(group.as_fd(), container.as_fd())
                    .map_err(self.ioctl_error_mapper("join its group"))?;
                vfio_ioctl::ioctl(container.as_fd(), vfio_ioctl::SET_IOMMU, iommu)
                    .map_err(self.ioctl_error_mapper(USE_IOMMU))?;
                let regions = self.regions.clone();
                let container = match isolation {
                    IommuMode::Iommu { .. } => {
                        IommuContext::new(IommuInterface::Type1(container), regions)
                    }
                    IommuMode::None => IommuContext::without_iommu(container, regions),
                };
                Ok((Some(group), container))
            },
        )?;
        let group_file = group.file.as_ref().ok_or(io::ErrorKind::NotFound.into());
        let device = group_file.and_then(|file| device_fd_of_group(file, self.address));
        Ok(OpenedFunction {
            device: device.map_err(self.ioctl_error_mapper("take it"))?,
            group,
            iommufd_error: None,
        })
    }

    fn open_by_iommufd(&self) -> Result<OpenedFunction, AttachError> {
        let (number, root) = (self.number, self.place.root_path());
        let none = || AttachError::NoIommufd { address: self.address.to_owned() };
        let node = self.device_node().ok_or_else(none)?;
        let device = self.open_file(node)?;
        let enter = |ioas: &Ioas| {
            ioas.bind_function(device.as_fd()).map_err(self.ioctl_error_mapper(BIND_IOMMUFD))?;
            ioas.attach_function(device.as_fd())
                .map_err(self.ioctl_error_mapper("reach its address space"))
        };
        let mut is_first = false;
        let group = group::open_or_share_group(
            root,
            number,
            self.address,
            (self.regions, VfioInterface::Iommufd),
            || {
                is_first = true;
                let context = self.open_file(root.join(IOMMU))?;
                let ioas =
                    Ioas::new(context).map_err(self.ioctl_error_mapper("make an address space"))?;
                enter(&ioas)?;
                // The IOVA ranges are known only after the function was attached.
                Ok((None, IommuContext::new(IommuInterface::Iommufd(ioas), self.regions.clone())))
            },
        )?;
        // A later function of the group joins the existing address space.
        if let Some(ioas) = group.container.ioas().filter(|_| !is_first) {
            enter(ioas)?;
        }
        Ok(OpenedFunction { device, group, iommufd_error: None })
    }

    fn has_iommufd(&self) -> bool {
        self.device_node().is_some() && self.place.root_path().join(IOMMU).exists()
    }

    /// Device node of the function, where the kernel creates one; other kernels show only its name.
    fn device_node(&self) -> Option<PathBuf> {
        let root = self.place.root_path();
        let names = root.join("sys/bus/pci/devices").join(self.address).join("vfio-dev");
        let name = std::fs::read_dir(names).ok()?.next()?.ok()?.file_name();
        Some(root.join("dev/vfio/devices").join(name)).filter(|node| node.exists())
    }

    fn open_file(&self, path: PathBuf) -> Result<File, AttachError> {
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        opened.map_err(|error| AttachError::Open {
            address: self.address.to_owned(),
            path: path.display().to_string(),
            error,
        })
    }

    fn ioctl_error_mapper(&self, what: &'static str) -> impl Fn(io::Error) -> AttachError + use<> {
        let address = self.address.to_owned();
        move |error| AttachError::Ioctl { address: address.clone(), what, error }
    }
}

fn check_container_iommu_type(container: &File, isolation: IommuMode) -> io::Result<()> {
    let version = vfio_ioctl::ioctl(container.as_fd(), vfio_ioctl::GET_API_VERSION, 0)?;
    if version != vfio_ioctl::API_VERSION {
        let expected = vfio_ioctl::API_VERSION;
        return Err(io::Error::other(format!("version {version}, expected {expected}")));
    }
    let (iommu, lacks) = match isolation {
        IommuMode::Iommu { .. } => (vfio_ioctl::TYPE1V2_IOMMU, "no IOMMU of type 1, expected one"),
        IommuMode::None => {
            (vfio_ioctl::NOIOMMU_IOMMU, "not without an IOMMU, expected CONFIG_VFIO_NOIOMMU")
        }
    };
    match vfio_ioctl::ioctl(container.as_fd(), vfio_ioctl::CHECK_EXTENSION, iommu)? {
        0 => Err(io::Error::other(lacks)),
        _ => Ok(()),
    }
}

fn device_fd_of_group(group: &File, address: &str) -> io::Result<File> {
    let name = CString::new(address).map_err(|_| io::ErrorKind::InvalidInput)?;
    let descriptor = vfio_ioctl::group_get_device_fd(group.as_fd(), &name)?;
    // SAFETY: the descriptor was just created by the kernel for this call and has no other owner.
    let device = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Ok(File::from(device))
}
