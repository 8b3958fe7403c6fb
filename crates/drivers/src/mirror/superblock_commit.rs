//! Superblock commits: when superblocks are written, their contents, and the state after it.

use super::events::MirrorEvent;
use super::mirror_shared::MirrorShared;
use super::mirror_state::{InFlightCommit, MirrorState};
use tenmil_volume::mirror::{LEGS_MAX, MirrorCommonFields, MirrorSuperblock};

impl MirrorState {
    /// Whether superblocks are to be written now.
    pub(super) fn needs_commit(&self) -> bool {
        let is_free = self.commit.is_none() && self.fence.may_commit();
        is_free && self.wanted != self.settled && !self.stalled
    }

    /// Starts a commit of the current state, and returns the superblocks to write. No other commit starts
    /// before [`end_commit`](Self::end_commit).
    pub(super) fn begin_commit(&mut self, shared: &MirrorShared) -> Vec<MirrorSuperblock> {
        let in_sync = self.in_sync | self.promoting;
        // A new generation for each open and each change: legs that were written separately cannot have
        // the same one.
        if in_sync != self.claimed {
            self.generation += 1;
        }
        // Once they are submitted, some superblock may state it.
        self.claimed |= in_sync;
        self.dirty.subtract(&self.clearing);
        self.clearing.clear_all();
        self.durable.intersect(&self.dirty);
        let targets = self.commit_targets();
        self.commit = Some(InFlightCommit {
            version: self.wanted,
            generation: self.generation,
            targets,
            in_sync,
            promoting: self.promoting,
            dirty: self.dirty.clone(),
        });
        shared.publish_leg_masks(self);
        leg_numbers_in(targets).map(|leg| self.next_superblock(leg, in_sync)).collect()
    }

    fn next_superblock(&mut self, leg: u8, in_sync: u8) -> MirrorSuperblock {
        let sequence = self.sequences[usize::from(leg)].next_for_older_copy();
        let Self { uuid, generation, legs, geometry, gone, fresh, known, .. } = *self;
        let owner = self.fence.writes;
        let dirty = &self.dirty;
        let said = MirrorCommonFields {
            uuid,
            generation,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner,
            dirty,
        };
        said.superblock_of_leg(leg, sequence)
    }

    /// Ends a commit: the superblocks have been written, except on legs that `failed`.
    pub(super) fn end_commit(&mut self, shared: &MirrorShared, failed: u8) {
        let Some(commit) = self.commit.take() else { return };
        for leg in leg_numbers_in(commit.targets & !failed) {
            let sequence = &mut self.sequences[usize::from(leg)];
            sequence.good = sequence.used;
            self.known[usize::from(leg)] = commit.generation;
        }
        shared.wake_all();
        // No leg has the new superblock: waiting requests fail, and nothing is retried until a request
        // needs it.
        if self.in_sync & !failed == 0 {
            self.stalled = true;
            self.failures += 1;
            return;
        }
        self.settled = commit.version;
        self.durable = commit.dirty;
        if failed & commit.in_sync == 0 {
            self.claimed = commit.in_sync;
        }
        self.fail_legs(shared, failed);
        // Where a write has failed since, the leg may differ, and may become the one that is read there: an in-sync
        // leg that was read before is copied to it first.
        let promoted = if self.todo.is_empty() { commit.promoting & self.promoting } else { 0 };
        self.in_sync |= promoted;
        leg_numbers_in(promoted)
            .for_each(|leg| self.events.count_and_queue(MirrorEvent::LegInSync { leg }));
        self.fresh &= !promoted;
        self.returning &= !promoted;
        self.promoting = 0;
        if self.claimed & !self.in_sync != 0 && self.wanted == self.settled {
            // A superblock states that a leg is in sync, and it is not.
            self.request_commit();
        }
        shared.publish_leg_masks(self);
    }

    /// The channel that wrote the superblocks is closed; how far it got is unknown.
    pub(super) fn abandon_commit(&mut self, shared: &MirrorShared) {
        if self.commit.take().is_some() {
            shared.wake_all();
        }
    }
}

/// The leg numbers in a mask.
pub(super) fn leg_numbers_in(mask: u8) -> impl Iterator<Item = u8> {
    (0_u8..).take(LEGS_MAX).filter(move |leg| mask & (1 << leg) != 0)
}
