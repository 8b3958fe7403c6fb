//! The books of a store: its pages, counts and roots as they are in the open transaction.
//!
//! Whatever changes them does so inside [`Books::attempt`]: if it stops, because a page has to be
//! read first or there is no room, the books are as they were, and it may be tried again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::cache::Cache;
use crate::devices::Devices;
use crate::edit::FULL;
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{Body, Kind, Page, Pointer, Superblock};
use crate::space::Space;

/// The books.
#[derive(Debug)]
pub(crate) struct Books {
    /// Which store it is.
    pub(crate) store: u128,
    /// The open transaction.
    pub(crate) generation: u64,
    /// What the next superblock will say.
    pub(crate) superblock: Superblock,
    /// What it will say of the devices.
    pub(crate) devices: Arc<Devices>,
    /// Pages that this transaction has made.
    pub(crate) dirty: BTreeMap<u64, Arc<Page>>,
    /// Pages of the transaction that is being committed.
    pub(crate) writing: BTreeMap<u64, Arc<Page>>,
    pub(crate) cache: Cache,
    /// Pages that turned out to be damaged, until whoever waited for them has seen it.
    pub(crate) damaged: BTreeMap<u64, Damage>,
    pub(crate) space: Space,
    /// Volumes of which blocks that were mapped lie elsewhere now, or nowhere.
    pub(crate) remapped: BTreeSet<u64>,
    /// A node with more records than this is split.
    pub(crate) full: usize,
    /// How many mapped blocks a step gives back at most.
    pub(crate) step_blocks: u64,
    /// The first number on the list of work that may be worked on; those before it are damaged.
    pub(crate) sweep_from: u64,
    undo: Vec<Undo>,
}

/// Why a change has not been made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// This block has to be read first.
    Need(u64),
    /// There is no room; there may be after a commit.
    Full,
    /// There is not as much room as this says; there may be after a commit.
    Short(Box<StoreError>),
    /// It cannot be made.
    Error(Box<StoreError>),
}

/// How to take one step back.
#[derive(Debug)]
enum Undo {
    /// This is what stood in `dirty`.
    Page(u64, Option<Arc<Page>>),
    /// This was added to counts, and these had nothing to be added before.
    Delta(Range<u64>, i64, Vec<Range<u64>>),
    /// This block was taken out of the pool.
    Pool(u64),
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        Self::Error(Box::new(error))
    }
}

impl From<Damage> for Stop {
    fn from(damage: Damage) -> Self {
        StoreError::from(damage).into()
    }
}

impl Books {
    pub(crate) fn new(
        store: u128,
        generation: u64,
        superblock: Superblock,
        devices: Arc<Devices>,
        budget_bytes: usize,
    ) -> Self {
        let space = Space::new(&superblock);
        Self {
            store,
            generation: generation + 1,
            superblock,
            devices,
            dirty: BTreeMap::new(),
            writing: BTreeMap::new(),
            cache: Cache::new(budget_bytes),
            damaged: BTreeMap::new(),
            space,
            remapped: BTreeSet::new(),
            full: FULL,
            step_blocks: u64::MAX,
            sweep_from: 0,
            undo: Vec::new(),
        }
    }

    /// These books begin where others end that came to nothing: what those know of the medium stays true.
    pub(crate) fn inherit(&mut self, mut others: Self) {
        (self.full, self.step_blocks) = (others.full, others.step_blocks);
        others.cache.clear();
        std::mem::swap(&mut self.cache, &mut others.cache);
        if self.full < FULL {
            self.keep_more();
        }
        self.remapped = others.remapped;
        self.space.inherit(&others.space);
    }

    /// Makes a change wholly or not at all.
    pub(crate) fn attempt<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let (superblock, fresh) = (self.superblock, self.space.fresh);
        let outcome = change(self);
        if outcome.is_err() {
            while let Some(step) = self.undo.pop() {
                self.take_back(step);
            }
            (self.superblock, self.space.fresh) = (superblock, fresh);
        }
        self.undo.clear();
        outcome
    }

    fn take_back(&mut self, step: Undo) {
        match step {
            Undo::Page(address, Some(page)) => {
                self.dirty.insert(address, page);
            }
            Undo::Page(address, None) => {
                self.dirty.remove(&address);
            }
            Undo::Delta(range, delta, gaps) => self.space.deltas.take_back(range, delta, gaps),
            Undo::Pool(block) => self.space.pool.insert(block..block + 1),
        }
    }

    /// The page that `pointer` names, which must be of this kind, and of this level if one is given.
    pub(crate) fn page(
        &mut self,
        pointer: Pointer,
        kind: Kind,
        level: Option<u8>,
    ) -> Result<Arc<Page>, Stop> {
        let address = pointer.address;
        let damage = |flaw| Damage { address, kind: Some(kind), owner: 0, flaw };
        if !self.superblock.room().contains(&address) {
            return Err(damage(Flaw::Bounds).into());
        }
        let known = self.dirty.get(&address).or_else(|| self.writing.get(&address)).cloned();
        let Some(page) = known.or_else(|| self.cache.get(address)) else {
            let found = self.damaged.get(&address).cloned();
            return Err(found
                .map_or(Stop::Need(address), |found| Damage { kind: Some(kind), ..found }.into()));
        };
        let damage = |flaw| Damage { address, kind: Some(kind), owner: page.owner, flaw };
        if page.kind != kind || level.is_some_and(|level| level != page.level()) {
            let flaw = Flaw::Kind { found: page.kind, level: page.level() };
            return Err(damage(flaw).into());
        }
        if page.generation != pointer.generation {
            let (found, expected) = (page.generation, pointer.generation);
            return Err(damage(Flaw::Generation { found, expected }).into());
        }
        Ok(page)
    }

    /// The page at `address`, to be changed: one that this transaction has made.
    pub(crate) fn edit(&mut self, address: u64) -> Result<&mut Page, Stop> {
        let damage = Damage { address, kind: None, owner: 0, flaw: Flaw::Bounds };
        let page = self.dirty.get_mut(&address).ok_or(damage)?;
        self.undo.push(Undo::Page(address, Some(Arc::clone(page))));
        Ok(Arc::make_mut(page))
    }

    /// Puts a new page somewhere, and says where.
    pub(crate) fn put_new(&mut self, kind: Kind, owner: u64, body: Body) -> Result<Pointer, Stop> {
        let generation = self.generation;
        let address = self.space.pool.take_first().ok_or(Stop::Full)?;
        self.undo.push(Undo::Pool(address));
        self.space.fresh += 1;
        self.add(address..address + 1, 1);
        let page = Arc::new(Page { kind, generation, owner, body });
        let before = self.dirty.insert(address, page);
        self.undo.push(Undo::Page(address, before));
        // What was cached of an earlier life of the block must not come back.
        self.cache.forget(address);
        Ok(Pointer { address, generation })
    }

    /// Gives up one reference to a page that nobody else refers to.
    pub(crate) fn drop_page(&mut self, address: u64) {
        self.add(address..address + 1, -1);
        // Should the change be undone, it is a page still, and this is true of it later.
        self.space.dropped.insert(address);
        if let Some(page) = self.dirty.remove(&address) {
            self.undo.push(Undo::Page(address, Some(page)));
        }
    }

    /// Adds to the counts of blocks.
    pub(crate) fn add(&mut self, range: Range<u64>, delta: i64) {
        let gaps = self.space.deltas.enter(range.clone(), delta);
        self.undo.push(Undo::Delta(range, delta, gaps));
    }

    /// A block that was asked for has been read.
    pub(crate) fn handle_read(&mut self, address: u64, page: Result<Page, Damage>) {
        let inside = page.and_then(|page| match page.stays_in(&self.superblock.room()) {
            true => Ok(page),
            false => {
                let (kind, owner, flaw) = (Some(page.kind), page.owner, Flaw::Records);
                Err(Damage { address, kind, owner, flaw })
            }
        });
        match inside {
            Ok(page) => self.cache.put(address, Arc::new(page)),
            Err(damage) => {
                self.damaged.insert(address, damage);
            }
        }
    }
}
