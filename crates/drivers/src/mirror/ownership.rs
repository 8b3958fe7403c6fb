//! Ownership of a mirror that is open for writing, as recorded in the superblocks of its legs.
//!
//! ```text
//!   open      read the superblocks: is there an owner?   rejected if another one may still be running
//!   claim     both copies on every leg, with the new owner | read them again: still ours?
//!   commit    read both copies on every leg: still ours? | superblocks, with the owner
//!   release   superblocks without an owner
//! ```
//!
//! Superblocks are written with FUA, so each arrow is durable before the next one begins. Between the look
//! and the write behind it lies a window in which a device without reservations cannot refuse a former
//! owner, and data that go to dirty regions are not preceded by a look. So a mirror is only taken over if
//! its owner is known to be gone, if its devices [exclude](super::leg_reservations) it, or by force.

use tenmil_base::Error;
use tenmil_volume::PoolOwner as Opener;
use tenmil_volume::mirror::MirrorOwnership;

use super::assembly::{LegCandidate, LegReadResult};
use super::events::MirrorEvent;
use super::mirror_shared::MirrorShared;
use super::mirror_state::MirrorState;
use super::superblock_commit::leg_numbers_in;
use crate::owner_identity::has_owner_ended;
use tenmil_volume::mirror::{LEGS_MAX, MirrorSuperblock, SuperblockError, uuid_text};

/// Fencing state of an open mirror.
#[derive(Debug)]
pub(super) struct OwnershipFence {
    /// Owner in the next superblocks.
    pub(super) writes: MirrorOwnership,
    /// Id of this owner; zero disables fencing.
    me: u128,
    /// Of each leg, the first superblock sequence written by this owner. All later ones have to name this
    /// owner.
    pub(super) first: [u64; LEGS_MAX],
    /// A channel is checking the ownership.
    is_looking: bool,
    /// Another owner has the mirror: nothing is written or read here any more.
    is_ownership_lost: bool,
}

/// Both superblock copies found on a leg before a commit; `None` for one that could not be read.
pub(super) type SuperblockCopies = [Option<Result<MirrorSuperblock, SuperblockError>>; 2];

/// How far sequence numbers skip at a forced takeover: further than the former owner advances between a
/// check and the following write.
pub(super) const TAKEOVER_SEQUENCES: u64 = 1 << 20;

/// Rejects a mirror that another process has open for writing, unless that process is known to have
/// exited. Otherwise returns the former owner.
pub(super) fn check_no_live_owner(
    candidates: &[LegCandidate],
    me: Option<Opener>,
    is_forced: bool,
) -> Result<Option<Opener>, Error> {
    let mut former = None;
    for (name, leg) in found_legs(candidates) {
        let is_other = |owner: &Opener| Some(owner.id) != me.map(|me| me.id);
        let Some(owner) = leg.owner.owner().filter(is_other) else { continue };
        if is_owner_record_superseded(leg, candidates) {
            continue;
        }
        if !is_forced && !has_owner_ended(&owner) {
            let uuid = uuid_text(leg.uuid);
            return Err(Error::environment(format!(
                "mirror {uuid}: {owner} has it open for writing, as recorded on {name}, expected no owner; end \
                 that process, or take the mirror over: `tenmil mirror takeover URI`, which needs NVMe \
                 reservations; if it or its machine has certainly ended: `tenmil mirror takeover --force \
                 URI`"
            )));
        }
        former = Some(owner);
    }
    Ok(former)
}

/// The owner that the superblocks name, if that is another one; of several, one that may still be there.
pub(super) fn other_owner(candidates: &[LegCandidate], me: Option<Opener>) -> Option<Opener> {
    let legs =
        found_legs(candidates).filter(|(_, leg)| !is_owner_record_superseded(leg, candidates));
    let owners = legs.filter_map(|(_, leg)| leg.owner.owner());
    let others = owners.filter(|owner| Some(owner.id) != me.map(|me| me.id));
    others.min_by_key(has_owner_ended)
}

fn found_legs(candidates: &[LegCandidate]) -> impl Iterator<Item = (&str, &MirrorSuperblock)> {
    candidates.iter().filter_map(|LegCandidate { name, found, .. }| match found {
        LegReadResult::Leg(leg) => Some((name.as_str(), &**leg)),
        _ => None,
    })
}

/// Whether another leg of the mirror was claimed later, or says that this owner has given it up: a stale leg
/// does not hear of that.
pub(super) fn is_owner_record_superseded(
    leg: &MirrorSuperblock,
    candidates: &[LegCandidate],
) -> bool {
    let mut others = found_legs(candidates).filter(|(_, other)| other.uuid == leg.uuid);
    others.any(|(_, other)| {
        let (found, own) = (other.owner.epoch, leg.owner.epoch);
        found > own || found == own && other.owner.id == 0
    })
}

impl OwnershipFence {
    pub(super) const fn new(writes: MirrorOwnership, first: [u64; LEGS_MAX], is_on: bool) -> Self {
        let me = if is_on { writes.id } else { 0 };
        Self { writes, me, first, is_looking: false, is_ownership_lost: false }
    }

    /// Whether a commit may start: no check is in progress, and no other owner has the mirror.
    pub(super) const fn may_commit(&self) -> bool {
        !self.is_looking && !self.is_ownership_lost
    }

    pub(super) const fn is_ownership_lost(&self) -> bool {
        self.is_ownership_lost
    }

    /// The owner that a leg records, if it is another one.
    fn other_owner_on_leg(
        &self,
        uuid: u128,
        copies: &SuperblockCopies,
        leg: u8,
    ) -> Option<MirrorOwnership> {
        let found = copies.iter().flatten().flatten();
        let mut own = found.filter(|copy| copy.uuid == uuid && copy.leg == leg);
        let other = own
            .find(|copy| copy.owner.id != self.me && copy.sequence >= self.first[usize::from(leg)]);
        other.map(|copy| copy.owner)
    }
}

/// Whether both copies were read and neither belongs to this leg: another device is in its place.
fn is_replaced_device(uuid: u128, copies: &SuperblockCopies, leg: u8) -> bool {
    copies.iter().all(|copy| match copy {
        Some(Ok(found)) => found.uuid != uuid || found.leg != leg,
        Some(Err(_)) => true,
        None => false,
    })
}

// Ownership check before each commit.
impl MirrorState {
    /// Starts an ownership check; returns the legs to check, or none if fencing is disabled. No other
    /// check starts before [`end_owner_check`](Self::end_owner_check).
    pub(super) fn begin_owner_check(&mut self) -> u8 {
        if self.fence.me == 0 {
            return 0;
        }
        self.fence.is_looking = true;
        self.commit_targets()
    }

    /// Ends a check with the copies found on the legs. Returns false if another owner has the mirror:
    /// then nothing is written.
    pub(super) fn end_owner_check(
        &mut self,
        shared: &MirrorShared,
        found: &[(u8, SuperblockCopies)],
    ) -> bool {
        self.fence.is_looking = false;
        let mut others = 0;
        for (leg, copies) in found {
            if let Some(by) = self.fence.other_owner_on_leg(self.uuid, copies, *leg) {
                self.handle_ownership_lost(shared, by.owner());
                return false;
            }
            others |= if is_replaced_device(self.uuid, copies, *leg) { 1 << leg } else { 0 };
        }
        if others == 0 {
            return true;
        }
        self.present &= !others;
        if self.in_sync & !others == 0 {
            self.handle_ownership_lost(shared, None);
            return false;
        }
        self.fail_legs(shared, others);
        true
    }

    /// The channel that performed the check is closed.
    pub(super) const fn abandon_owner_check(&mut self) {
        self.fence.is_looking = false;
    }

    /// Another owner has the mirror: nothing is written or read here any more, and waiting requests fail.
    fn handle_ownership_lost(&mut self, shared: &MirrorShared, by: Option<Opener>) {
        self.fence.is_ownership_lost = true;
        (self.present, self.in_sync, self.joining, self.returning, self.promoting) =
            (0, 0, 0, 0, 0);
        // Prevents every later write from completing as if all in-sync legs had it.
        self.claimed = u8::MAX;
        self.copying = None;
        self.repairs.clear();
        self.stalled = true;
        self.failures += 1;
        self.events.count_and_queue(MirrorEvent::TakenOver { by });
        shared.publish_leg_masks(self);
        shared.wake_all();
    }

    /// Releases ownership: the next superblocks name no owner. Returns false if that is not needed.
    pub(super) fn release_ownership(&mut self) -> bool {
        let is_owned = self.fence.me != 0 && !self.fence.is_ownership_lost;
        if is_owned {
            let epoch = self.fence.writes.epoch;
            self.fence.writes = MirrorOwnership { epoch, ..MirrorOwnership::NONE };
            self.request_commit();
        }
        is_owned
    }

    /// Whether everything to be recorded is durable, or never will be.
    pub(super) const fn has_no_pending_commit(&self) -> bool {
        self.wanted == self.settled || self.stalled || self.fence.is_ownership_lost
    }

    /// Whether the superblocks record no owner.
    pub(super) const fn is_ownership_released(&self) -> bool {
        self.wanted == self.settled && self.fence.writes.id == 0 && !self.fence.is_ownership_lost
    }

    /// A leg has come back with this superblock. False if another owner claimed it since this mirror was opened.
    pub(super) const fn is_leg_not_claimed_by_other(&self, found: &MirrorSuperblock) -> bool {
        let is_ours = found.owner.id == self.fence.me;
        self.fence.me == 0 || is_ours || found.owner.epoch < self.fence.writes.epoch
    }

    /// The legs that the next superblocks are written to.
    pub(super) const fn commit_targets(&self) -> u8 {
        self.in_sync | self.returning | self.joining
    }

    /// Whether all of them were checked.
    pub(super) fn are_commit_targets_checked(&self, looked: u8) -> bool {
        self.fence.me == 0 || leg_numbers_in(self.commit_targets() & !looked).next().is_none()
    }
}
