//! Memory for the data of I/Os: buffers of the library, and memory of the program that is registered.
//!
//! ```text
//!   address ── MemoryRange, sorted by address ── Segment { region, offset } + index of the memory
//!
//!   range 0      the buffers: one region, an index for each page
//!   others       registered memory: a region of its own for the pages that contain it, one index
//! ```
//!
//! A queue keeps a copy of the ranges, and renews it when the version has changed. A table has the buffer of each
//! page, so that an I/O past the end of a buffer, or of one that was freed, is refused.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Dma, Error, RegionId, Segment};
use tenmil_dma::{
    CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, Region, RegionTable,
};

use crate::failure::Failure;
use crate::slot_table::{MemoryInFlight, MemoryIndex, SlotTable};

/// Memory of a context.
pub(crate) struct ProgramMemory {
    regions: RegionTable,
    pool: DevicePool,
    /// Address of the first byte of the pool.
    pool_start: usize,
    owners: PageOwners,
    /// Changes with the ranges.
    version: AtomicU64,
    tables: Mutex<MemoryTables>,
}

struct MemoryTables {
    /// Lengths of the allocated buffers, by address.
    buffers: BTreeMap<usize, u32>,
    /// Registered memory, by address.
    registered: BTreeMap<usize, RegisteredMemory>,
    /// Free indices of registered memory.
    free_indices: Vec<MemoryIndex>,
    ranges: Arc<[MemoryRange]>,
    queues: Vec<MemoryInFlight>,
}

struct RegisteredMemory {
    region: Region,
    range: MemoryRange,
}

/// Addresses that I/Os may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryRange {
    start: usize,
    len_bytes: usize,
    region: RegionId,
    /// Offset of `start` in the region.
    offset: u64,
    index: MemoryIndex,
    /// Shift of an offset in the range to the index of its memory, from `index` on.
    index_shift: u32,
}

/// The ranges as a queue knows them.
pub(crate) struct RangeLookup {
    version: u64,
    recent: MemoryRange,
    ranges: Arc<[MemoryRange]>,
    owners: PageOwners,
}

/// Memory of I/Os with the same length in one range: what a loop over them needs to know.
pub(crate) struct MemoryRun<'a> {
    pub(crate) region: RegionId,
    start: usize,
    /// Largest offset in the range at which an I/O may begin.
    skip_max: usize,
    len_bytes: usize,
    /// Offset of `start` in the region.
    offset: u64,
    /// Buffers by page, if the range is the pool.
    owners: Option<&'a [AtomicU32]>,
    index: MemoryIndex,
}

/// The buffer of each page of the pool: the number of its first page plus one, or zero for a free page.
/// Changed under the lock of the tables. A program that uses a buffer has ordered that after its allocation.
#[derive(Clone, Debug)]
struct PageOwners(Arc<[AtomicU32]>);

const PAGE: usize = 4096;
const PAGE_SHIFT: u32 = PAGE.trailing_zeros();
/// Maximum number of pieces of registered memory.
const REGISTERED_MAX: u32 = 1024;
/// Shift of offsets in registered memory, which has a single index: more than its length.
const ONE_INDEX: u32 = 63;

impl ProgramMemory {
    /// Maps memory for the buffers; its pages are allocated when they are first used.
    pub(crate) fn new(regions: &RegionTable, buffer_bytes: u32) -> Result<Self, Failure> {
        let refuse = |why: &dyn std::fmt::Display| {
            Error::environment(format!("map {buffer_bytes} bytes for buffers: {why}"))
        };
        let mapping = MemoryMapping::new(buffer_bytes as usize, MemoryBacking::Private);
        let memory = regions.add_mapping(mapping.map_err(|why| refuse(&why))?);
        let memory = memory.map_err(|why| refuse(&why))?;
        let start = regions.host_address(memory);
        let pool_start = start.map_err(|_| refuse(&"it has no address"))?.as_ptr().addr();
        let pool = range_of_pool(pool_start, memory);
        let kinds = (DeviceKind::Emulated, CommandStore::Plain);
        let first = pool_pages(memory.len_bytes);
        let tables = MemoryTables {
            buffers: BTreeMap::new(),
            registered: BTreeMap::new(),
            free_indices: (first..first + REGISTERED_MAX).rev().collect(),
            ranges: Arc::new([pool]),
            queues: Vec::new(),
        };
        Ok(Self {
            regions: regions.clone(),
            pool: DevicePool::new(regions.clone(), memory, kinds.0, kinds.1),
            pool_start,
            owners: PageOwners((0..first).map(|_| AtomicU32::new(0)).collect()),
            version: AtomicU64::new(0),
            tables: Mutex::new(tables),
        })
    }

    /// Allocates a zeroed buffer.
    pub(crate) fn allocate(&self, len_bytes: u64) -> Result<NonNull<u8>, Failure> {
        let refuse = || {
            let free = self.pool.free_bytes();
            let text = format!(
                "allocate a buffer of {len_bytes} bytes: {free} bytes are free, expected as many in \
                 one piece"
            );
            Failure::from(Error::environment(text).with_hint(
                "Free buffers, or create the context with more `buffer_bytes`, or register memory.",
            ))
        };
        if len_bytes == 0 {
            return Err(Failure::usage("allocate a buffer: length is 0, expected at least 1"));
        }
        let len_bytes = u32::try_from(len_bytes).map_err(|_| refuse())?;
        let segment = self.pool.allocate(len_bytes).ok_or_else(refuse)?;
        let address = self.regions.host_address(segment).map_err(|_| refuse())?;
        let start = address.as_ptr().addr();
        let mut tables = self.lock();
        tables.buffers.insert(start, len_bytes);
        let (first, count) = pages_of(start - self.pool_start, len_bytes);
        self.owners.set(first, count, first + 1);
        Ok(address)
    }

    /// Frees a buffer that no I/O in flight uses.
    pub(crate) fn free(&self, address: usize) -> Result<(), Failure> {
        let mut tables = self.lock();
        let Some(&len_bytes) = tables.buffers.get(&address) else {
            return Err(Failure::usage(format_args!(
                "free the buffer at {address:#x}: no buffer begins there, expected an address of \
                 tenmil_buffer_alloc() that has not been freed"
            )));
        };
        let offset = address - self.pool_start;
        let (first, pages) = pages_of(offset, len_bytes);
        let count = tables.in_flight(first, pages);
        if count > 0 {
            return Err(Failure::busy(format_args!(
                "free the buffer at {address:#x}: {count} I/Os in flight use it, expected none"
            )));
        }
        tables.buffers.remove(&address);
        self.owners.set(first, pages, 0);
        drop(tables);
        let pool = self.pool_range();
        let offset = pool.offset + offset as u64;
        self.pool.release(Segment { region: pool.region, offset, len_bytes });
        Ok(())
    }

    /// Registers memory of the program.
    ///
    /// # Safety
    ///
    /// Until [`unregister`](Self::unregister) returns, the memory stays mapped, readable and writable.
    pub(crate) unsafe fn register(
        &self,
        address: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<(), Failure> {
        let start = address.as_ptr().addr();
        let what = format!("register {len_bytes} bytes at {start:#x}");
        let usage = |text: &str| Failure::usage(format_args!("{what}: {text}"));
        let end = start.checked_add(len_bytes).filter(|end| end.checked_add(PAGE).is_some());
        let Some(end) = end.filter(|_| len_bytes > 0) else {
            return Err(usage("expected at least 1 byte, below the end of the address space"));
        };
        if self.regions.allocates_contiguous() {
            return Err(usage(
                "a device without an IOMMU is open, expected buffers of tenmil_buffer_alloc()",
            ));
        }
        let mut tables = self.lock();
        let overlaps = |range: &MemoryRange| start < range.end() && range.start < end;
        if let Some(range) = tables.ranges.iter().find(|range| overlaps(range)) {
            let (first, len) = (range.start, range.len_bytes);
            return Err(usage(&format!(
                "it overlaps the {len} bytes at {first:#x}, expected memory that is neither \
                 registered nor a buffer of the library"
            )));
        }
        let Some(index) = tables.free_indices.pop() else {
            return Err(usage(&format!(
                "{REGISTERED_MAX} pieces of memory are registered, expected fewer"
            )));
        };
        let skip = start % PAGE;
        let whole = (end.next_multiple_of(PAGE)) - (start - skip);
        // SAFETY: at most a page below an address that is not null, on the same page, which is mapped.
        let base = unsafe { address.sub(skip) };
        // SAFETY: whole pages that contain the memory of the program, which keeps them mapped. Accesses are
        // confined to that memory by the range below, and no I/O uses it when it is unregistered.
        let region = unsafe { self.regions.add_program_memory(base, whole) };
        let region = match region {
            Ok(region) => region,
            Err(why) => {
                tables.free_indices.push(index);
                return Err(Error::environment(format!("{what}: {why}")).into());
            }
        };
        let range = MemoryRange {
            start,
            len_bytes,
            region: region.id(),
            offset: skip as u64,
            index,
            index_shift: ONE_INDEX,
        };
        tables.registered.insert(start, RegisteredMemory { region, range });
        self.publish(&mut tables);
        Ok(())
    }

    /// Ends a registration. Memory that an I/O in flight uses stays registered.
    pub(crate) fn unregister(&self, start: usize) -> Result<(), Failure> {
        let mut tables = self.lock();
        let Some(found) = tables.registered.get(&start) else {
            return Err(Failure::usage(format_args!(
                "unregister the memory at {start:#x}: nothing that begins there is registered"
            )));
        };
        let index = found.range.index;
        let count = tables.in_flight(index, 1);
        if count > 0 {
            return Err(Failure::busy(format_args!(
                "unregister the memory at {start:#x}: {count} I/Os in flight use it, expected none"
            )));
        }
        let removed = tables.registered.remove(&start);
        tables.free_indices.push(index);
        self.publish(&mut tables);
        // Waits until no device can access it.
        drop(removed.map(|memory| memory.region));
        Ok(())
    }

    /// Slots for a new queue.
    pub(crate) fn add_queue(&self, depth: usize) -> SlotTable {
        let slots = SlotTable::new(depth, self.owners.0.len() + REGISTERED_MAX as usize);
        let mut tables = self.lock();
        tables.queues.retain(|queue| !queue.is_abandoned());
        tables.queues.push(slots.memory_in_flight());
        slots
    }

    /// The current ranges.
    pub(crate) fn lookup(&self) -> RangeLookup {
        let tables = self.lock();
        let version = self.version.load(Ordering::Acquire);
        let ranges = Arc::clone(&tables.ranges);
        let recent = ranges.first().copied().unwrap_or_default();
        RangeLookup { version, recent, ranges, owners: self.owners.clone() }
    }

    /// Range of the buffers.
    fn pool_range(&self) -> MemoryRange {
        let tables = self.lock();
        tables.ranges.iter().find(|range| range.index == 0).copied().unwrap_or_default()
    }

    /// Makes the ranges those of the tables.
    fn publish(&self, tables: &mut MemoryTables) {
        let pool = tables.ranges.iter().filter(|range| range.index == 0).copied();
        let registered = tables.registered.values().map(|memory| memory.range);
        let mut ranges: Vec<MemoryRange> = pool.chain(registered).collect();
        ranges.sort_by_key(|range| range.start);
        tables.ranges = ranges.into();
        // Pairs with the acquire load in `renew`: a thread that sees the number finds the ranges.
        self.version.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, MemoryTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryTables {
    /// Number of I/Os in flight, of all queues, with memory of these indices.
    fn in_flight(&self, first: MemoryIndex, count: u32) -> usize {
        let open = self.queues.iter().filter(|queue| !queue.is_abandoned());
        open.map(|queue| queue.count(first, count)).sum()
    }
}

impl MemoryRange {
    fn end(&self) -> usize {
        self.start + self.len_bytes
    }

    fn contains(&self, address: usize) -> bool {
        // An address below the start wraps to a value larger than any length.
        address.wrapping_sub(self.start) < self.len_bytes
    }
}

impl RangeLookup {
    /// Renews the ranges if they have changed.
    #[inline]
    pub(crate) fn renew(&mut self, memory: &ProgramMemory) {
        // Pairs with the release in `publish`.
        if memory.version.load(Ordering::Acquire) != self.version {
            self.replace(memory);
        }
    }

    #[cold]
    fn replace(&mut self, memory: &ProgramMemory) {
        *self = memory.lookup();
    }

    /// Segment of memory of the program, and its index. None if it is not inside one piece of registered
    /// memory or one buffer.
    pub(crate) fn segment_at(
        &mut self,
        address: usize,
        len_bytes: u32,
    ) -> Option<(Segment, MemoryIndex)> {
        if !self.recent.contains(address) {
            let after = self.ranges.partition_point(|range| range.start <= address);
            self.recent = *self.ranges.get(after.checked_sub(1)?)?;
        }
        let run = self.run_of(len_bytes)?;
        let (offset, index) = run.find(address)?;
        Some((Segment { region: run.region, offset, len_bytes }, index))
    }

    /// Memory of I/Os of this length in the range that was used last. None if the range is shorter.
    #[inline]
    pub(crate) fn run_of(&self, len_bytes: u32) -> Option<MemoryRun<'_>> {
        let MemoryRange { start, region, offset, index, index_shift, .. } = self.recent;
        Some(MemoryRun {
            region,
            start,
            skip_max: self.recent.len_bytes.checked_sub(len_bytes as usize)?,
            len_bytes: len_bytes as usize,
            offset,
            owners: (index_shift == PAGE_SHIFT).then_some(&*self.owners.0),
            index,
        })
    }
}

impl MemoryRun<'_> {
    /// Offset in the region and index of the memory at an address. None if it does not lie in this range, or
    /// not inside one buffer.
    #[inline(always)]
    pub(crate) fn find(&self, address: usize) -> Option<(u64, MemoryIndex)> {
        // An address below the start wraps to a value larger than any length.
        let skip = address.wrapping_sub(self.start);
        if skip > self.skip_max {
            return None;
        }
        let index = match self.owners {
            None => self.index,
            Some(owners) => {
                let (page, end) = (skip >> PAGE_SHIFT, skip + self.len_bytes);
                let owner = owners.get(page)?.load(Ordering::Relaxed);
                let is_on_page = skip % PAGE + self.len_bytes <= PAGE;
                if owner == 0 || (!is_on_page && !is_page_of(owners, end - 1, owner)) {
                    return None;
                }
                #[expect(clippy::cast_possible_truncation, reason = "the pool has fewer pages")]
                let page = page as u32;
                page
            }
        };
        Some((self.offset + skip as u64, index))
    }
}

impl PageOwners {
    fn set(&self, first: u32, count: u32, owner: u32) {
        let pages = &self.0[first as usize..][..count as usize];
        pages.iter().for_each(|page| page.store(owner, Ordering::Relaxed));
    }
}

/// Whether the page of this offset in the pool belongs to the buffer.
fn is_page_of(owners: &[AtomicU32], offset: usize, buffer: u32) -> bool {
    owners.get(offset >> PAGE_SHIFT).is_some_and(|owner| owner.load(Ordering::Relaxed) == buffer)
}

/// First page of a buffer at `offset` in the pool, and their number.
fn pages_of(offset: usize, len_bytes: u32) -> (u32, u32) {
    let first = u32::try_from(offset / PAGE).unwrap_or(u32::MAX);
    (first, pool_pages(len_bytes))
}

/// Number of pages of the buffers.
fn pool_pages(len_bytes: u32) -> u32 {
    len_bytes.div_ceil(1 << PAGE_SHIFT)
}

fn range_of_pool(start: usize, memory: Segment) -> MemoryRange {
    MemoryRange {
        start,
        len_bytes: memory.len_bytes as usize,
        region: memory.region,
        offset: memory.offset,
        index: 0,
        index_shift: PAGE_SHIFT,
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use tenmil_dma::RegionTable;

    use super::ProgramMemory;

    fn memory() -> ProgramMemory {
        ProgramMemory::new(&RegionTable::new(64), 1 << 20).unwrap()
    }

    #[test]
    fn buffer_is_found_by_its_address_and_freed_once() {
        let memory = memory();
        let address = memory.allocate(5000).unwrap().as_ptr().addr();
        let mut lookup = memory.lookup();
        let (segment, index) = lookup.segment_at(address + 4096, 4096).unwrap();
        assert_eq!((segment.offset, segment.len_bytes, index), (4096, 4096, 1));
        let next = memory.allocate(4096).unwrap().as_ptr().addr();
        assert!(lookup.segment_at(next, 4096).is_some());
        for (address, len_bytes) in [
            (address, (1 << 20) + 1),
            (address, 8193),
            (address + 8191, 2),
            (next - 1, 2),
            (next + 4096, 1),
        ] {
            assert!(lookup.segment_at(address, len_bytes).is_none(), "not in one buffer");
        }
        assert!(memory.free(address + 1).is_err());
        memory.free(address).unwrap();
        assert!(lookup.segment_at(address, 512).is_none(), "it is free");
        assert!(memory.free(address).is_err());
        assert!(memory.allocate(0).is_err() && memory.allocate(2 << 20).is_err());
    }

    #[test]
    fn memory_in_flight_is_neither_freed_nor_unregistered() {
        let memory = memory();
        let (mut slots, mut own) = (memory.add_queue(2), vec![0_u8; 10_000]);
        let start = NonNull::new(own.as_mut_ptr()).unwrap();
        // SAFETY: the vector lives until it has been unregistered.
        unsafe { memory.register(start, own.len()) }.unwrap();
        let buffer = memory.allocate(3 * 4096).unwrap().as_ptr().addr();
        let mut lookup = memory.lookup();
        for (address, skip) in [(start.as_ptr().addr(), 9_999), (buffer, 2 * 4096)] {
            let (_, index) = lookup.segment_at(address + skip, 1).unwrap();
            let release = || match address == buffer {
                true => memory.free(address),
                false => memory.unregister(address),
            };
            for is_several in [false, true] {
                let slot = match is_several {
                    true => slots.take_several(0, std::iter::once(index)),
                    false => slots.take(0, index),
                };
                assert!(release().is_err());
                slots.release_each(std::iter::once(slot.into()), |_| {});
            }
            release().unwrap();
            assert!(release().is_err(), "once");
        }
    }

    #[test]
    fn registered_memory_is_found_until_it_is_unregistered() {
        let memory = memory();
        let mut own = vec![0_u8; 64 << 10];
        let (start, inner) = (own.as_mut_ptr(), own[1000..].as_mut_ptr());
        let mut lookup = memory.lookup();
        // SAFETY: the vector lives until it has been unregistered.
        unsafe { memory.register(NonNull::new(inner).unwrap(), 2000) }.unwrap();
        assert!(lookup.segment_at(inner.addr(), 1).is_none(), "not renewed");
        lookup.renew(&memory);
        let (segment, _) = lookup.segment_at(inner.addr() + 500, 1500).unwrap();
        assert_eq!(segment.offset % 4096, (inner.addr() as u64 + 500) % 4096);
        for (skip, len_bytes) in [(999, 1), (999, 10), (2999, 2), (3000, 1)] {
            assert!(lookup.segment_at(start.addr() + skip, len_bytes).is_none(), "{skip}");
        }
        for (skip, len_bytes) in [(1000, 1), (0, 1001), (2999, 1), (0, 0)] {
            let address = NonNull::new(start.wrapping_add(skip)).unwrap();
            // SAFETY: a part of the vector; nothing is registered, since it overlaps or is empty.
            assert!(unsafe { memory.register(address, len_bytes) }.is_err(), "{skip}");
        }
        assert!(memory.unregister(start.addr()).is_err());
        memory.unregister(inner.addr()).unwrap();
        lookup.renew(&memory);
        assert!(lookup.segment_at(inner.addr(), 1).is_none());
    }
}
