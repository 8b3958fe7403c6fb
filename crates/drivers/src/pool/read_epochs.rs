//! Read epochs: safe reclamation of blocks that channels read without the pool's knowledge.
//!
//! A channel reads blocks at cached locations without a request to the pool. Blocks that the pool frees
//! must not be reused before such reads have ended. So a channel publishes in a word of its own, its
//! [`OldestReadTransaction`], the transaction in which its oldest read began, and the pool reuses only what was freed
//! before:
//!
//! ```text
//!   channel: stores its read epoch | fence | checks that its runs are valid | reads
//!   pool:    invalidates runs | fence | loads the read epochs | reuses blocks
//! ```
//!
//! Either the channel sees that its runs are invalid, or the pool sees the read epoch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The transaction in which the oldest read of a channel began; `u64::MAX` if none is in flight.
#[derive(Clone, Debug)]
pub(super) struct OldestReadTransaction(Arc<AtomicU64>);

/// The reads in flight of a channel.
#[derive(Debug)]
pub(super) struct ReadEpochs {
    epoch: OldestReadTransaction,
    /// The published transaction.
    since: u64,
    /// Counts of the reads that the published epoch stands for, and of later ones, which began in
    /// transaction `later` or after it.
    counts: [usize; 2],
    later: u64,
    /// Index of the count of the older ones.
    old: usize,
}

const IDLE: u64 = u64::MAX;

impl OldestReadTransaction {
    fn new() -> Self {
        Self(Arc::new(AtomicU64::new(IDLE)))
    }

    /// The transaction of the oldest read. The caller has passed a fence since it invalidated the runs
    /// whose blocks it wants to reuse.
    pub(super) fn oldest_read_transaction(&self) -> u64 {
        // Pairs with the releases below: the effects of the reads are complete.
        self.0.load(Ordering::Acquire)
    }
}

impl ReadEpochs {
    pub(super) fn new() -> Self {
        Self {
            epoch: OldestReadTransaction::new(),
            since: IDLE,
            counts: [0; 2],
            later: IDLE,
            old: 0,
        }
    }

    pub(super) fn register_channel(&self) -> OldestReadTransaction {
        self.epoch.clone()
    }

    /// Counts reads that begin in this transaction or a later one. Returns the bucket for
    /// [`end_read`](Self::end_read). Only validity checks after this call apply to them.
    #[inline]
    pub(super) fn begin_read(&mut self, transaction: u64, count: usize) -> usize {
        if self.since == IDLE {
            self.since = transaction;
            self.epoch.0.store(transaction, Ordering::Relaxed);
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

    /// Number of reads in flight.
    pub(super) fn reads_in_flight(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Counts the end of reads.
    #[inline]
    pub(super) fn end_read(&mut self, bucket: usize, count: usize) {
        self.counts[bucket] -= count;
        if self.counts[self.old] == 0 {
            self.old ^= 1;
            self.since = if self.counts[self.old] == 0 { IDLE } else { self.later };
            self.epoch.0.store(self.since, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tenmil_base::Random;

    use super::{IDLE, ReadEpochs};

    #[test]
    fn published_transaction_is_that_of_the_oldest_read() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut readers = ReadEpochs::new();
            let epoch = readers.register_channel();
            let mut under_way: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
            let mut transaction = 1;
            for number in 0..300 {
                transaction += random.below(2);
                if random.chance(1, 2) {
                    under_way.insert(number, (transaction, readers.begin_read(transaction, 1)));
                } else if let Some(chosen) = under_way.keys().next().copied() {
                    let others = random.below(under_way.len() as u64 + 1);
                    let other = under_way.keys().nth(usize::try_from(others).unwrap()).copied();
                    let (_, bucket) = under_way.remove(&other.unwrap_or(chosen)).unwrap();
                    readers.end_read(bucket, 1);
                }
                let oldest = under_way.values().map(|(began, _)| *began).min().unwrap_or(IDLE);
                assert!(epoch.oldest_read_transaction() <= oldest, "seed {seed}");
                assert_eq!(
                    under_way.is_empty(),
                    epoch.oldest_read_transaction() == IDLE,
                    "seed {seed}"
                );
            }
            // However many reads begin, those of the observed epoch do end.
            let then = epoch.oldest_read_transaction();
            for (began, bucket) in std::mem::take(&mut under_way).into_values() {
                let later = readers.begin_read(transaction + 1 + began, 1);
                readers.end_read(bucket, 1);
                under_way.insert(began, (began, later));
            }
            assert!(under_way.is_empty() || epoch.oldest_read_transaction() > then, "seed {seed}");
        }
    }
}
