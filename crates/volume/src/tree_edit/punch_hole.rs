//! Holes: runs that read as zeroes where otherwise the volume's parent would be read.
//!
//! ```text
//!   | key 0, at 64, 2 |        blocks 0 to 7 are trimmed:        | key 0, HOLE + 0, 8 |
//! ```
//!
//! A hole occupies no space and has no count. Its value is its key, so that adjacent holes are joined
//! like contiguous runs.

use std::ops::Range;

use super::{LeafEdit, RecordReplacement, TreeEditResult, end_key_after_freeing, replace_records};
use crate::format::{HOLE, Pointer, Record};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::{ALL, TreeDescriptor};
use crate::tree_edit::MapDelta;

impl Metadata {
    /// Makes a range of a map a hole, within one leaf. Returns the key reached.
    pub(crate) fn punch_hole(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        range: &Range<u64>,
    ) -> Result<TreeEditResult, TransactionStop> {
        let hole = |start: u64| Record { key: start, value: HOLE | start, extra: 0 };
        let Some(leaf) = self.find_leaf(tree, *root, range.start)? else {
            return self.replace_range_in_leaf(tree, root, range.clone(), Some(hole(range.start)));
        };
        let end = range.end.min(leaf.bounds.end);
        let covers =
            |run: &&Record| run.is_hole() && run.key <= range.start && end <= run.key + run.extra;
        if leaf.page.records().iter().any(|run| covers(&run)) {
            return Ok((end, MapDelta::default()));
        }
        *root = self.make_node_exclusive(tree, *root, None, &ALL)?;
        if self.node_records(*root)?.len() > self.full {
            self.grow_root(tree, root)?;
        }
        let step_blocks = self.step_blocks;
        let mut edit = |books: &mut Self, leaf: Pointer, end: u64| {
            let lines = books.node_records_mut(leaf)?;
            let range = range.start..range.end.min(end);
            let range = range.start..end_key_after_freeing(tree, lines, &range, step_blocks);
            let line = Some(hole(range.start));
            let RecordReplacement { removed, added, .. } =
                replace_records(lines, tree.kind, &range, line);
            Ok(LeafEdit { end: range.end, removed, added })
        };
        self.replace_in_subtree(tree, *root, &ALL, range.start, &mut edit)
    }
}
