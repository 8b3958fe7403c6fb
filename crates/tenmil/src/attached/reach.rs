//! Memory that the controller reaches.

use base::{Dma, Memory, NoSuchMemory, NotMapped, RegionId, Segment};
use dma::{DevicePool, HostCompletionRing, HostSubmissionRing};

use super::Bus;

/// A pool that the controller reaches, and whatever regions the driver names beside it.
///
/// A region is shown when it is first named: a call to the kernel, or a message there and back, once.
#[derive(Clone)]
pub(super) struct Reach<B> {
    pool: DevicePool,
    bus: B,
}

impl<B: Bus> Reach<B> {
    /// `pool` lies at the beginning of its region, which is shown now.
    pub(super) fn new(pool: DevicePool, memory: Segment, bus: B) -> Result<Self, String> {
        let iova = pool.iova(memory).ok_or("its queues have no address")?;
        bus.show(memory.region, iova)?;
        Ok(Self { pool, bus })
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
        self.pool.map(region)?;
        let first = Segment { region, offset: 0, len_bytes: 1 };
        let iova = self.pool.iova(first);
        let shown = iova.map(|iova| self.bus.show(region, iova));
        if let Some(Ok(())) = shown {
            return Ok(());
        }
        self.pool.unmap(region);
        Err(NotMapped { region, why: "the device was not let reach it" })
    }

    fn unmap(&self, region: RegionId) {
        self.pool.unmap(region);
        self.bus.hide(region);
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        match self.pool.iova(segment) {
            Some(iova) => Some(iova),
            None => self.show(segment),
        }
    }

    #[inline(always)]
    fn iovas(&self, len_bytes: u32) -> impl Fn(Segment) -> Option<u64> {
        self.pool.iovas(len_bytes)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        self.pool.submission_ring(memory, depth)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        self.pool.completion_ring(memory, depth)
    }

    fn cut_off(&self) -> bool {
        self.bus.cut_off() && self.pool.cut_off()
    }

    fn reconnect(&self) {
        self.pool.reconnect();
        self.bus.reconnect();
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
