//! Moving the blocks of a thick volume into exclusive clusters, a stretch at a time.
//!
//! ```text
//!   hole                an unwritten run in new clusters
//!   written, shared     copied to an exclusive cluster
//!   unwritten, shared   unwritten in an exclusive cluster, without a copy
//! ```
//!
//! Writes to the volume wait while a stretch of it is in progress. Trims do not: blocks that have moved
//! since they were copied are left unchanged.

use std::ops::Range;
use std::sync::Arc;

use crate::format::{Page, Record, UNWRITTEN, VolumeBody};
use crate::mapping::{MappedRun, ReadSource, WriteTarget, cluster_intersection};
use crate::metadata::{Metadata, TransactionStop};
use crate::ranges::{RangeLookup, RangeSet};
use crate::tree::{LeafPath, TreeDescriptor};

/// Next step for a thick volume.
#[derive(Debug)]
pub(crate) enum MakeExclusiveStep {
    /// Nothing to do before this block.
    Nothing(u64),
    /// Clusters must be allocated for these unmapped blocks.
    Hole(Range<u64>),
    /// These clusters lack exclusive blocks.
    Moves(Vec<ClusterCopy>),
}

/// Cluster of a volume whose blocks move into one exclusive cluster.
#[derive(Clone, Debug)]
pub(crate) struct ClusterCopy {
    /// Its number.
    pub(crate) number: u64,
    /// Target cluster of the pool; `None` until it is allocated.
    pub(crate) at: Option<u64>,
    /// Blocks to copy, and their sources.
    pub(crate) copies: Vec<MappedRun>,
}

/// State of blocks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterState {
    /// In a cluster exclusive to the volume.
    Own,
    /// Written, from this block of the pool on, in a shared cluster.
    Shared(u64),
    /// Unmapped, a hole, or unwritten in a shared cluster.
    Nowhere,
}

/// A leaf, and the clusters that only it refers to.
struct LeafWithExclusiveClusters {
    tree: TreeDescriptor,
    leaf: LeafPath,
    own: RangeSet,
}

/// Maximum number of blocks allocated in one step: 4 GiB.
const HOLE_BLOCKS_MAX: u64 = 1 << 20;

impl Metadata {
    /// Plans the next step for a thick volume from the cluster of a block on, with at most `copy_max`
    /// blocks copied.
    pub(crate) fn plan_make_exclusive(
        &mut self,
        body: &VolumeBody,
        from: u64,
        copy_max: u64,
    ) -> Result<MakeExclusiveStep, TransactionStop> {
        let unit = body.cluster_blocks();
        let from = from / unit * unit;
        if from >= body.blocks {
            return Ok(MakeExclusiveStep::Nothing(body.blocks));
        }
        let hole = |start: u64, end: u64| {
            let end = end.min(start + HOLE_BLOCKS_MAX);
            MakeExclusiveStep::Hole(
                start..if end >= body.blocks { body.blocks } else { end / unit * unit },
            )
        };
        let Some(known) = self.leaf_with_exclusive_clusters(body, from)? else {
            return Ok(hole(from, body.blocks));
        };
        let end = known.leaf.bounds.end.min(body.blocks);
        let Some((first, lies, until)) = known.first_not_exclusive(from..end) else {
            return Ok(MakeExclusiveStep::Nothing(end));
        };
        let is_hole = lies == ClusterState::Nowhere && known.is_unmapped(first);
        // A hole of at least one whole cluster is allocated in one run, without copies.
        if is_hole && first % unit == 0 && (until >= first + unit || until >= body.blocks) {
            return Ok(hole(first, until));
        }
        let mut moves = Vec::new();
        let first = first / unit;
        for number in first..(first + (copy_max / unit).max(1)).min(end.div_ceil(unit)) {
            let blocks = cluster_intersection(number, unit, &(0..body.blocks));
            let parts = known.state_runs(&blocks);
            if parts.iter().all(|(_, lies)| *lies == ClusterState::Own) {
                continue;
            }
            let home =
                self.exclusive_cluster(&known.tree, Some(&known.leaf), number * unit, &blocks)?;
            let at = if let WriteTarget::InPlace(at, _) = home { Some(at) } else { None };
            let copy = |(range, lies): &(Range<u64>, ClusterState)| match lies {
                ClusterState::Shared(at) => {
                    let blocks = range.end - range.start;
                    Some(MappedRun { block: range.start, blocks, from: ReadSource::Store(*at) })
                }
                ClusterState::Own | ClusterState::Nowhere => None,
            };
            moves.push(ClusterCopy { number, at, copies: parts.iter().filter_map(copy).collect() });
        }
        Ok(MakeExclusiveStep::Moves(moves))
    }

    /// Allocates clusters for unmapped blocks of a thick volume, as many as fit into one contiguous run.
    /// Returns the block where it stopped.
    pub(crate) fn allocate_hole(
        &mut self,
        id: u64,
        hole: &Range<u64>,
    ) -> Result<u64, TransactionStop> {
        let mut body = self.expect_volume(id)?;
        let (tree, unit) = (body.map_tree(), body.cluster_blocks());
        let units = (hole.end - hole.start).div_ceil(unit);
        let found = self.find_free_clusters(unit, units, body.owed)?;
        let end = hole.end.min(hole.start + (found.end - found.start));
        let line = Record { key: hole.start, value: found.start | UNWRITTEN, extra: 0 };
        let range = hole.start..end;
        let (end, gain) = self.replace_range_in_leaf(&tree, &mut body.map, range, Some(line))?;
        let taken = (end - hole.start).next_multiple_of(unit);
        self.space.fresh += taken;
        body.owed = body.owed.saturating_sub(taken);
        body.apply_map_delta(gain);
        self.store_volume(&body)?;
        Ok(end)
    }

    /// Maps the blocks of a cluster that are not exclusive to `at`, where their copies are. Returns
    /// whether there were any.
    pub(crate) fn map_exclusive_copy(
        &mut self,
        id: u64,
        one: &ClusterCopy,
        at: u64,
        is_new: bool,
    ) -> Result<bool, TransactionStop> {
        let mut body = self.expect_volume(id)?;
        let (tree, unit) = (body.map_tree(), body.cluster_blocks());
        let start = one.number * unit;
        let blocks = cluster_intersection(one.number, unit, &(0..body.blocks));
        let Some(known) = self.leaf_with_exclusive_clusters(&body, start)? else {
            return Ok(false);
        };
        let mut is_moved = false;
        for (range, lies) in known.state_runs(&blocks) {
            let place = at + (range.start - start);
            let value = match lies {
                ClusterState::Own => continue,
                ClusterState::Nowhere => place | UNWRITTEN,
                ClusterState::Shared(from) if one.is_copied(&range, from) => place,
                ClusterState::Shared(_) => continue,
            };
            let line = Record { key: range.start, value, extra: 0 };
            // It is in one leaf, since leaves are split between clusters.
            let (_, gain) = self.replace_range_in_leaf(&tree, &mut body.map, range, Some(line))?;
            body.apply_map_delta(gain);
            is_moved = true;
        }
        if is_moved {
            body.owed = body.owed.saturating_sub(if is_new { unit } else { 0 });
            self.remapped.insert(id);
            self.store_volume(&body)?;
        }
        Ok(is_moved)
    }

    fn leaf_with_exclusive_clusters(
        &mut self,
        body: &VolumeBody,
        key: u64,
    ) -> Result<Option<LeafWithExclusiveClusters>, TransactionStop> {
        let tree = body.map_tree();
        let Some(leaf) = self.leaf_and_sharing(&tree, body.map, key, true)? else {
            return Ok(None);
        };
        let own = match self.leaf_if_unshared(&tree, body.map, key)? {
            Some(page) => self.exclusive_clusters(&tree, &page)?,
            None => RangeSet::default(),
        };
        Ok(Some(LeafWithExclusiveClusters { tree, leaf, own }))
    }
}

impl ClusterCopy {
    /// Whether blocks at that place have been copied.
    fn is_copied(&self, range: &Range<u64>, from: u64) -> bool {
        let has = |piece: &MappedRun| {
            let skip = range.start.checked_sub(piece.block);
            let is_inside = range.end <= piece.block + piece.blocks;
            let is_from = |skip| piece.from == ReadSource::Store(from.wrapping_sub(skip));
            is_inside && skip.is_some_and(is_from)
        };
        self.copies.iter().any(has)
    }
}

impl LeafWithExclusiveClusters {
    fn page(&self) -> &Arc<Page> {
        &self.leaf.page
    }

    /// State of a block, and the extent of that state.
    fn state_of(&self, block: u64) -> (ClusterState, u64) {
        let records = self.page().records();
        let end = |run: &Record| run.key + run.extra;
        match records.get(records.partition_point(|run| end(run) <= block)) {
            None => (ClusterState::Nowhere, u64::MAX),
            Some(run) if run.key > block => (ClusterState::Nowhere, run.key),
            Some(run) if run.is_hole() => (ClusterState::Nowhere, end(run)),
            Some(run) => {
                let at = run.first_address() + (block - run.key);
                let (lies, until) = match self.own.lookup(at) {
                    RangeLookup::Taken(until) => (ClusterState::Own, until),
                    RangeLookup::Free(until) if run.is_unwritten() => {
                        (ClusterState::Nowhere, until)
                    }
                    RangeLookup::Free(until) => (ClusterState::Shared(at), until),
                };
                (lies, end(run).min(block.saturating_add(until - at)))
            }
        }
    }

    fn is_unmapped(&self, block: u64) -> bool {
        let has = |run: &Record| run.key <= block && block < run.key + run.extra;
        !self.page().records().iter().any(has)
    }

    /// First block of a range that is not exclusive, its state, and the extent of the state.
    fn first_not_exclusive(&self, range: Range<u64>) -> Option<(u64, ClusterState, u64)> {
        let mut at = range.start;
        while at < range.end {
            let (lies, until) = self.state_of(at);
            if lies != ClusterState::Own {
                return Some((at, lies, until.min(range.end)));
            }
            at = until;
        }
        None
    }

    /// The parts of a range, with their states.
    fn state_runs(&self, range: &Range<u64>) -> Vec<(Range<u64>, ClusterState)> {
        let (mut at, mut parts) = (range.start, Vec::new());
        while at < range.end {
            let (lies, until) = self.state_of(at);
            let end = until.min(range.end);
            parts.push((at..end, lies));
            at = end;
        }
        parts
    }
}
