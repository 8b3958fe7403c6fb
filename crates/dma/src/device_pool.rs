//! Device memory pool: pages with I/O virtual addresses for one device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    DirectAccessWindow, Dma, DmaMapError, InvalidSegment, Memory, RegionId, Segment, Wake,
};

use crate::barrier::DeviceKind;
use crate::command_store::CommandStore;
use crate::host_rings::{HostCompletionRing, HostSubmissionRing};
use crate::mapped_regions::MappedRegions;
use crate::page_allocator::PageAllocator;
use crate::region_table::{RegionTable, slot_index};
use crate::revocation::AccessRevocation;

/// DMA memory of one device: pages to allocate, and the addresses at which the device accesses them.
///
/// Other regions of the same table can be [mapped](Dma::map) for the device; they may hold data, but not
/// rings. A submission ring outside the pool is assumed to be in [device memory](Self::map_at), and is
/// written accordingly.
///
/// A handle, cheap to clone. Allocation takes a lock; resolving an address does not.
#[derive(Clone, Debug)]
pub struct DevicePool {
    /// Range of the pool, to which the device's access is limited. Stored in every handle, so that
    /// resolving an address follows no pointer.
    memory: Segment,
    /// Device address of the region.
    region_iova: u64,
    regions: RegionTable,
    shared: Arc<PoolShared>,
}

#[derive(Debug)]
struct PoolShared {
    kind: DeviceKind,
    store: CommandStore,
    arena: Mutex<PageAllocator>,
    cut: AccessRevocation,
    /// Regions mapped for the device.
    windows: MappedRegions,
    maps_on_use: AtomicBool,
    /// Whether registered kernel buffers have IOVAs.
    maps_kernel_buffers: AtomicBool,
    /// Whether device addresses are assigned by the caller that maps regions.
    is_placed: bool,
}

/// Registration of a device thread with its pool.
#[derive(Debug)]
pub struct DeviceThreadRegistration {
    pool: DevicePool,
}

/// Allocation granularity, for any backing.
const PAGE: u64 = 4096;

/// Address layout of an emulated device: a region's addresses begin at `(number + 1) << IOVA_SHIFT`, so
/// that address zero is never valid and an address determines its region: 64 GiB per region, and 4 095
/// regions in 48 bits. IOMMUs may have 39 bits, so addresses beyond them are
/// [assigned](DevicePool::new_at_iova).
const IOVA_SHIFT: u32 = 36;

/// Addressable bytes of a region.
const REGION_BYTES_MAX: u64 = 1 << IOVA_SHIFT;

/// Bit that marks the IOVA of a kernel buffer; no memory address has it.
const KERNEL_BUFFER: u64 = 1 << 63;

const OWN: &str = "the pool is a part of it, and other parts are other devices' own";

/// Number of places of a table that have addresses.
const SLOTS_MAX: u32 = (1 << (48 - IOVA_SHIFT)) - 1;

/// Device address of a region.
#[inline]
fn iova_of(region: RegionId) -> u64 {
    (u64::from(slot_index(region)) + 1) << IOVA_SHIFT
}

impl DevicePool {
    /// Creates a pool over `memory`: whole pages that no other allocator uses. Several pools may share a
    /// region. Pools that are adjacent within a region spread over the sets of the cache; pools at the
    /// same offset of separate regions would not.
    ///
    /// # Panics
    ///
    /// `memory` is not page-aligned, or in no region.
    pub fn new(
        regions: RegionTable,
        memory: Segment,
        kind: DeviceKind,
        store: CommandStore,
    ) -> Self {
        let region_iova = iova_of(memory.region);
        Self::from_parts(regions, memory, kind, store, region_iova, false)
    }

    /// Like [`new`](Self::new), for a device that accesses the region of `memory` at `region_iova`, and
    /// others at the addresses given to [`map_at`](Self::map_at).
    ///
    /// # Panics
    ///
    /// `memory` is not page-aligned, or in no region.
    pub fn new_at_iova(
        regions: RegionTable,
        memory: Segment,
        kind: DeviceKind,
        store: CommandStore,
        region_iova: u64,
    ) -> Self {
        Self::from_parts(regions, memory, kind, store, region_iova, true)
    }

    fn from_parts(
        regions: RegionTable,
        memory: Segment,
        kind: DeviceKind,
        store: CommandStore,
        region_iova: u64,
        is_placed: bool,
    ) -> Self {
        assert!(memory.offset.is_multiple_of(PAGE) && regions.contains(memory), "{memory:?}");
        let arena = Mutex::new(PageAllocator::new(u64::from(memory.len_bytes) / PAGE));
        let (windows, cut) = (MappedRegions::new(&regions), AccessRevocation::default());
        let [maps_on_use, maps_kernel_buffers] = [const { AtomicBool::new(false) }; 2];
        let shared = PoolShared {
            kind,
            store,
            arena,
            cut,
            windows,
            maps_on_use,
            maps_kernel_buffers,
            is_placed,
        };
        Self { memory, region_iova, regions, shared: Arc::new(shared) }
    }

    /// Maps a region for the device at `iova`, until it is [unmapped](Dma::unmap). The region may be
    /// [registers](RegionTable::map_registers) of the device, or other memory in its BARs.
    ///
    /// # Errors
    ///
    /// The pool is a part of the region.
    pub fn map_at(&self, region: RegionId, iova: u64) -> Result<(), DmaMapError> {
        if region == self.memory.region {
            return Err(DmaMapError { region, reason: OWN });
        }
        self.shared.windows.add_mapping(region, iova);
        Ok(())
    }

    /// Maps regions on demand, when the host first requests an address in them: for an emulated device,
    /// where mapping only sets an entry. The device cannot access regions that the host never used.
    pub fn map_on_demand(&self) {
        self.shared.maps_on_use.store(true, Ordering::Relaxed);
    }

    /// Assigns IOVAs to [kernel buffers](RegionTable::register_kernel_buffers), which have no address in
    /// the process: for a device that can [resolve such an IOVA](crate::SharedHostMemory::kernel_buffer_at_iova). The
    /// device cannot read or write through it.
    pub fn allow_kernel_buffers(&self) {
        self.shared.maps_kernel_buffers.store(true, Ordering::Relaxed);
    }

    /// Whether `segment` is completely inside the pool.
    #[inline]
    pub fn contains(&self, segment: Segment) -> bool {
        let mine = &self.memory;
        // An offset below the pool's wraps to a value larger than any length.
        let skip = segment.offset.wrapping_sub(mine.offset);
        let room = u64::from(mine.len_bytes).checked_sub(skip);
        segment.region == mine.region
            && room.is_some_and(|room| u64::from(segment.len_bytes) <= room)
    }

    /// Segment of the pool at `iova`, if it is completely inside the pool.
    #[inline]
    pub(crate) fn pool_segment_at(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let Segment { region, offset, len_bytes: pool_bytes } = self.memory;
        let skip = iova.wrapping_sub(self.region_iova + offset);
        let room = u64::from(pool_bytes).checked_sub(skip)?;
        let fits = u64::from(len_bytes) <= room;
        fits.then_some(Segment { region, offset: offset + skip, len_bytes })
    }

    /// Window within which ranges of `len_bytes` of the pool can be resolved without a call.
    #[inline]
    pub(crate) fn direct_access_window(&self, len_bytes: u32) -> Option<DirectAccessWindow> {
        DirectAccessWindow::for_pieces(
            self.memory,
            self.region_iova + self.memory.offset,
            len_bytes,
        )
    }

    /// Segment at `iova`, if the device may access all of it.
    #[inline]
    pub(crate) fn segment_at(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        match self.pool_segment_at(iova, len_bytes) {
            Some(segment) => Some(segment),
            None => self.mapped_segment_at(iova, len_bytes),
        }
    }

    #[inline(never)]
    fn mapped_segment_at(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let place = u32::try_from((iova >> IOVA_SHIFT).checked_sub(1)?).ok()?;
        let region = self.shared.windows.region_at(place)?;
        let segment = Segment { region, offset: iova & (REGION_BYTES_MAX - 1), len_bytes };
        // Rejects every segment of a region that was dropped meanwhile.
        self.regions.contains(segment).then_some(segment)
    }

    /// Address of a segment outside the pool. Cold, so that it takes no registers from the loop over pool
    /// segments.
    #[cold]
    fn iova_outside_pool(&self, segment: Segment) -> Option<u64> {
        let (region, shared) = (segment.region, &*self.shared);
        if !self.regions.contains(segment) {
            return self.kernel_buffer_iova(segment);
        }
        let iova = match shared.windows.iova(region) {
            Some(iova) => iova,
            None => {
                let may_map = shared.maps_on_use.load(Ordering::Relaxed);
                may_map.then(|| self.map(region).ok()).flatten()?;
                shared.windows.iova(region)?
            }
        };
        Some(iova + segment.offset)
    }

    /// First offset of a region other than the pool's, its length, and its device address; `None` if it
    /// is not mapped.
    #[inline(never)]
    fn mapped_region_bounds(&self, region: RegionId) -> Option<(u64, u64, u64)> {
        let iova = self.shared.windows.iova(region)?;
        Some((0, self.regions.len_bytes(region), iova))
    }

    fn kernel_buffer_iova(&self, segment: Segment) -> Option<u64> {
        let has_name = self.shared.maps_kernel_buffers.load(Ordering::Relaxed)
            && self.regions.kernel_buffer(segment).is_some()
            && segment.offset < REGION_BYTES_MAX;
        has_name.then(|| KERNEL_BUFFER | (iova_of(segment.region) + segment.offset))
    }

    /// Kernel buffer segment at `iova`.
    #[cold]
    pub(crate) fn kernel_buffer_at(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let number = (iova & !KERNEL_BUFFER) >> IOVA_SHIFT;
        let region = RegionId(u32::try_from(number.checked_sub(1)?).ok()?);
        let segment = Segment { region, offset: iova & (REGION_BYTES_MAX - 1), len_bytes };
        (iova & KERNEL_BUFFER != 0 && self.kernel_buffer_iova(segment) == Some(iova))
            .then_some(segment)
    }

    /// Region table that resolves this pool's segments.
    pub fn regions(&self) -> &RegionTable {
        &self.regions
    }

    /// Whether the device's memory access is revoked.
    #[inline]
    pub fn is_access_revoked(&self) -> bool {
        self.shared.cut.current_number() % 2 == 1
    }

    /// Registers the device's own thread, which `waker` wakes. Until the returned guard is dropped, a
    /// revocation completes only when the thread has acknowledged that no access is in flight.
    pub fn attach_device_thread(
        &self,
        waker: impl Wake + Send + Sync + 'static,
    ) -> DeviceThreadRegistration {
        self.shared.cut.attach_device_thread(Box::new(waker));
        DeviceThreadRegistration { pool: self.clone() }
    }

    /// Number of the current revocation, for the device, which acknowledges it with
    /// [`acknowledge_revocation`](Self::acknowledge_revocation).
    #[inline]
    pub(crate) fn pending_revocation_number(&self) -> Option<u32> {
        Some(self.shared.cut.current_number()).filter(|number| number % 2 == 1)
    }

    /// Acknowledges revocation `number`: the device has no access in flight that began before it.
    pub(crate) fn acknowledge_revocation(&self, number: u32) {
        self.shared.cut.acknowledge(number);
    }

    /// Free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.with_allocator(|arena| arena.free_pages()) * PAGE
    }

    fn with_allocator<T>(&self, work: impl FnOnce(&mut PageAllocator) -> T) -> T {
        work(&mut self.shared.arena.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for DeviceThreadRegistration {
    fn drop(&mut self) {
        self.pool.shared.cut.detach_device_thread();
    }
}

impl Dma for DevicePool {
    type Submission = HostSubmissionRing;
    type Completion = HostCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let pages = u64::from(len_bytes.max(1)).div_ceil(PAGE);
        let first = self.with_allocator(|arena| arena.allocate_run(pages))?;
        let Segment { region, offset, .. } = self.memory;
        let segment = Segment { region, offset: offset + first * PAGE, len_bytes };
        // New pages from the kernel are zero; reused pages are not.
        self.regions.fill(segment, 0).ok()?;
        Some(segment)
    }

    fn release(&self, segment: Segment) {
        let pages = u64::from(segment.len_bytes.max(1)).div_ceil(PAGE);
        let first = (segment.offset - self.memory.offset) / PAGE;
        self.with_allocator(|arena| arena.free_run(first, pages));
    }

    fn map(&self, region: RegionId) -> Result<(), DmaMapError> {
        let refuse = |why| Err(DmaMapError { region, reason: why });
        match self.regions.len_bytes(region) {
            0 => refuse("there is no such region"),
            _ if region == self.memory.region => refuse(OWN),
            _ if self.shared.is_placed => refuse("no placement was chosen"),
            len if len > REGION_BYTES_MAX || slot_index(region) >= SLOTS_MAX => {
                refuse("it is longer than 64 GiB, or past the last that has addresses")
            }
            _ => {
                self.shared.windows.add_mapping(region, iova_of(region));
                Ok(())
            }
        }
    }

    fn unmap(&self, region: RegionId) {
        self.shared.windows.remove_mapping(region);
    }

    #[inline]
    fn iova(&self, segment: Segment) -> Option<u64> {
        if self.contains(segment) {
            return Some(self.region_iova + segment.offset);
        }
        self.iova_outside_pool(segment)
    }

    #[inline(always)]
    fn iova_translator(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        let Segment { region, len_bytes, .. } = like;
        let own = || (self.memory.offset, self.memory.len_bytes.into(), self.region_iova);
        let is_own = region == self.memory.region;
        let place = if is_own { Some(own()) } else { self.mapped_region_bounds(region) };
        let (first, room, region_iova) = place.unwrap_or_default();
        // From the first to the last offset at which the length fits; none if it fits nowhere.
        let skip_max = place.and_then(|_| room.checked_sub(u64::from(len_bytes)));
        move |segment| {
            let fits = segment.offset.wrapping_sub(first) <= skip_max?;
            let is_mine = fits && segment.region == region && segment.len_bytes == len_bytes;
            is_mine.then(|| region_iova + segment.offset)
        }
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> HostSubmissionRing {
        let PoolShared { kind, store, .. } = *self.shared;
        // A ring outside the pool is in device memory.
        let store = if self.contains(memory) { store } else { CommandStore::Device };
        HostSubmissionRing::new(self.regions.clone(), memory, depth, kind, store)
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> HostCompletionRing {
        HostCompletionRing::new(self.regions.clone(), memory, depth, self.shared.kind)
    }

    fn revoke_access(&self) -> bool {
        self.shared.cut.revoke()
    }

    fn restore_access(&self) {
        self.shared.cut.restore();
    }
}

impl Memory for DevicePool {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.regions.load(segment, into)
    }

    #[inline]
    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.regions.store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.regions.fill(segment, byte)
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        self.regions.load_u32(segment)
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        self.regions.store_u32(segment, value)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Dma, HostMemory, Memory, RegionId, RingMemory, Segment, SubmissionRing};

    use crate::{
        CommandStore, DeviceKind, DevicePool, KernelBufferSource, MemoryBacking, MemoryMapping,
        RegionTable, SharedHostMemory,
    };

    fn test_pool(pages: usize) -> DevicePool {
        let regions = RegionTable::new(4);
        let memory = regions
            .add_mapping(MemoryMapping::new(pages * 4096, MemoryBacking::Private).unwrap())
            .unwrap();
        DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain)
    }

    #[test]
    fn allocated_pages_are_zeroed_aligned_and_returned() {
        let pool = test_pool(4);
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

    /// A pool in the middle of region 0, and a region 1 that is two pages long.
    fn test_pool_and_region() -> (DevicePool, Segment) {
        let regions = RegionTable::new(4);
        let mapping =
            |pages: usize| MemoryMapping::new(pages * 4096, MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(mapping(3)).unwrap().slice(4096, 4096).unwrap();
        let other = regions.add_mapping(mapping(2)).unwrap();
        let pool = DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain);
        (pool, other)
    }

    #[test]
    fn kernel_buffer_iova_is_not_an_address_of_the_pool() {
        let (pool, other) = test_pool_and_region();
        pool.map_on_demand();
        let descriptor = std::io::pipe().unwrap().0.into();
        let lender = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let leased = pool.regions().register_kernel_buffers(lender, (4, 8192)).unwrap();
        let part = leased.slice(8192 + 512, 512).unwrap();
        assert_eq!(pool.iova(part), None, "kernel buffers are not allowed yet");
        pool.allow_kernel_buffers();
        let (name, mut host) = (pool.iova(part).unwrap(), SharedHostMemory::new(&pool));
        assert_eq!(host.kernel_buffer_at_iova(name, 512), Some(part));
        assert_eq!(host.kernel_buffer_at_iova(name + 256, 256), part.slice(256, 256));
        assert!(host.resolve(name, 512).is_err() && host.resolve_ring(name, 512).is_err());
        assert_eq!(host.kernel_buffer_at_iova(name, 8192), None, "parts of two requests");
        assert_eq!(pool.iova(leased), None, "of all of them");
        let address = pool.iova(other).unwrap();
        for none in [0, 1 << 63, address, address | 1 << 63, name & !(1 << 63), name | 1 << 62] {
            assert_eq!(host.kernel_buffer_at_iova(none, 512), None, "{none:#x}");
        }
        assert!(pool.revoke_access());
        assert_eq!(host.kernel_buffer_at_iova(name, 512), None);
    }

    #[test]
    fn mapped_region_has_iovas_until_unmapped() {
        let (pool, other) = test_pool_and_region();
        let part = other.slice(4096, 4096).unwrap();
        let addresses = |pool: &DevicePool| (pool.iova(part), pool.iova_translator(part)(part));
        let at = (2 << 36) + 4096;
        assert_eq!((addresses(&pool), pool.segment_at(at, 4096)), ((None, None), None));
        pool.map(other.region).unwrap();
        assert_eq!(addresses(&pool), (Some(at), Some(at)));
        let first = other.slice(0, 4096).unwrap();
        assert_eq!(
            pool.iova_translator(first)(part),
            Some(at),
            "one place of a region stands for all of it"
        );
        assert_eq!(pool.iova_translator(pool.memory)(part), None, "but for no other region");
        assert_eq!(pool.iova_translator(other)(part), None, "nor for another length");
        assert_eq!(pool.segment_at(at, 4096), Some(part));
        assert_eq!(pool.pool_segment_at(at, 4096), None, "rings lie in the pool");
        for (iova, len_bytes) in [(at, 4097), (at + 1, 4096), (at + 4096, 1), (3 << 36, 1), (0, 1)]
        {
            assert_eq!(pool.segment_at(iova, len_bytes), None, "{iova:#x}");
        }
        let past = Segment { offset: 4097, ..part };
        assert_eq!((pool.iova(past), pool.iova_translator(part)(past)), (None, None));
        pool.unmap(other.region);
        assert_eq!((addresses(&pool), pool.segment_at(at, 4096)), ((None, None), None));
    }

    #[test]
    fn pool_with_given_iova_uses_it() {
        let regions = RegionTable::new(4);
        let mapping =
            |pages: usize| MemoryMapping::new(pages * 4096, MemoryBacking::Private).unwrap();
        let (memory, other) =
            (regions.add_mapping(mapping(2)).unwrap(), regions.add_mapping(mapping(2)).unwrap());
        let (kind, store) = (DeviceKind::Pcie, CommandStore::Plain);
        let pool = DevicePool::new_at_iova(regions, memory, kind, store, 0x7000);
        let own = pool.allocate(4096).unwrap();
        assert_eq!((pool.iova(own), pool.iova_translator(own)(own)), (Some(0x7000), Some(0x7000)));
        assert_eq!(pool.iova(other), None);
        assert!(pool.map(other.region).is_err() && pool.map_at(memory.region, 0).is_err());
        pool.map_at(other.region, 0x10_0000).unwrap();
        assert_eq!(pool.iova(other.slice(4096, 4096).unwrap()), Some(0x10_1000));
        pool.unmap(other.region);
        assert_eq!(pool.iova(other), None);
    }

    #[test]
    fn submission_ring_in_a_bar_uses_device_stores() {
        let regions = RegionTable::new(4);
        let mapping =
            |pages: usize| MemoryMapping::new(pages * 4096, MemoryBacking::Private).unwrap();
        let (memory, other) =
            (regions.add_mapping(mapping(2)).unwrap(), regions.add_mapping(mapping(2)).unwrap());
        let (kind, store) = (DeviceKind::Pcie, CommandStore::for_device(DeviceKind::Pcie));
        let pool = DevicePool::new_at_iova(regions.clone(), memory, kind, store, 0x7000);
        pool.map_at(other.region, 0xfe80_0000).unwrap();
        let place = other.slice(4096, 8 * 64).unwrap();
        let mut ring = pool.submission_ring(place, 8);
        assert_eq!(ring.command_store(), CommandStore::Device);
        assert_eq!(pool.iova(place), Some(0xfe80_1000));
        let own = pool.allocate(4096).unwrap();
        assert_eq!(pool.submission_ring(own, 8).command_store(), store);
        ring.store(1, &[u64::MAX; 8]);
        assert_eq!(ring.store_built_commands(2, &[1, 2], |word| Some([*word; 8])), 2);
        ring.order_before_doorbell();
        let mut bytes = [0; 8 * 64];
        regions.load(place, &mut bytes).unwrap();
        let words: Vec<u64> =
            bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        let expected = [[0; 8], [u64::MAX; 8], [1; 8], [2; 8]].concat();
        assert_eq!((&words[..32], &words[32..]), (&expected[..], &[0; 32][..]));
    }

    #[test]
    fn dropped_region_and_its_successor_are_inaccessible() {
        let (pool, _) = test_pool_and_region();
        pool.map_on_demand();
        let add = || pool.regions().allocate_region(4096).unwrap();
        let first = add();
        let at = pool.iova(first.segment()).unwrap();
        assert!(pool.segment_at(at, 64).is_some());
        let place = first.segment();
        assert_eq!(pool.iova_translator(place)(place), Some(at));
        drop(first);
        assert_eq!((pool.segment_at(at, 64), pool.iova_translator(place)(place)), (None, None));
        let second = add();
        assert_eq!(pool.segment_at(at, 64), None, "the host has not named it yet");
        assert_eq!(
            pool.iova_translator(second.segment())(second.segment()),
            None,
            "nor do many at once name it"
        );
        assert_eq!(pool.iova(second.segment()), Some(at), "it has the place of the first");
        assert_eq!(pool.segment_at(at, 64), second.segment().slice(0, 64));
    }

    #[test]
    fn on_demand_pool_maps_only_what_the_host_addresses() {
        let (pool, other) = test_pool_and_region();
        pool.map_on_demand();
        let at = 2 << 36;
        assert_eq!(pool.segment_at(at, 512), None, "the device may not ask first");
        assert_eq!(pool.iova(Segment { len_bytes: 8193, ..other }), None);
        assert_eq!(pool.segment_at(at, 512), None, "what was refused has mapped nothing");
        assert_eq!(pool.iova(other), Some(at));
        assert_eq!(pool.segment_at(at, 8192), Some(other));
    }

    #[test]
    fn unmappable_region_is_rejected_with_the_reason() {
        let (pool, other) = test_pool_and_region();
        let why = |region| pool.map(RegionId(region)).unwrap_err().to_string();
        assert_eq!(why(3), "show region 3 to a device: there is no such region");
        assert!(why(0).contains("the pool is a part of it"), "{}", why(0));
        assert_eq!(pool.map(other.region), Ok(()));
        pool.map_on_demand();
        let neighbour = Segment { region: RegionId(0), offset: 0, len_bytes: 4096 };
        assert_eq!(pool.iova(neighbour), None, "another device's part of the same region");
    }

    #[test]
    fn memory_inaccessible_to_the_device_has_no_iova() {
        let regions = RegionTable::new(1);
        let whole = regions
            .add_mapping(MemoryMapping::new(3 * 4096, MemoryBacking::Private).unwrap())
            .unwrap();
        let middle = whole.slice(4096, 4096).unwrap();
        let pool = DevicePool::new(regions, middle, DeviceKind::Emulated, CommandStore::Plain);
        assert_eq!(pool.allocate(4096), Some(middle));
        assert_eq!(pool.iova(middle), Some((1 << 36) + 4096));
        let at = |offset, len_bytes| Segment { region: RegionId(0), offset, len_bytes };
        for stray in [at(0, 1), at(4095, 1), at(4095, 2), at(8191, 2), at(8192, 1), at(u64::MAX, 9)]
        {
            assert_eq!(pool.iova(stray), None, "{stray:?}");
        }
        assert_eq!(pool.iova(Segment { region: RegionId(9), ..middle }), None);
        pool.release(middle);
        assert_eq!(pool.free_bytes(), 4096);
    }
}
