//! A set of regions without atomics, for use under a lock.

/// One bit for each region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionBitmap {
    words: Box<[u64]>,
    len: u64,
}

impl RegionBitmap {
    /// An empty set of numbers below `len`.
    pub fn new(len: u64) -> Self {
        Self::from_words(len, std::iter::repeat(0))
    }

    /// A set from its words, lowest first; bits from `len` on are dropped.
    pub fn from_words(len: u64, words: impl IntoIterator<Item = u64>) -> Self {
        let count = usize::try_from(len.div_ceil(64)).unwrap_or(usize::MAX);
        let mut words: Box<[u64]> = words.into_iter().take(count).collect();
        if let Some(last) = words.last_mut()
            && !len.is_multiple_of(64)
        {
            *last &= (1 << (len % 64)) - 1;
        }
        Self { words, len }
    }

    /// The words, lowest first.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether `bit` is in the set.
    pub fn has(&self, bit: u64) -> bool {
        self.words.get(word_index(bit)).is_some_and(|word| word & bit_mask(bit) != 0)
    }

    /// Inserts `bit`. Returns true if it was not in the set.
    pub fn set(&mut self, bit: u64) -> bool {
        let is_new = !self.has(bit);
        if let Some(word) = self.words.get_mut(word_index(bit)) {
            *word |= bit_mask(bit);
        }
        is_new
    }

    /// Removes `bit`. Returns true if it was in the set.
    pub fn clear(&mut self, bit: u64) -> bool {
        let was = self.has(bit);
        if let Some(word) = self.words.get_mut(word_index(bit)) {
            *word &= !bit_mask(bit);
        }
        was
    }

    /// Removes all.
    pub fn clear_all(&mut self) {
        self.words.fill(0);
    }

    /// Inserts all.
    pub fn fill(&mut self) {
        *self = Self::from_words(self.len, std::iter::repeat(u64::MAX));
    }

    /// Inserts all of `other` (union).
    pub fn add(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }

    /// Removes all of `other` (difference).
    pub fn subtract(&mut self, other: &Self) {
        for (word, less) in self.words.iter_mut().zip(&other.words) {
            *word &= !less;
        }
    }

    /// Removes what is not in `other` (intersection).
    pub fn intersect(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word &= more;
        }
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Size of the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The lowest element.
    pub fn first(&self) -> Option<u64> {
        self.iter().next()
    }

    /// All elements, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.words.iter().zip(0_u64..).flat_map(|(word, index)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| u64::from(left.trailing_zeros()))?;
                left &= left - 1;
                Some(index * 64 + bit)
            })
        })
    }
}

fn word_index(bit: u64) -> usize {
    usize::try_from(bit / 64).unwrap_or(usize::MAX)
}

const fn bit_mask(bit: u64) -> u64 {
    1 << (bit % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tenmil_base::Random;

    use super::RegionBitmap;

    #[test]
    fn region_bitmap_equals_a_set() {
        let mut random = Random::new(3);
        let (mut bits, mut set) = (RegionBitmap::new(150), BTreeSet::new());
        for _ in 0..2_000 {
            let bit = random.below(150);
            match random.below(3) {
                0 => assert_eq!(bits.set(bit), set.insert(bit)),
                1 => assert_eq!(bits.clear(bit), set.remove(&bit)),
                _ => assert_eq!(bits.has(bit), set.contains(&bit)),
            }
            assert_eq!(bits.first(), set.first().copied());
            assert_eq!(bits.count(), set.len() as u64);
        }
        assert!(bits.iter().eq(set.iter().copied()));
        let mut full = RegionBitmap::new(150);
        full.fill();
        assert_eq!(full.count(), 150);
        full.subtract(&bits);
        assert_eq!(full.count(), 150 - set.len() as u64);
        full.add(&bits);
        assert_eq!((full.count(), full.is_empty()), (150, false));
        full.intersect(&bits);
        assert_eq!(full, bits);
        full.clear_all();
        assert!(full.is_empty());
    }
}
