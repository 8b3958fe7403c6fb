//! Instructions per read of a written volume, over memory and beside that alone: counted and not
//! timed.
//!
//! Each count is of one batch of as many reads of 4 KiB as its name ends with, submitted and
//! completed, on a channel that was warmed up by some iterations. `.ci/instructions` divides.

#![expect(missing_docs, reason = "the macros make items of their own")]

mod reads;

use gungraun::{library_benchmark, library_benchmark_group, main};
use reads::{Reads, bare, volume};

#[library_benchmark]
#[bench::memory_1(args = (1,), setup = bare)]
#[bench::memory_128(args = (128,), setup = bare)]
#[bench::volume_1(args = (1,), setup = volume)]
#[bench::volume_128(args = (128,), setup = volume)]
fn volumes(mut reads: Reads) -> Reads {
    reads.turn();
    reads
}

library_benchmark_group!(name = per_read; benchmarks = volumes);
main!(library_benchmark_groups = per_read);
