//! An IOMMU context: what is mapped here is what its functions reach.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{RegionId, Segment};
use dma::{AddressSpace, Regions};

use crate::error::NotMapped;
use crate::function::Way;
use crate::iommu::Iommu;
use crate::iommufd::Ioas;

/// An IOMMU context. Cheap to clone; mappings go with the last handle.
#[derive(Clone, Debug)]
pub struct Container {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    access: Access,
    /// Kept so that what is mapped is memory for as long as it is mapped.
    regions: Regions,
}

/// What functions reach.
#[derive(Debug)]
enum Access {
    /// What was mapped.
    Mapped { iommu: Iommu, mappings: Mutex<Mappings> },
    /// All memory, and find it where it lies in the machine: there is no IOMMU.
    All { _file: File },
}

#[derive(Debug)]
struct Mappings {
    space: AddressSpace,
    /// What functions reach, and how many of them.
    mapped: BTreeMap<RegionId, Mapped>,
}

/// A region that functions reach.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    iova: u64,
    len_bytes: u64,
    users: u32,
}

/// Where the kernel does not say which addresses an IOMMU has: all have these, and devices that
/// signal by messages to addresses below 4 GiB are left alone.
const ADDRESSES: (u64, u64) = (1 << 32, (1 << 39) - 1);

impl Container {
    /// The context that has been set up behind `iommu`, with a function in it.
    pub(crate) fn new(iommu: Iommu, regions: Regions) -> Self {
        let told = iommu.addresses().unwrap_or_default();
        let ranges = if told.is_empty() { vec![ADDRESSES] } else { told };
        let mappings = Mappings { space: AddressSpace::new(ranges), mapped: BTreeMap::new() };
        let access = Access::Mapped { iommu, mappings: Mutex::new(mappings) };
        Self { inner: Arc::new(Inner { access, regions }) }
    }

    /// The same where there is no IOMMU: nothing is kept from any function.
    pub(crate) fn without_iommu(file: File, regions: Regions) -> Self {
        Self { inner: Arc::new(Inner { access: Access::All { _file: file }, regions }) }
    }

    /// By which of the kernel's ways functions come here.
    pub(crate) fn way(&self) -> Way {
        match self.mapped() {
            Some((Iommu::Iommufd(_), _)) => Way::Iommufd,
            Some((Iommu::Type1(_), _)) | None => Way::Group,
        }
    }

    /// Its address space, where functions come by their own doors.
    pub(crate) fn ioas(&self) -> Option<&Ioas> {
        match self.mapped()? {
            (Iommu::Iommufd(ioas), _) => Some(ioas),
            (Iommu::Type1(_), _) => None,
        }
    }

    /// The table that its memory lies in.
    pub fn regions(&self) -> &Regions {
        &self.inner.regions
    }

    fn mapped(&self) -> Option<(&Iommu, &Mutex<Mappings>)> {
        match &self.inner.access {
            Access::Mapped { iommu, mappings } => Some((iommu, mappings)),
            Access::All { .. } => None,
        }
    }

    fn lock(&self) -> Option<(&Iommu, MutexGuard<'_, Mappings>)> {
        let (iommu, mappings) = self.mapped()?;
        Some((iommu, mappings.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Lets functions reach a whole region, and says where they find it; once more for each that asks.
    /// The kernel pins the pages, and counts them against the limit of lockable memory. Without an
    /// IOMMU they reach it already, and find it if it lies [in a row](Regions::row).
    ///
    /// # Errors
    ///
    /// If there is no such region, the IOMMU has no such row of addresses left, too much is locked
    /// already, or there is no IOMMU and the region lies scattered.
    pub fn show(&self, region: RegionId) -> Result<u64, NotMapped> {
        let len_bytes = self.inner.regions.len_bytes(region);
        let Some((iommu, mut mappings)) = self.lock() else {
            let scattered = "without an IOMMU only memory in a row, which this is not, is found";
            let refuse = || NotMapped::new(0, len_bytes, io::Error::other(scattered));
            return self.inner.regions.row(region).ok_or_else(refuse);
        };
        mappings.show(region, len_bytes, |iova, len_bytes| self.map(iommu, region, iova, len_bytes))
    }

    /// Takes a region away again, if nobody else wants it: no function reaches it once this has
    /// returned, or, without an IOMMU, has been told to.
    ///
    /// # Errors
    ///
    /// If the kernel keeps it.
    pub fn hide(&self, region: RegionId) -> Result<(), NotMapped> {
        let Some((iommu, mut mappings)) = self.lock() else { return Ok(()) };
        mappings.hide(region, |iova, len_bytes| {
            let refuse = |error| NotMapped::new(iova, len_bytes, error);
            match iommu.unmap(iova, len_bytes).map_err(refuse)? {
                unmapped if unmapped == len_bytes => Ok(()),
                _ => Err(refuse(io::ErrorKind::NotFound.into())),
            }
        })
    }

    /// Keeps addresses of the bus from standing for memory, as a device answers there. False if they
    /// stand for some already. Where memory lies in the machine no device answers.
    pub(crate) fn leave_out(&self, iova: u64, len_bytes: u64) -> bool {
        self.lock().is_none_or(|(_, mut mappings)| mappings.leave_out(iova, len_bytes))
    }

    fn map(
        &self,
        iommu: &Iommu,
        region: RegionId,
        iova: u64,
        len_bytes: u64,
    ) -> Result<(), NotMapped> {
        let refuse = |error| NotMapped::new(iova, len_bytes, error);
        let first = Segment { region, offset: 0, len_bytes: 1 };
        let address = self.inner.regions.address(first);
        let address = address.map_err(|_| refuse(io::ErrorKind::NotFound.into()))?;
        // The region lies in a table that is kept, whose places stay mapped.
        iommu.map(address.as_ptr() as u64, iova, len_bytes).map_err(refuse)
    }
}

impl Mappings {
    fn show(
        &mut self,
        region: RegionId,
        len_bytes: u64,
        map: impl FnOnce(u64, u64) -> Result<(), NotMapped>,
    ) -> Result<u64, NotMapped> {
        if let Some(mapped) = self.mapped.get_mut(&region) {
            mapped.users += 1;
            return Ok(mapped.iova);
        }
        let bytes = self.mapped.values().map(|mapped| mapped.len_bytes).sum();
        let before = (bytes, self.mapped.len());
        let none = "the IOMMU has no such row of addresses left";
        let none = || NotMapped::new(0, len_bytes, io::Error::other(none)).beside(before);
        let iova = self.space.allocate(len_bytes).ok_or_else(none)?;
        if let Err(why) = map(iova, len_bytes) {
            self.space.release(iova, len_bytes);
            return Err(why.beside(before));
        }
        self.mapped.insert(region, Mapped { iova, len_bytes, users: 1 });
        Ok(iova)
    }

    fn leave_out(&mut self, iova: u64, len_bytes: u64) -> bool {
        let end = iova.saturating_add(len_bytes);
        let is_used = self
            .mapped
            .values()
            .any(|mapped| mapped.iova < end && iova < mapped.iova + mapped.len_bytes);
        if !is_used {
            self.space.leave_out(iova, len_bytes);
        }
        !is_used
    }

    fn hide(
        &mut self,
        region: RegionId,
        unmap: impl FnOnce(u64, u64) -> Result<(), NotMapped>,
    ) -> Result<(), NotMapped> {
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

    use base::RegionId;
    use dma::{AddressSpace, Regions};

    use super::{ADDRESSES, Container, Mappings};
    use crate::NotMapped;

    #[test]
    fn a_region_is_mapped_once_for_all_functions_and_unmapped_with_the_last() {
        let space = AddressSpace::new([ADDRESSES]);
        let mut mappings = Mappings { space, mapped: BTreeMap::new() };
        let region = RegionId(4095);
        let refused = |iova, len| Err(NotMapped::new(iova, len, io::ErrorKind::OutOfMemory.into()));
        assert!(mappings.show(region, 8192, refused).is_err());
        let first = mappings.show(region, 8192, |_, _| Ok(())).unwrap();
        assert!((1 << 32..1 << 39).contains(&first), "{first:#x}: within 39 bits");
        let again = |_, _| panic!("it is mapped already");
        assert_eq!(mappings.show(region, 8192, again).unwrap(), first);
        let other = mappings.show(RegionId(1), 8192, |_, _| Ok(())).unwrap();
        assert_ne!(other, first);
        let third = mappings.show(RegionId(3), 4096, refused).unwrap_err();
        assert_eq!(third.mapped, (16384, 2), "beside what is mapped");
        mappings.hide(region, |_, _| panic!("another function wants it")).unwrap();
        assert!(mappings.hide(region, refused).is_err(), "the kernel keeps it");
        let mut unmapped = Vec::new();
        let mut unmap = |iova, len| {
            unmapped.push((iova, len));
            Ok(())
        };
        mappings.hide(region, &mut unmap).unwrap();
        mappings.hide(region, &mut unmap).unwrap();
        assert_eq!(unmapped, [(first, 8192)]);
        assert_eq!(mappings.show(RegionId(2), 8192, |_, _| Ok(())).unwrap(), first);
    }

    #[test]
    fn the_addresses_of_a_bar_stand_for_no_memory_and_one_that_does_is_no_bar() {
        let space = AddressSpace::new([ADDRESSES]);
        let mut mappings = Mappings { space, mapped: BTreeMap::new() };
        let used = mappings.show(RegionId(1), 8192, |_, _| Ok(())).unwrap();
        assert!(!mappings.leave_out(used + 8191, 1) && !mappings.leave_out(used - 1, 2));
        assert!(mappings.leave_out(used - 1, 1) && mappings.leave_out(u64::MAX - 1, 2));
        assert!(mappings.leave_out(used + 8192, 1 << 20), "a BAR lies there");
        let next = mappings.show(RegionId(2), 8192, |_, _| Ok(())).unwrap();
        assert!(next >= used + 8192 + (1 << 20), "{next:#x}");
        assert!(mappings.leave_out(used + 8192, 1 << 20), "and is looked for again");
    }

    #[test]
    fn without_an_iommu_memory_is_found_where_it_lies_and_no_other() {
        let regions = Regions::new(4);
        assert!(regions.lay_rows());
        let container = Container::without_iommu(tempfile::tempfile().unwrap(), regions.clone());
        let scattered = regions.allocate_shared(8192).unwrap();
        let refused = container.show(scattered.id()).unwrap_err();
        assert!(refused.to_string().contains("8192 bytes"), "{refused}");
        assert!(refused.to_string().contains("in a row"), "{refused}");
        container.hide(scattered.id()).unwrap();
        assert!(container.leave_out(4096, 4096), "no memory of the machine lies in a BAR");
        // Where somebody has reserved huge pages, and this process may know where they lie.
        if let Ok(row) = regions.allocate(4096) {
            assert_eq!(container.show(row.id()).unwrap(), regions.row(row.id()).unwrap());
        }
    }
}
