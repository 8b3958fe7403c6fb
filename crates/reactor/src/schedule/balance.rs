//! Dynamic policy: collects idle threads, relieves overloaded reactors, obeys the CPU quota.

use super::placement::Placement;
use super::share::{CoreShare, SLACK};
use super::snapshot::MigrationReason;

impl Placement {
    /// Moves idle threads to the scheduling core, as far as it has room.
    pub(super) fn consolidate_idle(&mut self) {
        for seat in 0..self.threads.len() {
            let thread = &self.threads[seat];
            if thread.idle && thread.free() && self.fits(seat, self.idle_reactor, SLACK) {
                self.migrate(seat, self.idle_reactor, MigrationReason::Idle);
            }
        }
    }

    /// Brings all reactors within the limits. Single steps are tried first, then a complete
    /// re-placement; if that fails, the most loaded reactors give threads to the least loaded.
    pub(super) fn shed_overload(&mut self) {
        if self.is_within() {
            return;
        }
        let mut stepwise = self.clone();
        stepwise.apply_quota();
        stepwise.shed();
        if stepwise.is_within() {
            *self = stepwise;
        } else if !self.repack_all() {
            stepwise.even_out();
            *self = stepwise;
        }
    }

    /// Empties the least loaded reactors, so that no more are busy than the quota permits. A few
    /// overloaded reactors are better than a throttled process.
    fn apply_quota(&mut self) {
        let busy = |room: &usize| self.reactors[*room].active_threads > 0;
        let mut rooms: Vec<usize> = (0..self.reactors.len()).filter(busy).collect();
        // The gathering reactor is emptied last.
        rooms.sort_by_key(|room| (*room == self.idle_reactor, self.reactors[*room].load()));
        let surplus = rooms.len().saturating_sub(self.quota);
        while surplus > 0 && !rooms.is_empty() {
            let leaving = &rooms[..surplus.min(rooms.len())];
            let mut emptied = self.clone();
            // If one of them cannot be emptied, the next one is tried in its place.
            match leaving.iter().position(|room| !emptied.redistribute(*room, leaving)) {
                Some(stuck) => {
                    rooms.remove(stuck);
                }
                None => {
                    *self = emptied;
                    return;
                }
            }
        }
    }

    /// Distributes threads of a reactor over those that stay busy; false if some must stay.
    fn redistribute(&mut self, room: usize, leaving: &[usize]) -> bool {
        self.active_threads_on(room).into_iter().all(|seat| {
            let stays = |other: usize| {
                self.reactors[other].active_threads > 0
                    && !leaving.contains(&other)
                    && self.permits(seat, other)
            };
            let target = self
                .best(seat, |other| stays(other) && self.fits(seat, other, 0))
                .or_else(|| self.least_loaded(stays))
                .filter(|_| self.threads[seat].free());
            if let Some(target) = target {
                self.migrate(seat, target, MigrationReason::Quota);
            }
            target.is_some()
        })
    }

    /// Moves threads from overloaded reactors to those where they fit.
    fn shed(&mut self) {
        for room in self.over() {
            while self.is_over(room) {
                let excess = self.reactors[room].load() - self.limit;
                let leaving = self.active_threads_on(room).into_iter().filter_map(|seat| {
                    let load = self.threads[seat].load;
                    let target = self.relief_target(seat)?;
                    // The smallest thread that suffices; if none does, the largest.
                    let order = if load >= excess { (0, load) } else { (1, CoreShare::MAX - load) };
                    Some((order, seat, target))
                });
                let Some((_, seat, target)) = leaving.min() else { break };
                self.migrate(seat, target, MigrationReason::Overload);
            }
        }
    }

    /// Reactor for a thread of an overloaded one.
    fn relief_target(&self, seat: usize) -> Option<usize> {
        if !self.threads[seat].free() {
            return None;
        }
        self.best(seat, |room| self.fits_well(seat, room, 0))
            .or_else(|| self.best(seat, |room| self.fits(seat, room, 0)))
    }

    /// Moves one thread from each overloaded reactor to one that is clearly less loaded.
    fn even_out(&mut self) {
        for room in self.over() {
            let load = self.reactors[room].load();
            let leaving = self.active_threads_on(room).into_iter().filter_map(|seat| {
                let target = self.least_loaded(|other| self.permits(seat, other))?;
                let after = self.reactors[target].load() + self.threads[seat].load;
                (self.threads[seat].free() && after + SLACK < load).then_some((after, seat, target))
            });
            if let Some((_, seat, target)) = leaving.min() {
                self.migrate(seat, target, MigrationReason::Overload);
            }
        }
    }
}
