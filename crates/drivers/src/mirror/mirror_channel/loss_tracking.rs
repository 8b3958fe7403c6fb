//! Losses that a leg reports before a flush has failed for them.

use std::sync::Arc;

use super::MirrorChannel;
use crate::mirror::mirror_request::RequestStage;

impl MirrorChannel {
    /// A leg is connected again, has lost completed writes, and has answered this request. If that is a read,
    /// it may have found what is older than what was completed, long before a flush fails for that; a flush
    /// says so itself, when all legs have answered it.
    #[cold]
    pub(super) fn handle_loss_found_by_request(&mut self, slot: u32, leg: usize) {
        let is_read = matches!(
            self.requests[slot as usize].stage,
            RequestStage::Read | RequestStage::ReadAgain
        );
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        if !is_read || !self.legs.has_unhandled_losses(leg) {
            return;
        }
        self.legs.record_losses_handled(1 << leg);
        if meta.handle_leg_losses(&shared, 1 << leg) && self.losses == shared.all_leg_loss_count() {
            shared.record_all_leg_loss();
        }
        meta.wake_maintenance();
    }

    /// The same, found by maintenance: of a leg in sync, from which others may be copied. Of other legs
    /// everything is copied that they may have lost. Nothing is read meanwhile, so that no read acts on it.
    #[cold]
    pub(super) fn handle_loss_found_by_maintenance(&mut self, leg: usize) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        if meta.in_sync >> leg & 1 == 0 || !self.legs.has_unhandled_losses(leg) {
            return;
        }
        self.legs.record_losses_handled(1 << leg);
        if meta.handle_leg_losses(&shared, 1 << leg) {
            shared.record_all_leg_loss();
        }
        // Its flushes on this channel need not fail for that any more.
        self.legs.acknowledge_handled_losses();
        meta.wake_maintenance();
    }

    /// The owner of this channel has repaired the first `count` losses: no flush fails for them, and none of those
    /// in flight.
    pub(super) fn acknowledge_repaired_up_to(&mut self, count: u64) {
        let shared = Arc::clone(&self.shared);
        // The counts of the mirror and of its legs change together under the lock.
        let _meta = shared.lock();
        if count >= shared.all_leg_loss_count() {
            self.legs.acknowledge_handled_losses();
        }
        let count = count.min(shared.all_leg_loss_count());
        if count <= self.losses {
            return;
        }
        self.losses = count;
        shared.record_reported_losses(count);
        for work in &mut self.requests {
            work.losses = work.losses.max(count);
        }
    }

    /// A write is answered that was submitted before the last loss was reported. The legs that have it may have
    /// lost it, and the flush that has failed was answered before this one: the next flush fails as well.
    #[cold]
    pub(super) const fn report_losses_since(&mut self, losses: u64) {
        self.losses = losses;
    }
}
