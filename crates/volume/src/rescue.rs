//! Read-only rescue of the volumes of a pool with destroyed metadata: as many as can be found.
//!
//! ```text
//!   superblocks ──> catalog ──> volumes ──> their maps
//!                      │ destroyed in part, or no superblock is left
//!                      └──> scan of every block of the device: a volume's block that is in use, and
//!                           whose name is in the name tree, is a volume
//! ```
//!
//! Names and counts are only read to distinguish volumes from remains of earlier transactions.

mod tree_walk;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use tenmil_base::IoStatus;

pub use self::tree_walk::{LostRange, TreeWalk};
use crate::checksums::{GROUP_BLOCKS, checksums_in_record};
use crate::device_table::DataArea;
use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{
    BLOCKS_MAX, Block, BlockKind, HOLE, Header, Page, PageBody, Pointer, Record, SLOTS, Superblock,
    VolumeBody, decode_name, flags, hash_name,
};
use crate::on_disk_layout::Layout;
use crate::open::PoolOpening;
use crate::parent::ParentInfo;
use crate::ranges::{RangeLookup, RangeSet};
use crate::tree::TreeDescriptor;
use crate::volume_catalog::{CATALOGUE, NAMES, VolumeInfo};

/// Rescue in progress.
#[derive(Debug)]
pub struct PoolRescue {
    /// Blocks that are available for reading.
    present: RangeSet,
    stage: RescueStage,
    store: u128,
    superblock: Option<Superblock>,
    generation: u64,
    /// Volumes of the catalog that remain to be read.
    to_read: Vec<(u64, Pointer)>,
    volumes: BTreeMap<u64, VolumeBody>,
    /// Ranges of volume numbers that are missing from the readable part of the catalog.
    untold: Vec<Range<u64>>,
    names: Option<BTreeMap<u64, u64>>,
    counted: Option<RangeSet>,
    /// Volume blocks found by the scan, by pool, number and generation.
    found: BTreeMap<(u128, u64, u64), VolumeBody>,
    damaged: Vec<Corruption>,
}

/// The structure being read.
#[derive(Debug)]
enum RescueStage {
    Superblocks(Box<PoolOpening>),
    Catalogue(TreeWalk),
    Names(TreeWalk),
    Space(TreeWalk),
    Volumes,
    /// All blocks; this one is the next.
    Scan(u64),
    Done,
}

/// Result of a rescue.
#[derive(Debug)]
pub struct RescueResult {
    /// UUID of the pool.
    pub store: u128,
    /// Name of the pool; empty if no superblock is left.
    pub name: String,
    /// Volumes and snapshots, by number. If no superblock is left, they may lack the last changes, and
    /// some may have been deleted.
    pub volumes: Vec<FoundVolume>,
    /// Corruption on the paths to them.
    pub damaged: Vec<Corruption>,
    /// Whether the whole device was scanned.
    pub was_scanned: bool,
}

/// Volume that was found.
#[derive(Clone, Debug)]
pub struct FoundVolume {
    /// Information about it.
    pub info: VolumeInfo,
    body: VolumeBody,
    store: u128,
    room: DataArea,
}

impl FoundVolume {
    /// Walks its map: the keys of runs and lost ranges are blocks of the volume.
    pub fn map_walk(&self) -> TreeWalk {
        TreeWalk::new(self.store, &self.room, self.body.map_tree(), self.body.map)
    }

    /// Block with the description of its parent, or `None` if it has no parent.
    pub fn parent_address(&self) -> Option<u64> {
        Some(self.body.parent.address).filter(|_| !self.body.parent.is_null())
    }

    /// The parent, from the contents of that block.
    ///
    /// # Errors
    ///
    /// The corruption of the block.
    pub fn decode_parent(&self, bytes: Result<&Block, IoStatus>) -> Result<ParentInfo, Corruption> {
        let Pointer { address, generation } = self.body.parent;
        let damage = |flaw| {
            let kind = Some(BlockKind::Parent);
            Corruption { address, kind, owner: self.body.id, flaw }
        };
        let page = bytes
            .map_err(|status| damage(CorruptionKind::ReadError(status)))
            .and_then(|bytes| Page::decode(bytes, self.store, address))
            .map_err(|found| damage(found.flaw))?;
        match page.body {
            PageBody::Parent(_) if page.generation != generation => {
                Err(damage(CorruptionKind::Generation {
                    found: page.generation,
                    expected: generation,
                }))
            }
            PageBody::Parent(parent) => Ok(ParentInfo::from_body(&parent)),
            _ => Err(damage(CorruptionKind::Kind { found: page.kind, level: page.level() })),
        }
    }

    /// Whether a clone of another volume can become this one: blocks that are unmapped here, and present
    /// in the parent, must not be mapped there. Both lists come from a [`TreeWalk`].
    pub fn can_be_clone_of(&self, base: &Self, theirs: &[Record], own: &[Record]) -> bool {
        let reach = self.body.reach;
        let has = |record: &&Record| record.key < reach;
        let covered = |record: &Record| {
            let (mut at, end) = (record.key, (record.key + record.extra).min(reach));
            let from = own.partition_point(|run| run.key + run.extra <= at);
            for run in &own[from..] {
                if run.key > at {
                    break;
                }
                at = run.key + run.extra;
            }
            at >= end
        };
        let is_same = self.body.parent == base.body.parent && reach == base.body.reach;
        is_same && theirs.iter().filter(has).all(covered)
    }

    /// Walks its checksums, for [`block_checksum_in`]: the keys of lost ranges are groups of four blocks.
    pub fn checksum_walk(&self) -> TreeWalk {
        TreeWalk::new(self.store, &self.room, self.body.checksum_tree(), self.body.sums)
    }
}

/// Checksum of a block of a volume, from the result of a [walk](FoundVolume::checksum_walk).
pub fn block_checksum_in(records: &[Record], block: u64) -> Option<u32> {
    let (group, index) = (block / GROUP_BLOCKS, usize::try_from(block % GROUP_BLOCKS));
    let at = records.binary_search_by_key(&group, |record| record.key).ok()?;
    let sums = checksums_in_record(records.get(at)?);
    sums.get(index.ok()?).copied().filter(|sum| *sum != 0)
}

/// Blocks of a volume whose place differs from those of another one, in ascending order: first block,
/// number of blocks, and place, or `None` if they read as zeroes. Both lists come from a [`TreeWalk`].
pub fn changed_extents(base: &[Record], records: &[Record], blocks: u64) -> Vec<FileExtent> {
    let (mut at, mut moved): (u64, Vec<FileExtent>) = (0, Vec::new());
    let place = |runs: &[Record], at: u64| match runs
        .get(runs.partition_point(|run| run.key + run.extra <= at))
    {
        // A hole has no place; its value distinguishes it from unmapped blocks.
        Some(run) if run.key <= at => (Some(run.value + (at - run.key)), run.key + run.extra),
        Some(run) => (None, run.key),
        None => (None, u64::MAX),
    };
    while at < blocks {
        let ((old, old_end), (new, new_end)) = (place(base, at), place(records, at));
        let end = old_end.min(new_end).min(blocks);
        if old != new {
            let at_place = new.filter(|place| place & HOLE == 0);
            moved.push(FileExtent { block: at, blocks: end - at, at: at_place });
        }
        at = end;
    }
    moved
}

/// Blocks of a volume, and their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// First block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Place of the first one; `None` if they read as zeroes.
    pub at: Option<u64>,
}

impl PoolRescue {
    /// Rescue from a device of this number of blocks, the first one of its pool.
    pub fn new(blocks: u64) -> Self {
        let mut present = RangeSet::default();
        present.insert(0..blocks);
        Self {
            present,
            stage: RescueStage::Superblocks(Box::new(PoolOpening::new(blocks, 0).for_rescue())),
            store: 0,
            superblock: None,
            generation: u64::MAX,
            to_read: Vec::new(),
            volumes: BTreeMap::new(),
            untold: Vec::new(),
            names: None,
            counted: None,
            found: BTreeMap::new(),
            damaged: Vec::new(),
        }
    }

    /// Restricts the rescue to these blocks of the pool: some devices are missing, or the list of devices
    /// is destroyed.
    #[must_use]
    pub fn restricted_to(mut self, present: impl Iterator<Item = Range<u64>>) -> Self {
        self.present = RangeSet::default();
        present.for_each(|range| self.present.insert(range));
        self
    }

    /// Blocks that may contain metadata and data, including those on missing devices.
    fn whole_data_area(&self) -> DataArea {
        let room = DataArea { start: SLOTS, end: BLOCKS_MAX, slots: 0..0 };
        self.superblock.map_or(room, |superblock| superblock.data_area())
    }

    /// Blocks that a scan reads.
    fn scanned_area(&self) -> DataArea {
        let end = self.present.iter().last().map_or(SLOTS, |range| range.end.max(SLOTS));
        let room = DataArea { start: SLOTS, end, slots: 0..0 };
        self.superblock.map_or(room, |superblock| superblock.data_area())
    }

    /// First block at or after `at` that a scan reads.
    fn next_block_to_scan(&self, mut at: u64) -> Option<u64> {
        let room = self.scanned_area();
        while at < room.end {
            match self.present.lookup(at) {
                RangeLookup::Taken(_) if room.contains(&at) => return Some(at),
                RangeLookup::Taken(_) => at += 1,
                RangeLookup::Free(next) => at = next,
            }
        }
        None
    }

    /// The next block to read, or `None` once all have been read.
    ///
    /// # Errors
    ///
    /// If the contents have a newer version, or two pools claim the device.
    pub fn next_read(&mut self) -> Result<Option<u64>, PoolError> {
        loop {
            let next = match &self.stage {
                RescueStage::Superblocks(opening) => opening.next_read(),
                RescueStage::Catalogue(walk)
                | RescueStage::Names(walk)
                | RescueStage::Space(walk) => walk.next_read(),
                RescueStage::Volumes => self.to_read.last().map(|(_, at)| at.address),
                RescueStage::Scan(at) => self.next_block_to_scan(*at),
                RescueStage::Done => return Ok(None),
            };
            if let Some(next) = next {
                if let RescueStage::Scan(at) = &mut self.stage {
                    *at = next;
                }
                return Ok(Some(next));
            }
            self.begin_next_stage()?;
        }
    }

    /// Number of blocks scanned and in total, during a scan.
    pub fn scan_progress(&self) -> Option<(u64, u64)> {
        let room = self.scanned_area();
        match &self.stage {
            RescueStage::Scan(at) => Some((at - room.start, room.end - room.start)),
            _ => None,
        }
    }

    /// Handles the result of the requested read.
    pub fn handle_read(&mut self, bytes: Result<&Block, IoStatus>) {
        match &mut self.stage {
            RescueStage::Superblocks(opening) => opening.handle_read(bytes),
            RescueStage::Catalogue(walk) | RescueStage::Names(walk) | RescueStage::Space(walk) => {
                walk.handle_read(bytes);
            }
            RescueStage::Volumes => self.handle_volume_block(bytes),
            RescueStage::Scan(at) => {
                let address = *at;
                *at += 1;
                if let Ok(bytes) = bytes {
                    self.handle_scanned_block(address, bytes);
                }
            }
            RescueStage::Done => {}
        }
    }

    /// Begins the next stage.
    fn begin_next_stage(&mut self) -> Result<(), PoolError> {
        let stage = std::mem::replace(&mut self.stage, RescueStage::Done);
        self.stage = match stage {
            RescueStage::Superblocks(opening) => self.handle_superblock(*opening)?,
            RescueStage::Catalogue(walk) => {
                let (records, lost) = walk.into_records_and_lost_ranges();
                self.to_read = records.iter().rev().map(|line| (line.key, line.child())).collect();
                self.untold = lost.iter().map(|lost| lost.keys.clone()).collect();
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                RescueStage::Volumes
            }
            RescueStage::Volumes if self.untold.is_empty() => RescueStage::Done,
            RescueStage::Volumes => self
                .superblock_tree_walk(NAMES)
                .map_or(RescueStage::Scan(SLOTS), RescueStage::Names),
            RescueStage::Names(walk) => {
                let (records, lost) = walk.into_records_and_lost_ranges();
                let names = || records.iter().map(|line| (line.key, line.value)).collect();
                self.names = lost.is_empty().then(names);
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                let space = TreeDescriptor::pool_tree(BlockKind::SpaceMap);
                self.superblock_tree_walk(space)
                    .map_or(RescueStage::Scan(SLOTS), RescueStage::Space)
            }
            RescueStage::Space(walk) => {
                let (records, lost) = walk.into_records_and_lost_ranges();
                let mut counted = RangeSet::default();
                records.iter().for_each(|run| counted.insert(run.key..run.key + run.extra));
                self.counted = lost.is_empty().then_some(counted);
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                RescueStage::Scan(SLOTS)
            }
            RescueStage::Scan(_) => {
                self.select_newest_volumes();
                RescueStage::Done
            }
            RescueStage::Done => RescueStage::Done,
        };
        Ok(())
    }

    fn handle_superblock(&mut self, opening: PoolOpening) -> Result<RescueStage, PoolError> {
        match opening.finish() {
            Ok(opened) => {
                let (store, superblock) = opened.store.uuid_and_durable_superblock();
                (self.store, self.superblock) = (store, Some(superblock));
                self.generation = opened.store.generation();
                self.damaged.extend(opened.damaged);
                let walk = self.superblock_tree_walk(CATALOGUE);
                Ok(walk.map_or(RescueStage::Volumes, RescueStage::Catalogue))
            }
            Err(PoolError::NotAPool(damaged)) => {
                self.damaged.extend(damaged);
                self.untold.push(0..u64::MAX);
                Ok(RescueStage::Scan(SLOTS))
            }
            Err(error) => Err(error),
        }
    }

    /// Walk of a tree of the superblock.
    fn superblock_tree_walk(&self, tree: TreeDescriptor) -> Option<TreeWalk> {
        let superblock = self.superblock?;
        let root = match tree.kind {
            BlockKind::Catalog => superblock.catalogue,
            BlockKind::Names => superblock.names,
            _ => superblock.space,
        };
        Some(TreeWalk::new(self.store, &self.whole_data_area(), tree, root))
    }

    fn handle_volume_block(&mut self, bytes: Result<&Block, IoStatus>) {
        let Some((id, at)) = self.to_read.pop() else { return };
        let damage = |flaw| {
            let kind = Some(BlockKind::Volume);
            Corruption { address: at.address, kind, owner: id, flaw }
        };
        let page = bytes
            .map_err(|status| damage(CorruptionKind::ReadError(status)))
            .and_then(|bytes| Page::decode(bytes, self.store, at.address));
        let page = page.map_err(|found| damage(found.flaw));
        match page {
            Ok(page) if page.generation != at.generation => {
                let (found, expected) = (page.generation, at.generation);
                self.damaged.push(damage(CorruptionKind::Generation { found, expected }));
            }
            Ok(Page { body: PageBody::Volume(body), .. }) if body.id == id => {
                self.volumes.insert(id, body);
            }
            Ok(_) => self.damaged.push(damage(CorruptionKind::Bounds)),
            Err(damage) => self.damaged.push(damage),
        }
    }

    /// Handles a scanned block.
    fn handle_scanned_block(&mut self, address: u64, bytes: &Block) {
        let store = Header::decode(&bytes[..]).store;
        let is_ours = self.superblock.is_none() || store == self.store;
        let Some(Page { body: PageBody::Volume(body), generation, .. }) =
            Page::decode(bytes, store, address).ok().filter(|_| is_ours)
        else {
            return;
        };
        let is_untold = self.untold.iter().any(|numbers| numbers.contains(&body.id));
        let is_named = |names: &BTreeMap<u64, u64>| {
            names.get(&hash_name(decode_name(&body.name).as_bytes())) == Some(&body.id)
        };
        // A volume pending deletion has no name any more, but its block supersedes older ones of the same
        // volume.
        let is_known = self.names.as_ref().is_none_or(is_named) || body.has_flag(flags::DOOMED);
        let is_used = |counted: &RangeSet| matches!(counted.lookup(address), RangeLookup::Taken(_));
        let is_used = self.counted.as_ref().is_none_or(is_used);
        if is_untold && is_known && is_used && generation <= self.generation {
            self.found.insert((store, body.id, generation), body);
        }
    }

    /// Selects the newest found block of each volume, of the pool with the most of them.
    fn select_newest_volumes(&mut self) {
        if self.superblock.is_none() {
            let mut counts: BTreeMap<u128, u64> = BTreeMap::new();
            self.found.keys().for_each(|(store, ..)| *counts.entry(*store).or_default() += 1);
            let most = counts.into_iter().max_by_key(|(_, count)| *count);
            self.store = most.map_or(0, |(store, _)| store);
        }
        let mut newest: BTreeMap<u64, (u64, VolumeBody)> = BTreeMap::new();
        for ((store, id, generation), body) in std::mem::take(&mut self.found) {
            if store == self.store {
                newest.insert(id, (generation, body));
            }
        }
        newest.retain(|_, (_, body)| !body.has_flag(flags::DOOMED));
        // A reused name belongs to the volume that received it last.
        let mut by_name: BTreeMap<[u8; 128], (u64, VolumeBody)> = BTreeMap::new();
        for (generation, body) in newest.into_values() {
            let last = by_name.entry(body.name).or_insert((generation, body));
            if last.0 < generation {
                *last = (generation, body);
            }
        }
        // Volumes from the catalog are newer than those found by the scan.
        let reported: BTreeSet<[u8; 128]> = self.volumes.values().map(|body| body.name).collect();
        for (_, body) in by_name.into_values().filter(|(_, body)| !reported.contains(&body.name)) {
            self.volumes.entry(body.id).or_insert(body);
        }
    }

    /// The result, once everything has been read.
    pub fn into_result(self) -> RescueResult {
        let (store, room) = (self.store, self.whole_data_area());
        let found =
            |body: VolumeBody| FoundVolume { info: body.info(), body, store, room: room.clone() };
        RescueResult {
            store,
            name: self
                .superblock
                .map(|superblock| decode_name(&superblock.name))
                .unwrap_or_default(),
            volumes: self.volumes.into_values().map(found).collect(),
            damaged: self.damaged,
            was_scanned: !self.untold.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FileExtent, Record, changed_extents};

    #[test]
    fn changed_extents_are_found_block_by_block() {
        let run = |key, value, extra| Record { key, value, extra };
        let base = [run(2, 100, 4), run(10, 200, 5)];
        let now = [run(0, 50, 3), run(3, 101, 2), run(12, 202, 9)];
        let of = |block, blocks, at| FileExtent { block, blocks, at };
        let expected = [
            of(0, 2, Some(50)),
            of(2, 1, Some(52)),
            of(5, 1, None),
            of(10, 2, None),
            of(15, 1, Some(205)),
        ];
        assert_eq!(changed_extents(&base, &now, 16)[..4], expected[..4]);
        assert_eq!(changed_extents(&base, &now, 16).last(), expected.last());
        assert_eq!(changed_extents(&[], &base, 11), [of(2, 4, Some(100)), of(10, 1, Some(200))]);
        assert_eq!(changed_extents(&base, &base, 99), []);
    }
}
