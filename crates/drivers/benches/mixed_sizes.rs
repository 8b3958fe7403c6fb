//! What small reads pay for large writes beside them.
//!
//! `cargo bench -p tenmil-drivers --bench readers`
//!
//! Sixteen synchronous readers of 4 KiB stand beside one writer of 1 MiB at depth 32, on the model of
//! a device whose commands are at most 128 KiB, with 64 tags in a hardware context. With a read map the readers have
//! hardware contexts of their own; without one all seventeen share one context and its 64 tags.
//! Time is simulated, so that what is printed is the same on every machine.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Histogram, Instant, IoChannel, Limits, Operation, Random,
    Request, Segment, Span,
};
use tenmil_block::{
    AdaptationOptions, AdaptedDevice, Bdev, BdevOptions, BounceBufferAllocator, Claim, QueueMap,
};
use tenmil_dma::RegionTable;
use tenmil_drivers::{ModelProfile, ModeledLatencyDevice, NullDevice};
use tenmil_linux::Clock;

const READERS: usize = 16;
const READ_BLOCKS: u32 = 8;
const WRITE_BLOCKS: u32 = 2048;
const WRITER_DEPTH: usize = 32;
/// Tags of a hardware context, and blocks in the largest command.
const TAGS: u32 = 64;
const COMMAND_BLOCKS: u32 = 256;
const READS: u64 = 1_000_000;
const BLOCK_COUNT: u64 = 1 << 31;

/// A model whose largest command is smaller.
struct SmallTransferLimitModel(ModeledLatencyDevice);

/// One thread's channel and what it has in flight.
struct ChannelLoad {
    channel: Box<dyn IoChannel>,
    operation: Operation,
    blocks: u32,
    random: Random,
    sent: Vec<Instant>,
    /// Drawn and not yet taken.
    waiting: Vec<Request>,
    completions: CompletionBatch,
    latency: Histogram,
}

fn main() {
    let profile = ModelProfile::find_by_name("p4600").expect("a known model");
    println!("{}", profile.describe());
    println!("{READERS} synchronous readers of 4 KiB, one writer of 1 MiB at depth {WRITER_DEPTH}");
    println!("contexts of {TAGS} tags, commands of at most 128 KiB; {READS} reads each\n");
    println!(
        "{:<42} {:>9} {:>9} {:>9} {:>9}",
        "reads, in microseconds", "p50", "p99", "p99.99", "max"
    );
    let apart = QueueMap { default: 1, read: 17, poll: 0 };
    let alone = measure_read_latencies(profile, apart, false);
    print_result("alone", &alone);
    let own = measure_read_latencies(profile, apart, true);
    print_result("beside the writer, contexts of their own", &own);
    let shared = measure_read_latencies(profile, QueueMap::with_default_contexts(1), true);
    print_result("beside the writer, one shared context", &shared);
    let p = |of: &Histogram| ns_to_us(of.percentile(999_900));
    println!(
        "\np99.99 with contexts of their own: {:.1} times that alone (aim: at most 4)",
        p(&own) / p(&alone)
    );
    println!("p99.99 with one shared context:    {:.1} times that alone", p(&shared) / p(&alone));
}

/// Latencies of the reads.
fn measure_read_latencies(
    profile: &'static ModelProfile,
    map: QueueMap,
    writes: bool,
) -> Histogram {
    let null = NullDevice::new(512, BLOCK_COUNT).expect("a null medium");
    let medium = SmallTransferLimitModel(ModeledLatencyDevice::new(Arc::new(null), profile, 1));
    let options =
        BdevOptions { map, channels_max: 17, depth: TAGS, ..BdevOptions::new(Clock::start(), 1) };
    let device = Bdev::new("model", Arc::new(medium), options).expect("a device");
    let open = device.open(Claim::WriteOnce, "bench").expect("no other claim");
    let bounce = BounceBufferAllocator::new(&RegionTable::new(64), 4096, 1).expect("a buffer");
    let open =
        AdaptedDevice::new(&device, open, bounce, AdaptationOptions::default()).expect("it fits");
    let load = |index: usize| {
        let channel = open.channel().expect("a channel for each");
        match index {
            0 => ChannelLoad::new(channel, Operation::Write, WRITE_BLOCKS, WRITER_DEPTH, index),
            _ => ChannelLoad::new(channel, Operation::Read, READ_BLOCKS, 1, index),
        }
    };
    let mut loads: Vec<ChannelLoad> = (0..=READERS).map(load).collect();
    let mut now = Instant::default();
    let mut done = 0;
    let first = usize::from(!writes);
    loads[first..].iter_mut().for_each(|load| load.submit_first(now));
    while done < READS {
        loads[first..].iter_mut().for_each(|load| load.poll_and_submit(now));
        done = loads[1..].iter().map(|load| load.latency.count()).sum();
        // Time of the next completion; a microsecond later while one is being delivered.
        let next = loads[first..].iter().map(|load| load.channel.wake_at());
        let next = next.min().filter(|next| *next > now && *next != Instant::NEVER);
        now = next.unwrap_or(now.after(Span::from_us(1)));
    }
    let mut all = Histogram::new();
    loads[1..].iter().for_each(|load| all.merge(&load.latency));
    all
}

fn print_result(what: &str, reads: &Histogram) {
    let at = |per_million| ns_to_us(reads.percentile(per_million));
    let (p50, p99, p9999) = (at(500_000), at(990_000), at(999_900));
    println!("{what:<42} {p50:>9.1} {p99:>9.1} {p9999:>9.1} {:>9.1}", ns_to_us(reads.max()));
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn ns_to_us(ns: u64) -> f64 {
    ns as f64 / 1_000.0
}

impl ChannelLoad {
    fn new(
        channel: Box<dyn IoChannel>,
        operation: Operation,
        blocks: u32,
        depth: usize,
        seed: usize,
    ) -> Self {
        let segment_count = 1;
        let request =
            |token| Request { token, blocks, operation, segment_count, ..Request::PLACEHOLDER };
        Self {
            channel,
            operation,
            blocks,
            random: Random::new(seed as u64 + 1),
            sent: vec![Instant::default(); depth],
            waiting: (0..depth as u64).map(request).collect(),
            completions: CompletionBatch::with_capacity(depth),
            latency: Histogram::new(),
        }
    }

    /// Sends what it has for the first time.
    fn submit_first(&mut self, now: Instant) {
        for request in &mut self.waiting {
            request.lba = self.random.below(BLOCK_COUNT / 2048) * 2048;
        }
        self.sent.fill(now);
        self.submit(now);
    }

    /// Takes what has ended, and sends as much again.
    fn poll_and_submit(&mut self, now: Instant) {
        self.channel.poll(now, &mut self.completions);
        let Self { completions, waiting, sent, latency, random, .. } = self;
        for completion in completions.drain() {
            assert!(completion.status.is_success(), "{completion:?}");
            let index = usize::try_from(completion.token).expect("a small number");
            latency.record(now.since(sent[index]).ns);
            sent[index] = now;
            let lba = random.below(BLOCK_COUNT / 2048) * 2048;
            let (token, blocks, operation) = (completion.token, self.blocks, self.operation);
            let request = Request { token, lba, blocks, operation, ..Request::PLACEHOLDER };
            waiting.push(Request { segment_count: 1, ..request });
        }
        self.submit(now);
    }

    fn submit(&mut self, now: Instant) {
        let segment = Segment { len_bytes: self.blocks * 512, ..Segment::default() };
        let taken = self.channel.submit(now, &self.waiting, &[segment]);
        self.waiting.drain(..taken);
        self.channel.flush_submissions();
    }
}

impl BlockDevice for SmallTransferLimitModel {
    fn limits(&self) -> Limits {
        Limits { request_blocks_max: COMMAND_BLOCKS, ..self.0.limits() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        self.0.channel()
    }
}
