//! Commits: all changes since the last commit become durable together.
//!
//! ```text
//!   counts into the tree | write new pages | flush | write superblock, twice | flush
//!                        ^ the next transaction opens here
//! ```
//!
//! New pages go to blocks that no durable superblock refers to. So the pool keeps its old state until one
//! of the two copies of the new superblock is on the device, and has the new state from then on.
//!
//! The superblock that a pool was opened with may exist only in a volatile cache: its writer may have
//! been killed before the flush, or the flush may have failed. So before any change, the pool is
//! anchored: that superblock is written again and flushed, and then once more with the next generation,
//! since pages of an abandoned transaction may already have that generation.

use std::sync::Arc;

use tenmil_base::IoStatus;

use super::{ActionResult, BACKLOG, DeviceAction, IoPurpose, Pool};
use crate::commit_cost::ReserveToLeave;
use crate::device_table::DeviceTable;
use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{BLOCK_BYTES, BlockKind, OwnerRecord, Page, PageBody, Superblock};
use crate::metadata::{Metadata, TransactionStop};
use crate::space_map::COUNT_BLOCKS;

/// State of the commit: the completion that it waits for.
#[derive(Debug)]
pub(super) enum CommitState {
    Idle,
    /// Reads of the superblocks at the start, to check that this instance still owns the pool.
    Slots(StepAfterSuperblockCheck),
    /// Counts are applied to the tree; a page may be missing.
    Applying,
    /// Writes of new pages.
    Pages(CommitSnapshot, u64),
    /// The flush after them.
    PagesFlush(CommitSnapshot),
    /// Writes of the superblock.
    Superblocks(CommitSnapshot, u64),
    /// The flush after those.
    SuperblocksFlush(CommitSnapshot),
}

/// State that a commit makes durable.
#[derive(Clone, Debug)]
pub(super) struct CommitSnapshot {
    pub(super) generation: u64,
    pub(super) superblock: Superblock,
    pub(super) devices: Arc<DeviceTable>,
    pub(super) owner: OwnerRecord,
}

/// Next step after a check of the superblocks.
#[derive(Clone, Debug)]
pub(super) enum StepAfterSuperblockCheck {
    /// The pool is claimed.
    Claim,
    /// The claim, in this state, is on the device.
    Claimed(Box<CommitSnapshot>),
    /// A commit is assembled.
    Commit,
}

/// Number of blocks in the longest write of metadata.
const RUN_BLOCKS: usize = 64;

impl CommitState {
    pub(super) const fn is_applying(&self) -> bool {
        matches!(self, Self::Applying)
    }

    /// Whether a change made now is still part of the commit in progress.
    pub(super) const fn accepts_changes(&self) -> bool {
        matches!(self, Self::Applying | Self::Slots(StepAfterSuperblockCheck::Commit))
    }
}

impl Pool {
    /// Begins a commit if one is wanted and none is in progress.
    pub(super) fn begin_commit(&mut self) -> bool {
        let is_wanted = self.wants_commit || self.pending_commit_writes() > BACKLOG;
        if self.stopped || !is_wanted || !matches!(self.commit, CommitState::Idle) {
            return false;
        }
        self.wants_commit = false;
        if self.checks_ownership() {
            self.read_superblock_slots(StepAfterSuperblockCheck::Commit);
        } else {
            self.commit = CommitState::Applying;
        }
        true
    }

    /// Applies counts to the tree, as far as its pages are in memory.
    pub(super) fn apply_refcounts(&mut self) {
        while self.commit.is_applying() {
            let room = self.books.fill_metadata_reserve(COUNT_BLOCKS, ReserveToLeave::Nothing);
            let applied = room.and_then(|()| self.books.apply_refcount_delta());
            match applied {
                Ok(true) => self.books.cache.end_step(),
                Ok(false) => self.start_commit_writes(),
                Err(TransactionStop::NeedPage(address)) => return self.read_page(address),
                Err(TransactionStop::Full) => self.stop_pool(&self.books.no_space_error()),
                Err(TransactionStop::Error(error) | TransactionStop::NeedSpace(error)) => {
                    self.stop_pool(&error)
                }
            }
        }
    }

    /// Hands the new pages to the device, and opens the next transaction.
    fn start_commit_writes(&mut self) {
        let books = &mut self.books;
        let overfull = books.dirty.iter().filter(|(_, page)| page.is_overfull());
        if let Some((&address, page)) = overfull.min_by_key(|(address, _)| **address) {
            let (kind, owner) = (Some(page.kind), page.owner);
            let damage = Corruption { address, kind, owner, flaw: CorruptionKind::Records };
            return self.stop_pool(&damage.into());
        }
        let devices = Arc::clone(&books.devices);
        let (generation, superblock) = (books.generation, books.superblock);
        let owner = self.owner_record_of(&superblock);
        let books = &mut self.books;
        let frozen = CommitSnapshot { generation, superblock, devices, owner };
        books.writing = std::mem::take(&mut books.dirty);
        self.frozen = books.superblock;
        books.generation += 1;
        books.space.fresh = 0;
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut pages: Vec<(u64, &Arc<Page>)> =
            books.writing.iter().map(|(address, page)| (*address, page)).collect();
        pages.sort_unstable_by_key(|(address, _)| *address);
        for (address, page) in pages {
            let bytes = page.encode(books.store, address);
            match runs.last_mut() {
                Some((at, run))
                    if *at + (run.len() / BLOCK_BYTES) as u64 == address
                        && run.len() < RUN_BLOCKS * BLOCK_BYTES =>
                {
                    run.extend_from_slice(&bytes[..]);
                }
                _ => runs.push((address, bytes.to_vec())),
            }
        }
        // Changes from here on belong to the next transaction, so the waiting tasks may continue.
        let is_empty = runs.is_empty();
        self.commit = CommitState::Pages(frozen.clone(), runs.len() as u64);
        for (at, bytes) in runs {
            let io = self.start_io(IoPurpose::Commit);
            self.actions.push_back(DeviceAction::WritePages { io, at, bytes });
        }
        self.ready.extend(self.on_apply.drain(..));
        if is_empty {
            self.submit_commit_flush(CommitState::PagesFlush(frozen));
        }
    }

    fn submit_commit_flush(&mut self, next: CommitState) {
        let io = self.start_io(IoPurpose::Commit);
        self.actions.push_back(DeviceAction::Flush { io });
        self.commit = next;
    }

    /// Handles the result of a write or flush of a commit.
    pub(super) fn handle_commit_completion(&mut self, end: ActionResult<'_>) {
        if let ActionResult::Failed(status) = end {
            // A write that fails loses nothing that was completed: a device that takes no more writes is
            // still read from.
            let is_flush = matches!(
                self.commit,
                CommitState::PagesFlush(_) | CommitState::SuperblocksFlush(_)
            );
            self.has_lost_writes |= is_flush && status == IoStatus::WRITE_FAULT;
            if matches!(self.commit, CommitState::Pages(..)) {
                // A page write that failed may still reach the device later.
                let Metadata { writing, space, .. } = &mut self.books;
                writing.keys().for_each(|page| space.mark_bad(*page..*page + 1));
            }
            return self
                .stop_pool(&PoolError::Device { what: "write metadata of the pool", status });
        }
        match std::mem::replace(&mut self.commit, CommitState::Idle) {
            CommitState::Slots(next) => self.handle_superblock_slots(next, end),
            // Before anchoring ends, the flush only made the opened state durable, or the claim.
            CommitState::SuperblocksFlush(frozen) if !self.is_anchored => {
                self.handle_first_commit_written(frozen)
            }
            CommitState::Pages(frozen, 1) => {
                self.submit_commit_flush(CommitState::PagesFlush(frozen))
            }
            CommitState::Pages(frozen, left) => self.commit = CommitState::Pages(frozen, left - 1),
            CommitState::PagesFlush(frozen) => self.write_superblocks(frozen),
            CommitState::Superblocks(frozen, 1) => {
                self.submit_commit_flush(CommitState::SuperblocksFlush(frozen))
            }
            CommitState::Superblocks(frozen, left) => {
                self.commit = CommitState::Superblocks(frozen, left - 1)
            }
            CommitState::SuperblocksFlush(frozen) => self.end_commit(&frozen),
            CommitState::Idle | CommitState::Applying => {}
        }
    }

    pub(super) fn write_superblocks(&mut self, frozen: CommitSnapshot) {
        let CommitSnapshot { generation, superblock, devices, owner } = frozen.clone();
        let places =
            Superblock::superblock_addresses(generation, superblock.first_device_reserved_blocks());
        let body = PageBody::Superblock(superblock, devices, owner);
        let page = Page { kind: BlockKind::Superblock, generation, owner: 0, body };
        for at in places {
            let io = self.start_io(IoPurpose::Commit);
            let bytes = page.encode(self.books.store, at).to_vec();
            self.actions.push_back(DeviceAction::WritePages { io, at, bytes });
        }
        self.commit = CommitState::Superblocks(frozen, places.len() as u64);
    }

    /// Begins to make the state that the pool was opened with durable, if that has not begun.
    pub(super) fn start_first_commit(&mut self) {
        if !matches!(self.commit, CommitState::Idle) {
            return;
        }
        if self.checks_ownership() {
            self.read_superblock_slots(StepAfterSuperblockCheck::Claim);
        } else {
            self.write_superblocks(self.durable_superblock.clone());
        }
    }

    /// Handles that the superblock of the opened state, or the one after it, is durable.
    fn handle_first_commit_written(&mut self, frozen: CommitSnapshot) {
        if frozen.generation < self.books.generation {
            return self.write_claim_superblock(frozen);
        }
        if self.checks_ownership() {
            return self.read_superblock_slots(StepAfterSuperblockCheck::Claimed(Box::new(frozen)));
        }
        self.end_first_commit(&frozen);
    }

    /// Ends the anchoring: changes from now on apply to a pool that is durable and owned by this
    /// instance.
    pub(super) fn end_first_commit(&mut self, frozen: &CommitSnapshot) {
        self.is_anchored = true;
        self.books.generation += 1;
        self.end_commit(frozen);
        self.ready.extend(self.on_apply.drain(..));
    }

    /// Ends a commit that is durable: resumes the tasks that waited for it and releases the blocks that
    /// it freed.
    fn end_commit(&mut self, frozen: &CommitSnapshot) {
        self.durable_superblock = frozen.clone();
        self.is_unproven = false;
        (self.is_sweep_stuck, self.books.sweep_from) = (false, 0);
        for (address, page) in std::mem::take(&mut self.books.writing) {
            self.books.cache.put(address, page);
        }
        self.release_freed_blocks();
        let (done, waiting) =
            self.on_commit.drain(..).partition(|(generation, _)| *generation <= frozen.generation);
        self.on_commit = waiting;
        let done: Vec<(u64, u64)> = done;
        self.ready.extend(done.into_iter().map(|(_, task)| task));
    }

    /// Releases freed blocks for allocation, and dereferenced blocks for overwriting, if no durable
    /// superblock refers to them and no transfer may access them.
    pub(super) fn release_freed_blocks(&mut self) {
        let oldest = self.transfers.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest);
        let oldest = oldest.min(self.oldest_read);
        let durable = self.durable_superblock.generation;
        // A transfer planned in a transaction may use every block that was mapped then, so data blocks
        // freed in it or later must wait for the transfer.
        let past = durable.min(oldest.saturating_sub(1));
        let held = self.held.iter().min().copied().unwrap_or(u64::MAX);
        self.books.space.release_quarantined(durable, past, held);
        self.books.space.forget_durable_changes(past);
    }

    /// Stops the pool: it rejects all changes. The durable state remains unchanged.
    pub(super) fn stop_pool(&mut self, error: &PoolError) {
        (self.stopped, self.commit, self.wants_commit) = (true, CommitState::Idle, false);
        if self.stopped_by.is_none() {
            self.stopped_by = Some(error.clone());
            self.last_stop = Some(error.clone());
            self.losses += 1;
        }
        self.cancel_actions_if_taken_over();
        let waiting = std::mem::take(&mut self.on_commit);
        let waiting = waiting.into_iter().map(|(_, task)| task).chain(self.on_apply.drain(..));
        for task in waiting.collect::<Vec<_>>() {
            self.fail_task(task, error.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::format::{BlockKind, Page, PageBody, Record, decode_superblock};
    use crate::open::{CreateStep, PoolConfig};
    use crate::pool::Pool;

    #[test]
    fn oversized_node_stops_the_pool_before_any_write() {
        let steps = PoolConfig { name: "s".into(), uuid: 7, blocks: 512 }.create_steps().unwrap();
        let CreateStep::Write { at, bytes } = &steps[0] else { panic!() };
        let (uuid, generation, superblock, devices) = decode_superblock(bytes, *at).unwrap();
        let mut store = Pool::new(uuid, generation, superblock, devices, 0);
        let records = (0..169).map(|key| Record { key, value: key + 2, extra: 1 }).collect();
        let body = PageBody::Node { level: 0, records };
        let page = Page { kind: BlockKind::Map, generation: generation + 1, owner: 1, body };
        store.books.dirty.insert(100, Arc::new(page));
        (store.is_anchored, store.wants_commit) = (true, true);
        assert_eq!(store.next_action(), None);
        assert!(store.stopped);
    }
}
