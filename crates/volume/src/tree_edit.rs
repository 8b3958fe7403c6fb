//! Editing of copy-on-write trees of runs, one leaf at a time.
//!
//! On the way down, every node is made exclusive to the tree and, if it is nearly full, split, so that no
//! split propagates upward. An empty node is removed, and so is a root with a single child.

mod punch_hole;
mod unwritten;

use std::ops::Range;

use crate::error::{Corruption, CorruptionKind};
use crate::format::{BlockKind, LEVEL_MAX, Page, PageBody, Pointer, RECORDS_MAX, Record};
use crate::metadata::{Metadata, TransactionStop};
use crate::ranges::{RangeSet, RefcountDeltas};
use crate::tree::{ALL, TreeDescriptor, child_bounds, child_index};
pub(crate) use unwritten::MapDelta;
use unwritten::map_delta;

/// Split threshold: one change adds at most two records to a leaf, and one more when it is split.
pub(crate) const FULL: usize = RECORDS_MAX - 3;

/// Progress and space delta of an edit.
pub(crate) type TreeEditResult = (u64, MapDelta);

/// Result of editing the records of a leaf.
struct LeafEdit {
    /// Key up to which it was edited.
    end: u64,
    removed: Vec<Record>,
    added: Vec<Record>,
}

impl Metadata {
    /// Replaces the contents of a key range within one leaf: by `line`, cut to fit, or by nothing.
    /// Returns the key reached.
    pub(crate) fn replace_range_in_leaf(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        range: Range<u64>,
        line: Option<Record>,
    ) -> Result<TreeEditResult, TransactionStop> {
        if root.is_null() {
            return self.create_first_leaf(tree, root, range, line);
        }
        *root = self.make_node_exclusive(tree, *root, None, &ALL)?;
        if self.node_records(*root)?.len() > self.full {
            self.grow_root(tree, root)?;
        }
        let mut edit = |books: &mut Self, leaf: Pointer, end: u64| {
            let range = range.start..range.end.min(end);
            let (removed, added) = books.splice_leaf(leaf.address, tree.kind, &range, line)?;
            Ok(LeafEdit { end: range.end, removed, added })
        };
        let changed = self.replace_in_subtree(tree, *root, &ALL, range.start, &mut edit)?;
        self.shrink_root(tree, root)?;
        Ok(changed)
    }

    /// Inserts records with ascending keys, not necessarily adjacent, as many as fit into one leaf, at
    /// least one. Returns their number. For trees whose records are not runs.
    pub(crate) fn insert_records(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        node_records_mut: &[Record],
    ) -> Result<usize, TransactionStop> {
        let Some(first) = node_records_mut.first() else { return Ok(0) };
        if root.is_null() {
            self.create_first_leaf(tree, root, first.key..first.key + 1, Some(*first))?;
            return Ok(1);
        }
        *root = self.make_node_exclusive(tree, *root, None, &ALL)?;
        if self.node_records(*root)?.len() > self.full {
            self.grow_root(tree, root)?;
        }
        let (full, mut done) = (self.full, 0);
        let mut edit = |books: &mut Self, leaf: Pointer, end: u64| {
            let records = books.node_records_mut(leaf)?;
            for line in node_records_mut.iter().take_while(|line| line.key < end) {
                let at = records.partition_point(|record| record.key < line.key);
                let is_there = records.get(at).is_some_and(|record| record.key == line.key);
                if is_there {
                    records[at] = *line;
                // The first record always fits: a node has space for it above the split limit.
                } else if records.len() > full && done > 0 {
                    break;
                } else {
                    records.insert(at, *line);
                }
                done += 1;
            }
            Ok(LeafEdit { end, removed: Vec::new(), added: Vec::new() })
        };
        self.replace_in_subtree(tree, *root, &ALL, first.key, &mut edit)?;
        Ok(done)
    }

    /// Creates the first leaf of an empty tree.
    fn create_first_leaf(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        range: Range<u64>,
        line: Option<Record>,
    ) -> Result<TreeEditResult, TransactionStop> {
        let Some(line) = line else { return Ok((range.end, MapDelta::default())) };
        let mut records = Vec::new();
        let RecordReplacement { removed, added, .. } =
            replace_records(&mut records, tree.kind, &range, Some(line));
        let gain = self.update_block_counts(tree, &removed, &added);
        *root = self.create_page(tree.kind, tree.owner, PageBody::Node { level: 0, records })?;
        Ok((range.end, gain))
    }

    /// Puts a new root above a full one.
    fn grow_root(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
    ) -> Result<(), TransactionStop> {
        let page = self.load_node(tree, *root, None, &ALL)?;
        let level = page.level() + 1;
        if level > LEVEL_MAX {
            return Err(corrupt_node(tree, *root, CorruptionKind::Contents));
        }
        let records = vec![child_record(0, *root)];
        let above = self.create_page(tree.kind, tree.owner, PageBody::Node { level, records })?;
        self.split_child(tree, above, 0)?;
        *root = above;
        Ok(())
    }

    fn replace_in_subtree(
        &mut self,
        tree: &TreeDescriptor,
        pointer: Pointer,
        bounds: &Range<u64>,
        at: u64,
        edit: &mut dyn FnMut(&mut Self, Pointer, u64) -> Result<LeafEdit, TransactionStop>,
    ) -> Result<TreeEditResult, TransactionStop> {
        let page = self.load_node(tree, pointer, None, bounds)?;
        if page.level() == 0 {
            // With another reference, the edit would copy the page.
            drop(page);
            let LeafEdit { end, removed, added } = edit(self, pointer, bounds.end)?;
            return Ok((end, self.update_block_counts(tree, &removed, &added)));
        }
        let (index, inner) = self.make_path_exclusive(tree, pointer, bounds, at)?;
        let child = self.node_records(pointer)?[index].child();
        let changed = self.replace_in_subtree(tree, child, &inner, at, edit)?;
        self.drop_child_if_empty(pointer, index)?;
        Ok(changed)
    }

    /// Removes the contents of a range within one leaf. If the `whole` tree is freed, it may also release
    /// a shared subtree at once; the mapped blocks are then not counted.
    pub(crate) fn clear_range_in_leaf(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
        range: &Range<u64>,
        whole: bool,
    ) -> Result<TreeEditResult, TransactionStop> {
        let first = self.next_run(tree, *root, range.start)?;
        let Some(first) = first.filter(|run| run.key < range.end) else {
            return Ok((range.end, MapDelta::default()));
        };
        if whole && self.refcount(root.address)? > 1 {
            self.drop_references(root.address..root.address + 1);
            *root = Pointer::NONE;
            return Ok((range.end, MapDelta::default()));
        }
        *root = self.make_node_exclusive(tree, *root, None, &ALL)?;
        if self.node_records(*root)?.len() > self.full {
            self.grow_root(tree, root)?;
        }
        let at = first.key.max(range.start);
        let changed = self.clear_in_subtree(tree, *root, &ALL, range, at, whole)?;
        self.shrink_root(tree, root)?;
        Ok(changed)
    }

    fn clear_in_subtree(
        &mut self,
        tree: &TreeDescriptor,
        pointer: Pointer,
        bounds: &Range<u64>,
        range: &Range<u64>,
        at: u64,
        whole: bool,
    ) -> Result<TreeEditResult, TransactionStop> {
        let page = self.load_node(tree, pointer, None, bounds)?;
        if page.level() == 0 {
            let range = range.start.max(bounds.start)..range.end.min(bounds.end);
            let range =
                range.start..end_key_after_freeing(tree, page.records(), &range, self.step_blocks);
            let RecordReplacement { removed, added, .. } =
                replace_records(self.node_records_mut(pointer)?, tree.kind, &range, None);
            return Ok((range.end, self.update_block_counts(tree, &removed, &added)));
        }
        let index = child_index(page.records(), at);
        let inner = child_bounds(page.records(), index, bounds);
        let is_covered = range.start <= inner.start && inner.end <= range.end;
        if is_covered && (page.level() == 1 || whole) {
            let child = page.records()[index].child();
            let is_shared = self.refcount(child.address)? > 1;
            if is_shared
                || (page.level() == 1 && self.can_free_leaf_at_once(tree, child, &inner)?)
            {
                let gain = self.drop_child(tree, &page, index, is_shared, &inner)?;
                self.node_records_mut(pointer)?.remove(index);
                return Ok((inner.end, gain));
            }
        }
        let (index, inner) = self.make_path_exclusive(tree, pointer, bounds, at)?;
        let child = self.node_records(pointer)?[index].child();
        let changed = self.clear_in_subtree(tree, child, &inner, range, at, whole)?;
        self.drop_child_if_empty(pointer, index)?;
        Ok(changed)
    }

    /// Whether a leaf may be released as a whole.
    fn can_free_leaf_at_once(
        &mut self,
        tree: &TreeDescriptor,
        leaf: Pointer,
        bounds: &Range<u64>,
    ) -> Result<bool, TransactionStop> {
        let leaf = self.load_node(tree, leaf, Some(0), bounds)?;
        Ok(end_key_after_freeing(tree, leaf.records(), bounds, self.step_blocks) == bounds.end)
    }

    /// Releases a child with everything below it: a shared one, or a leaf.
    fn drop_child(
        &mut self,
        tree: &TreeDescriptor,
        parent: &Page,
        index: usize,
        is_shared: bool,
        bounds: &Range<u64>,
    ) -> Result<MapDelta, TransactionStop> {
        let child = parent.records()[index].child();
        if parent.level() > 1 {
            self.drop_references(child.address..child.address + 1);
            return Ok(MapDelta::default());
        }
        let leaf = self.load_node(tree, child, Some(0), bounds)?;
        if is_shared {
            self.drop_references(child.address..child.address + 1);
        } else {
            leaf.records()
                .iter()
                .for_each(|run| self.drop_references(referenced_blocks(tree, &leaf, run)));
            self.free_page(child.address);
        }
        Ok(map_delta(tree, leaf.records(), &[]))
    }

    /// Makes a node exclusive to the tree: unshared, and of this transaction.
    fn make_node_exclusive(
        &mut self,
        tree: &TreeDescriptor,
        pointer: Pointer,
        level: Option<u8>,
        bounds: &Range<u64>,
    ) -> Result<Pointer, TransactionStop> {
        let page = self.load_node(tree, pointer, level, bounds)?;
        let count = if tree.can_share_nodes() { self.refcount(pointer.address)? } else { 1 };
        match count {
            0 => Err(corrupt_node(tree, pointer, CorruptionKind::Count)),
            1 if page.generation == self.generation => Ok(pointer),
            1 => {
                let copy = self.create_page(tree.kind, tree.owner, page.body.clone())?;
                self.free_page(pointer.address);
                if self.space.has_undurable_decrement(pointer.address) {
                    // Blocks that another tree frees with this node are referenced by the copy as well.
                    let children = page.records().iter();
                    children.for_each(|line| {
                        self.space
                            .note_dereference(self.generation, referenced_blocks(tree, &page, line))
                    });
                }
                Ok(copy)
            }
            _ => {
                let copy = self.create_page(tree.kind, tree.owner, page.body.clone())?;
                self.add_references(pointer.address..pointer.address + 1, -1);
                self.add_child_references(tree, &page);
                Ok(copy)
            }
        }
    }

    /// Increments the counts of everything referenced by a node that was copied.
    fn add_child_references(&mut self, tree: &TreeDescriptor, page: &Page) {
        page.records()
            .iter()
            .for_each(|line| self.add_references(referenced_blocks(tree, page, line), 1));
    }

    /// Drops a tree's reference to blocks.
    fn drop_references(&mut self, range: Range<u64>) {
        self.space.note_dereference(self.generation, range.clone());
        self.add_references(range, -1);
    }

    /// Makes the child that contains a key exclusive to the tree, and splits it if it is nearly full,
    /// because a run may become two. Returns the child that contains the key then, and its bounds.
    fn make_path_exclusive(
        &mut self,
        tree: &TreeDescriptor,
        parent: Pointer,
        bounds: &Range<u64>,
        key: u64,
    ) -> Result<(usize, Range<u64>), TransactionStop> {
        let index = child_index(self.node_records(parent)?, key);
        self.make_child_exclusive(tree, parent, index, bounds)?;
        let child = self.node_records(parent)?[index].child();
        if self.node_records(child)?.len() > self.full {
            self.split_child(tree, parent, index)?;
        }
        let records = self.node_records(parent)?;
        let index = child_index(records, key);
        Ok((index, child_bounds(records, index, bounds)))
    }

    fn make_child_exclusive(
        &mut self,
        tree: &TreeDescriptor,
        parent: Pointer,
        index: usize,
        bounds: &Range<u64>,
    ) -> Result<(), TransactionStop> {
        let page = self.load_node(tree, parent, None, bounds)?;
        let Record { key, .. } = page.records()[index];
        let child = page.records()[index].child();
        let inner = child_bounds(page.records(), index, bounds);
        let own = self.make_node_exclusive(tree, child, Some(page.level() - 1), &inner)?;
        if own != child {
            self.node_records_mut(parent)?[index] = child_record(key, own);
        }
        Ok(())
    }

    /// Splits an exclusive child in two.
    fn split_child(
        &mut self,
        tree: &TreeDescriptor,
        parent: Pointer,
        index: usize,
    ) -> Result<(), TransactionStop> {
        let child = self.node_records(parent)?[index].child();
        let page = self.load_page(child, tree.kind, None)?;
        let (level, records) = (page.level(), page.records());
        let middle = records[records.len() / 2].key;
        let parting = if level == 0 { middle / tree.unit * tree.unit } else { middle };
        let at = records.partition_point(|record| record.key < parting);
        if at == 0 {
            // The whole leaf is in one cluster, which has fewer blocks than a leaf has records.
            return Ok(());
        }
        let (mut left, mut right) = (records[..at].to_vec(), records[at..].to_vec());
        if let Some(last) = left.last_mut().filter(|_| level == 0 && tree.kind.has_run_records())
            && last.key + last.extra > parting
        {
            right.insert(0, rest_of_run(tree.kind, last, parting));
            last.extra = parting - last.key;
        }
        // The first child also contains keys below the one in its parent.
        let first = left.first().map_or(0, |record| record.key);
        let body = PageBody::Node { level, records: right };
        let right = self.create_page(tree.kind, tree.owner, body)?;
        *self.node_records_mut(child)? = left;
        let lines = self.node_records_mut(parent)?;
        lines[index].key = lines[index].key.min(first);
        lines.insert(index + 1, child_record(parting, right));
        Ok(())
    }

    fn drop_child_if_empty(
        &mut self,
        parent: Pointer,
        index: usize,
    ) -> Result<(), TransactionStop> {
        let child = self.node_records(parent)?[index].child();
        if self.node_records(child)?.is_empty() {
            self.free_page(child.address);
            self.node_records_mut(parent)?.remove(index);
        }
        Ok(())
    }

    /// Removes an empty root, or replaces a root by its single child.
    fn shrink_root(
        &mut self,
        tree: &TreeDescriptor,
        root: &mut Pointer,
    ) -> Result<(), TransactionStop> {
        let page = self.load_page(*root, tree.kind, None)?;
        let below = match page.records() {
            [] => Pointer::NONE,
            [only] if page.level() > 0 => only.child(),
            _ => return Ok(()),
        };
        self.free_page(root.address);
        *root = below;
        Ok(())
    }

    /// Updates data block counts after an edit of a leaf. Returns the map's delta.
    fn update_block_counts(
        &mut self,
        tree: &TreeDescriptor,
        removed: &[Record],
        added: &[Record],
    ) -> MapDelta {
        if tree.kind != BlockKind::Map {
            return MapDelta::default();
        }
        let mut deltas = RefcountDeltas::default();
        removed.iter().for_each(|run| deltas.add_delta(tree.occupied_clusters(run), -1));
        added.iter().for_each(|run| deltas.add_delta(tree.occupied_clusters(run), 1));
        let changes = deltas.iter().filter(|(_, delta)| *delta != 0);
        changes.for_each(|(range, delta)| self.add_references(range, delta));
        for left in dropped_clusters(tree, removed, added) {
            self.space.note_dereference(self.generation, left);
        }
        if tree.keeps {
            let mut left = RangeSet::default();
            let lies = |run: &&Record| !run.is_hole();
            let place = |run: &Record| run.value..run.value + run.extra;
            removed.iter().filter(lies).for_each(|run| left.insert(place(run)));
            added.iter().filter(lies).for_each(|run| left.remove(place(run)));
            left.iter().for_each(|range| self.space.note_unmapped(self.generation, range));
        }
        map_delta(tree, removed, added)
    }

    /// Records of a page created by this transaction.
    fn node_records(&self, pointer: Pointer) -> Result<&[Record], TransactionStop> {
        let damage = Corruption {
            address: pointer.address,
            kind: None,
            owner: 0,
            flaw: CorruptionKind::Bounds,
        };
        Ok(self.dirty.get(&pointer.address).ok_or(damage)?.records())
    }

    /// Same, mutable.
    fn node_records_mut(&mut self, pointer: Pointer) -> Result<&mut Vec<Record>, TransactionStop> {
        let address = pointer.address;
        let flaw = CorruptionKind::Contents;
        let damage = Corruption { address, kind: None, owner: 0, flaw };
        self.page_mut(address)?.body.records_mut().ok_or(damage.into())
    }
}

/// Records that took the place of others in a leaf.
pub(crate) struct RecordReplacement {
    /// Index of the first.
    pub(crate) at: usize,
    pub(crate) removed: Vec<Record>,
    pub(crate) added: Vec<Record>,
}

/// Replaces the contents of a range in a leaf, and joins adjacent runs.
pub(crate) fn replace_records(
    records: &mut Vec<Record>,
    kind: BlockKind,
    range: &Range<u64>,
    line: Option<Record>,
) -> RecordReplacement {
    let end = |record: &Record| kind.record_end_key(record).unwrap_or(u64::MAX);
    // The records that overlap the range are replaced: by their parts outside of it, and by the new
    // record.
    let mut first = records.partition_point(|record| end(record) <= range.start);
    let mut last = records.partition_point(|record| record.key < range.end).max(first);
    let mut fresh = Vec::with_capacity(5);
    if let Some(left) = records[first..last].first().filter(|left| left.key < range.start) {
        fresh.push(Record { extra: range.start - left.key, ..*left });
    }
    if let Some(line) = line {
        let extra = if kind.has_run_records() { range.end - range.start } else { line.extra };
        fresh.push(Record { key: range.start, extra, ..line });
    }
    if let Some(right) = records[first..last].last().filter(|right| end(right) > range.end) {
        fresh.push(rest_of_run(kind, right, range.end));
    }
    // Neighbors that continue the replacement are included, so that they merge with it.
    if let (Some(before), Some(head)) = (first.checked_sub(1), fresh.first())
        && merge_runs(kind, &records[before], head).is_some()
    {
        first = before;
        fresh.insert(0, records[before]);
    }
    if let (Some(after), Some(tail)) = (records.get(last), fresh.last())
        && merge_runs(kind, tail, after).is_some()
    {
        fresh.push(*after);
        last += 1;
    }
    let mut joined: Vec<Record> = Vec::with_capacity(fresh.len());
    for record in fresh {
        match joined
            .last_mut()
            .and_then(|before| Some((merge_runs(kind, before, &record)?, before)))
        {
            Some((both, before)) => *before = both,
            None => joined.push(record),
        }
    }
    let removed = records.splice(first..last, joined.iter().copied()).collect();
    RecordReplacement { at: first, removed, added: joined }
}

/// Key in a range up to which `blocks` blocks are freed.
fn end_key_after_freeing(
    tree: &TreeDescriptor,
    records: &[Record],
    range: &Range<u64>,
    blocks: u64,
) -> u64 {
    if tree.kind != BlockKind::Map {
        return range.end;
    }
    let mut left = blocks;
    for run in records.iter().filter(|run| run.key < range.end) {
        let end = run.key.saturating_add(run.extra).min(range.end);
        let here = end.saturating_sub(run.key.max(range.start));
        if here > left {
            return end - (here - left);
        }
        left -= here;
    }
    range.end
}

/// Joins two runs, if they are contiguous.
fn merge_runs(kind: BlockKind, left: &Record, right: &Record) -> Option<Record> {
    let follows = kind.has_run_records() && left.key + left.extra == right.key;
    let fits = match kind {
        BlockKind::Map => left.value + left.extra == right.value,
        _ => left.value == right.value,
    };
    (follows && fits).then(|| Record { extra: left.extra + right.extra, ..*left })
}

/// Remainder of a run from `key` on.
pub(crate) fn rest_of_run(kind: BlockKind, run: &Record, key: u64) -> Record {
    let off = key - run.key;
    let value = if kind == BlockKind::Map { run.value + off } else { run.value };
    Record { key, value, extra: run.extra - off }
}

/// Blocks referenced by a record of a node.
fn referenced_blocks(tree: &TreeDescriptor, page: &Page, line: &Record) -> Range<u64> {
    match (page.level(), tree.kind) {
        (0, BlockKind::Map) => tree.occupied_clusters(line),
        (0, _) => 0..0,
        _ => line.value..line.value + 1,
    }
}

/// Clusters referenced by removed records and by no added one.
fn dropped_clusters(
    tree: &TreeDescriptor,
    removed: &[Record],
    added: &[Record],
) -> Vec<Range<u64>> {
    let mut left = RangeSet::default();
    removed.iter().for_each(|run| left.insert(tree.occupied_clusters(run)));
    added.iter().for_each(|run| left.remove(tree.occupied_clusters(run)));
    left.iter().collect()
}

const fn child_record(key: u64, child: Pointer) -> Record {
    Record { key, value: child.address, extra: child.generation }
}

fn corrupt_node(tree: &TreeDescriptor, pointer: Pointer, flaw: CorruptionKind) -> TransactionStop {
    let (address, owner) = (pointer.address, tree.owner);
    Corruption { address, kind: Some(tree.kind), owner, flaw }.into()
}
