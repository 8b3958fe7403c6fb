//! Legs that lose completed writes and report it by the next flush.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Random, Request,
    RequestFlags, Span,
};
use tenmil_dma::RegionTable;

use super::disk::{BLOCK, Disk};
use super::oracle::{stamp, version_of};
use crate::file::failing::FailingKind;
use crate::mirror::create::format;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::state::InjectedBug;
use crate::mirror::{Leg, Mirror, MirrorOptions};
use tenmil_block::Opener;

/// Blocks of the mirror: eight regions.
const BLOCKS: u64 = 1024;
/// Blocks of a leg before those of the mirror.
const FIRST: u64 = (1 << 20) / BLOCK as u64;
const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_ms(50),
    probe_every: Span::from_us(20),
    copy_rate: 4 << 30,
};

/// Two disks, a mirror on them, and two channels of it.
struct Bench {
    regions: RegionTable,
    disks: [Disk; 2],
    mirror: Mirror,
    channels: Vec<Box<dyn IoChannel>>,
    now: Instant,
    /// A channel that is not polled while it has no requests.
    idle: Option<usize>,
}

fn legs_of(disks: &[Disk; 2]) -> [Leg; 2] {
    disks.clone().map(|disk| Leg { name: "disk".into(), medium: Ok(Arc::new(disk)) })
}

/// A clock that goes on with each look at it.
fn clock(mut time: Instant) -> impl FnMut() -> Instant {
    move || {
        time = time.after(Span::from_us(10));
        time
    }
}

impl Bench {
    fn new(seed: u64) -> Self {
        let regions = RegionTable::new(100);
        let mut random = Random::new(seed);
        let disks = [(); 2].map(|()| Disk::new(&regions, FIRST + BLOCKS, random.fork()));
        format(&regions, &legs_of(&disks), 7, &mut clock(Instant { ns: 1 })).unwrap();
        Self::over(regions, disks, Instant { ns: 1_000_000 })
    }

    /// One block in each region has version 1, which `channel` has flushed, and version 2, which is not flushed.
    fn with_unflushed_writes(seed: u64, channel: usize) -> Self {
        let mut bench = Self::new(seed);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        assert_eq!(bench.flush(channel), IoStatus::SUCCESS);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench
    }

    /// Opens the mirror on these disks.
    fn over(regions: RegionTable, disks: [Disk; 2], time: Instant) -> Self {
        let options = MirrorOptions::paced(POLICY);
        let mirror = Mirror::open(&regions, &legs_of(&disks), &options, &mut clock(time)).unwrap();
        let channels = (0..2).map(|_| mirror.channel().unwrap()).collect();
        let mut bench = Self { regions, disks, mirror, channels, now: time, idle: None };
        // A loss on the leg that others are still synchronized from would be a second fault.
        bench.settle();
        bench
    }

    fn run(&mut self, channel: usize, request: Request, version: u32) -> (IoStatus, Vec<u8>) {
        let memory = self.regions.allocate_region(BLOCK).unwrap();
        let segment = memory.segment().slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        self.regions.store(segment, &stamp(request.lba, version)).unwrap();
        assert_eq!(self.channels[channel].submit(self.now, &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            self.turn(channel, &mut completions);
        }
        let mut held = vec![0; BLOCK];
        self.regions.load(segment, &mut held).unwrap();
        (completions.as_slice()[0].status, held)
    }

    fn turn(&mut self, channel: usize, completions: &mut CompletionBatch) {
        self.now = self.now.after(Span::from_us(10));
        for (index, other) in self.channels.iter_mut().enumerate() {
            if index != channel && self.idle == Some(index) {
                continue;
            }
            let mut nobody = CompletionBatch::with_capacity(1);
            other.poll(self.now, if index == channel { completions } else { &mut nobody });
        }
    }

    fn write(&mut self, lba: u64, version: u32) {
        let operation = Operation::Write;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        assert_eq!(self.run(0, request, version).0, IoStatus::SUCCESS);
    }

    fn read(&mut self, lba: u64) -> u32 {
        let operation = Operation::Read;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        let (status, held) = self.run(0, request, 0);
        assert_eq!(status, IoStatus::SUCCESS);
        version_of(lba, &held).unwrap()
    }

    fn flush(&mut self, channel: usize) -> IoStatus {
        let flags = RequestFlags::NONE;
        self.run(channel, Request { operation: Operation::Flush, flags, ..Request::PLACEHOLDER }, 0)
            .0
    }

    /// Runs until all legs are in sync and equal.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            self.turn(0, &mut CompletionBatch::with_capacity(1));
            if self.mirror.progress() == (0b11, 0) {
                return;
            }
        }
        panic!("{:?}", self.mirror.progress());
    }

    fn peek(&self, lba: u64) -> [Vec<u8>; 2] {
        self.disks.each_ref().map(|disk| disk.peek(FIRST + lba))
    }
}

#[test]
fn a_leg_that_lost_completed_writes_is_copied_to_before_it_is_read_again() {
    for seed in 0..20 {
        let mut bench = Bench::with_unflushed_writes(seed, 0);
        bench.disks[0].lose();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS, "the other leg holds everything");
        assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}");
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        bench.settle();
        for lba in (0..BLOCKS).step_by(64) {
            assert_eq!(bench.peek(lba), [stamp(lba, 2), stamp(lba, 2)], "seed {seed}");
        }
    }
}

#[test]
fn leg_that_lost_completed_writes_is_not_read_even_before_a_flush() {
    for seed in 0..20 {
        let mut bench = Bench::with_unflushed_writes(seed, 0);
        bench.disks[0].lose_counted();
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        bench.settle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
    }
}

/// As when a target loses power with writes in flight: the leg is given up before it is connected again, and
/// only then counts its loss.
#[test]
fn leg_that_counts_its_loss_when_it_returns_is_copied_to_once() {
    for seed in 0..20 {
        let mut bench = Bench::with_unflushed_writes(seed, 0);
        bench.disks[0].fail();
        bench.write(1, 1);
        assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}");
        bench.disks[0].come_back(false);
        bench.disks[0].lose_counted();
        bench.settle();
        let returns = bench.mirror.shared.returns();
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        assert_eq!(bench.mirror.progress(), (0b11, 0), "seed {seed}");
        assert_eq!(bench.mirror.shared.returns(), returns, "seed {seed}");
        bench.disks[0].lose_counted();
        bench.read(0);
        bench.read(0);
        assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}: a later loss");
    }
}

/// As when the last leg in sync loses its power while the other one is disconnected, and both return.
#[test]
fn a_leg_in_sync_that_has_lost_writes_is_noticed_before_another_is_copied_from_it() {
    for seed in 0..20 {
        let mut bench = Bench::with_unflushed_writes(seed, 0);
        bench.disks[0].fail();
        bench.write(1, 1);
        assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}");
        bench.disks[1].lose_counted();
        bench.disks[0].come_back(false);
        bench.settle();
        let flushes = [bench.flush(0), bench.flush(1)];
        assert_eq!(flushes, [IoStatus::WRITE_FAULT; 2], "seed {seed}: both legs may lack writes");
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2], "seed {seed}");
        bench.settle();
        assert_eq!(bench.mirror.progress(), (0b11, 0), "seed {seed}");
    }
}

/// As when a mirror is closed and opened again in a process that keeps its legs open.
#[test]
fn losses_before_a_mirror_was_opened_fail_no_flush_and_no_leg() {
    let mut bench = Bench::new(0);
    bench.write(0, 1);
    assert_eq!(bench.flush(0), IoStatus::SUCCESS);
    bench.disks.iter().for_each(Disk::lose_counted);
    let Bench { regions, disks, mirror, channels, now, .. } = bench;
    drop((mirror, channels));
    let mut bench = Bench::over(regions, disks, now);
    assert_eq!(bench.read(0), 1);
    assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
    assert_eq!(bench.mirror.progress(), (0b11, 0));
    bench.disks[0].lose_counted();
    bench.read(0);
    bench.read(0);
    assert_eq!(bench.mirror.progress().0, 0b10, "a later loss");
}

#[test]
fn a_flush_fails_on_every_channel_if_no_leg_can_vouch() {
    for seed in 0..20 {
        let mut bench = Bench::with_unflushed_writes(seed, 1);
        bench.disks.iter().for_each(Disk::lose);
        assert_eq!(bench.flush(0), IoStatus::WRITE_FAULT);
        assert_eq!(bench.mirror.progress().0, 0b11, "neither is better than the other");
        let all = |bench: &mut Bench| -> Vec<u32> {
            (0..BLOCKS).step_by(64).map(|lba| bench.read(lba)).collect()
        };
        let found = all(&mut bench);
        assert!(found.iter().all(|version| [1, 2].contains(version)), "{found:?}");
        assert_eq!(all(&mut bench), found, "seed {seed}: all reads come from one leg");
        assert_eq!(bench.flush(1), IoStatus::WRITE_FAULT, "the other channel has to hear of it");
        bench.settle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        assert_eq!(all(&mut bench), found, "seed {seed}");
        for lba in (0..BLOCKS).step_by(64) {
            let [one, other] = bench.peek(lba);
            assert_eq!(one, other, "seed {seed}");
        }
    }
}

#[test]
fn a_loss_that_only_the_background_has_heard_of_is_reported() {
    let mut bench = Bench::new(1);
    bench.write(5, 1);
    // The first flush reports it.
    bench.disks.iter().for_each(Disk::lose);
    let until = bench.now.after(Span::from_ms(200));
    while bench.now < until {
        bench.turn(0, &mut CompletionBatch::with_capacity(1));
    }
    let new = bench.mirror.channel().unwrap();
    bench.channels.push(new);
    for channel in 0..3 {
        assert_eq!(bench.flush(channel), IoStatus::WRITE_FAULT, "channel {channel}");
    }
    bench.settle();
    let new = bench.mirror.channel().unwrap();
    bench.channels.push(new);
    for channel in 0..4 {
        assert_eq!(bench.flush(channel), IoStatus::SUCCESS, "channel {channel}");
    }
}

#[test]
fn a_write_that_completes_after_the_flush_that_reported_a_loss_fails_the_next_flush() {
    let mut met = 0;
    for seed in 0..40 {
        let mut bench = Bench::new(seed);
        bench.write(0, 1);
        let memory = bench.regions.allocate_region(BLOCK).unwrap();
        let segment = memory.segment().slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        let write = Request { lba: 1, blocks: 1, segment_count: 1, ..Request::PLACEHOLDER };
        let requests = [(1, Operation::Write, write), (2, Operation::Flush, Request::PLACEHOLDER)]
            .map(|(token, operation, request)| Request { token, operation, ..request });
        bench.disks.iter().for_each(Disk::lose);
        assert_eq!(bench.channels[0].submit(bench.now, &requests, &[segment]), 2);
        let mut completions = CompletionBatch::with_capacity(2);
        while completions.len() < 2 {
            bench.turn(0, &mut completions);
        }
        let last = completions.as_slice()[1];
        if (last.token, last.status) == (1, IoStatus::SUCCESS) {
            met += 1;
            assert_eq!(bench.flush(0), IoStatus::WRITE_FAULT, "seed {seed}");
        }
    }
    assert!(met > 5, "{met} writes were completed later");
}

/// A mirror whose first leg has lost writes and is in sync again, while the second channel had no
/// requests. Since then there are unflushed writes.
fn returned_behind_an_idle_channel(seed: u64, counts: bool) -> Bench {
    let mut bench = Bench::new(seed);
    if !counts {
        bench.disks.iter().for_each(Disk::stop_counting);
    }
    bench.idle = Some(1);
    (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
    bench.disks[0].lose();
    assert_eq!(bench.flush(0), IoStatus::SUCCESS);
    assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}");
    bench.settle();
    (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
    bench
}

#[test]
fn a_loss_that_was_repaired_is_not_reported_by_a_channel_that_was_idle() {
    for seed in 0..20 {
        let mut bench = returned_behind_an_idle_channel(seed, true);
        assert_eq!(bench.flush(1), IoStatus::SUCCESS);
        assert_eq!(bench.mirror.progress(), (0b11, 0), "seed {seed}: nothing was lost since");

        let mut bench = returned_behind_an_idle_channel(seed, true);
        bench.disks[1].lose();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "seed {seed}: the first leg has everything");
        assert_eq!(bench.mirror.progress().0, 0b01, "seed {seed}");
        (0..BLOCKS).step_by(64).for_each(|lba| assert_eq!(bench.read(lba), 2, "seed {seed}"));
    }
}

#[test]
fn a_loss_since_a_leg_came_back_is_reported_by_a_channel_that_was_idle() {
    for (seed, counts) in (0..20).flat_map(|seed| [(seed, true), (seed, false)]) {
        let mut bench = returned_behind_an_idle_channel(seed, counts);
        bench.disks[0].lose();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "the other leg has everything");
        assert_eq!(bench.mirror.progress().0, 0b10, "seed {seed}, counts: {counts}");
        (0..BLOCKS).step_by(64).for_each(|lba| assert_eq!(bench.read(lba), 2, "seed {seed}"));

        let mut bench = returned_behind_an_idle_channel(seed, counts);
        bench.disks.iter().for_each(Disk::lose);
        assert_eq!(bench.flush(1), IoStatus::WRITE_FAULT, "seed {seed}, counts: {counts}");
    }
}

#[test]
fn a_leg_comes_back_once_for_a_loss_that_every_channel_reports() {
    for (seed, counts) in (0..20).flat_map(|seed| [(seed, true), (seed, false)]) {
        let mut bench = Bench::new(seed);
        if !counts {
            bench.disks.iter().for_each(Disk::stop_counting);
        }
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        let before = bench.mirror.shared.returns();
        bench.disks[0].lose();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        bench.settle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        let returns = bench.mirror.shared.returns() - before;
        assert_eq!((bench.mirror.progress(), returns), ((0b11, 0), 1), "seed {seed}: {counts}");
    }
}

#[test]
fn a_loss_since_a_leg_came_back_that_only_an_idle_channel_reports_has_it_copied_to_again() {
    let mut met = 0;
    for (seed, steps) in (0..20).flat_map(|seed| (0..12).map(move |steps| (seed, 5 * steps))) {
        let mut bench = Bench::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[0].lose();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        while bench.mirror.shared.masks().write & 1 == 0 {
            bench.turn(0, &mut CompletionBatch::with_capacity(1));
        }
        (0..steps).for_each(|_| bench.turn(0, &mut CompletionBatch::with_capacity(1)));
        // The channel that asked for nothing meanwhile is the first to flush the leg after the loss.
        bench.disks[0].report_once();
        bench.disks[0].lose();
        let before = bench.mirror.shared.returns();
        for _ in 0..12 {
            bench.turn(1, &mut CompletionBatch::with_capacity(1));
        }
        bench.idle = None;
        bench.settle();
        met += bench.mirror.shared.returns() - before;
        for lba in (0..BLOCKS).step_by(64) {
            assert_eq!(bench.peek(lba), [stamp(lba, 2), stamp(lba, 2)], "seed {seed}, {steps}");
        }
    }
    assert!(met > 20, "{met} of them were copied to again");
}

#[test]
fn a_loss_of_the_last_leg_that_only_the_flush_of_its_return_reports_fails_a_flush_of_every_channel()
{
    for seed in 0..20 {
        let mut bench = Bench::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        bench.disks[0].lose();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        while bench.mirror.shared.masks().write & 1 == 0 {
            bench.turn(0, &mut CompletionBatch::with_capacity(1));
        }
        // The idle channel sends its flush to the leg, and gets the answer when the leg is the last one.
        bench.turn(1, &mut CompletionBatch::with_capacity(1));
        bench.settle();
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[1].fail();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        assert_eq!(bench.mirror.progress().0, 0b01, "seed {seed}");
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 3));
        bench.disks[0].report_once();
        bench.disks[0].lose();
        for _ in 0..12 {
            bench.turn(1, &mut CompletionBatch::with_capacity(1));
        }
        for channel in [0, 1] {
            assert_eq!(bench.flush(channel), IoStatus::WRITE_FAULT, "seed {seed}, {channel}");
        }
    }
}

#[test]
fn a_loss_while_a_leg_is_copied_to_has_it_copied_to_again() {
    let mut met = 0;
    for (seed, after) in (0..10).flat_map(|seed| (0..60).map(move |after| (seed, after))) {
        let mut bench = Bench::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[0].lose();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..5 * after).for_each(|_| bench.turn(0, &mut CompletionBatch::with_capacity(1)));
        met += u32::from(bench.mirror.progress().0 == 0b10);
        bench.disks[0].lose();
        bench.settle();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "seed {seed}, after {after}");
        if bench.mirror.progress().0 == 0b11 {
            for lba in (0..BLOCKS).step_by(64) {
                let held = bench.peek(lba);
                assert_eq!(held, [stamp(lba, 2), stamp(lba, 2)], "seed {seed}, after {after}");
            }
        }
    }
    assert!(met > 20, "{met} of them were met while it came back");
}

/// Has a leg lose its unflushed writes during the resynchronization after a crash. Returns whether a
/// block that both legs held before has become older on the other leg.
fn resynchronize_from_a_leg_that_loses(seed: u64, planted: Option<InjectedBug>) -> bool {
    let bench = Bench::with_unflushed_writes(seed, 0);
    // The host crashes, and the legs do not.
    let Bench { regions, disks, mut now, mirror, channels, .. } = bench;
    drop((channels, mirror));
    let legs = disks.clone().map(|disk| Leg { name: "disk".into(), medium: Ok(Arc::new(disk)) });
    let mut later = || {
        now = now.after(Span::from_us(10));
        now
    };
    let options = MirrorOptions::paced(POLICY);
    let mirror = Mirror::open(&regions, &legs, &options, &mut later).unwrap();
    mirror.shared.lock().planted = planted;
    let channels = (0..2).map(|_| mirror.channel().unwrap()).collect();
    let mut bench = Bench { regions, disks, mirror, channels, now, idle: None };
    assert!(bench.mirror.progress().1 > 0, "it was being written");
    bench.disks[0].lose();
    bench.settle();
    (0..BLOCKS).step_by(64).any(|lba| bench.peek(lba)[1] != stamp(lba, 2))
}

#[test]
fn a_leg_that_loses_writes_during_a_resynchronization_takes_none_from_the_others() {
    for seed in 0..20 {
        assert!(!resynchronize_from_a_leg_that_loses(seed, None), "seed {seed}");
    }
    let bug = Some(InjectedBug::CopiesBeforeFlushing);
    assert!((0..20).any(|seed| resynchronize_from_a_leg_that_loses(seed, bug)), "the bug");
}

/// A mirror of two files, of which one or both can be made to fail flushes.
struct Files {
    regions: RegionTable,
    kind: FailingKind,
    mirror: Mirror,
    clock: tenmil_linux::Clock,
    _directory: tempfile::TempDir,
}

impl Files {
    /// The legs are of these types, with these fields.
    fn new(legs: [(&str, &str); 2]) -> Self {
        let (regions, clock) = (RegionTable::new(100), tenmil_linux::Clock::start());
        let (kind, directory) = (FailingKind::default(), tempfile::tempdir().unwrap());
        let opener = Opener {
            regions: &regions,
            clock,
            seed: 1,
            kinds: &crate::tests::kinds_with(&[("failing", &kind)]),
        };
        let mut names = ["a", "b"].into_iter();
        let legs = legs.map(|(scheme, fields)| {
            let name = names.next().unwrap();
            let path = directory.path().join(name);
            let made = std::fs::File::options().write(true).create_new(true).open(&path);
            made.unwrap().set_len(3 << 20).unwrap();
            let uri = format!("{scheme}{}{fields}", path.display()).parse().unwrap();
            Leg { name: name.into(), medium: Ok(opener.open(&uri).unwrap().medium) }
        });
        let mut now = || clock.now();
        format(&regions, &legs, 7, &mut now).unwrap();
        let mirror = Mirror::open(&regions, &legs, &MirrorOptions::paced(POLICY), &mut now);
        Self { mirror: mirror.unwrap(), regions, kind, clock, _directory: directory }
    }

    fn run(
        &self,
        channels: &mut [Box<dyn IoChannel>],
        asked: usize,
        operation: Operation,
    ) -> IoStatus {
        let memory = self.regions.allocate_region(BLOCK).unwrap();
        let segment = memory.segment().slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        let moves = operation == Operation::Write;
        let (blocks, segment_count) = (u32::from(moves), u16::from(moves));
        let request = Request { blocks, segment_count, operation, ..Request::PLACEHOLDER };
        assert_eq!(channels[asked].submit(self.clock.now(), &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            channels[asked].flush();
            self.turn(channels, Some(asked), &mut completions);
        }
        completions.as_slice()[0].status
    }

    fn turn(
        &self,
        channels: &mut [Box<dyn IoChannel>],
        asked: Option<usize>,
        into: &mut CompletionBatch,
    ) {
        for (index, channel) in channels.iter_mut().enumerate() {
            let mut nobody = CompletionBatch::with_capacity(1);
            channel.poll(self.clock.now(), if Some(index) == asked { into } else { &mut nobody });
        }
        tenmil_linux::named_thread::yield_cpu();
    }
}

#[test]
fn a_leg_on_a_file_that_lost_writes_comes_back_by_itself() {
    for fields in ["", "?direct=no"] {
        let bench = Files::new([("failing:", fields), ("file:", "?engine=threads")]);
        let mut channels: Vec<_> = (0..2).map(|_| bench.mirror.channel().unwrap()).collect();
        let until = bench.clock.now().after(Span::from_secs(60));
        let mut none = CompletionBatch::with_capacity(1);
        for round in 0..3 {
            assert_eq!(bench.run(&mut channels, 0, Operation::Write), IoStatus::SUCCESS);
            bench.kind.fail(2);
            assert_eq!(bench.run(&mut channels, 0, Operation::Flush), IoStatus::SUCCESS);
            while bench.kind.syncs.load(Ordering::Relaxed) > 0
                || bench.mirror.progress() != (0b11, 0)
            {
                assert!(bench.clock.now() < until, "{:?} {fields:?}", bench.mirror.progress());
                bench.turn(&mut channels, None, &mut none);
            }
            for channel in 0..2 {
                let status = bench.run(&mut channels, channel, Operation::Flush);
                assert_eq!(status, IoStatus::SUCCESS, "round {round}");
            }
            channels.push(bench.mirror.channel().unwrap());
        }
    }
}

#[test]
fn legs_on_files_that_both_lost_writes_fail_a_flush_of_every_channel_and_go_on() {
    let bench = Files::new([("failing:", ""); 2]);
    let mut channels: Vec<_> = (0..2).map(|_| bench.mirror.channel().unwrap()).collect();
    for round in 0..3 {
        assert_eq!(bench.run(&mut channels, 0, Operation::Write), IoStatus::SUCCESS);
        bench.kind.fail(u32::MAX);
        assert_ne!(bench.run(&mut channels, 0, Operation::Flush), IoStatus::SUCCESS);
        bench.kind.fail(0);
        assert_ne!(bench.run(&mut channels, 1, Operation::Flush), IoStatus::SUCCESS);
        for channel in 0..2 {
            let mut flush = |_| bench.run(&mut channels, channel, Operation::Flush);
            let succeeds = (0..1000).map(&mut flush).any(|status| status == IoStatus::SUCCESS);
            assert!(succeeds, "round {round}, channel {channel}");
        }
    }
}
