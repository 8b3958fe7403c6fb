//! What differs between two volumes, from their maps alone.
//!
//! Data that one volume refers to are never written over while another does, so blocks of two
//! volumes that lie in the same place hold the same. Where both maps have the same node, all under
//! it is the same, and is not read.

use std::ops::Range;
use std::sync::Arc;

use crate::books::{Books, Stop};
use crate::format::{Page, Pointer, VolumeBody};
use crate::plan::Source;
use crate::tree::{ALL, Tree, child_bounds, child_index};

/// Blocks from some block on of which the maps say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Where they end.
    pub(crate) end: u64,
    /// Where they are read from, if they differ.
    pub(crate) changed: Option<Source>,
}

/// A node on the way to a key.
struct Stand {
    tree: Tree,
    pointer: Pointer,
    bounds: Range<u64>,
    /// What its level must be, if that is known.
    height: Option<u8>,
    page: Option<Arc<Page>>,
    /// What is read where nothing is mapped, and how far that reaches.
    parent: (Pointer, u64),
}

impl Stand {
    fn at_root(body: &VolumeBody) -> Self {
        let parent = (body.parent, body.reach);
        Self { tree: body.tree(), pointer: body.map, bounds: ALL, height: None, page: None, parent }
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
        Some(Self { tree: self.tree, pointer, bounds, height, page: None, parent: self.parent })
    }

    /// Where the block of a key is read from, and how far that is said by one record or the lack of one.
    fn place(&self, key: u64) -> (Source, u64) {
        let records = self.page.as_ref().map_or(&[][..], |page| page.records());
        match records.get(records.partition_point(|run| run.key + run.extra <= key)) {
            Some(run) if run.key <= key && run.is_written() => {
                (Source::Store(run.place() + (key - run.key)), run.key + run.extra)
            }
            Some(run) if run.key <= key => (Source::Nothing, run.key + run.extra),
            Some(run) => self.unmapped(key, run.key),
            None => self.unmapped(key, self.bounds.end),
        }
    }

    /// The same where nothing is mapped up to some key.
    fn unmapped(&self, key: u64, end: u64) -> (Source, u64) {
        let (_, reach) = self.parent;
        if key < reach { (Source::Parent, end.min(reach)) } else { (Source::Nothing, end) }
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
        let (map, parent, reach) = (Pointer::NONE, Pointer::NONE, 0);
        let nothing = VolumeBody { map, parent, reach, ..*body };
        let mut mine = Stand::at_root(body);
        let mut theirs = Stand::at_root(base.unwrap_or(&nothing));
        loop {
            if mine.pointer == theirs.pointer && mine.parent == theirs.parent {
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
        let is_same = here == there && (here != Source::Parent || mine.parent.0 == theirs.parent.0);
        let changed = (!is_same).then_some(here);
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
