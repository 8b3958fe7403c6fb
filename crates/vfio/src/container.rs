//! An IOMMU context: what is mapped here is what its functions reach.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use base::Segment;
use dma::Regions;

use crate::call::{self, Argument, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap};
use crate::error::NotMapped;

/// An IOMMU context. Cheap to clone; mappings go with the last handle.
#[derive(Clone, Debug)]
pub struct Container {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    /// Kept so that what is mapped is memory for as long as it is mapped.
    regions: Regions,
}

/// Memory that functions reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Where they have it.
    pub iova: u64,
    /// How much it is.
    pub len_bytes: u64,
}

impl Container {
    pub(crate) fn new(file: File, regions: Regions) -> Self {
        Self { inner: Arc::new(Inner { file, regions }) }
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }

    /// Lets functions reach the first `len_bytes` of the region that `first` begins, in whole pages.
    /// The kernel pins the pages, and counts them against the limit of lockable memory.
    ///
    /// # Errors
    ///
    /// If there is no such memory, the address is taken or beyond what the IOMMU has, or too much is
    /// locked already.
    pub fn map(&self, first: Segment, iova: u64, len_bytes: u64) -> Result<Mapped, NotMapped> {
        let refuse = |error| NotMapped { iova, len_bytes, error };
        let is_whole = self.inner.regions.len_bytes(first.region) >= len_bytes && first.offset == 0;
        let address = self.inner.regions.address(first);
        let (true, Ok(address)) = (is_whole, address) else {
            return Err(refuse(io::ErrorKind::InvalidInput.into()));
        };
        let mut map = DmaMap {
            argsz: DmaMap::BYTES,
            flags: DMA_READ | DMA_WRITE,
            // The range lies in a region of a table that is kept, whose places stay mapped.
            address: address.as_ptr() as u64,
            iova,
            size: len_bytes,
        };
        call::with(self.file(), call::IOMMU_MAP_DMA, &mut map).map_err(refuse)?;
        Ok(Mapped { iova, len_bytes })
    }

    /// Takes memory away again: no function reaches it once this has returned.
    ///
    /// # Errors
    ///
    /// If nothing is mapped so.
    pub fn unmap(&self, mapped: Mapped) -> Result<(), NotMapped> {
        let Mapped { iova, len_bytes } = mapped;
        let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size: len_bytes };
        let refuse = |error| NotMapped { iova, len_bytes, error };
        call::with(self.file(), call::IOMMU_UNMAP_DMA, &mut unmap).map_err(refuse)?;
        if unmap.size == len_bytes {
            return Ok(());
        }
        Err(refuse(io::ErrorKind::NotFound.into()))
    }
}
