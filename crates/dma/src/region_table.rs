//! Region table: the only place where a segment is resolved to an address.
//!
//! ```text
//!   region number    | generation : 20 | place : 12 |
//! ```
//!
//! A place in the table has a mapping, which may be replaced by a longer one when the table is full. A
//! dropped region returns its pages to the kernel and leaves its place, still mapped, to a later region
//! that fits; that region has the next generation, so the old number is rejected. The invariants:
//!
//! - An address is never resolved to unmapped memory, because nothing is unmapped, and the mappings of a
//!   place only become longer: an old length combined with a new base is still inside.
//! - An access resolved before its region was dropped may still move bytes there. This is a bug of the
//!   caller that dropped the region too early; it corrupts data, but not memory safety. Therefore the
//!   owner of a [`Region`] keeps it until all work on its memory has ended.
//! - Memory of the program is the exception: the program unmaps it after its region was dropped, and
//!   promises that no access was in progress then.
//! - A component that lets a device access regions registers an [`UnmapListener`]. The place of a region
//!   that cannot be unmapped from its device is never reused.

mod foreign_region;
mod kernel_buffer;
mod program_memory;
mod region;
mod unmap_listener;

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tenmil_base::{InvalidSegment, Memory, RegionId, Segment};

pub use self::foreign_region::{FileRange, ForeignMapError, ForeignRegion};
use self::kernel_buffer::KernelBuffers;
pub use self::kernel_buffer::{KernelBufferSlice, KernelBufferSource};
pub use self::region::{Region, RegionError};
pub use self::unmap_listener::UnmapListener;
use self::unmap_listener::UnmapListeners;
use crate::memory_mapping::{MemoryBacking, MemoryMapping};

/// Table of memory regions, shared by everything that moves bytes. Cheap to clone.
///
/// Resolving a region needs no lock and no reference count: two loads and a comparison.
#[derive(Clone, Debug)]
pub struct RegionTable {
    table: Arc<RegionSlots>,
}

#[derive(Debug)]
struct RegionSlots {
    slots: Box<[RegionSlot]>,
    /// By place: kernel buffers, which have no address in this process.
    leased: Box<[OnceLock<KernelBuffers>]>,
    /// Locked for adding and dropping regions.
    places: Mutex<MappingTable>,
    /// Backing of allocated regions, unless they have to be contiguous.
    backing: MemoryBacking,
    is_in_rows: AtomicBool,
    /// Registered unmap listeners.
    exposed_by: UnmapListeners,
}

/// Mapping of each place.
#[derive(Debug, Default)]
struct MappingTable {
    /// By place.
    mappings: Vec<MemoryMapping>,
    /// Former mappings of places that needed longer ones. Like all mappings, they are kept as long as the
    /// table exists.
    outgrown: Vec<MemoryMapping>,
    /// Places whose region was dropped.
    empty: Vec<u32>,
}

/// Region slot.
///
/// ```text
///   0       8                                16
///   | base  | generation : 20 | length : 44 |
/// ```
///
/// The second word is stored last and loaded first. A length of zero means that there is no region.
#[derive(Debug)]
struct RegionSlot {
    base: AtomicPtr<u8>,
    word: AtomicU64,
}

const _: () = assert!(size_of::<RegionSlot>() == 16);

/// Bits of a region number that are its place.
const SLOT_BITS: u32 = 12;
/// Maximum number of places in a table.
const SLOTS_MAX: usize = 1 << SLOT_BITS;
const GENERATION_MAX: u32 = (1 << (32 - SLOT_BITS)) - 1;
/// Bits of a slot word that are the length: 16 TiB.
const LEN_BITS: u32 = 44;

const _: () = assert!(LEN_BITS + (32 - SLOT_BITS) == 64, "a generation fits above the length");

/// Error: the region table is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTableFull {
    /// Maximum number of its regions.
    pub regions_max: usize,
}

impl RegionTable {
    /// Creates an empty table for at most `regions_max` regions at a time, up to 4096.
    pub fn new(regions_max: usize) -> Self {
        Self::with_backing(regions_max, MemoryBacking::Private)
    }

    /// Creates a table whose allocated regions can be shared with another process through their
    /// [`descriptor`](Self::descriptor).
    pub fn shared(regions_max: usize) -> Self {
        Self::with_backing(regions_max, MemoryBacking::Shared)
    }

    fn with_backing(regions_max: usize, backing: MemoryBacking) -> Self {
        let slot = || RegionSlot { base: AtomicPtr::default(), word: AtomicU64::new(0) };
        let places_max = regions_max.min(SLOTS_MAX);
        let slots = (0..places_max).map(|_| slot()).collect();
        let leased = (0..places_max).map(|_| OnceLock::new()).collect();
        let (places, exposed_by) = (Mutex::default(), UnmapListeners::default());
        let is_in_rows = AtomicBool::new(false);
        Self {
            table: Arc::new(RegionSlots { slots, leased, places, backing, is_in_rows, exposed_by }),
        }
    }

    /// Whether allocated regions can be shared with another process.
    pub fn allocates_shared(&self) -> bool {
        self.allocation_backing() == MemoryBacking::Shared
    }

    /// Makes every region [allocated](Self::allocate_region) from now on [physically
    /// contiguous](Self::physical_address) and pinned: for a device without IOMMU translation. Returns
    /// false if the table already has regions that are not.
    pub fn make_allocations_contiguous(&self) -> bool {
        let places = self.lock_mappings();
        let may = places.mappings.is_empty() || self.allocates_contiguous();
        if may {
            self.table.is_in_rows.store(true, Ordering::Relaxed);
        }
        may
    }

    /// Whether allocated regions are physically contiguous.
    pub fn allocates_contiguous(&self) -> bool {
        self.table.is_in_rows.load(Ordering::Relaxed)
    }

    /// Backing of allocated regions.
    fn allocation_backing(&self) -> MemoryBacking {
        if self.allocates_contiguous() { MemoryBacking::Contiguous } else { self.table.backing }
    }

    /// Physical address of a region, if it is contiguous and pinned.
    pub fn physical_address(&self, region: RegionId) -> Option<u64> {
        let places = self.lock_mappings();
        let mapping = places.mappings.get(slot_index(region) as usize);
        mapping.filter(|_| self.len_bytes(region) > 0)?.physical_address()
    }

    /// File that contains the whole region from its first byte on; `None` if the region is private.
    pub fn descriptor(&self, region: RegionId) -> Option<OwnedFd> {
        let places = self.lock_mappings();
        let mapping = places.mappings.get(slot_index(region) as usize);
        let mapping = mapping.filter(|_| self.len_bytes(region) > 0)?;
        mapping.descriptor()?.try_clone_to_owned().ok()
    }

    /// Adds a mapping for the lifetime of the table, and returns a segment of all of it, or of as much as
    /// a segment can cover.
    pub fn add_mapping(&self, mapping: MemoryMapping) -> Result<Segment, RegionTableFull> {
        let len_bytes = mapping.len_bytes() as u64;
        self.add_mapping_part(&mut self.lock_mappings(), mapping, len_bytes)
    }

    /// Assigns a new place to a mapping, with a region of its first bytes.
    fn add_mapping_part(
        &self,
        places: &mut MappingTable,
        mapping: MemoryMapping,
        len_bytes: u64,
    ) -> Result<Segment, RegionTableFull> {
        let full = RegionTableFull { regions_max: self.table.slots.len() };
        let place = places.mappings.len();
        let slot = self.table.slots.get(place).ok_or(full)?;
        if len_bytes >> LEN_BITS != 0 {
            return Err(full);
        }
        let region = RegionId(u32::try_from(place).map_err(|_| full)?);
        slot.base.store(mapping.base_address().as_ptr(), Ordering::Relaxed);
        slot.publish_region(0, len_bytes);
        places.mappings.push(mapping);
        Ok(whole_region_segment(region, len_bytes))
    }

    fn lock_mappings(&self) -> MutexGuard<'_, MappingTable> {
        self.table.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is a handle to the same table.
    pub fn is_same_table(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.table, &other.table)
    }

    /// Maximum number of regions.
    pub fn regions_max(&self) -> usize {
        self.table.slots.len()
    }

    /// Length of a region; zero if it does not exist.
    #[inline]
    pub fn len_bytes(&self, region: RegionId) -> u64 {
        self.table.slots.get(slot_index(region) as usize).map_or(0, |slot| slot.region_len(region))
    }

    /// Whether `segment` is inside a region.
    #[inline]
    pub fn contains(&self, segment: Segment) -> bool {
        is_inside(segment, self.len_bytes(segment.region))
    }

    /// Address of a segment, for system calls. Valid while a handle to this table exists; no reference to
    /// this memory may be formed.
    #[inline]
    pub fn host_address(&self, segment: Segment) -> Result<NonNull<u8>, InvalidSegment> {
        let refuse = InvalidSegment(segment);
        let slot = self.table.slots.get(slot_index(segment.region) as usize).ok_or(refuse)?;
        if !is_inside(segment, slot.region_len(segment.region)) {
            return Err(refuse);
        }
        let base = NonNull::new(slot.base.load(Ordering::Relaxed)).ok_or(refuse)?;
        let offset = usize::try_from(segment.offset).map_err(|_| refuse)?;
        // SAFETY: `offset` plus the segment's length is at most the length of the region, as just
        // checked, and every mapping of the place that `base` may belong to has at least that length and
        // lives as long as the table.
        Ok(unsafe { base.add(offset) })
    }

    /// Word in the first four bytes of `segment`, which must be aligned to four.
    fn shared_word(&self, segment: Segment) -> Result<&AtomicU32, InvalidSegment> {
        let word = segment.slice(0, 4).ok_or(InvalidSegment(segment))?;
        let address = self.host_address(word)?.cast::<u32>();
        if !address.is_aligned() {
            return Err(InvalidSegment(segment));
        }
        // SAFETY: aligned as just checked, inside a region that lives as long as `self`, and an atomic
        // may be shared with all other atomic accesses to the word.
        Ok(unsafe { AtomicU32::from_ptr(address.as_ptr()) })
    }

    /// Copies bytes from one segment to another of the same length; they may overlap.
    #[inline]
    pub fn copy_segment(&self, from: Segment, to: Segment) -> Result<(), InvalidSegment> {
        if from.len_bytes != to.len_bytes {
            return Err(InvalidSegment(to));
        }
        let (source, target) = (self.host_address(from)?, self.host_address(to)?);
        // SAFETY: both ranges were resolved against their regions. Bytes have no invalid values, no
        // reference into a region exists, and `copy` permits overlap.
        unsafe { source.copy_to(target, from.len_bytes as usize) };
        Ok(())
    }

    /// Whether two segments of the same length have equal contents.
    pub fn segments_equal(&self, left: Segment, right: Segment) -> Result<bool, InvalidSegment> {
        if left.len_bytes != right.len_bytes {
            return Err(InvalidSegment(right));
        }
        let mut chunks = ([0_u8; 512], [0_u8; 512]);
        let mut done = 0;
        while done < left.len_bytes {
            let count = (left.len_bytes - done).min(512);
            let part = |segment: Segment| segment.slice(done, count).ok_or(InvalidSegment(segment));
            let (mine, yours) = (&mut chunks.0[..count as usize], &mut chunks.1[..count as usize]);
            self.load(part(left)?, mine)?;
            self.load(part(right)?, yours)?;
            if mine != yours {
                return Ok(false);
            }
            done += count;
        }
        Ok(true)
    }
}

impl Memory for RegionTable {
    #[inline]
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        let Ok(source) = self.host_address(segment) else {
            return self.load_kernel_buffer(segment, into);
        };
        assert_eq!(into.len(), segment.len_bytes as usize, "the two lengths are the caller's");
        // SAFETY: the source range was resolved, the target is a slice of that length, and the two cannot
        // overlap because no reference into a region exists.
        unsafe { source.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    #[inline]
    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        let Ok(target) = self.host_address(segment) else {
            return self.store_kernel_buffer(segment, from);
        };
        assert_eq!(from.len(), segment.len_bytes as usize, "the two lengths are the caller's");
        // SAFETY: as in `load`, in the opposite direction.
        unsafe { target.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        let target = self.host_address(segment)?;
        // SAFETY: the range was resolved; any byte is a valid byte.
        unsafe { target.as_ptr().write_bytes(byte, segment.len_bytes as usize) };
        Ok(())
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        Ok(u32::from_le(self.shared_word(segment)?.load(Ordering::Acquire)))
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        self.shared_word(segment)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }
}

impl RegionSlot {
    /// Publishes a region in the slot; a length of zero removes it.
    fn publish_region(&self, generation: u32, len_bytes: u64) {
        // Pairs with the acquire load in `region_len`: a reader that sees the length sees the base.
        self.word.store(u64::from(generation) << LEN_BITS | len_bytes, Ordering::Release);
    }

    /// Length of the region with this number; zero if it is not, or no longer, the one in this slot.
    #[inline]
    fn region_len(&self, region: RegionId) -> u64 {
        let word = self.word.load(Ordering::Acquire);
        let is_current = word >> LEN_BITS == u64::from(region.0 >> SLOT_BITS);
        if is_current { word & ((1 << LEN_BITS) - 1) } else { 0 }
    }
}

/// Place of a region in its table, which successive regions share.
#[inline]
pub(crate) const fn slot_index(region: RegionId) -> u32 {
    region.0 & ((1 << SLOT_BITS) - 1)
}

/// Segment of a whole region, or of as much as a segment can cover.
fn whole_region_segment(region: RegionId, len_bytes: u64) -> Segment {
    Segment { region, offset: 0, len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX) }
}

#[inline]
fn is_inside(segment: Segment, region_len_bytes: u64) -> bool {
    let end = segment.offset.checked_add(u64::from(segment.len_bytes));
    end.is_some_and(|end| end <= region_len_bytes)
}

impl fmt::Display for RegionTableFull {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "add a memory region: the table was made for {}", self.regions_max)
    }
}

impl std::error::Error for RegionTableFull {}

#[cfg(test)]
mod tests {
    use tenmil_base::{InvalidSegment, Memory, RegionId, Segment};

    use super::RegionTable;
    use crate::{MemoryBacking, MemoryMapping};

    fn regions() -> (RegionTable, Segment) {
        let regions = RegionTable::new(2);
        let whole =
            regions.add_mapping(MemoryMapping::new(8192, MemoryBacking::Private).unwrap()).unwrap();
        (regions, whole)
    }

    #[test]
    fn stored_bytes_are_loaded_back() {
        let (regions, whole) = regions();
        let part = whole.slice(4090, 12).unwrap();
        regions.store(part, b"twelve bytes").unwrap();
        let mut back = [0; 12];
        regions.load(part, &mut back).unwrap();
        assert_eq!(&back, b"twelve bytes");

        let elsewhere = whole.slice(100, 12).unwrap();
        assert!(!regions.segments_equal(part, elsewhere).unwrap());
        regions.copy_segment(part, elsewhere).unwrap();
        assert!(regions.segments_equal(part, elsewhere).unwrap());
        regions.fill(elsewhere.slice(0, 6).unwrap(), b'x').unwrap();
        regions.load(elsewhere, &mut back).unwrap();
        assert_eq!(&back, b"xxxxxx bytes");
    }

    #[test]
    fn shared_word_is_four_aligned_little_endian_bytes() {
        let (regions, whole) = regions();
        regions.store_u32(whole.slice(8, 4).unwrap(), 0x0403_0201).unwrap();
        let mut bytes = [0; 4];
        regions.load(whole.slice(8, 4).unwrap(), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert_eq!(regions.load_u32(whole.slice(8, 8).unwrap()), Ok(0x0403_0201));
        for refused in [whole.slice(9, 4), whole.slice(10, 4), whole.slice(8, 3)] {
            assert!(regions.load_u32(refused.unwrap()).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn segment_outside_every_region_is_rejected() {
        let (regions, whole) = regions();
        let at =
            |region, offset, len_bytes| Segment { region: RegionId(region), offset, len_bytes };
        for stray in [
            at(0, 8192, 1),
            at(0, 8000, 193),
            at(0, u64::MAX, 2),
            at(1, 0, 1),
            at(2, 0, 1),
            at(u32::MAX, 0, 0),
        ] {
            assert_eq!(regions.fill(stray, 1), Err(InvalidSegment(stray)), "{stray:?}");
        }
        assert!(regions.contains(whole));
        assert!(regions.contains(at(0, 8192, 0)), "nothing at the very end");
    }

    #[test]
    fn full_table_error_names_its_capacity() {
        let (regions, _) = regions();
        let mapping = || MemoryMapping::new(4096, MemoryBacking::Private).unwrap();
        regions.add_mapping(mapping()).unwrap();
        assert_eq!(
            regions.add_mapping(mapping()).unwrap_err().to_string(),
            "add a memory region: the table was made for 2"
        );
    }
}
