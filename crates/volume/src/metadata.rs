//! Metadata of a pool: its pages, reference counts and roots as they are in the open transaction.
//!
//! Every change runs inside [`Metadata::try_update`]. If it stops, because a page has to be read first or
//! no space is free, the metadata are unchanged, and the change may be retried.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use crate::device_table::DeviceTable;
use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{BlockKind, Page, PageBody, Pointer, Record, Superblock};
use crate::page_cache::MetadataCache;
use crate::page_map::PageMap;
use crate::space_map::SpaceMap;
use crate::tree_edit::{FULL, RecordReplacement, replace_records};

/// Metadata in the open transaction.
#[derive(Debug)]
pub(crate) struct Metadata {
    /// UUID of the pool.
    pub(crate) store: u128,
    /// Generation of the open transaction.
    pub(crate) generation: u64,
    /// The next superblock.
    pub(crate) superblock: Superblock,
    /// The devices in the next superblock.
    pub(crate) devices: Arc<DeviceTable>,
    /// Pages created by this transaction.
    pub(crate) dirty: PageMap<Arc<Page>>,
    /// Pages of the transaction that is being committed.
    pub(crate) writing: PageMap<Arc<Page>>,
    pub(crate) cache: MetadataCache,
    /// Pages found to be corrupt, until the tasks that waited for them have run.
    pub(crate) damaged: BTreeMap<u64, Corruption>,
    pub(crate) space: SpaceMap,
    /// Volumes with mapped blocks that have moved, or are unmapped.
    pub(crate) remapped: BTreeSet<u64>,
    /// A node with more records than this is split.
    pub(crate) full: usize,
    /// Maximum number of mapped blocks that one step frees.
    pub(crate) step_blocks: u64,
    /// First key in the tree of deferred frees to process. Those before it are corrupt.
    pub(crate) sweep_from: u64,
    undo: Vec<UndoRecord>,
}

/// Reason why a change was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TransactionStop {
    /// This block must be read first.
    NeedPage(u64),
    /// No free space; there may be some after a commit.
    Full,
    /// Less free space than the error states is available; there may be enough after a commit.
    NeedSpace(Box<PoolError>),
    /// The change is not possible.
    Error(Box<PoolError>),
}

/// One undo step.
#[derive(Debug)]
enum UndoRecord {
    /// The previous entry in `dirty`.
    Page(u64, Option<Arc<Page>>),
    /// Records of a page: so many were put at this index, in place of these.
    Records { address: u64, at: usize, added: usize, removed: Vec<Record> },
    /// Change of the counts of a range, and the subranges that had no delta before.
    Delta(Range<u64>, i64, Vec<Range<u64>>),
    /// A block taken from the reserve for metadata.
    Pool(u64),
}

impl From<PoolError> for TransactionStop {
    fn from(error: PoolError) -> Self {
        Self::Error(Box::new(error))
    }
}

impl From<Corruption> for TransactionStop {
    fn from(damage: Corruption) -> Self {
        PoolError::from(damage).into()
    }
}

impl Metadata {
    pub(crate) fn new(
        store: u128,
        generation: u64,
        superblock: Superblock,
        devices: Arc<DeviceTable>,
        budget_bytes: usize,
    ) -> Self {
        let space = SpaceMap::new(&superblock);
        Self {
            store,
            generation: generation + 1,
            superblock,
            devices,
            dirty: PageMap::default(),
            writing: PageMap::default(),
            cache: MetadataCache::new(budget_bytes),
            damaged: BTreeMap::new(),
            space,
            remapped: BTreeSet::new(),
            full: FULL,
            step_blocks: u64::MAX,
            sweep_from: 0,
            undo: Vec::new(),
        }
    }

    /// Takes over from the metadata of an abandoned transaction what they know about the device.
    pub(crate) fn inherit_device_state(&mut self, mut others: Self) {
        (self.full, self.step_blocks) = (others.full, others.step_blocks);
        others.cache.clear();
        std::mem::swap(&mut self.cache, &mut others.cache);
        if self.full < FULL {
            self.raise_reserve();
        }
        self.remapped = others.remapped;
        self.space.copy_bad_blocks(&others.space);
    }

    /// Makes a change completely or not at all.
    pub(crate) fn try_update<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, TransactionStop>,
    ) -> Result<T, TransactionStop> {
        let (superblock, fresh) = (self.superblock, self.space.fresh);
        let status = change(self);
        if status.is_err() {
            // The steps are undone in reverse order.
            while let Some(step) = self.undo.pop() {
                self.undo_step(step);
            }
            (self.superblock, self.space.fresh) = (superblock, fresh);
        }
        self.undo.clear();
        status
    }

    fn undo_step(&mut self, step: UndoRecord) {
        match step {
            UndoRecord::Page(address, Some(page)) => {
                self.dirty.insert(address, page);
            }
            UndoRecord::Page(address, None) => {
                self.dirty.remove(&address);
            }
            UndoRecord::Records { address, at, added, removed } => {
                let page = self.dirty.get_mut(&address).map(Arc::make_mut);
                let records = page.and_then(|page| page.body.records_mut());
                let records = records.expect("the page was a node in this transaction");
                records.splice(at..at + added, removed);
            }
            UndoRecord::Delta(range, delta, gaps) => {
                self.space.deltas.subtract_all(range, delta, gaps)
            }
            UndoRecord::Pool(block) => self.space.pool.insert(block..block + 1),
        }
    }

    /// Returns the page of `pointer`, which must have this kind, and this level if one is given.
    pub(crate) fn load_page(
        &mut self,
        pointer: Pointer,
        kind: BlockKind,
        level: Option<u8>,
    ) -> Result<Arc<Page>, TransactionStop> {
        let address = pointer.address;
        let damage = |flaw| Corruption { address, kind: Some(kind), owner: 0, flaw };
        if !self.superblock.data_area().contains(&address) {
            return Err(damage(CorruptionKind::Bounds).into());
        }
        let known = self.dirty.get(&address).or_else(|| self.writing.get(&address)).cloned();
        let Some(page) = known.or_else(|| self.cache.get(address)) else {
            let found = self.damaged.get(&address).cloned();
            return Err(found.map_or(TransactionStop::NeedPage(address), |found| {
                Corruption { kind: Some(kind), ..found }.into()
            }));
        };
        let damage = |flaw| Corruption { address, kind: Some(kind), owner: page.owner, flaw };
        if page.kind != kind || level.is_some_and(|level| level != page.level()) {
            let flaw = CorruptionKind::Kind { found: page.kind, level: page.level() };
            return Err(damage(flaw).into());
        }
        // A lost write leaves an older page at the address: only the generation in the pointer reveals
        // it.
        if page.generation != pointer.generation {
            let (found, expected) = (page.generation, pointer.generation);
            return Err(damage(CorruptionKind::Generation { found, expected }).into());
        }
        Ok(page)
    }

    /// The page at `address`, for changing. It must be one that this transaction created.
    pub(crate) fn page_mut(&mut self, address: u64) -> Result<&mut Page, TransactionStop> {
        let damage = Corruption { address, kind: None, owner: 0, flaw: CorruptionKind::Bounds };
        let page = self.dirty.get_mut(&address).ok_or(damage)?;
        self.undo.push(UndoRecord::Page(address, Some(Arc::clone(page))));
        Ok(Arc::make_mut(page))
    }

    /// Replaces the contents of a key range of a leaf that this transaction created. Returns the records
    /// removed and added. Of the page, only these are kept for undoing it.
    pub(crate) fn splice_leaf(
        &mut self,
        address: u64,
        kind: BlockKind,
        range: &Range<u64>,
        line: Option<Record>,
    ) -> Result<(Vec<Record>, Vec<Record>), TransactionStop> {
        let damage = |flaw| Corruption { address, kind: Some(kind), owner: 0, flaw };
        let page = self.dirty.get_mut(&address).ok_or(damage(CorruptionKind::Bounds))?;
        let records = Arc::make_mut(page).body.records_mut();
        let records = records.ok_or(damage(CorruptionKind::Contents))?;
        let RecordReplacement { at, removed, added } = replace_records(records, kind, range, line);
        let (count, restored) = (added.len(), removed.clone());
        self.undo.push(UndoRecord::Records { address, at, added: count, removed: restored });
        Ok((removed, added))
    }

    /// Allocates a block for a new page and returns the pointer to it.
    pub(crate) fn create_page(
        &mut self,
        kind: BlockKind,
        owner: u64,
        body: PageBody,
    ) -> Result<Pointer, TransactionStop> {
        let generation = self.generation;
        let address = self.space.pool.take_first().ok_or(TransactionStop::Full)?;
        self.undo.push(UndoRecord::Pool(address));
        self.space.fresh += 1;
        self.add_references(address..address + 1, 1);
        let page = Arc::new(Page { kind, generation, owner, body });
        let before = self.dirty.insert(address, page);
        self.undo.push(UndoRecord::Page(address, before));
        // The cached contents of an earlier use of the block must not be returned again.
        self.cache.remove(address);
        Ok(Pointer { address, generation })
    }

    /// Drops the only reference to a page.
    pub(crate) fn free_page(&mut self, address: u64) {
        self.add_references(address..address + 1, -1);
        // If the change is undone, the block remains a page, and the entry becomes true later.
        self.space.dropped.insert(address);
        if let Some(page) = self.dirty.remove(&address) {
            self.undo.push(UndoRecord::Page(address, Some(page)));
        }
    }

    /// Adds to the reference counts of blocks.
    pub(crate) fn add_references(&mut self, range: Range<u64>, delta: i64) {
        let gaps = self.space.deltas.add_all(range.clone(), delta);
        self.undo.push(UndoRecord::Delta(range, delta, gaps));
    }

    /// Handles the result of a requested read.
    pub(crate) fn handle_read(&mut self, address: u64, page: Result<Page, Corruption>) {
        let inside =
            page.and_then(|page| match page.are_records_within(&self.superblock.data_area()) {
                true => Ok(page),
                false => {
                    let (kind, owner, flaw) =
                        (Some(page.kind), page.owner, CorruptionKind::Records);
                    Err(Corruption { address, kind, owner, flaw })
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
