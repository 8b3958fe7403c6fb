//! Ownership of an open pool: the claim before the first change, and the check before each commit.

use super::commit::{CommitSnapshot, CommitState, StepAfterSuperblockCheck};
use super::{ActionResult, DeviceAction, IoPurpose, Pool};
use crate::error::PoolError;
use crate::format::{OwnerRecord, Superblock, features};
use crate::ownership::{
    ClaimCondition, InjectedBugs, PoolOwner, TAKEOVER_GENERATIONS, check_superblocks_unchanged,
};

impl Pool {
    pub(crate) fn set_owner_state(
        &mut self,
        found: OwnerRecord,
        me: Option<PoolOwner>,
        bugs: InjectedBugs,
    ) {
        (self.durable_superblock.owner, self.me, self.bugs) = (found, me, bugs);
    }

    /// Owner that has the pool open for writing, according to the last durable superblock.
    pub fn owner(&self) -> Option<PoolOwner> {
        PoolOwner::from_record(&self.durable_superblock.superblock, self.durable_superblock.owner)
    }

    /// Sets how the pool is claimed before the first change.
    pub const fn set_claim_condition(&mut self, claim: ClaimCondition) {
        self.claim = claim;
    }

    /// Number of times it was claimed, according to the last durable superblock.
    pub const fn claim_epoch(&self) -> u64 {
        self.durable_superblock.superblock.epoch
    }

    /// Reason why the pool rejects changes, if it does.
    pub const fn stop_reason(&self) -> Option<&PoolError> {
        self.stopped_by.as_ref()
    }

    /// Whether commits check the owner.
    pub(super) const fn checks_ownership(&self) -> bool {
        self.me.is_some() && !self.bugs.ignore_fence
    }

    /// Whether the pool has another owner now: it rejects reads as well, and cached runs are invalid.
    pub const fn is_taken_over(&self) -> bool {
        matches!(self.stopped_by, Some(PoolError::TakenOver { .. }))
    }

    /// Fails if this instance may not claim the pool.
    pub(super) fn check_may_claim(&self) -> Result<(), PoolError> {
        let Some(owner) = self.owner().filter(|_| !self.bugs.ignore_fence) else { return Ok(()) };
        let is_mine = self.me.is_some_and(|me| me.id == owner.id);
        match self.claim {
            ClaimCondition::Force if self.me.is_some() => Ok(()),
            ClaimCondition::Over(id) if self.me.is_some() && id == owner.id => Ok(()),
            _ if is_mine => Ok(()),
            _ => Err(PoolError::Owned { by: Box::new(owner) }),
        }
    }

    /// The owner record that belongs to a superblock.
    pub(super) fn owner_record_of(&self, superblock: &Superblock) -> OwnerRecord {
        let mine = self.me.filter(|me| me.id == superblock.owner);
        mine.map_or(OwnerRecord::NONE, |me| me.record)
    }

    pub(super) fn read_superblock_slots(&mut self, next: StepAfterSuperblockCheck) {
        let io = self.start_io(IoPurpose::Commit);
        self.actions.push_back(DeviceAction::ReadSlots { io });
        self.commit = CommitState::Slots(next);
    }

    pub(super) fn handle_superblock_slots(
        &mut self,
        next: StepAfterSuperblockCheck,
        end: ActionResult<'_>,
    ) {
        let ActionResult::Slots(slots) = end else {
            let status = tenmil_base::IoStatus::INTERNAL_ERROR;
            return self.stop_pool(&PoolError::Device { what: "read the superblocks", status });
        };
        let at = if let StepAfterSuperblockCheck::Claimed(claimed) = &next {
            &**claimed
        } else {
            &self.durable_superblock
        };
        let expected = (at.generation, at.superblock.owner);
        if let Err(error) = check_superblocks_unchanged(slots, self.books.store, expected) {
            return self.stop_pool(&error);
        }
        match next {
            StepAfterSuperblockCheck::Claim => {
                self.write_superblocks(self.durable_superblock.clone())
            }
            StepAfterSuperblockCheck::Claimed(frozen) => {
                // Both slots must have this owner, so that no late superblock of a former owner is the
                // newest.
                self.wants_commit |= self.claim != ClaimCondition::Free;
                self.end_first_commit(&frozen);
            }
            StepAfterSuperblockCheck::Commit => self.commit = CommitState::Applying,
        }
    }

    /// Writes a superblock of the open transaction that names the new owner and otherwise equals the last
    /// one.
    pub(super) fn write_claim_superblock(&mut self, last: CommitSnapshot) {
        let books = &mut self.books;
        if self.claim == ClaimCondition::Force {
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
        self.write_superblocks(CommitSnapshot { generation, superblock, owner, ..last });
    }

    /// Removes the owner from the next superblock. False if it has none.
    pub(super) fn remove_owner_from_superblock(&mut self) -> bool {
        let is_owned = self.is_anchored && self.me.is_some() && self.books.superblock.owner != 0;
        if is_owned {
            self.books.superblock.owner = 0;
        }
        is_owned
    }

    /// If the pool was taken over, cancels all actions that have not begun.
    pub(super) fn cancel_actions_if_taken_over(&mut self) {
        if !self.is_taken_over() {
            return;
        }
        for action in std::mem::take(&mut self.actions) {
            let (DeviceAction::ReadPage { io, .. }
            | DeviceAction::ReadSlots { io }
            | DeviceAction::WritePages { io, .. }
            | DeviceAction::Flush { io }
            | DeviceAction::ReadData { io, .. }
            | DeviceAction::ReadParent { io, .. }
            | DeviceAction::WriteData { io, .. }) = action
            else {
                continue;
            };
            let failed = ActionResult::Failed(tenmil_base::IoStatus::ABORTED);
            match self.ios.remove(&io) {
                Some(IoPurpose::Data(task) | IoPurpose::Flush(task)) => {
                    self.handle_transfer(task, io, failed);
                }
                Some(IoPurpose::Page(address)) => self.handle_page(address, failed),
                Some(IoPurpose::Commit | IoPurpose::Recover) | None => {}
            }
        }
    }
}
