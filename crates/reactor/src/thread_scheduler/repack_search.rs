//! Complete re-placement: searches a reactor for every thread, within all limits.
//!
//! Single steps miss solutions that take two: a thread that must first move to free capacity for another. The
//! search is exact for small inputs and bounded for large ones.

use super::core_share::CoreShare;
use super::placement::Placement;
use super::snapshot::MigrationReason;

/// Placements tried before the search gives up. About 100 µs, at most once per period, and only
/// after single steps have failed.
const TRIES_MAX: u32 = 4_096;

struct PlacementSearch<'a> {
    placement: &'a Placement,
    /// Threads to be placed, largest first.
    unplaced: Vec<usize>,
    /// Candidate reactors of each: the current one, then from best to worst.
    choices: Vec<Vec<usize>>,
    /// Chosen reactor of each, as far as decided.
    chosen: Vec<usize>,
    /// Load and thread count of each reactor, without threads that are not placed yet.
    loads: Vec<(CoreShare, usize)>,
    tries: u32,
}

impl Placement {
    /// Moves threads so that all reactors are within the limits. Returns false, and changes
    /// nothing, if no solution was found.
    pub(super) fn repack_all(&mut self) -> bool {
        let mut search = PlacementSearch::new(self);
        if !search.can_pinned_threads_fit() || !search.try_place_from(0) {
            return false;
        }
        for (thread_index, reactor) in
            search.unplaced.clone().into_iter().zip(search.chosen.clone())
        {
            if self.threads[thread_index].reactor != reactor {
                self.plan_migration(thread_index, reactor, MigrationReason::Overload);
            }
        }
        true
    }
}

impl<'a> PlacementSearch<'a> {
    fn new(board: &'a Placement) -> Self {
        let all = 0..board.threads.len();
        let loose = |thread_index: &usize| {
            board.threads[*thread_index].may_migrate() && board.threads[*thread_index].has_load()
        };
        let mut unplaced: Vec<usize> = all.filter(loose).collect();
        unplaced.sort_by_key(|thread_index| std::cmp::Reverse(board.threads[*thread_index].load));
        let mut loads: Vec<(CoreShare, usize)> = board
            .reactors
            .iter()
            .map(|reactor| (reactor.own_load + reactor.thread_load, reactor.active_threads))
            .collect();
        for thread_index in &unplaced {
            let reactor = &mut loads[board.threads[*thread_index].reactor];
            *reactor = (reactor.0 - board.threads[*thread_index].load, reactor.1 - 1);
        }
        let chosen = Vec::with_capacity(unplaced.len());
        let choices =
            unplaced.iter().map(|thread_index| candidate_reactors(board, *thread_index)).collect();
        Self { placement: board, unplaced, choices, chosen, loads, tries: 0 }
    }

    /// Whether the threads that cannot move permit a solution.
    fn can_pinned_threads_fit(&self) -> bool {
        let limit = self.placement.limit;
        let reactors =
            || self.loads.iter().zip(&self.placement.reactors).filter(|(_, reactor)| reactor.open);
        let stuck =
            reactors().any(|(load, reactor)| !reactor.isolated && load.1 > 1 && load.0 > limit);
        let wanted: CoreShare = self
            .unplaced
            .iter()
            .map(|thread_index| self.placement.threads[*thread_index].load.min(limit))
            .sum();
        let there: CoreShare = reactors().map(|(load, _)| limit.saturating_sub(load.0)).sum();
        !stuck && wanted <= there && self.reactors_with_load() <= self.placement.quota
    }

    fn reactors_with_load(&self) -> usize {
        self.loads.iter().filter(|load| load.1 > 0).count()
    }

    /// Places the threads from this one on.
    fn try_place_from(&mut self, index: usize) -> bool {
        let Some(&thread_index) = self.unplaced.get(index) else { return true };
        let load = self.placement.threads[thread_index].load;
        for choice in 0..self.choices[index].len() {
            let reactor = self.choices[index][choice];
            self.tries += 1;
            if self.tries > TRIES_MAX {
                return false;
            }
            if self.has_capacity(load, reactor) {
                let before = self.loads[reactor];
                self.loads[reactor] = (before.0 + load, before.1 + 1);
                self.chosen.push(reactor);
                if self.try_place_from(index + 1) {
                    return true;
                }
                self.chosen.pop();
                self.loads[reactor] = before;
            }
        }
        false
    }

    fn has_capacity(&self, load: CoreShare, reactor: usize) -> bool {
        match self.loads[reactor] {
            (_, 0) => self.reactors_with_load() < self.placement.quota,
            (there, _) => there + load <= self.placement.limit,
        }
    }
}

fn candidate_reactors(board: &Placement, thread_index: usize) -> Vec<usize> {
    let thread = &board.threads[thread_index];
    let mut reactors: Vec<usize> =
        (0..board.reactors.len()).filter(|reactor| thread.allowed[*reactor]).collect();
    reactors.sort_by_key(|reactor| {
        (*reactor != thread.reactor, board.placement_cost(thread_index, *reactor))
    });
    reactors
}
