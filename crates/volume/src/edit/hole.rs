//! Runs that are holes: blocks that read as zeroes where the volume's parent would be read else.
//!
//! ```text
//!   | key 0, at 64, 2 |        blocks 0 to 7 are trimmed:        | key 0, HOLE + 0, 8 |
//! ```
//!
//! A hole has no room and counts for nothing. Its value is its key, so that two that meet are joined as
//! runs are that lie together.

use std::ops::Range;

use super::{Changed, Edited, replace, step_end};
use crate::books::{Books, Stop};
use crate::edit::Gain;
use crate::format::{HOLE, Pointer, Record};
use crate::tree::{ALL, Tree};

impl Books {
    /// Has a range of a map be a hole, as far as one leaf goes. Returns where it stopped.
    pub(crate) fn punch(
        &mut self,
        tree: &Tree,
        root: &mut Pointer,
        range: &Range<u64>,
    ) -> Result<Changed, Stop> {
        let hole = |start: u64| Record { key: start, value: HOLE | start, extra: 0 };
        let Some(leaf) = self.leaf(tree, *root, range.start)? else {
            return self.splice(tree, root, range.clone(), Some(hole(range.start)));
        };
        let end = range.end.min(leaf.bounds.end);
        let covers =
            |run: &&Record| run.is_hole() && run.key <= range.start && end <= run.key + run.extra;
        if leaf.page.records().iter().any(|run| covers(&run)) {
            return Ok((end, Gain::default()));
        }
        *root = self.shadow(tree, *root, None, &ALL)?;
        if self.records(*root)?.len() > self.full {
            self.grow(tree, root)?;
        }
        let step_blocks = self.step_blocks;
        let mut edit = |lines: &mut Vec<Record>, end: u64| {
            let range = range.start..range.end.min(end);
            let range = range.start..step_end(tree, lines, &range, step_blocks);
            let line = Some(hole(range.start));
            let (removed, added) = replace(lines, tree.kind, &range, line);
            Edited { end: range.end, removed, added }
        };
        self.splice_in(tree, *root, &ALL, range.start, &mut edit)
    }
}
