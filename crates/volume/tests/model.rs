//! Random operations on a pool and on a simple model of it: every byte and every count agree.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::world::World;

fn run(blocks: u64, size_max: u64, seed: u64, operations: u64, compare_every: u64) -> World {
    let mut world = World::new(blocks, seed);
    world.size_max = size_max;
    if operations > 10_000 {
        world.account_every = 100;
    }
    let mut next = compare_every;
    while world.operations < operations {
        world.work();
        if world.operations >= next {
            world.compare();
            next += compare_every;
        }
    }
    world.compare();
    world
}

#[test]
fn a_store_and_a_model_of_it_agree_in_every_byte_and_every_count() {
    for seed in 1..=4 {
        let world = run(1 << 15, 1_500, seed, 2_000, 200);
        assert_eq!(world.refused_for_room, 0, "there was room");
    }
}

#[test]
fn a_store_that_is_full_refuses_and_loses_nothing() {
    let mut refused = 0;
    for seed in 1..=4 {
        refused += run(600, 160, seed, 2_000, 100).refused_for_room;
    }
    assert!(refused > 20, "only {refused} were refused");
}

#[test]
fn a_store_that_grows_and_a_model_of_it_agree() {
    let mut grown = 0;
    for seed in 21..=23 {
        let mut world = World::new(800, seed);
        (world.size_max, world.grows_to) = (300, 9_000);
        while world.operations < 1_500 {
            world.work();
        }
        world.compare();
        grown += world.grown;
    }
    assert!(grown > 20, "only {grown} times");
}

#[test]
#[ignore = "100 000 operations: run it with --release"]
fn a_store_and_a_model_of_it_agree_for_a_hundred_thousand_operations() {
    run(1 << 15, 1_500, 77, 50_000, 500);
    run(700, 160, 78, 50_000, 500);
}
