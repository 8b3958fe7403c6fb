//! The two ways in which the kernel has memory mapped for functions: VFIO's own, for whole groups, and
//! iommufd.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use crate::call::{self, Argument, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap};
use crate::iommufd::Ioas;

/// An IOMMU, as what it maps is asked for.
#[derive(Debug)]
pub(crate) enum Iommu {
    /// A container of VFIO, of type 1.
    Type1(File),
    /// An address space of iommufd.
    Iommufd(Ioas),
}

impl Iommu {
    /// Maps memory of this process.
    pub(crate) fn map(&self, address: u64, iova: u64, size: u64) -> io::Result<()> {
        match self {
            Self::Type1(file) => {
                let (argsz, flags) = (DmaMap::BYTES, DMA_READ | DMA_WRITE);
                let mut map = DmaMap { argsz, flags, address, iova, size };
                call::with(file.as_fd(), call::IOMMU_MAP_DMA, &mut map).map(drop)
            }
            Self::Iommufd(ioas) => ioas.map(address, iova, size),
        }
    }

    /// Takes what was mapped at once away again; how much there was.
    pub(crate) fn unmap(&self, iova: u64, size: u64) -> io::Result<u64> {
        match self {
            Self::Type1(file) => {
                let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size };
                call::with(file.as_fd(), call::IOMMU_UNMAP_DMA, &mut unmap)?;
                Ok(unmap.size)
            }
            Self::Iommufd(ioas) => ioas.unmap(iova, size),
        }
    }

    /// The ranges of addresses that it has, each by its first and its last; none if this kernel does
    /// not tell.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(u64, u64)>> {
        match self {
            Self::Type1(file) => call::addresses(file.as_fd()),
            Self::Iommufd(ioas) => ioas.addresses(),
        }
    }
}
