//! Difference of two volumes, computed from their maps alone.
//!
//! Data referenced by one volume are never overwritten by another one, so blocks of two volumes at the
//! same address are equal. If both maps share a node, everything below it is equal and is not read.

use std::ops::Range;
use std::sync::Arc;

use crate::format::{Page, Pointer, VolumeBody};
use crate::mapping::ReadSource;
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::{ALL, TreeDescriptor, child_bounds, child_index};

/// Range of blocks for which the comparison has the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiffRun {
    /// End of the range.
    pub(crate) end: u64,
    /// Read source of the blocks, if they differ.
    pub(crate) changed: Option<ReadSource>,
}

/// Node on the search path to a key.
struct DiffCursor {
    tree: TreeDescriptor,
    pointer: Pointer,
    bounds: Range<u64>,
    /// Expected level, if known.
    height: Option<u8>,
    page: Option<Arc<Page>>,
    /// Parent read where nothing is mapped, and its overlap.
    parent: (Pointer, u64),
}

impl DiffCursor {
    fn new(body: &VolumeBody) -> Self {
        let parent = (body.parent, body.reach);
        Self {
            tree: body.map_tree(),
            pointer: body.map,
            bounds: ALL,
            height: None,
            page: None,
            parent,
        }
    }

    fn level(&self) -> u8 {
        self.page.as_ref().map_or(0, |page| page.level())
    }

    /// Child that contains a key.
    fn child(&self, key: u64) -> Option<Self> {
        let page = self.page.as_ref().filter(|page| page.level() > 0)?;
        let index = child_index(page.records(), key);
        let bounds = child_bounds(page.records(), index, &self.bounds);
        let pointer = page.records().get(index)?.child();
        let height = Some(page.level() - 1);
        Some(Self { tree: self.tree, pointer, bounds, height, page: None, parent: self.parent })
    }

    /// Read source of a block, and the end of the range for which one record, or a gap, determines it.
    fn read_source(&self, key: u64) -> (ReadSource, u64) {
        let records = self.page.as_ref().map_or(&[][..], |page| page.records());
        match records.get(records.partition_point(|run| run.key + run.extra <= key)) {
            Some(run) if run.key <= key && run.is_written() => {
                (ReadSource::Store(run.first_address() + (key - run.key)), run.key + run.extra)
            }
            Some(run) if run.key <= key => (ReadSource::Nothing, run.key + run.extra),
            Some(run) => self.gap_source(key, run.key),
            None => self.gap_source(key, self.bounds.end),
        }
    }

    /// Same for a gap in the map up to `end`.
    fn gap_source(&self, key: u64, end: u64) -> (ReadSource, u64) {
        let (_, reach) = self.parent;
        if key < reach { (ReadSource::Parent, end.min(reach)) } else { (ReadSource::Nothing, end) }
    }
}

impl Metadata {
    /// Compares the maps of two volumes from `at` on. Without a base, every mapped block differs. Blocks
    /// after a volume's end are not mapped.
    pub(crate) fn compare_from(
        &mut self,
        base: Option<&VolumeBody>,
        body: &VolumeBody,
        at: u64,
    ) -> Result<DiffRun, TransactionStop> {
        let base = base.filter(|base| at < base.blocks);
        let limit = base.map_or(body.blocks, |base| base.blocks.min(body.blocks));
        let (map, parent, reach) = (Pointer::NONE, Pointer::NONE, 0);
        let nothing = VolumeBody { map, parent, reach, ..*body };
        let mut mine = DiffCursor::new(body);
        let mut theirs = DiffCursor::new(base.unwrap_or(&nothing));
        loop {
            // Nodes are never changed in place once shared, so equal pointers mean equal subtrees.
            if mine.pointer == theirs.pointer && mine.parent == theirs.parent {
                let end = mine.bounds.end.min(theirs.bounds.end).min(limit);
                return Ok(DiffRun { end, changed: None });
            }
            self.load_cursor_page(&mut mine)?;
            self.load_cursor_page(&mut theirs)?;
            let level = mine.level().max(theirs.level());
            if level == 0 {
                break;
            }
            // Only the higher one descends, so that both cursors compare nodes of the same level.
            for stand in [&mut mine, &mut theirs] {
                if stand.level() == level
                    && let Some(child) = stand.child(at)
                {
                    *stand = child;
                }
            }
        }
        let ((here, end), (there, other_end)) = (mine.read_source(at), theirs.read_source(at));
        let is_same =
            here == there && (here != ReadSource::Parent || mine.parent.0 == theirs.parent.0);
        let changed = (!is_same).then_some(here);
        Ok(DiffRun { end: end.min(other_end).min(limit), changed })
    }

    fn load_cursor_page(&mut self, stand: &mut DiffCursor) -> Result<(), TransactionStop> {
        if stand.page.is_none() && !stand.pointer.is_null() {
            let page = self.load_node(&stand.tree, stand.pointer, stand.height, &stand.bounds)?;
            stand.page = Some(page);
        }
        Ok(())
    }
}
