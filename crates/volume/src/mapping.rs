//! Planning of reads and writes: from blocks of a volume to blocks of the pool.
//!
//! A cluster of the pool serves one cluster of a volume, block by block: the third block of one is the
//! third block of the other. So if nothing else refers to a cluster of the pool, its unmapped blocks are
//! free for the blocks of this cluster of this volume only. After a snapshot, written blocks go to a new
//! cluster while the map directs reads of the others to the old one. Nothing is copied.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checksums::GROUP_BLOCKS;
use crate::format::{Record, VolumeBody, flags};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::{LeafPath, TreeDescriptor};
use crate::tree_edit::MapDelta;

/// Contiguous run of blocks of a volume, for reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedRun {
    /// First block.
    pub(crate) block: u64,
    /// Number of blocks.
    pub(crate) blocks: u64,
    /// Source of their data.
    pub(crate) from: ReadSource,
}

/// Source of the data of a mapped run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadSource {
    /// None: the blocks read as zeroes.
    Nothing,
    /// The pool, from this block on.
    Store(u64),
    /// The volume's parent, from the same block on.
    Parent,
}

/// Contiguous run of blocks of a volume, for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WriteRun {
    /// First block.
    pub(crate) block: u64,
    /// Number of blocks.
    pub(crate) blocks: u64,
    /// Block of the pool that receives the first one.
    pub(crate) at: u64,
    /// Whether the map must be updated.
    pub(crate) is_new: bool,
}

/// Clusters of the pool that are allocated and have data in flight to them, by volume, cluster number in
/// the volume, and first block.
pub(crate) type PendingAllocations = BTreeMap<(u64, u64, u64), PendingAllocation>;

/// Cluster of the pool that is allocated for a cluster of a volume, with data in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingAllocation {
    /// Writes in flight to it.
    pub(crate) users: u32,
    /// Whether the map refers to it.
    pub(crate) is_mapped: bool,
    /// One bit per block that must not be written: a write to it is in flight, or it was in use.
    pub(crate) taken: u32,
}

/// Write target of a cluster of a volume.
pub(crate) enum WriteTarget {
    /// This cluster of the pool, and the runs where its blocks are now.
    InPlace(u64, Vec<Record>),
    /// A cluster has to be allocated.
    Allocate,
}

impl Metadata {
    /// Plans a read: where the blocks of a volume are.
    pub(crate) fn plan_read(
        &mut self,
        body: &VolumeBody,
        range: Range<u64>,
    ) -> Result<Vec<MappedRun>, TransactionStop> {
        let (tree, mut at, mut pieces) = (body.map_tree(), range.start, Vec::new());
        while at < range.end {
            let run = self.next_run(&tree, body.map, at)?.filter(|run| run.key < range.end);
            let start = run.map_or(range.end, |run| run.key.max(at));
            if start > at {
                pieces.extend(unmapped_runs(body, at..start));
            }
            let Some(run) = run else { break };
            let end = (run.key + run.extra).min(range.end);
            let from = match run.is_written() {
                true => ReadSource::Store(run.first_address() + (start - run.key)),
                false => ReadSource::Nothing,
            };
            pieces.push(MappedRun { block: start, blocks: end - start, from });
            at = end;
        }
        Ok(pieces)
    }

    /// Plans a write: where the blocks of a volume are to be written. Allocates missing clusters. `mine`
    /// lists the clusters that this write uses, with their first blocks, also if the plan stops half way.
    pub(crate) fn plan_write(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
        pending: &mut PendingAllocations,
        mine: &mut Vec<(u64, u64)>,
    ) -> Result<Vec<WriteRun>, TransactionStop> {
        let (tree, unit) = (body.map_tree(), body.cluster_blocks());
        let numbers = range.start / unit..range.end.div_ceil(unit);
        let blocks_of = |number: u64| cluster_intersection(number, unit, range);
        let mut leaf: Option<LeafPath> = None;
        let mut homes = Vec::new();
        for number in numbers.clone() {
            let start = number * unit;
            let part = blocks_of(number).start - start..blocks_of(number).end - start;
            let wanted = block_mask(&blocks_of(number), unit);
            // A cluster already allocated for this one is shared between concurrent writes. With
            // checksums, mapped blocks are never overwritten, so two writes must not use the same block
            // of it.
            let mut grants = pending.range_mut((body.id, number, 0)..=(body.id, number, u64::MAX));
            let grant = grants.find(|((_, _, at), grant)| {
                let is_free = !tree.keeps || grant.taken & wanted == 0;
                let is_mine = tree.keeps && mine.contains(&(number, *at));
                let goes_to = at + part.start..at + part.end;
                (is_free && !self.space.is_bad(&goes_to)) || is_mine
            });
            if let Some((&(_, _, at), grant)) = grant {
                if !mine.contains(&(number, at)) {
                    grant.users += 1;
                    grant.taken |= wanted;
                    mine.push((number, at));
                }
                homes.push(WriteTarget::InPlace(at, Vec::new()));
                continue;
            }
            // Leaves are split between clusters, so one lookup serves all clusters up to the end of the
            // leaf.
            if leaf.as_ref().is_none_or(|leaf| !leaf.bounds.contains(&start)) {
                leaf = self.leaf_and_sharing(&tree, body.map, start, true)?;
            }
            if !tree.keeps {
                homes.push(self.exclusive_cluster(
                    &tree,
                    leaf.as_ref(),
                    start,
                    &blocks_of(number),
                )?);
                continue;
            }
            let is_given = |at| pending.contains_key(&(body.id, number, at));
            let home =
                self.other_exclusive_cluster(&tree, leaf.as_ref(), (start, &part), is_given)?;
            homes.push(home.map_or(WriteTarget::Allocate, |(at, grant)| {
                pending.insert((body.id, number, at), grant);
                mine.push((number, at));
                WriteTarget::InPlace(at, Vec::new())
            }));
        }
        self.allocate_write_targets(body, range, &mut homes, pending, mine)?;
        let mut segments = Vec::new();
        for (number, home) in numbers.zip(&homes) {
            if let WriteTarget::InPlace(at, runs) = home {
                push_or_extend(
                    &mut segments,
                    cluster_write_run(blocks_of(number), at + blocks_of(number).start % unit, runs),
                );
            }
        }
        Ok(segments)
    }

    /// Allocates clusters for those without a write target, contiguous as far as there is contiguous free
    /// space.
    fn allocate_write_targets(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
        homes: &mut [WriteTarget],
        pending: &mut PendingAllocations,
        mine: &mut Vec<(u64, u64)>,
    ) -> Result<(), TransactionStop> {
        let (unit, mut index) = (body.cluster_blocks(), 0);
        while index < homes.len() {
            let missing =
                homes[index..].iter().take_while(|home| matches!(home, WriteTarget::Allocate));
            let missing = missing.count();
            if missing == 0 {
                index += 1;
                continue;
            }
            let found = self.allocate_clusters(unit, missing as u64, body.owed)?;
            for at in (found.start..found.end).step_by(cluster_step(unit)) {
                let number = range.start / unit + index as u64;
                let taken = block_mask(&cluster_intersection(number, unit, range), unit);
                let grant = PendingAllocation { users: 1, is_mapped: false, taken };
                pending.insert((body.id, number, at), grant);
                mine.push((number, at));
                homes[index] = WriteTarget::InPlace(at, Vec::new());
                index += 1;
            }
        }
        Ok(())
    }

    /// The cluster of the pool that this volume uses exclusively for one of its clusters, if it has one:
    /// preferably the one that contains the blocks to be written.
    pub(crate) fn exclusive_cluster(
        &mut self,
        tree: &TreeDescriptor,
        leaf: Option<&LeafPath>,
        start: u64,
        blocks: &Range<u64>,
    ) -> Result<WriteTarget, TransactionStop> {
        let Some(leaf) = leaf.filter(|leaf| !leaf.is_shared) else {
            return Ok(WriteTarget::Allocate);
        };
        let records = leaf.page.records();
        let from = records.partition_point(|run| run.key + run.extra <= start);
        let to = records.partition_point(|run| run.key < start + tree.unit);
        let runs = &records[from.min(to)..to];
        let lying = || runs.iter().filter(|run| !run.is_hole());
        // A run that began before the cluster has its place such that the cluster begins `start - key`
        // blocks later.
        let place = |run: &Record| (run.first_address() + start).wrapping_sub(run.key);
        let touches = |run: &Record| run.key < blocks.end && run.key + run.extra > blocks.start;
        let (near, far): (Vec<&Record>, Vec<&Record>) = lying().partition(|run| touches(run));
        for run in near.into_iter().chain(far) {
            let at = place(run);
            let uses = lying().filter(|other| place(other) == at).count() as u64;
            let goes_to = at + (blocks.start - start)..at + (blocks.end - start);
            // A failed write to blocks that are not mapped there may still reach the device later.
            let is_spoilt =
                self.space.is_bad(&goes_to) && !has_blocks_at(runs, blocks, goes_to.start);
            if self.refcount(at)? == uses && !self.space.has_undurable_decrement(at) && !is_spoilt {
                return Ok(WriteTarget::InPlace(at, runs.to_vec()));
            }
        }
        Ok(WriteTarget::Allocate)
    }

    /// The cluster of the pool that this volume uses exclusively for one of its clusters, without writes
    /// in flight, and with the given part of its blocks in no map, nor in one that a power loss may
    /// restore.
    fn other_exclusive_cluster(
        &mut self,
        tree: &TreeDescriptor,
        leaf: Option<&LeafPath>,
        (start, part): (u64, &Range<u64>),
        is_given: impl Fn(u64) -> bool,
    ) -> Result<Option<(u64, PendingAllocation)>, TransactionStop> {
        let Some(leaf) = leaf.filter(|leaf| !leaf.is_shared) else { return Ok(None) };
        let records = leaf.page.records();
        let from = records.partition_point(|run| run.key + run.extra <= start);
        let to = records.partition_point(|run| run.key < start + tree.unit);
        let runs = &records[from.min(to)..to];
        let place = |run: &Record| (run.value + start).wrapping_sub(run.key);
        let wanted = block_mask(part, tree.unit);
        let lying = runs.iter().filter(|run| !run.is_hole());
        for at in lying.map(place).filter(|at| !is_given(*at)) {
            let own = || runs.iter().filter(|run| place(run) == at);
            let cut =
                |run: &Record| run.key.max(start)..(run.key + run.extra).min(start + tree.unit);
            let mapped = own().fold(0, |taken, run| taken | block_mask(&cut(run), tree.unit));
            // Blocks unmapped by a transaction that is not durable may be restored by a power loss.
            let left = (0..tree.unit).filter(|place| self.space.is_unmap_undurable(at + place));
            let taken = left.fold(mapped, |taken, place| taken | 1 << place);
            let is_own = self.refcount(at)? == own().count() as u64
                && !self.space.has_undurable_decrement(at);
            let is_spoilt = self.space.is_bad(&(at + part.start..at + part.end));
            if is_own && taken & wanted == 0 && !is_spoilt {
                let grant = PendingAllocation { users: 1, is_mapped: true, taken: taken | wanted };
                return Ok(Some((at, grant)));
            }
        }
        Ok(None)
    }

    /// Maps a part of a segment, as far as one leaf extends, and enters its checksums, if it has any.
    /// Returns the block where it stopped.
    pub(crate) fn map_write_run(
        &mut self,
        id: u64,
        segment: &WriteRun,
        sums: &[u32],
    ) -> Result<u64, TransactionStop> {
        let mut body = self.expect_volume(id)?;
        let most =
            if body.map_tree().keeps { GROUP_BLOCKS * self.leaf_blocks_min() } else { u64::MAX };
        let range = segment.block..segment.block + segment.blocks.min(most);
        let line = Record { key: segment.block, value: segment.at, extra: segment.blocks };
        let tree = body.map_tree();
        let (end, gain) = self.replace_range_in_leaf(&tree, &mut body.map, range, Some(line))?;
        body.apply_map_delta(gain);
        if body.map_tree().keeps {
            let count = usize::try_from(end - segment.block).unwrap_or(usize::MAX);
            self.store_checksums(&mut body, segment.block, sums.get(..count).unwrap_or(sums))?;
        }
        // Fewer blocks became mapped than were written: some were mapped before, and cached runs are
        // invalid.
        if u64::try_from(gain.mapped) != Ok(end - segment.block) {
            self.remapped.insert(id);
        }
        self.store_volume(&body)?;
        Ok(end)
    }

    /// Removes blocks from a volume's map, as far as one leaf extends. Those of a thick volume become
    /// unwritten, and those that would otherwise read from its parent become a hole. Returns the block
    /// where it stopped.
    pub(crate) fn unmap_in_leaf(
        &mut self,
        id: u64,
        range: &Range<u64>,
    ) -> Result<u64, TransactionStop> {
        let mut body = self.expect_volume(id)?;
        let (map, sums, tree) = (body.map, body.sums, body.map_tree());
        let end = if tree.keeps { self.checksum_leaf_end(&body, range)? } else { range.end };
        let range = range.start..end;
        // Within the overlap, an unmapped block would read from the parent, so a hole has to cover it.
        let (end, gain) = if range.start < body.reach {
            let range = range.start..range.end.min(body.reach);
            self.punch_hole(&tree, &mut body.map, &range)?
        } else if body.has_flag(flags::THICK) {
            self.make_unwritten(&tree, &mut body.map, &range)?
        } else {
            self.clear_range_in_leaf(&tree, &mut body.map, &range, false)?
        };
        body.apply_map_delta(gain);
        if tree.keeps {
            self.remove_checksums(&mut body, &(range.start..end))?;
        }
        if (body.map, body.sums) != (map, sums) || gain != MapDelta::default() {
            self.remapped.insert(id);
            self.store_volume(&body)?;
        }
        Ok(end)
    }

    /// Returns whether the first run at or after a key is in a leaf that others share.
    pub(crate) fn is_leaf_shared_from(
        &mut self,
        id: u64,
        key: u64,
    ) -> Result<bool, TransactionStop> {
        let body = self.expect_volume(id)?;
        let tree = body.map_tree();
        let Some(run) = self.next_run(&tree, body.map, key)? else { return Ok(false) };
        let leaf = self.leaf_and_sharing(&tree, body.map, run.key.max(key), true)?;
        Ok(leaf.is_some_and(|leaf| leaf.is_shared))
    }
}

/// Runs of blocks of a volume that are not in its map.
fn unmapped_runs(body: &VolumeBody, range: Range<u64>) -> impl Iterator<Item = MappedRun> {
    let middle = body.reach.clamp(range.start, range.end);
    let parts =
        [(range.start..middle, ReadSource::Parent), (middle..range.end, ReadSource::Nothing)];
    let piece = |(part, from): (Range<u64>, ReadSource)| {
        let (block, blocks) = (part.start, part.end - part.start);
        (blocks > 0).then_some(MappedRun { block, blocks, from })
    };
    parts.into_iter().filter_map(piece)
}

/// One cluster's part of a write. It is new to the map, unless a run already has the blocks there.
fn cluster_write_run(blocks: Range<u64>, at: u64, runs: &[Record]) -> WriteRun {
    let is_new = !has_written_blocks_at(runs, &blocks, at);
    WriteRun { block: blocks.start, blocks: blocks.end - blocks.start, at, is_new }
}

/// Whether one of the runs has these blocks, written, at that place.
fn has_written_blocks_at(runs: &[Record], blocks: &Range<u64>, at: u64) -> bool {
    let holds = |run: &Record| {
        run.key <= blocks.start
            && run.key + run.extra >= blocks.end
            && run.value + (blocks.start - run.key) == at
    };
    runs.iter().any(holds)
}

/// Whether the runs have these blocks at that place, written or unwritten.
fn has_blocks_at(runs: &[Record], blocks: &Range<u64>, at: u64) -> bool {
    let common = |run: &Record| {
        let (start, end) = (run.key.max(blocks.start), (run.key + run.extra).min(blocks.end));
        let is_there = !run.is_hole() && run.first_address() + blocks.start == at + run.key;
        if is_there { end.saturating_sub(start) } else { 0 }
    };
    runs.iter().map(common).sum::<u64>() == blocks.end - blocks.start
}

/// Intersection of a range with a cluster.
pub(crate) fn cluster_intersection(number: u64, unit: u64, range: &Range<u64>) -> Range<u64> {
    (number * unit).max(range.start)..((number + 1) * unit).min(range.end)
}

/// Bit mask of the given blocks in their cluster.
fn block_mask(blocks: &Range<u64>, unit: u64) -> u32 {
    let (first, count) = (blocks.start % unit, blocks.end - blocks.start);
    ((1_u32 << count) - 1) << first
}

fn cluster_step(unit: u64) -> usize {
    usize::try_from(unit).unwrap_or(1)
}

/// Adds a segment, or extends the last one.
fn push_or_extend(segments: &mut Vec<WriteRun>, next: WriteRun) {
    if let Some(last) = segments.last_mut()
        && last.is_new == next.is_new
        && last.at + last.blocks == next.at
        && last.block + last.blocks == next.block
    {
        last.blocks += next.blocks;
    } else {
        segments.push(next);
    }
}
