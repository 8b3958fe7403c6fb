//! Laying everything out anew: a search for a place for each thread, all limits kept.
//!
//! One step at a time misses what takes two: a thread that has to make place for another one first.
//! The search is exact where there is little to arrange and bounded where there is much.

use super::board::Board;
use super::share::Share;
use super::snapshot::Reason;

/// How many places are tried before the search gives up. About 100 µs, once in a period and only
/// when steps did not help.
const TRIES_MAX: u32 = 4_096;

struct Search<'a> {
    board: &'a Board,
    /// The threads to find a place for, largest first.
    seats: Vec<usize>,
    /// Where each may be: where it is, and then from best to worst.
    choices: Vec<Vec<usize>>,
    /// The place of each, as far as it is decided.
    places: Vec<usize>,
    /// Load and crowd of each room without the threads that have no place yet.
    loads: Vec<(Share, usize)>,
    tries: u32,
}

impl Board {
    /// Moves threads so that all rooms are within the limits. False, and nothing moves, if no way
    /// was found.
    pub(super) fn lay_out(&mut self) -> bool {
        let mut search = Search::new(self);
        if !search.can_begin() || !search.place_from(0) {
            return false;
        }
        for (seat, room) in search.seats.clone().into_iter().zip(search.places.clone()) {
            if self.seats[seat].room != room {
                self.move_seat(seat, room, Reason::Overload);
            }
        }
        true
    }
}

impl<'a> Search<'a> {
    fn new(board: &'a Board) -> Self {
        let all = 0..board.seats.len();
        let loose = |seat: &usize| board.seats[*seat].free() && board.seats[*seat].counts();
        let mut seats: Vec<usize> = all.filter(loose).collect();
        seats.sort_by_key(|seat| std::cmp::Reverse(board.seats[*seat].load));
        let mut loads: Vec<(Share, usize)> =
            board.rooms.iter().map(|room| (room.own + room.sum, room.crowd)).collect();
        for seat in &seats {
            let room = &mut loads[board.seats[*seat].room];
            *room = (room.0 - board.seats[*seat].load, room.1 - 1);
        }
        let places = Vec::with_capacity(seats.len());
        let choices = seats.iter().map(|seat| choices(board, *seat)).collect();
        Self { board, seats, choices, places, loads, tries: 0 }
    }

    /// Whether what cannot move leaves a chance.
    fn can_begin(&self) -> bool {
        let limit = self.board.limit;
        let rooms = || self.loads.iter().zip(&self.board.rooms).filter(|(_, room)| room.open);
        let stuck = rooms().any(|(load, room)| !room.isolated && load.1 > 1 && load.0 > limit);
        let wanted: Share =
            self.seats.iter().map(|seat| self.board.seats[*seat].load.min(limit)).sum();
        let there: Share = rooms().map(|(load, _)| limit.saturating_sub(load.0)).sum();
        !stuck && wanted <= there && self.occupied() <= self.board.quota
    }

    fn occupied(&self) -> usize {
        self.loads.iter().filter(|load| load.1 > 0).count()
    }

    /// Finds places for the threads from this one on.
    fn place_from(&mut self, index: usize) -> bool {
        let Some(&seat) = self.seats.get(index) else { return true };
        let load = self.board.seats[seat].load;
        for choice in 0..self.choices[index].len() {
            let room = self.choices[index][choice];
            self.tries += 1;
            if self.tries > TRIES_MAX {
                return false;
            }
            if self.is_room_for(load, room) {
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

    fn is_room_for(&self, load: Share, room: usize) -> bool {
        match self.loads[room] {
            (_, 0) => self.occupied() < self.board.quota,
            (there, _) => there + load <= self.board.limit,
        }
    }
}

fn choices(board: &Board, seat: usize) -> Vec<usize> {
    let thread = &board.seats[seat];
    let mut rooms: Vec<usize> =
        (0..board.rooms.len()).filter(|room| thread.allowed[*room]).collect();
    rooms.sort_by_key(|room| (*room != thread.room, board.rank(seat, *room)));
    rooms
}
