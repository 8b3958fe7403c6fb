//! Optional migrations: fewer awake reactors, local memory, separate physical cores. Made only
//! while all limits are kept, and only if they stay kept with some reserve.

use super::core_share::SLACK;
use super::placement::Placement;
use super::snapshot::MigrationReason;

impl Placement {
    /// Vacates reactors whose threads all fit elsewhere.
    pub(super) fn vacate_reactors(&mut self) {
        let mut reactors: Vec<usize> = (0..self.reactors.len()).collect();
        reactors.sort_by_key(|reactor| {
            (self.reactors[*reactor].estimated_load(), self.reactors[*reactor].core)
        });
        for reactor in reactors {
            if reactor == self.idle_reactor || self.reactors[reactor].active_threads == 0 {
                continue;
            }
            let mut emptied = self.clone();
            if emptied.try_vacate_reactor(reactor) {
                *self = emptied;
            }
        }
    }

    fn try_vacate_reactor(&mut self, reactor: usize) -> bool {
        let mut thread_indexes = self.active_threads_on(reactor);
        thread_indexes
            .sort_by_key(|thread_index| std::cmp::Reverse(self.threads[*thread_index].load));
        thread_indexes.into_iter().all(|thread_index| {
            let target = self
                .best_reactor(thread_index, |other| self.can_take_thread(thread_index, other))
                .filter(|_| self.threads[thread_index].may_migrate());
            if let Some(target) = target {
                self.plan_migration(thread_index, target, MigrationReason::Vacate);
            }
            target.is_some()
        })
    }

    /// Whether a reactor that is awake anyway can take a thread without harm to itself or a
    /// sibling.
    fn can_take_thread(&self, thread_index: usize, reactor: usize) -> bool {
        let awake = reactor == self.idle_reactor || self.reactors[reactor].active_threads > 0;
        let near = !self.is_memory_remote(thread_index, reactor)
            || self.is_memory_remote(thread_index, self.threads[thread_index].reactor);
        let full =
            self.reactors[reactor].estimated_load() + self.threads[thread_index].load + SLACK
                > self.limit;
        let disturbs = self.is_sibling_busy(reactor) && !self.slows_sibling(reactor);
        awake
            && near
            && !full
            && !disturbs
            && self.has_capacity_with_sibling(thread_index, reactor, SLACK)
    }

    /// Moves threads to the NUMA node of their memory.
    pub(super) fn move_to_memory_node(&mut self) {
        for thread_index in 0..self.threads.len() {
            let thread = &self.threads[thread_index];
            if !thread.may_migrate() || !self.is_memory_remote(thread_index, thread.reactor) {
                continue;
            }
            let suits = |reactor| {
                !self.is_memory_remote(thread_index, reactor)
                    && self.has_capacity_with_sibling(thread_index, reactor, SLACK)
            };
            if let Some(reactor) = self.best_reactor(thread_index, suits) {
                self.plan_migration(thread_index, reactor, MigrationReason::Node);
            }
        }
    }

    /// Where both hardware threads of a physical core are busy, moves one light thread to an unused
    /// core.
    pub(super) fn move_off_busy_siblings(&mut self) {
        for reactor in (0..self.reactors.len()).rev() {
            if reactor == self.idle_reactor
                || !self.slows_sibling(reactor)
                || !self.is_sibling_busy(reactor)
            {
                continue;
            }
            let crowd = self.active_threads_on(reactor);
            if crowd.iter().any(|thread_index| !self.threads[*thread_index].may_migrate()) {
                continue;
            }
            let vacant = (0..self.reactors.len()).find(|other| {
                let target = &self.reactors[*other];
                target.active_threads == 0
                    && target.node == self.reactors[reactor].node
                    && !self.is_sibling_busy(*other)
                    && crowd.iter().all(|thread_index| self.threads[*thread_index].allowed[*other])
            });
            for thread_index in crowd {
                if let Some(vacant) = vacant {
                    self.plan_migration(thread_index, vacant, MigrationReason::Sibling);
                }
            }
        }
    }
}
