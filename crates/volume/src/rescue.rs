//! Volumes of a store of which metadata are destroyed: as many as can be found. It changes nothing.
//!
//! ```text
//!   superblocks ──> catalogue ──> volumes ──> their maps
//!                       │ destroyed in part, or no superblock is left
//!                       └──> every block of the device is looked at; what is a volume's block, is in
//!                            use, and goes by the name that the names have for it, is a volume
//! ```
//!
//! Names and counts are only looked at to tell volumes from what earlier transactions have left.

mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use base::Outcome;

pub use self::walk::{Lost, Walk};
use crate::devices::Room;
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{
    BLOCKS_MAX, Block, Body, HOLE, Header, Kind, Page, Pointer, Record, SLOTS, Superblock,
    VolumeBody, flags, hash, unpadded,
};
use crate::layout::Layout;
use crate::open::Opening;
use crate::parent::Parent;
use crate::ranges::{Place, RangeSet};
use crate::sums::{GROUP_BLOCKS, in_record};
use crate::tree::Tree;
use crate::volumes::{CATALOGUE, NAMES, VolumeInfo};

/// A rescue under way.
#[derive(Debug)]
pub struct Rescue {
    /// Where there are blocks to be looked at.
    present: RangeSet,
    stage: Stage,
    store: u128,
    superblock: Option<Superblock>,
    generation: u64,
    /// Volumes of the catalogue that have still to be read.
    to_read: Vec<(u64, Pointer)>,
    volumes: BTreeMap<u64, VolumeBody>,
    /// Numbers of volumes that the catalogue does not tell.
    untold: Vec<Range<u64>>,
    names: Option<BTreeMap<u64, u64>>,
    counted: Option<RangeSet>,
    /// Volumes' blocks that the scan has found, by store, number and generation.
    found: BTreeMap<(u128, u64, u64), VolumeBody>,
    damaged: Vec<Damage>,
}

/// What is read.
#[derive(Debug)]
enum Stage {
    Superblocks(Box<Opening>),
    Catalogue(Walk),
    Names(Walk),
    Space(Walk),
    Volumes,
    /// All blocks; this one is the next.
    Scan(u64),
    Done,
}

/// What a rescue has found.
#[derive(Debug)]
pub struct Rescued {
    /// Which store it is.
    pub store: u128,
    /// The store's name; nothing if no superblock is left.
    pub name: String,
    /// Volumes and snapshots, by their numbers. If no superblock is left, they may be as they were
    /// before the last changes, and some may have been deleted.
    pub volumes: Vec<Found>,
    /// What is damaged of what leads to them.
    pub damaged: Vec<Damage>,
    /// Whether the whole device was looked at.
    pub was_scanned: bool,
}

/// A volume that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// What is known of it.
    pub info: VolumeInfo,
    body: VolumeBody,
    store: u128,
    room: Room,
}

impl Found {
    /// Looks for where its blocks lie: keys of what is found and lost are blocks of the volume.
    pub fn walk(&self) -> Walk {
        Walk::new(self.store, &self.room, self.body.tree(), self.body.map)
    }

    /// The block that says what it is read from where nothing is mapped; none if it has no parent.
    pub fn parent_at(&self) -> Option<u64> {
        Some(self.body.parent.address).filter(|_| !self.body.parent.is_none())
    }

    /// The parent, from what was read there.
    ///
    /// # Errors
    ///
    /// What is wrong with the block.
    pub fn parent(&self, bytes: Result<&Block, Outcome>) -> Result<Parent, Damage> {
        let Pointer { address, generation } = self.body.parent;
        let damage = |flaw| {
            let kind = Some(Kind::Parent);
            Damage { address, kind, owner: self.body.id, flaw }
        };
        let page = bytes
            .map_err(|outcome| damage(Flaw::Unread(outcome)))
            .and_then(|bytes| Page::decode(bytes, self.store, address))
            .map_err(|found| damage(found.flaw))?;
        match page.body {
            Body::Parent(_) if page.generation != generation => {
                Err(damage(Flaw::Generation { found: page.generation, expected: generation }))
            }
            Body::Parent(parent) => Ok(Parent::of(&parent)),
            _ => Err(damage(Flaw::Kind { found: page.kind, level: page.level() })),
        }
    }

    /// Whether a clone of another volume can become this one: what nothing is mapped to here, and the
    /// parent has, must not be mapped there. Both lists are what a [`Walk`] has found.
    pub fn can_follow(&self, base: &Self, theirs: &[Record], own: &[Record]) -> bool {
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

    /// Looks for its checksums, for [`checksum_of`]: keys of what is lost are groups of four blocks.
    pub fn walk_checksums(&self) -> Walk {
        Walk::new(self.store, &self.room, self.body.sums_tree(), self.body.sums)
    }
}

/// The checksum of a block of a volume, in what a [walk](Found::walk_checksums) has found.
pub fn checksum_of(records: &[Record], block: u64) -> Option<u32> {
    let (group, index) = (block / GROUP_BLOCKS, usize::try_from(block % GROUP_BLOCKS));
    let at = records.binary_search_by_key(&group, |record| record.key).ok()?;
    let sums = in_record(records.get(at)?);
    sums.get(index.ok()?).copied().filter(|sum| *sum != 0)
}

/// Blocks of a volume that lie elsewhere than those of another, by ascending blocks: the first one, how
/// many, and where they lie; `None` for those that read as zeroes. Both lists are what a [`Walk`] has
/// found.
pub fn differences(base: &[Record], records: &[Record], blocks: u64) -> Vec<Moved> {
    let (mut at, mut moved): (u64, Vec<Moved>) = (0, Vec::new());
    let place = |runs: &[Record], at: u64| match runs
        .get(runs.partition_point(|run| run.key + run.extra <= at))
    {
        // A hole has no place, and is told from what nothing is mapped to by its value.
        Some(run) if run.key <= at => (Some(run.value + (at - run.key)), run.key + run.extra),
        Some(run) => (None, run.key),
        None => (None, u64::MAX),
    };
    while at < blocks {
        let ((old, old_end), (new, new_end)) = (place(base, at), place(records, at));
        let end = old_end.min(new_end).min(blocks);
        if old != new {
            let at_place = new.filter(|place| place & HOLE == 0);
            moved.push(Moved { block: at, blocks: end - at, at: at_place });
        }
        at = end;
    }
    moved
}

/// Blocks of a volume, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The first one.
    pub block: u64,
    /// How many.
    pub blocks: u64,
    /// Where the first one lies; `None` if they read as zeroes.
    pub at: Option<u64>,
}

impl Rescue {
    /// A rescue from a device of so many blocks, the first one of its store.
    pub fn new(blocks: u64) -> Self {
        let mut present = RangeSet::default();
        present.insert(0..blocks);
        Self {
            present,
            stage: Stage::Superblocks(Box::new(Opening::new(blocks, 0).to_rescue())),
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

    /// There are these blocks of the store, and no others: not all of its devices are there, or what
    /// says which there are is destroyed.
    #[must_use]
    pub fn over(mut self, present: impl Iterator<Item = Range<u64>>) -> Self {
        self.present = RangeSet::default();
        present.for_each(|range| self.present.insert(range));
        self
    }

    /// The blocks in which metadata and data may lie: some of them where there is no device any more.
    fn whole_room(&self) -> Room {
        let room = Room { start: SLOTS, end: BLOCKS_MAX, slots: 0..0 };
        self.superblock.map_or(room, |superblock| superblock.room())
    }

    /// The blocks that a scan looks at.
    fn room(&self) -> Room {
        let end = self.present.iter().last().map_or(SLOTS, |range| range.end.max(SLOTS));
        let room = Room { start: SLOTS, end, slots: 0..0 };
        self.superblock.map_or(room, |superblock| superblock.room())
    }

    /// The first block from one on that a scan looks at.
    fn next_scanned(&self, mut at: u64) -> Option<u64> {
        let room = self.room();
        while at < room.end {
            match self.present.look(at) {
                Place::Taken(_) if room.contains(&at) => return Some(at),
                Place::Taken(_) => at += 1,
                Place::Free(next) => at = next,
            }
        }
        None
    }

    /// The next block that has to be read; `None` once that was all.
    ///
    /// # Errors
    ///
    /// If what is there is of a newer version, or two stores claim the device.
    pub fn next_read(&mut self) -> Result<Option<u64>, StoreError> {
        loop {
            let next = match &self.stage {
                Stage::Superblocks(opening) => opening.next_read(),
                Stage::Catalogue(walk) | Stage::Names(walk) | Stage::Space(walk) => {
                    walk.next_read()
                }
                Stage::Volumes => self.to_read.last().map(|(_, at)| at.address),
                Stage::Scan(at) => self.next_scanned(*at),
                Stage::Done => return Ok(None),
            };
            if let Some(next) = next {
                if let Stage::Scan(at) = &mut self.stage {
                    *at = next;
                }
                return Ok(Some(next));
            }
            self.advance()?;
        }
    }

    /// How many blocks of how many a scan has looked at, if there is one.
    pub fn scanned(&self) -> Option<(u64, u64)> {
        let room = self.room();
        match &self.stage {
            Stage::Scan(at) => Some((at - room.start, room.end - room.start)),
            _ => None,
        }
    }

    /// The block that was to be read has been, or not.
    pub fn handle_read(&mut self, bytes: Result<&Block, Outcome>) {
        match &mut self.stage {
            Stage::Superblocks(opening) => opening.handle_read(bytes),
            Stage::Catalogue(walk) | Stage::Names(walk) | Stage::Space(walk) => {
                walk.handle_read(bytes);
            }
            Stage::Volumes => self.take_volume(bytes),
            Stage::Scan(at) => {
                let address = *at;
                *at += 1;
                if let Ok(bytes) = bytes {
                    self.look_at(address, bytes);
                }
            }
            Stage::Done => {}
        }
    }

    /// A stage is over.
    fn advance(&mut self) -> Result<(), StoreError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        self.stage = match stage {
            Stage::Superblocks(opening) => self.take_superblock(*opening)?,
            Stage::Catalogue(walk) => {
                let (records, lost) = walk.finish();
                self.to_read = records.iter().rev().map(|line| (line.key, line.child())).collect();
                self.untold = lost.iter().map(|lost| lost.keys.clone()).collect();
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                Stage::Volumes
            }
            Stage::Volumes if self.untold.is_empty() => Stage::Done,
            Stage::Volumes => self.walk(NAMES).map_or(Stage::Scan(SLOTS), Stage::Names),
            Stage::Names(walk) => {
                let (records, lost) = walk.finish();
                let names = || records.iter().map(|line| (line.key, line.value)).collect();
                self.names = lost.is_empty().then(names);
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                let space = Tree::of_store(Kind::Space);
                self.walk(space).map_or(Stage::Scan(SLOTS), Stage::Space)
            }
            Stage::Space(walk) => {
                let (records, lost) = walk.finish();
                let mut counted = RangeSet::default();
                records.iter().for_each(|run| counted.insert(run.key..run.key + run.extra));
                self.counted = lost.is_empty().then_some(counted);
                self.damaged.extend(lost.into_iter().map(|lost| lost.damage));
                Stage::Scan(SLOTS)
            }
            Stage::Scan(_) => {
                self.choose();
                Stage::Done
            }
            Stage::Done => Stage::Done,
        };
        Ok(())
    }

    fn take_superblock(&mut self, opening: Opening) -> Result<Stage, StoreError> {
        match opening.finish() {
            Ok(opened) => {
                let (store, superblock) = opened.store.durable();
                (self.store, self.superblock) = (store, Some(superblock));
                self.generation = opened.store.generation();
                self.damaged.extend(opened.damaged);
                let walk = self.walk(CATALOGUE);
                Ok(walk.map_or(Stage::Volumes, Stage::Catalogue))
            }
            Err(StoreError::NoStore(damaged)) => {
                self.damaged.extend(damaged);
                self.untold.push(0..u64::MAX);
                Ok(Stage::Scan(SLOTS))
            }
            Err(error) => Err(error),
        }
    }

    /// A walk through a tree of the superblock.
    fn walk(&self, tree: Tree) -> Option<Walk> {
        let superblock = self.superblock?;
        let root = match tree.kind {
            Kind::Catalogue => superblock.catalogue,
            Kind::Names => superblock.names,
            _ => superblock.space,
        };
        Some(Walk::new(self.store, &self.whole_room(), tree, root))
    }

    fn take_volume(&mut self, bytes: Result<&Block, Outcome>) {
        let Some((id, at)) = self.to_read.pop() else { return };
        let damage = |flaw| {
            let kind = Some(Kind::Volume);
            Damage { address: at.address, kind, owner: id, flaw }
        };
        let page = bytes
            .map_err(|outcome| damage(Flaw::Unread(outcome)))
            .and_then(|bytes| Page::decode(bytes, self.store, at.address));
        let page = page.map_err(|found| damage(found.flaw));
        match page {
            Ok(page) if page.generation != at.generation => {
                let (found, expected) = (page.generation, at.generation);
                self.damaged.push(damage(Flaw::Generation { found, expected }));
            }
            Ok(Page { body: Body::Volume(body), .. }) if body.id == id => {
                self.volumes.insert(id, body);
            }
            Ok(_) => self.damaged.push(damage(Flaw::Bounds)),
            Err(damage) => self.damaged.push(damage),
        }
    }

    /// A block that the scan has come upon.
    fn look_at(&mut self, address: u64, bytes: &Block) {
        let store = Header::decode(&bytes[..]).store;
        let is_ours = self.superblock.is_none() || store == self.store;
        let Some(Page { body: Body::Volume(body), generation, .. }) =
            Page::decode(bytes, store, address).ok().filter(|_| is_ours)
        else {
            return;
        };
        let is_untold = self.untold.iter().any(|numbers| numbers.contains(&body.id));
        let is_named = |names: &BTreeMap<u64, u64>| {
            names.get(&hash(unpadded(&body.name).as_bytes())) == Some(&body.id)
        };
        let is_known = self.names.as_ref().is_none_or(is_named) || body.has(flags::DOOMED);
        let is_used = |counted: &RangeSet| matches!(counted.look(address), Place::Taken(_));
        let is_used = self.counted.as_ref().is_none_or(is_used);
        if is_untold && is_known && is_used && generation <= self.generation {
            self.found.insert((store, body.id, generation), body);
        }
    }

    /// The newest of what the scan has found of each volume, of the store that has most.
    fn choose(&mut self) {
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
        newest.retain(|_, (_, body)| !body.has(flags::DOOMED));
        // A name that was given again belongs to the last that it was given to.
        let mut by_name: BTreeMap<[u8; 128], (u64, VolumeBody)> = BTreeMap::new();
        for (generation, body) in newest.into_values() {
            let last = by_name.entry(body.name).or_insert((generation, body));
            if last.0 < generation {
                *last = (generation, body);
            }
        }
        // What the catalogue tells is newer than what was found beside it.
        let told: BTreeSet<[u8; 128]> = self.volumes.values().map(|body| body.name).collect();
        for (_, body) in by_name.into_values().filter(|(_, body)| !told.contains(&body.name)) {
            self.volumes.entry(body.id).or_insert(body);
        }
    }

    /// What was found, once everything was read.
    pub fn finish(self) -> Rescued {
        let (store, room) = (self.store, self.whole_room());
        let found = |body: VolumeBody| Found { info: body.info(), body, store, room: room.clone() };
        Rescued {
            store,
            name: self.superblock.map(|superblock| unpadded(&superblock.name)).unwrap_or_default(),
            volumes: self.volumes.into_values().map(found).collect(),
            damaged: self.damaged,
            was_scanned: !self.untold.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Moved, Record, differences};

    #[test]
    fn what_lies_elsewhere_is_told_block_by_block() {
        let run = |key, value, extra| Record { key, value, extra };
        let base = [run(2, 100, 4), run(10, 200, 5)];
        let now = [run(0, 50, 3), run(3, 101, 2), run(12, 202, 9)];
        let of = |block, blocks, at| Moved { block, blocks, at };
        let expected = [
            of(0, 2, Some(50)),
            of(2, 1, Some(52)),
            of(5, 1, None),
            of(10, 2, None),
            of(15, 1, Some(205)),
        ];
        assert_eq!(differences(&base, &now, 16)[..4], expected[..4]);
        assert_eq!(differences(&base, &now, 16).last(), expected.last());
        assert_eq!(differences(&[], &base, 11), [of(2, 4, Some(100)), of(10, 1, Some(200))]);
        assert_eq!(differences(&base, &base, 99), []);
    }
}
