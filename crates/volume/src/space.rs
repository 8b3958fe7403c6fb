//! Which blocks are used, how often, and which may be given out.
//!
//! The space map, a tree of runs, has the count of every block as it was when the last commit
//! began; what has been added since is in `deltas`, and goes into the tree with the next commit. So
//! to change the tree never asks for a change of the tree.
//!
//! A block may be given out if neither the tree, nor a delta, nor one of four sets has it: `pool`,
//! blocks set aside for metadata; `pending`, units to which data are on their way; the quarantine,
//! blocks that some transaction has freed, but the last durable superblock still refers to, or a
//! transfer that began before may still touch; and `spoilt`, blocks to which a write has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::books::{Books, Stop};
use crate::cost::Leaves;
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{Kind, Pointer, Record, SLOTS, Superblock, UNIT_SHIFT_MAX};
use crate::ranges::{Deltas, Place, RangeSet};
use crate::tree::Tree;

/// Which blocks are used.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) deltas: Deltas,
    pub(crate) pool: RangeSet,
    pub(crate) pending: RangeSet,
    /// By the transaction that freed them: blocks of data, which transfers may still touch.
    quarantine: BTreeMap<u64, RangeSet>,
    /// By the transaction that freed them: blocks of metadata, which no transfer ever touches.
    freed_pages: BTreeMap<u64, RangeSet>,
    /// Blocks of metadata to which nobody refers any more.
    pub(crate) dropped: BTreeSet<u64>,
    /// Blocks that someone has ceased to refer to, by the transaction in which that was.
    lowered: BTreeMap<u64, RangeSet>,
    /// Blocks to which a write has failed, which may still come to pass. Nobody is given them until
    /// the store is opened anew, whatever they are mapped to now. Superblocks with room on both sides,
    /// too: nobody is ever given those.
    spoilt: RangeSet,
    /// Blocks of data with checksums that nobody refers to any more, though perhaps to others of their
    /// unit, by the transaction in which that came about.
    vacated: BTreeMap<u64, RangeSet>,
    /// Blocks given out that the tree does not know of yet.
    pub(crate) fresh: u64,
    /// The level of the root of the tree, as far as that is known.
    height: u8,
    /// Where to look for a block for metadata, and for a unit of each size for data.
    cursors: [Search; 2 + UNIT_SHIFT_MAX as usize],
    /// Blocks kept for commits and deletions.
    pub(crate) kept: u64,
}

/// Where to look next, and how many blocks have not been looked at since something was found. None
/// are left once all have been, until something is given back.
#[derive(Clone, Copy, Debug)]
struct Search {
    at: u64,
    left: u64,
}

/// What blocks are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Metadata,
    Data,
}

/// Blocks in the pool before a change begins, if there is room.
pub(crate) const POOL_BLOCKS: u64 = 64;
/// Blocks that the pool must have for any change.
pub(crate) const CHANGE_BLOCKS: u64 = 48;
/// Blocks that the pool must have for a change of a map and of checksums.
pub(crate) const CHECKSUM_BLOCKS: u64 = 80;
/// Blocks that the pool must have to change one count.
pub(crate) const COUNT_BLOCKS: u64 = 28;
/// The level of the root of a tree of counts before it has been looked at: enough for any store.
const HEIGHT: u8 = 5;
/// Blocks kept for commits and deletions in the largest store.
const KEPT_MAX: u64 = 16_384;

/// Blocks that are kept of so many.
fn kept_of(blocks: u64) -> u64 {
    (blocks / 64).clamp(2 * POOL_BLOCKS, KEPT_MAX)
}

/// The tree of counts.
pub(crate) const SPACE: Tree = Tree::of_store(Kind::Space);

impl Space {
    pub(crate) fn new(superblock: &Superblock) -> Self {
        let room = superblock.room();
        let total = room.end - room.start;
        // Metadata keep to the front, so that units of data find whole runs behind them.
        let search = |at| Search { at, left: total };
        let mut spoilt = RangeSet::default();
        spoilt.insert(room.slots);
        Self {
            deltas: Deltas::default(),
            pool: RangeSet::default(),
            pending: RangeSet::default(),
            quarantine: BTreeMap::new(),
            freed_pages: BTreeMap::new(),
            dropped: BTreeSet::new(),
            lowered: BTreeMap::new(),
            spoilt,
            vacated: BTreeMap::new(),
            fresh: 0,
            height: HEIGHT,
            cursors: std::array::from_fn(|index| {
                search(if index == 0 { room.start } else { room.start + total / 64 })
            }),
            kept: kept_of(total),
        }
    }

    /// Blocks to which writes may still come to pass, as another one knows, are not given out here either.
    pub(crate) fn inherit(&mut self, other: &Self) {
        other.spoilt.iter().for_each(|range| self.spoilt.insert(range));
    }

    /// There is more room: what was the end of the first device is given out once this transaction is
    /// durable.
    pub(crate) fn grow(&mut self, generation: u64, end: u64, superblock: &Superblock) {
        let room = superblock.room();
        self.kept = self.kept.max(kept_of(room.end - room.start));
        let freed = (end - SLOTS..end).filter(|block| room.contains(block));
        freed.for_each(|block| self.quarantine(generation, block..block + 1));
        self.spoilt.insert(room.slots);
        self.look_again();
    }

    /// Blocks that may be given out at once.
    pub(crate) fn free(&self, superblock: &Superblock) -> u64 {
        let room = superblock.room();
        let quarantined = self.quarantine.values().chain(self.freed_pages.values());
        let quarantined: u64 = quarantined.map(RangeSet::blocks).sum();
        let taken = superblock.used + self.fresh + self.pool.blocks() + self.pending.blocks();
        // Those that are mapped count twice: less is promised than there is.
        (room.end - room.start).saturating_sub(taken + quarantined + self.spoilt.blocks())
    }

    /// Whether a commit would bring blocks that cannot be given out now.
    pub(crate) fn awaits_commit(&self) -> bool {
        let is_freed = !self.quarantine.is_empty() || !self.freed_pages.is_empty();
        is_freed || self.deltas.iter().any(|(_, delta)| delta <= 0)
    }

    /// Keeps freed blocks from being given out for as long as `generation` is not durable.
    pub(crate) fn quarantine(&mut self, generation: u64, range: Range<u64>) {
        let is_page = self.dropped.remove(&range.start);
        let freed = if is_page { &mut self.freed_pages } else { &mut self.quarantine };
        freed.entry(generation).or_default().insert(range);
    }

    /// Lets blocks go that were freed by transactions up to the `durable` one: those of data only up
    /// to `past`, before which no transfer began that is under way, and those of metadata only up to
    /// `held`, which somebody reads.
    pub(crate) fn release(&mut self, durable: u64, past: u64, held: u64) {
        let before = self.quarantine.len() + self.freed_pages.len();
        self.quarantine.retain(|freed, _| *freed > past);
        self.freed_pages.retain(|freed, _| *freed > durable.min(held));
        self.gather(durable);
        if self.quarantine.len() + self.freed_pages.len() < before {
            self.look_again();
        }
    }

    /// Makes one of the sets of pages that are kept for somebody only: whoever looks for room looks at
    /// each.
    fn gather(&mut self, durable: u64) {
        let mut kept = self.freed_pages.extract_if(..=durable, |_, _| true).map(|(_, set)| set);
        let Some(mut all) = kept.next() else { return };
        for mut other in kept {
            if other.blocks() > all.blocks() {
                std::mem::swap(&mut all, &mut other);
            }
            other.iter().for_each(|range| all.insert(range));
        }
        self.freed_pages.insert(durable, all);
    }

    /// Blocks of metadata that are kept for somebody who reads an older state.
    pub(crate) fn kept_for_readers(&self, durable: u64) -> u64 {
        self.freed_pages.range(..=durable).map(|(_, set)| set.blocks()).sum()
    }

    /// Gives back a unit that was set aside.
    pub(crate) fn give_back(&mut self, unit: Range<u64>) {
        self.pending.remove(unit);
        self.look_again();
    }

    /// Notes that a write to blocks has failed.
    pub(crate) fn spoil(&mut self, range: Range<u64>) {
        self.spoilt.insert(range);
    }

    /// Whether a write to one of these blocks has failed.
    pub(crate) fn is_spoilt(&self, range: &Range<u64>) -> bool {
        match self.spoilt.look(range.start) {
            Place::Taken(_) => true,
            Place::Free(next) => next < range.end,
        }
    }

    /// Something may be found where nothing was.
    fn look_again(&mut self) {
        self.cursors.iter_mut().for_each(|search| search.left = u64::MAX);
    }

    pub(crate) const fn height(&self) -> u8 {
        self.height
    }

    /// Notes that someone has ceased to refer to blocks. Until that is durable, they may be his again
    /// after a loss of power, so nobody else may write to them.
    pub(crate) fn lower(&mut self, generation: u64, range: Range<u64>) {
        self.lowered.entry(generation).or_default().insert(range);
    }

    /// Whether someone has ceased to refer to a block, and it is not durable that he has.
    pub(crate) fn is_lowered(&self, block: u64) -> bool {
        self.lowered.values().any(|set| matches!(set.look(block), Place::Taken(_)))
    }

    /// Whether that is so of any.
    pub(crate) fn has_lowered(&self) -> bool {
        !self.lowered.is_empty()
    }

    /// Notes that a map does not have blocks any more. Until that is durable, they may be in it again
    /// after a loss of power, with the checksums that they have; and reads of them may be under way.
    pub(crate) fn vacate(&mut self, generation: u64, range: Range<u64>) {
        self.vacated.entry(generation).or_default().insert(range);
    }

    /// Whether that is so of a block.
    pub(crate) fn is_vacated(&self, block: u64) -> bool {
        self.vacated.values().any(|set| matches!(set.look(block), Place::Taken(_)))
    }

    /// Ends that for what was left in transactions up to this one.
    pub(crate) fn settle(&mut self, generation: u64) {
        self.vacated.retain(|since, _| *since > generation);
        self.lowered.retain(|since, _| *since > generation);
    }

    /// What memory alone knows about a block.
    fn look(&self, at: u64) -> Place {
        let sets = [&self.pool, &self.pending, &self.spoilt];
        let freed = self.quarantine.values().chain(self.freed_pages.values());
        let sets = sets.into_iter().chain(freed);
        let places = sets.map(|set| set.look(at)).chain([self.deltas.look(at)]);
        places.fold(Place::Free(u64::MAX), |so_far, place| match (so_far, place) {
            (Place::Taken(a), Place::Taken(b)) => Place::Taken(a.max(b)),
            (Place::Taken(end), _) | (_, Place::Taken(end)) => Place::Taken(end),
            (Place::Free(a), Place::Free(b)) => Place::Free(a.min(b)),
        })
    }
}

impl Books {
    /// How often a block is referred to.
    pub(crate) fn count(&mut self, block: u64) -> Result<u64, Stop> {
        Ok(self.count_run(block)?.1)
    }

    /// How often a block is referred to, and how far that is true of those behind it.
    pub(crate) fn count_run(&mut self, block: u64) -> Result<(u64, u64), Stop> {
        let run = self.next_run(&SPACE, self.superblock.space, block)?;
        let (end, count) = match run {
            Some(run) if run.key <= block => (run.key + run.extra, run.value),
            Some(run) => (run.key, 0),
            None => (u64::MAX, 0),
        };
        let until = match self.space.deltas.look(block) {
            Place::Taken(end) | Place::Free(end) => end,
        };
        let sum = count.checked_add_signed(self.space.deltas.at(block));
        Ok((end.min(until), sum.ok_or_else(|| miscounted(block))?))
    }

    /// Fills the pool as far as there is room; a change needs more of it than a step of a commit.
    /// What is kept is left alone as far as `leaves` says.
    pub(crate) fn fill_pool(&mut self, needed: u64, leaves: Leaves) -> Result<(), Stop> {
        if self.is_low(leaves) {
            return Err(Stop::Full);
        }
        let wanted = needed.max(POOL_BLOCKS);
        while self.space.pool.blocks() < wanted {
            let missing = wanted - self.space.pool.blocks();
            let is_enough = self.space.pool.blocks() >= needed;
            if self.space.free(&self.superblock) == 0 {
                return if is_enough { Ok(()) } else { Err(Stop::Full) };
            }
            match self.find(Purpose::Metadata, 1, missing) {
                Ok(found) => self.space.pool.insert(found),
                Err(Stop::Full) if is_enough => return Ok(()),
                Err(stop) => return Err(stop),
            }
        }
        Ok(())
    }

    /// Blocks that metadata may still be put in before the next commit.
    pub(crate) fn room(&self) -> u64 {
        self.space.free(&self.superblock) + self.space.pool.blocks()
    }

    /// Sets units aside for data: up to `units` that lie together, each of `unit` blocks, for a
    /// volume that is owed so many blocks.
    pub(crate) fn take_units(
        &mut self,
        unit: u64,
        units: u64,
        owed: u64,
    ) -> Result<Range<u64>, Stop> {
        let found = self.find_units(unit, units, owed)?;
        self.space.pending.insert(found.clone());
        Ok(found)
    }

    /// The same, for whoever refers to them at once.
    pub(crate) fn find_units(
        &mut self,
        unit: u64,
        units: u64,
        owed: u64,
    ) -> Result<Range<u64>, Stop> {
        let free = self.space.free(&self.superblock) + owed;
        let room = free.saturating_sub(self.space.kept + self.reserve());
        if room < unit {
            return Err(Stop::Full);
        }
        self.find(Purpose::Data, unit, units.min(room / unit) * unit)
    }

    /// Keeps what high trees need in a small store.
    pub(crate) fn keep_more(&mut self) {
        let most = self.superblock.blocks * 4 / 3 / self.full as u64;
        self.space.kept = self.space.kept.max(most);
    }

    /// What is to be said to whoever found no room.
    pub(crate) fn no_space(&self) -> StoreError {
        let kept = self.space.kept + self.reserve();
        StoreError::NoSpace { free: self.space.free(&self.superblock), kept }
    }

    /// A free run of whole units, `blocks_max` at most. Stops where a page has to be read, and goes
    /// on from there.
    fn find(&mut self, purpose: Purpose, unit: u64, blocks_max: u64) -> Result<Range<u64>, Stop> {
        let room = self.superblock.room();
        let total = room.end - room.start;
        let cursor = match purpose {
            Purpose::Metadata => 0,
            Purpose::Data => 1 + unit.trailing_zeros() as usize,
        };
        loop {
            let Search { at, left } = self.space.cursors[cursor];
            if left == 0 {
                return Err(Stop::Full);
            }
            let left = left.min(total);
            if at >= room.end {
                self.space.cursors[cursor] = Search { at: room.start, left };
                continue;
            }
            let gap = self.place(at)?;
            let fits = match &gap {
                Place::Taken(_) => 0,
                Place::Free(end) => end.saturating_sub(at.next_multiple_of(unit)) / unit * unit,
            };
            let search = &mut self.space.cursors[cursor];
            if fits > 0 {
                let start = at.next_multiple_of(unit);
                let found = start..start + fits.min(blocks_max);
                *search = Search { at: found.end, left: total };
                return Ok(found);
            }
            let (Place::Taken(end) | Place::Free(end)) = gap;
            *search = Search { at: end, left: left.saturating_sub(end - at) };
        }
    }

    /// Whether a block in the room may be given out, and how far that is true of those behind it.
    fn place(&mut self, at: u64) -> Result<Place, Stop> {
        let Place::Free(next) = self.space.look(at) else { return Ok(self.space.look(at)) };
        let end = next.min(self.superblock.room().end);
        Ok(match self.next_run(&SPACE, self.superblock.space, at)? {
            Some(run) if run.key <= at => Place::Taken(run.key + run.extra),
            Some(run) => Place::Free(end.min(run.key)),
            None => Place::Free(end),
        })
    }

    /// Puts the first delta into the tree, or as much of it as one leaf and one count allow. False
    /// if there is none.
    pub(crate) fn apply_delta(&mut self) -> Result<bool, Stop> {
        let Some((range, delta)) = self.space.deltas.first() else { return Ok(false) };
        let run = self.next_run(&SPACE, self.superblock.space, range.start)?;
        let (count, end) = match run {
            Some(run) if run.key <= range.start => (run.value, run.key + run.extra),
            Some(run) => (0, run.key),
            None => (0, range.end),
        };
        let piece = range.start..end.min(range.end);
        let sum = count.checked_add_signed(delta).ok_or_else(|| miscounted(piece.start))?;
        let piece = if delta == 0 { piece } else { self.set_count(piece, sum)? };
        let blocks = piece.end - piece.start;
        match (count, sum) {
            (0, 1..) => self.superblock.used += blocks,
            (1.., 0) => self.superblock.used = self.superblock.used.saturating_sub(blocks),
            _ => {}
        }
        if sum == 0 {
            self.space.quarantine(self.generation, piece.clone());
        }
        // The change of the tree may itself have added to the counts of these blocks.
        self.space.deltas.settle(piece, delta);
        Ok(true)
    }

    /// Sets the count of a run, as far as one leaf goes, and returns how far that was.
    fn set_count(&mut self, piece: Range<u64>, count: u64) -> Result<Range<u64>, Stop> {
        self.attempt(|books| {
            let mut root: Pointer = books.superblock.space;
            let line = Record { key: piece.start, value: count, extra: 0 };
            let line = (count > 0).then_some(line);
            let (end, _) = books.splice(&SPACE, &mut root, piece.clone(), line)?;
            books.superblock.space = root;
            books.space.height = books.height(&SPACE, root)?;
            Ok(piece.start..end)
        })
    }
}

fn miscounted(address: u64) -> Damage {
    Damage { address, kind: None, owner: 0, flaw: Flaw::Count }
}

#[cfg(test)]
mod tests {
    use super::Space;
    use crate::format::Superblock;
    use crate::layout::Layout;
    use crate::ranges::Place;

    #[test]
    fn a_freed_page_waits_to_be_durable_and_freed_data_for_transfers_as_well() {
        let empty = Superblock { blocks: 1024, ..Superblock::decode(&[0; Superblock::BYTES]) };
        let mut space = Space::new(&empty);
        let (page, data) = (100, 200);
        space.dropped.insert(page);
        space.quarantine(5, page..page + 1);
        space.quarantine(5, data..data + 16);
        let is_kept = |space: &Space, at| matches!(space.look(at), Place::Taken(_));
        let free = space.free(&empty);
        for (durable, past, expected) in
            [(4, 4, [true, true]), (4, 9, [true, false]), (5, 4, [false, false])]
        {
            space.release(durable, past, u64::MAX);
            assert_eq!([page, data + 15].map(|at| is_kept(&space, at)), expected);
        }
        assert_eq!(space.free(&empty), free + 17);
        // What is data there in its next life is not taken for a page.
        space.quarantine(6, page..page + 1);
        space.release(6, 5, u64::MAX);
        assert!(is_kept(&space, page));
    }

    #[test]
    fn pages_that_somebody_reads_are_kept_in_one_set_until_he_lets_go() {
        let empty = Superblock { blocks: 1024, ..Superblock::decode(&[0; Superblock::BYTES]) };
        let mut space = Space::new(&empty);
        let is_kept = |space: &Space, at| matches!(space.look(at), Place::Taken(_));
        for generation in 5..=9 {
            let page = 100 + 2 * generation;
            space.dropped.insert(page);
            space.quarantine(generation, page..page + 1);
            space.release(generation, u64::MAX, 6);
        }
        // Those of 5 and 6 the state of 6 has not.
        let kept = [5, 6, 7, 8, 9].map(|generation| is_kept(&space, 100 + 2 * generation));
        assert_eq!(kept, [false, false, true, true, true]);
        assert_eq!((space.freed_pages.len(), space.kept_for_readers(9)), (1, 3));
        space.release(9, u64::MAX, u64::MAX);
        assert_eq!((space.freed_pages.len(), space.kept_for_readers(9)), (0, 0));
        assert!(!is_kept(&space, 118));
    }
}
