//! Injected bugs, which the simulation must find. A simulation that misses them proves nothing.

/// Set of injected bugs. None by default.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A disk with a volatile cache is reported as stable.
    pub cached_disk_is_stable: bool,
    /// A flush succeeds although a controller with writes in its volatile cache is gone.
    pub flush_ignores_lost_writes: bool,
    /// Late writes of an ended association are not fenced from later ones.
    pub unfenced_writes: bool,
    /// A process reports a controller as reset that it has never created.
    pub unknown_resets_done: bool,
    /// Reservations are stored by namespace identifier rather than by disk.
    pub reservations_by_number: bool,
    /// A pool is claimed regardless of its owner, and commits do not check the owner.
    pub pool_ignores_fence: bool,
    /// A pool is taken over without preempting the reservation of its former owner.
    pub takeover_does_not_preempt: bool,
    /// A pool goes on reading after its device has lost completed writes, until a flush fails.
    pub pool_ignores_losses: bool,
    /// A mirror starts from a leg that has missed flushed writes.
    pub mirror_starts_from_stale_leg: bool,
    /// A mirror keeps a leg in sync that has lost completed writes.
    pub mirror_keeps_lossy_leg: bool,
}

impl InjectedBugs {
    /// Each bug alone, with its name. 200 seeds find each of them.
    pub fn all_with_names() -> Vec<(&'static str, Self)> {
        let none = Self::default();
        vec![
            (
                "a cached disk is reported to be stable",
                Self { cached_disk_is_stable: true, ..none },
            ),
            (
                "a flush ignores writes that are lost",
                Self { flush_ignores_lost_writes: true, ..none },
            ),
            (
                "writes of an ended association are not fenced",
                Self { unfenced_writes: true, ..none },
            ),
            (
                "a process acknowledges the reset of a controller of another process",
                Self { unknown_resets_done: true, ..none },
            ),
            (
                "reservations belong to a number and not to a disk",
                Self { reservations_by_number: true, ..none },
            ),
            ("a pool does not check its owner", Self { pool_ignores_fence: true, ..none }),
            (
                "a takeover does not preempt the former owner",
                Self { takeover_does_not_preempt: true, ..none },
            ),
            (
                "a pool reads on after its device has lost writes",
                Self { pool_ignores_losses: true, ..none },
            ),
            (
                "a mirror starts from a leg that has missed flushed writes",
                Self { mirror_starts_from_stale_leg: true, ..none },
            ),
            (
                "a mirror keeps a leg that has lost writes",
                Self { mirror_keeps_lossy_leg: true, ..none },
            ),
        ]
    }
}
