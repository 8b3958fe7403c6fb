//! Log-linear latency histogram, exactly mergeable.
//!
//! ```text
//!   value        0 … 63 | 64 … 127 | 128 … 255 | 256 … 511 | …
//!   bucket width      1 |        1 |         2 |         4 | …       error below 1/64 = 1.6 %
//! ```
//!
//! Each power of two is divided into `1 << SUB_BITS` buckets of equal width, 64 as drawn, so an index is
//! a count of leading zeroes and a shift, and two histograms are merged by addition.

mod live;

pub use live::LiveLogLinearHistogram;

/// Histogram of values, with `1 << SUB_BITS` buckets for each power of two.
#[derive(Clone)]
pub struct LogLinearHistogram<const SUB_BITS: u32> {
    counts: Box<[u64]>,
    sum: u64,
    max: u64,
}

/// Histogram for measurements: an error below 1/64, in 18 KB.
pub type Histogram = LogLinearHistogram<6>;

/// [`Histogram`] with one writer thread and many readers.
pub type LiveHistogram = LiveLogLinearHistogram<6>;

/// Histogram for counters that are always on: an error below 1/16, in 5 KB.
pub type CoarseHistogram = LogLinearHistogram<4>;

/// [`CoarseHistogram`] with one writer thread and many readers.
pub type LiveCoarseHistogram = LiveLogLinearHistogram<4>;

/// Values at or above this are counted in the last bucket: 2^40 ns is 18 minutes.
const VALUE_MAX: u64 = (1 << 40) - 1;

/// Number of buckets.
const fn bucket_count(sub_bits: u32) -> usize {
    (40 - sub_bits as usize + 1) << sub_bits
}

const _: () = {
    assert!(
        bucket_index::<6>(VALUE_MAX) == bucket_count(6) - 1,
        "the last value is in the last bucket"
    );
    assert!(
        bucket_index::<4>(VALUE_MAX) == bucket_count(4) - 1,
        "the last value is in the last bucket"
    );
    assert!(bucket_index::<6>(63) == 63 && bucket_index::<6>(64) == 64);
    assert!(bucket_index::<6>(128) == 128);
};

impl<const SUB_BITS: u32> Default for LogLinearHistogram<SUB_BITS> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const SUB_BITS: u32> LogLinearHistogram<SUB_BITS> {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        Self { counts: vec![0; bucket_count(SUB_BITS)].into(), sum: 0, max: 0 }
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts one value `count` times, for a batch with one timestamp.
    #[inline]
    pub fn record_many(&mut self, value: u64, count: u64) {
        let value = value.min(VALUE_MAX);
        self.counts[bucket_index::<SUB_BITS>(value)] += count;
        self.sum = self.sum.saturating_add(value.saturating_mul(count));
        self.max = self.max.max(value);
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts.iter()) {
            *count += more;
        }
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }

    /// Clears the histogram.
    pub fn clear(&mut self) {
        *self = Self::new();
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Largest value. Zero if empty.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Sum of all values, saturating.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Mean, exact. Zero if empty.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count().max(1) as f64
    }

    /// Value that `per_million` of a million values do not exceed: 500 000 is the median. It is the
    /// upper edge of its bucket, but never more than [`max`](Self::max).
    pub fn percentile(&self, per_million: u64) -> u64 {
        let rank = u128::from(self.count()) * u128::from(per_million);
        let rank = u64::try_from(rank.div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return bucket_upper_bound::<SUB_BITS>(index).min(self.max);
            }
        }
        self.max
    }

    /// Non-empty buckets: largest value, and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(index, count)| (bucket_upper_bound::<SUB_BITS>(index), *count))
    }
}

impl<const SUB_BITS: u32> std::fmt::Debug for LogLinearHistogram<SUB_BITS> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Histogram").field("count", &self.count()).field("max", &self.max).finish()
    }
}

/// Bucket of `value`, which is at most [`VALUE_MAX`].
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below the number of buckets, asserted above")]
const fn bucket_index<const SUB_BITS: u32>(value: u64) -> usize {
    let magnitude = 63 - (value | 1).leading_zeros();
    let shift = magnitude.saturating_sub(SUB_BITS);
    ((shift as usize) << SUB_BITS) + (value >> shift) as usize
}

/// Largest value in bucket `index`.
const fn bucket_upper_bound<const SUB_BITS: u32>(index: usize) -> u64 {
    let sub_count = 1 << SUB_BITS;
    if index < 2 * sub_count {
        return index as u64;
    }
    let shift = (index >> SUB_BITS) - 1;
    let first = ((index & (sub_count - 1)) | sub_count) as u64;
    ((first + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::{
        CoarseHistogram, Histogram, LogLinearHistogram, VALUE_MAX, bucket_count, bucket_index,
        bucket_upper_bound,
    };
    use crate::Random;

    #[test]
    fn histogram_buckets_are_contiguous() {
        check_buckets::<4>();
        check_buckets::<6>();
    }

    fn check_buckets<const SUB_BITS: u32>() {
        for index in 0..bucket_count(SUB_BITS) {
            let edge = bucket_upper_bound::<SUB_BITS>(index);
            assert_eq!(bucket_index::<SUB_BITS>(edge), index, "edge {edge}");
            if edge < VALUE_MAX {
                assert_eq!(bucket_index::<SUB_BITS>(edge + 1), index + 1, "after {edge}");
            }
        }
    }

    #[test]
    fn percentile_error_is_below_the_width_of_a_bucket() {
        check_percentiles(&mut Histogram::new(), 64);
        check_percentiles(&mut CoarseHistogram::new(), 16);
    }

    fn check_percentiles<const SUB_BITS: u32>(
        histogram: &mut LogLinearHistogram<SUB_BITS>,
        fraction: u64,
    ) {
        let mut random = Random::new(3);
        let mut values: Vec<u64> =
            (0..10_000).map(|_| random.next_u64() >> (24 + random.below(40))).collect();
        values.iter().for_each(|value| histogram.record(*value));
        values.sort_unstable();
        for per_million in [1_u64, 500_000, 990_000, 999_000, 1_000_000] {
            let rank = (10_000 * per_million).div_ceil(1_000_000).max(1);
            let exact = values[usize::try_from(rank).unwrap() - 1];
            let shown = histogram.percentile(per_million);
            assert!(
                shown >= exact && shown - exact <= exact / fraction,
                "{per_million}: {exact} {shown}"
            );
        }
    }

    #[test]
    fn merged_histograms_equal_one_with_all_values() {
        let (mut left, mut right, mut both) =
            (Histogram::new(), Histogram::new(), Histogram::new());
        for value in 0..1_000 {
            (if value % 3 == 0 { &mut left } else { &mut right }).record(value * value);
            both.record(value * value);
        }
        left.merge(&right);
        assert!(left.buckets().eq(both.buckets()));
        assert_eq!((left.count(), left.max()), (both.count(), both.max()));
        assert!((left.mean() - both.mean()).abs() < 1e-9);
    }

    #[test]
    fn value_above_the_maximum_is_counted_in_the_last_bucket() {
        let mut histogram = Histogram::new();
        histogram.record(u64::MAX);
        assert_eq!(histogram.percentile(500_000), VALUE_MAX);
        assert_eq!(Histogram::new().percentile(500_000), 0, "nothing was counted");
    }
}
