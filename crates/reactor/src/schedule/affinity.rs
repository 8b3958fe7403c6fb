//! Migrations required by taken cores and masks, made by every policy.

use super::placement::Placement;
use super::share::CoreShare;
use super::snapshot::MigrationReason;

impl Placement {
    /// Moves threads off reactors on which they may not run.
    pub(super) fn enforce_affinity(&mut self) {
        for seat in 0..self.threads.len() {
            let thread = &self.threads[seat];
            if thread.allowed[thread.reactor] || !thread.movable {
                continue;
            }
            let taken = !self.reactors[thread.reactor].open;
            let reason = if taken { MigrationReason::CoreTaken } else { MigrationReason::Mask };
            if let Some(room) = self.forced_target(seat) {
                self.migrate(seat, room, reason);
            }
        }
    }

    /// Target for such a thread: the best fit, else the least loaded reactor, else one of its mask
    /// regardless of the quota.
    fn forced_target(&self, seat: usize) -> Option<usize> {
        self.best(seat, |room| self.fits_well(seat, room, 0))
            .or_else(|| self.best(seat, |room| self.fits(seat, room, 0)))
            .or_else(|| self.least_loaded(|room| self.permits(seat, room)))
            .or_else(|| self.least_loaded(|room| self.threads[seat].allowed[room]))
    }

    /// Least loaded reactor among those that satisfy `suits`.
    pub(super) fn least_loaded(&self, suits: impl Fn(usize) -> bool) -> Option<usize> {
        let load = |room: &usize| -> (CoreShare, u32) {
            (self.reactors[*room].load(), self.reactors[*room].core)
        };
        (0..self.reactors.len()).filter(|room| suits(*room)).min_by_key(load)
    }
}
