//! A device that is removed leaves nothing behind. Alone in its process, since it counts what that
//! has open.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, IoStatus, Operation, Request, Segment, Span, WakeSource,
};
use tenmil_block::{Bdev, BdevDescriptor, BdevEvent, BdevOptions, Claim, Opener, QueueMap};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::named_thread::NamedThread;
use tenmil_linux::process_stats::ProcessStats;
use tenmil_linux::{Clock, Sleeper};

/// Descriptors and threads of this process, and regions of memory.
fn count_process_resources(regions: &RegionTable) -> (usize, usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    (descriptors, threads, regions.region_count())
}

/// How many times each device comes and is removed.
const ROUNDS: usize = 5;
/// What an allocator may keep more of from one round to another.
const SLACK_BYTES: u64 = 4 << 20;
/// How long it may take until what has ended is listed no more.
const SETTLING_MAX: Span = Span::from_secs(5);

fn read_request(token: u64) -> Request {
    Request {
        token,
        lba: token % 64,
        operand: 0,
        segment_first: 0,
        blocks: 1,
        segment_count: 1,
        metadata_count: 0,
        operation: Operation::Read,
        flags: tenmil_base::RequestFlags::NONE,
    }
}

/// Reads until the device has gone, asleep whenever it may be; then what it was answered last.
fn read_until_removed(
    descriptor: Arc<BdevDescriptor>,
    segment: Segment,
) -> impl FnOnce(&tenmil_linux::StopFlag) -> Vec<IoStatus> {
    let mut channel = descriptor.channel().unwrap();
    move |_| {
        let (clock, mut sleeper) = (Clock::on_kernel_clock(), Sleeper::new().unwrap());
        if let WakeSource::Descriptor(descriptor) = channel.wake_source() {
            sleeper.sources().add_source(descriptor, 0).unwrap();
        }
        let mut completions = CompletionBatch::with_capacity(64);
        let (mut token, mut in_flight, mut bad) = (0, 0, Vec::new());
        while !bad.contains(&IoStatus::NO_DEVICE) {
            if in_flight < 8 {
                let taken = channel.submit(clock.now(), &[read_request(token)], &[segment]);
                (token, in_flight) = (token + taken as u64, in_flight + taken);
            }
            channel.flush_submissions();
            in_flight -= channel.poll(clock.now(), &mut completions);
            bad.extend(
                completions
                    .drain()
                    .map(|completion| completion.status)
                    .filter(|end| !end.is_success()),
            );
            if in_flight == 8 && !channel.arm() {
                sleeper.sleep_until_ready(Span::from_secs(10), &mut Vec::new());
            }
            channel.disarm();
        }
        while in_flight > 0 {
            in_flight -= channel.poll(clock.now(), &mut completions);
            bad.extend(completions.drain().map(|completion| completion.status));
        }
        bad
    }
}

#[test]
fn removed_device_closes_its_resources_within_a_second() {
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(32);
    let memory =
        regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
    let segment = memory.slice(0, 512).unwrap();
    let clock = Clock::on_kernel_clock();
    let kinds = [
        ("auto", QueueMap::default()),
        ("auto", QueueMap::with_default_contexts(1)),
        ("threads", QueueMap::default()),
        ("threads", QueueMap::with_default_contexts(1)),
    ];
    let mut resident = 0;
    for (round, (engine, map)) in (0..ROUNDS).flat_map(|round| kinds.map(|kind| (round, kind))) {
        // What the process has open from the first time on: a clock, a pool.
        let before = count_process_resources(&regions);
        let uri = format!("file:{}?size=64k&engine={engine}", directory.path().join("x").display());
        let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil_drivers::KINDS };
        let opened = opener.open(&uri.parse().unwrap()).unwrap();
        let options = BdevOptions { map, channels_max: 2, ..BdevOptions::new(clock, 1) };
        let device = Bdev::new("file0", opened.medium, options).unwrap();
        let descriptor = Arc::new(device.open(Claim::Exclusive, "readers").unwrap());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                NamedThread::spawn("reader", None, read_until_removed(descriptor.clone(), segment))
                    .unwrap()
            })
            .collect();
        while device.statistics().operation_stats(Operation::Read).count < 5_000 {}
        device.remove();
        let began = clock.now();
        while device.open_channel_count() > 0 {
            assert!(clock.now().since(began) < Span::from_secs(1), "{engine} {map:?}");
        }
        for ended in threads.into_iter().map(NamedThread::join) {
            let known = [IoStatus::SUCCESS, IoStatus::ABORTED_BY_HOST, IoStatus::NO_DEVICE];
            assert!(ended.iter().all(|status| known.contains(status)), "{ended:?}");
        }
        assert_eq!(descriptor.next_event(), Some(BdevEvent::Removed));
        drop((descriptor, device));
        // The kernel lists a thread for a moment after it was waited for.
        let ended = clock.now();
        while count_process_resources(&regions) != before {
            let (now, is_late) =
                (count_process_resources(&regions), clock.now().since(ended) > SETTLING_MAX);
            assert!(!is_late, "{engine} {map:?}: {now:?}, expected {before:?}");
        }
        let now = ProcessStats::read().resident_bytes.unwrap();
        if round == 0 {
            resident = now;
        }
        assert!(now <= resident + SLACK_BYTES, "{engine} {map:?}: {now} bytes of {resident}");
    }
}
