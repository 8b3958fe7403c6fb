//! Unwritten extents: runs whose space is allocated to the volume, and which read as zeroes.
//!
//! ```text
//!   written: | key 0, at 64, 8 |          blocks 2 to 4 are made unwritten:
//!            | key 0, at 64, 2 | key 2, at 66 + UNWRITTEN, 3 | key 5, at 69, 3 |
//! ```
//!
//! Nothing is moved or freed: an unwritten block keeps its address.

use std::ops::Range;

use super::{LeafEdit, TreeEditResult, end_key_after_freeing, merge_runs, rest_of_run};
use crate::format::{BlockKind, Pointer, Record, UNWRITTEN, VolumeBody};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::{ALL, TreeDescriptor};

/// Change of a map's block counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MapDelta {
    /// Written blocks gained.
    pub(crate) mapped: i64,
    /// Unwritten blocks gained.
    pub(crate) spare: i64,
}

impl VolumeBody {
    /// Applies a change of its map.
    pub(crate) fn apply_map_delta(&mut self, gain: MapDelta) {
        self.mapped = self.mapped.saturating_add_signed(gain.mapped);
        self.spare = self.spare.saturating_add_signed(gain.spare);
    }
}

impl Metadata {
    /// Makes the written blocks of a range unwritten, within one leaf. Returns the key reached.
    pub(crate) fn make_unwritten(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        range: &Range<u64>,
    ) -> Result<TreeEditResult, TransactionStop> {
        let Some(leaf) = self.find_leaf(tree, *root, range.start)? else {
            return Ok((range.end, MapDelta::default()));
        };
        let end = range.end.min(leaf.bounds.end);
        let is_wanted =
            |run: &&Record| run.is_written() && run.key < end && run.key + run.extra > range.start;
        let Some(first) = leaf.page.records().iter().find(is_wanted) else {
            return Ok((end, MapDelta::default()));
        };
        let first = first.key.max(range.start);
        *root = self.make_node_exclusive(tree, *root, None, &ALL)?;
        if self.node_records(*root)?.len() > self.full {
            self.grow_root(tree, root)?;
        }
        let step_blocks = self.step_blocks;
        let mut edit = |books: &mut Self, leaf: Pointer, end: u64| {
            let lines = books.node_records_mut(leaf)?;
            let range = first..range.end.min(end);
            let range = range.start..end_key_after_freeing(tree, lines, &range, step_blocks);
            let (removed, added) = make_runs_unwritten(lines, &range);
            Ok(LeafEdit { end: range.end, removed, added })
        };
        self.replace_in_subtree(tree, *root, &ALL, first, &mut edit)
    }
}

/// Change of a map by removed and added runs.
pub(super) fn map_delta(tree: &TreeDescriptor, removed: &[Record], added: &[Record]) -> MapDelta {
    if tree.kind != BlockKind::Map {
        return MapDelta::default();
    }
    let blocks = |runs: &[Record], is_spare: bool| {
        let counts = |run: &&Record| run.is_unwritten() == is_spare && !run.is_hole();
        let sum: u64 = runs.iter().filter(counts).map(|run| run.extra).sum();
        i64::try_from(sum).unwrap_or(i64::MAX)
    };
    let gained = |is_spare| blocks(added, is_spare).saturating_sub(blocks(removed, is_spare));
    MapDelta { mapped: gained(false), spare: gained(true) }
}

/// Makes the runs of a leaf unwritten in a range, and joins contiguous runs. Returns the records removed
/// and added.
fn make_runs_unwritten(
    records: &mut Vec<Record>,
    range: &Range<u64>,
) -> (Vec<Record>, Vec<Record>) {
    let first = records.partition_point(|run| run.key + run.extra <= range.start);
    let last = records.partition_point(|run| run.key < range.end).max(first);
    // The neighbors may be contiguous.
    let (first, last) = (first.saturating_sub(1), (last + 1).min(records.len()));
    let mut fresh: Vec<Record> = Vec::with_capacity(last - first + 2);
    for run in &records[first..last] {
        let (start, end) = (run.key.max(range.start), (run.key + run.extra).min(range.end));
        if !run.is_written() || start >= end {
            push_or_merge(&mut fresh, *run);
            continue;
        }
        if run.key < start {
            push_or_merge(&mut fresh, Record { extra: start - run.key, ..*run });
        }
        let at = rest_of_run(BlockKind::Map, run, start).value;
        push_or_merge(&mut fresh, Record { key: start, value: at | UNWRITTEN, extra: end - start });
        if run.key + run.extra > end {
            push_or_merge(&mut fresh, rest_of_run(BlockKind::Map, run, end));
        }
    }
    (records.splice(first..last, fresh.iter().copied()).collect(), fresh)
}

fn push_or_merge(runs: &mut Vec<Record>, run: Record) {
    match runs.last_mut().and_then(|last| Some((merge_runs(BlockKind::Map, last, &run)?, last))) {
        Some((both, last)) => *last = both,
        None => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{UNWRITTEN, make_runs_unwritten};
    use crate::format::Record;

    #[test]
    fn unwritten_blocks_keep_their_addresses() {
        let mut random = Random::new(6);
        for _ in 0..2_000 {
            let (mut runs, mut key) = (Vec::new(), 0);
            while key < 64 {
                key += random.below(4);
                let extra = 1 + random.below(9);
                let spare = if random.chance(1, 3) { UNWRITTEN } else { 0 };
                // Sometimes a run that continues the previous one.
                let value = key + 7 + 1000 * random.below(2);
                runs.push(Record { key, value: value | spare, extra });
                key += extra;
            }
            let place = |runs: &[Record], block: u64| {
                let run =
                    runs.iter().find(|run| (run.key..run.key + run.extra).contains(&block))?;
                Some((run.first_address() + (block - run.key), run.is_unwritten()))
            };
            let start = random.below(70);
            let range = start..start + 1 + random.below(20);
            let before = runs.clone();
            let (removed, added) = make_runs_unwritten(&mut runs, &range);
            for block in 0..96 {
                let expected = place(&before, block);
                let expected = expected.map(|(at, was)| (at, was || range.contains(&block)));
                assert_eq!(place(&runs, block), expected, "{block} of {before:?} in {range:?}");
            }
            assert!(runs.len() <= before.len() + 2, "a leaf has room for them");
            let blocks = |runs: &[Record]| runs.iter().map(|run| run.extra).sum::<u64>();
            assert_eq!(blocks(&removed), blocks(&added));
            let is_joined =
                |pair: &[Record]| super::merge_runs(super::BlockKind::Map, &pair[0], &pair[1]);
            let touched = runs.windows(2).filter(|pair| range.contains(&pair[1].key));
            assert!(touched.clone().all(|pair| is_joined(pair).is_none()), "{runs:?}");
        }
    }
}
