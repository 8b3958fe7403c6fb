//! How many writes a channel has under way, and since when.
//!
//! Two buckets are enough: a new epoch gets the second one, and the one after that has to wait until
//! the first is empty, which makes whoever waits for it wait a little longer and nobody else.

use crate::backend::mirror::shared::{Seat, Shared};

/// The writes of one channel.
pub(super) struct Tally {
    seat: Seat,
    under_way: [u32; 2],
    epochs: [u64; 2],
    /// The bucket that new writes go into.
    bucket: u8,
    /// Whether the seat is taken.
    is_in: bool,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self { seat: Seat::idle(), under_way: [0; 2], epochs: [0; 2], bucket: 0, is_in: false }
    }

    pub(super) fn seat(&self) -> &Seat {
        &self.seat
    }

    /// Takes the seat, or notices that there is a new epoch.
    #[inline]
    pub(super) fn enter(&mut self, shared: &Shared) {
        let epoch = shared.epoch();
        let (new, old) = (usize::from(self.bucket), usize::from(self.bucket ^ 1));
        if !self.is_in {
            self.is_in = true;
            self.epochs[new] = epoch;
            self.seat.take(epoch);
        } else if epoch != self.epochs[new] && self.under_way[old] == 0 {
            if self.under_way[new] == 0 {
                self.epochs[new] = epoch;
                self.seat.move_up(epoch);
            } else {
                self.epochs[old] = epoch;
                self.bucket ^= 1;
            }
        }
    }

    /// A write begins; the seat is taken. Returns what to end it with.
    #[inline]
    pub(super) fn begin(&mut self) -> u8 {
        self.under_way[usize::from(self.bucket)] += 1;
        self.bucket
    }

    /// A write has ended.
    #[inline]
    pub(super) fn end(&mut self, bucket: u8) {
        let under_way = &mut self.under_way[usize::from(bucket)];
        *under_way -= 1;
        if *under_way == 0 && bucket != self.bucket {
            self.seat.move_up(self.epochs[usize::from(self.bucket)]);
        }
    }

    /// At the end of a turn: leaves the seat if nothing is under way, or notices a new epoch.
    #[inline]
    pub(super) fn settle(&mut self, shared: &Shared) {
        if !self.is_in {
            return;
        }
        if self.under_way == [0; 2] {
            self.is_in = false;
            self.seat.leave();
        } else {
            self.enter(shared);
        }
    }
}
