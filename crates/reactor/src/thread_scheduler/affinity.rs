//! Migrations required by taken cores and masks, made by every policy.

use super::core_share::CoreShare;
use super::placement::Placement;
use super::snapshot::MigrationReason;

impl Placement {
    /// Moves threads off reactors on which they may not run.
    pub(super) fn enforce_affinity(&mut self) {
        for thread_index in 0..self.threads.len() {
            let thread = &self.threads[thread_index];
            if thread.allowed[thread.reactor] || !thread.movable {
                continue;
            }
            let taken = !self.reactors[thread.reactor].open;
            let reason = if taken { MigrationReason::CoreTaken } else { MigrationReason::Mask };
            if let Some(reactor) = self.target_for_affinity_move(thread_index) {
                self.plan_migration(thread_index, reactor, reason);
            }
        }
    }

    /// Target for such a thread: the best fit, else the least loaded reactor, else one of its mask
    /// regardless of the quota.
    fn target_for_affinity_move(&self, thread_index: usize) -> Option<usize> {
        self.best_reactor(thread_index, |reactor| {
            self.has_capacity_with_sibling(thread_index, reactor, 0)
        })
        .or_else(|| {
            self.best_reactor(thread_index, |reactor| self.has_capacity(thread_index, reactor, 0))
        })
        .or_else(|| self.least_loaded_reactor(|reactor| self.may_move_to(thread_index, reactor)))
        .or_else(|| {
            self.least_loaded_reactor(|reactor| self.threads[thread_index].allowed[reactor])
        })
    }

    /// Least loaded reactor among those that satisfy `suits`.
    pub(super) fn least_loaded_reactor(&self, suits: impl Fn(usize) -> bool) -> Option<usize> {
        let load = |reactor: &usize| -> (CoreShare, u32) {
            (self.reactors[*reactor].estimated_load(), self.reactors[*reactor].core)
        };
        (0..self.reactors.len()).filter(|reactor| suits(*reactor)).min_by_key(load)
    }
}
