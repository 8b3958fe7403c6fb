//! Moves that every policy makes: away from cores that were taken, into masks.

use super::board::Board;
use super::share::Share;
use super::snapshot::Reason;

impl Board {
    /// Moves threads that may not be where they are.
    pub(super) fn honour_masks(&mut self) {
        for seat in 0..self.seats.len() {
            let thread = &self.seats[seat];
            if thread.allowed[thread.room] || !thread.movable {
                continue;
            }
            let taken = !self.rooms[thread.room].open;
            let reason = if taken { Reason::CoreTaken } else { Reason::Mask };
            if let Some(room) = self.refuge(seat) {
                self.move_seat(seat, room, reason);
            }
        }
    }

    /// Where a thread goes that cannot stay: where it fits best, else where there is least to do,
    /// else into its mask whatever the quota says.
    fn refuge(&self, seat: usize) -> Option<usize> {
        self.best(seat, |room| self.fits_well(seat, room, 0))
            .or_else(|| self.best(seat, |room| self.fits(seat, room, 0)))
            .or_else(|| self.emptiest(|room| self.admits(seat, room)))
            .or_else(|| self.emptiest(|room| self.seats[seat].allowed[room]))
    }

    /// The room with least to do of those that `suits` is true of.
    pub(super) fn emptiest(&self, suits: impl Fn(usize) -> bool) -> Option<usize> {
        let load =
            |room: &usize| -> (Share, u32) { (self.rooms[*room].load(), self.rooms[*room].core) };
        (0..self.rooms.len()).filter(|room| suits(*room)).min_by_key(load)
    }
}
