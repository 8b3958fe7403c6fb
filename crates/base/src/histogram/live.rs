//! Histogram with one writer thread and many reader threads.

use super::{BUCKETS, Histogram, VALUE_MAX, bucket_index};
use crate::Counter;

/// [`Histogram`] with one writer, which needs plain loads and stores only, and any number of
/// readers, which never delay it.
#[derive(Debug)]
pub struct LiveHistogram {
    counts: Box<[Counter; BUCKETS]>,
    sum: Counter,
    max: Counter,
}

impl Default for LiveHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl LiveHistogram {
    /// Creates an empty histogram. Allocates only here.
    pub fn new() -> Self {
        let counts = Box::new(core::array::from_fn(|_| Counter::default()));
        Self { counts, sum: Counter::default(), max: Counter::default() }
    }

    /// Counts one value `count` times. One thread at a time may call it: of concurrent updates one
    /// may be lost.
    #[inline]
    pub fn record_many(&self, value: u64, count: u64) {
        let value = value.min(VALUE_MAX);
        self.counts[bucket_index(value)].add(count);
        self.sum.add(value.wrapping_mul(count));
        if value > self.max.get() {
            self.max.set(value);
        }
    }

    /// Copies the current counts. Exact while the writer is idle; otherwise a value may be in one
    /// sum and not yet in another.
    pub fn snapshot(&self) -> Histogram {
        let mut copy = Histogram::new();
        for (count, live) in copy.counts.iter_mut().zip(self.counts.iter()) {
            *count = live.get();
        }
        copy.sum = self.sum.get();
        copy.max = self.max.get();
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::LiveHistogram;
    use crate::{Histogram, Random};

    #[test]
    fn snapshot_has_all_recorded_values() {
        let live = LiveHistogram::new();
        let mut plain = Histogram::new();
        let mut random = Random::new(9);
        for _ in 0..1_000 {
            let (value, count) = (random.next_u64() >> random.below(60), random.below(5));
            live.record_many(value, count);
            plain.record_many(value.min((1 << 40) - 1), count);
        }
        let copy = live.snapshot();
        assert!(copy.buckets().eq(plain.buckets()));
        assert_eq!((copy.count(), copy.max()), (plain.count(), plain.max()));
        assert_eq!(copy.percentile(990_000), plain.percentile(990_000));
    }
}
