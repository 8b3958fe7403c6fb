//! Memory that the controller reaches.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use base::{BarPart, Dma, Memory, NoDeviceMemory, NoSuchMemory, NotMapped, RegionId, Segment};
use dma::{
    CommandStore, DevicePool, HostCompletionRing, HostSubmissionRing, Region, Regions, Withdraw,
};

use super::Bus;
use crate::Refused;

/// A pool that the controller reaches, and whatever regions the driver names beside it.
///
/// A region is shown when it is first named: a call to the kernel, or a message there and back, once.
/// It is taken away when it goes.
#[derive(Clone)]
pub(super) struct Reach<B: Bus> {
    pool: DevicePool,
    bus: Arc<Exposed<B>>,
}

/// The memory of a controller's queues, and the controller's way to it.
///
/// A device that may still reach memory when this is dropped is kept in mind for ever: nothing that
/// it was shown is used for anything else.
pub(super) struct Home<B: Bus> {
    /// Dropped first: the way is there as long as it is.
    memory: Option<Region>,
    reach: Reach<B>,
}

/// What regions are shown by.
struct Exposed<B> {
    bus: B,
    shown: Mutex<Shown>,
}

/// What became of regions beside that of the queues.
#[derive(Default)]
struct Shown {
    /// One of them is or was reached.
    has_any: bool,
    /// Why the last one was not that could not be.
    refused: Option<Refused>,
}

impl<B: Bus> Home<B> {
    /// A pool of all of `memory`, which is shown now.
    pub(super) fn new(memory: Region, regions: &Regions, bus: B) -> Result<Self, Refused> {
        let whole = memory.segment();
        let bus = Arc::new(Exposed { bus, shown: Mutex::default() });
        let listener: Weak<Exposed<B>> = Arc::downgrade(&bus);
        regions.expose_by(listener);
        let iova = match bus.bus.show(whole.region) {
            Ok(iova) => iova,
            Err(refused) => {
                // The device may have been told of it: it is taken away before the way is gone.
                drop(memory);
                return Err(refused);
            }
        };
        let store = CommandStore::for_device(B::KIND);
        let pool = DevicePool::placed(regions.clone(), whole, B::KIND, store, iova);
        Ok(Self { memory: Some(memory), reach: Reach { pool, bus } })
    }

    /// The way.
    pub(super) fn reach(&self) -> &Reach<B> {
        &self.reach
    }
}

impl<B: Bus> Drop for Home<B> {
    fn drop(&mut self) {
        self.memory = None;
        let bus = &self.reach.bus;
        if bus.bus.lost().is_some() && !bus.bus.cut_off() {
            std::mem::forget(Arc::clone(bus));
        }
    }
}

impl<B: Bus> Withdraw for Exposed<B> {
    fn withdraw(&self, region: RegionId) -> bool {
        self.bus.hide(region)
    }
}

impl<B: Bus> Reach<B> {
    /// Why no data ever come or go, if so it is.
    pub(super) fn complaint(&self) -> Option<Refused> {
        let known = self.bus.shown.lock().unwrap_or_else(PoisonError::into_inner);
        known.refused.clone().filter(|_| !known.has_any)
    }

    #[cold]
    fn show(&self, segment: Segment) -> Option<u64> {
        self.map(segment.region).ok()?;
        self.pool.iova(segment)
    }
}

impl<B: Bus> Dma for Reach<B> {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        self.pool.allocate(len_bytes)
    }

    fn release(&self, segment: Segment) {
        self.pool.release(segment);
    }

    fn map(&self, region: RegionId) -> Result<(), NotMapped> {
        let shown = self.bus.bus.show(region);
        let mut known = self.bus.shown.lock().unwrap_or_else(PoisonError::into_inner);
        match shown {
            Ok(iova) => {
                known.has_any = true;
                drop(known);
                self.pool.map_at(region, iova)
            }
            Err(refused) => {
                known.refused = Some(refused);
                Err(NotMapped { region, why: "the device was not let reach it" })
            }
        }
    }

    fn unmap(&self, region: RegionId) {
        self.pool.unmap(region);
        // If the device keeps it, the region's end is told so too.
        let _ = self.bus.bus.hide(region);
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        match self.pool.iova(segment) {
            Some(iova) => Some(iova),
            None => self.show(segment),
        }
    }

    #[inline(always)]
    fn iovas(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        self.pool.iovas(like)
    }

    fn device_memory(&self, part: BarPart) -> Result<Segment, NoDeviceMemory> {
        let (memory, address) = self.bus.bus.device_memory(part)?;
        // The address that the region would begin at; only what was mapped of it is ever asked for.
        let begins = address.checked_sub(memory.offset);
        let placed = begins.and_then(|begins| self.pool.map_at(memory.region, begins).ok());
        let why = "there is no place for it beside its queues";
        placed.map(|()| memory).ok_or(NoDeviceMemory::Unusable { why })
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        self.pool.submission_ring(memory, depth)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        self.pool.completion_ring(memory, depth)
    }

    fn cut_off(&self) -> bool {
        self.bus.bus.cut_off() && self.pool.cut_off()
    }

    fn reconnect(&self) {
        self.pool.reconnect();
        self.bus.bus.reconnect();
    }
}

impl<B: Bus> Memory for Reach<B> {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        self.pool.load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        self.pool.store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory> {
        self.pool.fill(segment, byte)
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, NoSuchMemory> {
        self.pool.load_u32(segment)
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), NoSuchMemory> {
        self.pool.store_u32(segment, value)
    }
}
