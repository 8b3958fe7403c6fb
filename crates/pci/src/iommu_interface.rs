//! The two kernel interfaces for DMA mappings: VFIO type 1 for groups, and iommufd.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use crate::iommufd::Ioas;
use crate::vfio_ioctl::{self, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, IoctlArgument};

/// IOMMU mapping interface.
#[derive(Debug)]
pub(crate) enum IommuInterface {
    /// VFIO type 1 container.
    Type1(File),
    /// iommufd address space.
    Iommufd(Ioas),
}

impl IommuInterface {
    /// Maps memory of this process.
    pub(crate) fn map_memory(&self, address: u64, iova: u64, size: u64) -> io::Result<()> {
        match self {
            Self::Type1(file) => {
                let (argsz, flags) = (DmaMap::BYTES, DMA_READ | DMA_WRITE);
                let mut map = DmaMap { argsz, flags, address, iova, size };
                vfio_ioctl::ioctl_with(file.as_fd(), vfio_ioctl::IOMMU_MAP_DMA, &mut map).map(drop)
            }
            Self::Iommufd(ioas) => ioas.map_memory(address, iova, size),
        }
    }

    /// Unmaps a whole mapping; returns its size.
    pub(crate) fn unmap_memory(&self, iova: u64, size: u64) -> io::Result<u64> {
        match self {
            Self::Type1(file) => {
                let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size };
                vfio_ioctl::ioctl_with(file.as_fd(), vfio_ioctl::IOMMU_UNMAP_DMA, &mut unmap)?;
                Ok(unmap.size)
            }
            Self::Iommufd(ioas) => ioas.unmap_memory(iova, size),
        }
    }

    /// IOVA ranges, each by its first and last address; empty if the kernel does not report them.
    pub(crate) fn iova_ranges(&self) -> io::Result<Vec<(u64, u64)>> {
        match self {
            Self::Type1(file) => vfio_ioctl::iova_ranges(file.as_fd()),
            Self::Iommufd(ioas) => ioas.iova_ranges(),
        }
    }
}
