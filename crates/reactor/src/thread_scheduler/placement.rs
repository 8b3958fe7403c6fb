//! Working placement of a plan: reactors and threads with estimated loads.
//!
//! Every planned migration updates the estimates at once, so later steps see the effect of earlier
//! ones.

use super::core_share::{CoreShare, NEGLIGIBLE, SIBLING_COST_PARTS};
use super::snapshot::{Migration, MigrationReason};

/// Estimated loads after the migrations planned so far.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    pub(super) reactors: Vec<ReactorSlot>,
    pub(super) threads: Vec<ThreadSlot>,
    pub(super) migrations: Vec<Migration>,
    /// Reactor that collects idle threads.
    pub(super) idle_reactor: usize,
    /// Maximum number of busy reactors.
    pub(super) quota: usize,
    /// Load limit of a reactor with several threads.
    pub(super) limit: CoreShare,
    /// Load from which a reactor counts as busy for its sibling.
    pub(super) busy: CoreShare,
}

/// Reactor in the placement.
#[derive(Clone, Debug)]
pub(super) struct ReactorSlot {
    pub(super) core: u32,
    /// Whether it may receive threads.
    pub(super) open: bool,
    pub(super) isolated: bool,
    /// Whether it was so loaded that the demand of its threads may exceed their measured load.
    pub(super) may_hide_demand: bool,
    pub(super) node: Option<u32>,
    /// Other reactors on its physical core.
    pub(super) siblings: Vec<usize>,
    /// Its load besides its threads.
    pub(super) own_load: CoreShare,
    /// Lower bound of its estimate.
    pub(super) load_min: CoreShare,
    /// Sum of its threads' loads.
    pub(super) thread_load: CoreShare,
    /// Number of its threads with a load that is not negligible.
    pub(super) active_threads: usize,
    /// Number of its threads.
    pub(super) threads: usize,
}

/// Thread in the placement.
#[derive(Clone, Debug)]
pub(super) struct ThreadSlot {
    pub(super) id: u64,
    pub(super) reactor: usize,
    pub(super) load: CoreShare,
    /// Whether it is idle.
    pub(super) idle: bool,
    /// Whether it may be migrated in this plan.
    pub(super) movable: bool,
    /// Whether it is excluded from balancing, because it has an isolated core.
    pub(super) is_unbalanced: bool,
    pub(super) node: Option<u32>,
    /// Permitted reactors, by index. Not empty.
    pub(super) allowed: Vec<bool>,
}

/// Suitability of a reactor for a thread; the least is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlacementCost {
    far: bool,
    elsewhere: bool,
    sibling_busy: bool,
    asleep: bool,
    core: u32,
}

impl ThreadSlot {
    /// Whether its load is not negligible.
    pub(super) fn has_load(&self) -> bool {
        self.load >= NEGLIGIBLE
    }

    /// Whether balancing may migrate it.
    pub(super) fn may_migrate(&self) -> bool {
        self.movable && !self.is_unbalanced
    }
}

impl ReactorSlot {
    /// Estimated load.
    pub(super) fn estimated_load(&self) -> CoreShare {
        (self.own_load + self.thread_load).max(self.load_min)
    }
}

impl Placement {
    /// Whether a reactor is over the limit and losing a thread would help. A single thread may fill
    /// a core.
    pub(super) fn is_overloaded(&self, reactor: usize) -> bool {
        let reactor = &self.reactors[reactor];
        reactor.open
            && !reactor.isolated
            && reactor.active_threads > 1
            && reactor.estimated_load() > self.limit
    }

    /// Reactors over the limit, most loaded first.
    pub(super) fn overloaded_reactors(&self) -> Vec<usize> {
        let mut over: Vec<usize> =
            (0..self.reactors.len()).filter(|reactor| self.is_overloaded(*reactor)).collect();
        over.sort_by_key(|reactor| std::cmp::Reverse(self.reactors[*reactor].estimated_load()));
        over
    }

    /// Number of reactors with load.
    pub(super) fn reactors_with_load(&self) -> usize {
        self.reactors.iter().filter(|reactor| reactor.active_threads > 0).count()
    }

    /// Whether no reactor is over the limit and the quota is obeyed.
    pub(super) fn is_within_limits(&self) -> bool {
        self.reactors_with_load() <= self.quota
            && !(0..self.reactors.len()).any(|reactor| self.is_overloaded(reactor))
    }

    /// Whether a busy reactor shares the physical core of `reactor`.
    pub(super) fn is_sibling_busy(&self, reactor: usize) -> bool {
        self.reactors[reactor].siblings.iter().any(|other| self.slows_sibling(*other))
    }

    /// Whether a reactor is loaded enough to slow its sibling down.
    pub(super) fn slows_sibling(&self, reactor: usize) -> bool {
        self.reactors[reactor].active_threads > 0
            && self.reactors[reactor].estimated_load() >= self.busy
    }

    /// Whether the quota permits a thread on this reactor: it is busy already, or one more may be.
    pub(super) fn does_quota_permit(&self, thread_index: usize, reactor: usize) -> bool {
        let thread_index = &self.threads[thread_index];
        let leaves_one_empty = usize::from(
            thread_index.has_load() && self.reactors[thread_index.reactor].active_threads == 1,
        );
        !thread_index.has_load()
            || self.reactors[reactor].active_threads > 0
            || self.reactors_with_load() - leaves_one_empty < self.quota
    }

    /// Whether a thread fits on a reactor, with `spare` left below the limit. It always fits on an
    /// empty one.
    pub(super) fn has_capacity(
        &self,
        thread_index: usize,
        reactor: usize,
        spare: CoreShare,
    ) -> bool {
        let (thread, target) = (&self.threads[thread_index], &self.reactors[reactor]);
        let roomy = !thread.has_load()
            || target.active_threads == 0
            || target.estimated_load() + thread.load + spare <= self.limit;
        self.may_move_to(thread_index, reactor) && roomy
    }

    /// As [`Placement::has_capacity`], including the capacity taken by a busy sibling.
    pub(super) fn has_capacity_with_sibling(
        &self,
        thread_index: usize,
        reactor: usize,
        spare: CoreShare,
    ) -> bool {
        self.has_capacity(thread_index, reactor, spare + self.capacity_taken_by_siblings(reactor))
    }

    /// Whether mask, cpuset and quota permit a thread on a reactor other than its own.
    pub(super) fn may_move_to(&self, thread_index: usize, reactor: usize) -> bool {
        let thread = &self.threads[thread_index];
        reactor != thread.reactor
            && thread.allowed[reactor]
            && self.does_quota_permit(thread_index, reactor)
    }

    fn capacity_taken_by_siblings(&self, reactor: usize) -> CoreShare {
        let loads = self.reactors[reactor]
            .siblings
            .iter()
            .map(|other| self.reactors[*other].estimated_load());
        loads.sum::<CoreShare>() / SIBLING_COST_PARTS
    }

    /// Whether a thread's memory is on another NUMA node. For an idle thread this does not matter.
    pub(super) fn is_memory_remote(&self, thread_index: usize, reactor: usize) -> bool {
        let (near, node) = (self.threads[thread_index].node, self.reactors[reactor].node);
        !self.threads[thread_index].idle && near.is_some() && node.is_some() && near != node
    }

    /// Suitability of a reactor for a thread.
    pub(super) fn placement_cost(&self, thread_index: usize, reactor: usize) -> PlacementCost {
        PlacementCost {
            far: self.is_memory_remote(thread_index, reactor),
            elsewhere: reactor != self.idle_reactor,
            sibling_busy: self.is_sibling_busy(reactor),
            asleep: self.reactors[reactor].active_threads == 0,
            core: self.reactors[reactor].core,
        }
    }

    /// Best reactor among those that satisfy `suits`.
    pub(super) fn best_reactor(
        &self,
        thread_index: usize,
        suits: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let reactors = (0..self.reactors.len()).filter(|reactor| suits(*reactor));
        reactors.min_by_key(|reactor| self.placement_cost(thread_index, *reactor))
    }

    /// Threads of a reactor.
    pub(super) fn threads_on(&self, reactor: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.threads.len())
            .filter(move |thread_index| self.threads[*thread_index].reactor == reactor)
    }

    /// Threads of a reactor with a load that is not negligible.
    pub(super) fn active_threads_on(&self, reactor: usize) -> Vec<usize> {
        self.threads_on(reactor)
            .filter(|thread_index| self.threads[*thread_index].has_load())
            .collect()
    }

    /// Plans the migration of a thread.
    pub(super) fn plan_migration(
        &mut self,
        thread_index: usize,
        to: usize,
        reason: MigrationReason,
    ) {
        let limit = self.limit;
        let thread = &mut self.threads[thread_index];
        let from = std::mem::replace(&mut thread.reactor, to);
        thread.movable = false;
        let (load, counts) = (thread.load, usize::from(thread.has_load()));
        let (source, target) = (self.reactors[from].core, self.reactors[to].core);
        self.migrations.push(Migration { thread: thread.id, from: source, to: target, reason });

        let reactor = &mut self.reactors[from];
        reactor.thread_load -= load;
        reactor.active_threads -= counts;
        reactor.threads -= 1;
        // The remaining threads may have had more demand than time, so the time set free here must
        // not be given to others before their demand is known.
        if reactor.may_hide_demand && reactor.active_threads > 0 {
            reactor.load_min = limit;
        }
        let reactor = &mut self.reactors[to];
        reactor.thread_load += load;
        reactor.active_threads += counts;
        reactor.threads += 1;
    }
}
