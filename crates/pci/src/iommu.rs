//! The two kernel interfaces for DMA mappings: VFIO type 1 for groups, and iommufd.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use crate::ioctl::{self, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, IoctlArgument};
use crate::iommufd::Ioas;

/// IOMMU mapping interface.
#[derive(Debug)]
pub(crate) enum Iommu {
    /// VFIO type 1 container.
    Type1(File),
    /// iommufd address space.
    Iommufd(Ioas),
}

impl Iommu {
    /// Maps memory of this process.
    pub(crate) fn map(&self, address: u64, iova: u64, size: u64) -> io::Result<()> {
        match self {
            Self::Type1(file) => {
                let (argsz, flags) = (DmaMap::BYTES, DMA_READ | DMA_WRITE);
                let mut map = DmaMap { argsz, flags, address, iova, size };
                ioctl::call_with(file.as_fd(), ioctl::IOMMU_MAP_DMA, &mut map).map(drop)
            }
            Self::Iommufd(ioas) => ioas.map(address, iova, size),
        }
    }

    /// Unmaps a whole mapping; returns its size.
    pub(crate) fn unmap(&self, iova: u64, size: u64) -> io::Result<u64> {
        match self {
            Self::Type1(file) => {
                let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size };
                ioctl::call_with(file.as_fd(), ioctl::IOMMU_UNMAP_DMA, &mut unmap)?;
                Ok(unmap.size)
            }
            Self::Iommufd(ioas) => ioas.unmap(iova, size),
        }
    }

    /// IOVA ranges, each by its first and last address; empty if the kernel does not report them.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(u64, u64)>> {
        match self {
            Self::Type1(file) => ioctl::addresses(file.as_fd()),
            Self::Iommufd(ioas) => ioas.addresses(),
        }
    }
}
