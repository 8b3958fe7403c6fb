//! Legs that lose completed writes and report it by the next flush.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Random, Request,
    RequestFlags, Span,
};
use tenmil_dma::RegionTable;

use super::block_model::{parse_version, versioned_contents};
use super::simulated_disk::{BLOCK, SimulatedDisk};
use crate::file::failing_sync_file::FailingSyncFileType;
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::mirror_state::InjectedBug;
use crate::mirror::{Mirror, MirrorLegDevice, MirrorOptions};
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
struct LossFixture {
    regions: RegionTable,
    disks: [SimulatedDisk; 2],
    mirror: Mirror,
    channels: Vec<Box<dyn IoChannel>>,
    now: Instant,
    /// A channel that is not polled while it has no requests.
    idle: Option<usize>,
}

fn legs_on(disks: &[SimulatedDisk; 2]) -> [MirrorLegDevice; 2] {
    disks.clone().map(|disk| MirrorLegDevice { name: "disk".into(), medium: Ok(Arc::new(disk)) })
}

/// A clock that goes on with each look at it.
fn advancing_clock(mut time: Instant) -> impl FnMut() -> Instant {
    move || {
        time = time.after(Span::from_us(10));
        time
    }
}

impl LossFixture {
    fn new(seed: u64) -> Self {
        let regions = RegionTable::new(100);
        let mut random = Random::new(seed);
        let disks = [(); 2].map(|()| SimulatedDisk::new(&regions, FIRST + BLOCKS, random.fork()));
        format_mirror(&regions, &legs_on(&disks), 7, &mut advancing_clock(Instant { ns: 1 }))
            .unwrap();
        Self::open_on_disks(regions, disks, Instant { ns: 1_000_000 })
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
    fn open_on_disks(regions: RegionTable, disks: [SimulatedDisk; 2], time: Instant) -> Self {
        let options = MirrorOptions::with_resync_policy(POLICY);
        let mirror =
            Mirror::open(&regions, &legs_on(&disks), &options, &mut advancing_clock(time)).unwrap();
        let channels = (0..2).map(|_| mirror.channel().unwrap()).collect();
        let mut bench = Self { regions, disks, mirror, channels, now: time, idle: None };
        // A loss on the leg that others are still synchronized from would be a second fault.
        bench.run_until_idle();
        bench
    }

    fn run_request(
        &mut self,
        channel: usize,
        request: Request,
        version: u32,
    ) -> (IoStatus, Vec<u8>) {
        let memory = self.regions.allocate_region(BLOCK).unwrap();
        let segment = memory.segment().slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        self.regions.store(segment, &versioned_contents(request.lba, version)).unwrap();
        assert_eq!(self.channels[channel].submit(self.now, &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            self.poll_once(channel, &mut completions);
        }
        let mut held = vec![0; BLOCK];
        self.regions.load(segment, &mut held).unwrap();
        (completions.as_slice()[0].status, held)
    }

    fn poll_once(&mut self, channel: usize, completions: &mut CompletionBatch) {
        self.now = self.now.after(Span::from_us(10));
        for (index, other) in self.channels.iter_mut().enumerate() {
            if index != channel && self.idle == Some(index) {
                continue;
            }
            let mut discarded = CompletionBatch::with_capacity(1);
            other.poll(self.now, if index == channel { completions } else { &mut discarded });
        }
    }

    fn write(&mut self, lba: u64, version: u32) {
        let operation = Operation::Write;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        assert_eq!(self.run_request(0, request, version).0, IoStatus::SUCCESS);
    }

    fn read(&mut self, lba: u64) -> u32 {
        let operation = Operation::Read;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        let (status, held) = self.run_request(0, request, 0);
        assert_eq!(status, IoStatus::SUCCESS);
        parse_version(lba, &held).unwrap()
    }

    fn flush(&mut self, channel: usize) -> IoStatus {
        let flags = RequestFlags::NONE;
        self.run_request(
            channel,
            Request { operation: Operation::Flush, flags, ..Request::PLACEHOLDER },
            0,
        )
        .0
    }

    /// Runs until all legs are in sync and equal.
    fn run_until_idle(&mut self) {
        for _ in 0..100_000 {
            self.poll_once(0, &mut CompletionBatch::with_capacity(1));
            if self.mirror.in_sync_mask_and_remaining_regions() == (0b11, 0) {
                return;
            }
        }
        panic!("{:?}", self.mirror.in_sync_mask_and_remaining_regions());
    }

    fn read_leg_block(&self, lba: u64) -> [Vec<u8>; 2] {
        self.disks.each_ref().map(|disk| disk.read_block(FIRST + lba))
    }
}

#[test]
fn leg_that_lost_writes_is_resynchronized_before_reads() {
    for seed in 0..20 {
        let mut bench = LossFixture::with_unflushed_writes(seed, 0);
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS, "the other leg holds everything");
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b10, "seed {seed}");
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        bench.run_until_idle();
        for lba in (0..BLOCKS).step_by(64) {
            assert_eq!(
                bench.read_leg_block(lba),
                [versioned_contents(lba, 2), versioned_contents(lba, 2)],
                "seed {seed}"
            );
        }
    }
}

#[test]
fn leg_that_lost_writes_is_not_read_before_a_flush() {
    for seed in 0..20 {
        let mut bench = LossFixture::with_unflushed_writes(seed, 0);
        bench.disks[0].lose_unflushed_counted();
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        bench.run_until_idle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
    }
}

/// As when a target loses power with writes in flight: the leg is given up before it is connected again, and
/// only then counts its loss.
#[test]
fn loss_counted_at_leg_return_causes_one_resync() {
    for seed in 0..20 {
        let mut bench = LossFixture::with_unflushed_writes(seed, 0);
        bench.disks[0].fail_all_requests();
        bench.write(1, 1);
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b10, "seed {seed}");
        bench.disks[0].end_failure(false);
        bench.disks[0].lose_unflushed_counted();
        bench.run_until_idle();
        let returns = bench.mirror.shared.leg_return_count();
        for lba in (0..BLOCKS).step_by(64).chain((0..BLOCKS).step_by(64)) {
            assert_eq!(bench.read(lba), 2, "seed {seed}, block {lba}");
        }
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions(), (0b11, 0), "seed {seed}");
        assert_eq!(bench.mirror.shared.leg_return_count(), returns, "seed {seed}");
        bench.disks[0].lose_unflushed_counted();
        bench.read(0);
        bench.read(0);
        assert_eq!(
            bench.mirror.in_sync_mask_and_remaining_regions().0,
            0b10,
            "seed {seed}: a later loss"
        );
    }
}

/// As when the last leg in sync loses its power while the other one is disconnected, and both return.
#[test]
fn loss_of_a_resync_source_is_detected_before_copying() {
    for seed in 0..20 {
        let mut bench = LossFixture::with_unflushed_writes(seed, 0);
        bench.disks[0].fail_all_requests();
        bench.write(1, 1);
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b10, "seed {seed}");
        bench.disks[1].lose_unflushed_counted();
        bench.disks[0].end_failure(false);
        bench.run_until_idle();
        let flushes = [bench.flush(0), bench.flush(1)];
        assert_eq!(flushes, [IoStatus::WRITE_FAULT; 2], "seed {seed}: both legs may lack writes");
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2], "seed {seed}");
        bench.run_until_idle();
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions(), (0b11, 0), "seed {seed}");
    }
}

/// As when a mirror is closed and opened again in a process that keeps its legs open.
#[test]
fn losses_before_open_fail_no_flush() {
    let mut bench = LossFixture::new(0);
    bench.write(0, 1);
    assert_eq!(bench.flush(0), IoStatus::SUCCESS);
    bench.disks.iter().for_each(SimulatedDisk::lose_unflushed_counted);
    let LossFixture { regions, disks, mirror, channels, now, .. } = bench;
    drop((mirror, channels));
    let mut bench = LossFixture::open_on_disks(regions, disks, now);
    assert_eq!(bench.read(0), 1);
    assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
    assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions(), (0b11, 0));
    bench.disks[0].lose_unflushed_counted();
    bench.read(0);
    bench.read(0);
    assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b10, "a later loss");
}

#[test]
fn flush_fails_on_every_channel_if_all_legs_lost_writes() {
    for seed in 0..20 {
        let mut bench = LossFixture::with_unflushed_writes(seed, 1);
        bench.disks.iter().for_each(SimulatedDisk::lose_unflushed);
        assert_eq!(bench.flush(0), IoStatus::WRITE_FAULT);
        assert_eq!(
            bench.mirror.in_sync_mask_and_remaining_regions().0,
            0b11,
            "neither is better than the other"
        );
        let all = |bench: &mut LossFixture| -> Vec<u32> {
            (0..BLOCKS).step_by(64).map(|lba| bench.read(lba)).collect()
        };
        let found = all(&mut bench);
        assert!(found.iter().all(|version| [1, 2].contains(version)), "{found:?}");
        assert_eq!(all(&mut bench), found, "seed {seed}: all reads come from one leg");
        assert_eq!(bench.flush(1), IoStatus::WRITE_FAULT, "the other channel has to hear of it");
        bench.run_until_idle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        assert_eq!(all(&mut bench), found, "seed {seed}");
        for lba in (0..BLOCKS).step_by(64) {
            let [one, other] = bench.read_leg_block(lba);
            assert_eq!(one, other, "seed {seed}");
        }
    }
}

#[test]
fn loss_seen_only_by_background_io_is_reported() {
    let mut bench = LossFixture::new(1);
    bench.write(5, 1);
    // The first flush reports it.
    bench.disks.iter().for_each(SimulatedDisk::lose_unflushed);
    let until = bench.now.after(Span::from_ms(200));
    while bench.now < until {
        bench.poll_once(0, &mut CompletionBatch::with_capacity(1));
    }
    let new = bench.mirror.channel().unwrap();
    bench.channels.push(new);
    for channel in 0..3 {
        assert_eq!(bench.flush(channel), IoStatus::WRITE_FAULT, "channel {channel}");
    }
    bench.run_until_idle();
    let new = bench.mirror.channel().unwrap();
    bench.channels.push(new);
    for channel in 0..4 {
        assert_eq!(bench.flush(channel), IoStatus::SUCCESS, "channel {channel}");
    }
}

#[test]
fn late_write_after_a_reported_loss_fails_the_next_flush() {
    let mut met = 0;
    for seed in 0..40 {
        let mut bench = LossFixture::new(seed);
        bench.write(0, 1);
        let memory = bench.regions.allocate_region(BLOCK).unwrap();
        let segment = memory.segment().slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        let write = Request { lba: 1, blocks: 1, segment_count: 1, ..Request::PLACEHOLDER };
        let requests = [(1, Operation::Write, write), (2, Operation::Flush, Request::PLACEHOLDER)]
            .map(|(token, operation, request)| Request { token, operation, ..request });
        bench.disks.iter().for_each(SimulatedDisk::lose_unflushed);
        assert_eq!(bench.channels[0].submit(bench.now, &requests, &[segment]), 2);
        let mut completions = CompletionBatch::with_capacity(2);
        while completions.len() < 2 {
            bench.poll_once(0, &mut completions);
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
fn fixture_after_leg_return_with_idle_channel(seed: u64, counts: bool) -> LossFixture {
    let mut bench = LossFixture::new(seed);
    if !counts {
        bench.disks.iter().for_each(SimulatedDisk::disable_loss_count);
    }
    bench.idle = Some(1);
    (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
    bench.disks[0].lose_unflushed();
    assert_eq!(bench.flush(0), IoStatus::SUCCESS);
    assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b10, "seed {seed}");
    bench.run_until_idle();
    (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
    bench
}

#[test]
fn idle_channel_does_not_report_a_repaired_loss() {
    for seed in 0..20 {
        let mut bench = fixture_after_leg_return_with_idle_channel(seed, true);
        assert_eq!(bench.flush(1), IoStatus::SUCCESS);
        assert_eq!(
            bench.mirror.in_sync_mask_and_remaining_regions(),
            (0b11, 0),
            "seed {seed}: nothing was lost since"
        );

        let mut bench = fixture_after_leg_return_with_idle_channel(seed, true);
        bench.disks[1].lose_unflushed();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "seed {seed}: the first leg has everything");
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b01, "seed {seed}");
        (0..BLOCKS).step_by(64).for_each(|lba| assert_eq!(bench.read(lba), 2, "seed {seed}"));
    }
}

#[test]
fn idle_channel_reports_a_loss_after_the_leg_returned() {
    for (seed, counts) in (0..20).flat_map(|seed| [(seed, true), (seed, false)]) {
        let mut bench = fixture_after_leg_return_with_idle_channel(seed, counts);
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "the other leg has everything");
        assert_eq!(
            bench.mirror.in_sync_mask_and_remaining_regions().0,
            0b10,
            "seed {seed}, counts: {counts}"
        );
        (0..BLOCKS).step_by(64).for_each(|lba| assert_eq!(bench.read(lba), 2, "seed {seed}"));

        let mut bench = fixture_after_leg_return_with_idle_channel(seed, counts);
        bench.disks.iter().for_each(SimulatedDisk::lose_unflushed);
        assert_eq!(bench.flush(1), IoStatus::WRITE_FAULT, "seed {seed}, counts: {counts}");
    }
}

#[test]
fn loss_reported_by_every_channel_resynchronizes_once() {
    for (seed, counts) in (0..20).flat_map(|seed| [(seed, true), (seed, false)]) {
        let mut bench = LossFixture::new(seed);
        if !counts {
            bench.disks.iter().for_each(SimulatedDisk::disable_loss_count);
        }
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        let before = bench.mirror.shared.leg_return_count();
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        bench.run_until_idle();
        assert_eq!([bench.flush(0), bench.flush(1)], [IoStatus::SUCCESS; 2]);
        let returns = bench.mirror.shared.leg_return_count() - before;
        assert_eq!(
            (bench.mirror.in_sync_mask_and_remaining_regions(), returns),
            ((0b11, 0), 1),
            "seed {seed}: {counts}"
        );
    }
}

#[test]
fn new_loss_reported_by_an_idle_channel_resynchronizes_again() {
    let mut met = 0;
    for (seed, steps) in (0..20).flat_map(|seed| (0..12).map(move |steps| (seed, 5 * steps))) {
        let mut bench = LossFixture::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        while bench.mirror.shared.masks().write & 1 == 0 {
            bench.poll_once(0, &mut CompletionBatch::with_capacity(1));
        }
        (0..steps).for_each(|_| bench.poll_once(0, &mut CompletionBatch::with_capacity(1)));
        // The channel that asked for nothing meanwhile is the first to flush the leg after the loss.
        bench.disks[0].fail_only_first_flush_after_loss();
        bench.disks[0].lose_unflushed();
        let before = bench.mirror.shared.leg_return_count();
        for _ in 0..12 {
            bench.poll_once(1, &mut CompletionBatch::with_capacity(1));
        }
        bench.idle = None;
        bench.run_until_idle();
        met += bench.mirror.shared.leg_return_count() - before;
        for lba in (0..BLOCKS).step_by(64) {
            assert_eq!(
                bench.read_leg_block(lba),
                [versioned_contents(lba, 2), versioned_contents(lba, 2)],
                "seed {seed}, {steps}"
            );
        }
    }
    assert!(met > 20, "{met} of them were copied to again");
}

#[test]
fn loss_of_the_last_leg_fails_a_flush_of_every_channel() {
    for seed in 0..20 {
        let mut bench = LossFixture::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        while bench.mirror.shared.masks().write & 1 == 0 {
            bench.poll_once(0, &mut CompletionBatch::with_capacity(1));
        }
        // The idle channel sends its flush to the leg, and gets the answer when the leg is the last one.
        bench.poll_once(1, &mut CompletionBatch::with_capacity(1));
        bench.run_until_idle();
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[1].fail_all_requests();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        assert_eq!(bench.mirror.in_sync_mask_and_remaining_regions().0, 0b01, "seed {seed}");
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 3));
        bench.disks[0].fail_only_first_flush_after_loss();
        bench.disks[0].lose_unflushed();
        for _ in 0..12 {
            bench.poll_once(1, &mut CompletionBatch::with_capacity(1));
        }
        for channel in [0, 1] {
            assert_eq!(bench.flush(channel), IoStatus::WRITE_FAULT, "seed {seed}, {channel}");
        }
    }
}

#[test]
fn loss_during_resync_restarts_it() {
    let mut met = 0;
    for (seed, after) in (0..10).flat_map(|seed| (0..60).map(move |after| (seed, after))) {
        let mut bench = LossFixture::new(seed);
        bench.idle = Some(1);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 1));
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..BLOCKS).step_by(64).for_each(|lba| bench.write(lba, 2));
        bench.disks[0].lose_unflushed();
        assert_eq!(bench.flush(0), IoStatus::SUCCESS);
        (0..5 * after).for_each(|_| bench.poll_once(0, &mut CompletionBatch::with_capacity(1)));
        met += u32::from(bench.mirror.in_sync_mask_and_remaining_regions().0 == 0b10);
        bench.disks[0].lose_unflushed();
        bench.run_until_idle();
        assert_eq!(bench.flush(1), IoStatus::SUCCESS, "seed {seed}, after {after}");
        if bench.mirror.in_sync_mask_and_remaining_regions().0 == 0b11 {
            for lba in (0..BLOCKS).step_by(64) {
                let held = bench.read_leg_block(lba);
                assert_eq!(
                    held,
                    [versioned_contents(lba, 2), versioned_contents(lba, 2)],
                    "seed {seed}, after {after}"
                );
            }
        }
    }
    assert!(met > 20, "{met} of them were met while it came back");
}

/// Has a leg lose its unflushed writes during the resynchronization after a crash. Returns whether a
/// block that both legs held before has become older on the other leg.
fn resync_from_losing_leg_reverts_blocks(seed: u64, planted: Option<InjectedBug>) -> bool {
    let bench = LossFixture::with_unflushed_writes(seed, 0);
    // The host crashes, and the legs do not.
    let LossFixture { regions, disks, mut now, mirror, channels, .. } = bench;
    drop((channels, mirror));
    let legs = disks
        .clone()
        .map(|disk| MirrorLegDevice { name: "disk".into(), medium: Ok(Arc::new(disk)) });
    let mut later = || {
        now = now.after(Span::from_us(10));
        now
    };
    let options = MirrorOptions::with_resync_policy(POLICY);
    let mirror = Mirror::open(&regions, &legs, &options, &mut later).unwrap();
    mirror.shared.lock().planted = planted;
    let channels = (0..2).map(|_| mirror.channel().unwrap()).collect();
    let mut bench = LossFixture { regions, disks, mirror, channels, now, idle: None };
    assert!(bench.mirror.in_sync_mask_and_remaining_regions().1 > 0, "it was being written");
    bench.disks[0].lose_unflushed();
    bench.run_until_idle();
    (0..BLOCKS).step_by(64).any(|lba| bench.read_leg_block(lba)[1] != versioned_contents(lba, 2))
}

#[test]
fn resync_source_losses_do_not_affect_other_legs() {
    for seed in 0..20 {
        assert!(!resync_from_losing_leg_reverts_blocks(seed, None), "seed {seed}");
    }
    let bug = Some(InjectedBug::CopiesBeforeFlushing);
    assert!((0..20).any(|seed| resync_from_losing_leg_reverts_blocks(seed, bug)), "the bug");
}

/// A mirror of two files, of which one or both can be made to fail flushes.
struct FileMirrorFixture {
    regions: RegionTable,
    kind: FailingSyncFileType,
    mirror: Mirror,
    clock: tenmil_linux::Clock,
    _directory: tempfile::TempDir,
}

impl FileMirrorFixture {
    /// The legs are of these types, with these fields.
    fn new(legs: [(&str, &str); 2]) -> Self {
        let (regions, clock) = (RegionTable::new(100), tenmil_linux::Clock::start());
        let (kind, directory) = (FailingSyncFileType::default(), tempfile::tempdir().unwrap());
        let opener = Opener {
            regions: &regions,
            clock,
            seed: 1,
            kinds: &crate::tests::device_types_with(&[("failing", &kind)]),
        };
        let mut names = ["a", "b"].into_iter();
        let legs = legs.map(|(scheme, fields)| {
            let name = names.next().unwrap();
            let path = directory.path().join(name);
            let made = std::fs::File::options().write(true).create_new(true).open(&path);
            made.unwrap().set_len(3 << 20).unwrap();
            let uri = format!("{scheme}{}{fields}", path.display()).parse().unwrap();
            MirrorLegDevice { name: name.into(), medium: Ok(opener.open(&uri).unwrap().medium) }
        });
        let mut now = || clock.now();
        format_mirror(&regions, &legs, 7, &mut now).unwrap();
        let mirror =
            Mirror::open(&regions, &legs, &MirrorOptions::with_resync_policy(POLICY), &mut now);
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
            channels[asked].flush_submissions();
            self.poll_all_channels(channels, Some(asked), &mut completions);
        }
        completions.as_slice()[0].status
    }

    fn poll_all_channels(
        &self,
        channels: &mut [Box<dyn IoChannel>],
        asked: Option<usize>,
        into: &mut CompletionBatch,
    ) {
        for (index, channel) in channels.iter_mut().enumerate() {
            let mut discarded = CompletionBatch::with_capacity(1);
            channel
                .poll(self.clock.now(), if Some(index) == asked { into } else { &mut discarded });
        }
        tenmil_linux::named_thread::yield_cpu();
    }
}

#[test]
fn file_leg_that_lost_writes_is_resynchronized() {
    for fields in ["", "?direct=no"] {
        let bench = FileMirrorFixture::new([("failing:", fields), ("file:", "?engine=threads")]);
        let mut channels: Vec<_> = (0..2).map(|_| bench.mirror.channel().unwrap()).collect();
        let until = bench.clock.now().after(Span::from_secs(60));
        let mut none = CompletionBatch::with_capacity(1);
        for round in 0..3 {
            assert_eq!(bench.run(&mut channels, 0, Operation::Write), IoStatus::SUCCESS);
            bench.kind.fail_next_syncs(2);
            assert_eq!(bench.run(&mut channels, 0, Operation::Flush), IoStatus::SUCCESS);
            while bench.kind.syncs.load(Ordering::Relaxed) > 0
                || bench.mirror.in_sync_mask_and_remaining_regions() != (0b11, 0)
            {
                assert!(
                    bench.clock.now() < until,
                    "{:?} {fields:?}",
                    bench.mirror.in_sync_mask_and_remaining_regions()
                );
                bench.poll_all_channels(&mut channels, None, &mut none);
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
fn both_file_legs_losing_writes_fail_one_flush_per_channel() {
    let bench = FileMirrorFixture::new([("failing:", ""); 2]);
    let mut channels: Vec<_> = (0..2).map(|_| bench.mirror.channel().unwrap()).collect();
    for round in 0..3 {
        assert_eq!(bench.run(&mut channels, 0, Operation::Write), IoStatus::SUCCESS);
        bench.kind.fail_next_syncs(u32::MAX);
        assert_ne!(bench.run(&mut channels, 0, Operation::Flush), IoStatus::SUCCESS);
        bench.kind.fail_next_syncs(0);
        assert_ne!(bench.run(&mut channels, 1, Operation::Flush), IoStatus::SUCCESS);
        for channel in 0..2 {
            let mut flush = |_| bench.run(&mut channels, channel, Operation::Flush);
            let succeeds = (0..1000).map(&mut flush).any(|status| status == IoStatus::SUCCESS);
            assert!(succeeds, "round {round}, channel {channel}");
        }
    }
}
