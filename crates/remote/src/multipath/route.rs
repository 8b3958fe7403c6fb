//! Which path a request takes. Nothing but a choice: no connection, no clock.

/// How requests are spread over paths that lead equally well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// All take the first of them; the others are there for when it fails.
    #[default]
    ActivePassive,
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests under way.
    QueueDepth,
}

/// How well a path leads to the namespace: its ANA state (Base 2.1 §8.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// As well as can be. Also where the controller does not report it.
    Optimized,
    /// Slower than others may.
    NonOptimized,
    /// Not at all for now, or nobody knows.
    #[default]
    Inaccessible,
    /// Never again.
    PersistentLoss,
    /// It is being changed.
    Change,
}

/// What a choice is made from: one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// Whether it takes requests.
    pub(crate) is_open: bool,
    /// Something went wrong on it just now.
    pub(crate) is_resting: bool,
    pub(crate) access: Access,
    /// Requests that it has not answered.
    pub(crate) in_flight: u32,
}

/// Chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    spread: Spread,
    last: usize,
}

impl Spread {
    /// The words by which they are known.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("active-passive", Self::ActivePassive),
        ("round-robin", Self::RoundRobin),
        ("queue-depth", Self::QueueDepth),
    ];
}

impl Access {
    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "lost for ever",
            Self::Change => "being changed",
        }
    }

    /// The less, the better. `None` if nothing goes there.
    const fn rank(self) -> Option<u8> {
        match self {
            Self::Optimized => Some(0),
            Self::NonOptimized => Some(1),
            Self::Inaccessible | Self::PersistentLoss | Self::Change => None,
        }
    }
}

impl View {
    const fn rank(&self) -> Option<u8> {
        if self.is_open && !self.is_resting { self.access.rank() } else { None }
    }

    /// Whether requests can take it.
    pub(crate) const fn is_usable(&self) -> bool {
        self.rank().is_some()
    }
}

impl Route {
    pub(crate) const fn new(spread: Spread) -> Self {
        Self { spread, last: 0 }
    }

    /// The path for the next request: of those that lead best, the one whose turn it is. `None` if
    /// none leads there.
    #[inline]
    pub(crate) fn choose(&mut self, views: &[View]) -> Option<usize> {
        let best = views.iter().filter_map(View::rank).min()?;
        let fits = |index: &usize| views[*index].rank() == Some(best);
        let count = views.len();
        let behind_last = || (self.last + 1..count).chain(0..=self.last.min(count - 1));
        let chosen = match self.spread {
            Spread::ActivePassive => (0..count).find(fits),
            Spread::RoundRobin => behind_last().find(fits),
            Spread::QueueDepth => {
                behind_last().filter(fits).min_by_key(|index| views[*index].in_flight)
            }
        }?;
        self.last = chosen;
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::{Access, Route, Spread, View};

    const ALL: [Access; 5] = [
        Access::Optimized,
        Access::NonOptimized,
        Access::Inaccessible,
        Access::PersistentLoss,
        Access::Change,
    ];

    fn views(of: &[(bool, Access, u32)]) -> Vec<View> {
        let view = |(is_open, access, in_flight): &(bool, Access, u32)| View {
            is_open: *is_open,
            access: *access,
            in_flight: *in_flight,
            is_resting: false,
        };
        of.iter().map(view).collect()
    }

    /// Every pair of states, each open and closed.
    #[test]
    fn optimized_comes_before_non_optimized_and_nothing_else_is_taken() {
        for spread in Spread::NAMES.map(|(_, spread)| spread) {
            for (one, two) in ALL.iter().flat_map(|one| ALL.map(|two| (*one, two))) {
                for open in [(true, true), (true, false), (false, true), (false, false)] {
                    let views = views(&[(open.0, one, 0), (open.1, two, 0)]);
                    let usable = |access| match access {
                        Access::Optimized => 2,
                        Access::NonOptimized => 1,
                        _ => 0,
                    };
                    let worth =
                        [usize::from(open.0) * usable(one), usize::from(open.1) * usable(two)];
                    for _ in 0..3 {
                        let chosen = Route::new(spread).choose(&views);
                        let best = worth.into_iter().max().filter(|worth| *worth > 0);
                        assert_eq!(chosen.map(|path| worth[path]), best, "{spread:?} {views:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn each_way_to_spread_takes_its_own_order() {
        let four = views(&[
            (true, Access::NonOptimized, 0),
            (true, Access::Optimized, 5),
            (true, Access::Optimized, 3),
            (true, Access::Optimized, 3),
        ]);
        for (spread, expected) in [
            (Spread::ActivePassive, [1, 1, 1, 1, 1]),
            (Spread::RoundRobin, [1, 2, 3, 1, 2]),
            (Spread::QueueDepth, [2, 3, 2, 3, 2]),
        ] {
            let mut route = Route::new(spread);
            let taken = [(); 5].map(|()| route.choose(&four).unwrap());
            assert_eq!(taken, expected, "{spread:?}");
        }
    }

    #[test]
    fn a_resting_path_is_taken_by_nobody() {
        let mut both = views(&[(true, Access::Optimized, 0), (true, Access::NonOptimized, 0)]);
        both[0].is_resting = true;
        assert_eq!(Route::new(Spread::RoundRobin).choose(&both), Some(1));
        both[1].is_resting = true;
        assert_eq!(Route::new(Spread::RoundRobin).choose(&both), None);
    }

    #[test]
    fn whoever_comes_back_is_taken_again() {
        let mut both = views(&[(false, Access::Optimized, 0), (true, Access::Optimized, 0)]);
        let mut route = Route::new(Spread::ActivePassive);
        assert_eq!(route.choose(&both), Some(1));
        both[0].is_open = true;
        assert_eq!(route.choose(&both), Some(0));
        assert_eq!(route.choose(&[]), None);
    }
}
