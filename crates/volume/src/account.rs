//! How much room a volume takes, and how much of it others keep as well.
//!
//! What others refer to is not looked into: of the two trees of a volume, nodes are read that belong
//! to it alone, and of the space map what counts the units under them. A clone that was never written
//! to costs one block, whatever its size.

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
    /// What deleting it would give back: whole units of data, nodes of its trees, its own block, and its
    /// parent's.
    pub unique: u64,
    /// Blocks of it that are spare in units that nobody else refers to: a first write to one of them
    /// takes no room.
    pub reserved: u64,
    /// Blocks of units that it has not, but would have if it were thick.
    pub missing: u64,
}

impl Account {
    /// Blocks that lie in units of the volume's own, written or spare: all of them if it is thick and
    /// its promise holds.
    #[must_use]
    pub const fn own(&self) -> u64 {
        self.used.saturating_sub(self.shared).saturating_add(self.reserved)
    }
}

/// How far the room of a volume has been added up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    /// The tree that is being walked.
    kind: Kind,
    /// What comes next in it.
    key: u64,
    own: Own,
    unique: u64,
}

/// What a volume has in units that nobody else refers to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Own {
    /// Blocks that are written.
    pub(crate) mapped: u64,
    /// Blocks that are spare.
    pub(crate) spare: u64,
    /// Units of the volume of which it has blocks there.
    pub(crate) units: u64,
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
    pub(crate) const BEGIN: Self =
        Self { kind: Kind::Map, key: 0, own: Own { mapped: 0, spare: 0, units: 0 }, unique: 1 };

    /// What has come of it.
    pub(crate) const fn account(&self, body: &VolumeBody) -> Account {
        self.own.account(body, self.unique)
    }
}

impl Own {
    /// The room of a volume that has this, and so many blocks in all.
    pub(crate) const fn account(&self, body: &VolumeBody, unique: u64) -> Account {
        let Self { mapped, spare, units } = *self;
        let shared = body.mapped.saturating_sub(mapped);
        let missing = body.units().saturating_sub(units) * body.unit();
        Account { used: body.mapped, shared, unique, reserved: spare, missing }
    }

    /// Adds what a leaf has in a set of units.
    pub(crate) fn add(&mut self, tree: &Tree, set: &RangeSet, leaf: &Page) {
        // Several units of the store may have blocks of one unit of the volume.
        let mut units = RangeSet::default();
        for run in leaf.records().iter().filter(|run| !run.is_hole()) {
            let place = run.place()..run.place() + run.extra;
            let blocks = set.blocks_in(&place);
            if run.is_spare() {
                self.spare += blocks
            } else {
                self.mapped += blocks
            }
            for part in set.parts_in(&place) {
                let (first, last) = (part.start - place.start, part.end - 1 - place.start);
                units.insert((run.key + first) / tree.unit..(run.key + last) / tree.unit + 1);
            }
        }
        self.units += units.blocks();
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
            if tally.kind == Kind::Sums {
                return Ok(None);
            }
            let at = body.parent.address;
            let own_parent = !body.parent.is_none() && self.count(at)? == 1;
            let unique = tally.unique + u64::from(own_parent);
            return Ok(Some(Tally { kind: Kind::Sums, key: 0, unique, ..*tally }));
        }
        let is_map = tally.kind == Kind::Map;
        let (tree, root) =
            if is_map { (body.tree(), body.map) } else { (body.sums_tree(), body.sums) };
        let way = self.unshared_way(&tree, root, tally.key)?;
        let mut further = Tally { key: way.end, unique: tally.unique + way.nodes, ..*tally };
        if let Some(leaf) = way.leaf.filter(|_| is_map) {
            let set = self.own_units(&tree, &leaf)?;
            further.own.add(&tree, &set, &leaf);
            further.unique += set.blocks();
        }
        Ok(Some(further))
    }

    /// The leaf that answers for a key, if nothing on the way to it belongs to others, too.
    pub(crate) fn unshared_leaf(
        &mut self,
        tree: &Tree,
        root: Pointer,
        key: u64,
    ) -> Result<Option<Arc<Page>>, Stop> {
        Ok(self.unshared_way(tree, root, key)?.leaf)
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

    /// Of the units that a leaf of one tree refers to, those that nothing else does.
    pub(crate) fn own_units(&mut self, tree: &Tree, leaf: &Page) -> Result<RangeSet, Stop> {
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
        Ok(own)
    }
}

/// How often a leaf refers to each unit.
pub(crate) fn uses(tree: &Tree, leaf: &Page) -> Deltas {
    let mut uses = Deltas::default();
    leaf.records().iter().for_each(|run| uses.add(tree.units_of(run), 1));
    uses
}
