//! A mirror in simulated time, with failing and returning legs and power failures.

mod block_model;
mod claim_power_loss;
mod created_mirror_type;
mod images;
mod lost_writes;
mod maintenance_thread;
mod membership;
mod open_and_create;
mod ownership;
mod reservations;
mod returned_legs;
pub(crate) mod simulated_disk;
mod simulation;
mod two_threads;

pub(crate) use self::created_mirror_type::CreatedMirrorType;
use super::InjectedBugs;
use super::mirror_state::InjectedBug;
use simulation::{check_read_around_bad_block, run_simulation, run_with_injected_bugs};

/// Number of seeds in each run; the nightly run tries ten thousand.
const SEEDS: u64 = 200;
/// Number of seeds that a test tries which must find a bug.
const SEEDS_OF_BUGS: u64 = 600;

/// Further seeds that have found a bug, and the legs of their mirrors.
const FOUND: [(u64, usize); 11] = [
    (76, 2),
    (279, 3),
    (460, 2),
    (476, 2),
    (553, 2),
    (718, 2),
    (806, 2),
    (845, 2),
    (852, 2),
    (3028, 2),
    (6839, 3),
];

/// This number of seeds. One mirror in four has three legs, the others two.
fn seeds_with_leg_counts(seeds: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..seeds).map(|seed| (seed, if seed % 4 == 3 { 3 } else { 2 }))
}

#[test]
fn no_completed_write_is_lost_under_faults() {
    for (seed, legs) in seeds_with_leg_counts(SEEDS).chain(FOUND) {
        run_simulation(seed, legs, None)
            .unwrap_or_else(|problem| panic!("seed {seed}, {legs} legs: {problem}"));
    }
}

#[test]
#[ignore = "ten thousand seeds: for the nightly run"]
fn no_completed_write_is_lost_in_10000_runs() {
    for (seed, legs) in seeds_with_leg_counts(10_000) {
        run_simulation(seed, legs, None)
            .unwrap_or_else(|problem| panic!("seed {seed}, {legs} legs: {problem}"));
    }
}

#[test]
fn injected_bugs_are_detected() {
    for bug in [
        InjectedBug::CompletesBeforeRecording,
        InjectedBug::WritesBeforeMarking,
        InjectedBug::ClearsBeforeFlushing,
        InjectedBug::ReadsReturningLegs,
        InjectedBug::PromotesBeforeCopying,
    ] {
        let found = (0..SEEDS_OF_BUGS).find_map(|seed| run_simulation(seed, 2, Some(bug)).err());
        let found = found.unwrap_or_else(|| panic!("{bug:?} went unnoticed"));
        println!("{bug:?}: {found}");
    }
}

#[test]
fn ignoring_a_failed_flush_is_detected_as_lost_data() {
    let bugs = InjectedBugs { ignores_failed_flush: true, ..InjectedBugs::default() };
    let found =
        (0..SEEDS_OF_BUGS).find_map(|seed| run_with_injected_bugs(seed, 2, None, bugs).err());
    println!("{}", found.expect("it went unnoticed"));
}

#[test]
fn bad_block_repair_does_not_revert_neighboring_blocks() {
    assert_eq!(check_read_around_bad_block(), Ok(()));
}

#[test]
fn same_seed_repeats_the_run() {
    assert_eq!(run_simulation(5, 3, None), run_simulation(5, 3, None));
    assert_ne!(run_simulation(5, 3, None), run_simulation(6, 3, None));
}
