//! IOMMU context: its functions can access what is mapped here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{RegionId, Segment};
use tenmil_dma::{IovaAllocator, RegionTable};

use crate::error::DmaMapFailure;
use crate::iommu_interface::IommuInterface;
use crate::iommufd::Ioas;
use crate::vfio_function::VfioInterface;

/// IOMMU context. Cheap to clone; mappings end with the last handle.
#[derive(Clone, Debug)]
pub struct IommuContext {
    inner: Arc<IommuContextInner>,
}

#[derive(Debug)]
struct IommuContextInner {
    access: IommuAccess,
    /// Keeps the mapped memory alive as long as it is mapped.
    regions: RegionTable,
}

/// Memory access of the functions.
#[derive(Debug)]
enum IommuAccess {
    /// Mapped memory only.
    Mapped { iommu: IommuInterface, mappings: Mutex<RegionMappings> },
    /// All memory, at physical addresses: there is no IOMMU.
    All { _file: File },
}

#[derive(Debug)]
struct RegionMappings {
    space: IovaAllocator,
    /// Mapped regions, with their reference counts.
    mapped: BTreeMap<RegionId, MappedRegion>,
}

/// A mapped region.
#[derive(Clone, Copy, Debug)]
struct MappedRegion {
    iova: u64,
    len_bytes: u64,
    users: u32,
}

/// IOVA range assumed where the kernel does not report one: every IOMMU supports it, and it
/// excludes the addresses below 4 GiB that message signaled interrupts use.
const ADDRESSES: (u64, u64) = (1 << 32, (1 << 39) - 1);

impl IommuContext {
    /// Wraps a configured `iommu` that has a function attached.
    pub(crate) fn new(iommu: IommuInterface, regions: RegionTable) -> Self {
        let reported = iommu.iova_ranges().unwrap_or_default();
        let ranges = if reported.is_empty() { vec![ADDRESSES] } else { reported };
        let mappings =
            RegionMappings { space: IovaAllocator::new(ranges), mapped: BTreeMap::new() };
        let access = IommuAccess::Mapped { iommu, mappings: Mutex::new(mappings) };
        Self { inner: Arc::new(IommuContextInner { access, regions }) }
    }

    /// As [`new`](Self::new), without an IOMMU: functions can access all memory.
    pub(crate) fn without_iommu(file: File, regions: RegionTable) -> Self {
        Self {
            inner: Arc::new(IommuContextInner {
                access: IommuAccess::All { _file: file },
                regions,
            }),
        }
    }

    /// Kernel interface by which functions are attached.
    pub(crate) fn interface(&self) -> VfioInterface {
        match self.iommu_mappings() {
            Some((IommuInterface::Iommufd(_), _)) => VfioInterface::Iommufd,
            Some((IommuInterface::Type1(_), _)) | None => VfioInterface::Group,
        }
    }

    /// Its iommufd address space, if iommufd is used.
    pub(crate) fn ioas(&self) -> Option<&Ioas> {
        match self.iommu_mappings()? {
            (IommuInterface::Iommufd(ioas), _) => Some(ioas),
            (IommuInterface::Type1(_), _) => None,
        }
    }

    /// Region table that contains its memory.
    pub fn regions(&self) -> &RegionTable {
        &self.inner.regions
    }

    fn iommu_mappings(&self) -> Option<(&IommuInterface, &Mutex<RegionMappings>)> {
        match &self.inner.access {
            IommuAccess::Mapped { iommu, mappings } => Some((iommu, mappings)),
            IommuAccess::All { .. } => None,
        }
    }

    fn lock_mappings(&self) -> Option<(&IommuInterface, MutexGuard<'_, RegionMappings>)> {
        let (iommu, mappings) = self.iommu_mappings()?;
        Some((iommu, mappings.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Maps a whole region and returns its I/O virtual address; counted per call. The kernel pins
    /// the pages and charges them to the limit of locked memory. Without an IOMMU the region is
    /// accessible anyway, and has an address if it is physically contiguous
    /// ([`RegionTable::physical_address`]).
    ///
    /// # Errors
    ///
    /// If there is no such region, no free IOVA range is large enough, the limit of locked memory
    /// is exceeded, or there is no IOMMU and the region is not contiguous.
    pub fn map_region(&self, region: RegionId) -> Result<u64, DmaMapFailure> {
        let len_bytes = self.inner.regions.len_bytes(region);
        let Some((iommu, mut mappings)) = self.lock_mappings() else {
            let scattered = "without an IOMMU only memory in a row, which this is not, is found";
            let refuse = || DmaMapFailure::new(0, len_bytes, io::Error::other(scattered));
            return self.inner.regions.physical_address(region).ok_or_else(refuse);
        };
        mappings.map_region(region, len_bytes, |iova, len_bytes| {
            self.map_or_share(iommu, region, iova, len_bytes)
        })
    }

    /// Unmaps a region, if no other user is left: no function can access it once this has returned.
    /// Without an IOMMU this is not enforced.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn unmap_region(&self, region: RegionId) -> Result<(), DmaMapFailure> {
        let Some((iommu, mut mappings)) = self.lock_mappings() else { return Ok(()) };
        mappings.unmap_region(region, |iova, len_bytes| {
            let refuse = |error| DmaMapFailure::new(iova, len_bytes, error);
            match iommu.unmap_memory(iova, len_bytes).map_err(refuse)? {
                unmapped if unmapped == len_bytes => Ok(()),
                _ => Err(refuse(io::ErrorKind::NotFound.into())),
            }
        })
    }

    /// Excludes bus addresses from the IOVA allocation, because a device BAR is there. False if
    /// they are mapped already. Physical memory never overlaps a BAR.
    pub(crate) fn exclude_iovas(&self, iova: u64, len_bytes: u64) -> bool {
        self.lock_mappings().is_none_or(|(_, mut mappings)| mappings.exclude_iovas(iova, len_bytes))
    }

    fn map_or_share(
        &self,
        iommu: &IommuInterface,
        region: RegionId,
        iova: u64,
        len_bytes: u64,
    ) -> Result<(), DmaMapFailure> {
        let refuse = |error| DmaMapFailure::new(iova, len_bytes, error);
        let first = Segment { region, offset: 0, len_bytes: 1 };
        let address = self.inner.regions.host_address(first);
        let address = address.map_err(|_| refuse(io::ErrorKind::NotFound.into()))?;
        // SAFETY of the mapping: the region belongs to a table that is kept, whose memory stays
        // mapped.
        iommu.map_memory(address.as_ptr() as u64, iova, len_bytes).map_err(refuse)
    }
}

impl RegionMappings {
    fn map_region(
        &mut self,
        region: RegionId,
        len_bytes: u64,
        map: impl FnOnce(u64, u64) -> Result<(), DmaMapFailure>,
    ) -> Result<u64, DmaMapFailure> {
        if let Some(mapped) = self.mapped.get_mut(&region) {
            mapped.users += 1;
            return Ok(mapped.iova);
        }
        let bytes = self.mapped.values().map(|mapped| mapped.len_bytes).sum();
        let before = (bytes, self.mapped.len());
        let none = "the IOMMU has no such row of addresses left";
        let none = || DmaMapFailure::new(0, len_bytes, io::Error::other(none)).with_mapped(before);
        let iova = self.space.allocate_range(len_bytes).ok_or_else(none)?;
        if let Err(why) = map(iova, len_bytes) {
            self.space.free_range(iova, len_bytes);
            return Err(why.with_mapped(before));
        }
        self.mapped.insert(region, MappedRegion { iova, len_bytes, users: 1 });
        Ok(iova)
    }

    fn exclude_iovas(&mut self, iova: u64, len_bytes: u64) -> bool {
        let end = iova.saturating_add(len_bytes);
        let is_used = self
            .mapped
            .values()
            .any(|mapped| mapped.iova < end && iova < mapped.iova + mapped.len_bytes);
        if !is_used {
            self.space.exclude_range(iova, len_bytes);
        }
        !is_used
    }

    fn unmap_region(
        &mut self,
        region: RegionId,
        unmap: impl FnOnce(u64, u64) -> Result<(), DmaMapFailure>,
    ) -> Result<(), DmaMapFailure> {
        let Some(mapped) = self.mapped.get_mut(&region) else { return Ok(()) };
        if mapped.users > 1 {
            mapped.users -= 1;
            return Ok(());
        }
        let MappedRegion { iova, len_bytes, .. } = *mapped;
        unmap(iova, len_bytes)?;
        self.mapped.remove(&region);
        self.space.free_range(iova, len_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use tenmil_base::RegionId;
    use tenmil_dma::{IovaAllocator, RegionTable};

    use super::{ADDRESSES, IommuContext, RegionMappings};
    use crate::DmaMapFailure;

    #[test]
    fn region_is_mapped_once_for_all_functions_and_unmapped_with_the_last() {
        let space = IovaAllocator::new([ADDRESSES]);
        let mut mappings = RegionMappings { space, mapped: BTreeMap::new() };
        let region = RegionId(4095);
        let refused =
            |iova, len| Err(DmaMapFailure::new(iova, len, io::ErrorKind::OutOfMemory.into()));
        assert!(mappings.map_region(region, 8192, refused).is_err());
        let first = mappings.map_region(region, 8192, |_, _| Ok(())).unwrap();
        assert!((1 << 32..1 << 39).contains(&first), "{first:#x}: within 39 bits");
        let again = |_, _| panic!("it is mapped already");
        assert_eq!(mappings.map_region(region, 8192, again).unwrap(), first);
        let other = mappings.map_region(RegionId(1), 8192, |_, _| Ok(())).unwrap();
        assert_ne!(other, first);
        let third = mappings.map_region(RegionId(3), 4096, refused).unwrap_err();
        assert_eq!(third.mapped, (16384, 2), "beside what is mapped");
        mappings.unmap_region(region, |_, _| panic!("another function wants it")).unwrap();
        assert!(mappings.unmap_region(region, refused).is_err(), "the kernel keeps it");
        let mut unmapped = Vec::new();
        let mut unmap = |iova, len| {
            unmapped.push((iova, len));
            Ok(())
        };
        mappings.unmap_region(region, &mut unmap).unwrap();
        mappings.unmap_region(region, &mut unmap).unwrap();
        assert_eq!(unmapped, [(first, 8192)]);
        assert_eq!(mappings.map_region(RegionId(2), 8192, |_, _| Ok(())).unwrap(), first);
    }

    #[test]
    fn bar_addresses_are_excluded_from_memory_mappings() {
        let space = IovaAllocator::new([ADDRESSES]);
        let mut mappings = RegionMappings { space, mapped: BTreeMap::new() };
        let used = mappings.map_region(RegionId(1), 8192, |_, _| Ok(())).unwrap();
        assert!(!mappings.exclude_iovas(used + 8191, 1) && !mappings.exclude_iovas(used - 1, 2));
        assert!(mappings.exclude_iovas(used - 1, 1) && mappings.exclude_iovas(u64::MAX - 1, 2));
        assert!(mappings.exclude_iovas(used + 8192, 1 << 20), "a BAR lies there");
        let next = mappings.map_region(RegionId(2), 8192, |_, _| Ok(())).unwrap();
        assert!(next >= used + 8192 + (1 << 20), "{next:#x}");
        assert!(mappings.exclude_iovas(used + 8192, 1 << 20), "and is looked for again");
    }

    #[test]
    fn without_iommu_a_region_maps_to_its_physical_address() {
        let regions = RegionTable::new(4);
        assert!(regions.make_allocations_contiguous());
        let container = IommuContext::without_iommu(tempfile::tempfile().unwrap(), regions.clone());
        let scattered = regions.allocate_shared(8192).unwrap();
        let refused = container.map_region(scattered.id()).unwrap_err();
        assert!(refused.to_string().contains("8192 bytes"), "{refused}");
        assert!(refused.to_string().contains("in a row"), "{refused}");
        container.unmap_region(scattered.id()).unwrap();
        assert!(container.exclude_iovas(4096, 4096), "no memory of the machine lies in a BAR");
        // Requires reserved huge pages, and permission to read their physical addresses.
        if let Ok(row) = regions.allocate_region(4096) {
            assert_eq!(
                container.map_region(row.id()).unwrap(),
                regions.physical_address(row.id()).unwrap()
            );
        }
    }
}
