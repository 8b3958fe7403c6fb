//! Dynamic policy: collects idle threads, relieves overloaded reactors, obeys the CPU quota.

use super::core_share::{CoreShare, SLACK};
use super::placement::Placement;
use super::snapshot::MigrationReason;

impl Placement {
    /// Moves idle threads to the scheduling core, as far as it has capacity.
    pub(super) fn consolidate_idle(&mut self) {
        for thread_index in 0..self.threads.len() {
            let thread = &self.threads[thread_index];
            if thread.idle
                && thread.may_migrate()
                && self.has_capacity(thread_index, self.idle_reactor, SLACK)
            {
                self.plan_migration(thread_index, self.idle_reactor, MigrationReason::Idle);
            }
        }
    }

    /// Brings all reactors within the limits. Single steps are tried first, then a complete
    /// re-placement; if that fails, the most loaded reactors give threads to the least loaded.
    pub(super) fn bring_within_limits(&mut self) {
        if self.is_within_limits() {
            return;
        }
        let mut stepwise = self.clone();
        stepwise.vacate_beyond_quota();
        stepwise.move_from_overloaded();
        if stepwise.is_within_limits() {
            *self = stepwise;
        } else if !self.repack_all() {
            stepwise.move_from_most_loaded();
            *self = stepwise;
        }
    }

    /// Empties the least loaded reactors, so that no more are busy than the quota permits. A few
    /// overloaded reactors are better than a throttled process.
    fn vacate_beyond_quota(&mut self) {
        let busy = |reactor: &usize| self.reactors[*reactor].active_threads > 0;
        let mut reactors: Vec<usize> = (0..self.reactors.len()).filter(busy).collect();
        // The gathering reactor is emptied last.
        reactors.sort_by_key(|reactor| {
            (*reactor == self.idle_reactor, self.reactors[*reactor].estimated_load())
        });
        let surplus = reactors.len().saturating_sub(self.quota);
        while surplus > 0 && !reactors.is_empty() {
            let leaving = &reactors[..surplus.min(reactors.len())];
            let mut emptied = self.clone();
            // If one of them cannot be emptied, the next one is tried in its place.
            match leaving
                .iter()
                .position(|reactor| !emptied.try_redistribute_threads(*reactor, leaving))
            {
                Some(stuck) => {
                    reactors.remove(stuck);
                }
                None => {
                    *self = emptied;
                    return;
                }
            }
        }
    }

    /// Distributes threads of a reactor over those that stay busy; false if some must stay.
    fn try_redistribute_threads(&mut self, reactor: usize, leaving: &[usize]) -> bool {
        self.active_threads_on(reactor).into_iter().all(|thread_index| {
            let stays = |other: usize| {
                self.reactors[other].active_threads > 0
                    && !leaving.contains(&other)
                    && self.may_move_to(thread_index, other)
            };
            let target = self
                .best_reactor(thread_index, |other| {
                    stays(other) && self.has_capacity(thread_index, other, 0)
                })
                .or_else(|| self.least_loaded_reactor(stays))
                .filter(|_| self.threads[thread_index].may_migrate());
            if let Some(target) = target {
                self.plan_migration(thread_index, target, MigrationReason::Quota);
            }
            target.is_some()
        })
    }

    /// Moves threads from overloaded reactors to those where they fit.
    fn move_from_overloaded(&mut self) {
        for reactor in self.overloaded_reactors() {
            while self.is_overloaded(reactor) {
                let excess = self.reactors[reactor].estimated_load() - self.limit;
                let leaving =
                    self.active_threads_on(reactor).into_iter().filter_map(|thread_index| {
                        let load = self.threads[thread_index].load;
                        let target = self.relief_target(thread_index)?;
                        // The smallest thread that suffices; if none does, the largest.
                        let order =
                            if load >= excess { (0, load) } else { (1, CoreShare::MAX - load) };
                        Some((order, thread_index, target))
                    });
                let Some((_, thread_index, target)) = leaving.min() else { break };
                self.plan_migration(thread_index, target, MigrationReason::Overload);
            }
        }
    }

    /// Reactor for a thread of an overloaded one.
    fn relief_target(&self, thread_index: usize) -> Option<usize> {
        if !self.threads[thread_index].may_migrate() {
            return None;
        }
        self.best_reactor(thread_index, |reactor| {
            self.has_capacity_with_sibling(thread_index, reactor, 0)
        })
        .or_else(|| {
            self.best_reactor(thread_index, |reactor| self.has_capacity(thread_index, reactor, 0))
        })
    }

    /// Moves one thread from each overloaded reactor to one that is clearly less loaded.
    fn move_from_most_loaded(&mut self) {
        for reactor in self.overloaded_reactors() {
            let load = self.reactors[reactor].estimated_load();
            let leaving = self.active_threads_on(reactor).into_iter().filter_map(|thread_index| {
                let target =
                    self.least_loaded_reactor(|other| self.may_move_to(thread_index, other))?;
                let after =
                    self.reactors[target].estimated_load() + self.threads[thread_index].load;
                (self.threads[thread_index].may_migrate() && after + SLACK < load).then_some((
                    after,
                    thread_index,
                    target,
                ))
            });
            if let Some((_, thread_index, target)) = leaving.min() {
                self.plan_migration(thread_index, target, MigrationReason::Overload);
            }
        }
    }
}
