//! Power loss at any moment: everything flushed is present, every completed change is present, and no
//! repair is needed.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::world::World;

fn run(blocks: u64, seed: u64, operations: u64, cut_every: u64) -> World {
    let mut world = World::new(blocks, seed);
    world.cut_every = cut_every;
    world.changes = 10 + seed % 3 * 15;
    while world.operations < operations {
        world.work();
    }
    world.compare();
    world
}

#[test]
fn a_store_comes_back_from_any_cut_of_the_power() {
    let mut cuts = 0;
    for seed in 1..=4 {
        cuts += run(if seed % 2 == 0 { 700 } else { 4096 }, seed, 800, 3).cuts;
    }
    assert!(cuts > 500, "only {cuts} cuts");
}

#[test]
fn a_store_whose_devices_lose_power_each_by_itself_comes_back_while_it_grows() {
    let (mut cuts, mut grown, mut devices) = (0, 0, 0);
    for seed in 11..=14 {
        let mut world = World::new(600, seed);
        (world.cut_every, world.grows_to) = (3, 3_000);
        while world.operations < 900 {
            world.work();
        }
        world.compare();
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
fn a_store_comes_back_from_a_cut_at_every_step() {
    run(4096, 5, 5_000, 1);
    run(700, 6, 5_000, 1);
}
