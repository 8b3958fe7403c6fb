//! IOMMU mappings of the device, and a record of unmapped pages.
//!
//! Real pools stay mapped while a device is open. This map is deliberately stricter: allocations
//! are mapped and releases are unmapped at once, so an access to released memory is detected even
//! before the memory is reused.

use core::ops::RangeInclusive;
use std::collections::BTreeMap;

use tenmil_base::Instant;

use crate::violation::UnmapRecord;

/// Mappings of one device.
#[derive(Debug, Default)]
pub struct SimIommu {
    /// By page number.
    mapped: BTreeMap<u64, IommuMapping>,
    unmapped: BTreeMap<u64, UnmapRecord>,
    allocations: u64,
    cut_off: bool,
    /// Number of rejected accesses.
    pub blocked: u64,
}

/// Why an access is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessDenied {
    /// The DMA access of the device is revoked.
    CutOff,
    /// Part of the memory is not mapped.
    Stray(Option<UnmapRecord>),
}

#[derive(Clone, Copy, Debug)]
struct IommuMapping {
    allocation: u64,
}

pub(crate) const PAGE_SHIFT: u32 = 12;

impl SimIommu {
    /// Maps memory.
    pub fn map(&mut self, iova: u64, len_bytes: u64) {
        self.allocations += 1;
        for page in page_range(iova, len_bytes) {
            self.mapped.insert(page, IommuMapping { allocation: self.allocations });
            self.unmapped.remove(&page);
        }
    }

    /// Unmaps memory. Returns false if part of it was not mapped.
    #[must_use]
    pub fn unmap(&mut self, at: Instant, iova: u64, len_bytes: u64) -> bool {
        page_range(iova, len_bytes).fold(true, |all, page| {
            let Some(IommuMapping { allocation }) = self.mapped.remove(&page) else { return false };
            self.unmapped.insert(page, UnmapRecord { allocation, at });
            all
        })
    }

    /// Revokes or restores the access of the device to all memory.
    pub fn set_revoked(&mut self, cut_off: bool) {
        self.cut_off = cut_off;
    }

    /// Whether the access is revoked.
    pub fn is_revoked(&self) -> bool {
        self.cut_off
    }

    /// Checks whether the device may access this memory.
    pub fn check_access(&self, iova: u64, len_bytes: u64) -> Result<(), AccessDenied> {
        if self.cut_off { Err(AccessDenied::CutOff) } else { self.check_mapped(iova, len_bytes) }
    }

    /// Checks whether this memory is allocated, regardless of a revocation.
    pub fn check_mapped(&self, iova: u64, len_bytes: u64) -> Result<(), AccessDenied> {
        match page_range(iova, len_bytes).find(|page| !self.mapped.contains_key(page)) {
            None => Ok(()),
            Some(page) => Err(AccessDenied::Stray(self.unmapped.get(&page).copied())),
        }
    }

    /// Number of mapped pages.
    pub fn mapped_page_count(&self) -> u64 {
        self.mapped.len() as u64
    }
}

/// Page numbers of `len_bytes` at `iova`. At least one. The search in a huge range is short, since
/// it stops at the first unmapped page.
pub(crate) fn page_range(iova: u64, len_bytes: u64) -> RangeInclusive<u64> {
    let last = iova.saturating_add(len_bytes.max(1) - 1);
    iova >> PAGE_SHIFT..=last >> PAGE_SHIFT
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{AccessDenied, SimIommu};
    use crate::violation::UnmapRecord;

    const AT: Instant = Instant { ns: 5 };

    #[test]
    fn only_mapped_pages_are_accessible_and_errors_name_the_unmapper() {
        let mut iommu = SimIommu::default();
        iommu.map(0x10000, 0x1000);
        iommu.map(0x11000, 0x2000);
        assert_eq!(iommu.check_access(0x10ff8, 16), Ok(()), "across two allocations");
        assert_eq!(
            iommu.check_access(0x12fff, 2),
            Err(AccessDenied::Stray(None)),
            "one byte outside"
        );
        assert_eq!(iommu.check_access(0x9_0000, u64::MAX), Err(AccessDenied::Stray(None)));
        assert!(iommu.unmap(AT, 0x11000, 0x2000));
        let unmapped = UnmapRecord { allocation: 2, at: AT };
        assert_eq!(iommu.check_access(0x10ff8, 16), Err(AccessDenied::Stray(Some(unmapped))));
        assert_eq!(iommu.mapped_page_count(), 1);
        assert!(!iommu.unmap(AT, 0x11000, 0x1000), "unmapped twice");
    }

    #[test]
    fn revoked_device_can_access_nothing() {
        let mut iommu = SimIommu::default();
        iommu.map(0x10000, 0x1000);
        iommu.set_revoked(true);
        assert_eq!(iommu.check_access(0x10000, 1), Err(AccessDenied::CutOff));
        assert_eq!(iommu.check_mapped(0x10000, 1), Ok(()), "the host still can");
        iommu.set_revoked(false);
        assert_eq!(iommu.check_access(0x10000, 1), Ok(()));
    }
}
