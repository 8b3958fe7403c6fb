//! The two ways to a function: through its group, into a container of VFIO's own, and by its own door,
//! into an address space of iommufd.
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

use dma::Regions;

use crate::call::{self, Argument, GroupStatus};
use crate::container::Container;
use crate::error::{BIND_IOMMUFD, NotAttached, USE_IOMMU};
use crate::function::{Isolation, Place, Way};
use crate::group::{self, Joined};
use crate::iommu::Iommu;
use crate::iommufd::Ioas;

/// A function that is being taken, which is known to be VFIO's.
pub(crate) struct Opening<'a> {
    pub(crate) place: &'a Place,
    pub(crate) address: &'a str,
    /// Of its group.
    pub(crate) number: u32,
    pub(crate) regions: &'a Regions,
}

/// A function that was taken.
pub(crate) struct Taken {
    pub(crate) device: File,
    pub(crate) group: Joined,
    /// Why it is not by iommufd, although the kernel has that and nobody said so.
    pub(crate) instead: Option<String>,
}

const IOMMU: &str = "dev/iommu";

impl Opening<'_> {
    pub(crate) fn take(&self, isolation: Isolation) -> Result<Taken, NotAttached> {
        match isolation {
            Isolation::Iommu { by: Some(Way::Iommufd) } => self.by_iommufd(),
            Isolation::Iommu { by: None } if self.has_iommufd() => match self.by_iommufd() {
                Err(why) if why.is_forbidden() => {
                    Ok(Taken { instead: Some(why.to_string()), ..self.by_group(isolation)? })
                }
                taken => taken,
            },
            _ => self.by_group(isolation),
        }
    }

    fn by_group(&self, isolation: Isolation) -> Result<Taken, NotAttached> {
        let (number, root) = (self.number, self.place.root());
        let (door, iommu) = match isolation {
            Isolation::Iommu { .. } => (format!("dev/vfio/{number}"), call::TYPE1V2_IOMMU),
            Isolation::None => (format!("dev/vfio/noiommu-{number}"), call::NOIOMMU_IOMMU),
        };
        let group = group::join(root, number, self.address, (self.regions, Way::Group), || {
            let container = self.open(root.join("dev/vfio/vfio"))?;
            check_container(&container, isolation).map_err(self.refuse("look at VFIO"))?;
            let group = self.open(root.join(&door))?;
            let mut status = GroupStatus { argsz: GroupStatus::BYTES, flags: 0 };
            call::with(group.as_fd(), call::GROUP_GET_STATUS, &mut status)
                .map_err(self.refuse("look at its group"))?;
            if status.flags & call::GROUP_VIABLE == 0 {
                let address = self.address.to_owned();
                return Err(NotAttached::NotViable { address, group: number });
            }
            call::set_container(group.as_fd(), container.as_fd())
                .map_err(self.refuse("join its group"))?;
            call::plain(container.as_fd(), call::SET_IOMMU, iommu)
                .map_err(self.refuse(USE_IOMMU))?;
            let regions = self.regions.clone();
            let container = match isolation {
                Isolation::Iommu { .. } => Container::new(Iommu::Type1(container), regions),
                Isolation::None => Container::without_iommu(container, regions),
            };
            Ok((Some(group), container))
        })?;
        let door = group.door.as_ref().ok_or(io::ErrorKind::NotFound.into());
        let device = door.and_then(|door| device_of(door, self.address));
        Ok(Taken { device: device.map_err(self.refuse("take it"))?, group, instead: None })
    }

    fn by_iommufd(&self) -> Result<Taken, NotAttached> {
        let (number, root) = (self.number, self.place.root());
        let none = || NotAttached::NoIommufd { address: self.address.to_owned() };
        let door = self.own_door().ok_or_else(none)?;
        let device = self.open(door)?;
        let enter = |ioas: &Ioas| {
            ioas.bind(device.as_fd()).map_err(self.refuse(BIND_IOMMUFD))?;
            ioas.attach(device.as_fd()).map_err(self.refuse("reach its address space"))
        };
        let mut is_first = false;
        let group = group::join(root, number, self.address, (self.regions, Way::Iommufd), || {
            is_first = true;
            let context = self.open(root.join(IOMMU))?;
            let ioas = Ioas::new(context).map_err(self.refuse("make an address space"))?;
            enter(&ioas)?;
            // Only now it is known which addresses there are.
            Ok((None, Container::new(Iommu::Iommufd(ioas), self.regions.clone())))
        })?;
        if let Some(ioas) = group.container.ioas().filter(|_| !is_first) {
            enter(ioas)?;
        }
        Ok(Taken { device, group, instead: None })
    }

    fn has_iommufd(&self) -> bool {
        self.own_door().is_some() && self.place.root().join(IOMMU).exists()
    }

    /// The door that the function has for itself, where the kernel makes one; others tell only its name.
    fn own_door(&self) -> Option<PathBuf> {
        let root = self.place.root();
        let names = root.join("sys/bus/pci/devices").join(self.address).join("vfio-dev");
        let name = std::fs::read_dir(names).ok()?.next()?.ok()?.file_name();
        Some(root.join("dev/vfio/devices").join(name)).filter(|door| door.exists())
    }

    fn open(&self, path: PathBuf) -> Result<File, NotAttached> {
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        opened.map_err(|error| NotAttached::Open {
            address: self.address.to_owned(),
            path: path.display().to_string(),
            error,
        })
    }

    fn refuse(&self, what: &'static str) -> impl Fn(io::Error) -> NotAttached + use<> {
        let address = self.address.to_owned();
        move |error| NotAttached::Call { address: address.clone(), what, error }
    }
}

fn check_container(container: &File, isolation: Isolation) -> io::Result<()> {
    let version = call::plain(container.as_fd(), call::GET_API_VERSION, 0)?;
    if version != call::API_VERSION {
        let expected = call::API_VERSION;
        return Err(io::Error::other(format!("version {version}, expected {expected}")));
    }
    let (iommu, lacks) = match isolation {
        Isolation::Iommu { .. } => (call::TYPE1V2_IOMMU, "no IOMMU of type 1, expected one"),
        Isolation::None => {
            (call::NOIOMMU_IOMMU, "not without an IOMMU, expected CONFIG_VFIO_NOIOMMU")
        }
    };
    match call::plain(container.as_fd(), call::CHECK_EXTENSION, iommu)? {
        0 => Err(io::Error::other(lacks)),
        _ => Ok(()),
    }
}

fn device_of(door: &File, address: &str) -> io::Result<File> {
    let name = CString::new(address).map_err(|_| io::ErrorKind::InvalidInput)?;
    let descriptor = call::device_of(door.as_fd(), &name)?;
    // SAFETY: the kernel has just made it for us, and nobody else knows it.
    let device = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Ok(File::from(device))
}
