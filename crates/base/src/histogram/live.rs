//! Histogram with one writer thread and many reader threads.

use super::{LogLinearHistogram, VALUE_MAX, bucket_count, bucket_index};
use crate::Counter;

/// [`LogLinearHistogram`] with one writer, which needs plain loads and stores only, and any number of
/// readers, which never delay it.
#[derive(Debug)]
pub struct LiveLogLinearHistogram<const SUB_BITS: u32> {
    counts: Box<[Counter]>,
    sum: Counter,
    max: Counter,
}

impl<const SUB_BITS: u32> Default for LiveLogLinearHistogram<SUB_BITS> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const SUB_BITS: u32> LiveLogLinearHistogram<SUB_BITS> {
    /// Creates an empty histogram. Allocates only here.
    pub fn new() -> Self {
        let counts = (0..bucket_count(SUB_BITS)).map(|_| Counter::default()).collect();
        Self { counts, sum: Counter::default(), max: Counter::default() }
    }

    /// Counts one value `count` times. One thread at a time may call it: of concurrent updates one
    /// may be lost.
    #[inline]
    pub fn record_many(&self, value: u64, count: u64) {
        let value = value.min(VALUE_MAX);
        self.counts[bucket_index::<SUB_BITS>(value)].add(count);
        self.sum.add(value.wrapping_mul(count));
        if value > self.max.get() {
            self.max.set(value);
        }
    }

    /// Copies the current counts. Exact while the writer is idle; otherwise a value may be in one
    /// sum and not yet in another.
    pub fn snapshot(&self) -> LogLinearHistogram<SUB_BITS> {
        let mut copy = LogLinearHistogram::new();
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
    use crate::{Histogram, LiveHistogram, Random};

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
