//! Complete re-placement: searches a reactor for every thread, within all limits.
//!
//! Single steps miss solutions that take two: a thread that must first make room for another. The
//! search is exact for small inputs and bounded for large ones.

use super::placement::Placement;
use super::share::CoreShare;
use super::snapshot::MigrationReason;

/// Placements tried before the search gives up. About 100 µs, at most once per period, and only
/// after single steps have failed.
const TRIES_MAX: u32 = 4_096;

struct PlacementSearch<'a> {
    placement: &'a Placement,
    /// Threads to be placed, largest first.
    seats: Vec<usize>,
    /// Candidate reactors of each: the current one, then from best to worst.
    choices: Vec<Vec<usize>>,
    /// Chosen reactor of each, as far as decided.
    places: Vec<usize>,
    /// Load and thread count of each reactor, without threads that are not placed yet.
    loads: Vec<(CoreShare, usize)>,
    tries: u32,
}

impl Placement {
    /// Moves threads so that all reactors are within the limits. Returns false, and changes
    /// nothing, if no solution was found.
    pub(super) fn repack_all(&mut self) -> bool {
        let mut search = PlacementSearch::new(self);
        if !search.is_feasible() || !search.place_from(0) {
            return false;
        }
        for (seat, room) in search.seats.clone().into_iter().zip(search.places.clone()) {
            if self.threads[seat].reactor != room {
                self.migrate(seat, room, MigrationReason::Overload);
            }
        }
        true
    }
}

impl<'a> PlacementSearch<'a> {
    fn new(board: &'a Placement) -> Self {
        let all = 0..board.threads.len();
        let loose = |seat: &usize| board.threads[*seat].free() && board.threads[*seat].counts();
        let mut seats: Vec<usize> = all.filter(loose).collect();
        seats.sort_by_key(|seat| std::cmp::Reverse(board.threads[*seat].load));
        let mut loads: Vec<(CoreShare, usize)> = board
            .reactors
            .iter()
            .map(|room| (room.own_load + room.thread_load, room.active_threads))
            .collect();
        for seat in &seats {
            let room = &mut loads[board.threads[*seat].reactor];
            *room = (room.0 - board.threads[*seat].load, room.1 - 1);
        }
        let places = Vec::with_capacity(seats.len());
        let choices = seats.iter().map(|seat| choices(board, *seat)).collect();
        Self { placement: board, seats, choices, places, loads, tries: 0 }
    }

    /// Whether the threads that cannot move permit a solution.
    fn is_feasible(&self) -> bool {
        let limit = self.placement.limit;
        let rooms =
            || self.loads.iter().zip(&self.placement.reactors).filter(|(_, room)| room.open);
        let stuck = rooms().any(|(load, room)| !room.isolated && load.1 > 1 && load.0 > limit);
        let wanted: CoreShare =
            self.seats.iter().map(|seat| self.placement.threads[*seat].load.min(limit)).sum();
        let there: CoreShare = rooms().map(|(load, _)| limit.saturating_sub(load.0)).sum();
        !stuck && wanted <= there && self.occupied() <= self.placement.quota
    }

    fn occupied(&self) -> usize {
        self.loads.iter().filter(|load| load.1 > 0).count()
    }

    /// Places the threads from this one on.
    fn place_from(&mut self, index: usize) -> bool {
        let Some(&seat) = self.seats.get(index) else { return true };
        let load = self.placement.threads[seat].load;
        for choice in 0..self.choices[index].len() {
            let room = self.choices[index][choice];
            self.tries += 1;
            if self.tries > TRIES_MAX {
                return false;
            }
            if self.fits(load, room) {
                let before = self.loads[room];
                self.loads[room] = (before.0 + load, before.1 + 1);
                self.places.push(room);
                if self.place_from(index + 1) {
                    return true;
                }
                self.places.pop();
                self.loads[room] = before;
            }
        }
        false
    }

    fn fits(&self, load: CoreShare, room: usize) -> bool {
        match self.loads[room] {
            (_, 0) => self.occupied() < self.placement.quota,
            (there, _) => there + load <= self.placement.limit,
        }
    }
}

fn choices(board: &Placement, seat: usize) -> Vec<usize> {
    let thread = &board.threads[seat];
    let mut rooms: Vec<usize> =
        (0..board.reactors.len()).filter(|room| thread.allowed[*room]).collect();
    rooms.sort_by_key(|room| (*room != thread.reactor, board.score(seat, *room)));
    rooms
}
