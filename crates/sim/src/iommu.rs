//! What is mapped for the device, and who unmapped what is not.
//!
//! Real pools stay mapped for as long as a device is open. This map is stricter on purpose: what
//! the driver allocates is mapped, and what it releases is unmapped at that moment, so an access to
//! memory that was given back is seen even if nothing else lies there yet.

use core::ops::RangeInclusive;
use std::collections::BTreeMap;

use base::Instant;

use crate::failure::Unmapped;

/// The map of one device.
#[derive(Debug, Default)]
pub struct Iommu {
    /// By page number.
    mapped: BTreeMap<u64, Mapped>,
    unmapped: BTreeMap<u64, Unmapped>,
    allocations: u64,
    cut_off: bool,
    /// Accesses turned away, for whatever reason.
    pub blocked: u64,
}

/// Why an access is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The device is cut off from all memory.
    CutOff,
    /// Some of the memory is not mapped.
    Stray(Option<Unmapped>),
}

#[derive(Clone, Copy, Debug)]
struct Mapped {
    allocation: u64,
}

pub(crate) const PAGE_SHIFT: u32 = 12;

impl Iommu {
    /// Maps memory.
    pub fn map(&mut self, iova: u64, len_bytes: u64) {
        self.allocations += 1;
        for page in pages(iova, len_bytes) {
            self.mapped.insert(page, Mapped { allocation: self.allocations });
            self.unmapped.remove(&page);
        }
    }

    /// Unmaps memory. False if some of it was not mapped.
    #[must_use]
    pub fn unmap(&mut self, at: Instant, iova: u64, len_bytes: u64) -> bool {
        pages(iova, len_bytes).fold(true, |all, page| {
            let Some(Mapped { allocation }) = self.mapped.remove(&page) else { return false };
            self.unmapped.insert(page, Unmapped { allocation, at });
            all
        })
    }

    /// Cuts the device off from all memory, or lets it back.
    pub fn cut_off(&mut self, cut_off: bool) {
        self.cut_off = cut_off;
    }

    /// Whether the device is cut off.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off
    }

    /// Whether the device may touch this memory.
    pub fn check(&self, iova: u64, len_bytes: u64) -> Result<(), Refusal> {
        if self.cut_off { Err(Refusal::CutOff) } else { self.check_mapped(iova, len_bytes) }
    }

    /// Whether this memory belongs to an allocation, whoever asks.
    pub fn check_mapped(&self, iova: u64, len_bytes: u64) -> Result<(), Refusal> {
        match pages(iova, len_bytes).find(|page| !self.mapped.contains_key(page)) {
            None => Ok(()),
            Some(page) => Err(Refusal::Stray(self.unmapped.get(&page).copied())),
        }
    }

    /// Pages that are mapped.
    pub fn pages_mapped(&self) -> u64 {
        self.mapped.len() as u64
    }
}

/// The numbers of the pages that `len_bytes` at `iova` touch: at least one, and few even if the
/// length is absurd, since the first unmapped one ends the search.
pub(crate) fn pages(iova: u64, len_bytes: u64) -> RangeInclusive<u64> {
    let last = iova.saturating_add(len_bytes.max(1) - 1);
    iova >> PAGE_SHIFT..=last >> PAGE_SHIFT
}

#[cfg(test)]
mod tests {
    use base::Instant;

    use super::{Iommu, Refusal};
    use crate::failure::Unmapped;

    const AT: Instant = Instant { ns: 5 };

    #[test]
    fn only_what_is_mapped_can_be_touched_and_the_rest_names_who_unmapped_it() {
        let mut iommu = Iommu::default();
        iommu.map(0x10000, 0x1000);
        iommu.map(0x11000, 0x2000);
        assert_eq!(iommu.check(0x10ff8, 16), Ok(()), "across two allocations");
        assert_eq!(iommu.check(0x12fff, 2), Err(Refusal::Stray(None)), "one byte outside");
        assert_eq!(iommu.check(0x9_0000, u64::MAX), Err(Refusal::Stray(None)));
        assert!(iommu.unmap(AT, 0x11000, 0x2000));
        let unmapped = Unmapped { allocation: 2, at: AT };
        assert_eq!(iommu.check(0x10ff8, 16), Err(Refusal::Stray(Some(unmapped))));
        assert_eq!(iommu.pages_mapped(), 1);
        assert!(!iommu.unmap(AT, 0x11000, 0x1000), "unmapped twice");
    }

    #[test]
    fn a_device_that_is_cut_off_reaches_nothing() {
        let mut iommu = Iommu::default();
        iommu.map(0x10000, 0x1000);
        iommu.cut_off(true);
        assert_eq!(iommu.check(0x10000, 1), Err(Refusal::CutOff));
        assert_eq!(iommu.check_mapped(0x10000, 1), Ok(()), "the host still can");
        iommu.cut_off(false);
        assert_eq!(iommu.check(0x10000, 1), Ok(()));
    }
}
