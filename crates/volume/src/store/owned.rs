//! Who owns an open store: the claim before the first change, the look before each commit.

use super::commit::{Commit, Frozen, Looked};
use super::{Action, End, Purpose, Store};
use crate::error::StoreError;
use crate::fence::{Claim, InjectedBugs, Owner, TAKEOVER_GENERATIONS, look};
use crate::format::{OwnerRecord, Superblock, features};

impl Store {
    pub(crate) fn open_as(&mut self, found: OwnerRecord, me: Option<Owner>, bugs: InjectedBugs) {
        (self.durable.owner, self.me, self.bugs) = (found, me, bugs);
    }

    /// Who has it open for writing, as the last durable superblock says.
    pub fn owner(&self) -> Option<Owner> {
        Owner::of(&self.durable.superblock, self.durable.owner)
    }

    /// How it is claimed, before anything is changed.
    pub const fn claim_as(&mut self, claim: Claim) {
        self.claim = claim;
    }

    /// How often it was claimed, as the last durable superblock says.
    pub const fn epoch(&self) -> u64 {
        self.durable.superblock.epoch
    }

    /// Why it takes no changes any more, if it does not.
    pub const fn stopped_by(&self) -> Option<&StoreError> {
        self.stopped_by.as_ref()
    }

    /// Whether commits look who owns it.
    pub(super) const fn is_fenced(&self) -> bool {
        self.me.is_some() && !self.bugs.ignore_fence
    }

    /// Whether somebody else owns the store by now: nothing is read any more either, and runs that anybody
    /// has kept are no longer true.
    pub const fn is_taken_over(&self) -> bool {
        matches!(self.stopped_by, Some(StoreError::TakenOver { .. }))
    }

    /// Whether it may be claimed here.
    pub(super) fn may_claim(&self) -> Result<(), StoreError> {
        let Some(owner) = self.owner().filter(|_| !self.bugs.ignore_fence) else { return Ok(()) };
        let is_mine = self.me.is_some_and(|me| me.id == owner.id);
        match self.claim {
            Claim::Force if self.me.is_some() => Ok(()),
            Claim::Over(id) if self.me.is_some() && id == owner.id => Ok(()),
            _ if is_mine => Ok(()),
            _ => Err(StoreError::Owned { by: Box::new(owner) }),
        }
    }

    /// What a superblock says of its owner.
    pub(super) fn record_of(&self, superblock: &Superblock) -> OwnerRecord {
        let mine = self.me.filter(|me| me.id == superblock.owner);
        mine.map_or(OwnerRecord::NONE, |me| me.record)
    }

    pub(super) fn look_at_slots(&mut self, next: Looked) {
        let io = self.enter(Purpose::Commit);
        self.actions.push_back(Action::ReadSlots { io });
        self.commit = Commit::Slots(next);
    }

    pub(super) fn handle_slots(&mut self, next: Looked, end: End<'_>) {
        let End::Slots(slots) = end else {
            let outcome = base::Outcome::INTERNAL_ERROR;
            return self.stop(&StoreError::Device { what: "read the superblocks", outcome });
        };
        let at = if let Looked::Claimed(claimed) = &next { &**claimed } else { &self.durable };
        let expected = (at.generation, at.superblock.owner);
        if let Err(error) = look(slots, self.books.store, expected) {
            return self.stop(&error);
        }
        match next {
            Looked::Claim => self.write_superblocks(self.durable.clone()),
            Looked::Claimed(frozen) => {
                // Both slots are to be ours, so that no late superblock of a former owner is the newest.
                self.wants_commit |= self.claim != Claim::Free;
                self.end_anchor(&frozen);
            }
            Looked::Commit => self.commit = Commit::Applying,
        }
    }

    /// Writes a superblock of the open transaction that says who owns the store and is else the last one.
    pub(super) fn write_claim(&mut self, last: Frozen) {
        let books = &mut self.books;
        if self.claim == Claim::Force {
            books.generation += TAKEOVER_GENERATIONS;
        }
        let (mut superblock, mut owner) = (last.superblock, last.owner);
        if let Some(me) = self.me {
            superblock.read_only_compatible |= features::OWNED;
            (superblock.owner, owner) = (me.id, me.record);
            superblock.epoch = superblock.epoch.wrapping_add(1);
            (books.superblock, self.frozen) = (superblock, superblock);
        }
        let generation = books.generation;
        self.write_superblocks(Frozen { generation, superblock, owner, ..last });
    }

    /// Gives the store up: the next superblock has no owner. False if it has none.
    pub(super) fn disown(&mut self) -> bool {
        let is_owned = self.is_anchored && self.me.is_some() && self.books.superblock.owner != 0;
        if is_owned {
            self.books.superblock.owner = 0;
        }
        is_owned
    }

    /// If somebody else owns the store: what has not been begun is not done any more.
    pub(super) fn withdraw(&mut self) {
        if !self.is_taken_over() {
            return;
        }
        for action in std::mem::take(&mut self.actions) {
            let (Action::ReadPage { io, .. }
            | Action::ReadSlots { io }
            | Action::WritePages { io, .. }
            | Action::Flush { io }
            | Action::ReadData { io, .. }
            | Action::ReadParent { io, .. }
            | Action::WriteData { io, .. }) = action
            else {
                continue;
            };
            let failed = End::Failed(base::Outcome::ABORTED);
            match self.ios.remove(&io) {
                Some(Purpose::Data(task) | Purpose::Flush(task)) => {
                    self.handle_transfer(task, io, failed);
                }
                Some(Purpose::Page(address)) => self.handle_page(address, failed),
                Some(Purpose::Commit | Purpose::Recover) | None => {}
            }
        }
    }
}
