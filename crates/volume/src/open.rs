//! Making a store, and opening one: four blocks are read, whatever its size, and there is nothing
//! to repair.

use std::sync::Arc;

use base::Outcome;

use crate::devices::{Devices, Label};
use crate::error::{Damage, Flaw, StoreError};
use crate::fence::{InjectedBugs, Owner};
use crate::format::{
    BLOCK_BYTES, BLOCK_SHIFT, BLOCKS_MAX, Block, Body, Kind, OwnerRecord, Page, Pointer, SLOTS,
    STORE_BLOCKS_MIN, Superblock, VERSION, decode_owner, decode_superblock, padded,
};
use crate::store::Store;

/// What a new store is to be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStore {
    /// Its name.
    pub name: String,
    /// Drawn by the caller.
    pub uuid: u128,
    /// Blocks of 4 KiB on the device.
    pub blocks: u64,
}

/// What has to be done, one after the other, to make a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write these bytes.
    Write {
        /// The first block.
        at: u64,
        /// One block.
        bytes: Box<Block>,
    },
    /// Make all writes survive a loss of power.
    Flush,
}

/// A store that is being opened.
#[derive(Debug)]
pub struct Opening {
    /// Blocks on the first device.
    blocks: u64,
    cache_bytes: usize,
    to_read: Vec<u64>,
    found: Vec<(u64, Found)>,
    /// The version and the unknown features of a superblock that has some.
    newer: Option<(u32, u64)>,
    damaged: Vec<Damage>,
    /// What the device begins with, if it is not the first of a store.
    label: Option<Label>,
    /// Who is to write to it.
    me: Option<Owner>,
    /// Whether the device may be shorter than the store.
    may_be_short: bool,
    bugs: InjectedBugs,
}

/// A store that is open, and what was found to be wrong with its superblocks.
#[derive(Debug)]
pub struct Opened {
    /// The store.
    pub store: Store,
    /// Copies of the superblock that cannot be read. They are written anew before the first change.
    pub damaged: Vec<Damage>,
}

/// A superblock that can be read.
#[derive(Clone, Debug)]
struct Found {
    store: u128,
    generation: u64,
    superblock: Superblock,
    devices: Arc<Devices>,
    owner: OwnerRecord,
}

impl NewStore {
    /// What has to be done to make it. Whatever the device held is lost.
    ///
    /// # Errors
    ///
    /// A name that is none, or a device that is too small or too large.
    pub fn steps(&self) -> Result<Vec<Step>, StoreError> {
        let name = padded(&self.name).filter(|_| !self.name.contains(base::text::acts));
        let name = name.ok_or_else(|| StoreError::BadName(self.name.clone()))?;
        if self.blocks < STORE_BLOCKS_MIN {
            let needed = STORE_BLOCKS_MIN;
            return Err(StoreError::DeviceTooSmall { blocks: self.blocks, needed });
        }
        if self.blocks > BLOCKS_MAX {
            return Err(StoreError::DeviceTooLarge { blocks: self.blocks });
        }
        let superblock = Superblock {
            version: VERSION,
            block_shift: BLOCK_SHIFT,
            incompatible: 0,
            read_only_compatible: 0,
            compatible: 0,
            blocks: self.blocks,
            used: 0,
            volumes: 0,
            next_volume: 1,
            catalogue: Pointer::NONE,
            names: Pointer::NONE,
            work: Pointer::NONE,
            space: Pointer::NONE,
            name,
            thresholds: [0; 2],
            gap: [0; 6],
            promised: 0,
            first: 0,
            devices: 0,
            spans: 0,
            epoch: 0,
            owner: 0,
            reserved: [0; 8],
        };
        let of = |generation| superblocks(self.uuid, generation, superblock);
        Ok((1..=SLOTS).flat_map(of).collect())
    }
}

/// Both copies of a superblock, and a flush.
fn superblocks(uuid: u128, generation: u64, superblock: Superblock) -> Vec<Step> {
    let devices = Arc::new(Devices::one(superblock.blocks));
    let body = Body::Superblock(superblock, devices, OwnerRecord::NONE);
    let page = Page { kind: Kind::Superblock, generation, owner: 0, body };
    let places = Superblock::places(generation, superblock.blocks);
    let writes = places.map(|at| Step::Write { at, bytes: page.encode(uuid, at) });
    writes.into_iter().chain([Step::Flush]).collect()
}

impl Opening {
    /// Begins to open the store on a first device of so many blocks of 4 KiB. Its cache of metadata will
    /// take `cache_bytes`, and 512 KiB at least.
    pub fn new(blocks: u64, cache_bytes: usize) -> Self {
        let ends = [0, 1, blocks.saturating_sub(1), blocks.saturating_sub(2)];
        let mut to_read: Vec<u64> = ends.into_iter().filter(|at| *at < blocks).collect();
        to_read.sort_unstable();
        to_read.dedup();
        let (found, newer, damaged, label) = (Vec::new(), None, Vec::new(), None);
        let (me, bugs, may_be_short) = (None, InjectedBugs::default(), false);
        Self { blocks, cache_bytes, to_read, found, newer, damaged, label, me, may_be_short, bugs }
    }

    /// The same for somebody who writes to it, and claims it before the first change: see
    /// [`Store::owner`] for who has it, and [`Store::claim_as`] for how it is taken over. Without an
    /// owner, only a store that nobody has is written to.
    #[must_use]
    pub const fn to_write(mut self, me: Owner) -> Self {
        self.me = Some(me);
        self
    }

    /// The same for a rescue: the device may be shorter than the store, of which the rest is lost.
    #[must_use]
    pub const fn to_rescue(mut self) -> Self {
        self.may_be_short = true;
        self
    }

    /// The same with bugs.
    #[doc(hidden)]
    #[must_use]
    pub const fn with_bugs(mut self, bugs: InjectedBugs) -> Self {
        self.bugs = bugs;
        self
    }

    /// The next block that has to be read; `None` once that was all.
    pub fn next_read(&self) -> Option<u64> {
        self.to_read.last().copied()
    }

    /// The block that was to be read has been, or not.
    pub fn handle_read(&mut self, bytes: Result<&Block, Outcome>) {
        let Some(at) = self.to_read.pop() else { return };
        if at == 0 {
            self.label = bytes.ok().and_then(|bytes| Label::decode(bytes).ok());
        }
        let owner = bytes.map_or(OwnerRecord::NONE, decode_owner);
        let decoded = bytes.map_err(Flaw::Unread).and_then(|bytes| decode_superblock(bytes, at));
        match decoded {
            Ok((_, _, superblock, _)) if superblock.is_unknown() => {
                self.newer = Some((superblock.version, superblock.unknown_features()));
            }
            Ok((store, generation, superblock, devices)) => {
                self.found.push((at, Found { store, generation, superblock, devices, owner }));
                self.look_at_the_old_end(&superblock);
            }
            Err(flaw) => {
                let kind = Some(Kind::Superblock);
                self.damaged.push(Damage { address: at, kind, owner: 0, flaw });
            }
        }
    }

    /// If the device is longer than what the store has of it, the last superblocks are not at its end.
    fn look_at_the_old_end(&mut self, superblock: &Superblock) {
        if superblock.front() >= self.blocks {
            return;
        }
        let device_end = self.blocks - SLOTS;
        self.damaged.retain(|damage| damage.address < device_end);
        self.to_read.retain(|at| *at < device_end);
        for at in superblock.front() - SLOTS..superblock.front() {
            let is_known = self.to_read.contains(&at)
                || self.found.iter().any(|(found, _)| *found == at)
                || self.damaged.iter().any(|damage| damage.address == at);
            if !is_known {
                self.to_read.push(at);
            }
        }
    }

    /// The open store: what its newest superblock says.
    ///
    /// # Errors
    ///
    /// Why it cannot be opened.
    pub fn finish(mut self) -> Result<Opened, StoreError> {
        // Superblocks that it had before it was given to a store are nobody's.
        if let Some(label) = self.label {
            return Err(StoreError::NotFirst(Box::new(label)));
        }
        // Whoever is newer may have written only some of them.
        if let Some((version, features)) = self.newer {
            return Err(StoreError::Newer { version, features });
        }
        let newest = self.found.iter().map(|(_, found)| found).max_by_key(|found| found.generation);
        let Some(newest) = newest.cloned() else { return Err(StoreError::NoStore(self.damaged)) };
        let Found { store, generation, superblock, devices, owner } = newest;
        if let Some((_, other)) = self.found.iter().find(|(_, found)| found.store != store) {
            return Err(StoreError::TwoStores { first: store, second: other.store });
        }
        let (blocks, needed) = (self.blocks, devices.needs(0));
        if needed > blocks && !self.may_be_short {
            return Err(StoreError::DeviceTooSmall { blocks, needed });
        }
        if needed > blocks {
            // The end of the device is not the end of the store.
            self.damaged.retain(|damage| damage.address < SLOTS);
        }
        let mut store = Store::new(store, generation, superblock, devices, self.cache_bytes);
        store.open_as(owner, self.me, self.bugs);
        Ok(Opened { store, damaged: self.damaged })
    }
}

const _: () = assert!(BLOCK_BYTES == 4096, "as the documentation of `Opening` counts");
