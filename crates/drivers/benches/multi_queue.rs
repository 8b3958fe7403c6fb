//! Instructions per I/O of the multi-queue layer, and of the lease of a gateway group, over a null device and beside
//! that alone: counted and not timed, the same on a noisy machine as on a quiet one.
//!
//! Each count is of one batch of as many reads as its name ends with, submitted and completed, on a
//! device that was warmed up by some iterations. `.ci/instructions` divides, and holds the result against
//! `.ci/instructions.baseline`.

#![expect(missing_docs, reason = "the macros make items of their own")]

use std::sync::Arc;

use gungraun::{library_benchmark, library_benchmark_group, main};
use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, Error, Instant, IoChannel, Limits, Operation,
    Request, RequestFlags, Segment,
};
use tenmil_block::{Bdev, BdevOptions, ChannelMode, Claim, QueueMap};
use tenmil_drivers::{LeaseEnd, LeasedDevice, NullDevice};
use tenmil_linux::Clock;

/// A block device, and reads for it.
struct ReadLoad {
    backend: Box<dyn IoChannel>,
    requests: Vec<Request>,
    completions: CompletionBatch,
    now: Instant,
}

impl ReadLoad {
    /// `count` reads of 4 KiB, none of them sent, on a warm device.
    fn with_requests(backend: Box<dyn IoChannel>, count: u64) -> Self {
        let read = |token| Request {
            token,
            lba: token * 8,
            operand: 0,
            segment_first: 0,
            blocks: 8,
            segment_count: 1,
            metadata_count: 0,
            operation: Operation::Read,
            flags: RequestFlags::NONE,
        };
        let room = usize::try_from(count).unwrap_or(0);
        let (requests, completions) =
            ((0..count).map(read).collect(), CompletionBatch::with_capacity(room));
        let mut reads = Self { backend, requests, completions, now: Instant::default() };
        (0..8).for_each(|_| reads.run_iteration());
        reads
    }

    /// Submits all and collects the completions.
    #[inline(never)]
    fn run_iteration(&mut self) {
        self.now.ns += 1_000;
        let taken = self.backend.submit(self.now, &self.requests, &[Segment::default()]);
        self.backend.flush_submissions();
        let completed = self.backend.poll(self.now, &mut self.completions);
        assert_eq!((taken, completed), (self.requests.len(), self.requests.len()));
        self.completions.clear();
    }
}

/// A null device as it is.
fn null_device_read_load(count: u64) -> ReadLoad {
    let medium = NullDevice::new(512, 1 << 30).expect("a geometry");
    ReadLoad::with_requests(medium.channel().expect("a channel"), count)
}

/// A null device that reports another durability.
struct DurableNull(NullDevice, Durability);

impl BlockDevice for DurableNull {
    fn limits(&self) -> Limits {
        Limits { durability: self.1, ..self.0.limits() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.0.channel()
    }
}

/// A null device that is served under a lease.
fn lease_read_load(count: u64, durability: Durability) -> ReadLoad {
    let medium = DurableNull(NullDevice::new(512, 1 << 30).expect("a geometry"), durability);
    let lease = LeaseEnd::default();
    lease.set(Instant::NEVER);
    let leased = LeasedDevice::new(Arc::new(medium), lease).expect("a durable device");
    ReadLoad::with_requests(leased.channel().expect("a channel"), count)
}

fn persistent_read_load(count: u64) -> ReadLoad {
    lease_read_load(count, Durability::Persistent)
}

/// Its writes are forced to the medium, so each batch is copied.
fn forced_read_load(count: u64) -> ReadLoad {
    lease_read_load(count, Durability::VolatileCache)
}

/// A null device behind the multi-queue layer.
fn bdev_read_load(count: u64, mode: ChannelMode, map: QueueMap) -> ReadLoad {
    let medium = NullDevice::new(512, 1 << 30).expect("a geometry");
    let options = BdevOptions::new(Clock::on_kernel_clock(), 1);
    let options = BdevOptions { mode, map, channels_max: 2, ..options };
    let device = Bdev::new("null", Arc::new(medium), options).expect("a device");
    let descriptor = device.open(Claim::Exclusive, "bench").expect("no other claim");
    ReadLoad::with_requests(descriptor.channel().expect("a channel"), count)
}

fn exclusive_context_read_load(count: u64) -> ReadLoad {
    bdev_read_load(count, ChannelMode::Mq, QueueMap::with_default_contexts(2))
}

fn shared_context_read_load(count: u64) -> ReadLoad {
    bdev_read_load(count, ChannelMode::Mq, QueueMap::with_default_contexts(1))
}

fn single_queue_read_load(count: u64) -> ReadLoad {
    bdev_read_load(count, ChannelMode::SingleQueue, QueueMap::with_default_contexts(1))
}

// The multi-queue layer over a null device, and that alone: the difference is what the layer costs.
#[library_benchmark]
#[bench::null_1(args = (1,), setup = null_device_read_load)]
#[bench::null_128(args = (128,), setup = null_device_read_load)]
#[bench::owned_1(args = (1,), setup = exclusive_context_read_load)]
#[bench::owned_128(args = (128,), setup = exclusive_context_read_load)]
#[bench::shared_128(args = (128,), setup = shared_context_read_load)]
#[bench::single_128(args = (128,), setup = single_queue_read_load)]
fn layer(mut reads: ReadLoad) -> ReadLoad {
    reads.run_iteration();
    reads
}

// The lease over a null device: what `layer.null` does not have is what the lease costs.
#[library_benchmark]
#[bench::persistent_1(args = (1,), setup = persistent_read_load)]
#[bench::persistent_128(args = (128,), setup = persistent_read_load)]
#[bench::forced_128(args = (128,), setup = forced_read_load)]
fn lease(mut reads: ReadLoad) -> ReadLoad {
    reads.run_iteration();
    reads
}

library_benchmark_group!(name = per_turn; benchmarks = layer, lease);
main!(library_benchmark_groups = per_turn);
