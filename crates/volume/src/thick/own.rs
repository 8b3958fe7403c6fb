//! Has the blocks of a thick volume lie in units of its own, a stretch at a time.
//!
//! ```text
//!   hole              a spare run in new units
//!   written, shared   copied to a unit of its own
//!   spare, shared     spare in a unit of its own: there is nothing to copy
//! ```
//!
//! Nobody writes to the volume while a stretch of it is on its way. Somebody may trim it: what is not
//! where it was when it was copied is left as it is.

use std::ops::Range;
use std::sync::Arc;

use crate::books::{Books, Stop};
use crate::format::{Page, Record, SPARE, VolumeBody};
use crate::plan::{Home, Piece, Source, part};
use crate::ranges::{Place, RangeSet};
use crate::tree::{Leaf, Tree};

/// What is to be done next for a thick volume.
#[derive(Debug)]
pub(crate) enum Owning {
    /// Nothing before this block.
    Nothing(u64),
    /// These blocks, that nothing is mapped to, are to be given units.
    Hole(Range<u64>),
    /// These units are to get what they have not.
    Moves(Vec<Move>),
}

/// A unit of a volume that is to have all of its blocks in units of its own.
#[derive(Clone, Debug)]
pub(crate) struct Move {
    /// Which one.
    pub(crate) number: u64,
    /// The unit of the store to which they go; none has been found yet if it is `None`.
    pub(crate) at: Option<u64>,
    /// What has to be copied, and from where.
    pub(crate) copies: Vec<Piece>,
}

/// Blocks of a volume that lie alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    /// In a unit that the volume alone has.
    Own,
    /// Written, from here on, in one that others have, too.
    Shared(u64),
    /// Nowhere, or nowhere that counts.
    Nowhere,
}

/// A leaf, and which of the units that it refers to nobody else does.
struct Known {
    tree: Tree,
    leaf: Leaf,
    own: RangeSet,
}

/// Blocks that are given units in one step at most: 4 GiB.
const HOLE_BLOCKS_MAX: u64 = 1 << 20;

impl Books {
    /// What is to be done next for a thick volume from the unit of a block on; at most so many blocks
    /// are copied.
    pub(crate) fn plan_own(
        &mut self,
        body: &VolumeBody,
        from: u64,
        copy_max: u64,
    ) -> Result<Owning, Stop> {
        let unit = body.unit();
        let from = from / unit * unit;
        if from >= body.blocks {
            return Ok(Owning::Nothing(body.blocks));
        }
        let hole = |start: u64, end: u64| {
            let end = end.min(start + HOLE_BLOCKS_MAX);
            Owning::Hole(start..if end >= body.blocks { body.blocks } else { end / unit * unit })
        };
        let Some(known) = self.known(body, from)? else { return Ok(hole(from, body.blocks)) };
        let end = known.leaf.bounds.end.min(body.blocks);
        let Some((first, lies, until)) = known.first_not_own(from..end) else {
            return Ok(Owning::Nothing(end));
        };
        let is_hole = lies == Lies::Nowhere && known.is_unmapped(first);
        if is_hole && first % unit == 0 && (until >= first + unit || until >= body.blocks) {
            return Ok(hole(first, until));
        }
        let mut moves = Vec::new();
        let first = first / unit;
        for number in first..(first + (copy_max / unit).max(1)).min(end.div_ceil(unit)) {
            let blocks = part(number, unit, &(0..body.blocks));
            let parts = known.parts(&blocks);
            if parts.iter().all(|(_, lies)| *lies == Lies::Own) {
                continue;
            }
            let home = self.home(&known.tree, Some(&known.leaf), number * unit, &blocks)?;
            let at = if let Home::Here(at, _) = home { Some(at) } else { None };
            let copy = |(range, lies): &(Range<u64>, Lies)| match lies {
                Lies::Shared(at) => {
                    let blocks = range.end - range.start;
                    Some(Piece { block: range.start, blocks, from: Source::Store(*at) })
                }
                Lies::Own | Lies::Nowhere => None,
            };
            moves.push(Move { number, at, copies: parts.iter().filter_map(copy).collect() });
        }
        Ok(Owning::Moves(moves))
    }

    /// Gives units to blocks of a thick volume that nothing is mapped to, as many as there are in one
    /// piece. Returns where it stopped.
    pub(crate) fn fill_hole(&mut self, id: u64, hole: &Range<u64>) -> Result<u64, Stop> {
        let mut body = self.expect_volume(id)?;
        let (tree, unit) = (body.tree(), body.unit());
        let units = (hole.end - hole.start).div_ceil(unit);
        let found = self.find_units(unit, units, body.owed)?;
        let end = hole.end.min(hole.start + (found.end - found.start));
        let line = Record { key: hole.start, value: found.start | SPARE, extra: 0 };
        let range = hole.start..end;
        let (end, gain) = self.splice(&tree, &mut body.map, range, Some(line))?;
        let taken = (end - hole.start).next_multiple_of(unit);
        self.space.fresh += taken;
        body.owed = body.owed.saturating_sub(taken);
        body.take_in(gain);
        self.put_volume(&body)?;
        Ok(end)
    }

    /// Has what is not its own of a unit of a thick volume lie at `at`, where its copies are. Whether
    /// there was anything.
    pub(crate) fn map_own(
        &mut self,
        id: u64,
        one: &Move,
        at: u64,
        is_new: bool,
    ) -> Result<bool, Stop> {
        let mut body = self.expect_volume(id)?;
        let (tree, unit) = (body.tree(), body.unit());
        let start = one.number * unit;
        let blocks = part(one.number, unit, &(0..body.blocks));
        let Some(known) = self.known(&body, start)? else { return Ok(false) };
        let mut is_moved = false;
        for (range, lies) in known.parts(&blocks) {
            let place = at + (range.start - start);
            let value = match lies {
                Lies::Own => continue,
                Lies::Nowhere => place | SPARE,
                Lies::Shared(from) if one.is_copied(&range, from) => place,
                Lies::Shared(_) => continue,
            };
            let line = Record { key: range.start, value, extra: 0 };
            // It is in one leaf, for leaves part between units.
            let (_, gain) = self.splice(&tree, &mut body.map, range, Some(line))?;
            body.take_in(gain);
            is_moved = true;
        }
        if is_moved {
            body.owed = body.owed.saturating_sub(if is_new { unit } else { 0 });
            self.remapped.insert(id);
            self.put_volume(&body)?;
        }
        Ok(is_moved)
    }

    fn known(&mut self, body: &VolumeBody, key: u64) -> Result<Option<Known>, Stop> {
        let tree = body.tree();
        let Some(leaf) = self.leaf_and_sharing(&tree, body.map, key, true)? else {
            return Ok(None);
        };
        let own = match self.unshared_leaf(&tree, body.map, key)? {
            Some(page) => self.own_units(&tree, &page)?,
            None => RangeSet::default(),
        };
        Ok(Some(Known { tree, leaf, own }))
    }
}

impl Move {
    /// Whether blocks that lie there have been copied.
    fn is_copied(&self, range: &Range<u64>, from: u64) -> bool {
        let has = |piece: &Piece| {
            let skip = range.start.checked_sub(piece.block);
            let is_inside = range.end <= piece.block + piece.blocks;
            let is_from = |skip| piece.from == Source::Store(from.wrapping_sub(skip));
            is_inside && skip.is_some_and(is_from)
        };
        self.copies.iter().any(has)
    }
}

impl Known {
    fn page(&self) -> &Arc<Page> {
        &self.leaf.page
    }

    /// How a block lies, and how far that is so of those behind it.
    fn look(&self, block: u64) -> (Lies, u64) {
        let records = self.page().records();
        let end = |run: &Record| run.key + run.extra;
        match records.get(records.partition_point(|run| end(run) <= block)) {
            None => (Lies::Nowhere, u64::MAX),
            Some(run) if run.key > block => (Lies::Nowhere, run.key),
            Some(run) if run.is_hole() => (Lies::Nowhere, end(run)),
            Some(run) => {
                let at = run.place() + (block - run.key);
                let (lies, until) = match self.own.look(at) {
                    Place::Taken(until) => (Lies::Own, until),
                    Place::Free(until) if run.is_spare() => (Lies::Nowhere, until),
                    Place::Free(until) => (Lies::Shared(at), until),
                };
                (lies, end(run).min(block.saturating_add(until - at)))
            }
        }
    }

    fn is_unmapped(&self, block: u64) -> bool {
        let has = |run: &Record| run.key <= block && block < run.key + run.extra;
        !self.page().records().iter().any(has)
    }

    /// The first block of a range that is not its own, how it lies, and how far.
    fn first_not_own(&self, range: Range<u64>) -> Option<(u64, Lies, u64)> {
        let mut at = range.start;
        while at < range.end {
            let (lies, until) = self.look(at);
            if lies != Lies::Own {
                return Some((at, lies, until.min(range.end)));
            }
            at = until;
        }
        None
    }

    /// How the blocks of a range lie, part by part.
    fn parts(&self, range: &Range<u64>) -> Vec<(Range<u64>, Lies)> {
        let (mut at, mut parts) = (range.start, Vec::new());
        while at < range.end {
            let (lies, until) = self.look(at);
            let end = until.min(range.end);
            parts.push((at..end, lies));
            at = end;
        }
        parts
    }
}
