//! Driver side of submission and completion rings.
//!
//! A completion is loaded as two 64-bit atomics: first the one with the phase, then, after a load barrier,
//! the other. A single wide load would be simpler, but is not atomic.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;

use tenmil_base::{CompletionEntry, CompletionRing, Segment, SubmissionRing};

use crate::barrier::DeviceKind;
use crate::command_store::CommandStore;
use crate::completion_order::{self, PHASE};
use crate::region_table::RegionTable;

/// Driver side of a submission ring.
#[derive(Debug)]
pub struct HostSubmissionRing {
    entries: NonNull<u64>,
    depth: u32,
    kind: DeviceKind,
    store: CommandStore,
    /// Keeps the memory mapped.
    _regions: RegionTable,
}

/// Driver side of a completion ring.
#[derive(Debug)]
pub struct HostCompletionRing {
    entries: NonNull<u64>,
    depth: u32,
    kind: DeviceKind,
    /// Keeps the memory mapped.
    _regions: RegionTable,
}

/// CC.IOSQES = 6.
const COMMAND_WORDS: usize = 8;
/// CC.IOCQES = 4.
const COMPLETION_WORDS: usize = 2;

// SAFETY: the pointer is into a region that the handle beside it keeps mapped, on any thread; `&mut self`
// on every store limits the ring to one thread at a time.
unsafe impl Send for HostSubmissionRing {}
// SAFETY: as above.
unsafe impl Send for HostCompletionRing {}

impl HostSubmissionRing {
    /// Creates a ring in `memory`.
    ///
    /// # Panics
    ///
    /// `memory` is not `depth` entries, aligned to 64 bytes; it comes from this crate's allocator.
    pub(crate) fn new(
        regions: RegionTable,
        memory: Segment,
        depth: u32,
        kind: DeviceKind,
        store: CommandStore,
    ) -> Self {
        let entries = resolve_ring(&regions, memory, u64::from(depth) * 64);
        Self { entries, depth, kind, store, _regions: regions }
    }

    /// Store instruction in use.
    #[cfg(test)]
    pub(crate) fn command_store(&self) -> CommandStore {
        self.store
    }
}

impl HostCompletionRing {
    /// Creates a ring in `memory`.
    ///
    /// # Panics
    ///
    /// `memory` is not `depth` entries, aligned to 64 bytes; it comes from this crate's allocator.
    pub(crate) fn new(regions: RegionTable, memory: Segment, depth: u32, kind: DeviceKind) -> Self {
        let entries = resolve_ring(&regions, memory, u64::from(depth) * 16);
        Self { entries, depth, kind, _regions: regions }
    }

    /// Entry `index`, if its phase tag is `wanted`.
    #[inline]
    fn load_if_new(&self, index: u32, wanted: u64) -> Option<CompletionEntry> {
        assert!(index < self.depth, "entry past the end of its ring");
        // SAFETY: as just asserted, inside the memory resolved in `new`.
        let first = unsafe { self.entries.add(index as usize * COMPLETION_WORDS) };
        // SAFETY: an entry of this ring.
        unsafe { self.load_at_if_new(first, wanted) }
    }

    /// Entry at `first`, if its phase tag is `wanted`.
    ///
    /// # Safety
    ///
    /// `first` is the first word of an entry of this ring.
    #[inline(always)]
    unsafe fn load_at_if_new(&self, first: NonNull<u64>, wanted: u64) -> Option<CompletionEntry> {
        // SAFETY: the second word of the same entry.
        let second = unsafe { first.add(1) };
        // SAFETY: aligned, mapped as long as `_regions` is held, and only accessed by atomics and by DMA.
        let second = unsafe { AtomicU64::from_ptr(second.as_ptr()) };
        // SAFETY: as for the second word.
        let first = unsafe { AtomicU64::from_ptr(first.as_ptr()) };
        completion_order::load_completion_if_new(first, second, wanted, self.kind)
    }
}

impl HostSubmissionRing {
    /// [`store_built_commands`](SubmissionRing::store_built_commands) with the instruction `store`.
    #[inline(always)]
    fn store_each_with<T>(
        &mut self,
        store: CommandStore,
        first: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<[u64; 8]>,
    ) -> usize {
        let first = self.entry_address(first, items.len());
        let mut at = first;
        for item in items {
            let Some(command) = make(item) else { break };
            // SAFETY: `entry_address` has checked that there is an entry for each item; the rest is as in
            // `store`, and `store` was checked when it was selected.
            unsafe { store.store_command(at, &command) };
            // SAFETY: as above: an entry, or the end of the ring.
            at = unsafe { at.add(COMMAND_WORDS) };
        }
        (at.addr().get() - first.addr().get()) / (COMMAND_WORDS * 8)
    }

    /// Entry `first`, which is followed by `count - 1` more.
    #[inline]
    fn entry_address(&self, first: u32, count: usize) -> NonNull<u64> {
        let is_inside = first <= self.depth && count <= (self.depth - first) as usize;
        assert!(is_inside, "entries past the end of their ring");
        // SAFETY: as just asserted, inside the memory resolved in `new` or at its end.
        unsafe { self.entries.add(first as usize * COMMAND_WORDS) }
    }
}

impl HostCompletionRing {
    /// [`load_entries`](CompletionRing::load_entries) for entries with the phase tag `WANTED`.
    #[inline(always)]
    fn load_entries_with_phase<const WANTED: u64, T>(
        &self,
        first: u32,
        places: &mut [T],
        mut take: impl FnMut(CompletionEntry, &mut T) -> bool,
    ) -> usize {
        // SAFETY: `first` is an entry of the ring or its end, as asserted by the caller.
        let first = unsafe { self.entries.add(first as usize * COMPLETION_WORDS) };
        let mut at = first;
        for place in places {
            // SAFETY: there are as many entries as places, as asserted by the caller.
            let entry = unsafe { self.load_at_if_new(at, WANTED) };
            if !entry.is_some_and(|entry| take(entry, place)) {
                break;
            }
            // SAFETY: as above: an entry, or the end of the ring.
            at = unsafe { at.add(COMPLETION_WORDS) };
        }
        (at.addr().get() - first.addr().get()) / (COMPLETION_WORDS * 8)
    }
}

impl SubmissionRing for HostSubmissionRing {
    #[inline]
    fn store(&mut self, index: u32, command: &[u64; 8]) {
        assert!(index < self.depth, "entry past the end of its ring");
        // SAFETY: as just asserted, inside the memory resolved in `new`.
        let entry = unsafe { self.entries.add(index as usize * COMMAND_WORDS) };
        // SAFETY: 64 bytes aligned to 64 because the ring is; mapped as long as `_regions` is held; no
        // reference into a region exists; the store instruction was checked when it was selected.
        unsafe { self.store.store_command(entry, command) };
    }

    #[inline(always)]
    fn store_built_commands<T>(
        &mut self,
        first: u32,
        items: &[T],
        make: impl FnMut(&T) -> Option<[u64; 8]>,
    ) -> usize {
        // Two loops, so that the one for an emulated SSD does not select the instruction for each entry.
        match self.store {
            CommandStore::Plain => self.store_each_with(CommandStore::Plain, first, items, make),
            store => self.store_each_with(store, first, items, make),
        }
    }

    #[inline]
    fn order_before_doorbell(&mut self) {
        self.store.order_before_doorbell(self.kind);
    }
}

impl CompletionRing for HostCompletionRing {
    #[inline]
    fn load(&self, index: u32, phase: bool) -> Option<CompletionEntry> {
        self.load_if_new(index, phase_word(phase))
    }

    #[inline(always)]
    fn load_entries<T>(
        &self,
        first: u32,
        phase: bool,
        places: &mut [T],
        take: impl FnMut(CompletionEntry, &mut T) -> bool,
    ) -> usize {
        let is_inside = first <= self.depth && places.len() <= (self.depth - first) as usize;
        assert!(is_inside, "entries past the end of their ring");
        // Two loops with a constant phase tag each.
        if phase {
            self.load_entries_with_phase::<PHASE, T>(first, places, take)
        } else {
            self.load_entries_with_phase::<0, T>(first, places, take)
        }
    }
}

#[inline]
const fn phase_word(phase: bool) -> u64 {
    if phase { PHASE } else { 0 }
}

pub(crate) fn resolve_ring(regions: &RegionTable, memory: Segment, len_bytes: u64) -> NonNull<u64> {
    assert!(len_bytes > 0 && len_bytes <= u64::from(memory.len_bytes), "a ring lies in its memory");
    let address =
        regions.host_address(memory).unwrap_or_else(|stray| panic!("{stray:?}")).cast::<u64>();
    assert!(address.as_ptr().align_offset(64) == 0, "a ring begins on a cache line");
    address
}

#[cfg(test)]
mod tests {
    use tenmil_base::{CompletionRing, Dma, RingEntries, RingMemory, SubmissionRing};

    use crate::{
        CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable,
        SharedHostMemory,
    };

    fn test_pool(store: CommandStore) -> DevicePool {
        let regions = RegionTable::new(1);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap())
            .unwrap();
        DevicePool::new(regions, memory, DeviceKind::Emulated, store)
    }

    #[test]
    fn commands_stored_by_the_driver_are_loaded_by_the_controller() {
        for store in CommandStore::ALL.into_iter().filter(|store| store.is_supported()) {
            let pool = test_pool(store);
            let memory = pool.allocate(8 * 64).unwrap();
            let mut ring = pool.submission_ring(memory, 8);
            let iova = pool.iova(memory).unwrap();
            let entries = SharedHostMemory::new(&pool).resolve_ring(iova, 8 * 64).unwrap().unwrap();
            for index in 0..8 {
                let command = [u64::from(index); 8];
                ring.store(index, &command);
                ring.order_before_doorbell();
                assert_eq!(entries.load_command(index), Ok(command));
            }
        }
    }

    /// Every first entry, every number of items, and every item at which no more follow.
    #[test]
    fn batch_of_commands_is_stored_only_in_its_entries() {
        for store in CommandStore::ALL.into_iter().filter(|store| store.is_supported()) {
            let pool = test_pool(store);
            let memory = pool.allocate(8 * 64).unwrap();
            let mut ring = pool.submission_ring(memory, 8);
            let iova = pool.iova(memory).unwrap();
            let entries = SharedHostMemory::new(&pool).resolve_ring(iova, 8 * 64).unwrap().unwrap();
            for first in 0..=8_u32 {
                for (count, end) in (0..=8 - first).flat_map(|n| (0..=n).map(move |end| (n, end))) {
                    (0..8).for_each(|index| ring.store(index, &[99; 8]));
                    let items: Vec<u32> = (0..count).collect();
                    let stored = ring.store_built_commands(first, &items, |item| {
                        (*item < end).then_some([u64::from(*item); 8])
                    });
                    ring.order_before_doorbell();
                    assert_eq!(stored, end as usize);
                    for index in 0..8 {
                        let is_new = (first..first + end).contains(&index);
                        let word = if is_new { u64::from(index - first) } else { 99 };
                        assert_eq!(entries.load_command(index), Ok([word; 8]));
                    }
                }
            }
        }
    }

    /// Every first entry, every number of entries, both phases, and every entry at which the callback
    /// stops the run.
    #[test]
    fn batch_of_completions_ends_at_a_phase_change_the_buffer_or_the_limit() {
        for (fresh, phase) in (0..=8_u32).flat_map(|fresh| [(fresh, true), (fresh, false)]) {
            let pool = test_pool(CommandStore::Plain);
            let memory = pool.allocate(8 * 16).unwrap();
            let ring = pool.completion_ring(memory, 8);
            let iova = pool.iova(memory).unwrap();
            let mut entries =
                SharedHostMemory::new(&pool).resolve_ring(iova, 8 * 16).unwrap().unwrap();
            let word = |index: u32| [u64::from(index), u64::from((index < fresh) == phase) << 48];
            (0..8).for_each(|index| entries.store_completion(index, word(index)).unwrap());
            for first in 0..=8_u32 {
                for (count, enough) in (0..=8 - first).flat_map(|n| [(n, n), (n, n / 2)]) {
                    let mut places = vec![[0; 2]; count as usize];
                    let mut left = enough;
                    let taken = ring.load_entries(first, phase, &mut places, |entry, place| {
                        *place = entry;
                        left = left.wrapping_sub(1);
                        left != u32::MAX
                    });
                    let expected = enough.min(fresh.saturating_sub(first));
                    assert_eq!(taken, expected as usize, "{fresh} {phase} {first} {count}");
                    let entries: Vec<_> = (first..first + expected).map(word).collect();
                    assert_eq!(places[..taken], entries);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn entry_past_the_ring_end_panics() {
        let pool = test_pool(CommandStore::Plain);
        let memory = pool.allocate(8 * 64).unwrap();
        pool.submission_ring(memory, 8).store(8, &[0; 8]);
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn batch_past_the_ring_end_panics() {
        let pool = test_pool(CommandStore::Plain);
        let memory = pool.allocate(8 * 64).unwrap();
        pool.submission_ring(memory, 8).store_built_commands(7, &[(), ()], |()| Some([0; 8]));
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn load_past_the_ring_end_panics() {
        let pool = test_pool(CommandStore::Plain);
        let memory = pool.allocate(8 * 16).unwrap();
        pool.completion_ring(memory, 8).load_entries(8, true, &mut [()], |_, ()| true);
    }
}
