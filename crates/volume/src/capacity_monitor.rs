//! Capacity monitor of a pool: reports thresholds before the pool is full, once per crossing.
//!
//! ```text
//!   allocated: 0 ─────────────────── 80 % ────── 95 % ─── 100 % of the data capacity
//!                               ^ reported again only after it was 5 points lower
//! ```
//!
//! This is off the I/O path: the state is evaluated when the next notice is requested.

use crate::error::PoolError;
use crate::format::{Superblock, features};
use crate::metadata::{Metadata, TransactionStop};

/// Capacity state of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityState {
    /// At least this percentage of the data capacity is allocated: a threshold.
    Above(u8),
    /// The allocation was above this threshold, and is clearly below it now.
    Below(u8),
    /// A request was rejected because the pool is full.
    Full,
}

/// Capacity notice of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityNotice {
    /// New state.
    pub fill: CapacityState,
    /// Blocks allocated for data and metadata.
    pub taken: u64,
    /// Capacity in blocks, without the reserve for deletions and commits.
    pub room: u64,
}

/// Thresholds already reported.
#[derive(Debug, Default)]
pub(crate) struct CapacityMonitor {
    /// Number of thresholds exceeded.
    passed: usize,
    /// Whether a request was rejected since the last call.
    has_refused: bool,
    /// Allocated blocks when the full state was reported, until clearly fewer are allocated.
    full_at: Option<u64>,
}

/// Default thresholds in percent.
pub const THRESHOLDS: [u8; 2] = [80, 95];
/// Hysteresis in percentage points.
const SLACK: u64 = 5;

impl Superblock {
    /// Thresholds in percent; zero disables one.
    pub fn capacity_thresholds(&self) -> [u8; 2] {
        if self.compatible & features::THRESHOLDS == 0 { THRESHOLDS } else { self.thresholds }
    }
}

impl Metadata {
    /// Sets the thresholds of the pool.
    pub(crate) fn set_capacity_thresholds(
        &mut self,
        percent: [u8; 2],
    ) -> Result<(), TransactionStop> {
        let [low, high] = percent;
        if low > 100 || high > 100 || (high > 0 && low > high) {
            return Err(PoolError::BadThresholds(percent).into());
        }
        self.superblock.compatible |= features::THRESHOLDS;
        self.superblock.thresholds = percent;
        Ok(())
    }
}

impl CapacityMonitor {
    /// Records a request rejected for lack of space.
    pub(crate) fn note_out_of_space(&mut self) {
        self.has_refused = true;
    }

    /// Next change of state since the last call.
    pub(crate) fn next(
        &mut self,
        thresholds: [u8; 2],
        taken: u64,
        room: u64,
    ) -> Option<CapacityNotice> {
        let reported_values = |fill| Some(CapacityNotice { fill, taken, room });
        self.full_at = self.full_at.filter(|at| taken * 100 + SLACK * room > at * 100);
        if std::mem::take(&mut self.has_refused) && self.full_at.is_none() {
            self.full_at = Some(taken);
            return reported_values(CapacityState::Full);
        }
        let mut thresholds = thresholds.into_iter().filter(|percent| *percent > 0);
        let before = self.passed;
        let is_passed = |(index, percent): &(usize, u8)| {
            let slack = if *index < before { SLACK } else { 0 };
            taken * 100 >= u64::from(*percent).saturating_sub(slack) * room
        };
        self.passed = thresholds.clone().enumerate().take_while(is_passed).count();
        if self.passed > before {
            return reported_values(CapacityState::Above(thresholds.nth(self.passed - 1)?));
        }
        let left = thresholds.nth(self.passed).filter(|_| self.passed < before);
        left.and_then(|percent| reported_values(CapacityState::Below(percent)))
    }
}

#[cfg(test)]
mod tests {
    use super::{CapacityMonitor, CapacityState};

    /// Notices issued along a path of fill levels, one percent at a time.
    fn notices_along_fill_levels(
        level: &mut CapacityMonitor,
        way: impl Iterator<Item = u64>,
    ) -> Vec<(u64, CapacityState)> {
        let tell = |at| level.next([80, 95], at, 100).map(|notice| (at, notice.fill));
        way.filter_map(tell).collect()
    }

    #[test]
    fn capacity_threshold_is_reported_once_with_hysteresis() {
        let mut level = CapacityMonitor::default();
        let up = [(80, CapacityState::Above(80)), (95, CapacityState::Above(95))];
        assert_eq!(notices_along_fill_levels(&mut level, 0..=100), up);
        assert_eq!(notices_along_fill_levels(&mut level, (90..=100).rev()), []);
        assert_eq!(
            notices_along_fill_levels(&mut level, [89].into_iter()),
            [(89, CapacityState::Below(95))]
        );
        assert_eq!(notices_along_fill_levels(&mut level, 75..95), []);
        assert_eq!(
            notices_along_fill_levels(&mut level, [95, 90, 96].into_iter()),
            [(95, CapacityState::Above(95))]
        );
        assert_eq!(
            notices_along_fill_levels(&mut level, [3].into_iter()),
            [(3, CapacityState::Below(80))],
            "the lowest one"
        );
        assert_eq!(
            notices_along_fill_levels(&mut level, [99].into_iter()),
            [(99, CapacityState::Above(95))],
            "the highest one"
        );
    }

    #[test]
    fn out_of_space_is_reported_once_until_space_is_available() {
        let mut level = CapacityMonitor::default();
        level.note_out_of_space();
        assert_eq!(
            notices_along_fill_levels(&mut level, [96].into_iter()),
            [(96, CapacityState::Full)]
        );
        level.note_out_of_space();
        assert_eq!(
            notices_along_fill_levels(&mut level, [97].into_iter()),
            [(97, CapacityState::Above(95))]
        );
        level.note_out_of_space();
        assert_eq!(notices_along_fill_levels(&mut level, [95, 92].into_iter()), []);
        assert_eq!(
            notices_along_fill_levels(&mut level, [91].into_iter()),
            [],
            "there is room again"
        );
        level.note_out_of_space();
        assert_eq!(
            notices_along_fill_levels(&mut level, [95].into_iter()),
            [(95, CapacityState::Full)]
        );
        // A fragmented pool may reject writes long before it is full.
        let mut level = CapacityMonitor::default();
        for expected in [vec![(60, CapacityState::Full)], vec![], vec![]] {
            level.note_out_of_space();
            assert_eq!(notices_along_fill_levels(&mut level, [60].into_iter()), expected);
        }
    }

    #[test]
    fn disabled_or_unreached_thresholds_are_not_reported() {
        for thresholds in [[0, 0], [0, 101], [200, 0]] {
            let mut level = CapacityMonitor::default();
            assert!((0..=100).all(|at| level.next(thresholds, at, 100).is_none()));
        }
        let mut level = CapacityMonitor::default();
        let notice = level.next([0, 70], 70, 100).unwrap();
        assert_eq!((notice.fill, notice.taken, notice.room), (CapacityState::Above(70), 70, 100));
    }
}
