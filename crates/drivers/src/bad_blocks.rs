//! Uncorrectable blocks: few ranges on a device of any size.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges of blocks that cannot be read until they are written. While there are none, which is the usual
/// case, a check is one load.
#[derive(Debug, Default)]
pub(crate) struct BadBlocks {
    /// First block and end of each range; ranges neither overlap nor touch.
    ranges: Mutex<BTreeMap<u64, u64>>,
    /// Whether there are any ranges. Stored under the lock.
    has_bad_blocks: AtomicBool,
}

impl BadBlocks {
    /// Marks blocks uncorrectable.
    pub(crate) fn add(&self, first: u64, count: u64) {
        let mut ranges = self.lock_bad_ranges();
        let (mut start, mut end) = (first, first.saturating_add(count));
        // Merges all ranges that overlap or touch.
        while let Some((&from, &until)) = ranges.range(..=end).next_back()
            && until >= start
        {
            ranges.remove(&from);
            (start, end) = (start.min(from), end.max(until));
        }
        if start < end {
            ranges.insert(start, end);
        }
        self.has_bad_blocks.store(!ranges.is_empty(), Ordering::Release);
    }

    /// Removes the marks of blocks.
    pub(crate) fn clear(&self, first: u64, count: u64) {
        if count == 0 || !self.has_any() {
            return;
        }
        let mut ranges = self.lock_bad_ranges();
        let end = first.saturating_add(count);
        while let Some((&from, &until)) = ranges.range(..end).next_back()
            && until > first
        {
            ranges.remove(&from);
            if until > end {
                ranges.insert(end, until);
            }
            if from < first {
                ranges.insert(from, first);
            }
        }
        self.has_bad_blocks.store(!ranges.is_empty(), Ordering::Release);
    }

    /// Whether any of these blocks is marked.
    #[inline]
    pub(crate) fn any_in(&self, first: u64, count: u64) -> bool {
        self.has_any() && {
            let (is_lost, run) = self.state_run_at(first, count);
            is_lost || run < count
        }
    }

    /// Whether `first` is marked, and the number of blocks from there on, at most `count`, in the same
    /// state.
    pub(crate) fn state_run_at(&self, first: u64, count: u64) -> (bool, u64) {
        let ranges = self.lock_bad_ranges();
        if let Some((_, &until)) = ranges.range(..=first).next_back()
            && until > first
        {
            return (true, count.min(until - first));
        }
        let next = ranges.range(first..).next().map_or(u64::MAX, |(&from, _)| from);
        (false, count.min(next - first))
    }

    /// Acquire pairs with the release stores. If it is set, the lock orders the ranges.
    #[inline]
    fn has_any(&self) -> bool {
        self.has_bad_blocks.load(Ordering::Acquire)
    }

    fn lock_bad_ranges(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::BadBlocks;

    #[test]
    fn random_bad_block_operations_match_an_array_of_flags() {
        let mut random = Random::new(7);
        for _ in 0..200 {
            let (lost, mut marks) = (BadBlocks::default(), [false; 64]);
            for _ in 0..40 {
                let (first, count) = (random.below(64), random.below(17));
                let end = (first + count).min(64);
                let range = usize::try_from(first).unwrap()..usize::try_from(end).unwrap();
                if random.chance(1, 2) {
                    lost.add(first, end - first);
                    marks[range].fill(true);
                } else {
                    lost.clear(first, end - first);
                    marks[range].fill(false);
                }
                for (block, mark) in marks.iter().enumerate() {
                    let left = &marks[block..];
                    let run = left.iter().take_while(|other| *other == mark).count() as u64;
                    let (at, count) = (block as u64, left.len() as u64);
                    assert_eq!(lost.state_run_at(at, count), (*mark, run), "{marks:?} {block}");
                    assert_eq!(lost.any_in(at, count), left.contains(&true), "{marks:?} {block}");
                }
            }
            lost.clear(0, u64::MAX);
            assert!(!lost.has_any() && !lost.any_in(0, u64::MAX));
        }
    }
}
