//! Requests below and completions, step by step.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    ChannelWakeup, Instant, IoChannel, IoCompletion, IoStatus, Limits, Operation, Request,
    RequestFlags, Segment,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::scripted::{Scripted, limits, poll, request};
use crate::adapt::{
    AdaptOptions, AdaptedChannel, Alignment, BounceMemory, Deallocate, FuaMode, RangeLock,
};

const NOW: Instant = Instant { ns: 0 };

struct Bench<L: RangeLock = ()> {
    below: Scripted,
    shaper: AdaptedChannel<Scripted, L>,
    memory: Segment,
}

fn bench_with<L: RangeLock>(
    limits: Limits,
    room: usize,
    lock: L,
    buffers: u16,
    options: AdaptOptions,
) -> Bench<L> {
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let below = Scripted::new(limits, room);
    let bounce = BounceMemory::new(&regions, 1024, buffers).unwrap().channel().unwrap();
    let shaper = AdaptedChannel::new(below.clone(), lock, bounce, &options).unwrap();
    Bench { below, shaper, memory }
}

fn bench(room: usize) -> Bench {
    let options = AdaptOptions { parents_max: 2, children_max: 2, ..AdaptOptions::default() };
    bench_with(limits(), room, (), 1, options)
}

impl<L: RangeLock> Bench<L> {
    fn submit(&mut self, mut request: Request) -> bool {
        let segments = [Segment { len_bytes: request.blocks * 512, ..self.memory }];
        if matches!(request.operation, Operation::Read | Operation::Write | Operation::Compare) {
            request.segment_count = 1;
        }
        self.shaper.submit(NOW, &[request], &segments) == 1
    }

    /// Completes all accepted requests with success.
    fn complete_all(&mut self) -> Vec<(Operation, u64, u32)> {
        let taken = self.below.taken();
        for (request, _) in &taken {
            self.below.completion(request.token, IoStatus::SUCCESS, 0);
        }
        taken.iter().map(|(request, _)| (request.operation, request.lba, request.blocks)).collect()
    }
}

fn good(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::SUCCESS, result: 0 }
}

#[test]
fn what_fits_goes_down_as_one_batch_with_its_own_tokens() {
    let mut bench = bench(100);
    let requests: Vec<Request> = (0..9)
        .map(|token| Request { segment_count: 1, ..request(Operation::Read, token, token * 8, 8) })
        .collect();
    assert_eq!(bench.shaper.submit(NOW, &requests, &[bench.memory]), 9);
    assert_eq!(bench.below.batches(), [9]);
    let taken: Vec<Request> = bench.below.taken().iter().map(|(request, _)| *request).collect();
    assert_eq!(taken, requests);
    bench.below.completion(3, IoStatus::SUCCESS, 77);
    let completion = IoCompletion { token: 3, status: IoStatus::SUCCESS, result: 77 };
    assert_eq!(poll(&mut bench.shaper, NOW), [completion]);
}

#[test]
fn the_first_error_wins_with_its_result_and_nothing_follows_it() {
    let mut bench = bench(100);
    assert!(bench.submit(request(Operation::Read, 5, 0, 40)));
    let taken = bench.below.taken();
    let ranges: Vec<_> = taken.iter().map(|(request, _)| (request.lba, request.blocks)).collect();
    assert_eq!(ranges, [(0, 8), (8, 8)], "two at a time");
    bench.below.completion(taken[1].0.token, IoStatus::UNRECOVERED_READ, 9);
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert_eq!(bench.below.taken().len(), 0);
    bench.below.completion(taken[0].0.token, IoStatus::INTERNAL_ERROR, 4);
    let completion = IoCompletion { token: 5, status: IoStatus::UNRECOVERED_READ, result: 9 };
    assert_eq!(poll(&mut bench.shaper, NOW), [completion]);
}

#[test]
fn parts_of_a_read_report_no_holes() {
    let mut bench = bench(100);
    assert!(
        bench.submit(Request { flags: RequestFlags::HOLES, ..request(Operation::Read, 5, 0, 16) })
    );
    for (part, _) in bench.below.taken() {
        assert_eq!((part.blocks, part.flags), (8, RequestFlags::NONE));
        bench.below.completion(part.token, IoStatus::SUCCESS, 0);
    }
    assert_eq!(poll(&mut bench.shaper, NOW), [good(5)]);
}

#[test]
fn a_full_table_gives_the_request_back_and_others_pass() {
    let mut bench = bench(100);
    assert!(bench.submit(request(Operation::Read, 1, 0, 40)));
    assert!(bench.submit(request(Operation::Read, 2, 0, 40)));
    assert!(!bench.submit(request(Operation::Read, 3, 0, 40)));
    assert!(bench.submit(request(Operation::Read, 4, 0, 1)), "fits");
}

#[test]
fn one_place_below_is_enough_and_parents_come_before_new_requests() {
    let mut bench = bench(1);
    assert!(bench.submit(request(Operation::Write, 1, 0, 20)));
    assert!(!bench.submit(request(Operation::Read, 2, 0, 1)), "a part waits for room");
    for (lba, blocks) in [(0, 8), (8, 8), (16, 4)] {
        assert_eq!(bench.complete_all(), [(Operation::Write, lba, blocks)]);
        bench.below.flushes();
        bench.below.make_space(1);
        let completions = poll(&mut bench.shaper, NOW);
        assert_eq!(completions.len(), usize::from(lba == 16));
        assert_eq!(bench.below.flushes(), usize::from(lba < 16), "what a poll sends is visible");
    }
    assert!(bench.submit(request(Operation::Read, 2, 0, 1)));
}

#[test]
fn forced_access_by_flush_is_a_flush_after_a_write_and_before_a_read() {
    let options = AdaptOptions { force: FuaMode::Flush, ..AdaptOptions::default() };
    let mut bench = bench_with(limits(), 100, (), 1, options);
    for (operation, order) in [
        (Operation::Write, [Operation::Write, Operation::Flush]),
        (Operation::Read, [Operation::Flush, Operation::Read]),
    ] {
        let forced = Request { flags: RequestFlags::FUA, ..request(operation, 8, 3, 2) };
        assert!(bench.submit(forced));
        for (step, expected) in order.into_iter().enumerate() {
            let taken = bench.below.taken();
            assert_eq!(taken.len(), 1);
            assert_eq!((taken[0].0.operation, taken[0].0.flags), (expected, RequestFlags::NONE));
            bench.below.completion(taken[0].0.token, IoStatus::SUCCESS, 0);
            let completions = poll(&mut bench.shaper, NOW);
            assert_eq!(completions, [good(8)][..step]);
        }
        assert!(bench.submit(forced));
        let taken = bench.below.taken();
        bench.below.completion(taken[0].0.token, IoStatus::WRITE_FAULT, 0);
        let completion = IoCompletion { token: 8, status: IoStatus::WRITE_FAULT, result: 0 };
        assert_eq!(
            poll(&mut bench.shaper, NOW),
            [completion],
            "{operation:?}: not done is not done"
        );
    }
}

#[test]
fn who_waits_longest_gets_the_buffer() {
    let options = AdaptOptions {
        alignment: Alignment { address_bytes: 1, len_bytes: 512 },
        ..AdaptOptions::default()
    };
    let mut bench = bench_with(limits(), 100, (), 1, options);
    for token in 0..3 {
        let odd = [
            Segment { len_bytes: 100, ..bench.memory },
            Segment { len_bytes: 924, ..bench.memory },
        ];
        let read = Request { segment_count: 2, ..request(Operation::Read, token, 10 * token, 2) };
        assert_eq!(bench.shaper.submit(NOW, &[read], &odd), 1);
    }
    for token in 0..3 {
        assert_eq!(bench.complete_all(), [(Operation::Read, 10 * token, 2)]);
        assert_eq!(poll(&mut bench.shaper, NOW), [good(token)]);
    }
}

#[test]
fn a_write_that_must_not_be_torn_is_not_cut() {
    let atomic = Limits { atomic_write_blocks: 2, ..limits() };
    let mut bench = bench_with(atomic, 100, (), 1, AdaptOptions::default());
    assert_eq!(bench.shaper.limits().atomic_write_blocks, 2);
    let thirds = [0, 400, 800].map(|at| bench.memory.slice(at, 400).unwrap());
    let segments = [thirds[0], thirds[1], Segment { len_bytes: 224, ..thirds[2] }];
    let write = Request { segment_count: 3, ..request(Operation::Write, 1, 7, 2) };
    assert_eq!(bench.shaper.submit(NOW, &[write], &segments), 1);
    assert_eq!(bench.complete_all(), [(Operation::Write, 7, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [good(1)]);
}

#[derive(Clone, Default)]
struct Lock(Arc<Mutex<(bool, Vec<String>)>>);

impl RangeLock for Lock {
    fn acquire(&mut self, blocks: Range<u64>) -> bool {
        let (open, log) = &mut *self.0.lock().unwrap();
        if *open {
            log.push(format!("acquire {blocks:?}"));
        }
        *open
    }

    fn release(&mut self, blocks: Range<u64>) {
        self.0.lock().unwrap().1.push(format!("release {blocks:?}"));
    }
}

#[test]
fn a_compare_and_write_waits_for_others_then_for_its_lock_and_then_holds_its_blocks() {
    let lock = Lock::default();
    let mut bench = bench_with(limits(), 100, lock.clone(), 1, AdaptOptions::default());
    assert!(bench.submit(request(Operation::Write, 1, 0, 2)));
    let both = Segment { len_bytes: 4 * 512, ..bench.memory };
    let swap = Request { segment_count: 1, ..request(Operation::CompareAndWrite, 2, 0, 2) };
    assert_eq!(bench.shaper.submit(NOW, &[swap], &[both]), 1);
    assert!(!bench.submit(request(Operation::Read, 3, 50, 2)), "nothing new while it drains");
    assert_eq!(bench.complete_all(), [(Operation::Write, 0, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [good(1)]);
    assert_eq!(bench.complete_all(), [], "the blocks are locked by somebody else");
    assert!(bench.shaper.arm(), "nobody wakes who waits for a lock");

    lock.0.lock().unwrap().0 = true;
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert!(!bench.submit(request(Operation::Write, 4, 1, 2)), "its own block");
    assert!(bench.submit(request(Operation::Write, 5, 2, 2)), "the next one");
    assert!(bench.submit(request(Operation::Read, 6, 1, 1)), "looking changes nothing");
    let expected = [(Operation::Read, 0, 2), (Operation::Write, 2, 2), (Operation::Read, 1, 1)];
    assert_eq!(bench.complete_all(), expected);
    assert_eq!(poll(&mut bench.shaper, NOW), [good(5), good(6)]);
    assert_eq!(bench.complete_all(), [(Operation::Write, 0, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [good(2)]);
    assert_eq!(lock.0.lock().unwrap().1, ["acquire 0..2", "release 0..2"]);
    assert!(bench.submit(request(Operation::Write, 4, 1, 2)));
}

#[test]
fn metadata_goes_with_its_blocks_and_nothing_is_emulated_around_it() {
    let with_metadata = Limits { metadata_size: 8, ..limits() };
    let mut bench = bench_with(with_metadata, 100, (), 1, AdaptOptions::default());
    assert!(!bench.shaper.limits().operations.has(Operation::Compare));
    let data = Segment { len_bytes: 12 * 512, ..bench.memory };
    let metadata = Segment { len_bytes: 12 * 8, offset: 9000, ..bench.memory };
    let write =
        Request { segment_count: 1, metadata_count: 1, ..request(Operation::Write, 1, 0, 12) };
    assert_eq!(bench.shaper.submit(NOW, &[write], &[data, metadata]), 1);
    let taken = bench.below.taken();
    let places: Vec<_> = taken
        .iter()
        .map(|(part, segments)| {
            assert_eq!((part.segment_count, part.metadata_count), (1, 1));
            (segments[0].offset, segments[0].len_bytes, segments[1].offset, segments[1].len_bytes)
        })
        .collect();
    assert_eq!(places, [(0, 8 * 512, 9000, 64), (8 * 512, 4 * 512, 9064, 32)]);
}

#[test]
fn what_neither_the_device_nor_the_shaper_can_do_is_refused() {
    let mut bench = bench(100);
    for operation in [Operation::Deallocate, Operation::WriteUncorrectable] {
        assert!(!bench.shaper.limits().operations.has(operation));
        assert!(bench.submit(request(operation, 1, 0, 1)));
        let completion = IoCompletion { token: 1, status: IoStatus::INVALID_OPCODE, result: 0 };
        assert_eq!(poll(&mut bench.shaper, NOW), [completion]);
    }
    let far = request(Operation::Read, 2, 990, 40);
    assert!(bench.submit(far));
    let completion = IoCompletion { token: 2, status: IoStatus::LBA_OUT_OF_RANGE, result: 0 };
    assert_eq!(poll(&mut bench.shaper, NOW), [completion], "before any part has gone");
    assert_eq!(bench.below.taken().len(), 0);
    let options = AdaptOptions { deallocate: Deallocate::Ignore, ..AdaptOptions::default() };
    let mut bench = bench_with(limits(), 100, (), 1, options);
    assert!(bench.submit(request(Operation::Deallocate, 1, 0, 1)));
    assert_eq!(poll(&mut bench.shaper, NOW), [good(1)]);
}

#[test]
fn a_device_that_grows_is_seen_to() {
    let mut bench = bench(100);
    bench.shaper.below.resize(2_000);
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert_eq!(bench.shaper.limits().block_count, 2_000);
    assert!(bench.submit(request(Operation::Read, 1, 1_500, 40)));
    assert_eq!(bench.below.taken().len(), 2);
}

#[test]
fn options_that_cannot_be_kept_are_refused() {
    let regions = RegionTable::new(8);
    let memory = BounceMemory::new(&regions, 1024, 1).unwrap();
    let refusal = |limits: Limits, options: AdaptOptions| {
        let below = Scripted::new(limits, 1);
        let shaper = AdaptedChannel::new(below, (), memory.channel().unwrap(), &options);
        shaper.err().unwrap().to_string()
    };
    let plain = AdaptOptions::default;
    let aligned = |address_bytes, len_bytes| AdaptOptions {
        alignment: Alignment { address_bytes, len_bytes },
        ..plain()
    };
    for (limits, options, problem) in [
        (limits(), AdaptOptions { parents_max: 0, ..plain() }, "0 requests of 8 parts"),
        (Limits { block_size: 4096, ..limits() }, plain(), "a buffer of 1024 bytes"),
        (limits(), aligned(3, 1), "an address alignment of 3 bytes"),
        (limits(), aligned(1, 1024), "a length alignment of 1024 bytes"),
    ] {
        let text = refusal(limits, options);
        assert!(text.starts_with(&format!("shape: {problem}")), "{text}");
    }
    let force = AdaptOptions { force: FuaMode::Flush, ..plain() };
    let operations = tenmil_base::OperationSet::of(&[Operation::Read]);
    assert!(refusal(Limits { operations, ..limits() }, force).contains("has no flush"));
    assert!(BounceMemory::new(&regions, 1000, 1).is_err());
    assert!(BounceMemory::new(&regions, 1024, 0).is_err());
}
