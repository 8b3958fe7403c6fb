//! Compare-and-write through all layers, by two threads.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, IoChannel, IoStatus, Memory, Operation, Request, Segment,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Clock;
use tenmil_linux::named_thread::{NamedThread, yield_cpu};

use super::adapt::strict_device::{DEMANDS, StrictDevice};
use super::threads::request;
use crate::RamDevice;
use tenmil_block::{
    AdaptedDevice, Bdev, BdevOptions, BounceBufferAllocator, ChannelMode, Claim, PER_CHANNEL,
    QueueMap,
};

/// Counts in the first word of a block: each step reads it and submits a compare-and-write of the next
/// number.
struct CompareAndWriteClient {
    channel: Box<dyn IoChannel>,
    regions: RegionTable,
    /// Two blocks: the expected and the new one.
    memory: Segment,
    clock: Clock,
}

const BLOCK: u32 = 512;
const STEPS: u32 = 150;

impl CompareAndWriteClient {
    fn run_request(&mut self, operation: Operation) -> IoStatus {
        let parts =
            [self.memory.slice(0, BLOCK).unwrap(), self.memory.slice(BLOCK, BLOCK).unwrap()];
        let segment_count = if operation == Operation::Read { 1 } else { 2 };
        let request = Request { segment_count, ..request(operation, 1, 40) };
        let mut completions = CompletionBatch::with_capacity(1);
        while self.channel.submit(self.clock.now(), &[request], &parts) == 0 {
            self.channel.poll(self.clock.now(), &mut completions);
        }
        while completions.as_slice().is_empty() {
            self.channel.flush_submissions();
            if self.channel.poll(self.clock.now(), &mut completions) == 0 {
                yield_cpu();
            }
        }
        completions.as_slice()[0].status
    }

    fn count_lost_swaps(&mut self) -> u32 {
        let mut lost = 0;
        for _ in 0..STEPS {
            loop {
                assert_eq!(self.run_request(Operation::Read), IoStatus::SUCCESS);
                let word = self.memory.slice(0, 4).unwrap();
                let next = self.memory.slice(BLOCK, 4).unwrap();
                let value = self.regions.load_u32(word).unwrap();
                self.regions.store_u32(next, value + 1).unwrap();
                match self.run_request(Operation::CompareAndWrite) {
                    IoStatus::SUCCESS => break,
                    status => assert_eq!(status, IoStatus::COMPARE_FAILURE),
                }
                lost += 1;
            }
        }
        lost
    }
}

#[test]
fn concurrent_compare_and_write_increments_are_not_lost() {
    for (map, mode) in [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap { default: 2, read: 2, poll: 0 }, ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ] {
        let regions = RegionTable::new(16);
        let ram = RamDevice::new(&regions, BLOCK, 2_048).unwrap();
        let medium = StrictDevice { inner: Arc::new(ram), demands: DEMANDS };
        let memory = BounceBufferAllocator::new(&regions, 4096, 2).unwrap();
        let options = BdevOptions::new(Clock::on_kernel_clock(), 1);
        let options = BdevOptions { map, mode, channels_max: 3, ..options };
        let device = Bdev::new("harsh0", Arc::new(medium), options).unwrap();
        let descriptor = device.open(Claim::Exclusive, "counters").unwrap();
        let descriptor =
            AdaptedDevice::new(&device, descriptor, memory, DEMANDS.adapt_options()).unwrap();
        assert!(descriptor.limits().operations.has(Operation::CompareAndWrite));
        let clock = Clock::on_kernel_clock();
        let counter = || CompareAndWriteClient {
            channel: descriptor.channel().unwrap(),
            regions: regions.clone(),
            memory: regions
                .add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap())
                .unwrap(),
            clock,
        };
        let threads = [counter(), counter()].map(|mut counter| {
            NamedThread::spawn("counter", None, move |_: &_| counter.count_lost_swaps()).unwrap()
        });
        let lost: u32 = threads.into_iter().map(NamedThread::join).sum();
        let mut reader = counter();
        assert_eq!(reader.run_request(Operation::Read), IoStatus::SUCCESS);
        let word = reader.memory.slice(0, 4).unwrap();
        assert_eq!(regions.load_u32(word).unwrap(), 2 * STEPS, "{map:?} {mode:?}, {lost} lost");
    }
}
