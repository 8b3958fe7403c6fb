//! Space map: used blocks with their reference counts, and the blocks that can be allocated.
//!
//! The space map, a tree of runs, contains the count of every block at the start of the last commit.
//! Later changes are in `deltas`, and are applied to the tree by the next commit. So a change of the tree
//! does not itself require a change of the tree.
//!
//! A block can be allocated if it is not in the tree, in a delta, or in one of four sets: `pool`, blocks
//! reserved for metadata; `pending`, clusters with data in flight to them; the quarantine, blocks that a
//! transaction has freed, but that the last durable superblock still refers to, or an earlier transfer
//! may still access; and `spoilt`, bad blocks, to which a write has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::commit_cost::ReserveToLeave;
use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{BlockKind, Pointer, Record, SLOTS, Superblock, UNIT_SHIFT_MAX};
use crate::metadata::{Metadata, TransactionStop};
use crate::ranges::{RangeLookup, RangeSet, RefcountDeltas};
use crate::tree::TreeDescriptor;

/// Space map.
#[derive(Debug)]
pub(crate) struct SpaceMap {
    pub(crate) deltas: RefcountDeltas,
    pub(crate) pool: RangeSet,
    pub(crate) pending: RangeSet,
    /// Freed data blocks, which transfers may still access, by transaction.
    quarantine: BTreeMap<u64, RangeSet>,
    /// Freed metadata blocks, which no transfer accesses, by transaction.
    freed_pages: BTreeMap<u64, RangeSet>,
    /// Metadata blocks without references.
    pub(crate) dropped: BTreeSet<u64>,
    /// Blocks that lost a reference, by transaction.
    lowered: BTreeMap<u64, RangeSet>,
    /// Bad blocks: those with a failed write, which may still reach the device later. They are not
    /// allocated until the pool is opened again, whatever they are mapped to now. Also superblocks in the
    /// middle of the data area, which are never allocated.
    spoilt: RangeSet,
    /// Unmapped data blocks with checksums, by transaction. Other blocks of their cluster may still be
    /// mapped.
    vacated: BTreeMap<u64, RangeSet>,
    /// Allocated blocks that are not in the tree yet.
    pub(crate) fresh: u64,
    /// Level of the root of the tree, as far as known.
    tree_height: u8,
    /// Search positions for a metadata block, and for a data cluster of each size.
    cursors: [AllocCursor; 2 + UNIT_SHIFT_MAX as usize],
    /// Reserve of blocks for commits and deletions.
    pub(crate) kept: u64,
}

/// Next search position, and number of blocks not searched since the last success. Zero once all have
/// been searched, until something is freed.
#[derive(Clone, Copy, Debug)]
struct AllocCursor {
    at: u64,
    left: u64,
}

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllocationKind {
    Metadata,
    Data,
}

/// Target size of the metadata reserve before a change, if space is free.
pub(crate) const POOL_BLOCKS: u64 = 64;
/// Minimum metadata reserve for any change.
pub(crate) const CHANGE_BLOCKS: u64 = 48;
/// Minimum metadata reserve for a change of a map and of checksums.
pub(crate) const CHECKSUM_BLOCKS: u64 = 80;
/// Minimum metadata reserve to change one count.
pub(crate) const COUNT_BLOCKS: u64 = 28;
/// Assumed level of the root of the count tree before it has been read: enough for any pool.
const HEIGHT: u8 = 5;
/// Reserve for commits and deletions in the largest pool.
const KEPT_MAX: u64 = 16_384;

/// Reserve for a pool with this number of blocks.
fn metadata_reserve_blocks(blocks: u64) -> u64 {
    (blocks / 64).clamp(2 * POOL_BLOCKS, KEPT_MAX)
}

/// Tree of reference counts.
pub(crate) const SPACE: TreeDescriptor = TreeDescriptor::pool_tree(BlockKind::SpaceMap);

impl SpaceMap {
    pub(crate) fn new(superblock: &Superblock) -> Self {
        let room = superblock.data_area();
        let total = room.end - room.start;
        // Metadata are allocated from the front, so that data clusters find contiguous space after them.
        let search = |at| AllocCursor { at, left: total };
        let mut spoilt = RangeSet::default();
        spoilt.insert(room.slots);
        Self {
            deltas: RefcountDeltas::default(),
            pool: RangeSet::default(),
            pending: RangeSet::default(),
            quarantine: BTreeMap::new(),
            freed_pages: BTreeMap::new(),
            dropped: BTreeSet::new(),
            lowered: BTreeMap::new(),
            spoilt,
            vacated: BTreeMap::new(),
            fresh: 0,
            tree_height: HEIGHT,
            cursors: std::array::from_fn(|index| {
                search(if index == 0 { room.start } else { room.start + total / 64 })
            }),
            kept: metadata_reserve_blocks(total),
        }
    }

    /// Copies the bad blocks of another space map: late writes to them are still possible.
    pub(crate) fn copy_bad_blocks(&mut self, other: &Self) {
        other.spoilt.iter().for_each(|range| self.spoilt.insert(range));
    }

    /// Adds space. The superblocks at the old end of the first device become available once this
    /// transaction is durable.
    pub(crate) fn grow(&mut self, generation: u64, end: u64, superblock: &Superblock) {
        let room = superblock.data_area();
        self.kept = self.kept.max(metadata_reserve_blocks(room.end - room.start));
        let freed = (end - SLOTS..end).filter(|block| room.contains(block));
        freed.for_each(|block| self.quarantine(generation, block..block + 1));
        self.spoilt.insert(room.slots);
        self.restart_searches();
    }

    /// Number of blocks that can be allocated at once.
    pub(crate) fn free_blocks(&self, superblock: &Superblock) -> u64 {
        let room = superblock.data_area();
        let quarantined = self.quarantine.values().chain(self.freed_pages.values());
        let quarantined: u64 = quarantined.map(RangeSet::blocks).sum();
        let taken = superblock.used + self.fresh + self.pool.blocks() + self.pending.blocks();
        // Mapped bad blocks count twice, so the result is a lower bound.
        (room.end - room.start).saturating_sub(taken + quarantined + self.spoilt.blocks())
    }

    /// Whether a commit would free blocks that cannot be allocated now.
    pub(crate) fn would_commit_free_blocks(&self) -> bool {
        let is_freed = !self.quarantine.is_empty() || !self.freed_pages.is_empty();
        is_freed || self.deltas.iter().any(|(_, delta)| delta <= 0)
    }

    /// Keeps freed blocks from being allocated until `generation` is durable.
    pub(crate) fn quarantine(&mut self, generation: u64, range: Range<u64>) {
        let is_page = self.dropped.remove(&range.start);
        let freed = if is_page { &mut self.freed_pages } else { &mut self.quarantine };
        freed.entry(generation).or_default().insert(range);
    }

    /// Releases blocks freed by transactions up to the `durable` one: data only up to `past`, before
    /// which no transfer in flight began, and metadata only up to `held`, which is pinned by a reader.
    pub(crate) fn release_quarantined(&mut self, durable: u64, past: u64, held: u64) {
        let before = self.quarantine.len() + self.freed_pages.len();
        self.quarantine.retain(|freed, _| *freed > past);
        self.freed_pages.retain(|freed, _| *freed > durable.min(held));
        self.merge_pinned_sets(durable);
        if self.quarantine.len() + self.freed_pages.len() < before {
            self.restart_searches();
        }
    }

    /// Merges the sets of metadata blocks that only a pin keeps, since a search for free space checks
    /// each set.
    fn merge_pinned_sets(&mut self, durable: u64) {
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

    /// Number of metadata blocks pinned by readers of an older state.
    pub(crate) fn pinned_metadata_blocks(&self, durable: u64) -> u64 {
        self.freed_pages.range(..=durable).map(|(_, set)| set.blocks()).sum()
    }

    /// Returns an allocated cluster that was not used.
    pub(crate) fn return_unused_cluster(&mut self, unit: Range<u64>) {
        self.pending.remove(unit);
        self.restart_searches();
    }

    /// Marks blocks as bad after a failed write.
    pub(crate) fn mark_bad(&mut self, range: Range<u64>) {
        self.spoilt.insert(range);
    }

    /// Whether one of these blocks is bad.
    pub(crate) fn is_bad(&self, range: &Range<u64>) -> bool {
        match self.spoilt.lookup(range.start) {
            RangeLookup::Taken(_) => true,
            RangeLookup::Free(next) => next < range.end,
        }
    }

    /// Restarts the searches, since space may be available again.
    fn restart_searches(&mut self) {
        self.cursors.iter_mut().for_each(|search| search.left = u64::MAX);
    }

    pub(crate) const fn height(&self) -> u8 {
        self.tree_height
    }

    /// Records that blocks lost a reference. Until that is durable, a power loss may restore the
    /// reference, so nothing else may write to them.
    pub(crate) fn note_dereference(&mut self, generation: u64, range: Range<u64>) {
        self.lowered.entry(generation).or_default().insert(range);
    }

    /// Whether a block has lost a reference, and that is not durable.
    pub(crate) fn has_undurable_decrement(&self, block: u64) -> bool {
        self.lowered.values().any(|set| matches!(set.lookup(block), RangeLookup::Taken(_)))
    }

    /// Whether that applies to any block.
    pub(crate) fn has_undurable_decrements(&self) -> bool {
        !self.lowered.is_empty()
    }

    /// Records that blocks were unmapped. Until that is durable, a power loss may restore the mapping
    /// with their present checksums, and reads of them may be in flight.
    pub(crate) fn note_unmapped(&mut self, generation: u64, range: Range<u64>) {
        self.vacated.entry(generation).or_default().insert(range);
    }

    /// Whether that applies to a block.
    pub(crate) fn is_unmap_undurable(&self, block: u64) -> bool {
        self.vacated.values().any(|set| matches!(set.lookup(block), RangeLookup::Taken(_)))
    }

    /// Ends both states for transactions up to this one.
    pub(crate) fn forget_durable_changes(&mut self, generation: u64) {
        self.vacated.retain(|since, _| *since > generation);
        self.lowered.retain(|since, _| *since > generation);
    }

    /// State of a block according to the structures in memory only.
    fn block_state(&self, at: u64) -> RangeLookup {
        let sets = [&self.pool, &self.pending, &self.spoilt];
        let freed = self.quarantine.values().chain(self.freed_pages.values());
        let sets = sets.into_iter().chain(freed);
        let places = sets.map(|set| set.lookup(at)).chain([self.deltas.lookup(at)]);
        places.fold(RangeLookup::Free(u64::MAX), |so_far, place| match (so_far, place) {
            (RangeLookup::Taken(a), RangeLookup::Taken(b)) => RangeLookup::Taken(a.max(b)),
            (RangeLookup::Taken(end), _) | (_, RangeLookup::Taken(end)) => RangeLookup::Taken(end),
            (RangeLookup::Free(a), RangeLookup::Free(b)) => RangeLookup::Free(a.min(b)),
        })
    }
}

impl Metadata {
    /// Reference count of a block.
    pub(crate) fn refcount(&mut self, block: u64) -> Result<u64, TransactionStop> {
        Ok(self.refcount_run(block)?.1)
    }

    /// End of the run that has the same reference count as a block, and that count.
    pub(crate) fn refcount_run(&mut self, block: u64) -> Result<(u64, u64), TransactionStop> {
        let run = self.next_run(&SPACE, self.superblock.space, block)?;
        let (end, count) = match run {
            Some(run) if run.key <= block => (run.key + run.extra, run.value),
            Some(run) => (run.key, 0),
            None => (u64::MAX, 0),
        };
        let until = match self.space.deltas.lookup(block) {
            RangeLookup::Taken(end) | RangeLookup::Free(end) => end,
        };
        let sum = count.checked_add_signed(self.space.deltas.at(block));
        Ok((end.min(until), sum.ok_or_else(|| refcount_corruption(block))?))
    }

    /// Fills the metadata reserve as far as space is free. A change needs more of it than a step of a
    /// commit. `leaves` is the reserve level that must remain.
    pub(crate) fn fill_metadata_reserve(
        &mut self,
        needed: u64,
        leaves: ReserveToLeave,
    ) -> Result<(), TransactionStop> {
        if self.is_below_reserve(leaves) {
            return Err(TransactionStop::Full);
        }
        let wanted = needed.max(POOL_BLOCKS);
        while self.space.pool.blocks() < wanted {
            let missing = wanted - self.space.pool.blocks();
            let is_enough = self.space.pool.blocks() >= needed;
            if self.space.free_blocks(&self.superblock) == 0 {
                return if is_enough { Ok(()) } else { Err(TransactionStop::Full) };
            }
            match self.find_free_run(AllocationKind::Metadata, 1, missing) {
                Ok(found) => self.space.pool.insert(found),
                Err(TransactionStop::Full) if is_enough => return Ok(()),
                Err(stop) => return Err(stop),
            }
        }
        Ok(())
    }

    /// Number of blocks available for metadata before the next commit.
    pub(crate) fn free_metadata_blocks(&self) -> u64 {
        self.space.free_blocks(&self.superblock) + self.space.pool.blocks()
    }

    /// Allocates clusters for data: at most `units` contiguous ones of `unit` blocks each, for a volume
    /// with `owed` reserved blocks that are not yet allocated.
    pub(crate) fn allocate_clusters(
        &mut self,
        unit: u64,
        units: u64,
        owed: u64,
    ) -> Result<Range<u64>, TransactionStop> {
        let found = self.find_free_clusters(unit, units, owed)?;
        self.space.pending.insert(found.clone());
        Ok(found)
    }

    /// Same, for a caller that references them at once.
    pub(crate) fn find_free_clusters(
        &mut self,
        unit: u64,
        units: u64,
        owed: u64,
    ) -> Result<Range<u64>, TransactionStop> {
        let free = self.space.free_blocks(&self.superblock) + owed;
        let room = free.saturating_sub(self.space.kept + self.thick_reserved_blocks());
        if room < unit {
            return Err(TransactionStop::Full);
        }
        self.find_free_run(AllocationKind::Data, unit, units.min(room / unit) * unit)
    }

    /// Raises the reserve to the needs of high trees in a small pool.
    pub(crate) fn raise_reserve(&mut self) {
        let most = self.superblock.blocks * 4 / 3 / self.full as u64;
        self.space.kept = self.space.kept.max(most);
    }

    /// Error for a caller that found no free space.
    pub(crate) fn no_space_error(&self) -> PoolError {
        let kept = self.space.kept + self.thick_reserved_blocks();
        PoolError::NoSpace { free: self.space.free_blocks(&self.superblock), kept }
    }

    /// Finds a free run of whole clusters, of at most `blocks_max`. Stops where a page has to be read,
    /// and continues from there.
    fn find_free_run(
        &mut self,
        purpose: AllocationKind,
        unit: u64,
        blocks_max: u64,
    ) -> Result<Range<u64>, TransactionStop> {
        let room = self.superblock.data_area();
        let total = room.end - room.start;
        let cursor = match purpose {
            AllocationKind::Metadata => 0,
            AllocationKind::Data => 1 + unit.trailing_zeros() as usize,
        };
        loop {
            let AllocCursor { at, left } = self.space.cursors[cursor];
            if left == 0 {
                return Err(TransactionStop::Full);
            }
            let left = left.min(total);
            if at >= room.end {
                self.space.cursors[cursor] = AllocCursor { at: room.start, left };
                continue;
            }
            let gap = self.allocation_state(at)?;
            let fits = match &gap {
                RangeLookup::Taken(_) => 0,
                RangeLookup::Free(end) => {
                    end.saturating_sub(at.next_multiple_of(unit)) / unit * unit
                }
            };
            let search = &mut self.space.cursors[cursor];
            if fits > 0 {
                let start = at.next_multiple_of(unit);
                let found = start..start + fits.min(blocks_max);
                *search = AllocCursor { at: found.end, left: total };
                return Ok(found);
            }
            let (RangeLookup::Taken(end) | RangeLookup::Free(end)) = gap;
            *search = AllocCursor { at: end, left: left.saturating_sub(end - at) };
        }
    }

    /// Whether a block of the data area can be allocated, and the extent of that state.
    fn allocation_state(&mut self, at: u64) -> Result<RangeLookup, TransactionStop> {
        let RangeLookup::Free(next) = self.space.block_state(at) else {
            return Ok(self.space.block_state(at));
        };
        let end = next.min(self.superblock.data_area().end);
        Ok(match self.next_run(&SPACE, self.superblock.space, at)? {
            Some(run) if run.key <= at => RangeLookup::Taken(run.key + run.extra),
            Some(run) => RangeLookup::Free(end.min(run.key)),
            None => RangeLookup::Free(end),
        })
    }

    /// Applies the first delta to the tree, or as much of it as one leaf and one count allow. False if no
    /// delta is left.
    pub(crate) fn apply_refcount_delta(&mut self) -> Result<bool, TransactionStop> {
        let Some((range, delta)) = self.space.deltas.first_range() else { return Ok(false) };
        let run = self.next_run(&SPACE, self.superblock.space, range.start)?;
        let (count, end) = match run {
            Some(run) if run.key <= range.start => (run.value, run.key + run.extra),
            Some(run) => (0, run.key),
            None => (0, range.end),
        };
        let piece = range.start..end.min(range.end);
        let sum =
            count.checked_add_signed(delta).ok_or_else(|| refcount_corruption(piece.start))?;
        let piece = if delta == 0 { piece } else { self.set_refcount(piece, sum)? };
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
        self.space.deltas.subtract_applied(piece, delta);
        Ok(true)
    }

    /// Sets the count of a run, as far as one leaf extends. Returns the part that was set.
    fn set_refcount(
        &mut self,
        piece: Range<u64>,
        count: u64,
    ) -> Result<Range<u64>, TransactionStop> {
        self.try_update(|books| {
            let mut root: Pointer = books.superblock.space;
            let line = Record { key: piece.start, value: count, extra: 0 };
            let line = (count > 0).then_some(line);
            let (end, _) = books.replace_range_in_leaf(&SPACE, &mut root, piece.clone(), line)?;
            books.superblock.space = root;
            books.space.tree_height = books.height(&SPACE, root)?;
            Ok(piece.start..end)
        })
    }
}

fn refcount_corruption(address: u64) -> Corruption {
    Corruption { address, kind: None, owner: 0, flaw: CorruptionKind::Count }
}

#[cfg(test)]
mod tests {
    use super::SpaceMap;
    use crate::format::Superblock;
    use crate::on_disk_layout::Layout;
    use crate::ranges::RangeLookup;

    #[test]
    fn freed_page_awaits_commit_and_freed_data_awaits_transfers() {
        let empty = Superblock { blocks: 1024, ..Superblock::decode(&[0; Superblock::BYTES]) };
        let mut space = SpaceMap::new(&empty);
        let (page, data) = (100, 200);
        space.dropped.insert(page);
        space.quarantine(5, page..page + 1);
        space.quarantine(5, data..data + 16);
        let is_kept = |space: &SpaceMap, at| matches!(space.block_state(at), RangeLookup::Taken(_));
        let free = space.free_blocks(&empty);
        for (durable, past, expected) in
            [(4, 4, [true, true]), (4, 9, [true, false]), (5, 4, [false, false])]
        {
            space.release_quarantined(durable, past, u64::MAX);
            assert_eq!([page, data + 15].map(|at| is_kept(&space, at)), expected);
        }
        assert_eq!(space.free_blocks(&empty), free + 17);
        // A data block that was a metadata block before is not treated as one.
        space.quarantine(6, page..page + 1);
        space.release_quarantined(6, 5, u64::MAX);
        assert!(is_kept(&space, page));
    }

    #[test]
    fn pinned_pages_are_merged_into_one_set_until_unpinned() {
        let empty = Superblock { blocks: 1024, ..Superblock::decode(&[0; Superblock::BYTES]) };
        let mut space = SpaceMap::new(&empty);
        let is_kept = |space: &SpaceMap, at| matches!(space.block_state(at), RangeLookup::Taken(_));
        for generation in 5..=9 {
            let page = 100 + 2 * generation;
            space.dropped.insert(page);
            space.quarantine(generation, page..page + 1);
            space.release_quarantined(generation, u64::MAX, 6);
        }
        // The state of 6 does not contain those of 5 and 6.
        let kept = [5, 6, 7, 8, 9].map(|generation| is_kept(&space, 100 + 2 * generation));
        assert_eq!(kept, [false, false, true, true, true]);
        assert_eq!((space.freed_pages.len(), space.pinned_metadata_blocks(9)), (1, 3));
        space.release_quarantined(9, u64::MAX, u64::MAX);
        assert_eq!((space.freed_pages.len(), space.pinned_metadata_blocks(9)), (0, 0));
        assert!(!is_kept(&space, 118));
    }
}
