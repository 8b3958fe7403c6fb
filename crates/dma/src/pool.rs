//! What one device may reach: a pool of pages with I/O virtual addresses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{Dma, Memory, NoSuchMemory, RegionId, Segment};

use crate::arena::Arena;
use crate::barrier::DeviceKind;
use crate::command_store::CommandStore;
use crate::regions::Regions;
use crate::ring::{HostCompletionRing, HostSubmissionRing};

/// Memory for one device: pages to allocate from, and the addresses at which the device finds them.
///
/// A handle, cheap to clone. Allocating takes a lock; resolving an address does not.
#[derive(Clone, Debug)]
pub struct DevicePool {
    regions: Regions,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    region: RegionId,
    kind: DeviceKind,
    store: CommandStore,
    arena: Mutex<Arena>,
    cut_off: AtomicBool,
}

/// Allocations are whole pages of this size, whatever backs them.
const PAGE: u64 = 4096;

/// A region's addresses begin at `(number + 1) << IOVA_SHIFT`, so that address zero is never valid
/// and an address says by itself which region it lies in: 64 GiB a region, and 4 095 regions in the
/// 48 bits that every IOMMU has.
pub(crate) const IOVA_SHIFT: u32 = 36;

impl DevicePool {
    /// A pool over all of `memory`, which must be a whole region that nobody else hands out.
    ///
    /// # Panics
    ///
    /// If `memory` is not a whole region of `regions`.
    pub fn new(regions: Regions, memory: Segment, kind: DeviceKind, store: CommandStore) -> Self {
        let len_bytes = regions.len_bytes(memory.region);
        assert!(memory.offset == 0 && len_bytes > 0, "a pool owns a whole region");
        let arena = Mutex::new(Arena::new(len_bytes / PAGE));
        let cut_off = AtomicBool::new(false);
        let shared = Shared { region: memory.region, kind, store, arena, cut_off };
        Self { regions, shared: Arc::new(shared) }
    }

    /// The table that resolves this pool's segments.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Whether the device has been cut off from its memory.
    pub fn is_cut_off(&self) -> bool {
        self.shared.cut_off.load(Ordering::Acquire)
    }

    /// Bytes that can still be allocated.
    pub fn free_bytes(&self) -> u64 {
        self.arena(|arena| arena.free_pages()) * PAGE
    }

    fn arena<T>(&self, work: impl FnOnce(&mut Arena) -> T) -> T {
        work(&mut self.shared.arena.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Dma for DevicePool {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let pages = u64::from(len_bytes.max(1)).div_ceil(PAGE);
        let first = self.arena(|arena| arena.allocate(pages))?;
        let segment = Segment { region: self.shared.region, offset: first * PAGE, len_bytes };
        // Memory fresh from the kernel is zero; memory that was used before is not.
        self.regions.fill(segment, 0).ok()?;
        Some(segment)
    }

    fn release(&self, segment: Segment) {
        let pages = u64::from(segment.len_bytes.max(1)).div_ceil(PAGE);
        self.arena(|arena| arena.release(segment.offset / PAGE, pages));
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        let base = (u64::from(segment.region.0) + 1) << IOVA_SHIFT;
        self.regions.contains(segment).then(|| base + segment.offset)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        let Shared { kind, store, .. } = *self.shared;
        HostSubmissionRing::new(self.regions.clone(), memory, depth, kind, store)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        HostCompletionRing::new(self.regions.clone(), memory, depth, self.shared.kind)
    }

    fn cut_off(&self) {
        self.shared.cut_off.store(true, Ordering::SeqCst);
    }

    fn reconnect(&self) {
        self.shared.cut_off.store(false, Ordering::SeqCst);
    }
}

impl Memory for DevicePool {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        self.regions.load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        self.regions.store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory> {
        self.regions.fill(segment, byte)
    }
}

#[cfg(test)]
mod tests {
    use base::{Dma, Memory, RegionId, Segment};

    use crate::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions};

    fn pool(pages: usize) -> DevicePool {
        let regions = Regions::new(4);
        let memory = regions.add(Mapping::new(pages * 4096, Backing::Private).unwrap()).unwrap();
        DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain)
    }

    #[test]
    fn pages_are_zeroed_page_aligned_and_come_back_to_the_pool() {
        let pool = pool(4);
        let first = pool.allocate(4097).unwrap();
        pool.fill(first, 0xff).unwrap();
        assert_eq!(pool.free_bytes(), 2 * 4096);
        assert!(pool.allocate(3 * 4096).is_none());
        pool.release(first);
        assert_eq!(pool.free_bytes(), 4 * 4096);

        let again = pool.allocate(4 * 4096).unwrap();
        let mut bytes = vec![1; 4 * 4096];
        pool.load(again, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "used memory was handed out again, zeroed");
        assert_eq!(pool.iova(again).unwrap() % 4096, 0);
    }

    #[test]
    fn what_the_device_cannot_reach_has_no_address() {
        let pool = pool(1);
        let stray = Segment { region: RegionId(0), offset: 4096, len_bytes: 1 };
        assert_eq!(pool.iova(stray), None);
        assert_eq!(pool.iova(Segment { region: RegionId(9), ..stray }), None);
    }
}
