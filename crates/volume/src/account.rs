//! How much room a volume takes, and how much of it others keep as well.
//!
//! What others refer to is not looked into: of the two trees of a volume, nodes are read that belong
//! to it alone, and of the space map what counts the units under them. A clone that was never written
//! to costs one block, whatever its size.

use std::ops::Range;
use std::sync::Arc;

use crate::books::{Books, Stop};
use crate::format::{Kind, Page, Pointer, VolumeBody};
use crate::ranges::{Deltas, RangeSet};
use crate::tree::{ALL, Tree, child_bounds, child_index};

/// How much room a volume takes, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Blocks of it that are mapped: those that were written.
    pub used: u64,
    /// How many of them lie in units of the store that another volume refers to as well.
    pub shared: u64,
    /// What deleting it would give back: whole units of data, nodes of its trees, and its own block.
    pub unique: u64,
}

/// How far the room of a volume has been added up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    /// The tree that is being walked.
    kind: Kind,
    /// What comes next in it.
    key: u64,
    /// Mapped blocks in units that nobody else refers to.
    own: u64,
    unique: u64,
}

/// The way to a leaf, as far as it belongs to one tree alone.
struct Way {
    /// Nodes of it that begin at the key that was looked for, and so have not been met before.
    nodes: u64,
    /// Where the leaf ends, or what others keep of the tree.
    end: u64,
    leaf: Option<Arc<Page>>,
}

impl Tally {
    /// Nothing has been looked at but the volume's block.
    pub(crate) const BEGIN: Self = Self { kind: Kind::Map, key: 0, own: 0, unique: 1 };

    /// What has come of it.
    pub(crate) const fn account(&self, body: &VolumeBody) -> Account {
        let shared = body.mapped.saturating_sub(self.own);
        Account { used: body.mapped, shared, unique: self.unique }
    }
}

impl Books {
    /// Adds up what only this volume keeps, one leaf further. None once that was all.
    pub(crate) fn tally(
        &mut self,
        body: &VolumeBody,
        tally: &Tally,
    ) -> Result<Option<Tally>, Stop> {
        if tally.key == ALL.end {
            let next = Tally { kind: Kind::Sums, key: 0, ..*tally };
            return Ok((tally.kind == Kind::Map).then_some(next));
        }
        let is_map = tally.kind == Kind::Map;
        let (tree, root) =
            if is_map { (body.tree(), body.map) } else { (body.sums_tree(), body.sums) };
        let way = self.unshared_way(&tree, root, tally.key)?;
        let (own, units) = match way.leaf.filter(|_| is_map) {
            Some(leaf) => self.own_blocks(&tree, &leaf)?,
            None => (0, 0),
        };
        let (own, unique) = (tally.own + own, tally.unique + way.nodes + units);
        Ok(Some(Tally { kind: tally.kind, key: way.end, own, unique }))
    }

    /// Goes down to the leaf that answers for a key, and stops at what others keep too.
    fn unshared_way(&mut self, tree: &Tree, root: Pointer, key: u64) -> Result<Way, Stop> {
        let mut way = Way { nodes: 0, end: ALL.end, leaf: None };
        let (mut pointer, mut bounds, mut level) = (root, ALL, None);
        while !pointer.is_none() {
            way.end = bounds.end;
            if self.count(pointer.address)? > 1 {
                break;
            }
            way.nodes += u64::from(key == bounds.start);
            let page = self.node(tree, pointer, level, &bounds)?;
            if page.level() == 0 {
                way.leaf = Some(page);
                break;
            }
            let index = child_index(page.records(), key);
            bounds = child_bounds(page.records(), index, &bounds);
            pointer = page.records()[index].child();
            level = Some(page.level() - 1);
        }
        Ok(way)
    }

    /// Of the units that a leaf of one tree refers to, those that nothing else does: how many blocks
    /// are mapped in them, and how many they have.
    fn own_blocks(&mut self, tree: &Tree, leaf: &Page) -> Result<(u64, u64), Stop> {
        let mut own = RangeSet::default();
        for (range, uses) in uses(tree, leaf).iter() {
            let mut at = range.start;
            while at < range.end {
                let (end, count) = self.count_run(at)?;
                let end = end.min(range.end);
                if i64::try_from(count) == Ok(uses) {
                    own.insert(at..end);
                }
                at = end;
            }
        }
        Ok((mapped_in(&own, leaf), own.blocks()))
    }
}

/// How often a leaf refers to each unit.
pub(crate) fn uses(tree: &Tree, leaf: &Page) -> Deltas {
    let mut uses = Deltas::default();
    leaf.records().iter().for_each(|run| uses.add(tree.units_of(run), 1));
    uses
}

/// How many blocks a leaf maps to a set of blocks.
pub(crate) fn mapped_in(set: &RangeSet, leaf: &Page) -> u64 {
    let blocks = |range: Range<u64>| set.blocks_in(&range);
    leaf.records().iter().map(|run| blocks(run.value..run.value + run.extra)).sum()
}
