//! Reads without the pool thread: their channel has the mapping.

use std::sync::Arc;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Random,
    Request, RequestFlags, Segment,
};
use tenmil_dma::RegionTable;

use super::super::{OpenPool, VolumeOp, VolumeRef, create_pool};
use crate::RamDevice;
use crate::conformance::PartialAcceptDevice;
use tenmil_base::Error;
use tenmil_block::{DeviceType, OpenedDevice, Opener, uri::Uri};

const PAGE: u32 = 4096;
const BLOCKS: u64 = 64;

/// Opens `scarce:`, memory that accepts few requests at a time.
struct PartialAcceptType(Arc<PartialAcceptDevice>);

impl DeviceType for PartialAcceptType {
    fn open(&self, _opener: &Opener<'_>, _uri: &Uri) -> Result<OpenedDevice, Error> {
        Ok(OpenedDevice::without_existing_data(self.0.clone(), "memory that takes little"))
    }
}

/// A volume and its pool; its blocks are written, each with its number, and the channel has all mappings.
struct CachedReadFixture {
    backend: Box<dyn IoChannel>,
    memory: tenmil_dma::Region,
    open: Arc<OpenPool>,
}

fn fixture(regions: &RegionTable, seed: u64) -> CachedReadFixture {
    let ram = Arc::new(RamDevice::new(regions, 512, 8 * 2048).unwrap());
    let scarce = PartialAcceptType(Arc::new(PartialAcceptDevice::new(ram, seed)));
    let kinds = &crate::tests::device_types_with(&[("scarce", &scarce)]);
    let opener = Opener { regions, clock: tenmil_linux::Clock::start(), seed, kinds };
    let device: Uri = "scarce:".parse().unwrap();
    create_pool(&opener, &device, "tests", false).unwrap();
    let place = VolumeRef::pool_on(&device);
    let open = OpenPool::open(&opener, &place).unwrap();
    let name = "v".into();
    let change = VolumeOp::Create { name, blocks: BLOCKS, unit: 4, uuid: 1, checksums: false };
    open.execute_volume_op(change).unwrap();
    let opened = opener.open(&place.uri_of_other_volume("v")).unwrap();
    let memory = regions.allocate_region(1 << 20).unwrap();
    let mut backend = opened.medium.channel().unwrap();
    for block in 0..BLOCKS {
        let page = memory.segment().slice(0, PAGE).unwrap();
        regions.fill(page, u8::try_from(block + 1).unwrap()).unwrap();
        let requests = [read_request(Operation::Write, block, 0..1)];
        assert!(run_requests(&mut *backend, &requests, &[page])[0].1.is_success());
        // The first read goes through the pool thread, which is how a channel learns mappings.
        let requests = [read_request(Operation::Read, block, 0..1)];
        assert!(run_requests(&mut *backend, &requests, &[page])[0].1.is_success());
    }
    CachedReadFixture { backend, memory, open }
}

fn read_request(operation: Operation, lba: u64, segments: std::ops::Range<u32>) -> Request {
    let segment_count = u16::try_from(segments.len()).unwrap();
    Request {
        token: 1_000 + lba,
        lba,
        blocks: 1,
        segment_first: segments.start,
        segment_count,
        operation,
        flags: RequestFlags::NONE,
        ..Request::PLACEHOLDER
    }
}

/// Tokens and outcomes, ordered by token. The segments are invalid after submission.
fn run_requests(
    backend: &mut dyn IoChannel,
    requests: &[Request],
    segments: &[Segment],
) -> Vec<(u64, IoStatus)> {
    let (mut completions, mut done, mut taken) = (CompletionBatch::with_capacity(5), Vec::new(), 0);
    for turn in 0..100_000 {
        let now = Instant { ns: turn };
        let leased = segments.to_vec();
        taken += backend.submit(now, &requests[taken..], &leased);
        backend.flush_submissions();
        backend.poll(now, &mut completions);
        done.extend(completions.drain().map(|completion| (completion.token, completion.status)));
        if done.len() == requests.len() {
            done.sort_unstable_by_key(|(token, _)| *token);
            return done;
        }
        tenmil_linux::named_thread::yield_cpu();
    }
    panic!("{} of {} are answered", done.len(), requests.len());
}

/// Results and statuses of a read with [`RequestFlags::HOLES`], and the first byte of each block that is
/// then in memory, where every byte was 0xee before.
fn read_with_holes(
    bench: &mut CachedReadFixture,
    regions: &RegionTable,
    lba: u64,
    blocks: u32,
) -> (u32, Vec<u8>) {
    let segment = bench.memory.segment().slice(0, blocks * PAGE).unwrap();
    regions.fill(segment, 0xee).unwrap();
    let flags = RequestFlags::HOLES;
    let read = Request { blocks, flags, ..read_request(Operation::Read, lba, 0..1) };
    let mut completions = CompletionBatch::with_capacity(1);
    assert_eq!(bench.backend.submit(Instant::default(), &[read], &[segment]), 1);
    while completions.is_empty() {
        bench.backend.flush_submissions();
        bench.backend.poll(Instant::default(), &mut completions);
        tenmil_linux::named_thread::yield_cpu();
    }
    let completion = completions.drain().next().unwrap();
    assert!(completion.status.is_success());
    let mut bytes = vec![0; (blocks * PAGE) as usize];
    regions.load(segment, &mut bytes).unwrap();
    (completion.result, bytes.chunks(PAGE as usize).map(|block| block[0]).collect())
}

#[test]
fn hole_is_reported_only_for_a_whole_request() {
    let regions = RegionTable::new(16);
    let mut bench = fixture(&regions, 0);
    let trim = Request { blocks: 4, ..read_request(Operation::Deallocate, 8, 0..0) };
    assert!(run_requests(&mut *bench.backend, &[trim], &[])[0].1.is_success());
    assert_eq!(read_with_holes(&mut bench, &regions, 8, 4), (IoCompletion::HOLE, vec![0xee; 4]));
    assert_eq!(read_with_holes(&mut bench, &regions, 6, 4), (0, vec![7, 8, 0, 0]));
    assert_eq!(read_with_holes(&mut bench, &regions, 10, 4), (0, vec![0, 0, 13, 14]));
    // From mappings that the channel has: the device below, which reports no holes, asserts that it
    // gets no such flag.
    assert_eq!(read_with_holes(&mut bench, &regions, 20, 1), (0, vec![21]));
    let page = bench.memory.segment().slice(0, PAGE).unwrap();
    let plain = read_request(Operation::Read, 8, 0..1);
    assert!(run_requests(&mut *bench.backend, &[plain], &[page])[0].1.is_success());
    let mut byte = [0xee];
    regions.load(page.slice(0, 1).unwrap(), &mut byte).unwrap();
    assert_eq!(byte, [0], "a read without the flag has zeroes");
}

#[test]
fn cached_reads_return_their_blocks_from_a_limited_device() {
    for seed in 0..8 {
        let regions = RegionTable::new(16);
        let CachedReadFixture { mut backend, memory, open } = fixture(&regions, seed);
        let mut random = Random::new(seed);
        for _ in 0..40 {
            regions.fill(memory.segment(), 0xee).unwrap();
            // Two segments each, in any order, after some that no request uses.
            let mut lbas: Vec<u64> = (0..BLOCKS).filter(|_| random.chance(1, 2)).collect();
            lbas.sort_by_cached_key(|_| random.next_u64());
            let mut segments = vec![Segment::default(); 3];
            let mut requests = Vec::new();
            for lba in lbas {
                let page =
                    memory.segment().slice(u32::try_from(lba).unwrap() * PAGE, PAGE).unwrap();
                let (first, cut) =
                    (segments.len(), 512 * u32::try_from(1 + random.below(7)).unwrap());
                segments.push(page.slice(0, cut).unwrap());
                segments.push(page.slice(cut, PAGE - cut).unwrap());
                let first = u32::try_from(first).unwrap();
                requests.push(read_request(Operation::Read, lba, first..first + 2));
            }
            let done = run_requests(&mut *backend, &requests, &segments);
            assert!(done.iter().all(|(_, status)| status.is_success()), "seed {seed}: {done:?}");
            requests.sort_unstable_by_key(|request| request.token);
            assert!(done.iter().map(|(token, _)| *token).eq(requests.iter().map(|one| one.token)));
            for block in 0..BLOCKS {
                let at = u32::try_from(block).unwrap() * PAGE;
                let mut bytes = vec![0; PAGE as usize];
                regions.load(memory.segment().slice(at, PAGE).unwrap(), &mut bytes).unwrap();
                let was_read = requests.iter().any(|request| request.lba == block);
                let expected = if was_read { u8::try_from(block + 1).unwrap() } else { 0xee };
                assert!(bytes.iter().all(|byte| *byte == expected), "seed {seed}, block {block}");
            }
            assert!(!open.shared.lock().has_foreground_io(), "no read is in progress");
        }
    }
}

#[test]
fn cached_read_with_invalid_memory_is_rejected() {
    let regions = RegionTable::new(16);
    let CachedReadFixture { mut backend, memory, open } = fixture(&regions, 3);
    let page = memory.segment().slice(0, PAGE).unwrap();
    // More small segments than a request may have.
    let mut segments = vec![page.slice(0, 512).unwrap(); 2_000];
    segments[0] = page;
    for _ in 0..50 {
        let none = read_request(Operation::Read, 0, 2_000..2_001);
        let short = read_request(Operation::Read, 1, 1..2);
        let long = Request { blocks: 1 << 20, ..read_request(Operation::Read, 2, 0..1) };
        let many = read_request(Operation::Read, 7, 0..2_000);
        let fine =
            (3..12).filter(|lba| *lba != 7).map(|lba| read_request(Operation::Read, lba, 0..1));
        let mut requests = vec![none, short, long];
        requests.extend(fine);
        requests.insert(7, many);
        let done = run_requests(&mut *backend, &requests, &segments);
        for (token, status) in done {
            let is_fine = !matches!(token - 1_000, 0 | 1 | 2 | 7);
            assert_eq!(status.is_success(), is_fine, "{token}: {status:?}");
        }
        assert!(!open.shared.lock().has_foreground_io(), "no read is in progress");
    }
}
