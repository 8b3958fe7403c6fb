//! Whole schedules from a seed: loads, masks, cpusets, quotas and policies change at random, and
//! then stay constant.
//!
//! `TENMIL_SEED=N cargo test -p tenmil-reactor schedules` repeats one seed and prints its
//! migrations.

mod feasibility;
mod machine;

use tenmil_base::Random;

use super::Policy;
use feasibility::has_placement_within_limits;
use machine::SimulatedMachine;

const SEEDS: u64 = 4_000;
/// Number of periods with changes, and then without.
const RESTLESS: u64 = 40;
const STILL: u64 = 60;
/// Number of final periods in which nothing may move.
const SETTLED: u64 = 12;

#[test]
fn random_schedules_lose_no_thread_and_end_within_the_limits() {
    let only = std::env::var("TENMIL_SEED").ok().map(|seed| seed.parse().unwrap());
    let mut outcomes = SimulationCounts::default();
    for seed in only.map_or(0..SEEDS, |seed| seed..seed + 1) {
        run_simulation(seed, only.is_some(), &mut outcomes);
    }
    if only.is_none() {
        assert!(outcomes.possible > SEEDS / 4 && outcomes.migrations > 5 * SEEDS, "{outcomes:?}");
        assert!(outcomes.impossible.min(outcomes.large) > SEEDS / 20, "{outcomes:?}");
    }
}

/// How often each assertion applied.
#[derive(Debug, Default)]
struct SimulationCounts {
    possible: u64,
    impossible: u64,
    large: u64,
    migrations: u64,
}

fn run_simulation(seed: u64, tell: bool, outcomes: &mut SimulationCounts) {
    let mut world = SimulatedMachine::new(Random::new(seed), seed, tell);
    for _ in 0..RESTLESS {
        world.change_something();
        world.run_period();
    }
    world.stop_changes();
    for _ in 0..STILL {
        world.run_period();
    }
    if tell {
        world.print_placement();
    }
    outcomes.migrations += world.migrations;
    if world.policy() == Policy::Static {
        return;
    }
    let quiet = world.now - world.last_order;
    assert!(quiet >= SETTLED, "seed {seed}: still moving {quiet} periods before the end");
    world.check_thread_placement();
    if !world.is_exhaustively_checkable() {
        outcomes.large += 1;
    } else if has_placement_within_limits(&world) {
        outcomes.possible += 1;
        world.check_limits();
    } else {
        outcomes.impossible += 1;
    }
    world.check_consolidated();
}
