//! Regions in memory that the program has mapped itself.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::region::Region;
use super::{LEN_BITS, RegionTable, RegionTableFull, SLOT_BITS};
use crate::memory_mapping::{MemoryBacking, MemoryMapping};
use tenmil_base::RegionId;

const PAGE: usize = 4096;

impl RegionTable {
    /// Adds memory of the program as a region, until the region is dropped. The table neither maps nor unmaps
    /// it. It has no [descriptor](Self::descriptor), so that other processes cannot map it, and no [physical
    /// address](Self::physical_address).
    ///
    /// # Errors
    ///
    /// The table is full.
    ///
    /// # Panics
    ///
    /// If `base` and `len_bytes` are not whole pages, or `len_bytes` is zero.
    ///
    /// # Safety
    ///
    /// Until the region has been dropped, all of the memory stays mapped, readable and writable. When it is
    /// dropped, no access to a segment of it is in progress. The program accesses the bytes only as memory
    /// that devices write: by no reference that is live while a request may write there.
    pub unsafe fn add_program_memory(
        &self,
        base: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<Region, RegionTableFull> {
        let is_whole = base.as_ptr().addr().is_multiple_of(PAGE) && len_bytes.is_multiple_of(PAGE);
        assert!(is_whole && len_bytes > 0, "{len_bytes} bytes at {base:p}, expected whole pages");
        let full = RegionTableFull { regions_max: self.table.slots.len() };
        let bytes = len_bytes as u64;
        if bytes >> LEN_BITS != 0 {
            return Err(full);
        }
        let mapping = MemoryMapping::of_program(base, len_bytes);
        let mut places = self.lock_mappings();
        let is_alike =
            |place: &u32| places.mappings[*place as usize].backing() == MemoryBacking::OfProgram;
        let Some(at) = places.empty.iter().position(is_alike) else {
            let whole = self.add_mapping_part(&mut places, mapping, bytes)?;
            return Ok(Region::new(self, whole.region, bytes));
        };
        let place = places.empty.swap_remove(at);
        places.mappings[place as usize] = mapping;
        let slot = &self.table.slots[place as usize];
        // No reader combines this base with the length of an earlier region of the place: no access to that
        // was in progress when it was dropped, and its number has been invalid since.
        slot.base.store(base.as_ptr(), Ordering::Relaxed);
        // The generation was incremented when the place was freed.
        let generation = slot.word.load(Ordering::Relaxed) >> LEN_BITS;
        let generation = u32::try_from(generation).map_err(|_| full)?;
        slot.publish_region(generation, bytes);
        Ok(Region::new(self, RegionId(generation << SLOT_BITS | place), bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use tenmil_base::Memory;

    use crate::{Region, RegionTable};

    /// Two pages of the program.
    #[repr(align(4096))]
    struct Pages([u8; 8192]);

    fn add(regions: &RegionTable, pages: &mut Pages) -> Region {
        let base = NonNull::from(&mut pages.0).cast();
        // SAFETY: the tests drop the region before the pages, and read the pages through the table, or after
        // the drop.
        unsafe { regions.add_program_memory(base, 8192) }.unwrap()
    }

    #[test]
    fn program_memory_is_accessed_in_place_and_kept_when_its_region_is_dropped() {
        let regions = RegionTable::new(1);
        let mut pages = Box::new(Pages([7; 8192]));
        let region = add(&regions, &mut pages);
        let segment = region.segment();
        regions.store(segment.slice(4094, 4).unwrap(), b"here").unwrap();
        assert!(regions.descriptor(region.id()).is_none());
        drop(region);
        assert_eq!(&pages.0[4093..4099], b"\x07here\x07");
        assert!(regions.store(segment, &[0; 8192]).is_err(), "its number is invalid");
    }

    #[test]
    fn place_of_program_memory_is_reused_by_program_memory_only() {
        let regions = RegionTable::new(1);
        let (mut first, mut second) = (Box::new(Pages([1; 8192])), Box::new(Pages([2; 8192])));
        let before = add(&regions, &mut first).segment();
        let region = add(&regions, &mut second);
        assert_ne!(region.id(), before.region);
        let mut found = [0; 2];
        regions.load(region.segment().slice(0, 2).unwrap(), &mut found).unwrap();
        assert_eq!(found, [2, 2]);
        assert!(regions.load(before.slice(0, 2).unwrap(), &mut found).is_err());
        drop(region);
        // A table that is full replaces the place by a mapping of its own, and leaves the pages alone.
        let own = regions.allocate_region(4096).unwrap();
        regions.store(own.segment(), &[9; 4096]).unwrap();
        assert_eq!((first.0[0], second.0[0]), (1, 2));
    }
}
