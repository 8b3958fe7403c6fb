//! Simulation of a group: members with clocks of their own, a store, and media, from one seed.
//!
//! ```text
//!   member: clock with offset and drift ──┬── messages: late, lost ──── store: leases by true time
//!     │  paused, killed, cut off          ┘
//!     └── writes ──▶ medium of each ANA group: late writes, fences
//! ```
//!
//! Invariants: no write of an earlier owner reaches a medium after one of a later owner; no two members serve
//! a group at one time; within [`TAKEOVER_MAX`] without a new fault each group is served again.

mod media;
mod run;

use super::member::InjectedBug;
use tenmil_base::Span;

pub use run::run_seed;

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// Number of writes that have reached a medium.
    pub writes: u64,
    /// Number of ownerships that have served.
    pub ownerships: u64,
    /// Longest time without a new fault in which a group was not served.
    pub longest_gap: Span,
    /// Invariant that was violated.
    pub failure: Option<String>,
}

/// Longest time in which a group is not served without a new fault.
pub const TAKEOVER_MAX: Span = Span::from_secs(5);

/// Injected bugs with their names.
#[must_use]
pub fn injected_bugs() -> [(&'static str, InjectedBug); 5] {
    [
        ("lease without margin", InjectedBug::LeaseWithoutMargin),
        ("fence after the takeover", InjectedBug::FenceAfterTakeover),
        ("stale ANA state", InjectedBug::StaleAna),
        ("revocation before the devices are closed", InjectedBug::EarlyRevoke),
        ("claim without expiry", InjectedBug::ClaimWithoutExpiry),
    ]
}

#[cfg(test)]
mod tests {
    use super::{TAKEOVER_MAX, injected_bugs, run_seed};

    #[test]
    fn same_seed_gives_the_same_run() {
        assert_eq!(run_seed(7, None), run_seed(7, None));
        assert_ne!(run_seed(7, None), run_seed(8, None));
    }

    #[test]
    fn seeds_violate_no_invariant() {
        let (mut ownerships, mut writes) = (0, 0);
        for seed in 0..60 {
            let outcome = run_seed(seed, None);
            assert_eq!(outcome.failure, None, "seed {seed}");
            assert!(outcome.longest_gap <= TAKEOVER_MAX);
            ownerships += outcome.ownerships;
            writes += outcome.writes;
        }
        // Groups have moved, and have been written to.
        assert!(ownerships > 60 * 10, "{ownerships}");
        assert!(writes > 60 * 1_000, "{writes}");
    }

    #[test]
    fn each_injected_bug_is_found() {
        for (name, bug) in injected_bugs() {
            let found = (0..200).find(|seed| run_seed(*seed, Some(bug)).failure.is_some());
            assert!(found.is_some(), "{name}");
        }
    }

    /// For manual runs: `SEEDS=0..1000`.
    #[test]
    #[ignore = "prints what seeds do"]
    fn run_seeds_from_environment() {
        let range = std::env::var("SEEDS").unwrap();
        let (first, last) = range.split_once("..").unwrap();
        for seed in first.parse::<u64>().unwrap()..last.parse().unwrap() {
            let outcome = run_seed(seed, None);
            if outcome.failure.is_some() || std::env::var("ALL").is_ok() {
                println!("seed {seed}: {outcome:?}");
            }
        }
        for (name, bug) in injected_bugs() {
            let found = (0..200).filter(|seed| run_seed(*seed, Some(bug)).failure.is_some());
            println!("{name}: found by {} of 200 seeds", found.count());
        }
    }
}
