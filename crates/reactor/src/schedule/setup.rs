//! How a snapshot becomes a board.

use std::collections::{BTreeMap, BTreeSet};

use base::Instant;
use host::Cores;

use super::board::{Board, Room, Seat};
use super::options::Options;
use super::share::{self, SLACK, Share};
use super::snapshot::{Event, ReactorLoad, Snapshot, ThreadLoad};

/// How many times over a reactor can be loaded so that what a thread did before is still believed.
const OVERLOAD_MAX: Share = 16;

/// A period to plan for.
pub(super) struct Period<'a> {
    pub(super) now: Instant,
    pub(super) snapshot: &'a Snapshot,
    pub(super) options: &'a Options,
}

/// What is remembered from one plan to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    threads: BTreeMap<u64, Remembered>,
    taken: BTreeSet<u32>,
    unmatched: BTreeSet<u64>,
    no_core_left: bool,
}

/// What is remembered of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    /// Its load when that could last be seen.
    load: Share,
    /// Whether it counts as idle.
    idle: bool,
    /// When it was last given an order.
    ordered: Option<Instant>,
}

impl Memory {
    /// Notes that a thread is given an order.
    pub(super) fn ordered(&mut self, thread: u64, now: Instant) {
        self.threads.entry(thread).or_default().ordered = Some(now);
    }

    /// Puts everything on a board, and says what has changed on the way.
    pub(super) fn board(&mut self, period: &Period<'_>, events: &mut Vec<Event>) -> Board {
        let Period { snapshot, options, .. } = *period;
        let rooms = self.rooms(period, events);
        let gathering = gathering(&rooms, options.scheduling_core);
        let quota = processors(snapshot.quota, rooms.len());
        let mut board = Board {
            rooms,
            seats: Vec::new(),
            moves: Vec::new(),
            gathering,
            quota,
            limit: options.shed_above(),
            busy: options.idle_below(),
        };
        // There may be thousands: each is found without a look at the others.
        let living: BTreeSet<u64> = snapshot.threads.iter().map(|thread| thread.id).collect();
        self.threads.retain(|id, _| living.contains(id));
        self.unmatched.retain(|id| self.threads.contains_key(id));
        for thread in &snapshot.threads {
            // Whoever is on no reactor that we know of cannot be given an order.
            let Some(room) = board.rooms.iter().position(|room| room.core == thread.home) else {
                continue;
            };
            let seat = self.seat(period, thread, room, &board.rooms, events);
            let target = &mut board.rooms[room];
            target.sum += seat.load;
            target.crowd += usize::from(seat.counts());
            target.held += 1;
            target.own = target.own.saturating_sub(share::of(thread.busy, snapshot.elapsed));
            board.seats.push(seat);
        }
        board
    }

    fn rooms(&mut self, period: &Period<'_>, events: &mut Vec<Event>) -> Vec<Room> {
        let Period { snapshot, options, .. } = *period;
        let none_left = snapshot.reactors.iter().all(|reactor| reactor.taken);
        for reactor in &snapshot.reactors {
            let core = reactor.core;
            if reactor.taken && self.taken.insert(core) {
                events.push(Event::CoreTaken { core });
            } else if !reactor.taken && self.taken.remove(&core) {
                events.push(Event::CoreReturned { core });
            }
        }
        if none_left && !std::mem::replace(&mut self.no_core_left, none_left) {
            events.push(Event::NoCoreLeft);
        }
        self.no_core_left = none_left;
        let room = |reactor: &ReactorLoad| {
            let own = share::of(reactor.busy, snapshot.elapsed);
            Room {
                core: reactor.core,
                open: none_left || !reactor.taken,
                isolated: options.isolated.contains(reactor.core),
                hides: own >= options.hides_from(),
                node: reactor.node,
                siblings: siblings(reactor, &snapshot.reactors),
                own,
                floor: 0,
                sum: 0,
                crowd: 0,
                held: 0,
            }
        };
        snapshot.reactors.iter().map(room).collect()
    }

    fn seat(
        &mut self,
        period: &Period<'_>,
        thread: &ThreadLoad,
        room: usize,
        rooms: &[Room],
        events: &mut Vec<Event>,
    ) -> Seat {
        let Period { now, snapshot, options } = *period;
        let known = self.threads.entry(thread.id).or_default();
        let seen = share::of(thread.busy, snapshot.elapsed);
        // On a reactor that was always busy a thread may have wanted more time than it got, so what
        // it did when it could be seen counts if that was more. If it was much more, the thread has
        // become quiet since: few reactors are overloaded so many times.
        let squeezed = rooms[room].hides && seen * OVERLOAD_MAX >= known.load;
        known.load = if squeezed { seen.max(known.load) } else { seen };
        let idle_below = options.idle_below() + if known.idle { SLACK } else { 0 };
        known.idle = known.load < idle_below;
        let last = known.ordered.max(thread.last_move);
        let rested = last.is_none_or(|last| now.since(last) >= options.rest);
        let (load, idle) = (known.load, known.idle);
        let allowed = self.allowed(thread, room, rooms, events);
        Seat {
            id: thread.id,
            room,
            load,
            idle,
            movable: rested && !thread.moving,
            settled: rooms[room].isolated && allowed[room],
            node: thread.node,
            allowed,
        }
    }

    /// Where a thread may be: in its mask as far as that can be honoured.
    fn allowed(
        &mut self,
        thread: &ThreadLoad,
        home: usize,
        rooms: &[Room],
        events: &mut Vec<Event>,
    ) -> Vec<bool> {
        let Some(mask) = &thread.mask else {
            self.matched(thread.id, events);
            return anywhere(rooms);
        };
        let asked = within(mask, rooms);
        if asked.contains(&true) {
            self.matched(thread.id, events);
            return asked;
        }
        if self.unmatched.insert(thread.id) {
            events.push(Event::MaskUnmatched { thread: thread.id, mask: mask.clone() });
        }
        near(mask, home, rooms)
    }

    fn matched(&mut self, thread: u64, events: &mut Vec<Event>) {
        if self.unmatched.remove(&thread) {
            events.push(Event::MaskMatched { thread });
        }
    }
}

/// The open rooms of a mask; isolated ones only if it names no others.
pub(super) fn within(mask: &Cores, rooms: &[Room]) -> Vec<bool> {
    let named = |room: &Room| room.open && mask.contains(room.core);
    let shared = rooms.iter().any(|room| named(room) && !room.isolated);
    rooms.iter().map(|room| named(room) && (!shared || !room.isolated)).collect()
}

/// All open rooms that are not isolated, or all open ones if there are no others.
pub(super) fn anywhere(rooms: &[Room]) -> Vec<bool> {
    let shared = rooms.iter().any(|room| room.open && !room.isolated);
    rooms.iter().map(|room| room.open && (!shared || !room.isolated)).collect()
}

/// Where a thread may be whose mask has no open room: near to what the mask names, and where it is.
fn near(mask: &Cores, home: usize, rooms: &[Room]) -> Vec<bool> {
    let meant = |node| rooms.iter().any(|room| room.node == node && mask.contains(room.core));
    let is_near =
        |room: &Room| room.open && !room.isolated && room.node.is_some() && meant(room.node);
    let mut allowed: Vec<bool> = rooms.iter().map(is_near).collect();
    if !allowed.contains(&true) {
        allowed = anywhere(rooms);
    }
    allowed[home] |= rooms[home].open && !rooms[home].isolated;
    allowed
}

fn siblings(reactor: &ReactorLoad, reactors: &[ReactorLoad]) -> Vec<usize> {
    let shares =
        |other: &ReactorLoad| other.core != reactor.core && reactor.siblings.contains(other.core);
    (0..reactors.len()).filter(|other| shares(&reactors[*other])).collect()
}

/// The scheduling core's room, or the first that can stand in for it.
fn gathering(rooms: &[Room], scheduling_core: Option<u32>) -> usize {
    let chosen = |room: &Room| room.open && scheduling_core == Some(room.core);
    let shared = |room: &Room| room.open && !room.isolated;
    let first = |suits: &dyn Fn(&Room) -> bool| {
        let suiting = (0..rooms.len()).filter(|room| suits(&rooms[*room]));
        suiting.min_by_key(|room| rooms[*room].core)
    };
    first(&chosen).or_else(|| first(&shared)).or_else(|| first(&|room| room.open)).unwrap_or(0)
}

/// How many reactors a quota can keep busy: its whole processors, and one at least.
fn processors(quota: Option<f64>, reactors: usize) -> usize {
    let Some(quota) = quota else { return reactors };
    let fits = |count: &usize| u32::try_from(*count).is_ok_and(|count| f64::from(count) <= quota);
    (1..=reactors).take_while(fits).count().max(1)
}
