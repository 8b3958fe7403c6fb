//! Random operations on a pool and on a simple model of it: every byte and every count agree.

use crate::fixture::pool_with_model::PoolWithModel;

fn run_against_model(
    blocks: u64,
    size_max: u64,
    seed: u64,
    operations: u64,
    compare_every: u64,
) -> PoolWithModel {
    let mut world = PoolWithModel::new(blocks, seed);
    world.size_max = size_max;
    if operations > 10_000 {
        world.account_every = 100;
    }
    let mut next = compare_every;
    while world.operations < operations {
        world.run_random_operation();
        if world.operations >= next {
            world.compare_contents();
            next += compare_every;
        }
    }
    world.compare_contents();
    world
}

#[test]
fn pool_matches_the_model() {
    for seed in 1..=4 {
        let world = run_against_model(1 << 15, 1_500, seed, 2_000, 200);
        assert_eq!(world.refused_for_room, 0, "there was room");
    }
}

#[test]
fn full_pool_rejects_writes_and_loses_nothing() {
    let mut refused = 0;
    for seed in 1..=4 {
        refused += run_against_model(600, 160, seed, 2_000, 100).refused_for_room;
    }
    assert!(refused > 20, "only {refused} were refused");
}

#[test]
fn growing_pool_matches_the_model() {
    let mut grown = 0;
    for seed in 21..=23 {
        let mut world = PoolWithModel::new(800, seed);
        (world.size_max, world.grows_to) = (300, 9_000);
        while world.operations < 1_500 {
            world.run_random_operation();
        }
        world.compare_contents();
        grown += world.grown;
    }
    assert!(grown > 20, "only {grown} times");
}

#[test]
#[ignore = "100 000 operations: run it with --release"]
fn pool_matches_the_model_for_100000_operations() {
    run_against_model(1 << 15, 1_500, 77, 50_000, 500);
    run_against_model(700, 160, 78, 50_000, 500);
}
