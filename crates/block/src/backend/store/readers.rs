//! How old the oldest read of a channel is that the store does not know of.
//!
//! A channel that knows where blocks lie reads them without asking. What the store frees meanwhile
//! must not be given to somebody else before such reads have ended. So a channel says in a word of
//! its own, its seat, in which transaction the oldest of them began, and the store gives out only what
//! was freed before:
//!
//! ```text
//!   channel: stores its seat | fence | looks whether its runs are still true | reads
//!   store:   says that runs are not true any more | fence | looks at the seats | gives out
//! ```
//!
//! Either the channel sees that its runs are old, or the store sees the seat.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The transaction in which the oldest read of a channel began; `u64::MAX` if none is under way.
#[derive(Clone, Debug)]
pub(super) struct Seat(Arc<AtomicU64>);

/// The reads of a channel that are under way.
#[derive(Debug)]
pub(super) struct Readers {
    seat: Seat,
    /// What the seat says.
    since: u64,
    /// Those that count for the seat, and those that began later: in which transaction the first did.
    counts: [usize; 2],
    later: u64,
    /// Which of the two counts is that of the older ones.
    old: usize,
}

const IDLE: u64 = u64::MAX;

impl Seat {
    fn idle() -> Self {
        Self(Arc::new(AtomicU64::new(IDLE)))
    }

    /// The transaction of the oldest read. Whoever asks has passed a fence since runs of which he
    /// wants to give out blocks were declared old.
    pub(super) fn oldest(&self) -> u64 {
        // Pairs with the releases below: what the reads did has been done.
        self.0.load(Ordering::Acquire)
    }
}

impl Readers {
    pub(super) fn new() -> Self {
        Self { seat: Seat::idle(), since: IDLE, counts: [0; 2], later: IDLE, old: 0 }
    }

    pub(super) fn seat(&self) -> Seat {
        self.seat.clone()
    }

    /// Reads begin while this transaction is open, or a later one. Returns what they are to be ended
    /// with. Only what is looked at after this is known to be true for them.
    #[inline]
    pub(super) fn begin(&mut self, transaction: u64, count: usize) -> usize {
        if self.since == IDLE {
            self.since = transaction;
            self.seat.0.store(transaction, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        let is_later = transaction != self.since;
        let bucket = self.old ^ usize::from(is_later);
        if is_later && self.counts[bucket] == 0 {
            self.later = transaction;
        }
        self.counts[bucket] += count;
        bucket
    }

    /// How many have begun and not ended.
    pub(super) fn under_way(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Reads have ended.
    #[inline]
    pub(super) fn end(&mut self, bucket: usize, count: usize) {
        self.counts[bucket] -= count;
        if self.counts[self.old] == 0 {
            self.old ^= 1;
            self.since = if self.counts[self.old] == 0 { IDLE } else { self.later };
            self.seat.0.store(self.since, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use base::Random;

    use super::{IDLE, Readers};

    #[test]
    fn the_seat_is_never_younger_than_the_oldest_read_and_moves_on_when_it_ends() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut readers = Readers::new();
            let seat = readers.seat();
            let mut under_way: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
            let mut transaction = 1;
            for number in 0..300 {
                transaction += random.below(2);
                if random.chance(1, 2) {
                    under_way.insert(number, (transaction, readers.begin(transaction, 1)));
                } else if let Some(chosen) = under_way.keys().next().copied() {
                    let others = random.below(under_way.len() as u64 + 1);
                    let other = under_way.keys().nth(usize::try_from(others).unwrap()).copied();
                    let (_, bucket) = under_way.remove(&other.unwrap_or(chosen)).unwrap();
                    readers.end(bucket, 1);
                }
                let oldest = under_way.values().map(|(began, _)| *began).min().unwrap_or(IDLE);
                assert!(seat.oldest() <= oldest, "seed {seed}");
                assert_eq!(under_way.is_empty(), seat.oldest() == IDLE, "seed {seed}");
            }
            // However many come, those that were there when the seat was looked at do go.
            let then = seat.oldest();
            for (began, bucket) in std::mem::take(&mut under_way).into_values() {
                let later = readers.begin(transaction + 1 + began, 1);
                readers.end(bucket, 1);
                under_way.insert(began, (began, later));
            }
            assert!(under_way.is_empty() || seat.oldest() > then, "seed {seed}");
        }
    }
}
