//! Tests of copies between simulated devices that lose power, blocks and space, in simulated time.

mod faulty_ram_device;

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Instant, IoStatus, Operation, Random, Span};
use tenmil_block::{Bdev, BdevOptions, Claim};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use self::faulty_ram_device::FaultyRamDevice;
use super::comparison::CopyComparison;
use super::copy_engine::CopyEngine;
use super::copy_loop::CopyOrComparison;
use super::request_sizes::CopyRequestSizes;
use super::{
    CheckpointSink, CompareResult, CopyAbort, CopyDevices, CopyOptions, CopySide, CopyStats,
    ReadErrorPolicy, ValidatedCopy,
};

const KIB: usize = 1024;

/// State that survives the process.
#[derive(Default)]
struct RecordedCheckpoints {
    until: u64,
    lost: Vec<Range<u64>>,
    count: usize,
}

impl CheckpointSink for RecordedCheckpoints {
    fn store_checkpoint(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        assert!(until >= self.until, "no step back");
        (self.until, self.lost, self.count) = (until, lost.to_vec(), self.count + 1);
        Ok(())
    }
}

impl RecordedCheckpoints {
    fn copy_stats(&self) -> CopyStats {
        CopyStats { until: self.until, lost: self.lost.clone(), ..CopyStats::default() }
    }
}

fn test_options() -> CopyOptions {
    CopyOptions { depth: 4, request_bytes: 16 << 10, ..CopyOptions::default() }
}

struct CopyTest {
    devices: CopyDevices,
    source: FaultyRamDevice,
    target: FaultyRamDevice,
    options: CopyOptions,
}

impl CopyTest {
    /// A source of 1 MiB with holes and zeroes, and a target full of other data.
    fn new(seed: u64, blocks: (u32, u32)) -> Self {
        let regions = RegionTable::new(16);
        let mut random = Random::new(seed);
        let source = FaultyRamDevice::new(&regions, blocks.0, 1024 * KIB, seed);
        let target = FaultyRamDevice::new(&regions, blocks.1, 1024 * KIB + 64 * KIB, seed + 1);
        source.with_content(|bytes| {
            for part in bytes.chunks_mut(32 * KIB) {
                match random.below(3) {
                    0 => part.fill(0),
                    1 => part[16 * KIB..].fill(7),
                    _ => {
                        part.iter_mut().for_each(|byte| *byte = random.next_u64().to_le_bytes()[0])
                    }
                }
            }
        });
        source.report_holes(seed.is_multiple_of(2));
        target.with_content(|bytes| bytes.fill(0xdd));
        let devices = CopyDevices {
            source: Arc::new(source.clone()),
            target: Arc::new(target.clone()),
            regions,
        };
        Self { devices, source, target, options: test_options() }
    }

    fn geometry(&self) -> CopyRequestSizes {
        let limits = (self.source.limits(), self.target.limits());
        CopyRequestSizes::from_limits(("source", &limits.0), ("target", &limits.1), &self.options)
            .unwrap()
    }

    /// Runs this many steps of a simulated second each; returns how the copy ended, if it did.
    fn run_copy(
        &self,
        kept: &mut RecordedCheckpoints,
        steps: usize,
    ) -> Option<(CopyStats, Option<CopyAbort>)> {
        let from = kept.copy_stats();
        let mut pass =
            CopyEngine::new(&self.devices, &self.options, self.geometry(), from, kept).unwrap();
        for step in 0..steps {
            pass.advance(Instant { ns: 1_000_000_000 * step as u64 });
            let (done, size) = pass.done_and_total_bytes();
            assert!(done <= size);
            if pass.is_finished() {
                return Some(pass.into_result());
            }
        }
        None
    }

    fn run_comparison(&self, tally: &CopyStats) -> (CompareResult, Option<CopyAbort>) {
        let mut check = CopyComparison::new(&self.devices, self.geometry(), tally).unwrap();
        for step in 0..STEPS_MAX {
            check.advance(Instant { ns: step as u64 });
            if check.is_finished() {
                return check.into_result();
            }
        }
        panic!("it does not come to an end");
    }

    /// Whether the durable data of the target equal the source.
    fn is_durable_target_equal_to_source(&self) -> bool {
        self.source.with_content(|source| {
            self.target.with_content(|target| source[..] == target[..source.len()])
        })
    }
}

const STEPS_MAX: usize = 100_000;

#[test]
fn copy_is_exact_and_leaves_the_rest_of_the_target_unchanged() {
    for seed in 0..8 {
        for blocks in [(512, 512), (512, 4096), (4096, 512)] {
            let world = CopyTest::new(seed, blocks);
            let mut kept = RecordedCheckpoints::default();
            let (tally, ending) = world.run_copy(&mut kept, STEPS_MAX).unwrap();
            assert_eq!((ending, tally.until, kept.until), (None, 1 << 20, 1 << 20));
            assert!(tally.is_flushed);
            world.target.lose_power();
            assert!(world.is_durable_target_equal_to_source(), "seed {seed}");
            assert_eq!(tally.written + tally.zeroed + tally.kept, 1 << 20);
            world.target.with_content(|bytes| {
                assert!(bytes[1024 * KIB..].iter().all(|byte| *byte == 0xdd));
            });
            let (comparison, ending) = world.run_comparison(&tally);
            assert_eq!((ending, comparison.compared), (None, 1 << 20));
            assert_eq!((comparison.different, comparison.first), (0, None));
        }
    }
}

#[test]
fn copy_interrupted_at_any_step_resumes_without_loss() {
    for seed in 0..6 {
        for steps in 0.. {
            let world = CopyTest::new(seed, (512, 1024));
            let mut kept = RecordedCheckpoints::default();
            let ended = world.run_copy(&mut kept, steps).is_some();
            // The requests in flight end with the process.
            world.source.lose_power();
            world.target.lose_power();
            let until = usize::try_from(kept.until).unwrap();
            world.source.with_content(|source| {
                world.target.with_content(|target| {
                    assert!(source[..until] == target[..until], "step {steps} of seed {seed}");
                });
            });
            let (tally, ending) = world.run_copy(&mut kept, STEPS_MAX).unwrap();
            assert_eq!((ending, tally.until), (None, 1 << 20));
            world.target.lose_power();
            assert!(world.is_durable_target_equal_to_source(), "step {steps} of seed {seed}");
            if ended {
                assert!(steps > 20 && kept.count > 3, "{steps} steps, {} records", kept.count);
                break;
            }
        }
    }
}

#[test]
fn cancelled_copy_has_flushed_what_it_reports_done() {
    let world = CopyTest::new(1, (512, 512));
    let mut kept = RecordedCheckpoints::default();
    let geometry = world.geometry();
    let mut pass =
        CopyEngine::new(&world.devices, &world.options, geometry, CopyStats::default(), &mut kept)
            .unwrap();
    for step in 0..STEPS_MAX as u64 {
        pass.advance(Instant { ns: step });
        if step > 20 {
            pass.stop_submitting();
        }
        if pass.is_finished() {
            break;
        }
    }
    let (tally, ending) = pass.into_result();
    assert_eq!((ending, tally.is_flushed), (Some(CopyAbort::Interrupted), true));
    assert!(tally.until > 0 && tally.until < 1 << 20 && kept.until == tally.until);
    world.target.lose_power();
    let (tally, ending) = world.run_copy(&mut kept, STEPS_MAX).unwrap();
    assert!(ending.is_none() && tally.read < 1 << 20 && world.is_durable_target_equal_to_source());
}

#[test]
fn unreadable_block_is_reported_or_skipped() {
    let mut world = CopyTest::new(1, (512, 512));
    world.source.with_content(|bytes| bytes.fill(5));
    world.source.make_block_unreadable(100);
    world.source.make_block_unreadable(101);
    world.source.make_block_unreadable(700);
    let mut kept = RecordedCheckpoints::default();
    let (tally, ending) = world.run_copy(&mut kept, STEPS_MAX).unwrap();
    let Some(CopyAbort::Failed { side: CopySide::Source, operation, range, status }) = ending
    else {
        panic!("{ending:?}");
    };
    assert_eq!((operation, status), (Operation::Read, IoStatus::UNRECOVERED_READ));
    assert_eq!(range, 51_200..51_712, "one block, however much was read at once");
    assert!(tally.until <= 51_200 && tally.is_flushed);

    world.options.on_error = ReadErrorPolicy::Skip;
    let (tally, ending) = world.run_copy(&mut kept, STEPS_MAX).unwrap();
    assert_eq!((ending, tally.until), (None, 1 << 20));
    assert_eq!(tally.lost, [51_200..52_224, 358_400..358_912]);
    assert_eq!(kept.lost, tally.lost);
    world.target.with_content(|bytes| {
        assert!(bytes[51_200..52_224].iter().all(|byte| *byte == 0), "nothing old is left");
        assert!(bytes[52_224] == 5 && bytes[51_199] == 5);
    });
    let (comparison, ending) = world.run_comparison(&tally);
    assert_eq!((comparison.different, ending), (0, None), "what was lost is left out");
    let (_, ending) = world.run_comparison(&CopyStats::default());
    assert!(matches!(ending, Some(CopyAbort::Failed { side: CopySide::Source, .. })), "{ending:?}");
}

#[test]
fn target_blocks_with_unreadable_source_are_not_compared() {
    let mut world = CopyTest::new(1, (512, 4096));
    world.options.on_error = ReadErrorPolicy::Skip;
    for block in [100, 101, 2047] {
        world.source.make_block_unreadable(block);
    }
    let (tally, ending) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.lost.len(), ending), (2, None));
    let (comparison, ending) = world.run_comparison(&tally);
    assert_eq!((comparison.different, ending), (0, None));
    assert_eq!(comparison.compared, (1 << 20) - 2 * 4096);
}

#[test]
fn full_or_failing_target_ends_the_copy_with_its_reason() {
    for (status, operation) in [
        (IoStatus::CAPACITY_EXCEEDED, Operation::Write),
        (IoStatus::WRITE_FAULT, Operation::Write),
        (IoStatus::WRITE_FAULT, Operation::WriteZeroes),
        (IoStatus::WRITE_FAULT, Operation::Flush),
    ] {
        let world = CopyTest::new(2, (512, 512));
        world.target.fail_operation(operation, status);
        let (tally, ending) =
            world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
        let Some(CopyAbort::Failed { side, operation: found, status: completion, .. }) = ending
        else {
            panic!("{ending:?}");
        };
        assert_eq!((side, found, completion), (CopySide::Target, operation, status));
        assert!(!tally.is_flushed && tally.until < 1 << 20);
        assert_eq!(world.target.in_flight(), 0);
    }
}

/// Reason that ends a copy before its target fails.
#[derive(Clone, Copy, Debug)]
enum CopyEndCause {
    Stopped,
    Unread,
    Unkept,
}

/// Checkpoint sink that fails from the second time on, if the copy is to end that way.
struct FailingCheckpointSink {
    kept: RecordedCheckpoints,
    is_full: bool,
}

impl CheckpointSink for FailingCheckpointSink {
    fn store_checkpoint(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        if self.is_full && self.kept.count > 0 {
            return Err("no room".into());
        }
        self.kept.store_checkpoint(until, lost)
    }
}

#[test]
fn failed_final_flush_is_the_last_request_and_stores_no_checkpoint() {
    for before in [CopyEndCause::Stopped, CopyEndCause::Unread, CopyEndCause::Unkept] {
        for fails_for_ever in [false, true] {
            let world = CopyTest::new(1, (512, 512));
            world.source.with_content(|bytes| bytes.fill(5));
            if matches!(before, CopyEndCause::Unread) {
                world.source.make_block_unreadable(1500);
            }
            let is_full = matches!(before, CopyEndCause::Unkept);
            let mut keeper =
                FailingCheckpointSink { kept: RecordedCheckpoints::default(), is_full };
            let (tally, ending, flushes) =
                end_with_failing_flush(&world, &mut keeper, before, fails_for_ever);
            let context = format!("{before:?}, for ever: {fails_for_ever}");
            assert!(matches!(
                (before, &ending),
                (CopyEndCause::Unkept, Some(CopyAbort::Record(_)))
                    | (
                        CopyEndCause::Unread,
                        Some(CopyAbort::Failed { operation: Operation::Read, .. })
                    )
                    | (
                        CopyEndCause::Stopped,
                        Some(CopyAbort::Failed { operation: Operation::Flush, .. })
                    )
            ));
            assert!(!tally.is_flushed, "{context}");
            assert_eq!(flushes, 1, "{context}: a flush is not asked for again");
            assert!(tally.until >= keeper.kept.until && tally.until < 1 << 20, "{context}");
            world.target.lose_power();
            let until = usize::try_from(keeper.kept.until).unwrap();
            world.target.with_content(|bytes| {
                assert!(bytes[..until].iter().all(|byte| *byte == 5), "{context}: {until} kept");
            });
        }
    }
}

/// Copies until something ends it, and fails the flush that follows. Returns the number of flushes from
/// there on.
fn end_with_failing_flush(
    world: &CopyTest,
    keeper: &mut FailingCheckpointSink,
    before: CopyEndCause,
    fails_for_ever: bool,
) -> (CopyStats, Option<CopyAbort>, usize) {
    let from = CopyStats::default();
    let mut pass =
        CopyEngine::new(&world.devices, &world.options, world.geometry(), from, keeper).unwrap();
    let mut ended_after = None;
    for step in 0..STEPS_MAX as u64 {
        pass.advance(Instant { ns: step * 1_000_000_000 });
        if matches!(before, CopyEndCause::Stopped) && pass.done_and_total_bytes().0 > 300 << 10 {
            pass.stop_submitting();
        }
        if ended_after.is_none() && pass.has_ended_early() {
            ended_after = Some(world.target.flush_count());
            world.target.fail_one_flush();
            if fails_for_ever {
                world.target.fail_operation(Operation::Flush, IoStatus::WRITE_FAULT);
            }
        }
        if pass.is_finished() {
            let (tally, ending) = pass.into_result();
            return (tally, ending, world.target.flush_count() - ended_after.unwrap());
        }
    }
    panic!("{before:?}: it does not come to an end");
}

#[test]
fn difference_is_found_and_counted() {
    let world = CopyTest::new(3, (512, 4096));
    let (tally, _) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    world.target.with_content(|bytes| {
        for at in [4096 * 3, 4096 * 3 + 5, 4096 * 200 + 4095] {
            bytes[at] ^= 1;
        }
    });
    let (comparison, ending) = world.run_comparison(&tally);
    assert_eq!((comparison.different, comparison.first, ending), (2, Some(4096 * 3), None));
    assert_eq!(comparison.block, 4096);
}

#[test]
fn holes_are_not_read_and_target_zeroes_not_written() {
    let world = CopyTest::new(0, (512, 512));
    world.source.with_content(|bytes| {
        bytes.fill(0);
        bytes[512 * KIB..][..64 * KIB].fill(9);
    });
    world.source.report_holes(true);
    let (tally, _) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.read, tally.written), (64 << 10, 64 << 10));
    assert_eq!((tally.zeroed, tally.kept), (960 << 10, 0));
    assert!(world.is_durable_target_equal_to_source());
    world.target.with_content(|bytes| bytes.fill(0));
    world.target.report_holes(true);
    let (tally, _) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.written, tally.zeroed, tally.kept), (64 << 10, 0, 960 << 10));
}

#[test]
fn zero_data_becomes_a_hole_unless_disabled() {
    for sparse in [true, false] {
        let mut world = CopyTest::new(1, (512, 512));
        world.source.with_content(|bytes| bytes[64 * KIB..].fill(0));
        world.source.report_holes(false);
        world.options.sparse = sparse;
        world.options.request_bytes = 128 << 10;
        let (tally, _) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
        assert_eq!(tally.read, 1 << 20);
        let written = if sparse { 64 << 10 } else { 1 << 20 };
        assert_eq!(tally.written, written, "sparse: {sparse}");
        assert!(world.is_durable_target_equal_to_source());
    }
}

#[test]
fn target_without_write_zeroes_gets_written_zeroes() {
    let world = CopyTest::new(0, (512, 512));
    world.target.without_operation(Operation::WriteZeroes);
    let (tally, ending) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    assert!(ending.is_none() && tally.zeroed > 0 && world.is_durable_target_equal_to_source());
}

#[test]
fn source_end_within_a_target_block_is_zero_padded() {
    let regions = RegionTable::new(16);
    let source = FaultyRamDevice::new(&regions, 512, 9 * 512, 1);
    let target = FaultyRamDevice::new(&regions, 4096, 16 * KIB, 2);
    source.with_content(|bytes| bytes.fill(3));
    target.with_content(|bytes| bytes.fill(4));
    let devices =
        CopyDevices { source: Arc::new(source.clone()), target: Arc::new(target.clone()), regions };
    let world = CopyTest { devices, source, target, options: test_options() };
    let (tally, ending) = world.run_copy(&mut RecordedCheckpoints::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.until, ending), (9 * 512, None));
    assert!(world.is_durable_target_equal_to_source());
    world.target.with_content(|bytes| {
        assert!(bytes[9 * 512..8192].iter().all(|byte| *byte == 0));
        assert!(bytes[8192..].iter().all(|byte| *byte == 4));
    });
    assert_eq!(world.run_comparison(&tally).0.different, 0);
}

#[test]
fn source_larger_than_the_target_is_rejected_by_name() {
    let regions = RegionTable::new(16);
    let limits = |block: u32, len: usize| FaultyRamDevice::new(&regions, block, len, 1).limits();
    let refuse =
        |source: &tenmil_base::Limits, target: &tenmil_base::Limits, options: &CopyOptions| {
            CopyRequestSizes::from_limits(("ram:a", source), ("ram:b", target), options)
                .unwrap_err()
                .text
        };
    assert_eq!(
        refuse(&limits(512, 8192), &limits(512, 4096), &test_options()),
        "copy to ram:b: it has 4096 bytes, expected at least the 8192 of ram:a"
    );
    let small = CopyOptions { request_bytes: 512, ..test_options() };
    let text = refuse(&limits(512, 4096), &limits(4096, 8192), &small);
    assert!(text.ends_with("blocks have 4096 bytes, expected at most the 512 that go at once"));
    let metadata = tenmil_base::Limits { metadata_size: 8, ..limits(512, 4096) };
    assert!(refuse(&metadata, &limits(512, 8192), &test_options()).contains("8 bytes of metadata"));
}

#[test]
fn removed_device_ends_the_copy_and_frees_all_buffers() {
    let world = CopyTest::new(1, (512, 512));
    let clock = Clock::start();
    let device = |name, medium: &FaultyRamDevice| {
        Bdev::new(name, Arc::new(medium.clone()), BdevOptions::new(clock, 1)).unwrap()
    };
    let (source, target) = (device("source", &world.source), device("target", &world.target));
    world.target.stop_completing(Operation::Write);
    let open = |device: &Bdev, claim| -> Arc<dyn BlockDevice> {
        Arc::new(device.open(claim, "test").unwrap())
    };
    let devices = CopyDevices {
        source: open(&source, Claim::ReadShared),
        target: open(&target, Claim::Exclusive),
        regions: world.devices.regions.clone(),
    };
    let copy = ValidatedCopy::new(devices, test_options(), ("source", "target")).unwrap();
    let mut turns = 0;
    let (tally, ending) = copy.run(CopyStats::default(), &clock, &mut (), &mut |_, _| {
        turns += 1;
        if turns == 50 {
            target.remove();
        }
        true
    });
    let Some(ending) = ending else { panic!("{tally:?}") };
    assert!(ending.to_string().ends_with("the device has been removed"), "{ending}");
    assert!(tally.until < 1 << 20 && !tally.is_flushed);
    drop(copy);
    assert_eq!((source.list_holders(), target.list_holders()), (Vec::new(), Vec::new()));
    assert_eq!((source.open_channel_count(), target.open_channel_count()), (0, 0));
}

#[test]
fn failed_checkpoint_write_ends_the_copy() {
    struct Full;
    impl CheckpointSink for Full {
        fn store_checkpoint(&mut self, until: u64, _lost: &[Range<u64>]) -> Result<(), String> {
            Err(format!("no room for {until}"))
        }
    }
    let world = CopyTest::new(1, (512, 512));
    let mut full = Full;
    let mut pass = CopyEngine::new(
        &world.devices,
        &world.options,
        world.geometry(),
        CopyStats::default(),
        &mut full,
    )
    .unwrap();
    let mut now = Instant::default();
    while !pass.is_finished() {
        pass.advance(now);
        now = now.after(Span::from_secs(1));
        assert!(now.ns < 1_000_000_000 * STEPS_MAX as u64);
    }
    assert!(matches!(pass.into_result().1, Some(CopyAbort::Record(_))));
}
