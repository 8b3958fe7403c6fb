//! Instructions per I/O, counted and not timed: the same on a noisy machine as on a quiet one.
//!
//! Each count is of one call with as many I/Os as its name ends with; `.ci/instructions` divides,
//! and holds the result against `.ci/instructions.baseline`. Everything is as `perf` has it by
//! default, and was warmed up by some iterations that are not counted.

#![expect(missing_docs, unused_qualifications, reason = "the macros make items of their own")]

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group, main};
use tenmil_bench::perf::engine::SteppedSsd;
use tenmil_wire::io::Read;
use tenmil_wire::{Command, TypedCommand};

/// A queue with `depth` completed reads waiting, warmed up by a few iterations.
fn ssd_with_completed_reads(depth: u32) -> Box<SteppedSsd> {
    warm_up(SteppedSsd::new(depth).expect("an SSD in memory comes up"))
}

fn warm_up(pair: SteppedSsd) -> Box<SteppedSsd> {
    // In a box, so that handing it back is no copy that would be counted.
    let mut pair = Box::new(pair);
    for _ in 0..8 {
        pair.poll_device();
        pair.poll_queue();
    }
    pair.poll_device();
    pair
}

/// The same, with data that do not lie beside the queues.
fn ssd_with_data_in_other_region(depth: u32) -> Box<SteppedSsd> {
    warm_up(SteppedSsd::with_data_elsewhere(depth).expect("an SSD in memory comes up"))
}

/// A device with `depth` reads submitted and waiting.
fn ssd_with_submitted_reads(depth: u32) -> Box<SteppedSsd> {
    let mut pair = ssd_with_completed_reads(depth);
    pair.poll_queue();
    pair
}

// The driver and `perf`: takes what has completed, and submits as many commands.
#[library_benchmark(setup = ssd_with_completed_reads)]
#[bench::depth_1(1)]
#[bench::depth_128(128)]
fn host(mut pair: Box<SteppedSsd>) -> Box<SteppedSsd> {
    black_box(pair.poll_queue());
    pair
}

// The same over memory of another owner, such as a device on the bus or another process.
#[library_benchmark(setup = ssd_with_data_in_other_region)]
#[bench::depth_128(128)]
fn elsewhere(mut pair: Box<SteppedSsd>) -> Box<SteppedSsd> {
    black_box(pair.poll_queue());
    pair
}

// The driver and `perf` when nothing has completed.
#[library_benchmark(setup = ssd_with_submitted_reads)]
#[bench::depth_1(1)]
fn idle(mut pair: Box<SteppedSsd>) -> Box<SteppedSsd> {
    black_box(pair.poll_queue());
    pair
}

// The emulated controller over a null medium: takes commands and posts their completions.
#[library_benchmark(setup = ssd_with_submitted_reads)]
#[bench::depth_1(1)]
#[bench::depth_128(128)]
fn device(mut pair: Box<SteppedSsd>) -> Box<SteppedSsd> {
    pair.poll_device();
    pair
}

/// Reads as they lie in a ring.
fn encoded_reads(count: u16) -> Vec<[u8; 64]> {
    let read = |cid: u16| {
        let command = Command::new(Read::OPCODE).with_cid(cid).with_nsid(1);
        command.with_prp(0x1000, 0).with_cdw10(u32::from(cid)).with_cdw12(7).to_bytes()
    };
    (0..count).map(read).collect()
}

// `wire` alone: bytes to a typed read.
#[library_benchmark(setup = encoded_reads)]
#[bench::commands_128(128)]
fn parse(ring: Vec<[u8; 64]>) -> Vec<[u8; 64]> {
    for entry in &ring {
        let _ = black_box(Read::parse(&Command::from_bytes(black_box(entry))));
    }
    ring
}

library_benchmark_group!(name = per_turn; benchmarks = host, elsewhere, idle, device, parse);
main!(library_benchmark_groups = per_turn);
