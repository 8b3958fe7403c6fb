//! Lookup in copy-on-write trees of runs.
//!
//! ```text
//!   inner:   | key 0, child | key 1, child | …     child i has the keys from key i up to key i + 1
//!   leaf:    | key, value, length | …              runs that do not overlap
//! ```
//!
//! A node that is shared, or that an earlier transaction has written, is never changed but copied. Leaves
//! of a volume's map are split at multiples of its cluster size. So all mapped blocks of one cluster are
//! in one leaf, and one lookup determines whether a cluster has other users.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Corruption, CorruptionKind};
use crate::format::{BlockKind, Page, Pointer, Record};
use crate::metadata::{Metadata, TransactionStop};

/// Properties of a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeDescriptor {
    pub(crate) kind: BlockKind,
    /// Number of the volume that it belongs to; zero for a tree of the pool.
    pub(crate) owner: u64,
    /// Leaves are split at multiples of this.
    pub(crate) unit: u64,
    /// Whether mapped blocks are never overwritten.
    pub(crate) keeps: bool,
}

/// A leaf, and the state of the path to it.
#[derive(Clone, Debug)]
pub(crate) struct LeafPath {
    pub(crate) page: Arc<Page>,
    /// Range of keys that it covers.
    pub(crate) bounds: Range<u64>,
    /// Whether it, or a node above it, belongs to several trees, or may do so again after a power loss.
    pub(crate) is_shared: bool,
}

/// All keys.
pub(crate) const ALL: Range<u64> = 0..u64::MAX;

impl TreeDescriptor {
    /// A tree that exists once per pool.
    pub(crate) const fn pool_tree(kind: BlockKind) -> Self {
        Self { kind, owner: 0, unit: 1, keeps: false }
    }

    /// Blocks of the pool that a run of a map occupies: all blocks of every cluster it touches, and none
    /// if it is a hole.
    pub(crate) const fn occupied_clusters(&self, run: &Record) -> Range<u64> {
        if run.is_hole() {
            return 0..0;
        }
        let start = run.first_address() / self.unit * self.unit;
        start..(run.first_address() + run.extra).next_multiple_of(self.unit)
    }

    /// Whether nodes may belong to several trees.
    pub(crate) const fn can_share_nodes(&self) -> bool {
        matches!(self.kind, BlockKind::Map | BlockKind::Checksums)
    }
}

impl Metadata {
    /// The leaf that covers a key; `None` if the tree is empty.
    pub(crate) fn find_leaf(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
        key: u64,
    ) -> Result<Option<LeafPath>, TransactionStop> {
        self.leaf_and_sharing(tree, root, key, false)
    }

    /// Same, and whether it is shared. Without `wants_sharing`, that is always false.
    pub(crate) fn leaf_and_sharing(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
        key: u64,
        wants_sharing: bool,
    ) -> Result<Option<LeafPath>, TransactionStop> {
        if root.is_null() {
            return Ok(None);
        }
        let (mut pointer, mut bounds, mut level, mut is_shared) = (root, ALL, None, false);
        loop {
            let page = self.load_node(tree, pointer, level, &bounds)?;
            if wants_sharing && !is_shared {
                let at = pointer.address;
                is_shared = self.refcount(at)? > 1 || self.space.has_undurable_decrement(at);
            }
            if page.level() == 0 {
                return Ok(Some(LeafPath { page, bounds, is_shared }));
            }
            let index = child_index(page.records(), key);
            bounds = child_bounds(page.records(), index, &bounds);
            pointer = page.records()[index].child();
            level = Some(page.level() - 1);
        }
    }

    /// A node, whose keys must be within `bounds`.
    pub(crate) fn load_node(
        &mut self,
        tree: &TreeDescriptor,
        pointer: Pointer,
        level: Option<u8>,
        bounds: &Range<u64>,
    ) -> Result<Arc<Page>, TransactionStop> {
        let page = self.load_page(pointer, tree.kind, level)?;
        let records = page.records();
        let end = |record: &Record| match page.level() {
            0 => tree.kind.record_end_key(record).unwrap_or(u64::MAX),
            _ => record.key + 1,
        };
        let begins = records.first().is_none_or(|record| record.key >= bounds.start);
        if begins && records.last().is_none_or(|record| end(record) <= bounds.end) {
            return Ok(page);
        }
        let (address, owner) = (pointer.address, page.owner);
        Err(Corruption { address, kind: Some(tree.kind), owner, flaw: CorruptionKind::Bounds }
            .into())
    }

    /// Level of a tree's root; zero if it is empty.
    pub(crate) fn height(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
    ) -> Result<u8, TransactionStop> {
        if root.is_null() { Ok(0) } else { Ok(self.load_page(root, tree.kind, None)?.level()) }
    }

    /// The first run that ends after `key`.
    pub(crate) fn next_run(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
        key: u64,
    ) -> Result<Option<Record>, TransactionStop> {
        let mut at = key;
        while let Some(leaf) = self.find_leaf(tree, root, at)? {
            let records = leaf.page.records();
            let ends =
                |record: &Record| tree.kind.record_end_key(record).is_some_and(|end| end <= key);
            if let Some(run) = records.get(records.partition_point(ends)) {
                return Ok(Some(*run));
            }
            if leaf.bounds.end == ALL.end {
                break;
            }
            at = leaf.bounds.end;
        }
        Ok(None)
    }
}

/// Index of the child of an inner node that covers a key.
pub(crate) fn child_index(records: &[Record], key: u64) -> usize {
    records.partition_point(|record| record.key <= key).saturating_sub(1)
}

/// Range of keys that a child of an inner node covers.
pub(crate) fn child_bounds(records: &[Record], index: usize, bounds: &Range<u64>) -> Range<u64> {
    let start = if index == 0 { bounds.start } else { records[index].key };
    start..records.get(index + 1).map_or(bounds.end, |next| next.key)
}
