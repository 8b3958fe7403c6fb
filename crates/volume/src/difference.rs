//! What differs between two volumes, from their maps alone.
//!
//! Data that one volume refers to are never written over while another does, so blocks of two
//! volumes that lie in the same place hold the same. Where both maps have the same node, all under
//! it is the same, and is not read.

use std::ops::Range;
use std::sync::Arc;

use crate::books::{Books, Stop};
use crate::format::{Page, Pointer, VolumeBody};
use crate::tree::{ALL, Tree, child_bounds, child_index};

/// Blocks from some block on of which the maps say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Where they end.
    pub(crate) end: u64,
    /// Whether they are mapped, if they differ.
    pub(crate) changed: Option<bool>,
}

/// A node on the way to a key.
struct Stand {
    tree: Tree,
    pointer: Pointer,
    bounds: Range<u64>,
    /// What its level must be, if that is known.
    height: Option<u8>,
    page: Option<Arc<Page>>,
}

impl Stand {
    fn at_root(body: &VolumeBody) -> Self {
        Self { tree: body.tree(), pointer: body.map, bounds: ALL, height: None, page: None }
    }

    fn level(&self) -> u8 {
        self.page.as_ref().map_or(0, |page| page.level())
    }

    /// The child that has a key.
    fn child(&self, key: u64) -> Option<Self> {
        let page = self.page.as_ref().filter(|page| page.level() > 0)?;
        let index = child_index(page.records(), key);
        let bounds = child_bounds(page.records(), index, &self.bounds);
        let pointer = page.records().get(index)?.child();
        let height = Some(page.level() - 1);
        Some(Self { tree: self.tree, pointer, bounds, height, page: None })
    }

    /// Where the block of a key lies, if it is written, and how far that is said by one record or the lack of one.
    fn place(&self, key: u64) -> (Option<u64>, u64) {
        let Some(page) = &self.page else { return (None, self.bounds.end) };
        let records = page.records();
        match records.get(records.partition_point(|run| run.key + run.extra <= key)) {
            Some(run) if run.key <= key => {
                let at = Some(run.place() + (key - run.key)).filter(|_| !run.is_spare());
                (at, run.key + run.extra)
            }
            Some(run) => (None, run.key),
            None => (None, self.bounds.end),
        }
    }
}

impl Books {
    /// What the maps of two volumes say of the blocks from `at` on; without a base, what is mapped
    /// differs from nothing. What is behind a volume's end is not mapped.
    pub(crate) fn compare_from(
        &mut self,
        base: Option<&VolumeBody>,
        body: &VolumeBody,
        at: u64,
    ) -> Result<Stretch, Stop> {
        let base = base.filter(|base| at < base.blocks);
        let limit = base.map_or(body.blocks, |base| base.blocks.min(body.blocks));
        let nothing = VolumeBody { map: Pointer::NONE, ..*body };
        let mut mine = Stand::at_root(body);
        let mut theirs = Stand::at_root(base.unwrap_or(&nothing));
        loop {
            if mine.pointer == theirs.pointer {
                let end = mine.bounds.end.min(theirs.bounds.end).min(limit);
                return Ok(Stretch { end, changed: None });
            }
            self.visit(&mut mine)?;
            self.visit(&mut theirs)?;
            let level = mine.level().max(theirs.level());
            if level == 0 {
                break;
            }
            for stand in [&mut mine, &mut theirs] {
                if stand.level() == level
                    && let Some(child) = stand.child(at)
                {
                    *stand = child;
                }
            }
        }
        let ((here, end), (there, other_end)) = (mine.place(at), theirs.place(at));
        let changed = (here != there).then_some(here.is_some());
        Ok(Stretch { end: end.min(other_end).min(limit), changed })
    }

    fn visit(&mut self, stand: &mut Stand) -> Result<(), Stop> {
        if stand.page.is_none() && !stand.pointer.is_none() {
            let page = self.node(&stand.tree, stand.pointer, stand.height, &stand.bounds)?;
            stand.page = Some(page);
        }
        Ok(())
    }
}
