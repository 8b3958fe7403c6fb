//! Commits: all that was changed since the last one becomes durable together.
//!
//! ```text
//!   put counts into the tree | write new pages | flush | write superblock, twice | flush
//!                            ^ the next transaction opens here
//! ```
//!
//! New pages go to blocks that no durable superblock refers to, so until one of the two copies of
//! the new superblock is on the device the store is what it was, and from then on what it became.
//!
//! The superblock that a store was opened with may be in a volatile cache alone: whoever wrote it may
//! have been killed before the flush, or the flush may have failed. So before anything is changed,
//! the store is anchored: that superblock is written again and flushed, and then once more with the
//! next generation, which pages of a transaction that came to nothing may bear already.

use std::sync::Arc;

use super::{Action, BACKLOG, End, Purpose, Store};
use crate::books::{Books, Stop};
use crate::cost::Leaves;
use crate::devices::Devices;
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{BLOCK_BYTES, Body, Kind, OwnerRecord, Page, Superblock};
use crate::space::COUNT_BLOCKS;

/// What is awaited.
#[derive(Debug)]
pub(super) enum Commit {
    Idle,
    /// The superblocks at the start, to see whether the store is still ours.
    Slots(Looked),
    /// Counts go into the tree; perhaps a page is missing.
    Applying,
    /// Writes of new pages.
    Pages(Frozen, u64),
    /// The flush behind them.
    PagesFlush(Frozen),
    /// Writes of the superblock.
    Superblocks(Frozen, u64),
    /// The flush behind those.
    SuperblocksFlush(Frozen),
}

/// What a commit makes durable.
#[derive(Clone, Debug)]
pub(super) struct Frozen {
    pub(super) generation: u64,
    pub(super) superblock: Superblock,
    pub(super) devices: Arc<Devices>,
    pub(super) owner: OwnerRecord,
}

/// What comes behind a look at the superblocks.
#[derive(Clone, Debug)]
pub(super) enum Looked {
    /// The store is claimed.
    Claim,
    /// It is claimed, and this is what says so.
    Claimed(Box<Frozen>),
    /// A commit is put together.
    Commit,
}

/// Blocks in the longest write of metadata.
const RUN_BLOCKS: usize = 64;

impl Commit {
    pub(super) const fn is_applying(&self) -> bool {
        matches!(self, Self::Applying)
    }

    /// Whether what is changed now is still in the commit that is under way.
    pub(super) const fn is_gathering(&self) -> bool {
        matches!(self, Self::Applying | Self::Slots(Looked::Commit))
    }
}

impl Store {
    /// Begins a commit if one is wanted and none is under way.
    pub(super) fn begin_commit(&mut self) -> bool {
        let is_wanted = self.wants_commit || self.backlog() > BACKLOG;
        if self.stopped || !is_wanted || !matches!(self.commit, Commit::Idle) {
            return false;
        }
        self.wants_commit = false;
        if self.is_fenced() {
            self.look_at_slots(Looked::Commit);
        } else {
            self.commit = Commit::Applying;
        }
        true
    }

    /// Puts counts into the tree, as far as its pages are there.
    pub(super) fn apply(&mut self) {
        while self.commit.is_applying() {
            let room = self.books.fill_pool(COUNT_BLOCKS, Leaves::Nothing);
            let applied = room.and_then(|()| self.books.apply_delta());
            match applied {
                Ok(true) => self.books.cache.settle(),
                Ok(false) => self.freeze(),
                Err(Stop::Need(address)) => return self.ask_for(address),
                Err(Stop::Full) => self.stop(&self.books.no_space()),
                Err(Stop::Error(error) | Stop::Short(error)) => self.stop(&error),
            }
        }
    }

    /// Hands the new pages to the device, and opens the next transaction.
    fn freeze(&mut self) {
        let books = &mut self.books;
        if let Some((&address, page)) = books.dirty.iter().find(|(_, page)| page.is_overfull()) {
            let (kind, owner) = (Some(page.kind), page.owner);
            let damage = Damage { address, kind, owner, flaw: Flaw::Records };
            return self.stop(&damage.into());
        }
        let devices = Arc::clone(&books.devices);
        let (generation, superblock) = (books.generation, books.superblock);
        let owner = self.record_of(&superblock);
        let books = &mut self.books;
        let frozen = Frozen { generation, superblock, devices, owner };
        books.writing = std::mem::take(&mut books.dirty);
        self.frozen = books.superblock;
        books.generation += 1;
        books.space.fresh = 0;
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (&address, page) in &books.writing {
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
        let is_empty = runs.is_empty();
        self.commit = Commit::Pages(frozen.clone(), runs.len() as u64);
        for (at, bytes) in runs {
            let io = self.enter(Purpose::Commit);
            self.actions.push_back(Action::WritePages { io, at, bytes });
        }
        self.ready.extend(self.on_apply.drain(..));
        if is_empty {
            self.flush_commit(Commit::PagesFlush(frozen));
        }
    }

    fn flush_commit(&mut self, next: Commit) {
        let io = self.enter(Purpose::Commit);
        self.actions.push_back(Action::Flush { io });
        self.commit = next;
    }

    /// A write or a flush of a commit has ended.
    pub(super) fn handle_commit(&mut self, end: End<'_>) {
        if let End::Failed(outcome) = end {
            if matches!(self.commit, Commit::Pages(..)) {
                // A page that was not written may come to be written late.
                let Books { writing, space, .. } = &mut self.books;
                writing.keys().for_each(|page| space.spoil(*page..*page + 1));
            }
            return self.stop(&StoreError::Device { what: "write metadata of the store", outcome });
        }
        match std::mem::replace(&mut self.commit, Commit::Idle) {
            Commit::Slots(next) => self.handle_slots(next, end),
            Commit::SuperblocksFlush(frozen) if !self.is_anchored => self.handle_anchored(frozen),
            Commit::Pages(frozen, 1) => self.flush_commit(Commit::PagesFlush(frozen)),
            Commit::Pages(frozen, left) => self.commit = Commit::Pages(frozen, left - 1),
            Commit::PagesFlush(frozen) => self.write_superblocks(frozen),
            Commit::Superblocks(frozen, 1) => self.flush_commit(Commit::SuperblocksFlush(frozen)),
            Commit::Superblocks(frozen, left) => {
                self.commit = Commit::Superblocks(frozen, left - 1)
            }
            Commit::SuperblocksFlush(frozen) => self.end_commit(&frozen),
            Commit::Idle | Commit::Applying => {}
        }
    }

    pub(super) fn write_superblocks(&mut self, frozen: Frozen) {
        let Frozen { generation, superblock, devices, owner } = frozen.clone();
        let places = Superblock::places(generation, superblock.front());
        let body = Body::Superblock(superblock, devices, owner);
        let page = Page { kind: Kind::Superblock, generation, owner: 0, body };
        for at in places {
            let io = self.enter(Purpose::Commit);
            let bytes = page.encode(self.books.store, at).to_vec();
            self.actions.push_back(Action::WritePages { io, at, bytes });
        }
        self.commit = Commit::Superblocks(frozen, places.len() as u64);
    }

    /// Begins to make what the store was opened with durable, if nobody has yet.
    pub(super) fn anchor(&mut self) {
        if !matches!(self.commit, Commit::Idle) {
            return;
        }
        if self.is_fenced() {
            self.look_at_slots(Looked::Claim);
        } else {
            self.write_superblocks(self.durable.clone());
        }
    }

    /// The superblock that the store was opened with is durable, or the one behind it is.
    fn handle_anchored(&mut self, frozen: Frozen) {
        if frozen.generation < self.books.generation {
            return self.write_claim(frozen);
        }
        if self.is_fenced() {
            return self.look_at_slots(Looked::Claimed(Box::new(frozen)));
        }
        self.end_anchor(&frozen);
    }

    /// What is changed from now on is on a store that is durable, and ours.
    pub(super) fn end_anchor(&mut self, frozen: &Frozen) {
        self.is_anchored = true;
        self.books.generation += 1;
        self.end_commit(frozen);
        self.ready.extend(self.on_apply.drain(..));
    }

    /// It is durable: whoever waited for it may go on, and what it has freed may be given out.
    fn end_commit(&mut self, frozen: &Frozen) {
        self.durable = frozen.clone();
        self.is_unproven = false;
        (self.is_sweep_stuck, self.books.sweep_from) = (false, 0);
        for (address, page) in std::mem::take(&mut self.books.writing) {
            self.books.cache.put(address, page);
        }
        self.release();
        let (done, waiting) =
            self.on_commit.drain(..).partition(|(generation, _)| *generation <= frozen.generation);
        self.on_commit = waiting;
        let done: Vec<(u64, u64)> = done;
        self.ready.extend(done.into_iter().map(|(_, task)| task));
    }

    /// Lets freed blocks be given out, and blocks that someone has left be written over, that no
    /// durable superblock refers to and no transfer may touch.
    pub(super) fn release(&mut self) {
        let oldest = self.transfers.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest);
        let oldest = oldest.min(self.oldest_read);
        let durable = self.durable.generation;
        let past = durable.min(oldest.saturating_sub(1));
        let held = self.held.iter().min().copied().unwrap_or(u64::MAX);
        self.books.space.release(durable, past, held);
        self.books.space.settle(past);
    }

    /// Takes no changes any more. What is durable stays what it is.
    pub(super) fn stop(&mut self, error: &StoreError) {
        (self.stopped, self.commit, self.wants_commit) = (true, Commit::Idle, false);
        if self.stopped_by.is_none() {
            self.stopped_by = Some(error.clone());
            self.last_stop = Some(error.clone());
            self.losses += 1;
        }
        self.withdraw();
        let waiting = std::mem::take(&mut self.on_commit);
        let waiting = waiting.into_iter().map(|(_, task)| task).chain(self.on_apply.drain(..));
        for task in waiting.collect::<Vec<_>>() {
            self.fail(task, error.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::format::{Body, Kind, Page, Record, decode_superblock};
    use crate::open::{NewStore, Step};
    use crate::store::Store;

    #[test]
    fn a_node_that_no_block_has_room_for_stops_the_store_before_anything_is_written() {
        let steps = NewStore { name: "s".into(), uuid: 7, blocks: 512 }.steps().unwrap();
        let Step::Write { at, bytes } = &steps[0] else { panic!() };
        let (uuid, generation, superblock, devices) = decode_superblock(bytes, *at).unwrap();
        let mut store = Store::new(uuid, generation, superblock, devices, 0);
        let records = (0..169).map(|key| Record { key, value: key + 2, extra: 1 }).collect();
        let body = Body::Node { level: 0, records };
        let page = Page { kind: Kind::Map, generation: generation + 1, owner: 1, body };
        store.books.dirty.insert(100, Arc::new(page));
        (store.is_anchored, store.wants_commit) = (true, true);
        assert_eq!(store.next_action(), None);
        assert!(store.stopped);
    }
}
