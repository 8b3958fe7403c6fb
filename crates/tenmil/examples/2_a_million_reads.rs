//! A million 4 KiB reads from one thread at depth 128, as 128 tasks on the reactor that polls the
//! device. `tenmil perf` measures what the storage stack does below the futures.

#![allow(clippy::disallowed_methods, reason = "it is a program of its own, with the clock of std")]

use std::error::Error;
use std::time::Instant;

use tenmil::{Access, Device, IoError, Runtime};

const READS: u64 = 1_000_000;
const BYTES: u32 = 4096;
const DEPTH: u64 = 128;

/// Reads blocks at pseudo-random addresses, one after the other into the same buffer.
async fn read_random_blocks(device: Device, seed: u64) -> Result<u64, IoError> {
    let blocks = u64::from(BYTES / device.limits().block_size);
    let slots = device.limits().block_count / blocks;
    let mut buffer = device.buffer(BYTES).expect("64 MiB of buffers are enough");
    let mut random = seed;
    for _ in 0..READS / DEPTH {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        buffer = device.read((random >> 16) % slots * blocks, buffer).await?;
    }
    Ok(READS / DEPTH)
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::new()?;
    let device = rt.block_on(rt.open("emu:null", Access::ReadOnly))?;
    let begun = Instant::now();
    let start = |seed| device.spawn(read_random_blocks(device.clone(), seed));
    let tasks = (0..DEPTH).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut done = 0;
    for task in tasks {
        done += rt.block_on(task)??;
    }
    println!("{done} reads in {:.3} s", begun.elapsed().as_secs_f64());
    Ok(())
}
