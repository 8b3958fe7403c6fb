//! Optional migrations: fewer awake reactors, local memory, separate physical cores. Made only
//! while all limits are kept, and only if they stay kept with some reserve.

use super::placement::Placement;
use super::share::SLACK;
use super::snapshot::MigrationReason;

impl Placement {
    /// Vacates reactors whose threads all fit elsewhere.
    pub(super) fn vacate_reactors(&mut self) {
        let mut rooms: Vec<usize> = (0..self.reactors.len()).collect();
        rooms.sort_by_key(|room| (self.reactors[*room].load(), self.reactors[*room].core));
        for room in rooms {
            if room == self.idle_reactor || self.reactors[room].active_threads == 0 {
                continue;
            }
            let mut emptied = self.clone();
            if emptied.empty(room) {
                *self = emptied;
            }
        }
    }

    fn empty(&mut self, room: usize) -> bool {
        let mut seats = self.active_threads_on(room);
        seats.sort_by_key(|seat| std::cmp::Reverse(self.threads[*seat].load));
        seats.into_iter().all(|seat| {
            let target = self
                .best(seat, |other| self.can_take_over(seat, other))
                .filter(|_| self.threads[seat].free());
            if let Some(target) = target {
                self.migrate(seat, target, MigrationReason::Vacate);
            }
            target.is_some()
        })
    }

    /// Whether a reactor that is awake anyway can take a thread without harm to itself or a
    /// sibling.
    fn can_take_over(&self, seat: usize, room: usize) -> bool {
        let awake = room == self.idle_reactor || self.reactors[room].active_threads > 0;
        let near = !self.is_far(seat, room) || self.is_far(seat, self.threads[seat].reactor);
        let full = self.reactors[room].load() + self.threads[seat].load + SLACK > self.limit;
        let disturbs = self.sibling_busy(room) && !self.is_busy(room);
        awake && near && !full && !disturbs && self.fits_well(seat, room, SLACK)
    }

    /// Moves threads to the NUMA node of their memory.
    pub(super) fn improve_locality(&mut self) {
        for seat in 0..self.threads.len() {
            let thread = &self.threads[seat];
            if !thread.free() || !self.is_far(seat, thread.reactor) {
                continue;
            }
            let suits = |room| !self.is_far(seat, room) && self.fits_well(seat, room, SLACK);
            if let Some(room) = self.best(seat, suits) {
                self.migrate(seat, room, MigrationReason::Node);
            }
        }
    }

    /// Where both hardware threads of a physical core are busy, moves one light thread to an unused
    /// core.
    pub(super) fn spread_siblings(&mut self) {
        for room in (0..self.reactors.len()).rev() {
            if room == self.idle_reactor || !self.is_busy(room) || !self.sibling_busy(room) {
                continue;
            }
            let crowd = self.active_threads_on(room);
            if crowd.iter().any(|seat| !self.threads[*seat].free()) {
                continue;
            }
            let vacant = (0..self.reactors.len()).find(|other| {
                let target = &self.reactors[*other];
                target.active_threads == 0
                    && target.node == self.reactors[room].node
                    && !self.sibling_busy(*other)
                    && crowd.iter().all(|seat| self.threads[*seat].allowed[*other])
            });
            for seat in crowd {
                if let Some(vacant) = vacant {
                    self.migrate(seat, vacant, MigrationReason::Sibling);
                }
            }
        }
    }
}
