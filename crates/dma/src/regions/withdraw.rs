//! Taking a region from the devices that reach it, before its memory is somebody else's.

use std::sync::{Mutex, PoisonError, Weak};

use base::RegionId;

use super::Regions;

/// Whoever lets a device reach regions of a table.
pub trait Withdraw: Send + Sync {
    /// A region goes, and whoever showed it to a device takes it away there. True once the device
    /// does not reach it: also if it never did. May take as long as the device does.
    fn withdraw(&self, region: RegionId) -> bool;
}

/// All of them, as long as they live.
#[derive(Debug, Default)]
pub(super) struct ExposedBy {
    listeners: Mutex<Vec<Weak<dyn Withdraw>>>,
}

impl ExposedBy {
    /// True if all of them say that no device reaches the region.
    pub(super) fn withdraw(&self, region: RegionId) -> bool {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<_> = listeners.iter().filter_map(Weak::upgrade).collect();
        drop(listeners);
        // Every one of them is asked, whatever the others say.
        alive.iter().fold(true, |is_gone, listener| is_gone & listener.withdraw(region))
    }
}

impl Regions {
    /// Has `listener` be asked of each region that goes, as long as it lives: once the region's
    /// number names nothing any more, before its memory is used for anything else. If it says that a
    /// device still reaches the memory, this is never used again.
    pub fn expose_by(&self, listener: Weak<dyn Withdraw>) {
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

    use base::{Memory, RegionId};

    use super::Withdraw;
    use crate::Regions;

    struct Device {
        regions: Regions,
        asked: Mutex<Vec<RegionId>>,
        lets_go: AtomicBool,
    }

    impl Withdraw for Device {
        fn withdraw(&self, region: RegionId) -> bool {
            assert_eq!(self.regions.len_bytes(region), 0, "nobody can show it again");
            self.asked.lock().unwrap().push(region);
            self.lets_go.load(Ordering::Relaxed)
        }
    }

    fn device(regions: &Regions) -> Arc<Device> {
        let (asked, lets_go) = (Mutex::default(), AtomicBool::new(true));
        let device = Arc::new(Device { regions: regions.clone(), asked, lets_go });
        let listener: Weak<Device> = Arc::downgrade(&device);
        regions.expose_by(listener);
        device
    }

    #[test]
    fn each_device_is_asked_to_let_go_of_a_region_before_its_place_is_used_again() {
        let regions = Regions::shared(1);
        let devices = [device(&regions), device(&regions)];
        let mut gone = Vec::new();
        for _ in 0..3 {
            let region = regions.allocate(4096).unwrap();
            gone.push(region.id());
            drop(region);
        }
        devices.iter().for_each(|device| assert_eq!(*device.asked.lock().unwrap(), gone));
        drop(devices);
        drop(regions.allocate(4096).unwrap());
    }

    #[test]
    fn memory_that_a_device_keeps_is_never_used_again() {
        let regions = Regions::shared(2);
        let devices = [device(&regions), device(&regions)];
        devices[0].lets_go.store(false, Ordering::Relaxed);
        let kept = regions.allocate(4096).unwrap();
        regions.fill(kept.segment(), 7).unwrap();
        let (id, file) = (kept.id(), regions.descriptor(kept.id()).unwrap());
        drop(kept);
        assert_eq!(*devices[1].asked.lock().unwrap(), [id], "it is asked all the same");
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 0).unwrap();
        assert_eq!(byte, [7], "the device may still look at it");
        devices[0].lets_go.store(true, Ordering::Relaxed);
        let _other = regions.allocate(4096).unwrap();
        assert!(regions.allocate(4096).is_err(), "of two places one is left");
    }
}
