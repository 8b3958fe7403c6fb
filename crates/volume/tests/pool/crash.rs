//! Power loss at any moment: everything flushed is present, every completed change is present, and no
//! repair is needed.

use crate::fixture::pool_with_model::PoolWithModel;

fn run_with_power_losses(blocks: u64, seed: u64, operations: u64, cut_every: u64) -> PoolWithModel {
    let mut world = PoolWithModel::new(blocks, seed);
    world.cut_every = cut_every;
    world.changes = 10 + seed % 3 * 15;
    while world.operations < operations {
        world.run_random_operation();
    }
    world.compare_contents();
    world
}

#[test]
fn pool_recovers_from_random_power_loss() {
    let mut cuts = 0;
    for seed in 1..=4 {
        cuts += run_with_power_losses(if seed % 2 == 0 { 700 } else { 4096 }, seed, 800, 3).cuts;
    }
    assert!(cuts > 500, "only {cuts} cuts");
}

#[test]
fn growing_pool_recovers_from_independent_power_loss_of_its_devices() {
    let (mut cuts, mut grown, mut devices) = (0, 0, 0);
    for seed in 11..=14 {
        let mut world = PoolWithModel::new(600, seed);
        (world.cut_every, world.grows_to) = (3, 3_000);
        while world.operations < 900 {
            world.run_random_operation();
        }
        world.compare_contents();
        cuts += world.cuts;
        grown += world.grown;
        devices += world.rig.store.devices().count();
    }
    assert!(
        cuts > 500 && grown > 20 && devices > 8,
        "{cuts} cuts, {grown} times, {devices} devices"
    );
}

#[test]
#[ignore = "a cut at every step of 10 000 operations: run it with --release"]
fn pool_recovers_from_power_loss_at_every_step() {
    run_with_power_losses(4096, 5, 5_000, 1);
    run_with_power_losses(700, 6, 5_000, 1);
}
