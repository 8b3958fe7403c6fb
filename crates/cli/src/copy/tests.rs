//! Tests of copies between simulated devices that lose power, blocks and space, in simulated time.

mod shelf;

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Instant, IoStatus, Operation, Random, Span};
use tenmil_block::{Bdev, BdevOptions, Claim};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use self::shelf::Shelf;
use super::check::Check;
use super::drive::CopyTask;
use super::engine::CopyEngine;
use super::geometry::Geometry;
use super::{
    CheckpointSink, CompareResult, Copy, CopyAbort, CopyOptions, CopySide, CopyStats, Devices,
    OnError,
};

const KIB: usize = 1024;

/// State that survives the process.
#[derive(Default)]
struct Kept {
    until: u64,
    lost: Vec<Range<u64>>,
    count: usize,
}

impl CheckpointSink for Kept {
    fn keep(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        assert!(until >= self.until, "no step back");
        (self.until, self.lost, self.count) = (until, lost.to_vec(), self.count + 1);
        Ok(())
    }
}

impl Kept {
    fn tally(&self) -> CopyStats {
        CopyStats { until: self.until, lost: self.lost.clone(), ..CopyStats::default() }
    }
}

fn options() -> CopyOptions {
    CopyOptions { depth: 4, request_bytes: 16 << 10, ..CopyOptions::default() }
}

struct World {
    devices: Devices,
    source: Shelf,
    target: Shelf,
    options: CopyOptions,
}

impl World {
    /// A source of 1 MiB with holes and zeroes, and a target full of other data.
    fn new(seed: u64, blocks: (u32, u32)) -> Self {
        let regions = RegionTable::new(16);
        let mut random = Random::new(seed);
        let source = Shelf::new(&regions, blocks.0, 1024 * KIB, seed);
        let target = Shelf::new(&regions, blocks.1, 1024 * KIB + 64 * KIB, seed + 1);
        source.with_bytes(|bytes| {
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
        source.tell_holes(seed.is_multiple_of(2));
        target.with_bytes(|bytes| bytes.fill(0xdd));
        let devices =
            Devices { source: Arc::new(source.clone()), target: Arc::new(target.clone()), regions };
        Self { devices, source, target, options: options() }
    }

    fn geometry(&self) -> Geometry {
        let limits = (self.source.limits(), self.target.limits());
        Geometry::of(("source", &limits.0), ("target", &limits.1), &self.options).unwrap()
    }

    /// Runs this many steps of a simulated second each; returns how the copy ended, if it did.
    fn copy(&self, kept: &mut Kept, steps: usize) -> Option<(CopyStats, Option<CopyAbort>)> {
        let from = kept.tally();
        let mut pass =
            CopyEngine::new(&self.devices, &self.options, self.geometry(), from, kept).unwrap();
        for step in 0..steps {
            pass.step(Instant { ns: 1_000_000_000 * step as u64 });
            let (done, size) = pass.progress();
            assert!(done <= size);
            if pass.is_over() {
                return Some(pass.end());
            }
        }
        None
    }

    fn compare(&self, tally: &CopyStats) -> (CompareResult, Option<CopyAbort>) {
        let mut check = Check::new(&self.devices, self.geometry(), tally).unwrap();
        for step in 0..STEPS_MAX {
            check.step(Instant { ns: step as u64 });
            if check.is_over() {
                return check.end();
            }
        }
        panic!("it does not come to an end");
    }

    /// Whether the durable data of the target equal the source.
    fn is_copied(&self) -> bool {
        self.source.with_bytes(|source| {
            self.target.with_bytes(|target| source[..] == target[..source.len()])
        })
    }
}

const STEPS_MAX: usize = 100_000;

#[test]
fn a_copy_is_exact_and_leaves_alone_what_lies_behind_it() {
    for seed in 0..8 {
        for blocks in [(512, 512), (512, 4096), (4096, 512)] {
            let world = World::new(seed, blocks);
            let mut kept = Kept::default();
            let (tally, ending) = world.copy(&mut kept, STEPS_MAX).unwrap();
            assert_eq!((ending, tally.until, kept.until), (None, 1 << 20, 1 << 20));
            assert!(tally.is_flushed);
            world.target.cut();
            assert!(world.is_copied(), "seed {seed}");
            assert_eq!(tally.written + tally.zeroed + tally.kept, 1 << 20);
            world.target.with_bytes(|bytes| {
                assert!(bytes[1024 * KIB..].iter().all(|byte| *byte == 0xdd));
            });
            let (comparison, ending) = world.compare(&tally);
            assert_eq!((ending, comparison.compared), (None, 1 << 20));
            assert_eq!((comparison.different, comparison.first), (0, None));
        }
    }
}

#[test]
fn a_copy_that_is_cut_at_any_step_goes_on_and_loses_nothing() {
    for seed in 0..6 {
        for steps in 0.. {
            let world = World::new(seed, (512, 1024));
            let mut kept = Kept::default();
            let ended = world.copy(&mut kept, steps).is_some();
            // The requests in flight end with the process.
            world.source.cut();
            world.target.cut();
            let until = usize::try_from(kept.until).unwrap();
            world.source.with_bytes(|source| {
                world.target.with_bytes(|target| {
                    assert!(source[..until] == target[..until], "step {steps} of seed {seed}");
                });
            });
            let (tally, ending) = world.copy(&mut kept, STEPS_MAX).unwrap();
            assert_eq!((ending, tally.until), (None, 1 << 20));
            world.target.cut();
            assert!(world.is_copied(), "step {steps} of seed {seed}");
            if ended {
                assert!(steps > 20 && kept.count > 3, "{steps} steps, {} records", kept.count);
                break;
            }
        }
    }
}

#[test]
fn somebody_who_stops_it_finds_what_was_done_flushed() {
    let world = World::new(1, (512, 512));
    let mut kept = Kept::default();
    let geometry = world.geometry();
    let mut pass =
        CopyEngine::new(&world.devices, &world.options, geometry, CopyStats::default(), &mut kept)
            .unwrap();
    for step in 0..STEPS_MAX as u64 {
        pass.step(Instant { ns: step });
        if step > 20 {
            pass.stop_submitting();
        }
        if pass.is_over() {
            break;
        }
    }
    let (tally, ending) = pass.end();
    assert_eq!((ending, tally.is_flushed), (Some(CopyAbort::Interrupted), true));
    assert!(tally.until > 0 && tally.until < 1 << 20 && kept.until == tally.until);
    world.target.cut();
    let (tally, ending) = world.copy(&mut kept, STEPS_MAX).unwrap();
    assert!(ending.is_none() && tally.read < 1 << 20 && world.is_copied());
}

#[test]
fn a_block_that_cannot_be_read_is_named_or_left_out() {
    let mut world = World::new(1, (512, 512));
    world.source.with_bytes(|bytes| bytes.fill(5));
    world.source.break_block(100);
    world.source.break_block(101);
    world.source.break_block(700);
    let mut kept = Kept::default();
    let (tally, ending) = world.copy(&mut kept, STEPS_MAX).unwrap();
    let Some(CopyAbort::Failed { side: CopySide::Source, operation, range, status }) = ending
    else {
        panic!("{ending:?}");
    };
    assert_eq!((operation, status), (Operation::Read, IoStatus::UNRECOVERED_READ));
    assert_eq!(range, 51_200..51_712, "one block, however much was read at once");
    assert!(tally.until <= 51_200 && tally.is_flushed);

    world.options.on_error = OnError::Skip;
    let (tally, ending) = world.copy(&mut kept, STEPS_MAX).unwrap();
    assert_eq!((ending, tally.until), (None, 1 << 20));
    assert_eq!(tally.lost, [51_200..52_224, 358_400..358_912]);
    assert_eq!(kept.lost, tally.lost);
    world.target.with_bytes(|bytes| {
        assert!(bytes[51_200..52_224].iter().all(|byte| *byte == 0), "nothing old is left");
        assert!(bytes[52_224] == 5 && bytes[51_199] == 5);
    });
    let (comparison, ending) = world.compare(&tally);
    assert_eq!((comparison.different, ending), (0, None), "what was lost is left out");
    let (_, ending) = world.compare(&CopyStats::default());
    assert!(matches!(ending, Some(CopyAbort::Failed { side: CopySide::Source, .. })), "{ending:?}");
}

#[test]
fn blocks_of_the_target_with_something_lost_in_them_are_not_compared() {
    let mut world = World::new(1, (512, 4096));
    world.options.on_error = OnError::Skip;
    for block in [100, 101, 2047] {
        world.source.break_block(block);
    }
    let (tally, ending) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.lost.len(), ending), (2, None));
    let (comparison, ending) = world.compare(&tally);
    assert_eq!((comparison.different, ending), (0, None));
    assert_eq!(comparison.compared, (1 << 20) - 2 * 4096);
}

#[test]
fn a_full_target_and_one_that_fails_end_it_with_their_reason() {
    for (status, operation) in [
        (IoStatus::CAPACITY_EXCEEDED, Operation::Write),
        (IoStatus::WRITE_FAULT, Operation::Write),
        (IoStatus::WRITE_FAULT, Operation::WriteZeroes),
        (IoStatus::WRITE_FAULT, Operation::Flush),
    ] {
        let world = World::new(2, (512, 512));
        world.target.fail(operation, status);
        let (tally, ending) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
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
enum Before {
    Stopped,
    Unread,
    Unkept,
}

/// Checkpoint sink that fails from the second time on, if the copy is to end that way.
struct Keeper {
    kept: Kept,
    is_full: bool,
}

impl CheckpointSink for Keeper {
    fn keep(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        if self.is_full && self.kept.count > 0 {
            return Err("no room".into());
        }
        self.kept.keep(until, lost)
    }
}

#[test]
fn a_flush_that_fails_after_the_copy_has_ended_is_the_last_and_nothing_is_kept_after_it() {
    for before in [Before::Stopped, Before::Unread, Before::Unkept] {
        for fails_for_ever in [false, true] {
            let world = World::new(1, (512, 512));
            world.source.with_bytes(|bytes| bytes.fill(5));
            if matches!(before, Before::Unread) {
                world.source.break_block(1500);
            }
            let is_full = matches!(before, Before::Unkept);
            let mut keeper = Keeper { kept: Kept::default(), is_full };
            let (tally, ending, flushes) =
                end_and_fail(&world, &mut keeper, before, fails_for_ever);
            let context = format!("{before:?}, for ever: {fails_for_ever}");
            assert!(matches!(
                (before, &ending),
                (Before::Unkept, Some(CopyAbort::Record(_)))
                    | (Before::Unread, Some(CopyAbort::Failed { operation: Operation::Read, .. }))
                    | (
                        Before::Stopped,
                        Some(CopyAbort::Failed { operation: Operation::Flush, .. })
                    )
            ));
            assert!(!tally.is_flushed, "{context}");
            assert_eq!(flushes, 1, "{context}: a flush is not asked for again");
            assert!(tally.until >= keeper.kept.until && tally.until < 1 << 20, "{context}");
            world.target.cut();
            let until = usize::try_from(keeper.kept.until).unwrap();
            world.target.with_bytes(|bytes| {
                assert!(bytes[..until].iter().all(|byte| *byte == 5), "{context}: {until} kept");
            });
        }
    }
}

/// Copies until something ends it, and fails the flush that follows. Returns the number of flushes from
/// there on.
fn end_and_fail(
    world: &World,
    keeper: &mut Keeper,
    before: Before,
    fails_for_ever: bool,
) -> (CopyStats, Option<CopyAbort>, usize) {
    let from = CopyStats::default();
    let mut pass =
        CopyEngine::new(&world.devices, &world.options, world.geometry(), from, keeper).unwrap();
    let mut ended_after = None;
    for step in 0..STEPS_MAX as u64 {
        pass.step(Instant { ns: step * 1_000_000_000 });
        if matches!(before, Before::Stopped) && pass.progress().0 > 300 << 10 {
            pass.stop_submitting();
        }
        if ended_after.is_none() && pass.has_ended() {
            ended_after = Some(world.target.flushes());
            world.target.fail_one_flush();
            if fails_for_ever {
                world.target.fail(Operation::Flush, IoStatus::WRITE_FAULT);
            }
        }
        if pass.is_over() {
            let (tally, ending) = pass.end();
            return (tally, ending, world.target.flushes() - ended_after.unwrap());
        }
    }
    panic!("{before:?}: it does not come to an end");
}

#[test]
fn a_difference_is_found_and_counted() {
    let world = World::new(3, (512, 4096));
    let (tally, _) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    world.target.with_bytes(|bytes| {
        for at in [4096 * 3, 4096 * 3 + 5, 4096 * 200 + 4095] {
            bytes[at] ^= 1;
        }
    });
    let (comparison, ending) = world.compare(&tally);
    assert_eq!((comparison.different, comparison.first, ending), (2, Some(4096 * 3), None));
    assert_eq!(comparison.block, 4096);
}

#[test]
fn holes_are_not_read_and_zeroes_of_the_target_not_written() {
    let world = World::new(0, (512, 512));
    world.source.with_bytes(|bytes| {
        bytes.fill(0);
        bytes[512 * KIB..][..64 * KIB].fill(9);
    });
    world.source.tell_holes(true);
    let (tally, _) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.read, tally.written), (64 << 10, 64 << 10));
    assert_eq!((tally.zeroed, tally.kept), (960 << 10, 0));
    assert!(world.is_copied());
    world.target.with_bytes(|bytes| bytes.fill(0));
    world.target.tell_holes(true);
    let (tally, _) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.written, tally.zeroed, tally.kept), (64 << 10, 0, 960 << 10));
}

#[test]
fn zeroes_that_are_told_as_data_become_holes_unless_asked_not_to() {
    for sparse in [true, false] {
        let mut world = World::new(1, (512, 512));
        world.source.with_bytes(|bytes| bytes[64 * KIB..].fill(0));
        world.source.tell_holes(false);
        world.options.sparse = sparse;
        world.options.request_bytes = 128 << 10;
        let (tally, _) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
        assert_eq!(tally.read, 1 << 20);
        let written = if sparse { 64 << 10 } else { 1 << 20 };
        assert_eq!(tally.written, written, "sparse: {sparse}");
        assert!(world.is_copied());
    }
}

#[test]
fn a_target_without_an_operation_for_zeroes_is_written_them() {
    let world = World::new(0, (512, 512));
    world.target.without(Operation::WriteZeroes);
    let (tally, ending) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    assert!(ending.is_none() && tally.zeroed > 0 && world.is_copied());
}

#[test]
fn the_end_of_a_source_within_a_block_of_the_target_is_filled_with_zeroes() {
    let regions = RegionTable::new(16);
    let source = Shelf::new(&regions, 512, 9 * 512, 1);
    let target = Shelf::new(&regions, 4096, 16 * KIB, 2);
    source.with_bytes(|bytes| bytes.fill(3));
    target.with_bytes(|bytes| bytes.fill(4));
    let devices =
        Devices { source: Arc::new(source.clone()), target: Arc::new(target.clone()), regions };
    let world = World { devices, source, target, options: options() };
    let (tally, ending) = world.copy(&mut Kept::default(), STEPS_MAX).unwrap();
    assert_eq!((tally.until, ending), (9 * 512, None));
    assert!(world.is_copied());
    world.target.with_bytes(|bytes| {
        assert!(bytes[9 * 512..8192].iter().all(|byte| *byte == 0));
        assert!(bytes[8192..].iter().all(|byte| *byte == 4));
    });
    assert_eq!(world.compare(&tally).0.different, 0);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let regions = RegionTable::new(16);
    let limits = |block: u32, len: usize| Shelf::new(&regions, block, len, 1).limits();
    let refuse =
        |source: &tenmil_base::Limits, target: &tenmil_base::Limits, options: &CopyOptions| {
            Geometry::of(("ram:a", source), ("ram:b", target), options).unwrap_err().text
        };
    assert_eq!(
        refuse(&limits(512, 8192), &limits(512, 4096), &options()),
        "copy to ram:b: it has 4096 bytes, expected at least the 8192 of ram:a"
    );
    let small = CopyOptions { request_bytes: 512, ..options() };
    let text = refuse(&limits(512, 4096), &limits(4096, 8192), &small);
    assert!(text.ends_with("blocks have 4096 bytes, expected at most the 512 that go at once"));
    let metadata = tenmil_base::Limits { metadata_size: 8, ..limits(512, 4096) };
    assert!(refuse(&metadata, &limits(512, 8192), &options()).contains("8 bytes of metadata"));
}

#[test]
fn a_device_that_is_removed_ends_the_copy_and_gives_everything_back() {
    let world = World::new(1, (512, 512));
    let clock = Clock::start();
    let device = |name, medium: &Shelf| {
        Bdev::new(name, Arc::new(medium.clone()), BdevOptions::new(clock, 1)).unwrap()
    };
    let (source, target) = (device("source", &world.source), device("target", &world.target));
    world.target.hang(Operation::Write);
    let open = |device: &Bdev, claim| -> Arc<dyn BlockDevice> {
        Arc::new(device.open(claim, "test").unwrap())
    };
    let devices = Devices {
        source: open(&source, Claim::ReadShared),
        target: open(&target, Claim::Exclusive),
        regions: world.devices.regions.clone(),
    };
    let copy = Copy::new(devices, options(), ("source", "target")).unwrap();
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
fn a_record_that_cannot_be_kept_ends_the_copy() {
    struct Full;
    impl CheckpointSink for Full {
        fn keep(&mut self, until: u64, _lost: &[Range<u64>]) -> Result<(), String> {
            Err(format!("no room for {until}"))
        }
    }
    let world = World::new(1, (512, 512));
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
    while !pass.is_over() {
        pass.step(now);
        now = now.after(Span::from_secs(1));
        assert!(now.ns < 1_000_000_000 * STEPS_MAX as u64);
    }
    assert!(matches!(pass.end().1, Some(CopyAbort::Record(_))));
}
