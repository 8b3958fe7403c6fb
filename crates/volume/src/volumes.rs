//! The catalogue: volumes by number and by name, and what can be done with them as a whole.
//!
//! A snapshot is one more reference to the root of a map, so it costs the same whatever the size.
//! To delete a volume puts it on the list of work: its blocks are given back in the background.

mod work;

use crate::books::{Books, Stop};
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{
    BLOCKS_MAX, Body, Kind, Pointer, Record, UNIT_SHIFT_MAX, VolumeBody, features, flags, hash,
    padded, unpadded,
};
use crate::parent::Parent;
use crate::tree::Tree;

/// Something to be done with a volume as a whole. It is done at once, and answered when it survives
/// a loss of power.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Makes an empty volume.
    Create {
        /// Its name.
        name: String,
        /// How many blocks of 4 KiB it has.
        blocks: u64,
        /// Blocks in its unit of allocation: 1, 2, 4, 8 or 16.
        unit: u64,
        /// Drawn by the caller.
        uuid: u128,
        /// Whether its data have checksums. What is made from it has them, too.
        checksums: bool,
    },
    /// Makes an empty volume that is promised room for all of its blocks. They get their units when
    /// [they are asked to](crate::Ask::Own).
    CreateThick {
        /// Its name.
        name: String,
        /// How many blocks of 4 KiB it has.
        blocks: u64,
        /// Blocks in its unit of allocation: 1, 2, 4, 8 or 16.
        unit: u64,
        /// Drawn by the caller.
        uuid: u128,
    },
    /// Makes an empty volume over something that lies outside the store: what is read where nothing is
    /// mapped, as far as it goes.
    CreateOver {
        /// Its name.
        name: String,
        /// How many blocks of 4 KiB it has.
        blocks: u64,
        /// Blocks in its unit of allocation: 1, 2, 4, 8 or 16.
        unit: u64,
        /// Drawn by the caller.
        uuid: u128,
        /// Whether its data have checksums; what is its parent's has none.
        checksums: bool,
        /// What lies below it.
        parent: Parent,
    },
    /// Deletes a volume or a snapshot. What was made from it keeps what it holds, and is on its own
    /// from now on.
    Delete {
        /// Its name.
        name: String,
        /// Else a snapshot from which volumes were made is not deleted.
        orphan: bool,
    },
    /// Gives a volume another name.
    Rename {
        /// Its name.
        name: String,
        /// The new one.
        to: String,
    },
    /// Gives a volume another size. What is behind the new end is lost. A thick one is promised room
    /// for what it gains.
    Resize {
        /// Its name.
        name: String,
        /// How many blocks of 4 KiB it has from now on.
        blocks: u64,
    },
    /// Keeps what a volume holds now.
    Snapshot {
        /// The volume's name.
        volume: String,
        /// The snapshot's name.
        name: String,
        /// Drawn by the caller.
        uuid: u128,
    },
    /// Makes a volume that holds what another, or a snapshot, holds now.
    Clone {
        /// What it is made from.
        from: String,
        /// Its name.
        name: String,
        /// Drawn by the caller.
        uuid: u128,
    },
    /// Makes a volume a snapshot, under another name: what was received is whole.
    Seal {
        /// Its name.
        name: String,
        /// The new one.
        to: String,
        /// What the snapshot is known by from now on.
        uuid: u128,
    },
    /// Makes a volume hold what it held when a snapshot of it was made.
    Revert {
        /// The volume's name.
        volume: String,
        /// The snapshot's name.
        snapshot: String,
    },
    /// Has a volume no longer say what it was made from, so that this can be deleted like any other.
    /// Both keep what they hold, and share what they shared: nothing is copied.
    Decouple {
        /// The volume's name.
        name: String,
    },
    /// Gives the store other thresholds. This one is about no volume.
    Thresholds {
        /// Per cent of the room for data at which it is told that so much is taken, ascending, 100 at
        /// most; zero is none.
        percent: [u8; 2],
    },
}

/// What is known of a volume without reading its map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its number, which no other volume of the store ever has.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Drawn when it was made.
    pub uuid: u128,
    /// The number of what it was made from; zero if it was made empty.
    pub origin: u64,
    /// Whether it is a snapshot.
    pub is_read_only: bool,
    /// How many blocks of 4 KiB it has.
    pub blocks: u64,
    /// How many of them are mapped, which were written. The others read as zeroes.
    pub mapped: u64,
    /// How many of the others are spare: they have room all the same.
    pub spare: u64,
    /// Whether it is thick: room is kept for all of its blocks.
    pub is_thick: bool,
    /// Blocks in its unit of allocation.
    pub unit: u64,
    /// Whether its data have checksums.
    pub has_checksums: bool,
    /// Where nothing is mapped before this block, its [parent](crate::Ask::Parent) is read; zero if it
    /// has none.
    pub reach: u64,
}

/// How far a change has come.
pub(crate) enum Progress {
    /// It is made, and this is the volume now if there still is one.
    Made(Option<VolumeInfo>),
    /// A part of it is.
    Again,
}

pub(crate) const CATALOGUE: Tree = Tree::of_store(Kind::Catalogue);
pub(crate) const NAMES: Tree = Tree::of_store(Kind::Names);
pub(crate) const WORK: Tree = Tree::of_store(Kind::Work);

/// The number of volumes, snapshots included, that a store may have.
pub const VOLUMES_MAX: u64 = 1 << 16;

impl VolumeBody {
    /// The tree of its map.
    pub(crate) const fn tree(&self) -> Tree {
        let keeps = self.has(flags::CHECKSUMS);
        Tree { kind: Kind::Map, owner: self.id, unit: self.unit(), keeps }
    }

    /// The tree of its checksums.
    pub(crate) const fn sums_tree(&self) -> Tree {
        Tree { owner: self.id, ..Tree::of_store(Kind::Sums) }
    }

    pub(crate) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            id: self.id,
            name: unpadded(&self.name),
            uuid: self.uuid,
            origin: self.origin,
            is_read_only: self.has(flags::READ_ONLY),
            blocks: self.blocks,
            mapped: self.mapped,
            spare: self.spare,
            is_thick: self.has(flags::THICK),
            unit: self.unit(),
            has_checksums: self.has(flags::CHECKSUMS),
            reach: self.reach,
        }
    }
}

impl Change {
    /// The volume whose writes must have come to an end before this is done.
    pub(crate) fn quiets(&self) -> Option<&str> {
        match self {
            Self::Create { .. }
            | Self::CreateThick { .. }
            | Self::CreateOver { .. }
            | Self::Rename { .. }
            | Self::Decouple { .. }
            | Self::Thresholds { .. } => None,
            Self::Delete { name, .. } | Self::Resize { name, .. } | Self::Seal { name, .. } => {
                Some(name)
            }
            Self::Snapshot { volume, .. } | Self::Revert { volume, .. } => Some(volume),
            Self::Clone { from, .. } => Some(from),
        }
    }
}

impl Books {
    /// The volume of this number.
    pub(crate) fn volume(&mut self, id: u64) -> Result<Option<VolumeBody>, Stop> {
        let root = self.superblock.catalogue;
        let line = self.next_run(&CATALOGUE, root, id)?.filter(|line| line.key == id);
        line.map(|line| self.volume_at(id, line.child())).transpose()
    }

    /// The volume with a number, or why there is none.
    pub(crate) fn expect_volume(&mut self, id: u64) -> Result<VolumeBody, Stop> {
        let none = StoreError::NoVolume(format!("number {id}"));
        Ok(self.volume(id)?.ok_or(none)?)
    }

    pub(crate) fn volume_at(&mut self, id: u64, at: Pointer) -> Result<VolumeBody, Stop> {
        match self.page(at, Kind::Volume, None)?.body {
            Body::Volume(body) if body.id == id => Ok(body),
            _ => {
                let (address, kind) = (at.address, Some(Kind::Volume));
                Err(Damage { address, kind, owner: id, flaw: Flaw::Bounds }.into())
            }
        }
    }

    /// The volume with a name, or why there is none.
    pub(crate) fn lookup(&mut self, name: &str) -> Result<VolumeBody, Stop> {
        let found = self.find_name(name)?.filter(|body| unpadded(&body.name) == name);
        Ok(found.ok_or_else(|| StoreError::NoVolume(name.into()))?)
    }

    /// The volume whose name has the same hash.
    fn find_name(&mut self, name: &str) -> Result<Option<VolumeBody>, Stop> {
        let key = hash(name.as_bytes());
        let line = self.next_run(&NAMES, self.superblock.names, key)?;
        let Some(line) = line.filter(|line| line.key == key) else { return Ok(None) };
        self.volume(line.value)
    }

    /// Makes a change, or a part of it.
    pub(crate) fn change(&mut self, change: &Change) -> Result<Progress, Stop> {
        match change {
            Change::Create { name, blocks, unit, uuid, checksums } => {
                let flags = if *checksums { flags::CHECKSUMS } else { 0 };
                self.create(name, *blocks, *unit, *uuid, flags)
            }
            Change::CreateThick { name, blocks, unit, uuid } => {
                self.create(name, *blocks, *unit, *uuid, flags::THICK)
            }
            Change::CreateOver { name, blocks, unit, uuid, checksums, parent } => {
                let flags = if *checksums { flags::CHECKSUMS } else { 0 };
                let body = self.new_body(name, *blocks, *unit, *uuid, flags)?;
                self.create_over(body, parent)
            }
            Change::Delete { name, orphan } => self.delete(name, *orphan),
            Change::Rename { name, to } => self.rename(name, to),
            Change::Resize { name, blocks } => self.resize(name, *blocks),
            Change::Snapshot { volume, name, uuid } => {
                self.branch(volume, name, *uuid, flags::READ_ONLY)
            }
            Change::Clone { from, name, uuid } => self.branch(from, name, *uuid, 0),
            Change::Seal { name, to, uuid } => self.seal(name, to, *uuid),
            Change::Revert { volume, snapshot } => self.revert(volume, snapshot),
            Change::Decouple { name } => self.decouple(name),
            Change::Thresholds { percent } => {
                self.set_thresholds(*percent).map(|()| Progress::Made(None))
            }
        }
    }

    fn create(
        &mut self,
        name: &str,
        blocks: u64,
        unit: u64,
        uuid: u128,
        flags: u32,
    ) -> Result<Progress, Stop> {
        let mut body = self.new_body(name, blocks, unit, uuid, flags)?;
        if body.has(flags::THICK) {
            body.owed = body.units() * body.unit();
            self.expect_room(0, &body)?;
        }
        self.enter(body)
    }

    /// An empty volume that is not in the catalogue yet.
    fn new_body(
        &mut self,
        name: &str,
        blocks: u64,
        unit: u64,
        uuid: u128,
        flags: u32,
    ) -> Result<VolumeBody, Stop> {
        let padded = self.free_name(name)?;
        check_size(name, blocks)?;
        let unit_shift = unit.trailing_zeros();
        if !unit.is_power_of_two() || unit_shift > UNIT_SHIFT_MAX {
            return Err(StoreError::BadUnit(unit).into());
        }
        let has = |flag| flags & flag != 0;
        self.superblock.incompatible |= if has(flags::CHECKSUMS) { features::CHECKSUMS } else { 0 };
        self.superblock.incompatible |= if has(flags::THICK) { features::SPARE } else { 0 };
        Ok(VolumeBody {
            id: self.take_number(),
            origin: 0,
            flags,
            unit_shift,
            blocks,
            mapped: 0,
            cut: u64::MAX,
            children: 0,
            born: self.generation,
            map: Pointer::NONE,
            uuid,
            name: padded,
            sums: Pointer::NONE,
            spare: 0,
            owed: 0,
            parent: Pointer::NONE,
            reach: 0,
            reserved: [0; 40],
        })
    }

    /// A snapshot or a clone.
    fn branch(&mut self, from: &str, name: &str, uuid: u128, flags: u32) -> Result<Progress, Stop> {
        let mut source = self.lookup(from)?;
        let padded = self.free_name(name)?;
        source.children += 1;
        self.put_volume(&source)?;
        self.share_roots(&source);
        let body = VolumeBody {
            id: self.take_number(),
            origin: source.id,
            flags: flags | (source.flags & flags::CHECKSUMS),
            children: 0,
            owed: 0,
            born: self.generation,
            uuid,
            name: padded,
            ..source
        };
        if body.cut != u64::MAX {
            self.put_work(body.id, Pointer::NONE)?;
        }
        self.enter(body)
    }

    fn delete(&mut self, name: &str, orphan: bool) -> Result<Progress, Stop> {
        let body = self.lookup(name)?;
        if body.has(flags::READ_ONLY) && body.children > 0 && !orphan {
            return Err(
                StoreError::HasChildren { name: name.into(), children: body.children }.into()
            );
        }
        self.leave_origin(&body)?;
        self.remapped.insert(body.id);
        self.remove_line(&CATALOGUE, body.id)?;
        self.remove_line(&NAMES, hash(name.as_bytes()))?;
        self.superblock.volumes = self.superblock.volumes.saturating_sub(1);
        self.note_promise(body.promise(), 0);
        self.leave_parent(&body)?;
        self.doom(body)?;
        Ok(Progress::Made(None))
    }

    /// What a volume was made from has a child less.
    fn leave_origin(&mut self, body: &VolumeBody) -> Result<(), Stop> {
        if let Some(mut origin) = self.volume(body.origin)? {
            origin.children = origin.children.saturating_sub(1);
            self.put_volume(&origin)?;
        }
        Ok(())
    }

    fn decouple(&mut self, name: &str) -> Result<Progress, Stop> {
        let mut body = self.lookup(name)?;
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(name.into()).into());
        }
        self.leave_origin(&body)?;
        body.origin = 0;
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    fn rename(&mut self, name: &str, to: &str) -> Result<Progress, Stop> {
        let mut body = self.lookup(name)?;
        body.name = self.free_name(to)?;
        self.remove_line(&NAMES, hash(name.as_bytes()))?;
        self.put_name(&body)?;
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    fn seal(&mut self, name: &str, to: &str, uuid: u128) -> Result<Progress, Stop> {
        let mut body = self.lookup(name)?;
        body.name = self.free_name(to)?;
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(name.into()).into());
        }
        // Nothing more is written to it.
        body.flags = (body.flags & !flags::THICK) | flags::READ_ONLY;
        (body.uuid, body.owed) = (uuid, 0);
        self.remove_line(&NAMES, hash(name.as_bytes()))?;
        self.put_name(&body)?;
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    fn resize(&mut self, name: &str, blocks: u64) -> Result<Progress, Stop> {
        let mut body = self.lookup(name)?;
        check_size(name, blocks)?;
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(name.into()).into());
        }
        if body.cut < blocks {
            self.cut(&mut body)?;
            return Ok(Progress::Again);
        }
        if blocks < body.blocks {
            self.remapped.insert(body.id);
            body.cut = blocks;
            self.put_work(body.id, Pointer::NONE)?;
        }
        let (before, units) = (body.promise(), body.units());
        body.blocks = blocks;
        body.reach = body.reach.min(blocks);
        if body.has(flags::THICK) {
            let more = body.units().saturating_sub(units);
            let most = body.units() * body.unit();
            body.owed = (body.owed + more * body.unit()).min(most);
            self.expect_room(before, &body)?;
        }
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    fn revert(&mut self, volume: &str, snapshot: &str) -> Result<Progress, Stop> {
        let mut body = self.lookup(volume)?;
        let source = self.lookup(snapshot)?;
        if source.origin != body.id || !source.has(flags::READ_ONLY) {
            let (snapshot, volume) = (snapshot.into(), volume.into());
            return Err(StoreError::NotASnapshotOf { snapshot, volume }.into());
        }
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(volume.into()).into());
        }
        self.remapped.insert(body.id);
        let (id, before) = (self.take_number(), body.promise());
        self.doom(VolumeBody { id, ..body })?;
        (body.map, body.sums) = (source.map, source.sums);
        self.share_roots(&source);
        (body.blocks, body.mapped, body.cut) = (source.blocks, source.mapped, source.cut);
        // All of it is the snapshot's as well now.
        (body.spare, body.owed) = (source.spare, 0);
        self.leave_parent(&body)?;
        (body.parent, body.reach) = (source.parent, source.reach);
        self.expect_room(before, &body)?;
        if body.cut != u64::MAX {
            self.put_work(body.id, Pointer::NONE)?;
        }
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    /// One volume more has the trees of this one, and its parent.
    fn share_roots(&mut self, body: &VolumeBody) {
        for root in [body.map, body.sums, body.parent].into_iter().filter(|root| !root.is_none()) {
            self.add(root.address..root.address + 1, 1);
        }
    }

    /// Enters a new volume under its number and its name.
    pub(crate) fn enter(&mut self, body: VolumeBody) -> Result<Progress, Stop> {
        self.superblock.volumes += 1;
        self.put_name(&body)?;
        self.put_volume(&body)?;
        Ok(Progress::Made(Some(body.info())))
    }

    fn take_number(&mut self) -> u64 {
        let id = self.superblock.next_volume;
        self.superblock.next_volume += 1;
        id
    }

    /// A name as it stands on disk, if it may be given to a volume.
    fn free_name<const N: usize>(&mut self, name: &str) -> Result<[u8; N], Stop> {
        let padded = padded(name).ok_or_else(|| StoreError::BadName(name.into()))?;
        match self.find_name(name)? {
            Some(_) => Err(StoreError::NameTaken(name.into()).into()),
            // Names of before may have them.
            None if name.contains(base::text::acts) => Err(StoreError::BadName(name.into()).into()),
            None if self.superblock.volumes >= VOLUMES_MAX => {
                Err(StoreError::TooManyVolumes.into())
            }
            None => Ok(padded),
        }
    }

    /// Writes a volume's block anew, and has the catalogue point to it.
    pub(crate) fn put_volume(&mut self, body: &VolumeBody) -> Result<(), Stop> {
        let root = self.superblock.catalogue;
        let line = self.next_run(&CATALOGUE, root, body.id)?.filter(|line| line.key == body.id);
        let before = match line {
            Some(line) => self.volume_at(body.id, line.child())?.promise(),
            None => 0,
        };
        self.note_promise(before, body.promise());
        if let Some(line) = line {
            if line.child().generation == self.generation {
                self.edit(line.value)?.body = Body::Volume(*body);
                return Ok(());
            }
            self.drop_page(line.value);
        }
        let at = self.put_new(Kind::Volume, body.id, Body::Volume(*body))?;
        let line = Record { key: body.id, value: at.address, extra: at.generation };
        let mut root = root;
        self.splice(&CATALOGUE, &mut root, line.key..line.key + 1, Some(line))?;
        self.superblock.catalogue = root;
        Ok(())
    }

    fn put_name(&mut self, body: &VolumeBody) -> Result<(), Stop> {
        let key = hash(unpadded(&body.name).as_bytes());
        let mut root = self.superblock.names;
        let line = Record { key, value: body.id, extra: 1 };
        self.splice(&NAMES, &mut root, key..key + 1, Some(line))?;
        self.superblock.names = root;
        Ok(())
    }

    fn remove_line(&mut self, tree: &Tree, key: u64) -> Result<(), Stop> {
        let superblock = &mut self.superblock;
        let mut root = match tree.kind {
            Kind::Catalogue => superblock.catalogue,
            Kind::Names => superblock.names,
            _ => superblock.work,
        };
        if let Some(line) = self.next_run(tree, root, key)?.filter(|line| line.key == key) {
            // The block of a volume goes with its line.
            if tree.kind != Kind::Names && line.value != 0 {
                self.drop_page(line.value);
            }
            self.splice(tree, &mut root, key..key + 1, None)?;
        }
        match tree.kind {
            Kind::Catalogue => self.superblock.catalogue = root,
            Kind::Names => self.superblock.names = root,
            _ => self.superblock.work = root,
        }
        Ok(())
    }
}

fn check_size(name: &str, blocks: u64) -> Result<(), Stop> {
    if (1..=BLOCKS_MAX).contains(&blocks) {
        return Ok(());
    }
    Err(StoreError::BadSize { name: name.into(), blocks }.into())
}
