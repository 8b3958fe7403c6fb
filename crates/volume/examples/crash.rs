//! Crash test: random work on a pool, a power loss at every step, and checks of the resulting state:
//!
//! ```text
//! cargo run --release -p tenmil-volume --example crash -- SEED [OPERATIONS [BLOCKS]]
//! ```
//!
//! After each read, write and flush of the device, the contents of the medium are drawn anew: all
//! completed writes, no unflushed write, or (two times in three) a random subset of them in random order
//! with torn sectors of 512 bytes. The pool must open, a check must find no error, every block must
//! contain what was flushed or something newer, every completed change must be present, and the pool must
//! accept new writes. In the meantime, the pool grows from BLOCKS to three times as many, over up to four
//! devices, each of which loses its own unflushed writes. A seed repeats its run.

#![expect(clippy::unwrap_used, reason = "it ends where something is wrong")]

#[path = "../tests/fixture/mod.rs"]
mod fixture;

use fixture::pool_with_model::PoolWithModel;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| match text.parse::<u64>() {
        Ok(number) => number,
        Err(error) => panic!("{text}: {error}, expected a number"),
    });
    let seed = numbers.next().unwrap_or(1);
    let operations = numbers.next().unwrap_or(10_000);
    let blocks = numbers.next().unwrap_or(4096);
    let mut world = PoolWithModel::new(blocks, seed);
    (world.cut_every, world.grows_to) = (1, 3 * blocks);
    while world.operations < operations {
        world.run_random_operation();
    }
    world.compare_contents();
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
