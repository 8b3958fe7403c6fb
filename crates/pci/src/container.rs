//! IOMMU context: its functions can access what is mapped here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{RegionId, Segment};
use tenmil_dma::{AddressSpace, RegionTable};

use crate::error::MapError;
use crate::function::VfioInterface;
use crate::iommu::Iommu;
use crate::iommufd::Ioas;

/// IOMMU context. Cheap to clone; mappings end with the last handle.
#[derive(Clone, Debug)]
pub struct Container {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    access: IommuAccess,
    /// Keeps the mapped memory alive as long as it is mapped.
    regions: RegionTable,
}

/// Memory access of the functions.
#[derive(Debug)]
enum IommuAccess {
    /// Mapped memory only.
    Mapped { iommu: Iommu, mappings: Mutex<Mappings> },
    /// All memory, at physical addresses: there is no IOMMU.
    All { _file: File },
}

#[derive(Debug)]
struct Mappings {
    space: AddressSpace,
    /// Mapped regions, with their reference counts.
    mapped: BTreeMap<RegionId, Mapped>,
}

/// A mapped region.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    iova: u64,
    len_bytes: u64,
    users: u32,
}

/// IOVA range assumed where the kernel does not report one: every IOMMU supports it, and it
/// excludes the addresses below 4 GiB that message signaled interrupts use.
const ADDRESSES: (u64, u64) = (1 << 32, (1 << 39) - 1);

impl Container {
    /// Wraps a configured `iommu` that has a function attached.
    pub(crate) fn new(iommu: Iommu, regions: RegionTable) -> Self {
        let told = iommu.addresses().unwrap_or_default();
        let ranges = if told.is_empty() { vec![ADDRESSES] } else { told };
        let mappings = Mappings { space: AddressSpace::new(ranges), mapped: BTreeMap::new() };
        let access = IommuAccess::Mapped { iommu, mappings: Mutex::new(mappings) };
        Self { inner: Arc::new(Inner { access, regions }) }
    }

    /// As [`new`](Self::new), without an IOMMU: functions can access all memory.
    pub(crate) fn without_iommu(file: File, regions: RegionTable) -> Self {
        Self { inner: Arc::new(Inner { access: IommuAccess::All { _file: file }, regions }) }
    }

    /// Kernel interface by which functions are attached.
    pub(crate) fn interface(&self) -> VfioInterface {
        match self.mapped() {
            Some((Iommu::Iommufd(_), _)) => VfioInterface::Iommufd,
            Some((Iommu::Type1(_), _)) | None => VfioInterface::Group,
        }
    }

    /// Its iommufd address space, if iommufd is used.
    pub(crate) fn ioas(&self) -> Option<&Ioas> {
        match self.mapped()? {
            (Iommu::Iommufd(ioas), _) => Some(ioas),
            (Iommu::Type1(_), _) => None,
        }
    }

    /// Region table that contains its memory.
    pub fn regions(&self) -> &RegionTable {
        &self.inner.regions
    }

    fn mapped(&self) -> Option<(&Iommu, &Mutex<Mappings>)> {
        match &self.inner.access {
            IommuAccess::Mapped { iommu, mappings } => Some((iommu, mappings)),
            IommuAccess::All { .. } => None,
        }
    }

    fn lock(&self) -> Option<(&Iommu, MutexGuard<'_, Mappings>)> {
        let (iommu, mappings) = self.mapped()?;
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
    pub fn map_region(&self, region: RegionId) -> Result<u64, MapError> {
        let len_bytes = self.inner.regions.len_bytes(region);
        let Some((iommu, mut mappings)) = self.lock() else {
            let scattered = "without an IOMMU only memory in a row, which this is not, is found";
            let refuse = || MapError::new(0, len_bytes, io::Error::other(scattered));
            return self.inner.regions.physical_address(region).ok_or_else(refuse);
        };
        mappings.map_region(region, len_bytes, |iova, len_bytes| {
            self.map(iommu, region, iova, len_bytes)
        })
    }

    /// Unmaps a region, if no other user is left: no function can access it once this has returned.
    /// Without an IOMMU this is not enforced.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn unmap_region(&self, region: RegionId) -> Result<(), MapError> {
        let Some((iommu, mut mappings)) = self.lock() else { return Ok(()) };
        mappings.unmap_region(region, |iova, len_bytes| {
            let refuse = |error| MapError::new(iova, len_bytes, error);
            match iommu.unmap(iova, len_bytes).map_err(refuse)? {
                unmapped if unmapped == len_bytes => Ok(()),
                _ => Err(refuse(io::ErrorKind::NotFound.into())),
            }
        })
    }

    /// Excludes bus addresses from the IOVA allocation, because a device BAR is there. False if
    /// they are mapped already. Physical memory never overlaps a BAR.
    pub(crate) fn exclude(&self, iova: u64, len_bytes: u64) -> bool {
        self.lock().is_none_or(|(_, mut mappings)| mappings.exclude(iova, len_bytes))
    }

    fn map(
        &self,
        iommu: &Iommu,
        region: RegionId,
        iova: u64,
        len_bytes: u64,
    ) -> Result<(), MapError> {
        let refuse = |error| MapError::new(iova, len_bytes, error);
        let first = Segment { region, offset: 0, len_bytes: 1 };
        let address = self.inner.regions.host_address(first);
        let address = address.map_err(|_| refuse(io::ErrorKind::NotFound.into()))?;
        // SAFETY of the mapping: the region belongs to a table that is kept, whose memory stays
        // mapped.
        iommu.map(address.as_ptr() as u64, iova, len_bytes).map_err(refuse)
    }
}

impl Mappings {
    fn map_region(
        &mut self,
        region: RegionId,
        len_bytes: u64,
        map: impl FnOnce(u64, u64) -> Result<(), MapError>,
    ) -> Result<u64, MapError> {
        if let Some(mapped) = self.mapped.get_mut(&region) {
            mapped.users += 1;
            return Ok(mapped.iova);
        }
        let bytes = self.mapped.values().map(|mapped| mapped.len_bytes).sum();
        let before = (bytes, self.mapped.len());
        let none = "the IOMMU has no such row of addresses left";
        let none = || MapError::new(0, len_bytes, io::Error::other(none)).beside(before);
        let iova = self.space.allocate(len_bytes).ok_or_else(none)?;
        if let Err(why) = map(iova, len_bytes) {
            self.space.release(iova, len_bytes);
            return Err(why.beside(before));
        }
        self.mapped.insert(region, Mapped { iova, len_bytes, users: 1 });
        Ok(iova)
    }

    fn exclude(&mut self, iova: u64, len_bytes: u64) -> bool {
        let end = iova.saturating_add(len_bytes);
        let is_used = self
            .mapped
            .values()
            .any(|mapped| mapped.iova < end && iova < mapped.iova + mapped.len_bytes);
        if !is_used {
            self.space.exclude(iova, len_bytes);
        }
        !is_used
    }

    fn unmap_region(
        &mut self,
        region: RegionId,
        unmap: impl FnOnce(u64, u64) -> Result<(), MapError>,
    ) -> Result<(), MapError> {
        let Some(mapped) = self.mapped.get_mut(&region) else { return Ok(()) };
        if mapped.users > 1 {
            mapped.users -= 1;
            return Ok(());
        }
        let Mapped { iova, len_bytes, .. } = *mapped;
        unmap(iova, len_bytes)?;
        self.mapped.remove(&region);
        self.space.release(iova, len_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use tenmil_base::RegionId;
    use tenmil_dma::{AddressSpace, RegionTable};

    use super::{ADDRESSES, Container, Mappings};
    use crate::MapError;

    #[test]
    fn a_region_is_mapped_once_for_all_functions_and_unmapped_with_the_last() {
        let space = AddressSpace::new([ADDRESSES]);
        let mut mappings = Mappings { space, mapped: BTreeMap::new() };
        let region = RegionId(4095);
        let refused = |iova, len| Err(MapError::new(iova, len, io::ErrorKind::OutOfMemory.into()));
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
    fn the_addresses_of_a_bar_stand_for_no_memory_and_one_that_does_is_no_bar() {
        let space = AddressSpace::new([ADDRESSES]);
        let mut mappings = Mappings { space, mapped: BTreeMap::new() };
        let used = mappings.map_region(RegionId(1), 8192, |_, _| Ok(())).unwrap();
        assert!(!mappings.exclude(used + 8191, 1) && !mappings.exclude(used - 1, 2));
        assert!(mappings.exclude(used - 1, 1) && mappings.exclude(u64::MAX - 1, 2));
        assert!(mappings.exclude(used + 8192, 1 << 20), "a BAR lies there");
        let next = mappings.map_region(RegionId(2), 8192, |_, _| Ok(())).unwrap();
        assert!(next >= used + 8192 + (1 << 20), "{next:#x}");
        assert!(mappings.exclude(used + 8192, 1 << 20), "and is looked for again");
    }

    #[test]
    fn without_an_iommu_memory_is_found_where_it_lies_and_no_other() {
        let regions = RegionTable::new(4);
        assert!(regions.use_contiguous());
        let container = Container::without_iommu(tempfile::tempfile().unwrap(), regions.clone());
        let scattered = regions.allocate_shared(8192).unwrap();
        let refused = container.map_region(scattered.id()).unwrap_err();
        assert!(refused.to_string().contains("8192 bytes"), "{refused}");
        assert!(refused.to_string().contains("in a row"), "{refused}");
        container.unmap_region(scattered.id()).unwrap();
        assert!(container.exclude(4096, 4096), "no memory of the machine lies in a BAR");
        // Requires reserved huge pages, and permission to read their physical addresses.
        if let Ok(row) = regions.allocate(4096) {
            assert_eq!(
                container.map_region(row.id()).unwrap(),
                regions.physical_address(row.id()).unwrap()
            );
        }
    }
}
