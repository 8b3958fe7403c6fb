//! Space usage of a volume, and the part of it that is shared.
//!
//! Shared subtrees are not read: of the two trees of a volume, only nodes exclusive to it are read, and
//! of the space map only the counts of the clusters under them. The scan of a clone that was never
//! written to ends at the roots, whatever its size.

use std::sync::Arc;

use crate::format::{BlockKind, Page, Pointer, VolumeBody};
use crate::metadata::{Metadata, TransactionStop};
use crate::ranges::{RangeSet, RefcountDeltas};
use crate::tree::{ALL, TreeDescriptor, child_bounds, child_index};

/// Space usage of a volume, in 4 KiB blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Mapped blocks, which were written.
    pub used: u64,
    /// Number of them in clusters of the pool that another volume refers to as well.
    pub shared: u64,
    /// Blocks that its deletion would free: whole data clusters, nodes of its trees, its own block, and
    /// that of its parent.
    pub unique: u64,
    /// Unwritten blocks in exclusive clusters: a first write to one of them uses no space.
    pub reserved: u64,
    /// Blocks of clusters that it lacks, but would have if it were thick.
    pub missing: u64,
}

impl SpaceUsage {
    /// Blocks in exclusive clusters, written or unwritten: all of them if it is thick and its reservation
    /// is met.
    #[must_use]
    pub const fn exclusive_blocks(&self) -> u64 {
        self.used.saturating_sub(self.shared).saturating_add(self.reserved)
    }
}

/// Partial sums of the space usage of a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageScan {
    /// Tree being walked.
    kind: BlockKind,
    /// Next key in it.
    key: u64,
    own: ExclusiveUsage,
    unique: u64,
}

/// Contents of a volume in exclusive clusters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExclusiveUsage {
    /// Written blocks.
    pub(crate) mapped: u64,
    /// Unwritten blocks.
    pub(crate) spare: u64,
    /// Clusters of the volume that have blocks there.
    pub(crate) units: u64,
}

/// Path to a leaf, as far as it belongs to one tree only.
struct UnsharedPath {
    /// Number of its nodes that begin at the requested key, and so have not been counted before.
    nodes: u64,
    /// End of the leaf, or of the shared subtree.
    end: u64,
    leaf: Option<Arc<Page>>,
}

impl UsageScan {
    /// Initial state: only the volume's block is counted.
    pub(crate) const BEGIN: Self = Self {
        kind: BlockKind::Map,
        key: 0,
        own: ExclusiveUsage { mapped: 0, spare: 0, units: 0 },
        unique: 1,
    };

    /// The result.
    pub(crate) const fn space_usage(&self, body: &VolumeBody) -> SpaceUsage {
        self.own.space_usage(body, self.unique)
    }
}

impl ExclusiveUsage {
    /// Space usage of a volume with these exclusive blocks.
    pub(crate) const fn space_usage(&self, body: &VolumeBody, unique: u64) -> SpaceUsage {
        let Self { mapped, spare, units } = *self;
        let shared = body.mapped.saturating_sub(mapped);
        let missing = body.cluster_count().saturating_sub(units) * body.cluster_blocks();
        SpaceUsage { used: body.mapped, shared, unique, reserved: spare, missing }
    }

    /// Adds the blocks of a leaf in a set of clusters.
    pub(crate) fn add(&mut self, tree: &TreeDescriptor, set: &RangeSet, leaf: &Page) {
        // Several clusters of the pool may have blocks of one cluster of the volume.
        let mut units = RangeSet::default();
        for run in leaf.records().iter().filter(|run| !run.is_hole()) {
            let place = run.first_address()..run.first_address() + run.extra;
            let blocks = set.count_in(&place);
            if run.is_unwritten() {
                self.spare += blocks
            } else {
                self.mapped += blocks
            }
            for part in set.intersection(&place) {
                let (first, last) = (part.start - place.start, part.end - 1 - place.start);
                units.insert((run.key + first) / tree.unit..(run.key + last) / tree.unit + 1);
            }
        }
        self.units += units.blocks();
    }
}

impl Metadata {
    /// Adds up the exclusive blocks of one more leaf. Returns `None` after the last one.
    pub(crate) fn scan_next_leaf(
        &mut self,
        body: &VolumeBody,
        tally: &UsageScan,
    ) -> Result<Option<UsageScan>, TransactionStop> {
        if tally.key == ALL.end {
            if tally.kind == BlockKind::Checksums {
                return Ok(None);
            }
            let at = body.parent.address;
            let own_parent = !body.parent.is_null() && self.refcount(at)? == 1;
            let unique = tally.unique + u64::from(own_parent);
            return Ok(Some(UsageScan { kind: BlockKind::Checksums, key: 0, unique, ..*tally }));
        }
        let is_map = tally.kind == BlockKind::Map;
        let (tree, root) =
            if is_map { (body.map_tree(), body.map) } else { (body.checksum_tree(), body.sums) };
        let way = self.unshared_path(&tree, root, tally.key)?;
        let mut further = UsageScan { key: way.end, unique: tally.unique + way.nodes, ..*tally };
        if let Some(leaf) = way.leaf.filter(|_| is_map) {
            let set = self.exclusive_clusters(&tree, &leaf)?;
            further.own.add(&tree, &set, &leaf);
            further.unique += set.blocks();
        }
        Ok(Some(further))
    }

    /// The leaf that covers a key, if the path to it is not shared.
    pub(crate) fn leaf_if_unshared(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
        key: u64,
    ) -> Result<Option<Arc<Page>>, TransactionStop> {
        Ok(self.unshared_path(tree, root, key)?.leaf)
    }

    /// Descends to the leaf that covers a key, and stops at a shared node.
    fn unshared_path(
        &mut self,
        tree: &TreeDescriptor,
        root: Pointer,
        key: u64,
    ) -> Result<UnsharedPath, TransactionStop> {
        let mut way = UnsharedPath { nodes: 0, end: ALL.end, leaf: None };
        let (mut pointer, mut bounds, mut level) = (root, ALL, None);
        while !pointer.is_null() {
            way.end = bounds.end;
            if self.refcount(pointer.address)? > 1 {
                break;
            }
            way.nodes += u64::from(key == bounds.start);
            let page = self.load_node(tree, pointer, level, &bounds)?;
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

    /// The clusters that a leaf of one tree refers to, and nothing else.
    pub(crate) fn exclusive_clusters(
        &mut self,
        tree: &TreeDescriptor,
        leaf: &Page,
    ) -> Result<RangeSet, TransactionStop> {
        let mut own = RangeSet::default();
        for (range, uses) in cluster_references(tree, leaf).iter() {
            let mut at = range.start;
            while at < range.end {
                let (end, count) = self.refcount_run(at)?;
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

/// Number of references from a leaf to each cluster.
pub(crate) fn cluster_references(tree: &TreeDescriptor, leaf: &Page) -> RefcountDeltas {
    let mut uses = RefcountDeltas::default();
    leaf.records().iter().for_each(|run| uses.add_delta(tree.occupied_clusters(run), 1));
    uses
}
