//! Channels on sleeping threads, over files: the kernel determines the order of completions.

use std::path::Path;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, Operation, Request, RequestFlags, Segment,
    Span, WakeSource,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::named_thread::NamedThread;
use tenmil_linux::{Clock, Sleeper};

use tenmil_block::{Bdev, BdevDescriptor, BdevOptions, ChannelMode, Claim, Opener, QueueMap};

/// One thread: keeps `depth` reads in flight, sleeps whenever it may, and returns the number of
/// completions.
struct SleepingReader {
    channel: Box<dyn IoChannel>,
    segment: Segment,
    sleeper: Sleeper,
    clock: Clock,
}

const ROUNDS: u64 = 1_500;

impl SleepingReader {
    fn new(descriptor: &BdevDescriptor, segment: Segment, clock: Clock) -> Self {
        let channel = descriptor.channel().unwrap();
        let sleeper = Sleeper::new().unwrap();
        match channel.wake_source() {
            WakeSource::Descriptor(descriptor) => {
                sleeper.sources().add_source(descriptor, 0).unwrap()
            }
            source => panic!("nothing to sleep on but {source:?}"),
        }
        Self { channel, segment, sleeper, clock }
    }

    fn run(&mut self, depth: u64) -> u64 {
        let (mut sent, mut completed) = (0, 0);
        let mut completions = CompletionBatch::with_capacity(8);
        while completed < ROUNDS {
            let now = self.clock.now();
            while sent < ROUNDS && sent - completed < depth {
                let read = request(Operation::Read, sent, sent % 64);
                let read = Request { segment_count: 1, ..read };
                if self.channel.submit(now, &[read], &[self.segment]) == 0 {
                    break;
                }
                sent += 1;
            }
            self.channel.flush_submissions();
            let count = self.channel.poll(now, &mut completions);
            assert!(completions.drain().all(|completion| completion.status.is_success()));
            completed += count as u64;
            if count == 0 {
                self.sleep();
            }
        }
        completed
    }

    /// Sleeps until it is woken. A sleep of one second means a lost wake-up.
    fn sleep(&mut self) {
        if !self.channel.arm() && self.channel.wake_at() == Instant::NEVER {
            let began = self.clock.now();
            self.sleeper.sleep_until_ready(Span::from_secs(5), &mut Vec::new());
            let slept = self.clock.now().since(began);
            assert!(slept < Span::from_secs(4), "the wake-up was lost");
        }
        self.channel.disarm();
    }
}

fn shared_context_device(
    file: &Path,
    regions: &RegionTable,
    engine: &str,
    change: impl FnOnce(&mut BdevOptions),
) -> Bdev {
    let uri = format!("file:{}?size=64k&engine={engine}", file.display());
    let clock = Clock::on_kernel_clock();
    let opener = Opener { regions, clock, seed: 1, kinds: crate::KINDS };
    let medium = opener.open(&uri.parse().unwrap()).unwrap().medium;
    let mut options = BdevOptions::new(clock, 1);
    change(&mut options);
    Bdev::new("file0", medium, options).unwrap()
}

#[test]
fn threads_sharing_a_context_are_woken_for_completions_and_space() {
    let directory = tempfile::tempdir().unwrap();
    for (engine, mode, threads, depth, tags) in [
        ("threads", ChannelMode::Mq, 2, 4, 64),
        ("threads", ChannelMode::Mq, 3, 1, 1),
        ("auto", ChannelMode::Mq, 3, 2, 2),
        ("auto", ChannelMode::Mq, 2, 8, 3),
        ("threads", ChannelMode::SingleQueue, 2, 2, 1),
    ] {
        let regions = RegionTable::new(8);
        let memory =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let segment = memory.slice(0, 512).unwrap();
        let device =
            shared_context_device(&directory.path().join("disk"), &regions, engine, |options| {
                (options.map, options.channels_max) = (QueueMap::with_default_contexts(1), threads);
                (options.mode, options.depth) = (mode, tags);
            });
        let descriptor = Arc::new(device.open(Claim::Exclusive, "readers").unwrap());
        let running: Vec<_> = (0..threads)
            .map(|_| {
                let mut reader =
                    SleepingReader::new(&descriptor, segment, Clock::on_kernel_clock());
                NamedThread::spawn("reader", None, move |_: &_| reader.run(depth)).unwrap()
            })
            .collect();
        let completed: u64 = running.into_iter().map(NamedThread::join).sum();
        assert_eq!(completed, ROUNDS * u64::from(threads), "{engine} {mode:?} {tags}");
        assert_eq!(device.statistics().operation_stats(Operation::Read).count, completed);
        assert_eq!(device.open_channel_count(), 0);
    }
}

pub(super) fn request(operation: Operation, token: u64, lba: u64) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks: u32::from(operation != Operation::Flush),
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}
