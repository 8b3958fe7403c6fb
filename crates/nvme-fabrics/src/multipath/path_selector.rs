//! Path selection by I/O policy; without connections or a clock.

/// I/O policy over paths with equal ANA state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoPolicy {
    /// All requests use the first path; the others are for failover.
    #[default]
    ActivePassive,
    /// The paths take requests in rotation.
    RoundRobin,
    /// The path with the fewest requests in flight.
    QueueDepth,
}

/// ANA state of a path (NVM Express Base 2.1, section 8.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathAnaState {
    /// Optimized. Also used if the controller does not report ANA.
    Optimized,
    /// Accessible with possibly lower performance.
    NonOptimized,
    /// Not accessible at present, or unknown.
    #[default]
    Inaccessible,
    /// Permanently lost.
    PersistentLoss,
    /// In transition.
    Change,
}

/// The selector's view of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathView {
    /// It accepts requests.
    pub(crate) is_open: bool,
    /// It is backed off after a path error.
    pub(crate) is_backed_off: bool,
    pub(crate) access: PathAnaState,
    /// Requests in flight.
    pub(crate) in_flight: u32,
}

/// Where the requests of a batch go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchRoute {
    /// No path is usable.
    Nowhere,
    /// All of them go to this path.
    To(usize),
    /// A path is [chosen](PathSelector::choose) for each request.
    Each,
}

/// Selects the path of each request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathSelector {
    io_policy: IoPolicy,
    last: usize,
}

impl IoPolicy {
    /// Names in URIs and configuration.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("active-passive", Self::ActivePassive),
        ("round-robin", Self::RoundRobin),
        ("queue-depth", Self::QueueDepth),
    ];
}

impl PathAnaState {
    /// Name for the user.
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

    /// Preference, lower is better. `None` if the path is not usable.
    const fn rank(self) -> Option<u8> {
        match self {
            Self::Optimized => Some(0),
            Self::NonOptimized => Some(1),
            Self::Inaccessible | Self::PersistentLoss | Self::Change => None,
        }
    }
}

impl PathView {
    const fn rank(&self) -> Option<u8> {
        if self.is_open && !self.is_backed_off { self.access.rank() } else { None }
    }

    /// Whether its ANA state permits requests.
    pub(crate) const fn is_accessible(&self) -> bool {
        self.access.rank().is_some()
    }

    /// Whether requests can use it.
    pub(crate) const fn is_usable(&self) -> bool {
        self.rank().is_some()
    }
}

impl PathSelector {
    pub(crate) const fn new(io_policy: IoPolicy) -> Self {
        Self { io_policy, last: 0 }
    }

    /// Where the requests of a batch go. While it is submitted, only the numbers in flight change.
    #[inline]
    pub(crate) fn route_batch(&self, views: &[PathView]) -> BatchRoute {
        let mut best: Option<(u8, usize)> = None;
        let mut is_only = true;
        for (path, view) in views.iter().enumerate() {
            let Some(rank) = view.rank() else { continue };
            match best {
                Some((of_best, _)) if rank > of_best => {}
                Some((of_best, _)) if rank == of_best => is_only = false,
                _ => (best, is_only) = (Some((rank, path)), true),
            }
        }
        match best {
            None => BatchRoute::Nowhere,
            Some((_, path)) if is_only || self.io_policy == IoPolicy::ActivePassive => {
                BatchRoute::To(path)
            }
            Some(_) => BatchRoute::Each,
        }
    }

    /// The path for the next request: of the best ones, by the I/O policy. `None` if no path is usable.
    #[inline]
    pub(crate) fn choose(&mut self, views: &[PathView]) -> Option<usize> {
        let best = views.iter().filter_map(PathView::rank).min()?;
        let has_best_rank = |index: &usize| views[*index].rank() == Some(best);
        let count = views.len();
        let after_last = || (self.last + 1..count).chain(0..=self.last.min(count - 1));
        let chosen = match self.io_policy {
            IoPolicy::ActivePassive => (0..count).find(has_best_rank),
            IoPolicy::RoundRobin => after_last().find(has_best_rank),
            IoPolicy::QueueDepth => {
                after_last().filter(has_best_rank).min_by_key(|index| views[*index].in_flight)
            }
        }?;
        self.last = chosen;
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::{BatchRoute, IoPolicy, PathAnaState, PathSelector, PathView};

    const ALL: [PathAnaState; 5] = [
        PathAnaState::Optimized,
        PathAnaState::NonOptimized,
        PathAnaState::Inaccessible,
        PathAnaState::PersistentLoss,
        PathAnaState::Change,
    ];

    fn views(of: &[(bool, PathAnaState, u32)]) -> Vec<PathView> {
        let view = |(is_open, access, in_flight): &(bool, PathAnaState, u32)| PathView {
            is_open: *is_open,
            access: *access,
            in_flight: *in_flight,
            is_backed_off: false,
        };
        of.iter().map(view).collect()
    }

    /// Every pair of states, each open and closed.
    #[test]
    fn optimized_paths_precede_non_optimized_and_others_are_not_selected() {
        for io_policy in IoPolicy::NAMES.map(|(_, io_policy)| io_policy) {
            for (one, two) in ALL.iter().flat_map(|one| ALL.map(|two| (*one, two))) {
                for open in [(true, true), (true, false), (false, true), (false, false)] {
                    let views = views(&[(open.0, one, 0), (open.1, two, 0)]);
                    let usable = |access| match access {
                        PathAnaState::Optimized => 2,
                        PathAnaState::NonOptimized => 1,
                        _ => 0,
                    };
                    let ranks =
                        [usize::from(open.0) * usable(one), usize::from(open.1) * usable(two)];
                    for _ in 0..3 {
                        let chosen = PathSelector::new(io_policy).choose(&views);
                        let best = ranks.into_iter().max().filter(|ranks| *ranks > 0);
                        assert_eq!(chosen.map(|path| ranks[path]), best, "{io_policy:?} {views:?}");
                    }
                }
            }
        }
    }

    /// A batch has one path exactly if every request of it would get that path.
    #[test]
    fn batch_is_routed_like_its_single_requests() {
        for io_policy in IoPolicy::NAMES.map(|(_, io_policy)| io_policy) {
            for number in 0..5_u32.pow(3) {
                let state = |path: u32| ALL[(number / 5_u32.pow(path) % 5) as usize];
                let mut views = views(&[0, 1, 2].map(|path| (true, state(path), 0)));
                let mut selector = PathSelector::new(io_policy);
                let mut chosen = Vec::new();
                for _ in 0..4 {
                    let path = selector.choose(&views);
                    path.into_iter().for_each(|path| views[path].in_flight += 1);
                    chosen.push(path);
                }
                let expected = match chosen[0] {
                    None => BatchRoute::Nowhere,
                    Some(path) if chosen.iter().all(|it| *it == Some(path)) => BatchRoute::To(path),
                    Some(_) => BatchRoute::Each,
                };
                let route = PathSelector::new(io_policy).route_batch(&views);
                assert_eq!(route, expected, "{io_policy:?} {views:?}");
            }
        }
    }

    #[test]
    fn each_io_policy_has_its_own_path_order() {
        let four = views(&[
            (true, PathAnaState::NonOptimized, 0),
            (true, PathAnaState::Optimized, 5),
            (true, PathAnaState::Optimized, 3),
            (true, PathAnaState::Optimized, 3),
        ]);
        for (io_policy, expected) in [
            (IoPolicy::ActivePassive, [1, 1, 1, 1, 1]),
            (IoPolicy::RoundRobin, [1, 2, 3, 1, 2]),
            (IoPolicy::QueueDepth, [2, 3, 2, 3, 2]),
        ] {
            let mut selector = PathSelector::new(io_policy);
            let taken = [(); 5].map(|()| selector.choose(&four).unwrap());
            assert_eq!(taken, expected, "{io_policy:?}");
        }
    }

    #[test]
    fn path_in_backoff_is_not_selected() {
        let mut both =
            views(&[(true, PathAnaState::Optimized, 0), (true, PathAnaState::NonOptimized, 0)]);
        both[0].is_backed_off = true;
        assert_eq!(PathSelector::new(IoPolicy::RoundRobin).choose(&both), Some(1));
        both[1].is_backed_off = true;
        assert_eq!(PathSelector::new(IoPolicy::RoundRobin).choose(&both), None);
    }

    #[test]
    fn recovered_path_is_selected_again() {
        let mut both =
            views(&[(false, PathAnaState::Optimized, 0), (true, PathAnaState::Optimized, 0)]);
        let mut selector = PathSelector::new(IoPolicy::ActivePassive);
        assert_eq!(selector.choose(&both), Some(1));
        both[0].is_open = true;
        assert_eq!(selector.choose(&both), Some(0));
        assert_eq!(selector.choose(&[]), None);
    }
}
