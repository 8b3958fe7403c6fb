//! Lock-free bitmap with one bit per block.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A bit for each of a number of blocks, shared by threads without a lock.
///
/// A bit that already has the wanted value is only read. So in the steady state of a device that has been
/// written once, there is no atomic read-modify-write.
#[derive(Debug)]
pub(crate) struct BlockBitmap {
    words: Box<[AtomicU64]>,
    /// Whether a bit was ever set: one load instead of a walk for bitmaps that are rarely used.
    used: AtomicBool,
}

impl BlockBitmap {
    /// A bitmap of `block_count` clear bits.
    pub(crate) fn new(block_count: u64) -> Self {
        let words = (0..block_count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, used: AtomicBool::new(false) }
    }

    /// Sets bits. Release pairs with the acquire in [`bit_run_at`](Self::bit_run_at): a thread that sees a bit sees
    /// what was written before it was set.
    pub(crate) fn set(&self, first: u64, count: u64) {
        if count > 0 && !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Release);
        }
        for (word, mask) in self.words_of_range(first, count) {
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        }
    }

    /// Clears bits.
    pub(crate) fn clear(&self, first: u64, count: u64) {
        if !self.used.load(Ordering::Acquire) {
            return;
        }
        for (word, mask) in self.words_of_range(first, count) {
            if word.load(Ordering::Relaxed) & mask != 0 {
                word.fetch_and(!mask, Ordering::Release);
            }
        }
    }

    /// Whether any of these bits is set.
    #[inline]
    pub(crate) fn any_set(&self, first: u64, count: u64) -> bool {
        self.used.load(Ordering::Acquire)
            && self
                .words_of_range(first, count)
                .any(|(word, mask)| word.load(Ordering::Acquire) & mask != 0)
    }

    /// Prefetches the word of `first`.
    #[inline]
    pub(crate) fn prefetch(&self, first: u64) {
        if let Some(word) = usize::try_from(first / 64).ok().and_then(|at| self.words.get(at)) {
            tenmil_dma::prefetch_value(word);
        }
    }

    /// Whether the bit of `block` is set.
    pub(crate) fn is_set(&self, block: u64) -> bool {
        self.any_set(block, 1)
    }

    /// The bit of `first`, and the number of blocks from there on, at most `count`, with the same bit.
    #[inline]
    pub(crate) fn bit_run_at(&self, first: u64, count: u64) -> (bool, u64) {
        if let Some(word) = usize::try_from(first / 64).ok().and_then(|at| self.words.get(at)) {
            // Fast path: usually all bits are equal and in one word. Pairs with the release in `set`.
            let bits = word.load(Ordering::Acquire) >> (first % 64);
            let marked = bits & 1 == 1;
            let unlike = if marked { !bits } else { bits };
            let alike = u64::from(unlike.trailing_zeros()).min(64 - first % 64);
            if count > 0 && alike >= count {
                return (marked, count);
            }
        }
        self.uniform_run_by_words(first, count)
    }

    fn uniform_run_by_words(&self, first: u64, count: u64) -> (bool, u64) {
        let marked = self.is_set(first);
        let mut length = 0;
        for (word, mask) in self.words_of_range(first, count) {
            // Pairs with the release in `set`.
            let bits = word.load(Ordering::Acquire);
            let unlike = mask & if marked { !bits } else { bits };
            if unlike != 0 {
                return (
                    marked,
                    length + u64::from(unlike.trailing_zeros() - mask.trailing_zeros()),
                );
            }
            length += u64::from(mask.count_ones());
        }
        (marked, length)
    }

    /// The words that contain the bits of a range, each with a mask of those bits.
    #[inline]
    fn words_of_range(&self, first: u64, count: u64) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let end = first + count;
        let words = (first / 64)..end.div_ceil(64).max(first / 64);
        let words = if count == 0 { 0..0 } else { words };
        words.filter_map(move |index| {
            let from = first.saturating_sub(index * 64);
            let to = (end - index * 64).min(64);
            let mask = (u64::MAX << from) & (u64::MAX >> (64 - to));
            Some((self.words.get(usize::try_from(index).ok()?)?, mask))
        })
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::BlockBitmap;

    #[test]
    fn random_bitmap_operations_match_an_array_of_flags() {
        const BLOCKS: usize = 200;
        let mut random = Random::new(5);
        let marks = BlockBitmap::new(BLOCKS as u64);
        let mut flags = [false; BLOCKS];
        for round in 0..5_000 {
            let first = usize::try_from(random.below(BLOCKS as u64)).unwrap();
            let count = usize::try_from(random.below((BLOCKS - first) as u64 + 1)).unwrap();
            let (from, many) = (first as u64, count as u64);
            let range = &mut flags[first..first + count];
            match random.below(4) {
                0 => {
                    marks.set(from, many);
                    range.fill(true);
                }
                1 => {
                    marks.clear(from, many);
                    range.fill(false);
                }
                2 => assert_eq!(marks.any_set(from, many), range.contains(&true), "round {round}"),
                _ if count > 0 => {
                    let alike = range.iter().take_while(|flag| **flag == range[0]).count();
                    assert_eq!(
                        marks.bit_run_at(from, many),
                        (range[0], alike as u64),
                        "round {round}"
                    );
                }
                _ => assert!(!marks.any_set(from, 0)),
            }
        }
        assert!((0..BLOCKS).all(|block| marks.is_set(block as u64) == flags[block]));
    }
}
