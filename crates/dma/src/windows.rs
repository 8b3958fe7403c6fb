//! Which regions a device may reach beside its own memory.

use std::sync::atomic::{AtomicU64, Ordering};

use base::RegionId;

use crate::regions::{Regions, place_of};

/// The region that is open at each place of a table, looked at without a lock.
///
/// A place is shared by regions that come and go, so what is kept is which of them was opened: to
/// one that came later, what was opened before it says nothing.
#[derive(Debug)]
pub(crate) struct Windows {
    places: Box<[Place]>,
}

#[derive(Debug, Default)]
struct Place {
    /// The number of the region and one, or zero.
    open: AtomicU64,
    /// Where the region begins for the device. Stored before it is open.
    iova: AtomicU64,
}

impl Windows {
    /// None, for all regions that `regions` can ever have.
    pub(crate) fn new(regions: &Regions) -> Self {
        Self { places: (0..regions.regions_max()).map(|_| Place::default()).collect() }
    }

    /// The region that is open at `place`.
    #[inline]
    pub(crate) fn at(&self, place: u32) -> Option<RegionId> {
        // Pairs with the release in `open`: who finds the region here finds it in its table.
        let open = self.places.get(place as usize)?.open.load(Ordering::Acquire);
        Some(RegionId(u32::try_from(open.checked_sub(1)?).ok()?))
    }

    /// Where `region` begins for the device, if it is open.
    #[inline]
    pub(crate) fn iova(&self, region: RegionId) -> Option<u64> {
        let place = place_of(region);
        (self.at(place)? == region)
            .then(|| self.places[place as usize].iova.load(Ordering::Relaxed))
    }

    /// Opens `region`, in place of whichever was there before it.
    pub(crate) fn open(&self, region: RegionId, iova: u64) {
        if let Some(place) = self.places.get(place_of(region) as usize) {
            place.iova.store(iova, Ordering::Relaxed);
            place.open.store(u64::from(region.0) + 1, Ordering::Release);
        }
    }

    /// Closes `region`. One that came later at its place stays as it is.
    pub(crate) fn close(&self, region: RegionId) {
        if let Some(place) = self.places.get(place_of(region) as usize) {
            let open = u64::from(region.0) + 1;
            let _ = place.open.compare_exchange(open, 0, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::RegionId;

    use super::Windows;
    use crate::Regions;

    #[test]
    fn each_region_is_opened_and_closed_by_itself() {
        let windows = Windows::new(&Regions::new(130));
        let inside = [0, 1, 63, 64, 127, 128, 129].map(RegionId);
        for region in inside {
            assert!(windows.iova(region).is_none());
            windows.open(region, 7);
            let open: Vec<_> =
                inside.iter().filter(|region| windows.iova(**region) == Some(7)).collect();
            assert_eq!(open, [&region]);
            windows.close(region);
            assert!(windows.iova(region).is_none());
        }
        windows.open(RegionId(130), 7);
        assert_eq!(windows.at(130), None, "the table can have no such region");
    }

    #[test]
    fn what_was_opened_is_a_region_and_not_its_place() {
        let windows = Windows::new(&Regions::new(8));
        let (old, new) = (RegionId(3), RegionId(3 | 1 << 12));
        windows.open(old, 1);
        assert!(windows.iova(old) == Some(1) && windows.iova(new).is_none());
        windows.open(new, 2);
        assert!(windows.iova(new) == Some(2) && windows.iova(old).is_none());
        windows.close(old);
        assert_eq!(windows.at(3), Some(new));
    }
}
