//! Memory that a remote controller may access: memory of this process, while a connection exists.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{Dma, DmaMapError, InvalidSegment, Memory, RegionId, Segment};
use tenmil_dma::{DevicePool, HostCompletionRing, HostSubmissionRing};

/// DMA interface of a remote controller.
///
/// Revoking access means closing all connections, and waiting until the controller can no longer execute
/// outstanding commands.
#[derive(Clone, Debug)]
pub struct RemoteDma {
    pool: DevicePool,
    revocation: Arc<RevocationState>,
}

#[derive(Debug, Default)]
struct RevocationState {
    is_revoked: AtomicBool,
    /// There is a connection, or a controller that may still execute commands.
    is_in_use: AtomicBool,
}

impl RemoteDma {
    /// Creates the interface over `pool`, without access as yet. Kernel buffers can be addressed.
    #[must_use]
    pub fn new(pool: DevicePool) -> Self {
        pool.allow_kernel_buffers();
        Self { pool, revocation: Arc::default() }
    }

    /// The underlying pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revocation.is_revoked.load(Ordering::Acquire)
    }

    pub(crate) fn set_in_use(&self, is_in_use: bool) {
        self.revocation.is_in_use.store(is_in_use, Ordering::Release);
    }
}

impl Memory for RemoteDma {
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

impl Dma for RemoteDma {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        self.pool.allocate(len_bytes)
    }

    fn release(&self, segment: Segment) {
        self.pool.release(segment);
    }

    fn map(&self, region: RegionId) -> Result<(), DmaMapError> {
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
    fn iova_translator(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        self.pool.iova_translator(like)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        self.pool.submission_ring(memory, depth)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        self.pool.completion_ring(memory, depth)
    }

    fn revoke_access(&self) -> bool {
        self.revocation.is_revoked.store(true, Ordering::Release);
        !self.revocation.is_in_use.load(Ordering::Acquire)
    }

    fn restore_access(&self) {
        self.revocation.is_revoked.store(false, Ordering::Release);
    }
}
