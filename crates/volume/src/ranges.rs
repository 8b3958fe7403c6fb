//! Ranges of blocks in memory: sets, and pending changes of reference counts.

use std::collections::BTreeMap;
use std::ops::Range;

/// Set of blocks, stored as ranges that neither touch nor overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeSet {
    /// Maps the first block to the one after the last.
    ranges: BTreeMap<u64, u64>,
    blocks: u64,
}

/// Pending changes of reference counts: ranges that do not overlap, each with a delta, which may be zero.
#[derive(Clone, Debug, Default)]
pub(crate) struct RefcountDeltas {
    ranges: BTreeMap<u64, (u64, i64)>,
    blocks: u64,
}

/// State of a block in a set, with the extent of that state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeLookup {
    /// It is in a range that ends here.
    Taken(u64),
    /// It is in no range, and the next one begins here.
    Free(u64),
}

impl RangeSet {
    /// Number of blocks in the set.
    pub(crate) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Inserts blocks; those already present remain.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&first, &last)) = self.ranges.range(..=end).next_back() {
            if last < start {
                break;
            }
            (start, end) = (start.min(first), end.max(last));
            self.ranges.remove(&first);
            self.blocks -= last - first;
        }
        self.ranges.insert(start, end);
        self.blocks += end - start;
    }

    /// Removes the blocks that are present.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        while let Some((&first, &last)) = self.ranges.range(..range.end).next_back() {
            if last <= range.start || range.is_empty() {
                break;
            }
            self.ranges.remove(&first);
            self.blocks -= last - first;
            self.insert_disjoint(range.end.max(first)..last);
            if first < range.start {
                self.insert_disjoint(first..range.start);
                break;
            }
        }
    }

    fn insert_disjoint(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.insert(range.start, range.end);
            self.blocks += range.end - range.start;
        }
    }

    /// Number of blocks of a range that are in the set.
    pub(crate) fn count_in(&self, range: &Range<u64>) -> u64 {
        let (mut at, mut blocks) = (range.start, 0);
        while at < range.end {
            match self.lookup(at) {
                RangeLookup::Taken(end) => {
                    blocks += end.min(range.end) - at;
                    at = end;
                }
                RangeLookup::Free(next) => at = next,
            }
        }
        blocks
    }

    /// Parts of a range that are in the set.
    pub(crate) fn intersection(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let Range { start, end } = *range;
        let first = self.ranges.range(..=start).next_back().map_or(start, |(&first, _)| first);
        let parts = self.ranges.range(first..end).map(move |(&a, &b)| a.max(start)..b.min(end));
        parts.filter(|part| !part.is_empty())
    }

    /// All ranges.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// Removes and returns the first block.
    pub(crate) fn take_first(&mut self) -> Option<u64> {
        let first = *self.ranges.first_key_value()?.0;
        self.remove(first..first + 1);
        Some(first)
    }

    /// State of a block.
    pub(crate) fn lookup(&self, at: u64) -> RangeLookup {
        match self.ranges.range(..=at).next_back() {
            Some((_, &end)) if end > at => RangeLookup::Taken(end),
            _ => RangeLookup::Free(
                self.ranges.range(at..).next().map_or(u64::MAX, |(&start, _)| start),
            ),
        }
    }
}

impl RefcountDeltas {
    /// Adds to every block of a range.
    pub(crate) fn add_delta(&mut self, range: Range<u64>, delta: i64) {
        drop(self.add_all(range, delta));
    }

    /// Adds to every block of a range. Returns the subranges that had no entry before.
    pub(crate) fn add_all(&mut self, range: Range<u64>, delta: i64) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        self.split_at(range.start);
        self.split_at(range.end);
        let (mut delta_of, mut gaps) = (range.start, Vec::new());
        for (&start, (end, sum)) in self.ranges.range_mut(range.clone()) {
            if start > delta_of {
                gaps.push(delta_of..start);
            }
            *sum += delta;
            delta_of = *end;
        }
        if delta_of < range.end {
            gaps.push(delta_of..range.end);
        }
        self.blocks += gaps.iter().map(|gap| gap.end - gap.start).sum::<u64>();
        self.ranges.extend(gaps.iter().map(|gap| (gap.start, (gap.end, delta))));
        gaps
    }

    /// Undoes an addition, and removes the subranges that had no entry before it.
    pub(crate) fn subtract_all(&mut self, range: Range<u64>, delta: i64, gaps: Vec<Range<u64>>) {
        self.add_delta(range, -delta);
        for gap in gaps {
            self.split_at(gap.start);
            self.split_at(gap.end);
            let inside: Vec<u64> =
                self.ranges.range(gap.clone()).map(|(&start, _)| start).collect();
            for start in inside {
                self.ranges.remove(&start);
            }
            self.blocks -= gap.end - gap.start;
        }
    }

    /// Subtracts a `delta` that has been applied to the counts of a range. Only entries that are not zero
    /// remain.
    pub(crate) fn subtract_applied(&mut self, range: Range<u64>, delta: i64) {
        self.add_delta(range.clone(), -delta);
        let settled = |(&start, &(_, left)): (&u64, &(u64, i64))| (left == 0).then_some(start);
        let settled: Vec<u64> = self.ranges.range(range).filter_map(settled).collect();
        for start in settled {
            if let Some((end, _)) = self.ranges.remove(&start) {
                self.blocks -= end - start;
            }
        }
    }

    fn split_at(&mut self, at: u64) {
        if let Some((_, (end, delta))) = self.ranges.range_mut(..at).next_back()
            && *end > at
        {
            let right = (*end, *delta);
            *end = at;
            self.ranges.insert(at, right);
        }
    }

    /// The first range and its delta.
    pub(crate) fn first_range(&self) -> Option<(Range<u64>, i64)> {
        self.ranges.first_key_value().map(|(&start, &(end, delta))| (start..end, delta))
    }

    /// Delta of a block.
    pub(crate) fn at(&self, block: u64) -> i64 {
        match self.ranges.range(..=block).next_back() {
            Some((_, &(end, delta))) if end > block => delta,
            _ => 0,
        }
    }

    /// State of a block.
    pub(crate) fn lookup(&self, at: u64) -> RangeLookup {
        match self.ranges.range(..=at).next_back() {
            Some((_, &(end, _))) if end > at => RangeLookup::Taken(end),
            _ => RangeLookup::Free(
                self.ranges.range(at..).next().map_or(u64::MAX, |(&start, _)| start),
            ),
        }
    }

    /// Number of blocks in all ranges.
    pub(crate) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// All ranges with their deltas.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Range<u64>, i64)> + '_ {
        self.ranges.iter().map(|(&start, &(end, delta))| (start..end, delta))
    }
}

#[cfg(test)]
mod tests {
    use super::{RangeLookup, RangeSet, RefcountDeltas};
    use tenmil_base::Random;

    #[test]
    fn range_set_equals_a_set_of_blocks() {
        let mut random = Random::new(3);
        let (mut set, mut plain) = (RangeSet::default(), [false; 64]);
        for _ in 0..20_000 {
            let start = random.below(64);
            let end = start + random.below(65 - start);
            let insert = random.chance(1, 2);
            if insert {
                set.insert(start..end)
            } else {
                set.remove(start..end)
            }
            (start..end).for_each(|at| plain[usize::try_from(at).unwrap()] = insert);
            for at in 0..64 {
                let taken = matches!(set.lookup(at), RangeLookup::Taken(end) if end > at);
                assert_eq!(taken, plain[usize::try_from(at).unwrap()], "{at} in {set:?}");
            }
            let count = |plain: &[bool]| plain.iter().filter(|taken| **taken).count() as u64;
            assert_eq!(set.blocks(), count(&plain));
            let part = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
            assert_eq!(set.count_in(&(start..end)), count(&plain[part]));
            assert_eq!(set.count_in(&(0..64)), count(&plain));
            let found: Vec<u64> = set.intersection(&(start..end)).flatten().collect();
            assert!(
                found
                    .into_iter()
                    .eq((start..end).filter(|at| plain[usize::try_from(*at).unwrap()]))
            );
        }
    }

    #[test]
    fn subtracted_deltas_cancel_out() {
        let mut random = Random::new(5);
        let mut deltas = RefcountDeltas::default();
        for _ in 0..2_000 {
            let before: Vec<bool> = (0..64).map(|at| has_delta_at(&deltas, at)).collect();
            let mut steps = Vec::new();
            for _ in 0..4 {
                let start = random.below(64);
                let range = start..start + random.below(65 - start);
                let delta = if random.chance(1, 2) { 1 } else { -1 };
                let gaps = deltas.add_all(range.clone(), delta);
                steps.push((range, delta, gaps));
            }
            while let Some((range, delta, gaps)) = steps.pop() {
                deltas.subtract_all(range, delta, gaps);
            }
            let after: Vec<bool> = (0..64).map(|at| has_delta_at(&deltas, at)).collect();
            assert_eq!(after, before);
            assert_eq!(deltas.blocks(), after.iter().filter(|is_in| **is_in).count() as u64);
            let start = random.below(60);
            deltas.add_delta(start..start + random.below(4), 1);
            if let Some((range, delta)) = deltas.first_range().filter(|_| random.chance(1, 2)) {
                deltas.subtract_applied(range, delta);
            }
        }
    }

    fn has_delta_at(deltas: &RefcountDeltas, at: u64) -> bool {
        matches!(deltas.lookup(at), RangeLookup::Taken(_))
    }

    #[test]
    fn accumulated_deltas_equal_per_block_sums() {
        let mut random = Random::new(4);
        let (mut deltas, mut plain) = (RefcountDeltas::default(), [0_i64; 64]);
        for _ in 0..5_000 {
            let start = random.below(64);
            let end = start + random.below(65 - start);
            if random.chance(1, 8) {
                let Some((range, delta)) = deltas.first_range() else { continue };
                range.clone().for_each(|at| plain[usize::try_from(at).unwrap()] -= delta);
                deltas.subtract_applied(range.clone(), delta);
                assert_ne!(deltas.first_range().map(|(range, _)| range.start), Some(range.start));
            } else {
                let delta = if random.chance(1, 2) { 1 } else { -1 };
                deltas.add_delta(start..end, delta);
                (start..end).for_each(|at| plain[usize::try_from(at).unwrap()] += delta);
            }
            let blocks: u64 = deltas.iter().map(|(range, _)| range.end - range.start).sum();
            assert_eq!(deltas.blocks(), blocks);
            (0..64).for_each(|at| assert_eq!(deltas.at(at), plain[usize::try_from(at).unwrap()]));
        }
    }
}
