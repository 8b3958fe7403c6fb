//! What a remote SSD may reach: memory of this process, as long as a connection is there to reach it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Dma, Memory, NoSuchMemory, NotMapped, RegionId, Segment};
use dma::{DevicePool, HostCompletionRing, HostSubmissionRing};

/// The memory of a remote SSD, as its driver uses it.
///
/// To cut it off is to close all connections, and to wait until the controller behind them can do
/// nothing any more of what it was told.
#[derive(Clone, Debug)]
pub struct Reach {
    pool: DevicePool,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    is_cut_off: AtomicBool,
    /// A connection is there, or a controller that may still do what it was told.
    holds: AtomicBool,
}

impl Reach {
    /// Memory of `pool`, which nothing reaches yet. What was lent can be named to it.
    #[must_use]
    pub fn new(pool: DevicePool) -> Self {
        pool.name_lent();
        Self { pool, shared: Arc::default() }
    }

    /// The pool underneath.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    pub(crate) fn is_cut_off(&self) -> bool {
        self.shared.is_cut_off.load(Ordering::Acquire)
    }

    pub(crate) fn set_holds(&self, holds: bool) {
        self.shared.holds.store(holds, Ordering::Release);
    }
}

impl Memory for Reach {
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

impl Dma for Reach {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        self.pool.allocate(len_bytes)
    }

    fn release(&self, segment: Segment) {
        self.pool.release(segment);
    }

    fn map(&self, region: RegionId) -> Result<(), NotMapped> {
        self.pool.map(region)
    }

    fn unmap(&self, region: RegionId) {
        self.pool.unmap(region);
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        self.pool.iova(segment)
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
        self.shared.is_cut_off.store(true, Ordering::Release);
        !self.shared.holds.load(Ordering::Acquire)
    }

    fn reconnect(&self) {
        self.shared.is_cut_off.store(false, Ordering::Release);
    }
}
