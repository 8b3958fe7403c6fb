//! Seeded random number generator: small, fast, and identical on every machine.

/// Random number stream determined by its seed (`wyrand`).
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Creates the stream of this seed.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Next 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0xa076_1d64_78bd_642f);
        let wide = u128::from(self.state) * u128::from(self.state ^ 0xe703_7ed1_a0b4_28db);
        low_64_bits(wide) ^ high_64_bits(wide)
    }

    /// Random number below `bound`, by a multiplication and a shift. Zero if `bound` is.
    ///
    /// The bias is below `bound / 2^64`, which is irrelevant for storage workloads.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        high_64_bits(u128::from(self.next_u64()) * u128::from(bound))
    }

    /// True in `numerator` of `denominator` cases.
    #[inline]
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// Random number in `0.0..1.0`.
    #[inline]
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Derives an independent stream, so that one component does not affect the numbers of others.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_64_bits(wide: u128) -> u64 {
    wide as u64
}

#[inline]
const fn high_64_bits(wide: u128) -> u64 {
    low_64_bits(wide >> 64)
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn same_seed_gives_the_same_numbers() {
        let stream = |seed| {
            let mut random = Random::new(seed);
            [random.next_u64(), random.next_u64(), random.next_u64()]
        };
        assert_eq!(stream(7), stream(7));
        assert_ne!(stream(7), stream(8));
    }

    #[test]
    fn bounded_numbers_are_uniform() {
        let mut random = Random::new(1);
        let mut counts = [0_u32; 10];
        for _ in 0..100_000 {
            counts[usize::try_from(random.below(10)).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
        assert_eq!(random.below(0), 0);
        assert_eq!(random.below(1), 0);
    }

    #[test]
    fn next_f64_is_below_one() {
        let mut random = Random::new(2);
        assert!((0..10_000).map(|_| random.next_f64()).all(|unit| (0.0..1.0).contains(&unit)));
    }
}
