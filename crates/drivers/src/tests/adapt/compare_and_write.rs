//! Compare-and-write against the other channels of a device.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Random, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Clock;

use super::strict_device::{DEMANDS, StrictDevice};
use crate::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_block::{AdaptedDevice, BounceBufferAllocator};
use tenmil_block::{Bdev, BdevOptions, Claim};

/// A client that repeatedly reads a number and swaps it for the next one.
struct CompareAndWriteCounter {
    channel: Box<dyn IoChannel>,
    memory: Segment,
    seen: u32,
    /// Swaps that succeeded, and that failed.
    done: u32,
    late: u32,
    asked: bool,
}

const BLOCK: u64 = 5;

fn request(operation: Operation) -> Request {
    Request {
        token: operation as u64,
        lba: BLOCK,
        operand: 0,
        segment_first: 0,
        blocks: 1,
        segment_count: 1,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

impl CompareAndWriteCounter {
    /// Submits the next request if it is accepted, and processes completions.
    fn poll_and_swap(&mut self, regions: &RegionTable, now: Instant) {
        let (expected, new) = (self.memory.slice(0, 512), self.memory.slice(512, 512));
        let (expected, new) = (expected.unwrap(), new.unwrap());
        let mut completions = CompletionBatch::with_capacity(2);
        self.channel.poll(now, &mut completions);
        for completion in completions.drain() {
            self.asked = false;
            match (completion.token == Operation::Read as u64, completion.status) {
                (true, status) => {
                    assert_eq!(status, IoStatus::SUCCESS);
                    self.seen = regions.load_u32(expected).unwrap() + 1;
                }
                (false, IoStatus::SUCCESS) => (self.done, self.seen) = (self.done + 1, 0),
                (false, status) => {
                    assert_eq!(status, IoStatus::COMPARE_FAILURE);
                    (self.late, self.seen) = (self.late + 1, 0);
                }
            }
        }
        if self.asked {
            return;
        }
        let (next, segment) = match self.seen {
            0 => (Operation::Read, expected),
            _ => (Operation::CompareAndWrite, self.memory),
        };
        regions.store_u32(new, self.seen).unwrap();
        self.asked = self.channel.submit(now, &[request(next)], &[segment]) == 1;
        self.channel.flush_submissions();
    }
}

#[test]
fn concurrent_compare_and_writes_lose_no_update() {
    for seed in 0..20 {
        let regions = RegionTable::new(16);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap())
            .unwrap();
        let ram = Arc::new(RamDevice::new(&regions, 512, 64).unwrap());
        let spread = LatencySpec { mean: Span::from_us(10), p99: Some(Span::from_us(80)) };
        let delays = DelaySettings { read: spread, write: spread };
        let inner = Arc::new(DelayDevice::new(ram, delays, seed).unwrap());
        let medium = Arc::new(StrictDevice { inner, demands: DEMANDS });
        let options = BdevOptions::new(Clock::start(), seed);
        let device = Bdev::new("counter", medium, options).unwrap();
        let descriptor = device.open(Claim::WriteOnce, "test").unwrap();
        let bounce = BounceBufferAllocator::new(&regions, 4096, 1).unwrap();
        let shaped = AdaptedDevice::new(&device, descriptor, bounce, Default::default()).unwrap();
        assert!(shaped.limits().operations.has(Operation::CompareAndWrite));
        let mut counters: Vec<CompareAndWriteCounter> = (0..3)
            .map(|index| CompareAndWriteCounter {
                channel: shaped.channel().unwrap(),
                memory: memory.slice(index * 1024, 1024).unwrap(),
                seen: 0,
                done: 0,
                late: 0,
                asked: false,
            })
            .collect();
        let (mut random, mut now) = (Random::new(seed), Instant::default());
        for _ in 0..6_000 {
            now = now.after(Span::from_us(random.below(10)));
            let index = usize::try_from(random.below(3)).unwrap();
            counters[index].poll_and_swap(&regions, now);
        }
        let sum = |of: fn(&CompareAndWriteCounter) -> u32| counters.iter().map(of).sum::<u32>();
        let (done, late) = (sum(|one| one.done), sum(|one| one.late));
        assert!(done > 50 && late > 5, "seed {seed}: {done} done, {late} late");
        let under_way = sum(|one| u32::from(one.asked));
        let most = counters.iter().map(|one| one.seen).max().unwrap();
        assert!(most <= done + under_way + 1, "seed {seed}: {most} seen, {done} done");
        drop(counters);
        let mut plain = shaped.channel().unwrap();
        let segment = memory.slice(8192, 512).unwrap();
        let mut completions = CompletionBatch::with_capacity(1);
        assert_eq!(plain.submit(now, &[request(Operation::Read)], &[segment]), 1);
        let later = now.after(Span::from_secs(1));
        while plain.poll(later, &mut completions) == 0 {}
        let held = regions.load_u32(segment).unwrap();
        assert!((done..=done + under_way).contains(&held), "seed {seed}: {held} of {done}");
    }
}
