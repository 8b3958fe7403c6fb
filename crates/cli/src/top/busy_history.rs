//! History of the busy share over the last minute.

use std::collections::VecDeque;

/// Busy shares of the last minute, with their timestamps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BusyHistory {
    points: VecDeque<(u64, f64)>,
}

const MINUTE_NS: u64 = 60_000_000_000;

impl BusyHistory {
    /// Adds a busy share, and drops those older than a minute.
    pub(crate) fn record_busy(&mut self, monotonic_ns: u64, percent: f64) {
        if self.points.back().is_some_and(|(last_ns, _)| *last_ns > monotonic_ns) {
            // The clock was reset, so older timestamps cannot be compared.
            self.points.clear();
        }
        self.points.push_back((monotonic_ns, percent));
        let begin_ns = monotonic_ns.saturating_sub(MINUTE_NS);
        while self.points.front().is_some_and(|(monotonic_ns, _)| *monotonic_ns <= begin_ns) {
            self.points.pop_front();
        }
    }

    /// The minute up to the last record in `count` intervals of equal length, oldest first: the mean of
    /// each, or the last value before it. `None` where nothing was recorded.
    pub(crate) fn busy_by_interval(&self, count: u16) -> Vec<Option<f64>> {
        let Some((end_ns, _)) = self.points.back() else { return vec![None; count.into()] };
        let mut points = self.points.iter().peekable();
        let mut last = None;
        let piece = |index: u64| {
            // Intervals include their end, so that the last record is in the last interval.
            let back_ns = MINUTE_NS * (u64::from(count) - index - 1) / u64::from(count);
            let (mut sum, mut met) = (0.0, 0.0);
            while let Some((_, percent)) =
                points.next_if(|(monotonic_ns, _)| monotonic_ns.saturating_add(back_ns) <= *end_ns)
            {
                (sum, met) = (sum + percent, met + 1.0);
            }
            if met > 0.0 {
                last = Some(sum / met);
            }
            last
        };
        (0..u64::from(count)).map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::BusyHistory;

    const SECOND: u64 = 1_000_000_000;

    fn history_of_a_minute(points: &[(u64, f64)]) -> BusyHistory {
        let mut minute = BusyHistory::default();
        points.iter().for_each(|(at_s, percent)| minute.record_busy(at_s * SECOND, *percent));
        minute
    }

    #[test]
    fn newest_interval_is_last_and_unknown_ones_are_empty() {
        let points = history_of_a_minute(&[(100, 10.0), (101, 20.0), (102, 30.0)]);
        assert_eq!(points.busy_by_interval(60)[56..], [None, Some(10.0), Some(20.0), Some(30.0)]);
        assert_eq!(BusyHistory::default().busy_by_interval(3), [None; 3]);
        assert_eq!(points.busy_by_interval(0), []);
    }

    #[test]
    fn interval_is_the_mean_of_its_records_and_gaps_keep_the_last() {
        let points = history_of_a_minute(&[(100, 10.0), (101, 20.0), (130, 40.0)]);
        assert_eq!(points.busy_by_interval(4), [None, Some(10.0), Some(20.0), Some(40.0)]);
    }

    #[test]
    fn history_keeps_one_minute_and_restarts_with_a_new_clock() {
        let mut points = history_of_a_minute(&(0..200).map(|at| (at, 1.0)).collect::<Vec<_>>());
        assert_eq!(points.points.len(), 60);
        points.record_busy(5, 7.0);
        assert_eq!(points.busy_by_interval(2), [None, Some(7.0)]);
    }
}
