//! Allocated regions that can be dropped again.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::atomic::Ordering;

use tenmil_base::{RegionId, Segment};

use super::{
    GENERATION_MAX, LEN_BITS, MappingTable, RegionSlot, RegionTable, RegionTableFull, SLOT_BITS,
    slot_index, whole_region_segment,
};
use crate::memory_mapping::{HUGE_PAGE, MappingError, MemoryBacking, MemoryMapping};

/// Memory in a region table, freed on drop: then its number is invalid, its pages return to the kernel,
/// and its place in the table is free.
///
/// The owner keeps it until all work on its memory has ended.
#[derive(Debug)]
pub struct Region {
    regions: RegionTable,
    id: RegionId,
    len_bytes: u64,
    /// A foreign file is still mapped there, so the place must not be reused.
    pub(super) is_leaked: bool,
}

/// Reason why a region cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// The region table is full.
    TableFull(RegionTableFull),
    /// The memory cannot be mapped.
    MapFailed(MappingError),
}

/// Minimum length of a place's mapping.
const MAPPING_MIN: usize = 64 << 10;

impl RegionTable {
    /// Allocates a region of zeroed memory, at least `len_bytes` long; private unless the table is
    /// [`shared`](Self::shared).
    ///
    /// Its mapping has the length of the next power of two, of which only accessed pages use memory. A
    /// freed place therefore fits later regions of a similar length. A longer place is used only if there
    /// is no other: short regions in long places would waste address space.
    ///
    /// In a table with [contiguous memory](Self::make_allocations_contiguous), the mapping has as many huge pages as
    /// needed, which stay allocated when the region is dropped. A longer place is used if the system has
    /// no further contiguous pages.
    ///
    /// # Errors
    ///
    /// The table is full, or the kernel has no such memory.
    pub fn allocate_region(&self, len_bytes: usize) -> Result<Region, RegionError> {
        let mut places = self.lock_mappings();
        // Read under the lock, because `make_allocations_contiguous` sets it under the lock.
        let backing = self.allocation_backing();
        self.allocate_in_free_slot(&mut places, len_bytes, backing)
    }

    /// Like [`allocate_region`](Self::allocate_region), but always sharable with another process.
    ///
    /// # Errors
    ///
    /// The table is full, or the kernel has no such memory.
    pub fn allocate_shared(&self, len_bytes: usize) -> Result<Region, RegionError> {
        self.allocate_with_backing(len_bytes, MemoryBacking::Shared)
    }

    pub(super) fn allocate_with_backing(
        &self,
        len_bytes: usize,
        backing: MemoryBacking,
    ) -> Result<Region, RegionError> {
        self.allocate_in_free_slot(&mut self.lock_mappings(), len_bytes, backing)
    }

    fn allocate_in_free_slot(
        &self,
        places: &mut MappingTable,
        len_bytes: usize,
        backing: MemoryBacking,
    ) -> Result<Region, RegionError> {
        let mapped = match backing {
            MemoryBacking::Contiguous => len_bytes.checked_next_multiple_of(HUGE_PAGE),
            _ => len_bytes.checked_next_power_of_two(),
        };
        let mapped = mapped.unwrap_or(len_bytes).max(MAPPING_MIN);
        let bytes = len_bytes.next_multiple_of(4096) as u64;
        let is_full = places.mappings.len() >= self.table.slots.len();
        // First choice is a free place of exactly this size; a larger one is used only if the table is
        // full or no new mapping is possible.
        let whole = match self.assign_free_slot(places, mapped..=mapped, bytes, backing) {
            Some(whole) => whole,
            None if is_full => match self.assign_free_slot(places, mapped.., bytes, backing) {
                Some(whole) => whole,
                None => self.enlarge_mapping(places, mapped, bytes, backing)?,
            },
            None => {
                let asked = if len_bytes == 0 { 0 } else { mapped };
                match MemoryMapping::new(asked, backing) {
                    Ok(mapping) => self
                        .add_mapping_part(places, mapping, bytes)
                        .map_err(RegionError::TableFull)?,
                    Err(why) => {
                        let longer = (backing == MemoryBacking::Contiguous)
                            .then(|| self.assign_free_slot(places, mapped.., bytes, backing))
                            .flatten();
                        longer.ok_or(RegionError::MapFailed(why))?
                    }
                }
            }
        };
        Ok(Region::new(self, whole.region, bytes))
    }

    /// Number of existing regions.
    pub fn region_count(&self) -> usize {
        let has_region =
            |slot: &&RegionSlot| slot.word.load(Ordering::Relaxed) << (64 - LEN_BITS) != 0;
        self.table.slots.iter().filter(has_region).count()
    }

    /// Assigns a new region to the smallest free place whose mapping has a fitting length.
    fn assign_free_slot(
        &self,
        places: &mut MappingTable,
        fitting: impl RangeBounds<usize>,
        len_bytes: u64,
        backing: MemoryBacking,
    ) -> Option<Segment> {
        let MappingTable { mappings, empty, .. } = places;
        let of = |place: u32| &mappings[place as usize];
        let alike = empty.iter().enumerate().filter(|(_, place)| of(**place).backing() == backing);
        let lengths = alike.map(|(at, place)| (of(*place).len_bytes(), at));
        let (_, at) = lengths.filter(|(len, _)| len_bytes > 0 && fitting.contains(len)).min()?;
        let place = empty.swap_remove(at);
        let slot = &self.table.slots[place as usize];
        // The generation was incremented when the place was freed.
        let word = slot.word.load(Ordering::Relaxed);
        let generation = u32::try_from(word >> LEN_BITS).unwrap_or(GENERATION_MAX);
        slot.publish_region(generation, len_bytes);
        Some(whole_region_segment(RegionId(generation << SLOT_BITS | place), len_bytes))
    }

    /// Replaces the mapping of a free place by a longer one. The old mapping stays mapped, without pages,
    /// for accesses still in progress. Mappings of a place at least double, so all earlier ones together
    /// are no longer than the current one. Contiguous mappings grow by pages, but occupy only addresses
    /// afterwards.
    fn enlarge_mapping(
        &self,
        places: &mut MappingTable,
        mapped: usize,
        len_bytes: u64,
        backing: MemoryBacking,
    ) -> Result<Segment, RegionError> {
        let full = RegionError::TableFull(RegionTableFull { regions_max: self.table.slots.len() });
        let len_of = |place: &u32| places.mappings[*place as usize].len_bytes();
        let shorter = places.empty.iter().filter(|place| len_of(place) < mapped);
        let place = *shorter.min_by_key(|place| len_of(place)).ok_or(full)?;
        if len_bytes == 0 || len_bytes >> LEN_BITS != 0 {
            return Err(full);
        }
        let mapping = MemoryMapping::new(mapped, backing).map_err(RegionError::MapFailed)?;
        // A reader that combines the old length with the new base stays inside: the new mapping is
        // longer.
        let base = mapping.base_address().as_ptr();
        self.table.slots[place as usize].base.store(base, Ordering::Relaxed);
        let mut before = std::mem::replace(&mut places.mappings[place as usize], mapping);
        before.release_pinned_pages();
        places.outgrown.push(before);
        self.assign_free_slot(places, mapped.., len_bytes, backing).ok_or(full)
    }

    /// Frees a region. Its place is never reused if its generations are exhausted, if the kernel keeps
    /// its pages, if a device can still access it, or if it is leaked.
    fn free_region(&self, id: RegionId, is_spoilt: bool) {
        let (place, generation) = (slot_index(id), id.0 >> SLOT_BITS);
        let next = generation.saturating_add(1).min(GENERATION_MAX);
        self.table.slots[place as usize].publish_region(next, 0);
        let is_withdrawn = self.table.exposed_by.unmap_from_all(id);
        let mut places = self.lock_mappings();
        let discarded =
            !is_spoilt && is_withdrawn && places.mappings[place as usize].discard_pages();
        if discarded && generation < GENERATION_MAX {
            places.empty.push(place);
        }
    }
}

impl Region {
    pub(super) fn new(regions: &RegionTable, id: RegionId, len_bytes: u64) -> Self {
        Self { regions: regions.clone(), id, len_bytes, is_leaked: false }
    }

    /// Region number.
    #[inline]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Segment of the whole region, or of as much as a segment can cover.
    pub fn segment(&self) -> Segment {
        whole_region_segment(self.id, self.len_bytes)
    }

    /// Length: the requested one, rounded up to whole pages.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.regions.free_region(self.id, self.is_leaked);
    }
}

impl fmt::Display for RegionError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TableFull(full) => full.fmt(out),
            Self::MapFailed(error) => error.fmt(out),
        }
    }
}

impl std::error::Error for RegionError {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use tenmil_base::{Memory, RegionId, Segment};

    use super::{GENERATION_MAX, HUGE_PAGE, RegionError, SLOT_BITS};
    use crate::{MemoryBacking, MemoryMapping, RegionTable};

    fn region_bytes(regions: &RegionTable, segment: Segment) -> Vec<u8> {
        let mut bytes = vec![0xaa; segment.len_bytes as usize];
        regions.load(segment, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn shared_region_has_a_descriptor_and_is_zeroed() {
        let regions = RegionTable::new(2);
        let private = regions.allocate_region(4096).unwrap();
        assert!(regions.descriptor(private.id()).is_none());
        let shared = regions.allocate_shared(4096).unwrap();
        let (first, place) = (regions.descriptor(shared.id()).unwrap(), shared.segment());
        regions.store(place.slice(0, 4).unwrap(), b"seen").unwrap();
        let mut found = [0; 4];
        rustix::io::pread(&first, &mut found, 0).unwrap();
        assert_eq!(&found, b"seen");
        drop((private, shared));
        assert!(regions.descriptor(place.region).is_none(), "it is no region any more");
        let (private, shared) = (regions.allocate_region(4096).unwrap(), RegionTable::shared(1));
        assert!(regions.descriptor(private.id()).is_none(), "a place keeps what it is made of");
        assert!(regions.allocate_region(4096).is_err());
        let again = regions.allocate_shared(4096).unwrap();
        assert_eq!(region_bytes(&regions, again.segment()), [0; 4096]);
        assert!(shared.descriptor(shared.allocate_region(1).unwrap().id()).is_some());
    }

    #[test]
    fn contiguous_mappings_are_reused_and_enlarged_only_if_necessary() {
        let (regions, late) = (RegionTable::shared(4), RegionTable::new(1));
        let ordinary = late.allocate_region(4096).unwrap();
        assert!(
            !late.make_allocations_contiguous() && !late.allocates_contiguous(),
            "it has memory that is not in a row"
        );
        assert_eq!(late.physical_address(ordinary.id()), None);
        assert!(regions.allocates_shared() && regions.make_allocations_contiguous());
        assert!(regions.allocates_contiguous() && !regions.allocates_shared());
        let scattered = regions.allocate_shared(4096).unwrap();
        assert!(
            regions.physical_address(scattered.id()).is_none()
                && regions.make_allocations_contiguous(),
            "once more"
        );
        // Works without reserved huge pages, and without permission to read physical addresses.
        let Ok(first) = regions.allocate_region(5_000) else { return };
        let Ok(longer) = regions.allocate_region(HUGE_PAGE + 1) else { return };
        let (at, longer_at) =
            (regions.physical_address(first.id()), regions.physical_address(longer.id()));
        assert!(at.is_some() && longer_at.is_some() && at != longer_at);
        regions.fill(first.segment(), 7).unwrap();
        let id = first.id();
        drop((first, longer));
        assert_eq!(regions.physical_address(id), None, "it is no region any more");
        let again = regions.allocate_region(4096).unwrap();
        assert_eq!(regions.physical_address(again.id()), at);
        assert_eq!(region_bytes(&regions, again.segment()), [0; 4096]);
    }

    /// A reader that was informed that all regions are contiguous never meets one that is not.
    #[test]
    fn concurrent_allocation_gets_contiguous_memory_or_an_error() {
        let regions = RegionTable::new(1);
        let places = regions.lock_mappings();
        std::thread::scope(|scope| {
            let allocated = scope.spawn(|| regions.allocate_region(4096));
            // It waits for the lock, or is about to.
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
            regions.table.is_in_rows.store(true, Ordering::Relaxed);
            drop(places);
            if let Ok(region) = allocated.join().unwrap() {
                assert!(regions.physical_address(region.id()).is_some());
            }
        });
    }

    #[test]
    fn dropped_region_is_invalid_and_its_slot_free() {
        let regions = RegionTable::new(2);
        let stays =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        regions.fill(stays, 1).unwrap();
        let mut old: Vec<Segment> = Vec::new();
        for round in 0..1_000_u32 {
            // A different length each time, longer and shorter than the previous one.
            let len_bytes = 4096 + (round * 7919 % 60_000) as usize;
            let region = regions.allocate_region(len_bytes).unwrap();
            let all = region.segment();
            assert!(all.len_bytes as usize >= len_bytes && region.len_bytes() < 65_536 + 4096);
            assert!(region_bytes(&regions, all).iter().all(|byte| *byte == 0), "round {round}");
            regions.fill(all, 0xff).unwrap();
            assert!(!old.contains(&all), "a number of its own");
            for gone in &old {
                assert!(regions.host_address(*gone).is_err() && !regions.contains(*gone));
            }
            old.push(all);
            old.truncate(50);
            let full = regions.allocate_region(4096).unwrap_err();
            assert_eq!(full.to_string(), "add a memory region: the table was made for 2");
        }
        assert!(region_bytes(&regions, stays).iter().all(|byte| *byte == 1));
    }

    #[test]
    fn smallest_fitting_slot_is_used() {
        let regions = RegionTable::new(2);
        let small = regions.allocate_region(64 << 10).unwrap();
        let large = regions.allocate_region(1 << 20).unwrap();
        let (small_at, large_at) = (small.segment().region, large.segment().region);
        assert_eq!(regions.region_count(), 2);
        drop((small, large));
        assert_eq!(regions.region_count(), 0);
        let again = regions.allocate_region(5_000).unwrap();
        assert_eq!(again.segment().region, RegionId(small_at.0 + (1 << SLOT_BITS)));
        assert_eq!(again.len_bytes(), 8192);
        let beyond = Segment { offset: 8192, len_bytes: 1, ..again.segment() };
        assert!(!regions.contains(beyond), "the mapping is longer than the region");
        let other = regions.allocate_region(600 << 10).unwrap();
        assert_eq!(other.segment().region, RegionId(large_at.0 + (1 << SLOT_BITS)));
    }

    #[test]
    fn long_slots_are_not_used_for_short_regions_if_others_are_free() {
        let regions = RegionTable::new(64);
        let mut short = Vec::new();
        for _ in 0..30 {
            drop(regions.allocate_region(1 << 30).unwrap());
            short.push(regions.allocate_region(4096).unwrap());
        }
        let places = regions.lock_mappings();
        let long = places.mappings.iter().filter(|mapping| mapping.len_bytes() >= 1 << 30);
        assert_eq!(long.count(), 1);
    }

    #[test]
    fn slot_is_retired_after_its_last_generation() {
        let regions = RegionTable::new(1);
        let mut region = regions.allocate_region(4096).unwrap();
        for generation in 1..=GENERATION_MAX {
            if generation == 10 {
                // Reaches the end of twenty bits of generations without counting through them.
                let word = u64::from(GENERATION_MAX - 5) << super::LEN_BITS | 4096;
                region.regions.table.slots[0].word.store(word, Ordering::Relaxed);
                region.id = RegionId((GENERATION_MAX - 5) << SLOT_BITS);
            }
            let last = region.segment();
            drop(region);
            match regions.allocate_region(4096) {
                Ok(next) => region = next,
                Err(RegionError::TableFull(_)) => {
                    assert_eq!(last.region.0 >> SLOT_BITS, GENERATION_MAX);
                    assert!(!regions.contains(last), "the last one is gone as well");
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
        panic!("generations have no end");
    }

    #[test]
    fn impossible_allocation_is_rejected() {
        let regions = RegionTable::new(1);
        assert!(matches!(regions.allocate_region(0), Err(RegionError::MapFailed(_))));
        assert!(matches!(regions.allocate_region(1 << 61), Err(RegionError::MapFailed(_))));
        regions.allocate_region(1).unwrap();
    }

    #[test]
    fn regions_of_two_threads_never_overlap() {
        let regions = RegionTable::new(4);
        std::thread::scope(|scope| {
            for byte in [1, 2] {
                let regions = &regions;
                scope.spawn(move || {
                    for _ in 0..500 {
                        let region = regions.allocate_region(8192).unwrap();
                        let all = region.segment();
                        assert!(region_bytes(regions, all).iter().all(|found| *found == 0));
                        regions.fill(all, byte).unwrap();
                        assert!(region_bytes(regions, all).iter().all(|found| *found == byte));
                    }
                });
            }
        });
    }

    #[test]
    fn table_full_of_short_slots_can_hold_long_regions() {
        let regions = RegionTable::new(4);
        for shift in 0..6 {
            let len = (64 << 10) << shift;
            let all: Vec<_> = (0..4).map(|_| regions.allocate_region(len).unwrap()).collect();
            let full = regions.allocate_region(len).unwrap_err();
            assert!(matches!(full, RegionError::TableFull(_)), "{full}");
            for region in &all {
                let last = Segment { offset: len as u64 - 4, len_bytes: 4, ..region.segment() };
                assert_eq!(region_bytes(&regions, last), [0; 4]);
                regions.store(last, b"last").unwrap();
            }
        }
        let kept = regions.allocate_region(4096).unwrap();
        assert!(regions.allocate_region(1 << 30).is_ok(), "beside one that stays");
        assert_eq!(region_bytes(&regions, kept.segment()), [0; 4096]);
    }
}
