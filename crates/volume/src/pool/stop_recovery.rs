//! Recovery after a stop: the pool reads the durable state again and continues from it.
//!
//! ```text
//!   stop | transfers and reads end | read the superblocks at the start | continue from the newest
//!        |  requests wait meanwhile .....................................| begin
//! ```
//!
//! Changes that were not durable are lost, and so are writes without a later flush: the driver of the
//! pool reports that to the writers, by means of [`losses`](Pool::device_error_stop_count). The next transaction has a
//! generation that was never used for a write, and is in the slot without the durable superblock. It
//! begins with the claim, like the first one after the pool was opened. Blocks that a late write may
//! still reach are not allocated.
//!
//! If the device has lost completed writes, the map in memory may refer to blocks that hold what was there
//! before, of any volume. Reads in flight fail then, and no later one is answered before the recovery.

use super::commit::{CommitSnapshot, CommitState};
use super::{ActionResult, DeviceAction, IoPurpose, Pool};
use crate::error::PoolError;
use crate::format::{SLOTS, decode_owner, decode_superblock};
use crate::metadata::Metadata;
use crate::ownership::{ClaimCondition, PoolOwner};

/// State of a recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RecoveryState {
    /// No recovery in progress.
    #[default]
    Idle,
    /// Earlier transfers, or reads by cached runs, are still in flight.
    Draining,
    /// Superblocks are being read.
    Reading,
}

impl Pool {
    /// Number of stops caused by a device error. Each time, writes without a later flush may be lost, and
    /// cached runs are invalid. Every writer must learn of it by a failing flush.
    pub const fn device_error_stop_count(&self) -> u64 {
        self.losses
    }

    /// Reason of the last stop, even if it has recovered since.
    pub const fn last_stop_error(&self) -> Option<&PoolError> {
        self.last_stop.as_ref()
    }

    /// Whether it rejects changes.
    pub const fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether a recovery is in progress: requests wait for it.
    pub fn is_recovering(&self) -> bool {
        self.recovery != RecoveryState::Idle
    }

    /// Whether an immediate recovery makes sense: false if the previous one ended in another device error
    /// before anything became durable.
    pub const fn may_recover_at_once(&self) -> bool {
        !self.is_unproven
    }

    /// Handles that the device has lost completed writes, by the count of one of its channels: the pool
    /// stops, if it has not. The driver calls this before it reports any completion of the poll after
    /// which the count had increased: these reads, and those still in flight, fail.
    pub fn handle_lost_writes(&mut self) {
        // Each call is for a loss of its own, so a recovery at once cannot repeat itself for ever.
        self.is_unproven &= self.stopped;
        self.has_lost_writes = true;
        self.stop_pool(&PoolError::WritesLost);
    }

    /// Whether the superblocks are being read for a recovery: no earlier transfer is in flight. The driver
    /// acknowledges all losses of the device before it executes that read.
    pub fn is_rereading(&self) -> bool {
        self.recovery == RecoveryState::Reading
    }

    /// Begins to read the durable state again, if the pool has stopped because of a device error. False
    /// if no recovery is needed, or another owner has the pool.
    pub fn start_recovery(&mut self) -> bool {
        if !self.is_stopped_by_device() || self.me.is_none() || self.is_recovering() {
            return false;
        }
        self.recovery = RecoveryState::Draining;
        self.reread_when_idle();
        true
    }

    /// The device has lost writes, and reads of it may return what is not durable: if the store has stopped
    /// for that, it stays so, and a recovery in progress ends.
    pub fn reject_recovery(&mut self, why: String) {
        if self.stopped && self.is_stopped_by_device() {
            let error = PoolError::NotReread { why };
            // This error is permanent, and reported by itself.
            self.losses += 1;
            (self.stopped_by, self.last_stop) = (Some(error.clone()), Some(error));
            if self.recovery == RecoveryState::Draining {
                self.recovery = RecoveryState::Idle;
                self.fail_paused_tasks();
            }
        }
    }

    const fn is_stopped_by_device(&self) -> bool {
        matches!(self.stopped_by, Some(PoolError::Device { .. } | PoolError::WritesLost))
    }

    /// Error of a read, if the device may not have what the map in memory refers to.
    pub(super) fn check_no_writes_lost(&self) -> Result<(), PoolError> {
        match &self.stopped_by {
            _ if !self.has_lost_writes => Ok(()),
            Some(lasting) if !self.is_stopped_by_device() => Err(lasting.clone()),
            _ => Err(PoolError::ReadInterrupted),
        }
    }

    /// Has the superblocks be read once nothing of before is under way.
    pub(super) fn reread_when_idle(&mut self) {
        let is_still = self.ios.is_empty()
            && self.ready.is_empty()
            && self.tasks.len() == self.paused.len()
            && self.oldest_read == u64::MAX
            && self.held.is_empty();
        if self.recovery == RecoveryState::Draining && is_still {
            self.recovery = RecoveryState::Reading;
            let io = self.start_io(IoPurpose::Recover);
            self.actions.push_back(DeviceAction::ReadSlots { io });
        }
    }

    /// Handles the result of reading the superblocks.
    pub(super) fn handle_recovery_read(&mut self, end: ActionResult<'_>) {
        self.recovery = RecoveryState::Idle;
        if !self.is_stopped_by_device() {
            // The recovery was refused meanwhile.
            return self.fail_paused_tasks();
        }
        let found = match end {
            ActionResult::Slots(slots) => self.newest_superblock(slots),
            ActionResult::Failed(status) => {
                Err(PoolError::Device { what: "read the superblocks", status })
            }
            _ => return self.fail_paused_tasks(),
        };
        match found {
            Ok(newest) => self.continue_from(newest),
            Err(error) => {
                if !matches!(error, PoolError::Device { .. }) {
                    // This error is permanent, and reported by itself.
                    self.losses += 1;
                    self.last_stop = Some(error.clone());
                }
                self.stopped_by = Some(error);
                self.fail_paused_tasks();
            }
        }
    }

    /// The newest superblock, if this pool can continue from it.
    fn newest_superblock(
        &self,
        slots: &crate::ownership::SuperblockSlots,
    ) -> Result<CommitSnapshot, PoolError> {
        let decoded = (0..).zip(slots).filter_map(|(at, block)| {
            let (store, generation, superblock, devices) = decode_superblock(block, at).ok()?;
            let owner = decode_owner(block);
            Some((store, CommitSnapshot { generation, superblock, devices, owner }))
        });
        let unread = PoolError::Device {
            what: "read the superblocks",
            status: tenmil_base::IoStatus::UNRECOVERED_READ,
        };
        let (store, newest) = decoded.max_by_key(|(_, found)| found.generation).ok_or(unread)?;
        let taken_over = || {
            let by = PoolOwner::from_record(&newest.superblock, newest.owner);
            PoolError::TakenOver { by: by.map(Box::new) }
        };
        if store != self.books.store {
            return Err(PoolError::TakenOver { by: None });
        }
        let is_mine = self.me.is_some_and(|me| me.id == newest.superblock.owner);
        // The claim of this instance was durable, so another owner can only be there by a takeover.
        if self.is_anchored && !is_mine {
            return Err(taken_over());
        }
        let (found, expected) = (newest.generation, self.durable_superblock.generation);
        // A durable superblock has disappeared: the device has lost a completed flush.
        if self.is_anchored && found < expected {
            return Err(PoolError::WentBack { found, expected });
        }
        Ok(newest)
    }

    fn continue_from(&mut self, newest: CommitSnapshot) {
        // Pages of the abandoned transaction may have its generation, so the next one must be higher.
        let used = self.books.generation.max(newest.generation);
        let next = used + 1;
        let CommitSnapshot { generation, superblock, devices, .. } = newest.clone();
        let mut books = Metadata::new(self.books.store, generation, superblock, devices, 0);
        // In the slot that does not contain the durable superblock.
        books.generation = next + u64::from(next % SLOTS == generation % SLOTS);
        std::mem::swap(&mut books, &mut self.books);
        self.books.inherit_device_state(books);
        if self.me.is_some_and(|me| me.id == superblock.owner) {
            self.claim = ClaimCondition::Free;
        }
        (self.durable_superblock, self.frozen) = (newest, superblock);
        (self.is_anchored, self.is_sweep_stuck) = (false, false);
        (self.stopped, self.stopped_by, self.has_lost_writes) = (false, None, false);
        (self.commit, self.wants_commit) = (CommitState::Idle, false);
        self.is_unproven = true;
        self.pending.clear();
        self.ready.append(&mut self.paused);
    }

    /// Rejects the tasks that waited for a recovery that failed.
    fn fail_paused_tasks(&mut self) {
        for task in std::mem::take(&mut self.paused) {
            self.ready.push_back(task);
        }
    }
}
