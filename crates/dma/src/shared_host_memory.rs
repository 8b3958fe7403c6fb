//! Controller side of DMA memory, for a controller emulated in this process that shares the host's
//! memory.
//!
//! The upper bits of an I/O virtual address are its region, so resolving it takes a shift and a bounds
//! check.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tenmil_base::{
    AccessFault, AccessId, AccessProgress, CompletionEntry, DirectAccessWindow, HostMemory, Memory,
    RingEntries, RingMemory, SIMPLE_IO_WORDS, Segment,
};

use crate::barrier::{prefetch_read, prefetch_write};
use crate::completion_order;
use crate::device_pool::DevicePool;
use crate::region_table::RegionTable;

/// Memory of a host in this process.
#[derive(Clone, Debug)]
pub struct SharedHostMemory {
    pool: DevicePool,
    /// Last revocation seen.
    cut: u32,
    /// Region outside the pool that was resolved last, from its first byte on, with its device address.
    /// Commands with data in one region follow each other, so it is the next window.
    outside: Option<(Segment, u64)>,
}

/// Ring in host memory.
#[derive(Debug)]
pub struct SharedRingEntries {
    words: NonNull<u64>,
    iova: u64,
    len_bytes: u64,
    /// Keeps the memory mapped.
    _regions: RegionTable,
}

/// Words of a submission entry.
const COMMAND_WORDS: usize = 8;
/// Prefetch distance in entries: fetching a line that another core has just written takes as long as
/// several commands.
const AHEAD: usize = 8;

// SAFETY: the pointer is into a region that the handle beside it keeps mapped, on any thread; all access
// is by atomics.
unsafe impl Send for SharedRingEntries {}

impl SharedHostMemory {
    /// Creates the controller's view of the memory accessible through `pool`.
    pub fn new(pool: &DevicePool) -> Self {
        Self { pool: pool.clone(), cut: 0, outside: None }
    }

    #[inline]
    fn segment_at_iova(&self, iova: u64, len_bytes: u32) -> Result<Segment, AccessFault> {
        let segment =
            self.pool.segment_at(iova, len_bytes).filter(|_| !self.pool.is_access_revoked());
        segment.ok_or(AccessFault { iova, len_bytes: u64::from(len_bytes) })
    }
}

impl SharedHostMemory {
    /// Kernel buffer ([registered](RegionTable::register_kernel_buffers) memory) at `iova`, if the pool
    /// [assigns IOVAs](DevicePool::allow_kernel_buffers) to such buffers. No other function here resolves
    /// them.
    #[cold]
    pub fn kernel_buffer_at_iova(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        self.pool.kernel_buffer_at(iova, len_bytes).filter(|_| !self.pool.is_access_revoked())
    }
}

impl RingMemory for SharedHostMemory {
    type Entries = SharedRingEntries;

    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<SharedRingEntries>, AccessFault> {
        let fault = AccessFault { iova, len_bytes };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let segment =
            self.pool.pool_segment_at(iova, len).filter(|_| !self.pool.is_access_revoked());
        // Rings must be in the pool: a view is long-lived, and other mapped regions may be unmapped.
        SharedRingEntries::new(self.pool.regions(), segment.ok_or(fault)?, iova).map(Some)
    }
}

impl HostMemory for SharedHostMemory {
    #[inline]
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        let segment = self.segment_at_iova(iova, len_bytes)?;
        self.outside = if self.pool.contains(segment) {
            None
        } else {
            let len_bytes = self.pool.regions().len_bytes(segment.region);
            let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
            Some((Segment { offset: 0, len_bytes, ..segment }, iova - segment.offset))
        };
        Ok(Some(segment))
    }

    #[inline]
    fn direct_access_window(&mut self, len_bytes: u32) -> Option<DirectAccessWindow> {
        if let Some((memory, iova)) = self.outside {
            // It may have been unmapped or dropped since.
            if self.segment_at_iova(iova, memory.len_bytes) == Ok(memory) {
                return DirectAccessWindow::for_pieces(memory, iova, len_bytes);
            }
            self.outside = None;
        }
        self.pool.direct_access_window(len_bytes).filter(|_| !self.pool.is_access_revoked())
    }

    #[inline]
    fn is_revoked(&mut self) -> bool {
        let cut = self.pool.pending_revocation_number();
        self.cut = cut.unwrap_or(self.cut);
        cut.is_some()
    }

    fn ack_revocation(&mut self) {
        self.pool.acknowledge_revocation(self.cut);
    }

    fn read(
        &mut self,
        _: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: into.len() as u64 };
        let segment = self.segment_at_iova(iova, u32::try_from(into.len()).map_err(|_| fault)?)?;
        self.pool.load(segment, into).map_err(|_| fault)?;
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        _: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: from.len() as u64 };
        let segment = self.segment_at_iova(iova, u32::try_from(from.len()).map_err(|_| fault)?)?;
        self.pool.store(segment, from).map_err(|_| fault)?;
        Ok(AccessProgress::Done)
    }
}

impl SharedRingEntries {
    /// Creates the view of a ring in `segment`, at `iova` for its host.
    ///
    /// If the region is dropped, stores have no effect on the host, and loaded values are meaningless.
    ///
    /// # Errors
    ///
    /// The memory does not exist, or is not aligned to 8 bytes.
    pub fn new(regions: &RegionTable, segment: Segment, iova: u64) -> Result<Self, AccessFault> {
        let len_bytes = u64::from(segment.len_bytes);
        let fault = AccessFault { iova, len_bytes };
        let words = regions.host_address(segment).map_err(|_| fault)?.cast::<u64>();
        if !iova.is_multiple_of(8) || !words.is_aligned() {
            return Err(fault);
        }
        Ok(Self { words, iova, len_bytes, _regions: regions.clone() })
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the length of memory that is mapped")]
    const fn len_words(&self) -> usize {
        self.len_bytes as usize / 8
    }

    /// Address of 64-bit word `word`, if the ring contains `count` words from there.
    #[inline]
    fn word_address(&self, word: usize, count: usize) -> Result<NonNull<u64>, AccessFault> {
        let end = (word + count) as u64 * 8;
        if end > self.len_bytes {
            return Err(AccessFault {
                iova: self.iova + word as u64 * 8,
                len_bytes: count as u64 * 8,
            });
        }
        // SAFETY: `word + count` words are in the memory resolved at creation.
        Ok(unsafe { self.words.add(word) })
    }

    #[inline]
    fn u32_cell(&self, index: u32) -> Result<&AtomicU32, AccessFault> {
        let address = self.word_address(index as usize / 2, 1)?.cast::<u32>();
        // SAFETY: the first or the second half of a word inside the ring.
        let address = unsafe { address.add(index as usize % 2) };
        // SAFETY: aligned and inside, mapped as long as `self` holds `_regions`, and an atomic may be
        // shared with all other atomic accesses.
        Ok(unsafe { AtomicU32::from_ptr(address.as_ptr()) })
    }
}

impl RingEntries for SharedRingEntries {
    #[inline]
    fn load_command(&self, index: u32) -> Result<[u64; 8], AccessFault> {
        let first = self.word_address(index as usize * 8, 8)?;
        let mut command = [0; 8];
        for (offset, word) in command.iter_mut().enumerate() {
            // SAFETY: `offset < 8`: inside the entry just checked.
            let address = unsafe { first.add(offset) };
            // SAFETY: aligned, mapped as long as `self` holds `_regions`, accessed atomically only.
            *word = unsafe { AtomicU64::from_ptr(address.as_ptr()) }.load(Ordering::Relaxed);
        }
        Ok(command)
    }

    #[inline(always)]
    fn load_commands(
        &self,
        first: u32,
        count: u32,
        mut take: impl FnMut([u64; 4]) -> bool,
    ) -> Result<(u32, Option<[u64; 8]>), AccessFault> {
        let from =
            self.word_address(first as usize * COMMAND_WORDS, count as usize * COMMAND_WORDS)?;
        let start = self.words.as_ptr();
        let end = start.wrapping_add(self.len_words());
        let mut ahead = from.as_ptr().wrapping_add(AHEAD * COMMAND_WORDS);
        let mut entry = from;
        for taken in 0..count {
            // SAFETY: `words` has checked `count` entries, of which this is one.
            let plain = unsafe { load_read_write_words(entry) };
            ahead = if ahead < end { ahead } else { start };
            prefetch_read(ahead.cast());
            ahead = ahead.wrapping_add(COMMAND_WORDS);
            if !take(plain) {
                let mut command = [0; COMMAND_WORDS];
                for (place, word) in SIMPLE_IO_WORDS.into_iter().zip(plain) {
                    command[place] = word;
                }
                for word in (0..COMMAND_WORDS).filter(|word| !SIMPLE_IO_WORDS.contains(word)) {
                    // SAFETY: a word of the same entry.
                    command[word] = unsafe { load_word(entry, word) };
                }
                return Ok((taken, Some(command)));
            }
            // SAFETY: the next of `count` entries, or the end of the last.
            entry = unsafe { entry.add(COMMAND_WORDS) };
        }
        Ok((count, None))
    }

    #[inline]
    fn store_completion(&mut self, index: u32, entry: CompletionEntry) -> Result<(), AccessFault> {
        let first = self.word_address(index as usize * 2, 2)?;
        // SAFETY: the entry just checked, mapped as long as `self` holds `_regions`.
        unsafe { store_completion_words(first, entry) };
        Ok(())
    }

    #[inline(always)]
    fn store_built_completions<T>(
        &mut self,
        first: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<CompletionEntry>,
    ) -> (usize, Result<(), AccessFault>) {
        let mut place = match self.word_address(first as usize * 2, items.len() * 2) {
            Ok(place) => place,
            Err(fault) => return (0, Err(fault)),
        };
        for (made, item) in items.iter().enumerate() {
            let Some(entry) = make(item) else { return (made, Ok(())) };
            // SAFETY: `words` has checked that there is an entry for each item.
            unsafe { store_completion_words(place, entry) };
            // SAFETY: as above: an entry, or the end of the last.
            place = unsafe { place.add(2) };
        }
        (items.len(), Ok(()))
    }

    #[inline]
    fn load_u32(&self, index: u32) -> Result<u32, AccessFault> {
        // Pairs with the driver's barrier between its entries and its shadow doorbell.
        Ok(self.u32_cell(index)?.load(Ordering::Acquire))
    }

    #[inline]
    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), AccessFault> {
        self.u32_cell(index)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn prefetch_command(&self, index: u32) {
        prefetch_read(self.words.as_ptr().wrapping_add(index as usize * 8).cast());
    }

    #[inline]
    fn prefetch_completion(&self, index: u32) {
        prefetch_write(self.words.as_ptr().wrapping_add(index as usize * 2).cast());
    }
}

/// Loads the words of a command that every simple read or write uses. Written out, since `array::map` is not
/// inlined without link-time optimization.
///
/// # Safety
///
/// As for [`load_word`].
#[inline(always)]
unsafe fn load_read_write_words(entry: NonNull<u64>) -> [u64; 4] {
    let mut plain = [0; 4];
    for (place, word) in plain.iter_mut().zip(SIMPLE_IO_WORDS) {
        // SAFETY: as promised by the caller.
        *place = unsafe { load_word(entry, word) };
    }
    plain
}

/// Loads word `word` of the entry at `entry`.
///
/// # Safety
///
/// The entry is in a ring that is mapped and only accessed by atomics and by DMA.
#[inline(always)]
unsafe fn load_word(entry: NonNull<u64>, word: usize) -> u64 {
    // SAFETY: a word of the entry, as promised by the caller.
    let address = unsafe { entry.add(word) };
    // SAFETY: aligned, since rings are, and mapped and shared as promised by the caller.
    unsafe { AtomicU64::from_ptr(address.as_ptr()) }.load(Ordering::Relaxed)
}

/// Stores a completion at `first`, the word with the phase last.
///
/// # Safety
///
/// `first` is the start of an entry of a ring that is mapped and only accessed by atomics and by DMA.
#[inline(always)]
unsafe fn store_completion_words(first: NonNull<u64>, entry: CompletionEntry) {
    // SAFETY: the second word of the entry.
    let second = unsafe { first.add(1) };
    // SAFETY: aligned, since rings are, and mapped and shared as promised by the caller.
    let first = unsafe { AtomicU64::from_ptr(first.as_ptr()) };
    // SAFETY: as above.
    let second = unsafe { AtomicU64::from_ptr(second.as_ptr()) };
    completion_order::store_completion(first, second, entry);
}

#[cfg(test)]
mod tests {
    use tenmil_base::{
        AccessId, Dma, HostMemory, Memory, RingEntries, RingMemory, SIMPLE_IO_WORDS,
    };

    use crate::{
        CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable,
        SharedHostMemory,
    };

    fn test_pool() -> DevicePool {
        let regions = RegionTable::new(1);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap())
            .unwrap();
        DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain)
    }

    #[test]
    fn iova_resolves_to_its_segment() {
        let pool = test_pool();
        let segment = pool.allocate(8192).unwrap();
        let mut host = SharedHostMemory::new(&pool);
        let iova = pool.iova(segment).unwrap();
        assert_eq!(host.resolve(iova, 8192), Ok(Some(segment)));

        let mut bytes = [0; 5];
        host.write(AccessId(0), iova + 8000, b"bytes").unwrap();
        host.read(AccessId(0), iova + 8000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
    }

    #[test]
    fn unmapped_iova_is_a_fault_and_any_iova_after_revocation() {
        let pool = test_pool();
        let iova = pool.iova(pool.allocate(4096).unwrap()).unwrap();
        let mut host = SharedHostMemory::new(&pool);
        for stray in [0, 1, iova - 1, iova + (1 << 16), iova << 1, u64::MAX, u64::MAX << 12] {
            assert!(host.resolve(stray, 1).is_err(), "{stray:#x}");
            assert!(host.resolve_ring(stray, 64).is_err(), "{stray:#x}");
            assert!(host.write(AccessId(0), stray, b"x").is_err(), "{stray:#x}");
        }
        assert!(host.resolve(iova + (1 << 16) - 1, 2).is_err(), "half inside");
        assert!(pool.revoke_access(), "no thread has to be waited for");
        assert!(host.resolve(iova, 1).is_err());
        pool.restore_access();
        assert!(host.resolve(iova, 1).is_ok());
    }

    #[test]
    fn address_window_matches_resolve_and_excludes_everything_else() {
        let pool = test_pool();
        let mut host = SharedHostMemory::new(&pool);
        let first = pool.iova(pool.allocate(1 << 16).unwrap()).unwrap();
        for len_bytes in [1, 512, 4096, 1 << 16] {
            let window = host.direct_access_window(len_bytes).unwrap();
            let last = first + (1 << 16) - u64::from(len_bytes);
            for iova in [first, first + 8, last, last.wrapping_sub(1)] {
                assert_eq!(window.piece_at(iova), host.resolve(iova, len_bytes).ok().flatten());
            }
            for stray in [first - 1, last + 1, first << 1, 0, u64::MAX] {
                assert_eq!(window.piece_at(stray), None, "{len_bytes} at {stray:#x}");
            }
        }
        assert_eq!(host.direct_access_window((1 << 16) + 1), None, "not one fits");
        assert!(pool.revoke_access());
        assert_eq!(host.direct_access_window(512), None);
    }

    #[test]
    fn address_window_is_that_of_the_region_that_was_resolved_last() {
        let regions = RegionTable::new(2);
        let memory = MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(memory).unwrap();
        let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
        let pool = DevicePool::new(regions.clone(), memory, kind, store);
        let own = pool.iova(pool.allocate(4096).unwrap()).unwrap();
        let region = regions.allocate_region(8192).unwrap();
        pool.map(region.id()).unwrap();
        let outside = pool.iova(region.segment()).unwrap();
        let mut host = SharedHostMemory::new(&pool);
        let pieces = |host: &mut SharedHostMemory| {
            let window = host.direct_access_window(512).unwrap();
            [own, outside + 8192 - 512, outside + 8192 - 511].map(|iova| window.piece_at(iova))
        };
        let expect = |host: &mut SharedHostMemory, iova| host.resolve(iova, 512).unwrap();
        let mine = expect(&mut host, own);
        assert_eq!(pieces(&mut host), [mine, None, None]);
        let other = expect(&mut host, outside + 8192 - 512);
        assert_eq!(pieces(&mut host), [None, other, None]);
        assert!(pool.revoke_access());
        assert_eq!(host.direct_access_window(512), None);
        pool.restore_access();
        expect(&mut host, outside);
        drop(region);
        assert_eq!(pieces(&mut host), [mine, None, None], "the region was dropped");
    }

    /// Every first entry, every number of entries, and every entry that is rejected.
    #[test]
    fn batch_of_commands_is_loaded_up_to_an_invalid_entry() {
        let pool = test_pool();
        let segment = pool.allocate(8 * 64).unwrap();
        let iova = pool.iova(segment).unwrap();
        let entries = SharedHostMemory::new(&pool).resolve_ring(iova, 8 * 64).unwrap().unwrap();
        let bytes: Vec<u8> = (0..64_u64).flat_map(u64::to_le_bytes).collect();
        pool.store(segment, &bytes).unwrap();
        let whole = |index: u32| std::array::from_fn(|word| u64::from(index) * 8 + word as u64);
        for first in 0..=8_u32 {
            for (count, good) in (0..=8 - first).flat_map(|n| (0..=n).map(move |good| (n, good))) {
                let mut taken = Vec::new();
                let end = entries.load_commands(first, count, |plain| {
                    taken.push(plain);
                    taken.len() <= good as usize
                });
                let refused = (good < count).then(|| whole(first + good));
                assert_eq!(end, Ok((good, refused)), "{count} from {first}, {good} good");
                for (plain, index) in taken.iter().zip(first..) {
                    assert_eq!(*plain, SIMPLE_IO_WORDS.map(|word| whole(index)[word]));
                }
            }
        }
        assert!(entries.load_commands(4, 5, |_| true).is_err(), "past the end");
    }

    #[test]
    fn batch_of_completions_is_stored_only_in_its_entries() {
        for first in 0..=8_u32 {
            for (count, good) in (0..=8 - first).flat_map(|n| (0..=n).map(move |good| (n, good))) {
                let pool = test_pool();
                let iova = pool.iova(pool.allocate(8 * 16).unwrap()).unwrap();
                let mut host = SharedHostMemory::new(&pool);
                let mut entries = host.resolve_ring(iova, 8 * 16).unwrap().unwrap();
                let items: Vec<u32> = (0..count).collect();
                let made = entries.store_built_completions(first, &items, |item| {
                    (*item < good).then_some([u64::from(*item) + 1, u64::from(*item) << 32 | 7])
                });
                assert_eq!(made, (good as usize, Ok(())));
                let stored = (first..first + good).flat_map(|index| {
                    let item = u64::from(index - first);
                    [(index * 2, item + 1), (index * 2 + 1, item << 32 | 7)]
                });
                let mut words = [0; 16];
                stored.for_each(|(word, value)| words[word as usize] = value);
                let lines = [0, 1].map(|line| entries.load_command(line).unwrap());
                assert_eq!(lines.as_flattened(), words);
            }
        }
    }

    #[test]
    fn completions_past_the_ring_end_are_a_fault_and_none_is_stored() {
        let pool = test_pool();
        let iova = pool.iova(pool.allocate(4096).unwrap()).unwrap();
        let mut entries = SharedHostMemory::new(&pool).resolve_ring(iova, 64).unwrap().unwrap();
        let (made, stored) = entries.store_built_completions(3, &[(), ()], |()| Some([1, 1]));
        assert!(made == 0 && stored.is_err());
        assert_eq!(entries.load_command(0), Ok([0; 8]));
    }

    #[test]
    fn shadow_doorbells_are_u32_and_bounds_checked() {
        let pool = test_pool();
        let segment = pool.allocate(4096).unwrap();
        let mut entries = SharedHostMemory::new(&pool)
            .resolve_ring(pool.iova(segment).unwrap(), 64)
            .unwrap()
            .unwrap();
        for index in 0..16 {
            entries.store_u32(index, index * 3).unwrap();
        }
        assert!((0..16).all(|index| entries.load_u32(index) == Ok(index * 3)));
        assert!(entries.load_u32(16).is_err());
        assert!(entries.load_command(1).is_err());
        assert!(entries.store_completion(4, [0; 2]).is_err());
        let mut bytes = [0; 4];
        pool.load(segment.slice(12, 4).unwrap(), &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 9);
    }
}
