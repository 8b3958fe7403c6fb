//! Zipf-distributed addresses.
//!
//! Rank k is drawn with a probability proportional to 1 / k^theta. Before the run, the ranks are
//! placed in the columns of an alias table: each of the `EXACT` hottest ranks has a column of its
//! own, and the others are grouped in stretches that grow with the rank, 32 per octave. A draw
//! costs one multiplication, one comparison, and a second multiplication within a stretch,
//! independent of the skew and of the number of slots.
//!
//! ```text
//!   rank      0 | 1 | 2 | … | 255 | 256 … 261 | 262 … 267 | …          | places-1
//!   column    0 | 1 | 2 | … | 255 |    256    |    257    | …
//! ```
//!
//! Within a stretch all ranks are equally likely, with an error of about theta percent at most.

use tenmil_base::Random;

/// Zipf distribution over a number of slots.
#[derive(Clone, Debug)]
pub struct ZipfDistribution {
    columns: Box<[AliasColumn]>,
    slots: u64,
}

/// Column of the alias table: a number below `cut` selects its own stretch, and the other stretch
/// otherwise.
#[derive(Clone, Copy, Debug)]
struct AliasColumn {
    cut: u64,
    own: RankRange,
    other: RankRange,
}

/// Stretch of consecutive ranks with equal probability.
#[derive(Clone, Copy, Debug)]
struct RankRange {
    first: u64,
    count: u64,
}

/// Number of ranks with a column of their own.
const EXACT: u64 = 256;

/// Length of a stretch above those, as a fraction of its first rank.
const STRETCH_PART: u64 = 45;

const _: () = assert!(STRETCH_PART < EXACT, "the first stretch holds more than nothing");

/// 2^64 divided by the golden ratio. Its multiples are spread evenly, so hot ranks never share a
/// slot and are not adjacent (Knuth, volume 3, section 6.4).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl ZipfDistribution {
    /// Distribution over `slots` slots with exponent `theta`.
    ///
    /// # Panics
    ///
    /// If `slots` is zero.
    pub fn new(slots: u64, theta: f64) -> Self {
        assert!(slots > 0, "a choice among nothing");
        let mut stretches = Vec::new();
        let mut first = 0;
        while first < slots {
            let count = if first < EXACT { 1 } else { first / STRETCH_PART };
            let count = count.min(slots - first);
            stretches.push(RankRange { first, count });
            first += count;
        }
        let masses = stretches.iter().map(|stretch| stretch.probability_mass(theta)).collect();
        Self { columns: alias_table(&stretches, masses), slots }
    }

    /// Number of slots.
    pub fn slot_count(&self) -> u64 {
        self.slots
    }

    /// Draws a slot.
    #[inline]
    pub fn draw_slot(&self, random: &mut Random) -> u64 {
        slot_of_rank(self.draw_rank(random), self.slots)
    }

    /// Draws a rank; zero is the hottest.
    #[inline]
    fn draw_rank(&self, random: &mut Random) -> u64 {
        // The high half of the product selects a column, the low half is a random number within it.
        let wide = u128::from(random.next_u64()) * self.columns.len() as u128;
        let column = &self.columns[column_index(wide)];
        let stretch = if fraction_of_column(wide) < column.cut { column.own } else { column.other };
        match stretch.count {
            1 => stretch.first,
            count => stretch.first + random.below(count),
        }
    }
}

impl RankRange {
    /// Sum of 1 / k^theta over the ranks, where the hottest rank is k = 1.
    #[expect(clippy::cast_precision_loss, reason = "a stretch is narrower than 2^53")]
    fn probability_mass(self, theta: f64) -> f64 {
        let first = self.first as f64 + 1.0;
        if self.count == 1 {
            return first.powf(-theta);
        }
        // Integral between the edges, half a rank outside. Its error is below 1 in 10^6.
        let (from, to) = (first - 0.5, first - 0.5 + self.count as f64);
        let power = 1.0 - theta;
        if power.abs() < 1e-9 {
            return (to / from).ln();
        }
        (to.powf(power) - from.powf(power)) / power
    }
}

/// Alias table with probabilities proportional to `masses` (Vose, 1991).
#[expect(clippy::cast_precision_loss, reason = "a table is shorter than 2^53")]
fn alias_table(stretches: &[RankRange], mut masses: Vec<f64>) -> Box<[AliasColumn]> {
    let mean = masses.iter().sum::<f64>() / masses.len() as f64;
    let whole = |own: &RankRange| AliasColumn { cut: u64::MAX, own: *own, other: *own };
    let mut columns: Vec<AliasColumn> = stretches.iter().map(whole).collect();
    let (mut below, mut above): (Vec<usize>, Vec<usize>) =
        (0..masses.len()).partition(|index| masses[*index] < mean);
    while let (Some(small), Some(large)) = (below.pop(), above.last().copied()) {
        columns[small].cut = probability_threshold(masses[small] / mean);
        columns[small].other = stretches[large];
        masses[large] -= mean - masses[small];
        if masses[large] < mean {
            above.pop();
            below.push(large);
        }
    }
    columns.into_boxed_slice()
}

/// Slot of a rank.
#[inline]
const fn slot_of_rank(rank: u64, slots: u64) -> u64 {
    let wide = rank.wrapping_mul(GOLDEN) as u128 * slots as u128;
    fraction_of_column(wide >> 64)
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn fraction_of_column(wide: u128) -> u64 {
    wide as u64
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below the length of a slice")]
const fn column_index(wide: u128) -> usize {
    (wide >> 64) as usize
}

/// Random number below which an event of this probability occurs.
#[expect(clippy::cast_possible_truncation, reason = "saturates, which is what is wanted")]
#[expect(clippy::cast_sign_loss, reason = "a probability is not negative")]
fn probability_threshold(probability: f64) -> u64 {
    (probability * 2.0_f64.powi(64)) as u64
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{ZipfDistribution, slot_of_rank};

    /// Observed and expected count of each rank.
    fn observed_and_expected_counts(slots: u64, theta: f64, draws: u32) -> (Vec<u32>, Vec<f64>) {
        let zipf = ZipfDistribution::new(slots, theta);
        let mut random = Random::new(11);
        let mut counts = vec![0_u32; usize::try_from(slots).unwrap()];
        for _ in 0..draws {
            counts[usize::try_from(zipf.draw_rank(&mut random)).unwrap()] += 1;
        }
        let weights: Vec<f64> =
            (1..=slots).map(|rank| f64::from(u32::try_from(rank).unwrap()).powf(-theta)).collect();
        let total: f64 = weights.iter().sum();
        let expected = weights.iter().map(|weight| weight / total * f64::from(draws));
        (counts, expected.collect())
    }

    #[test]
    fn hot_ranks_have_their_exact_frequency() {
        for theta in [0.5, 0.99, 1.0, 1.5] {
            let (counts, expected) = observed_and_expected_counts(10_000, theta, 1_000_000);
            for rank in 0..20 {
                let (count, wanted) = (f64::from(counts[rank]), expected[rank]);
                // Five standard deviations of a count.
                assert!((count - wanted).abs() < 5.0 * wanted.sqrt() + 1.0, "{theta} {rank}");
            }
        }
    }

    #[test]
    fn cold_ranks_together_have_their_exact_frequency() {
        for theta in [0.5, 0.99, 1.5] {
            let (counts, expected) = observed_and_expected_counts(10_000, theta, 1_000_000);
            for from in [256, 300, 1000, 5000, 9000] {
                let count = f64::from(counts[from..from + 200].iter().sum::<u32>());
                let wanted: f64 = expected[from..from + 200].iter().sum();
                let slack = 5.0 * wanted.sqrt() + 0.02 * wanted;
                assert!((count - wanted).abs() < slack, "{theta} {from}: {count} {wanted}");
            }
        }
    }

    #[test]
    fn tiny_slot_counts_stay_in_range() {
        let mut random = Random::new(5);
        for slots in [1, 2, 255, 256, 257, 1 << 40] {
            let zipf = ZipfDistribution::new(slots, 0.9);
            assert!((0..1000).all(|_| zipf.draw_slot(&mut random) < slots), "{slots}");
        }
    }

    #[test]
    fn hot_ranks_are_distinct_and_not_adjacent() {
        for slots in [2000_u64, 131_072, 2_621_440] {
            let mut hot: Vec<u64> = (0..500).map(|rank| slot_of_rank(rank, slots)).collect();
            hot.sort_unstable();
            assert!(hot.windows(2).all(|pair| pair[1] > pair[0] + 1), "{slots}");
        }
    }

    #[test]
    fn every_slot_or_a_neighbor_can_be_drawn() {
        let mut hit = vec![false; 1000];
        for rank in 0..1000 {
            hit[usize::try_from(slot_of_rank(rank, 1000)).unwrap()] = true;
        }
        assert!(hit.windows(3).all(|three| three.contains(&true)));
    }
}
