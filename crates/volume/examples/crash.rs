//! Works on a store at random, cuts the power at every step, and looks at what comes back:
//!
//! ```text
//! cargo run --release -p tenmil-volume --example crash -- SEED [OPERATIONS [BLOCKS]]
//! ```
//!
//! After each read, write and flush of the device, what is on the medium is drawn anew: all that was
//! completed, nothing that was not flushed, or (two times in three) a random subset of it in a random
//! order with torn sectors of 512 bytes. The store must open, a check must find nothing, every block
//! must hold what was flushed or something newer, every change that was answered must be there, and
//! the store must take new writes. Meanwhile the store grows from BLOCKS to three times as many, over up
//! to four devices, each of which loses what it has not flushed by itself. A seed repeats its run.

#![expect(clippy::unwrap_used, reason = "it ends where something is wrong")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use rig::world::World;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| match text.parse::<u64>() {
        Ok(number) => number,
        Err(error) => panic!("{text}: {error}, expected a number"),
    });
    let seed = numbers.next().unwrap_or(1);
    let operations = numbers.next().unwrap_or(10_000);
    let blocks = numbers.next().unwrap_or(4096);
    let mut world = World::new(blocks, seed);
    (world.cut_every, world.grows_to) = (1, 3 * blocks);
    while world.operations < operations {
        world.work();
    }
    world.compare();
    println!(
        "seed {seed}: {} operations, {} cuts of the power, {} blocks written, {} refused for want of \
         room, grown {} times to {} devices: nothing lost",
        world.operations,
        world.cuts,
        world.rig.disk.writes,
        world.refused_for_room,
        world.grown,
        world.rig.store.devices().count()
    );
}
