//! Unmapping of a region from devices before its memory is reused.

use std::sync::{Mutex, PoisonError, Weak};

use tenmil_base::RegionId;

use super::RegionTable;

/// Component that maps regions of a table for a device.
pub trait UnmapListener: Send + Sync {
    /// Unmaps a dropped region from the device. Returns true once the device cannot access it, also if it
    /// never could. May take as long as the device takes.
    fn unmap_dropped_region(&self, region: RegionId) -> bool;
}

/// All registered listeners that still exist.
#[derive(Debug, Default)]
pub(super) struct UnmapListeners {
    listeners: Mutex<Vec<Weak<dyn UnmapListener>>>,
}

impl UnmapListeners {
    /// Unmaps the region. Returns true if all listeners report that no device can access it.
    pub(super) fn unmap_from_all(&self, region: RegionId) -> bool {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<_> = listeners.iter().filter_map(Weak::upgrade).collect();
        drop(listeners);
        // Every listener is called, regardless of the results of the others.
        alive.iter().fold(true, |is_gone, listener| is_gone & listener.unmap_dropped_region(region))
    }
}

impl RegionTable {
    /// Registers `listener`, as long as it exists, for each dropped region. It is called after the
    /// region's number has become invalid and before its memory is reused. If it reports that a device
    /// can still access the memory, the memory is never reused.
    pub fn add_unmap_listener(&self, listener: Weak<dyn UnmapListener>) {
        let listeners = self.table.exposed_by.listeners.lock();
        let mut listeners = listeners.unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|other| other.strong_count() > 0);
        listeners.push(listener);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex, Weak};

    use tenmil_base::{Memory, RegionId};

    use super::UnmapListener;
    use crate::RegionTable;

    struct Device {
        regions: RegionTable,
        asked: Mutex<Vec<RegionId>>,
        lets_go: AtomicBool,
    }

    impl UnmapListener for Device {
        fn unmap_dropped_region(&self, region: RegionId) -> bool {
            assert_eq!(self.regions.len_bytes(region), 0, "the region cannot be mapped again");
            self.asked.lock().unwrap().push(region);
            self.lets_go.load(Ordering::Relaxed)
        }
    }

    fn test_device(regions: &RegionTable) -> Arc<Device> {
        let (asked, lets_go) = (Mutex::default(), AtomicBool::new(true));
        let device = Arc::new(Device { regions: regions.clone(), asked, lets_go });
        let listener: Weak<Device> = Arc::downgrade(&device);
        regions.add_unmap_listener(listener);
        device
    }

    #[test]
    fn each_device_unmaps_a_region_before_its_slot_is_reused() {
        let regions = RegionTable::shared(1);
        let devices = [test_device(&regions), test_device(&regions)];
        let mut gone = Vec::new();
        for _ in 0..3 {
            let region = regions.allocate_region(4096).unwrap();
            gone.push(region.id());
            drop(region);
        }
        devices.iter().for_each(|device| assert_eq!(*device.asked.lock().unwrap(), gone));
        drop(devices);
        drop(regions.allocate_region(4096).unwrap());
    }

    #[test]
    fn memory_still_mapped_by_a_device_is_never_reused() {
        let regions = RegionTable::shared(2);
        let devices = [test_device(&regions), test_device(&regions)];
        devices[0].lets_go.store(false, Ordering::Relaxed);
        let kept = regions.allocate_region(4096).unwrap();
        regions.fill(kept.segment(), 7).unwrap();
        let (id, file) = (kept.id(), regions.descriptor(kept.id()).unwrap());
        drop(kept);
        assert_eq!(*devices[1].asked.lock().unwrap(), [id], "it is asked all the same");
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 0).unwrap();
        assert_eq!(byte, [7], "the device may still look at it");
        devices[0].lets_go.store(true, Ordering::Relaxed);
        let _other = regions.allocate_region(4096).unwrap();
        assert!(regions.allocate_region(4096).is_err(), "of two places one is left");
    }
}
