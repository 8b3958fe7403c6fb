//! Devices that come and go leave nothing behind: no descriptors, no threads, no regions, no memory.
//!
//! One test, because what is counted is the process's.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Operation, Random, Request,
    RequestFlags, Segment, Span,
};
use tenmil_block::{Bdev, BdevOptions, ChannelMode, Claim, OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::process_stats::ProcessStats;

/// Every kind that stands on nothing, and stacks of all that stand on others.
const STACKS: [&str; 9] = [
    "null:?size=4m",
    "ram:4m",
    "model:p4600?size=4m",
    "file:DISK0?size=4m",
    "file:DISK0?size=4m&engine=threads&direct=no",
    "delay:[file:DISK0?size=4m]?read=80us&read-p99=1ms&write=20us",
    "fault:[stripe:[file:DISK0?size=4m],[ram:4m]]?rule=hang:write/7;drop:read+20/9;corrupt:any~9",
    "stripe:[delay:[ram:2m]?read=5us],[fault:[split:[file:DISK0?size=4m]?part=1&parts=2]],[ram:2m]",
    "split:[model:[stripe:[file:DISK0?size=2m],[file:DISK1?size=2m]]?device=p4800x]?offset=1m",
];

const ROUNDS: usize = 50;
/// What the process may have more of at the end: what its allocator keeps, not what a device had.
const SLACK_BYTES: u64 = 4 << 20;

/// What a process has that devices take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessResources {
    descriptors: u64,
    threads: usize,
    regions: usize,
}

impl ProcessResources {
    fn current(regions: &RegionTable) -> Self {
        let descriptors = ProcessStats::read().descriptors.unwrap();
        Self { descriptors, threads: thread_count(), regions: regions.region_count() }
    }

    /// The same, once it is what is expected or a second is over: the kernel lists a thread for a
    /// moment after it has been joined.
    fn wait_until_stable(regions: &RegionTable, clock: Clock, expected: Self) -> Self {
        let end = clock.now().after(Span::from_secs(1));
        loop {
            let found = Self::current(regions);
            if found == expected || clock.now() > end {
                return found;
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}

/// The threads of this process, but for those that the kernel keeps for its rings: they stay for
/// some seconds after the last one.
fn thread_count() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-")).count()
}

#[test]
fn opening_and_closing_devices_leaks_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().display().to_string();
    let regions = RegionTable::new(24);
    let memory = regions.allocate_region(1 << 20).unwrap();
    let memory = memory.segment();
    let clock = Clock::start();
    let before = ProcessResources::current(&regions);
    for uri in STACKS {
        let uri = uri.replace("DISK", &format!("{path}/disk"));
        let mut resident = 0;
        for round in 0..ROUNDS {
            open_load_and_close(&uri, &regions, clock, memory, round as u64);
            assert_eq!(
                ProcessResources::wait_until_stable(&regions, clock, before),
                before,
                "{uri}, round {round}"
            );
            let now = ProcessStats::read().resident_bytes.unwrap();
            // The first rounds fill what the allocator keeps.
            if round < 5 {
                resident = now;
            }
            assert!(now < resident + SLACK_BYTES, "{uri}, round {round}: {resident} and {now}");
        }
    }
}

/// Opens a device, loads it, and takes it away in one of three ways while requests are under way.
fn open_load_and_close(uri: &str, regions: &RegionTable, clock: Clock, memory: Segment, seed: u64) {
    let opener = Opener { regions, clock, seed, kinds: tenmil_drivers::KINDS };
    let opened = opener.open(&uri.parse().unwrap()).unwrap();
    match seed % 3 {
        0 => drop_channels(&opened, memory, seed),
        1 => remove_while_loaded(&opened, clock, memory, ChannelMode::Mq),
        _ => remove_while_loaded(&opened, clock, memory, ChannelMode::SingleQueue),
    }
}

/// Drops channels with whatever they have under way, and the handles last.
fn drop_channels(opened: &OpenedDevice, memory: Segment, seed: u64) {
    let handles = opened.handles.clone();
    let mut random = Random::new(seed);
    let mut channels: Vec<_> = (0..2).map(|_| opened.medium.channel().unwrap()).collect();
    for channel in &mut channels {
        leave_requests_in_flight(&mut **channel, memory, &mut random, 200);
    }
    drop(channels);
    for handle in handles {
        if let Some(handle) = handle.downcast::<tenmil_drivers::FaultControl>() {
            assert_eq!(handle.hanging_count(), 0, "what hung has gone with its channel");
        }
    }
}

/// Removes a device under load: everything under way is answered soon, and nothing is after that.
fn remove_while_loaded(opened: &OpenedDevice, clock: Clock, memory: Segment, mode: ChannelMode) {
    let medium: Arc<dyn BlockDevice> = Arc::clone(&opened.medium);
    let options = BdevOptions { mode, ..BdevOptions::new(clock, 1) };
    let device = Bdev::new("disk", medium, options).unwrap();
    let descriptor = device.open(Claim::WriteOnce, "test").unwrap();
    let mut random = Random::new(2);
    let mut channel = BlockDevice::channel(&descriptor).unwrap();
    let mut owed = leave_requests_in_flight(&mut *channel, memory, &mut random, 200);
    device.remove();
    let removed = clock.now();
    let mut completions = CompletionBatch::with_capacity(64);
    // A channel hears of the removal at its next turn, if it owes anything or not.
    loop {
        owed -= channel.poll(Instant { ns: 1 << 40 }, &mut completions);
        for completion in completions.drain() {
            let known = [
                IoStatus::SUCCESS,
                IoStatus::ABORTED_BY_HOST,
                IoStatus::NO_DEVICE,
                IoStatus::UNRECOVERED_READ,
            ];
            assert!(known.contains(&completion.status), "{completion:?}");
        }
        if owed == 0 && device.open_channel_count() == 0 {
            break;
        }
        assert!(
            clock.now().since(removed) < Span::from_secs(1),
            "{mode:?} over {}: {owed} are not answered within a second",
            opened.description
        );
    }
}

/// Keeps a channel busy for some turns and leaves it so. Returns how many it owes.
fn leave_requests_in_flight(
    channel: &mut dyn IoChannel,
    memory: Segment,
    random: &mut Random,
    turns: u64,
) -> usize {
    let limits = channel.limits().clone();
    let mut completions = CompletionBatch::with_capacity(64);
    let (mut now, mut owed) = (Instant { ns: 1 }, 0);
    for _ in 0..turns {
        let operations = [Operation::Read, Operation::Write, Operation::Flush];
        let operation = operations[usize::try_from(random.below(3)).unwrap()];
        let blocks = if operation == Operation::Flush { 0 } else { 8 };
        let request = Request {
            token: 1,
            lba: if blocks == 0 { 0 } else { random.below(limits.block_count - 8) },
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: u16::from(blocks > 0),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let memory = memory.slice(0, 8 * limits.block_size).unwrap();
        if owed < 64 {
            owed += channel.submit(now, &[request; 3], &[memory]);
        }
        channel.flush_submissions();
        owed -= channel.poll(now, &mut completions);
        completions.clear();
        now.ns += 1_000;
    }
    // What was submitted last is certainly under way.
    owed
}
