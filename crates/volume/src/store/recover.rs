//! Going on after a stop: what is durable is read again, and work continues from there.
//!
//! ```text
//!   stop | transfers and reads end | read the superblocks at the start | go on from the newest
//!        |  what is asked meanwhile waits  ..............................| begins
//! ```
//!
//! Changes that were not durable are gone, and so are writes that no flush has followed: whoever drives a
//! store tells those who have written, by [`losses`](Store::losses). The next transaction has a number that
//! nothing was ever written under, and lies in the slot in which the durable superblock does not; it
//! begins with the claim, like the first one after the store was opened. Blocks to which a write may still
//! come to pass are given to nobody.

use super::commit::{Commit, Frozen};
use super::{Action, End, Purpose, Store};
use crate::books::Books;
use crate::error::StoreError;
use crate::fence::{Claim, Owner};
use crate::format::{SLOTS, decode_owner, decode_superblock};

/// How far a recovery is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Recovery {
    /// There is none.
    #[default]
    Idle,
    /// Transfers of before, and reads by kept runs, have not ended.
    Draining,
    /// The superblocks are read.
    Reading,
}

impl Store {
    /// How often it has stopped because its device failed: each time, writes that no flush had followed may
    /// have been lost, and runs that anybody has kept are no longer true. Whoever has written must hear of
    /// it by a flush that fails.
    pub const fn losses(&self) -> u64 {
        self.losses
    }

    /// Why it stopped last, though it may have recovered since.
    pub const fn last_stop(&self) -> Option<&StoreError> {
        self.last_stop.as_ref()
    }

    /// Whether it takes no changes.
    pub const fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether a recovery is under way: what is asked meanwhile waits for it.
    pub fn is_recovering(&self) -> bool {
        self.recovery != Recovery::Idle
    }

    /// Whether nothing speaks against a recovery at once: no other one has just come to nothing, because the
    /// device has failed again before anything was made durable.
    pub const fn may_recover_at_once(&self) -> bool {
        !self.is_unproven
    }

    /// Begins to read what is durable again, if the store has stopped because its device failed. False if
    /// there is nothing to recover from, or somebody else owns the store.
    pub fn recover(&mut self) -> bool {
        let by_device = matches!(self.stopped_by, Some(StoreError::Device { .. }));
        if !by_device || self.me.is_none() || self.is_recovering() {
            return false;
        }
        self.recovery = Recovery::Draining;
        self.look_again();
        true
    }

    /// The device has lost writes, and reads of it may return what is not durable: if the store has stopped
    /// for that, it stays so.
    pub fn refuse_recovery(&mut self, why: String) {
        if self.stopped && matches!(self.stopped_by, Some(StoreError::Device { .. })) {
            let error = StoreError::NotReread { why };
            (self.stopped_by, self.last_stop) = (Some(error.clone()), Some(error));
        }
    }

    /// Has the superblocks be read once nothing of before is under way.
    pub(super) fn look_again(&mut self) {
        let is_still = self.ios.is_empty()
            && self.ready.is_empty()
            && self.tasks.len() == self.paused.len()
            && self.oldest_read == u64::MAX
            && self.held.is_empty();
        if self.recovery == Recovery::Draining && is_still {
            self.recovery = Recovery::Reading;
            let io = self.enter(Purpose::Recover);
            self.actions.push_back(Action::ReadSlots { io });
        }
    }

    /// The superblocks at the start have been read, or have not.
    pub(super) fn handle_recovered(&mut self, end: End<'_>) {
        self.recovery = Recovery::Idle;
        let found = match end {
            End::Slots(slots) => self.newest_of(slots),
            End::Failed(outcome) => {
                Err(StoreError::Device { what: "read the superblocks", outcome })
            }
            _ => return self.fail_paused(),
        };
        match found {
            Ok(newest) => self.go_on_from(newest),
            Err(error) => {
                if !matches!(error, StoreError::Device { .. }) {
                    // That is for good, and told by itself.
                    self.losses += 1;
                    self.last_stop = Some(error.clone());
                }
                self.stopped_by = Some(error);
                self.fail_paused();
            }
        }
    }

    /// The newest superblock, if it is one that this store can go on from.
    fn newest_of(&self, slots: &crate::fence::Slots) -> Result<Frozen, StoreError> {
        let decoded = (0..).zip(slots).filter_map(|(at, block)| {
            let (store, generation, superblock, devices) = decode_superblock(block, at).ok()?;
            let owner = decode_owner(block);
            Some((store, Frozen { generation, superblock, devices, owner }))
        });
        let unread = StoreError::Device {
            what: "read the superblocks",
            outcome: base::Outcome::UNRECOVERED_READ,
        };
        let (store, newest) = decoded.max_by_key(|(_, found)| found.generation).ok_or(unread)?;
        let taken_over = || {
            let by = Owner::of(&newest.superblock, newest.owner);
            StoreError::TakenOver { by: by.map(Box::new) }
        };
        if store != self.books.store {
            return Err(StoreError::TakenOver { by: None });
        }
        let is_mine = self.me.is_some_and(|me| me.id == newest.superblock.owner);
        if self.is_anchored && !is_mine {
            return Err(taken_over());
        }
        let (found, expected) = (newest.generation, self.durable.generation);
        if self.is_anchored && found < expected {
            return Err(StoreError::WentBack { found, expected });
        }
        Ok(newest)
    }

    fn go_on_from(&mut self, newest: Frozen) {
        let used = self.books.generation.max(newest.generation);
        let next = used + 1;
        let Frozen { generation, superblock, devices, .. } = newest.clone();
        let mut books = Books::new(self.books.store, generation, superblock, devices, 0);
        // In the slot in which the durable superblock is not.
        books.generation = next + u64::from(next % SLOTS == generation % SLOTS);
        std::mem::swap(&mut books, &mut self.books);
        self.books.inherit(books);
        if self.me.is_some_and(|me| me.id == superblock.owner) {
            self.claim = Claim::Free;
        }
        (self.durable, self.frozen) = (newest, superblock);
        (self.is_anchored, self.is_sweep_stuck) = (false, false);
        (self.stopped, self.stopped_by) = (false, None);
        (self.commit, self.wants_commit) = (Commit::Idle, false);
        self.is_unproven = true;
        self.pending.clear();
        self.ready.append(&mut self.paused);
    }

    /// What has waited for a recovery that came to nothing is refused.
    fn fail_paused(&mut self) {
        for task in std::mem::take(&mut self.paused) {
            self.ready.push_back(task);
        }
    }
}
