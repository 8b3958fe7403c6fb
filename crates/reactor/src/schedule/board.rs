//! The board a plan is thought out on: rooms, which are reactors, and seats, which are threads.
//!
//! Every move changes the estimates here at once, so the next thought sees what the last one did.

use super::share::{NEGLIGIBLE, SIBLING_COST_PARTS, Share};
use super::snapshot::{Move, Reason};

/// Estimates for the time after the moves decided so far.
#[derive(Clone, Debug)]
pub(super) struct Board {
    pub(super) rooms: Vec<Room>,
    pub(super) seats: Vec<Seat>,
    pub(super) moves: Vec<Move>,
    /// The room where idle threads gather.
    pub(super) gathering: usize,
    /// How many rooms may be busy at once.
    pub(super) quota: usize,
    /// How full a room may be that is shared.
    pub(super) limit: Share,
    /// From which load on a room counts as busy for its sibling.
    pub(super) busy: Share,
}

/// A reactor.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pub(super) core: u32,
    /// Whether it may be given threads.
    pub(super) open: bool,
    pub(super) isolated: bool,
    /// Whether it had so much to do that loads on it may be larger than they look.
    pub(super) hides: bool,
    pub(super) node: Option<u32>,
    /// The other rooms on its physical core.
    pub(super) siblings: Vec<usize>,
    /// What it does besides its threads.
    pub(super) own: Share,
    /// The estimate does not fall below this.
    pub(super) floor: Share,
    /// What its threads do.
    pub(super) sum: Share,
    /// How many of its threads do anything worth counting.
    pub(super) crowd: usize,
    /// How many threads it holds.
    pub(super) held: usize,
}

/// A thread.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) id: u64,
    pub(super) room: usize,
    pub(super) load: Share,
    /// Whether it is idle.
    pub(super) idle: bool,
    /// Whether it may be given an order in this plan.
    pub(super) movable: bool,
    /// Whether balancing leaves it alone: it has an isolated core.
    pub(super) settled: bool,
    pub(super) node: Option<u32>,
    /// Where it may be, by room. Not empty.
    pub(super) allowed: Vec<bool>,
}

/// How well a room suits a thread; the least suits best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    far: bool,
    elsewhere: bool,
    sibling_busy: bool,
    asleep: bool,
    core: u32,
}

impl Seat {
    /// Whether it is worth counting.
    pub(super) fn counts(&self) -> bool {
        self.load >= NEGLIGIBLE
    }

    /// Whether balancing may move it.
    pub(super) fn free(&self) -> bool {
        self.movable && !self.settled
    }
}

impl Room {
    /// The estimated load.
    pub(super) fn load(&self) -> Share {
        (self.own + self.sum).max(self.floor)
    }
}

impl Board {
    /// Whether a room has more to do than the limit and a thread less would help. One thread alone
    /// may fill a core.
    pub(super) fn is_over(&self, room: usize) -> bool {
        let room = &self.rooms[room];
        room.open && !room.isolated && room.crowd > 1 && room.load() > self.limit
    }

    /// The rooms that have more to do than the limit, fullest first.
    pub(super) fn over(&self) -> Vec<usize> {
        let mut over: Vec<usize> =
            (0..self.rooms.len()).filter(|room| self.is_over(*room)).collect();
        over.sort_by_key(|room| std::cmp::Reverse(self.rooms[*room].load()));
        over
    }

    /// How many rooms have something to do.
    pub(super) fn occupied(&self) -> usize {
        self.rooms.iter().filter(|room| room.crowd > 0).count()
    }

    /// Whether no room is over the limit and no more are busy than the quota has processors.
    pub(super) fn is_within(&self) -> bool {
        self.occupied() <= self.quota && !(0..self.rooms.len()).any(|room| self.is_over(room))
    }

    /// Whether a busy room shares the physical core of `room`.
    pub(super) fn sibling_busy(&self, room: usize) -> bool {
        self.rooms[room].siblings.iter().any(|other| self.is_busy(*other))
    }

    /// Whether a room has enough to do to slow its sibling down.
    pub(super) fn is_busy(&self, room: usize) -> bool {
        self.rooms[room].crowd > 0 && self.rooms[room].load() >= self.busy
    }

    /// Whether the quota allows a thread in this room: it is busy already, or one more may be.
    pub(super) fn may_wake(&self, seat: usize, room: usize) -> bool {
        let seat = &self.seats[seat];
        let leaves_one_empty = usize::from(seat.counts() && self.rooms[seat.room].crowd == 1);
        !seat.counts()
            || self.rooms[room].crowd > 0
            || self.occupied() - leaves_one_empty < self.quota
    }

    /// Whether a thread would find room enough, with `spare` left below the limit. An empty room
    /// always has room enough.
    pub(super) fn fits(&self, seat: usize, room: usize, spare: Share) -> bool {
        let (thread, target) = (&self.seats[seat], &self.rooms[room]);
        let roomy = !thread.counts()
            || target.crowd == 0
            || target.load() + thread.load + spare <= self.limit;
        self.admits(seat, room) && roomy
    }

    /// As [`Board::fits`], but what a busy sibling takes away is counted as well.
    pub(super) fn fits_well(&self, seat: usize, room: usize, spare: Share) -> bool {
        self.fits(seat, room, spare + self.taken_by_siblings(room))
    }

    /// Whether mask, cpuset and quota let a thread into a room that it is not in.
    pub(super) fn admits(&self, seat: usize, room: usize) -> bool {
        let thread = &self.seats[seat];
        room != thread.room && thread.allowed[room] && self.may_wake(seat, room)
    }

    fn taken_by_siblings(&self, room: usize) -> Share {
        let loads = self.rooms[room].siblings.iter().map(|other| self.rooms[*other].load());
        loads.sum::<Share>() / SIBLING_COST_PARTS
    }

    /// Whether a thread's memory lies elsewhere. An idle thread does not look at its memory.
    pub(super) fn is_far(&self, seat: usize, room: usize) -> bool {
        let (near, node) = (self.seats[seat].node, self.rooms[room].node);
        !self.seats[seat].idle && near.is_some() && node.is_some() && near != node
    }

    /// How well a room suits a thread.
    pub(super) fn rank(&self, seat: usize, room: usize) -> Rank {
        Rank {
            far: self.is_far(seat, room),
            elsewhere: room != self.gathering,
            sibling_busy: self.sibling_busy(room),
            asleep: self.rooms[room].crowd == 0,
            core: self.rooms[room].core,
        }
    }

    /// The best of the rooms that `suits` is true of.
    pub(super) fn best(&self, seat: usize, suits: impl Fn(usize) -> bool) -> Option<usize> {
        let rooms = (0..self.rooms.len()).filter(|room| suits(*room));
        rooms.min_by_key(|room| self.rank(seat, *room))
    }

    /// The threads in a room.
    pub(super) fn seats_in(&self, room: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.seats.len()).filter(move |seat| self.seats[*seat].room == room)
    }

    /// The threads in a room that are worth counting.
    pub(super) fn crowd_of(&self, room: usize) -> Vec<usize> {
        self.seats_in(room).filter(|seat| self.seats[*seat].counts()).collect()
    }

    /// Decides that a thread goes to another room.
    pub(super) fn move_seat(&mut self, seat: usize, to: usize, reason: Reason) {
        let limit = self.limit;
        let thread = &mut self.seats[seat];
        let from = std::mem::replace(&mut thread.room, to);
        thread.movable = false;
        let (load, counts) = (thread.load, usize::from(thread.counts()));
        let (source, target) = (self.rooms[from].core, self.rooms[to].core);
        self.moves.push(Move { thread: thread.id, from: source, to: target, reason });

        let room = &mut self.rooms[from];
        room.sum -= load;
        room.crowd -= counts;
        room.held -= 1;
        // Those who stay may have had more to do than they got time for, so that the time that is
        // set free here cannot be given to others before it is known who takes it.
        if room.hides && room.crowd > 0 {
            room.floor = limit;
        }
        let room = &mut self.rooms[to];
        room.sum += load;
        room.crowd += counts;
        room.held += 1;
    }
}
