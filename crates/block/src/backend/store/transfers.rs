//! Data on their way between a channel and a device because the store wants them moved, and what came
//! of them until the store is told.

use base::{Outcome, Segment};
use volume::{End, Store};

use super::bounce::Bounce;

/// The transfers of a channel. The token that the device has of one is its number.
pub(super) struct Transfers {
    /// What the store calls each; and where its data pass through if they have checksums.
    under_way: Vec<Option<(u64, Segment)>>,
    free: Vec<u32>,
    ended: Vec<Ended>,
    /// The checksums of what has ended, in the same order.
    sums: Vec<u32>,
}

/// A transfer that has ended, and how many checksums it has.
#[derive(Clone, Copy, Debug)]
struct Ended {
    io: u64,
    outcome: Outcome,
    sums: usize,
}

impl Transfers {
    /// None yet, with room for so many.
    pub(super) fn with_capacity(count: usize) -> Self {
        Self {
            under_way: Vec::with_capacity(count),
            free: Vec::with_capacity(count),
            ended: Vec::with_capacity(count),
            sums: Vec::new(),
        }
    }

    /// One begins. Returns its number.
    pub(super) fn begin(&mut self, io: u64, through: Segment) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.under_way.push(None);
            u32::try_from(self.under_way.len() - 1).unwrap_or(u32::MAX)
        });
        self.under_way[number as usize] = Some((io, through));
        number
    }

    /// How many are under way.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.iter().flatten().count()
    }

    /// Whether one has ended of which the store was not told.
    #[inline]
    pub(super) fn have_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The device has answered one.
    pub(super) fn end(&mut self, token: u64, outcome: Outcome, bounce: Option<&Bounce>) {
        let Ok(number) = u32::try_from(token) else { return };
        let Some((io, through)) = self.under_way[number as usize].take() else { return };
        self.free.push(number);
        let before = self.sums.len();
        let summed = match bounce.filter(|_| outcome.is_success()) {
            Some(bounce) => bounce.sum(through, &mut self.sums),
            None => Ok(()),
        };
        let outcome = summed.map_or(Outcome::DATA_TRANSFER_ERROR, |()| outcome);
        self.ended.push(Ended { io, outcome, sums: self.sums.len() - before });
    }

    /// Tells the store what has ended.
    pub(super) fn tell(&mut self, store: &mut Store) {
        let mut sums = &self.sums[..];
        for Ended { io, outcome, sums: count } in self.ended.drain(..) {
            let (own, rest) = sums.split_at(count);
            sums = rest;
            let end = match outcome.is_success() {
                false => End::Failed(outcome),
                true if own.is_empty() => End::Done,
                true => End::Sums(own),
            };
            store.complete(io, end);
        }
        self.sums.clear();
    }

    /// What the store calls those of which it was not told how they ended.
    pub(super) fn into_untold(self) -> impl Iterator<Item = u64> {
        let under_way = self.under_way.into_iter().flatten().map(|(io, _)| io);
        under_way.chain(self.ended.into_iter().map(|ended| ended.io))
    }
}
