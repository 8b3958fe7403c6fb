//! Working placement of a plan: reactors (`rooms`) and threads (`seats`) with estimated loads.
//!
//! Every planned migration updates the estimates at once, so later steps see the effect of earlier
//! ones.

use super::share::{CoreShare, NEGLIGIBLE, SIBLING_COST_PARTS};
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
pub(super) struct PlacementScore {
    far: bool,
    elsewhere: bool,
    sibling_busy: bool,
    asleep: bool,
    core: u32,
}

impl ThreadSlot {
    /// Whether its load is not negligible.
    pub(super) fn counts(&self) -> bool {
        self.load >= NEGLIGIBLE
    }

    /// Whether balancing may migrate it.
    pub(super) fn free(&self) -> bool {
        self.movable && !self.is_unbalanced
    }
}

impl ReactorSlot {
    /// Estimated load.
    pub(super) fn load(&self) -> CoreShare {
        (self.own_load + self.thread_load).max(self.load_min)
    }
}

impl Placement {
    /// Whether a reactor is over the limit and losing a thread would help. A single thread may fill
    /// a core.
    pub(super) fn is_over(&self, room: usize) -> bool {
        let room = &self.reactors[room];
        room.open && !room.isolated && room.active_threads > 1 && room.load() > self.limit
    }

    /// Reactors over the limit, most loaded first.
    pub(super) fn over(&self) -> Vec<usize> {
        let mut over: Vec<usize> =
            (0..self.reactors.len()).filter(|room| self.is_over(*room)).collect();
        over.sort_by_key(|room| std::cmp::Reverse(self.reactors[*room].load()));
        over
    }

    /// Number of reactors with load.
    pub(super) fn occupied(&self) -> usize {
        self.reactors.iter().filter(|room| room.active_threads > 0).count()
    }

    /// Whether no reactor is over the limit and the quota is obeyed.
    pub(super) fn is_within(&self) -> bool {
        self.occupied() <= self.quota && !(0..self.reactors.len()).any(|room| self.is_over(room))
    }

    /// Whether a busy reactor shares the physical core of `room`.
    pub(super) fn sibling_busy(&self, room: usize) -> bool {
        self.reactors[room].siblings.iter().any(|other| self.is_busy(*other))
    }

    /// Whether a reactor is loaded enough to slow its sibling down.
    pub(super) fn is_busy(&self, room: usize) -> bool {
        self.reactors[room].active_threads > 0 && self.reactors[room].load() >= self.busy
    }

    /// Whether the quota permits a thread on this reactor: it is busy already, or one more may be.
    pub(super) fn may_wake(&self, seat: usize, room: usize) -> bool {
        let seat = &self.threads[seat];
        let leaves_one_empty =
            usize::from(seat.counts() && self.reactors[seat.reactor].active_threads == 1);
        !seat.counts()
            || self.reactors[room].active_threads > 0
            || self.occupied() - leaves_one_empty < self.quota
    }

    /// Whether a thread fits on a reactor, with `spare` left below the limit. It always fits on an
    /// empty one.
    pub(super) fn fits(&self, seat: usize, room: usize, spare: CoreShare) -> bool {
        let (thread, target) = (&self.threads[seat], &self.reactors[room]);
        let roomy = !thread.counts()
            || target.active_threads == 0
            || target.load() + thread.load + spare <= self.limit;
        self.permits(seat, room) && roomy
    }

    /// As [`Placement::fits`], including the capacity taken by a busy sibling.
    pub(super) fn fits_well(&self, seat: usize, room: usize, spare: CoreShare) -> bool {
        self.fits(seat, room, spare + self.taken_by_siblings(room))
    }

    /// Whether mask, cpuset and quota permit a thread on a reactor other than its own.
    pub(super) fn permits(&self, seat: usize, room: usize) -> bool {
        let thread = &self.threads[seat];
        room != thread.reactor && thread.allowed[room] && self.may_wake(seat, room)
    }

    fn taken_by_siblings(&self, room: usize) -> CoreShare {
        let loads = self.reactors[room].siblings.iter().map(|other| self.reactors[*other].load());
        loads.sum::<CoreShare>() / SIBLING_COST_PARTS
    }

    /// Whether a thread's memory is on another NUMA node. For an idle thread this does not matter.
    pub(super) fn is_far(&self, seat: usize, room: usize) -> bool {
        let (near, node) = (self.threads[seat].node, self.reactors[room].node);
        !self.threads[seat].idle && near.is_some() && node.is_some() && near != node
    }

    /// Suitability of a reactor for a thread.
    pub(super) fn score(&self, seat: usize, room: usize) -> PlacementScore {
        PlacementScore {
            far: self.is_far(seat, room),
            elsewhere: room != self.idle_reactor,
            sibling_busy: self.sibling_busy(room),
            asleep: self.reactors[room].active_threads == 0,
            core: self.reactors[room].core,
        }
    }

    /// Best reactor among those that satisfy `suits`.
    pub(super) fn best(&self, seat: usize, suits: impl Fn(usize) -> bool) -> Option<usize> {
        let rooms = (0..self.reactors.len()).filter(|room| suits(*room));
        rooms.min_by_key(|room| self.score(seat, *room))
    }

    /// Threads of a reactor.
    pub(super) fn threads_on(&self, room: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.threads.len()).filter(move |seat| self.threads[*seat].reactor == room)
    }

    /// Threads of a reactor with a load that is not negligible.
    pub(super) fn active_threads_on(&self, room: usize) -> Vec<usize> {
        self.threads_on(room).filter(|seat| self.threads[*seat].counts()).collect()
    }

    /// Plans the migration of a thread.
    pub(super) fn migrate(&mut self, seat: usize, to: usize, reason: MigrationReason) {
        let limit = self.limit;
        let thread = &mut self.threads[seat];
        let from = std::mem::replace(&mut thread.reactor, to);
        thread.movable = false;
        let (load, counts) = (thread.load, usize::from(thread.counts()));
        let (source, target) = (self.reactors[from].core, self.reactors[to].core);
        self.migrations.push(Migration { thread: thread.id, from: source, to: target, reason });

        let room = &mut self.reactors[from];
        room.thread_load -= load;
        room.active_threads -= counts;
        room.threads -= 1;
        // The remaining threads may have had more demand than time, so the time set free here must
        // not be given to others before their demand is known.
        if room.may_hide_demand && room.active_threads > 0 {
            room.load_min = limit;
        }
        let room = &mut self.reactors[to];
        room.thread_load += load;
        room.active_threads += counts;
        room.threads += 1;
    }
}
