//! The table of regions: where a segment becomes an address, and the only place where it does.
//!
//! ```text
//!   region number    | generation : 20 | place : 12 |
//! ```
//!
//! A place in the table has a mapping, and in a table that is full a longer one if need be. A region
//! that goes gives the pages back to the kernel and leaves its place, still mapped, to a region that
//! comes later and fits; that one has the next generation, so the old number is refused. What this
//! rests on:
//!
//! - An address is never resolved to memory that is not mapped, because nothing is unmapped, and a
//!   place's mappings only become longer: where an old length meets a new base, it fits there.
//! - Who has resolved a segment before its region went may still move bytes there. That is a mistake
//!   of whoever let the region go too early, and harms bytes, not memory safety. So a [`Region`] is
//!   kept by whoever hands its memory out, until everything that works on it has ended.
//! - Who lets a device reach regions is asked to [`Withdraw`] each that goes. The place of one that
//!   cannot be taken from its device is used no more.

mod adopted;
mod lent;
mod region;
mod withdraw;

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use base::{Memory, NoSuchMemory, RegionId, Segment};

pub use self::adopted::{Adopted, FilePart, NotAdopted};
use self::lent::Lent;
pub use self::lent::{Lender, LentPart};
pub use self::region::{NoRegion, Region};
use self::withdraw::ExposedBy;
pub use self::withdraw::Withdraw;
use crate::mapping::{Backing, Mapping};

/// A table of regions, shared by everyone who moves bytes. Cheap to clone.
///
/// Looking a region up needs no lock and no count: two loads and a comparison.
#[derive(Clone, Debug)]
pub struct Regions {
    table: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    slots: Box<[Slot]>,
    /// By place: what has no address here.
    lent: Box<[OnceLock<Lent>]>,
    /// The lock is for adding and for letting go.
    places: Mutex<Places>,
    /// What regions are made of that come and go, unless these have to lie in rows.
    backing: Backing,
    is_in_rows: AtomicBool,
    /// Who lets devices reach them.
    exposed_by: ExposedBy,
}

/// Which memory each place has.
#[derive(Debug, Default)]
struct Places {
    /// By place.
    mappings: Vec<Mapping>,
    /// Those that places had before they needed longer ones. Held for as long as the table lives, as
    /// all are.
    outgrown: Vec<Mapping>,
    /// Places whose region has gone.
    empty: Vec<u32>,
}

/// ```text
///   0       8                                16
///   | base  | generation : 20 | length : 44 |
/// ```
///
/// The second word is stored last and loaded first. A length of zero means that there is no region.
#[derive(Debug)]
struct Slot {
    base: AtomicPtr<u8>,
    word: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 16);

/// How much of a region's number is its place.
const PLACE_BITS: u32 = 12;
/// Places in the largest table.
const PLACES_MAX: usize = 1 << PLACE_BITS;
const GENERATION_MAX: u32 = (1 << (32 - PLACE_BITS)) - 1;
/// How much of the word of a slot is the length: 16 TiB.
const LEN_BITS: u32 = 44;

const _: () = assert!(LEN_BITS + (32 - PLACE_BITS) == 64, "a generation fits above the length");

/// The table was made for fewer regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull {
    /// For how many it was made.
    pub regions_max: usize,
}

impl Regions {
    /// An empty table for at most `regions_max` regions at a time, of which there may be 4096.
    pub fn new(regions_max: usize) -> Self {
        Self::of(regions_max, Backing::Private)
    }

    /// The same, of which every region that is allocated can be shown to another process: by its
    /// [`descriptor`](Self::descriptor).
    pub fn shared(regions_max: usize) -> Self {
        Self::of(regions_max, Backing::Shared)
    }

    fn of(regions_max: usize, backing: Backing) -> Self {
        let slot = || Slot { base: AtomicPtr::default(), word: AtomicU64::new(0) };
        let places_max = regions_max.min(PLACES_MAX);
        let slots = (0..places_max).map(|_| slot()).collect();
        let lent = (0..places_max).map(|_| OnceLock::new()).collect();
        let (places, exposed_by) = (Mutex::default(), ExposedBy::default());
        let is_in_rows = AtomicBool::new(false);
        Self { table: Arc::new(Table { slots, lent, places, backing, is_in_rows, exposed_by }) }
    }

    /// Whether regions that are allocated can be shown to another process.
    pub fn is_shared(&self) -> bool {
        self.backing() == Backing::Shared
    }

    /// From now on every region that is [allocated](Self::allocate) lies [in a row](Self::row) in the
    /// machine and stays there: for a device that no IOMMU translates for. False if there are regions
    /// already, which do not.
    pub fn lay_rows(&self) -> bool {
        let places = self.places();
        let may = places.mappings.is_empty() || self.is_in_rows();
        if may {
            self.table.is_in_rows.store(true, Ordering::Relaxed);
        }
        may
    }

    /// Whether regions that are allocated lie in a row in the machine.
    pub fn is_in_rows(&self) -> bool {
        self.table.is_in_rows.load(Ordering::Relaxed)
    }

    /// What regions are made of that are allocated.
    fn backing(&self) -> Backing {
        if self.is_in_rows() { Backing::Row } else { self.table.backing }
    }

    /// Where a region begins in the machine, if all of it lies in a row there and does not move.
    pub fn row(&self, region: RegionId) -> Option<u64> {
        let places = self.places();
        let mapping = places.mappings.get(place_of(region) as usize);
        mapping.filter(|_| self.len_bytes(region) > 0)?.row()
    }

    /// The file that a region is all of, from its first byte on; `None` if it is private.
    pub fn descriptor(&self, region: RegionId) -> Option<OwnedFd> {
        let places = self.places();
        let mapping = places.mappings.get(place_of(region) as usize);
        let mapping = mapping.filter(|_| self.len_bytes(region) > 0)?;
        mapping.descriptor()?.try_clone_to_owned().ok()
    }

    /// Adds a mapping, for as long as the table lives, and returns all of it as a segment, or as
    /// much as a segment can name.
    pub fn add(&self, mapping: Mapping) -> Result<Segment, TableFull> {
        let len_bytes = mapping.len_bytes() as u64;
        self.add_part(&mut self.places(), mapping, len_bytes)
    }

    /// Gives a mapping a new place, with a region of its first bytes.
    fn add_part(
        &self,
        places: &mut Places,
        mapping: Mapping,
        len_bytes: u64,
    ) -> Result<Segment, TableFull> {
        let full = TableFull { regions_max: self.table.slots.len() };
        let place = places.mappings.len();
        let slot = self.table.slots.get(place).ok_or(full)?;
        if len_bytes >> LEN_BITS != 0 {
            return Err(full);
        }
        let region = RegionId(u32::try_from(place).map_err(|_| full)?);
        slot.base.store(mapping.base().as_ptr(), Ordering::Relaxed);
        slot.begin(0, len_bytes);
        places.mappings.push(mapping);
        Ok(whole(region, len_bytes))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.table.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is a handle to the same table.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.table, &other.table)
    }

    /// For how many regions the table was made.
    pub fn regions_max(&self) -> usize {
        self.table.slots.len()
    }

    /// How long a region is. Zero if there is none of that number.
    #[inline]
    pub fn len_bytes(&self, region: RegionId) -> u64 {
        self.table.slots.get(place_of(region) as usize).map_or(0, |slot| slot.len_of(region))
    }

    /// Whether `segment` lies in a region.
    #[inline]
    pub fn contains(&self, segment: Segment) -> bool {
        lies_inside(segment, self.len_bytes(segment.region))
    }

    /// The address of a segment, for system calls that take one. Valid while a handle to this table
    /// exists; nobody may form a reference to what lies there.
    #[inline]
    pub fn address(&self, segment: Segment) -> Result<NonNull<u8>, NoSuchMemory> {
        let refuse = NoSuchMemory(segment);
        let slot = self.table.slots.get(place_of(segment.region) as usize).ok_or(refuse)?;
        if !lies_inside(segment, slot.len_of(segment.region)) {
            return Err(refuse);
        }
        let base = NonNull::new(slot.base.load(Ordering::Relaxed)).ok_or(refuse)?;
        let offset = usize::try_from(segment.offset).map_err(|_| refuse)?;
        // SAFETY: `offset` plus the segment's length is at most the length of the region, as just
        // checked, and whatever mapping of the place `base` is of has at least that length and is
        // alive as long as the table.
        Ok(unsafe { base.add(offset) })
    }

    /// The word in the first four bytes of `segment`, which must be aligned to four.
    fn shared_word(&self, segment: Segment) -> Result<&AtomicU32, NoSuchMemory> {
        let word = segment.slice(0, 4).ok_or(NoSuchMemory(segment))?;
        let address = self.address(word)?.cast::<u32>();
        if !address.is_aligned() {
            return Err(NoSuchMemory(segment));
        }
        // SAFETY: aligned as just checked, inside a region that lives as long as `self`, and an
        // atomic may be shared with whoever else accesses the word atomically.
        Ok(unsafe { AtomicU32::from_ptr(address.as_ptr()) })
    }

    /// Copies bytes from one segment to another of the same length; they may overlap.
    #[inline]
    pub fn copy(&self, from: Segment, to: Segment) -> Result<(), NoSuchMemory> {
        if from.len_bytes != to.len_bytes {
            return Err(NoSuchMemory(to));
        }
        let (source, target) = (self.address(from)?, self.address(to)?);
        // SAFETY: both ranges were resolved against their regions. Bytes have no invalid values, no
        // reference exists into a region, and `copy` allows overlap.
        unsafe { source.copy_to(target, from.len_bytes as usize) };
        Ok(())
    }

    /// Whether two segments of the same length hold the same bytes.
    pub fn equal(&self, left: Segment, right: Segment) -> Result<bool, NoSuchMemory> {
        if left.len_bytes != right.len_bytes {
            return Err(NoSuchMemory(right));
        }
        let mut chunks = ([0_u8; 512], [0_u8; 512]);
        let mut done = 0;
        while done < left.len_bytes {
            let count = (left.len_bytes - done).min(512);
            let part = |segment: Segment| segment.slice(done, count).ok_or(NoSuchMemory(segment));
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

impl Memory for Regions {
    #[inline]
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        let Ok(source) = self.address(segment) else { return self.load_lent(segment, into) };
        assert_eq!(into.len(), segment.len_bytes as usize, "the two lengths are the caller's");
        // SAFETY: the source range was resolved, the target is a slice of that length, and the two
        // cannot overlap because no reference into a region exists.
        unsafe { source.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    #[inline]
    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        let Ok(target) = self.address(segment) else { return self.store_lent(segment, from) };
        assert_eq!(from.len(), segment.len_bytes as usize, "the two lengths are the caller's");
        // SAFETY: as in `load`, the other way round.
        unsafe { target.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory> {
        let target = self.address(segment)?;
        // SAFETY: the range was resolved; any byte is a valid byte.
        unsafe { target.as_ptr().write_bytes(byte, segment.len_bytes as usize) };
        Ok(())
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, NoSuchMemory> {
        Ok(u32::from_le(self.shared_word(segment)?.load(Ordering::Acquire)))
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), NoSuchMemory> {
        self.shared_word(segment)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }
}

impl Slot {
    /// There is a region from now on.
    fn begin(&self, generation: u32, len_bytes: u64) {
        // Pairs with the acquire in `len_of`: whoever sees the length sees the base.
        self.word.store(u64::from(generation) << LEN_BITS | len_bytes, Ordering::Release);
    }

    /// How long the region of this number is; zero if it is not, or no more, the one in this slot.
    #[inline]
    fn len_of(&self, region: RegionId) -> u64 {
        let word = self.word.load(Ordering::Acquire);
        let is_current = word >> LEN_BITS == u64::from(region.0 >> PLACE_BITS);
        if is_current { word & ((1 << LEN_BITS) - 1) } else { 0 }
    }
}

/// The place of a region in its table, which regions that come and go share.
#[inline]
pub(crate) const fn place_of(region: RegionId) -> u32 {
    region.0 & ((1 << PLACE_BITS) - 1)
}

/// All of a region, or as much as a segment can name.
fn whole(region: RegionId, len_bytes: u64) -> Segment {
    Segment { region, offset: 0, len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX) }
}

#[inline]
fn lies_inside(segment: Segment, region_len_bytes: u64) -> bool {
    let end = segment.offset.checked_add(u64::from(segment.len_bytes));
    end.is_some_and(|end| end <= region_len_bytes)
}

impl fmt::Display for TableFull {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "add a memory region: the table was made for {}", self.regions_max)
    }
}

impl std::error::Error for TableFull {}

#[cfg(test)]
mod tests {
    use base::{Memory, NoSuchMemory, RegionId, Segment};

    use super::Regions;
    use crate::{Backing, Mapping};

    fn regions() -> (Regions, Segment) {
        let regions = Regions::new(2);
        let whole = regions.add(Mapping::new(8192, Backing::Private).unwrap()).unwrap();
        (regions, whole)
    }

    #[test]
    fn bytes_come_back_as_they_were_stored() {
        let (regions, whole) = regions();
        let part = whole.slice(4090, 12).unwrap();
        regions.store(part, b"twelve bytes").unwrap();
        let mut back = [0; 12];
        regions.load(part, &mut back).unwrap();
        assert_eq!(&back, b"twelve bytes");

        let elsewhere = whole.slice(100, 12).unwrap();
        assert!(!regions.equal(part, elsewhere).unwrap());
        regions.copy(part, elsewhere).unwrap();
        assert!(regions.equal(part, elsewhere).unwrap());
        regions.fill(elsewhere.slice(0, 6).unwrap(), b'x').unwrap();
        regions.load(elsewhere, &mut back).unwrap();
        assert_eq!(&back, b"xxxxxx bytes");
    }

    #[test]
    fn a_shared_word_is_four_aligned_little_endian_bytes() {
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
    fn what_lies_outside_every_region_is_refused() {
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
            assert_eq!(regions.fill(stray, 1), Err(NoSuchMemory(stray)), "{stray:?}");
        }
        assert!(regions.contains(whole));
        assert!(regions.contains(at(0, 8192, 0)), "nothing at the very end");
    }

    #[test]
    fn a_full_table_says_for_how_many_it_was_made() {
        let (regions, _) = regions();
        let mapping = || Mapping::new(4096, Backing::Private).unwrap();
        regions.add(mapping()).unwrap();
        assert_eq!(
            regions.add(mapping()).unwrap_err().to_string(),
            "add a memory region: the table was made for 2"
        );
    }
}
