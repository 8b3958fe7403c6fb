//! What a commit takes: no change is made that leaves too little room to commit it.
//!
//! A commit writes anew every node of the tree of counts on the way to a count that has changed; a
//! node that it writes anew changes the count of where it was, and so on, until nothing is added.
//! That is bounded quickly from above, and followed node by node where that is not good enough.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::books::{Books, Stop};
use crate::space::{COUNT_BLOCKS, SPACE};
use crate::tree::{ALL, child_bounds, child_index};

/// What a change may leave of the blocks that are kept for commits and deletions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// Three quarters: nothing has been done yet for whoever asks.
    Most,
    /// Half: it is the end of what was begun, or a trim.
    Half,
    /// A quarter, and nothing of what is kept for thick volumes: it is what that is kept for.
    Promised,
    /// Nothing: it gives back.
    Nothing,
}

/// Ranges that are followed node by node at most.
const RANGES_MAX: usize = 64;

impl Books {
    /// Whether so little of what is kept is left that a change must not begin.
    pub(crate) fn is_low(&self, leaves: Leaves) -> bool {
        let kept = self.space.kept;
        match leaves {
            Leaves::Most => self.room() <= self.reserve() + kept / 4 * 3,
            Leaves::Half => self.room() <= self.reserve() + kept / 2,
            Leaves::Promised => self.room() <= kept / 4,
            Leaves::Nothing => false,
        }
    }

    /// Makes a change wholly or not at all, and not if there were no room to commit it then.
    pub(crate) fn attempt_with_room<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        self.attempt(|books| {
            let done = change(books)?;
            if books.has_room_for_commit(COUNT_BLOCKS)? { Ok(done) } else { Err(Stop::Full) }
        })
    }

    /// The same for a change that gives back a leaf at a time: if a whole leaf is too much, a part
    /// of it.
    pub(crate) fn attempt_in_steps<T>(
        &mut self,
        change: impl Fn(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let mut done = self.attempt_with_room(&change);
        if matches!(done, Err(Stop::Full)) {
            self.step_blocks = 8 * self.half();
            done = self.attempt_with_room(&change);
            self.step_blocks = u64::MAX;
        }
        done
    }

    /// Whether there is room for a commit of what has been changed, and so many blocks more.
    pub(crate) fn has_room_for_commit(&mut self, more: u64) -> Result<bool, Stop> {
        let Some(room) = self.room().checked_sub(more) else { return Ok(false) };
        if self.ways_max() <= room {
            return Ok(true);
        }
        if self.space.deltas.len() > RANGES_MAX {
            return Ok(false);
        }
        Ok(self.ways(room)? <= room)
    }

    /// No commit writes more nodes than this: a way for each range and for each leaf that it may
    /// touch, or the whole tree.
    fn ways_max(&self) -> u64 {
        let (ranges, half) = (self.space.deltas.len() as u64, self.half());
        let ways = ranges * (u64::from(self.space.height()) + 1);
        let leaves = self.space.deltas.blocks() / half * 2;
        let room = self.superblock.room();
        (ways + leaves).min(((room.end - room.start) / half + 1) * 2)
    }

    /// How many nodes the commit will write, or some number above `enough`.
    fn ways(&mut self, enough: u64) -> Result<u64, Stop> {
        let ranges = self.space.deltas.len() as u64;
        let mut left: Vec<Range<u64>> = self.space.deltas.iter().map(|(range, _)| range).collect();
        // New nodes go to blocks of the pool, which get counts by that.
        let mut pool = self.space.pool.clone();
        let mut nodes = BTreeSet::new();
        let splits = |nodes: u64, half: u64| nodes + (ranges + 2 * nodes) / half + 4;
        while let Some(range) = left.pop() {
            let mut at = range.start;
            while at < range.end && splits(nodes.len() as u64, self.half()) <= enough {
                let (end, moved) = self.follow(at, &mut nodes)?;
                for old in moved {
                    left.extend([Some(old), pool.take_first()].into_iter().flatten().map(one));
                }
                at = end;
            }
        }
        Ok(splits(nodes.len() as u64, self.half()))
    }

    /// Adds the nodes on the way to a count. Returns how far the leaf goes, and which nodes are new
    /// and will be written elsewhere than they lie.
    fn follow(&mut self, block: u64, nodes: &mut BTreeSet<u64>) -> Result<(u64, Vec<u64>), Stop> {
        let (mut pointer, mut bounds, mut level) = (self.superblock.space, ALL, None);
        let mut moved = Vec::new();
        while !pointer.is_none() {
            if pointer.generation != self.generation && nodes.insert(pointer.address) {
                moved.push(pointer.address);
            }
            if level == Some(0) {
                break;
            }
            let page = self.node(&SPACE, pointer, level, &bounds)?;
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

    /// Blocks for which one leaf of the tree of counts answers at least, for no leaf is split that
    /// has fewer than twice as many records.
    pub(crate) fn half(&self) -> u64 {
        (self.full as u64 / 2).max(1)
    }
}

const fn one(block: u64) -> Range<u64> {
    block..block + 1
}
