//! How long a snapshot takes of a volume of 1 TiB to which others write.
//!
//! `cargo bench -p tenmil-drivers --bench snapshots`
//!
//! The store lies in a sparse file in `TMPDIR`. Sixteen random writes of 4 KiB are in flight all
//! the time. A snapshot is timed from the call until it survives a loss of power, which takes flushes of
//! that file: on a memory file system what is left is the store itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tenmil_base::{
    CompletionBatch, IoChannel, Operation, Random, Request, RequestFlags, Segment, Span,
};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_drivers::pool::{self, OpenPool, VolumeOp, VolumeRef};
use tenmil_linux::{Clock, NamedThread};

const BLOCKS: u64 = 1 << 28;
const SNAPSHOTS: u32 = 30;
const DEPTH: usize = 16;

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let regions = RegionTable::new(64);
    let clock = Clock::start();
    let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil_drivers::KINDS };
    let device: Uri =
        format!("file:{}/pool?size=2t", folder.path().display()).parse().expect("a name");
    pool::create_pool(&opener, &device, "bench", false).expect("room for a pool");
    let place = VolumeRef::pool_on(&device);
    let open = OpenPool::open(&opener, &place).expect("a pool");
    let (name, unit, uuid) = ("v".into(), 16, 1);
    let change = VolumeOp::Create { name, blocks: BLOCKS, unit, uuid, checksums: false };
    open.execute_volume_op(change).expect("a volume");
    let volume = opener.open(&place.uri_of_other_volume("v")).expect("a volume");
    let (is_over, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (ends, fails) = (Arc::clone(&is_over), Arc::clone(&failed));
    let memory = regions.allocate_region(4096).expect("memory");
    let write = move |_: &_| {
        let mut channel = volume.medium.channel().expect("a channel");
        let segment = Segment { len_bytes: 4096, ..memory.segment() };
        write_until(&mut *channel, clock, segment, &ends, &fails)
    };
    let writer = NamedThread::spawn("writer", None, write).expect("a thread");
    let snapshot = |number| {
        tenmil_linux::named_thread::sleep(Span::from_ms(100));
        let (volume, name) = ("v".into(), format!("s{number}"));
        let begun = clock.now();
        open.execute_volume_op(VolumeOp::Snapshot { volume, name, uuid: 1 }).expect("a snapshot");
        clock.now().since(begun).ns
    };
    let mut times: Vec<u64> = (0..SNAPSHOTS).map(snapshot).collect();
    is_over.store(true, Ordering::Relaxed);
    let written = writer.join();
    times.sort_unstable();
    let ms = |at: usize| times[at] as f64 / 1e6;
    println!(
        "{SNAPSHOTS} snapshots: {:.1} ms ({:.1}–{:.1}); {written} writes beside them, {} failed",
        ms(times.len() / 2),
        ms(0),
        ms(times.len() - 1),
        failed.load(Ordering::Relaxed)
    );
}

/// Keeps random writes in flight, and returns how many ended.
fn write_until(
    channel: &mut dyn IoChannel,
    clock: Clock,
    segment: Segment,
    is_over: &AtomicBool,
    failed: &AtomicU64,
) -> u64 {
    let mut random = Random::new(1);
    let mut completions = CompletionBatch::with_capacity(DEPTH);
    let (mut in_flight, mut ended) = (0, 0);
    while in_flight > 0 || !is_over.load(Ordering::Relaxed) {
        while in_flight < DEPTH && !is_over.load(Ordering::Relaxed) {
            let (operation, flags) = (Operation::Write, RequestFlags::NONE);
            let lba = random.below(BLOCKS);
            let (blocks, segment_count) = (1, 1);
            let write =
                Request { lba, blocks, segment_count, operation, flags, ..Request::PLACEHOLDER };
            if channel.submit(clock.now(), &[write], &[segment]) == 0 {
                break;
            }
            in_flight += 1;
        }
        channel.flush_submissions();
        channel.poll(clock.now(), &mut completions);
        for completion in completions.drain() {
            in_flight -= 1;
            ended += 1;
            failed.fetch_add(u64::from(!completion.status.is_success()), Ordering::Relaxed);
        }
        tenmil_linux::named_thread::yield_cpu();
    }
    ended
}
