//! The device loses unflushed writes and continues, at any moment, and so does the pool.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::world::World;

#[test]
fn a_store_whose_device_loses_unflushed_writes_keeps_what_was_flushed_and_goes_on() {
    let mut losses = 0;
    for seed in 1..=8 {
        let mut world = World::new(if seed % 2 == 0 { 3000 } else { 4096 }, seed);
        (world.loses_every, world.rig.recovers) = (40, true);
        world.changes = 10 + seed % 3 * 15;
        while world.operations < 1500 {
            world.work();
        }
        world.compare();
        losses += world.losses;
    }
    assert!(losses > 300, "only {losses} losses");
}
