//! The dynamic policy: idle threads gather, full reactors shed, a quota is not spread over.

use super::board::Board;
use super::share::{SLACK, Share};
use super::snapshot::Reason;

impl Board {
    /// Moves idle threads to the scheduling core, as far as it has room.
    pub(super) fn gather_idle(&mut self) {
        for seat in 0..self.seats.len() {
            let thread = &self.seats[seat];
            if thread.idle && thread.free() && self.fits(seat, self.gathering, SLACK) {
                self.move_seat(seat, self.gathering, Reason::Idle);
            }
        }
    }

    /// Brings all rooms within the limits. One step at a time where that is enough; else everything
    /// is laid out anew; and where that cannot be done either, the fullest give to the emptiest.
    pub(super) fn relieve(&mut self) {
        if self.is_within() {
            return;
        }
        let mut stepwise = self.clone();
        stepwise.obey_quota();
        stepwise.shed();
        if stepwise.is_within() {
            *self = stepwise;
        } else if !self.lay_out() {
            stepwise.level();
            *self = stepwise;
        }
    }

    /// Empties the rooms with least to do, so that no more are busy than the quota has processors.
    /// Too much in few rooms is better than a whole process that is throttled.
    fn obey_quota(&mut self) {
        let busy = |room: &usize| self.rooms[*room].crowd > 0;
        let mut rooms: Vec<usize> = (0..self.rooms.len()).filter(busy).collect();
        rooms.sort_by_key(|room| (*room == self.gathering, self.rooms[*room].load()));
        let surplus = rooms.len().saturating_sub(self.quota);
        while surplus > 0 && !rooms.is_empty() {
            let leaving = &rooms[..surplus.min(rooms.len())];
            let mut emptied = self.clone();
            match leaving.iter().position(|room| !emptied.squeeze_out(*room, leaving)) {
                Some(stuck) => {
                    rooms.remove(stuck);
                }
                None => {
                    *self = emptied;
                    return;
                }
            }
        }
    }

    /// Spreads what is in a room over those that stay busy; false if some of it has to stay.
    fn squeeze_out(&mut self, room: usize, leaving: &[usize]) -> bool {
        self.crowd_of(room).into_iter().all(|seat| {
            let stays = |other: usize| {
                self.rooms[other].crowd > 0 && !leaving.contains(&other) && self.admits(seat, other)
            };
            let target = self
                .best(seat, |other| stays(other) && self.fits(seat, other, 0))
                .or_else(|| self.emptiest(stays))
                .filter(|_| self.seats[seat].free());
            if let Some(target) = target {
                self.move_seat(seat, target, Reason::Quota);
            }
            target.is_some()
        })
    }

    /// Moves threads out of full rooms into those where they fit.
    fn shed(&mut self) {
        for room in self.over() {
            while self.is_over(room) {
                let excess = self.rooms[room].load() - self.limit;
                let leaving = self.crowd_of(room).into_iter().filter_map(|seat| {
                    let load = self.seats[seat].load;
                    let target = self.shelter(seat)?;
                    // The smallest that is enough; if none is, the largest.
                    let order = if load >= excess { (0, load) } else { (1, Share::MAX - load) };
                    Some((order, seat, target))
                });
                let Some((_, seat, target)) = leaving.min() else { break };
                self.move_seat(seat, target, Reason::Overload);
            }
        }
    }

    /// Where a thread of a full room fits.
    fn shelter(&self, seat: usize) -> Option<usize> {
        if !self.seats[seat].free() {
            return None;
        }
        self.best(seat, |room| self.fits_well(seat, room, 0))
            .or_else(|| self.best(seat, |room| self.fits(seat, room, 0)))
    }

    /// One thread from each full room to where there is clearly less to do.
    fn level(&mut self) {
        for room in self.over() {
            let load = self.rooms[room].load();
            let leaving = self.crowd_of(room).into_iter().filter_map(|seat| {
                let target = self.emptiest(|other| self.admits(seat, other))?;
                let after = self.rooms[target].load() + self.seats[seat].load;
                (self.seats[seat].free() && after + SLACK < load).then_some((after, seat, target))
            });
            if let Some((_, seat, target)) = leaving.min() {
                self.move_seat(seat, target, Reason::Overload);
            }
        }
    }
}
