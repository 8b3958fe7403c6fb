//! Memory mapped for an attached controller.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tenmil_base::{
    BarMapError, BarRange, Dma, DmaMapError, InvalidSegment, Memory, RegionId, Segment,
};
use tenmil_dma::{
    CommandStore, DevicePool, HostCompletionRing, HostSubmissionRing, Region, RegionTable,
    UnmapListener,
};

use super::ControllerBus;
use tenmil_base::Error;

/// DMA pool of a controller, and the data regions that are mapped for it on demand.
///
/// A region is mapped when a command first refers to it, by one call to the kernel or one message
/// and its reply. It is unmapped when it is freed.
#[derive(Clone)]
pub(super) struct MappedDma<B: ControllerBus> {
    pool: DevicePool,
    bus: Arc<BusMapper<B>>,
}

/// Memory of a controller's queues, and its DMA access.
///
/// If the device may still access memory when this is dropped, the mapping state is leaked: memory
/// that was mapped for the device is never reused.
pub(super) struct QueueMemory<B: ControllerBus> {
    /// Dropped first: unmapping it needs the bus.
    memory: Option<Region>,
    dma: MappedDma<B>,
}

/// Maps and unmaps regions, as listener of the region table.
struct BusMapper<B> {
    bus: B,
    shown: Mutex<MappingState>,
}

/// Result of mapping the data regions.
#[derive(Default)]
struct MappingState {
    /// At least one region was mapped.
    has_any: bool,
    /// Error of the last mapping that failed.
    refused: Option<Error>,
}

impl<B: ControllerBus> QueueMemory<B> {
    /// Creates a pool over all of `memory` and maps it for the device.
    pub(super) fn new(memory: Region, regions: &RegionTable, bus: B) -> Result<Self, Error> {
        let whole = memory.segment();
        let bus = Arc::new(BusMapper { bus, shown: Mutex::default() });
        let listener: Weak<BusMapper<B>> = Arc::downgrade(&bus);
        regions.add_unmap_listener(listener);
        let iova = match bus.bus.map(whole.region) {
            Ok(iova) => iova,
            Err(refused) => {
                // The device may have received the mapping: unmap it while the bus is still there.
                drop(memory);
                return Err(refused);
            }
        };
        let store = CommandStore::for_device(B::KIND);
        let pool = DevicePool::new_at_iova(regions.clone(), whole, B::KIND, store, iova);
        Ok(Self { memory: Some(memory), dma: MappedDma { pool, bus } })
    }

    /// DMA access of the controller.
    pub(super) fn dma(&self) -> &MappedDma<B> {
        &self.dma
    }
}

impl<B: ControllerBus> Drop for QueueMemory<B> {
    fn drop(&mut self) {
        self.memory = None;
        let bus = &self.dma.bus;
        if bus.bus.lost_reason().is_some() && !bus.bus.revoke_dma_access() {
            std::mem::forget(Arc::clone(bus));
        }
    }
}

impl<B: ControllerBus> UnmapListener for BusMapper<B> {
    fn unmap_dropped_region(&self, region: RegionId) -> bool {
        self.bus.unmap(region)
    }
}

impl<B: ControllerBus> MappedDma<B> {
    /// Error of the last failed mapping, if no data region was ever mapped.
    pub(super) fn mapping_error(&self) -> Option<Error> {
        let known = self.bus.shown.lock().unwrap_or_else(PoisonError::into_inner);
        known.refused.clone().filter(|_| !known.has_any)
    }

    #[cold]
    fn map_for_device(&self, segment: Segment) -> Option<u64> {
        self.map(segment.region).ok()?;
        self.pool.iova(segment)
    }
}

impl<B: ControllerBus> Dma for MappedDma<B> {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        self.pool.allocate(len_bytes)
    }

    fn release(&self, segment: Segment) {
        self.pool.release(segment);
    }

    fn map(&self, region: RegionId) -> Result<(), DmaMapError> {
        let shown = self.bus.bus.map(region);
        let mut known = self.bus.shown.lock().unwrap_or_else(PoisonError::into_inner);
        match shown {
            Ok(iova) => {
                known.has_any = true;
                drop(known);
                self.pool.map_at(region, iova)
            }
            Err(refused) => {
                known.refused = Some(refused);
                Err(DmaMapError { region, reason: "the device was not let reach it" })
            }
        }
    }

    fn unmap(&self, region: RegionId) {
        self.pool.unmap(region);
        // If the device keeps the mapping, the end of the region reports it again.
        let _ = self.bus.bus.unmap(region);
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        match self.pool.iova(segment) {
            Some(iova) => Some(iova),
            None => self.map_for_device(segment),
        }
    }

    #[inline(always)]
    fn iova_translator(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        self.pool.iova_translator(like)
    }

    fn device_memory(&self, part: BarRange) -> Result<Segment, BarMapError> {
        let (memory, address) = self.bus.bus.device_memory(part)?;
        // Address at which the region would begin; only the mapped part of it is ever translated.
        let begins = address.checked_sub(memory.offset);
        let placed = begins.and_then(|begins| self.pool.map_at(memory.region, begins).ok());
        let why = "there is no place for it beside its queues";
        placed.map(|()| memory).ok_or(BarMapError::Unusable { reason: why })
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        self.pool.submission_ring(memory, depth)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        self.pool.completion_ring(memory, depth)
    }

    fn revoke_access(&self) -> bool {
        self.bus.bus.revoke_dma_access() && self.pool.revoke_access()
    }

    fn restore_access(&self) {
        self.pool.restore_access();
        self.bus.bus.restore_dma_access();
    }
}

impl<B: ControllerBus> Memory for MappedDma<B> {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.pool.load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.pool.store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.pool.fill(segment, byte)
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        self.pool.load_u32(segment)
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        self.pool.store_u32(segment, value)
    }
}
