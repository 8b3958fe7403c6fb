//! Requests below and completions, step by step.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    ChannelWakeup, Instant, IoChannel, IoCompletion, IoStatus, Limits, Operation, Request,
    RequestFlags, Segment,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::scripted_channel::{ScriptedChannel, limits, poll, request};
use crate::adapt::{
    AdaptationOptions, AdaptedChannel, BounceBufferAllocator, DeallocateEmulation, FuaMode,
    MemoryAlignment, RangeLock,
};

const NOW: Instant = Instant { ns: 0 };

struct AdaptFixture<L: RangeLock = ()> {
    below: ScriptedChannel,
    shaper: AdaptedChannel<ScriptedChannel, L>,
    memory: Segment,
}

fn fixture_with<L: RangeLock>(
    limits: Limits,
    room: usize,
    lock: L,
    buffers: u16,
    options: AdaptationOptions,
) -> AdaptFixture<L> {
    let regions = RegionTable::new(8);
    let memory =
        regions.add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let below = ScriptedChannel::new(limits, room);
    let bounce = BounceBufferAllocator::new(&regions, 1024, buffers)
        .unwrap()
        .allocate_channel_buffers()
        .unwrap();
    let shaper = AdaptedChannel::new(below.clone(), lock, bounce, &options).unwrap();
    AdaptFixture { below, shaper, memory }
}

fn fixture(room: usize) -> AdaptFixture {
    let options =
        AdaptationOptions { parents_max: 2, children_max: 2, ..AdaptationOptions::default() };
    fixture_with(limits(), room, (), 1, options)
}

impl<L: RangeLock> AdaptFixture<L> {
    fn submit(&mut self, mut request: Request) -> bool {
        let segments = [Segment { len_bytes: request.blocks * 512, ..self.memory }];
        if matches!(request.operation, Operation::Read | Operation::Write | Operation::Compare) {
            request.segment_count = 1;
        }
        self.shaper.submit(NOW, &[request], &segments) == 1
    }

    /// Completes all accepted requests with success.
    fn complete_all(&mut self) -> Vec<(Operation, u64, u32)> {
        let taken = self.below.take_accepted();
        for (request, _) in &taken {
            self.below.complete_request(request.token, IoStatus::SUCCESS, 0);
        }
        taken.iter().map(|(request, _)| (request.operation, request.lba, request.blocks)).collect()
    }
}

fn success_completion(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::SUCCESS, result: 0 }
}

#[test]
fn fitting_requests_are_submitted_as_one_batch_with_their_tokens() {
    let mut bench = fixture(100);
    let requests: Vec<Request> = (0..9)
        .map(|token| Request { segment_count: 1, ..request(Operation::Read, token, token * 8, 8) })
        .collect();
    assert_eq!(bench.shaper.submit(NOW, &requests, &[bench.memory]), 9);
    assert_eq!(bench.below.batch_sizes(), [9]);
    let taken: Vec<Request> =
        bench.below.take_accepted().iter().map(|(request, _)| *request).collect();
    assert_eq!(taken, requests);
    bench.below.complete_request(3, IoStatus::SUCCESS, 77);
    let completion = IoCompletion { token: 3, status: IoStatus::SUCCESS, result: 77 };
    assert_eq!(poll(&mut bench.shaper, NOW), [completion]);
}

#[test]
fn first_part_error_fails_the_request_and_stops_it() {
    let mut bench = fixture(100);
    assert!(bench.submit(request(Operation::Read, 5, 0, 40)));
    let taken = bench.below.take_accepted();
    let ranges: Vec<_> = taken.iter().map(|(request, _)| (request.lba, request.blocks)).collect();
    assert_eq!(ranges, [(0, 8), (8, 8)], "two at a time");
    bench.below.complete_request(taken[1].0.token, IoStatus::UNRECOVERED_READ, 9);
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert_eq!(bench.below.take_accepted().len(), 0);
    bench.below.complete_request(taken[0].0.token, IoStatus::INTERNAL_ERROR, 4);
    let completion = IoCompletion { token: 5, status: IoStatus::UNRECOVERED_READ, result: 9 };
    assert_eq!(poll(&mut bench.shaper, NOW), [completion]);
}

#[test]
fn split_read_reports_no_holes_and_moves_its_data() {
    let mut bench = fixture(100);
    let flags = RequestFlags::HOLES.union(RequestFlags::IN_PLACE);
    assert!(bench.submit(Request { flags, ..request(Operation::Read, 5, 0, 16) }));
    for (part, _) in bench.below.take_accepted() {
        assert_eq!((part.blocks, part.flags), (8, RequestFlags::NONE));
        bench.below.complete_request(part.token, IoStatus::SUCCESS, 0);
    }
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(5)]);
}

#[test]
fn full_split_table_returns_the_request_and_others_pass() {
    let mut bench = fixture(100);
    assert!(bench.submit(request(Operation::Read, 1, 0, 40)));
    assert!(bench.submit(request(Operation::Read, 2, 0, 40)));
    assert!(!bench.submit(request(Operation::Read, 3, 0, 40)));
    assert!(bench.submit(request(Operation::Read, 4, 0, 1)), "fits");
}

#[test]
fn parts_precede_new_requests_when_the_channel_below_is_full() {
    let mut bench = fixture(1);
    assert!(bench.submit(request(Operation::Write, 1, 0, 20)));
    assert!(!bench.submit(request(Operation::Read, 2, 0, 1)), "a part waits for room");
    for (lba, blocks) in [(0, 8), (8, 8), (16, 4)] {
        assert_eq!(bench.complete_all(), [(Operation::Write, lba, blocks)]);
        bench.below.flush_count();
        bench.below.add_free_entries(1);
        let completions = poll(&mut bench.shaper, NOW);
        assert_eq!(completions.len(), usize::from(lba == 16));
        assert_eq!(
            bench.below.flush_count(),
            usize::from(lba < 16),
            "what a poll sends is visible"
        );
    }
    assert!(bench.submit(request(Operation::Read, 2, 0, 1)));
}

#[test]
fn fua_emulation_flushes_after_writes_and_before_reads() {
    let options = AdaptationOptions { force: FuaMode::Flush, ..AdaptationOptions::default() };
    let mut bench = fixture_with(limits(), 100, (), 1, options);
    for (operation, order) in [
        (Operation::Write, [Operation::Write, Operation::Flush]),
        (Operation::Read, [Operation::Flush, Operation::Read]),
    ] {
        let forced = Request { flags: RequestFlags::FUA, ..request(operation, 8, 3, 2) };
        assert!(bench.submit(forced));
        for (step, expected) in order.into_iter().enumerate() {
            let taken = bench.below.take_accepted();
            assert_eq!(taken.len(), 1);
            assert_eq!((taken[0].0.operation, taken[0].0.flags), (expected, RequestFlags::NONE));
            bench.below.complete_request(taken[0].0.token, IoStatus::SUCCESS, 0);
            let completions = poll(&mut bench.shaper, NOW);
            assert_eq!(completions, [success_completion(8)][..step]);
        }
        assert!(bench.submit(forced));
        let taken = bench.below.take_accepted();
        bench.below.complete_request(taken[0].0.token, IoStatus::WRITE_FAULT, 0);
        let completion = IoCompletion { token: 8, status: IoStatus::WRITE_FAULT, result: 0 };
        assert_eq!(
            poll(&mut bench.shaper, NOW),
            [completion],
            "{operation:?}: not done is not done"
        );
    }
}

#[test]
fn longest_waiting_request_gets_the_bounce_buffer() {
    let options = AdaptationOptions {
        alignment: MemoryAlignment { address_bytes: 1, len_bytes: 512 },
        ..AdaptationOptions::default()
    };
    let mut bench = fixture_with(limits(), 100, (), 1, options);
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
        assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(token)]);
    }
}

#[test]
fn atomic_write_is_not_split() {
    let atomic = Limits { atomic_write_blocks: 2, ..limits() };
    let mut bench = fixture_with(atomic, 100, (), 1, AdaptationOptions::default());
    assert_eq!(bench.shaper.limits().atomic_write_blocks, 2);
    let thirds = [0, 400, 800].map(|at| bench.memory.slice(at, 400).unwrap());
    let segments = [thirds[0], thirds[1], Segment { len_bytes: 224, ..thirds[2] }];
    let write = Request { segment_count: 3, ..request(Operation::Write, 1, 7, 2) };
    assert_eq!(bench.shaper.submit(NOW, &[write], &segments), 1);
    assert_eq!(bench.complete_all(), [(Operation::Write, 7, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(1)]);
}

#[derive(Clone, Default)]
struct LoggingLock(Arc<Mutex<(bool, Vec<String>)>>);

impl RangeLock for LoggingLock {
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
fn compare_and_write_waits_for_others_and_its_range_lock() {
    let lock = LoggingLock::default();
    let mut bench = fixture_with(limits(), 100, lock.clone(), 1, AdaptationOptions::default());
    assert!(bench.submit(request(Operation::Write, 1, 0, 2)));
    let both = Segment { len_bytes: 4 * 512, ..bench.memory };
    let swap = Request { segment_count: 1, ..request(Operation::CompareAndWrite, 2, 0, 2) };
    assert_eq!(bench.shaper.submit(NOW, &[swap], &[both]), 1);
    assert!(!bench.submit(request(Operation::Read, 3, 50, 2)), "nothing new while it drains");
    assert_eq!(bench.complete_all(), [(Operation::Write, 0, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(1)]);
    assert_eq!(bench.complete_all(), [], "the range is locked elsewhere");
    assert!(bench.shaper.arm(), "the release of a range lock wakes no waiter");

    lock.0.lock().unwrap().0 = true;
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert!(!bench.submit(request(Operation::Write, 4, 1, 2)), "its own block");
    assert!(bench.submit(request(Operation::Write, 5, 2, 2)), "the next one");
    assert!(bench.submit(request(Operation::Read, 6, 1, 1)), "looking changes nothing");
    let expected = [(Operation::Read, 0, 2), (Operation::Write, 2, 2), (Operation::Read, 1, 1)];
    assert_eq!(bench.complete_all(), expected);
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(5), success_completion(6)]);
    assert_eq!(bench.complete_all(), [(Operation::Write, 0, 2)]);
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(2)]);
    assert_eq!(lock.0.lock().unwrap().1, ["acquire 0..2", "release 0..2"]);
    assert!(bench.submit(request(Operation::Write, 4, 1, 2)));
}

#[test]
fn metadata_is_split_with_its_blocks() {
    let with_metadata = Limits { metadata_size: 8, ..limits() };
    let mut bench = fixture_with(with_metadata, 100, (), 1, AdaptationOptions::default());
    assert!(!bench.shaper.limits().operations.has(Operation::Compare));
    let data = Segment { len_bytes: 12 * 512, ..bench.memory };
    let metadata = Segment { len_bytes: 12 * 8, offset: 9000, ..bench.memory };
    let write =
        Request { segment_count: 1, metadata_count: 1, ..request(Operation::Write, 1, 0, 12) };
    assert_eq!(bench.shaper.submit(NOW, &[write], &[data, metadata]), 1);
    let taken = bench.below.take_accepted();
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
fn unsupported_requests_are_rejected() {
    let mut bench = fixture(100);
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
    assert_eq!(bench.below.take_accepted().len(), 0);
    let options = AdaptationOptions {
        deallocate: DeallocateEmulation::Ignore,
        ..AdaptationOptions::default()
    };
    let mut bench = fixture_with(limits(), 100, (), 1, options);
    assert!(bench.submit(request(Operation::Deallocate, 1, 0, 1)));
    assert_eq!(poll(&mut bench.shaper, NOW), [success_completion(1)]);
}

#[test]
fn device_growth_is_noticed() {
    let mut bench = fixture(100);
    bench.shaper.below.resize(2_000);
    assert_eq!(poll(&mut bench.shaper, NOW), []);
    assert_eq!(bench.shaper.limits().block_count, 2_000);
    assert!(bench.submit(request(Operation::Read, 1, 1_500, 40)));
    assert_eq!(bench.below.take_accepted().len(), 2);
}

#[test]
fn invalid_adapt_options_are_rejected() {
    let regions = RegionTable::new(8);
    let memory = BounceBufferAllocator::new(&regions, 1024, 1).unwrap();
    let refusal = |limits: Limits, options: AdaptationOptions| {
        let below = ScriptedChannel::new(limits, 1);
        let shaper =
            AdaptedChannel::new(below, (), memory.allocate_channel_buffers().unwrap(), &options);
        shaper.err().unwrap().to_string()
    };
    let plain = AdaptationOptions::default;
    let aligned = |address_bytes, len_bytes| AdaptationOptions {
        alignment: MemoryAlignment { address_bytes, len_bytes },
        ..plain()
    };
    for (limits, options, problem) in [
        (limits(), AdaptationOptions { parents_max: 0, ..plain() }, "0 requests of 8 parts"),
        (Limits { block_size: 4096, ..limits() }, plain(), "a buffer of 1024 bytes"),
        (limits(), aligned(3, 1), "an address alignment of 3 bytes"),
        (limits(), aligned(1, 1024), "a length alignment of 1024 bytes"),
    ] {
        let text = refusal(limits, options);
        assert!(text.starts_with(&format!("shape: {problem}")), "{text}");
    }
    let force = AdaptationOptions { force: FuaMode::Flush, ..plain() };
    let operations = tenmil_base::OperationSet::from_operations(&[Operation::Read]);
    assert!(refusal(Limits { operations, ..limits() }, force).contains("has no flush"));
    assert!(BounceBufferAllocator::new(&regions, 1000, 1).is_err());
    assert!(BounceBufferAllocator::new(&regions, 1024, 0).is_err());
}
