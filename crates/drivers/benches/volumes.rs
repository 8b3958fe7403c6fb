//! Instructions per read of a written volume, over memory and beside that alone: counted and not
//! timed.
//!
//! Each count is of one batch of as many reads of 4 KiB as its name ends with, submitted and
//! completed, on a channel that was warmed up by some iterations. `.ci/instructions` divides.

#![expect(missing_docs, reason = "the macros make items of their own")]

mod reads;

use gungraun::{library_benchmark, library_benchmark_group, main};
use reads::{ReadLoad, ram_device, volume_on_ram};

#[library_benchmark]
#[bench::memory_1(args = (1,), setup = ram_device)]
#[bench::memory_128(args = (128,), setup = ram_device)]
#[bench::volume_1(args = (1,), setup = volume_on_ram)]
#[bench::volume_128(args = (128,), setup = volume_on_ram)]
fn volumes(mut reads: ReadLoad) -> ReadLoad {
    reads.run_iteration();
    reads
}

library_benchmark_group!(name = per_read; benchmarks = volumes);
main!(library_benchmark_groups = per_read);
