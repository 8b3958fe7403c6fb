//! How full a store is, and when that has to be told: before it is full, and once for each time.
//!
//! ```text
//!   taken:   0 ──────────────────── 80 % ────── 95 % ─── 100 % of the room for data
//!                             ^ told again only after it has been 5 points lower
//! ```
//!
//! Nobody on the way of an I/O looks at this: it is worked out for whoever asks for the next notice.

use crate::books::{Books, Stop};
use crate::error::StoreError;
use crate::format::{Superblock, features};

/// How full a store has become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// So many per cent of its room for data are taken, or more: a threshold.
    Above(u8),
    /// It was above this threshold, and is clearly below it now.
    Below(u8),
    /// Something was refused, for there was no room.
    Full,
}

/// Something that is to be told of the room of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// What has come about.
    pub fill: Fill,
    /// Blocks that data and metadata have taken.
    pub taken: u64,
    /// Blocks that they can take, those left out that are kept for deletions and commits.
    pub room: u64,
}

/// What has been told.
#[derive(Debug, Default)]
pub(crate) struct Level {
    /// Thresholds that it is above.
    passed: usize,
    /// Whether something was refused since this was last asked.
    has_refused: bool,
    /// How much was taken when it was told that something was refused, until clearly less is.
    full_at: Option<u64>,
}

/// Thresholds of a store that has none of its own, in per cent.
pub const THRESHOLDS: [u8; 2] = [80, 95];
/// A threshold is passed again only after it has been so many points lower.
const SLACK: u64 = 5;

impl Superblock {
    /// The thresholds, in per cent; zero is none.
    pub fn thresholds(&self) -> [u8; 2] {
        if self.compatible & features::THRESHOLDS == 0 { THRESHOLDS } else { self.thresholds }
    }
}

impl Books {
    /// Gives the store these thresholds.
    pub(crate) fn set_thresholds(&mut self, percent: [u8; 2]) -> Result<(), Stop> {
        let [low, high] = percent;
        if low > 100 || high > 100 || (high > 0 && low > high) {
            return Err(StoreError::BadThresholds(percent).into());
        }
        self.superblock.compatible |= features::THRESHOLDS;
        self.superblock.thresholds = percent;
        Ok(())
    }
}

impl Level {
    /// Something was refused, for there was no room.
    pub(crate) fn note_refused(&mut self) {
        self.has_refused = true;
    }

    /// What has changed since this was last asked.
    pub(crate) fn next(&mut self, thresholds: [u8; 2], taken: u64, room: u64) -> Option<Notice> {
        let told = |fill| Some(Notice { fill, taken, room });
        self.full_at = self.full_at.filter(|at| taken * 100 + SLACK * room > at * 100);
        if std::mem::take(&mut self.has_refused) && self.full_at.is_none() {
            self.full_at = Some(taken);
            return told(Fill::Full);
        }
        let mut thresholds = thresholds.into_iter().filter(|percent| *percent > 0);
        let before = self.passed;
        let is_passed = |(index, percent): &(usize, u8)| {
            let slack = if *index < before { SLACK } else { 0 };
            taken * 100 >= u64::from(*percent).saturating_sub(slack) * room
        };
        self.passed = thresholds.clone().enumerate().take_while(is_passed).count();
        if self.passed > before {
            return told(Fill::Above(thresholds.nth(self.passed - 1)?));
        }
        let left = thresholds.nth(self.passed).filter(|_| self.passed < before);
        left.and_then(|percent| told(Fill::Below(percent)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Fill, Level};

    /// What is told on the way, a per cent at a time.
    fn told(level: &mut Level, way: impl Iterator<Item = u64>) -> Vec<(u64, Fill)> {
        let tell = |at| level.next([80, 95], at, 100).map(|notice| (at, notice.fill));
        way.filter_map(tell).collect()
    }

    #[test]
    fn a_threshold_is_told_once_until_it_was_clearly_below() {
        let mut level = Level::default();
        let up = [(80, Fill::Above(80)), (95, Fill::Above(95))];
        assert_eq!(told(&mut level, 0..=100), up);
        assert_eq!(told(&mut level, (90..=100).rev()), []);
        assert_eq!(told(&mut level, [89].into_iter()), [(89, Fill::Below(95))]);
        assert_eq!(told(&mut level, 75..95), []);
        assert_eq!(told(&mut level, [95, 90, 96].into_iter()), [(95, Fill::Above(95))]);
        assert_eq!(told(&mut level, [3].into_iter()), [(3, Fill::Below(80))], "the lowest one");
        assert_eq!(told(&mut level, [99].into_iter()), [(99, Fill::Above(95))], "the highest one");
    }

    #[test]
    fn a_refusal_is_told_once_until_there_is_room() {
        let mut level = Level::default();
        level.note_refused();
        assert_eq!(told(&mut level, [96].into_iter()), [(96, Fill::Full)]);
        level.note_refused();
        assert_eq!(told(&mut level, [97].into_iter()), [(97, Fill::Above(95))]);
        level.note_refused();
        assert_eq!(told(&mut level, [95, 92].into_iter()), []);
        assert_eq!(told(&mut level, [91].into_iter()), [], "there is room again");
        level.note_refused();
        assert_eq!(told(&mut level, [95].into_iter()), [(95, Fill::Full)]);
        // A store in pieces may refuse long before it is full.
        let mut level = Level::default();
        for expected in [vec![(60, Fill::Full)], vec![], vec![]] {
            level.note_refused();
            assert_eq!(told(&mut level, [60].into_iter()), expected);
        }
    }

    #[test]
    fn what_is_no_threshold_and_what_nothing_reaches_is_never_told() {
        for thresholds in [[0, 0], [0, 101], [200, 0]] {
            let mut level = Level::default();
            assert!((0..=100).all(|at| level.next(thresholds, at, 100).is_none()));
        }
        let mut level = Level::default();
        let notice = level.next([0, 70], 70, 100).unwrap();
        assert_eq!((notice.fill, notice.taken, notice.room), (Fill::Above(70), 70, 100));
    }
}
