//! Commits: all that was changed since the last one becomes durable together.
//!
//! ```text
//!   put counts into the tree | write new pages | flush | write superblock, twice | flush
//!                            ^ the next transaction opens here
//! ```
//!
//! New pages go to blocks that no durable superblock refers to, so until one of the two copies of
//! the new superblock is on the device the store is what it was, and from then on what it became.

use super::{Action, BACKLOG, End, Purpose, Store};
use crate::books::Stop;
use crate::error::StoreError;
use crate::format::{BLOCK_BYTES, Body, Kind, Page, Superblock};
use crate::space::COUNT_BLOCKS;

/// What is awaited.
#[derive(Debug)]
pub(super) enum Commit {
    Idle,
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
#[derive(Clone, Copy, Debug)]
pub(super) struct Frozen {
    generation: u64,
    superblock: Superblock,
}

/// Blocks in the longest write of metadata.
const RUN_BLOCKS: usize = 64;

impl Commit {
    pub(super) const fn is_applying(&self) -> bool {
        matches!(self, Self::Applying)
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
        self.commit = Commit::Applying;
        true
    }

    /// Puts counts into the tree, as far as its pages are there.
    pub(super) fn apply(&mut self) {
        while self.commit.is_applying() {
            let room = self.books.fill_pool(COUNT_BLOCKS, true);
            let applied = room.and_then(|()| self.books.apply_delta());
            match applied {
                Ok(true) => {}
                Ok(false) => self.freeze(),
                Err(Stop::Need(address)) => return self.ask_for(address),
                Err(Stop::Full) => self.stop(&self.books.no_space()),
                Err(Stop::Error(error)) => self.stop(&error),
            }
        }
    }

    /// Hands the new pages to the device, and opens the next transaction.
    fn freeze(&mut self) {
        let books = &mut self.books;
        let frozen = Frozen { generation: books.generation, superblock: books.superblock };
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
        self.commit = Commit::Pages(frozen, runs.len() as u64);
        for (at, bytes) in runs {
            let io = self.enter(Purpose::Commit);
            self.actions.push_back(Action::WritePages { io, at, bytes });
        }
        self.ready.extend(self.on_apply.drain(..));
        if matches!(self.commit, Commit::Pages(_, 0)) {
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
            return self.stop(&StoreError::Device { what: "write metadata of the store", outcome });
        }
        match std::mem::replace(&mut self.commit, Commit::Idle) {
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

    fn write_superblocks(&mut self, frozen: Frozen) {
        let Frozen { generation, superblock } = frozen;
        let places = Superblock::places(generation, superblock.blocks);
        let body = Body::Superblock(superblock);
        let page = Page { kind: Kind::Superblock, generation, owner: 0, body };
        for at in places {
            let io = self.enter(Purpose::Commit);
            let bytes = page.encode(self.books.store, at).to_vec();
            self.actions.push_back(Action::WritePages { io, at, bytes });
        }
        self.commit = Commit::Superblocks(frozen, places.len() as u64);
    }

    /// It is durable: whoever waited for it may go on, and what it has freed may be given out.
    fn end_commit(&mut self, frozen: &Frozen) {
        self.durable = (frozen.generation, frozen.superblock);
        for (address, page) in std::mem::take(&mut self.books.writing) {
            self.books.cache.put(address, page);
        }
        self.books.space.settle(frozen.generation);
        self.release();
        let (done, waiting) =
            self.on_commit.drain(..).partition(|(generation, _)| *generation <= frozen.generation);
        self.on_commit = waiting;
        let done: Vec<(u64, u64)> = done;
        self.ready.extend(done.into_iter().map(|(_, task)| task));
    }

    /// Lets freed blocks be given out that no durable superblock refers to and no transfer touches.
    pub(super) fn release(&mut self) {
        let oldest = self.transfers.first_key_value().map_or(u64::MAX, |(oldest, _)| *oldest);
        self.books.space.release(self.durable.0.min(oldest.saturating_sub(1)));
    }

    /// Takes no changes any more. What is durable stays what it is.
    fn stop(&mut self, error: &StoreError) {
        (self.stopped, self.commit) = (true, Commit::Idle);
        let waiting = std::mem::take(&mut self.on_commit);
        let waiting = waiting.into_iter().map(|(_, task)| task).chain(self.on_apply.drain(..));
        for task in waiting.collect::<Vec<_>>() {
            self.fail(task, error.clone());
        }
    }
}
