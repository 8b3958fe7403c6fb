//! Regions mapped for a device in addition to its own pool.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::RegionId;

use crate::region_table::{RegionTable, slot_index};

/// Lock-free table of the region mapped at each place of a region table.
///
/// Successive regions share a place, so each entry stores which region was mapped: an entry of an earlier
/// region does not apply to a later one.
#[derive(Debug)]
pub(crate) struct MappedRegions {
    places: Box<[MappedRegionSlot]>,
}

#[derive(Debug, Default)]
struct MappedRegionSlot {
    /// Region number plus one, or zero.
    open: AtomicU64,
    /// Device address of the region. Stored before `open`.
    iova: AtomicU64,
}

impl MappedRegions {
    /// Creates an empty table for all places of `regions`.
    pub(crate) fn new(regions: &RegionTable) -> Self {
        Self { places: (0..regions.regions_max()).map(|_| MappedRegionSlot::default()).collect() }
    }

    /// Region mapped at `place`.
    #[inline]
    pub(crate) fn region_at(&self, place: u32) -> Option<RegionId> {
        // Pairs with the release store in `open`: the region found here is visible in its table.
        let open = self.places.get(place as usize)?.open.load(Ordering::Acquire);
        Some(RegionId(u32::try_from(open.checked_sub(1)?).ok()?))
    }

    /// Device address of `region`, if it is mapped.
    #[inline]
    pub(crate) fn iova(&self, region: RegionId) -> Option<u64> {
        let place = slot_index(region);
        (self.region_at(place)? == region)
            .then(|| self.places[place as usize].iova.load(Ordering::Relaxed))
    }

    /// Maps `region`, replacing any earlier region at its place.
    pub(crate) fn add_mapping(&self, region: RegionId, iova: u64) {
        if let Some(place) = self.places.get(slot_index(region) as usize) {
            place.iova.store(iova, Ordering::Relaxed);
            place.open.store(u64::from(region.0) + 1, Ordering::Release);
        }
    }

    /// Unmaps `region`. A later region at its place is not affected.
    pub(crate) fn remove_mapping(&self, region: RegionId) {
        if let Some(place) = self.places.get(slot_index(region) as usize) {
            let open = u64::from(region.0) + 1;
            let _ = place.open.compare_exchange(open, 0, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::RegionId;

    use super::MappedRegions;
    use crate::RegionTable;

    #[test]
    fn each_region_is_mapped_and_unmapped_by_itself() {
        let windows = MappedRegions::new(&RegionTable::new(130));
        let inside = [0, 1, 63, 64, 127, 128, 129].map(RegionId);
        for region in inside {
            assert!(windows.iova(region).is_none());
            windows.add_mapping(region, 7);
            let open: Vec<_> =
                inside.iter().filter(|region| windows.iova(**region) == Some(7)).collect();
            assert_eq!(open, [&region]);
            windows.remove_mapping(region);
            assert!(windows.iova(region).is_none());
        }
        windows.add_mapping(RegionId(130), 7);
        assert_eq!(windows.region_at(130), None, "the table can have no such region");
    }

    #[test]
    fn mapping_belongs_to_the_region_and_not_to_its_slot() {
        let windows = MappedRegions::new(&RegionTable::new(8));
        let (old, new) = (RegionId(3), RegionId(3 | 1 << 12));
        windows.add_mapping(old, 1);
        assert!(windows.iova(old) == Some(1) && windows.iova(new).is_none());
        windows.add_mapping(new, 2);
        assert!(windows.iova(new) == Some(2) && windows.iova(old).is_none());
        windows.remove_mapping(old);
        assert_eq!(windows.region_at(3), Some(new));
    }
}
