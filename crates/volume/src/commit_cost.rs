//! Cost of a commit: rejects changes that leave too little space for their commit.
//!
//! A commit rewrites every space map node on the path to a changed count. Rewriting a node changes the
//! count of its old and new block, and so on, until nothing is added. A quick upper bound is used first;
//! if it is not sufficient, the nodes are traversed.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::metadata::{Metadata, TransactionStop};
use crate::space_map::{COUNT_BLOCKS, SPACE};
use crate::tree::{ALL, child_bounds, child_index};

/// Part of the reserve for commits and deletions that a change must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveToLeave {
    /// Three quarters: the start of a new request.
    Most,
    /// Half: the end of a started request, or a trim.
    Half,
    /// A quarter, without the reservation for thick volumes: the change uses that reservation.
    Provisioned,
    /// Nothing: the change frees space.
    Nothing,
}

/// Maximum ranges for which the nodes are traversed.
const RANGES_MAX: usize = 64;

impl Metadata {
    /// Whether the remaining reserve is too low for a change to start.
    pub(crate) fn is_below_reserve(&self, leaves: ReserveToLeave) -> bool {
        let kept = self.space.kept;
        match leaves {
            ReserveToLeave::Most => {
                self.free_metadata_blocks() <= self.thick_reserved_blocks() + kept / 4 * 3
            }
            ReserveToLeave::Half => {
                self.free_metadata_blocks() <= self.thick_reserved_blocks() + kept / 2
            }
            ReserveToLeave::Provisioned => self.free_metadata_blocks() <= kept / 4,
            ReserveToLeave::Nothing => false,
        }
    }

    /// Makes a change completely or not at all; not at all if there would be no space for its commit.
    pub(crate) fn try_change_with_commit_space<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, TransactionStop>,
    ) -> Result<T, TransactionStop> {
        self.try_update(|books| {
            let done = change(books)?;
            if books.has_room_for_commit(COUNT_BLOCKS)? {
                Ok(done)
            } else {
                Err(TransactionStop::Full)
            }
        })
    }

    /// Like [`try_change_with_commit_space`](Self::try_change_with_commit_space), for a change that frees one leaf at a time:
    /// if a whole leaf is too much, a part of it.
    pub(crate) fn try_step_with_commit_space<T>(
        &mut self,
        change: impl Fn(&mut Self) -> Result<T, TransactionStop>,
    ) -> Result<T, TransactionStop> {
        let mut done = self.try_change_with_commit_space(&change);
        if matches!(done, Err(TransactionStop::Full)) {
            self.step_blocks = 8 * self.leaf_blocks_min();
            done = self.try_change_with_commit_space(&change);
            self.step_blocks = u64::MAX;
        }
        done
    }

    /// Whether there is space for a commit of the changes, and for `more` blocks.
    pub(crate) fn has_room_for_commit(&mut self, more: u64) -> Result<bool, TransactionStop> {
        let Some(room) = self.free_metadata_blocks().checked_sub(more) else { return Ok(false) };
        if self.commit_nodes_max() <= room {
            return Ok(true);
        }
        if self.space.deltas.len() > RANGES_MAX {
            return Ok(false);
        }
        Ok(self.count_commit_nodes(room)? <= room)
    }

    /// Upper bound of the nodes that a commit writes: a path for each range and for each leaf that it may
    /// touch, or the whole tree.
    fn commit_nodes_max(&self) -> u64 {
        let (ranges, half) = (self.space.deltas.len() as u64, self.leaf_blocks_min());
        let ways = ranges * (u64::from(self.space.height()) + 1);
        let leaves = self.space.deltas.blocks() / half * 2;
        let room = self.superblock.data_area();
        (ways + leaves).min(((room.end - room.start) / half + 1) * 2)
    }

    /// Number of nodes that the commit will write, or any number above `enough`.
    fn count_commit_nodes(&mut self, enough: u64) -> Result<u64, TransactionStop> {
        let ranges = self.space.deltas.len() as u64;
        let mut left: Vec<Range<u64>> = self.space.deltas.iter().map(|(range, _)| range).collect();
        // New nodes use blocks of the allocation pool, which thereby get counts.
        let mut pool = self.space.pool.clone();
        let mut nodes = BTreeSet::new();
        let splits = |nodes: u64, half: u64| nodes + (ranges + 2 * nodes) / half + 4;
        while let Some(range) = left.pop() {
            let mut at = range.start;
            while at < range.end && splits(nodes.len() as u64, self.leaf_blocks_min()) <= enough {
                let (end, moved) = self.add_path_nodes(at, &mut nodes)?;
                for old in moved {
                    left.extend(
                        [Some(old), pool.take_first()].into_iter().flatten().map(single_block),
                    );
                }
                at = end;
            }
        }
        Ok(splits(nodes.len() as u64, self.leaf_blocks_min()))
    }

    /// Adds the nodes on the path to a count. Returns the end of the leaf, and the old addresses of the
    /// nodes that are new in the set and will move.
    fn add_path_nodes(
        &mut self,
        block: u64,
        nodes: &mut BTreeSet<u64>,
    ) -> Result<(u64, Vec<u64>), TransactionStop> {
        let (mut pointer, mut bounds, mut level) = (self.superblock.space, ALL, None);
        let mut moved = Vec::new();
        while !pointer.is_null() {
            if pointer.generation != self.generation && nodes.insert(pointer.address) {
                moved.push(pointer.address);
            }
            if level == Some(0) {
                break;
            }
            let page = self.load_node(&SPACE, pointer, level, &bounds)?;
            if page.level() == 0 {
                break;
            }
            let index = child_index(page.records(), block);
            bounds = child_bounds(page.records(), index, &bounds);
            pointer = page.records()[index].child();
            level = Some(page.level() - 1);
        }
        Ok((bounds.end, moved))
    }

    /// Minimum number of blocks covered by a space map leaf: no leaf is split that has fewer than twice
    /// as many records.
    pub(crate) fn leaf_blocks_min(&self) -> u64 {
        (self.full as u64 / 2).max(1)
    }
}

const fn single_block(block: u64) -> Range<u64> {
    block..block + 1
}
