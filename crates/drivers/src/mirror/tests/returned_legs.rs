//! Legs that return after they were used elsewhere, or with one of their superblocks lost.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoStatus, Memory, Operation, Random, Request,
    RequestFlags, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::block_model::versioned_contents;
use super::simulated_disk::{BLOCK, SimulatedDisk};
use crate::mirror::assembly::DegradedStartPolicy;
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::membership::OfflineMirror;
use crate::mirror::{
    InjectedBugs, LegState, Mirror, MirrorLegDevice, MirrorMonitor, MirrorOptions,
};
use tenmil_volume::mirror::COPIES_AT;

/// Blocks of the mirror: eight regions.
const BLOCKS: u64 = 1024;
/// Blocks of a leg before those of the mirror.
const FIRST: u64 = (1 << 20) / BLOCK as u64;
const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_us(40),
    probe_every: Span::from_us(20),
    copy_rate: 4 << 30,
};

/// Disks and a mirror on them.
struct ReturnedLegsFixture {
    regions: RegionTable,
    disks: Vec<SimulatedDisk>,
    now: Instant,
}

impl ReturnedLegsFixture {
    fn new(count: usize) -> Self {
        let regions = RegionTable::new(100);
        let mut random = Random::new(3);
        let disk = |_| SimulatedDisk::new(&regions, FIRST + BLOCKS, random.fork());
        let disks = (0..count).map(disk).collect();
        let mut bench = Self { regions, disks, now: Instant { ns: 1 } };
        let all: Vec<usize> = (0..count).collect();
        let legs = bench.legs(&all);
        format_mirror(&bench.regions, &legs, 7, &mut || advance_time(&mut bench.now)).unwrap();
        let mirror = bench.open(&all).unwrap();
        // A region that is still dirty would be written before the failure of the leg is detected.
        bench.run_until(&mirror, || {
            mirror.progress_monitor().progress().unwrap().dirty_regions == 0
        });
        // Until the superblocks record it, too.
        bench.run_request(&mirror, 100);
        bench
    }

    fn legs(&self, which: &[usize]) -> Vec<MirrorLegDevice> {
        let leg = |index: &usize| MirrorLegDevice {
            name: format!("disk{index}"),
            medium: Ok(Arc::new(self.disks[*index].clone())),
        };
        which.iter().map(leg).collect()
    }

    fn open(&mut self, which: &[usize]) -> Result<Mirror, Error> {
        self.open_with_degraded(which, false)
    }

    fn open_with_degraded(&mut self, which: &[usize], degraded: bool) -> Result<Mirror, Error> {
        let legs = self.legs(which);
        // Another process may have it open.
        let options = MirrorOptions {
            degraded,
            force: degraded,
            ..MirrorOptions::with_resync_policy(POLICY)
        };
        Mirror::open(&self.regions, &legs, &options, &mut || advance_time(&mut self.now))
    }

    /// Runs the background work of the mirror.
    fn run_request(&mut self, mirror: &Mirror, turns: u32) {
        let mut channel = mirror.channel().unwrap();
        for _ in 0..turns {
            self.now = self.now.after(Span::from_us(10));
            channel.poll(self.now, &mut CompletionBatch::with_capacity(1));
        }
    }

    /// Runs the background work through one channel until a condition holds.
    fn run_until(&mut self, mirror: &Mirror, mut is_true: impl FnMut() -> bool) {
        let mut channel = mirror.channel().unwrap();
        for _ in 0..20_000 {
            if is_true() {
                return;
            }
            self.now = self.now.after(Span::from_us(10));
            channel.poll(self.now, &mut CompletionBatch::with_capacity(1));
        }
        panic!("it never comes to that: {:?}", mirror.in_sync_mask_and_remaining_regions());
    }

    fn write(&mut self, mirror: &Mirror, lba: u64, version: u32) {
        let memory = self
            .regions
            .add_mapping(MemoryMapping::new(BLOCK, MemoryBacking::Private).unwrap())
            .unwrap();
        let segment = memory.slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        self.regions.store(segment, &versioned_contents(lba, version)).unwrap();
        let (operation, flags) = (Operation::Write, RequestFlags::FUA);
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, flags, ..Request::PLACEHOLDER };
        let mut channel = mirror.channel().unwrap();
        assert_eq!(channel.submit(self.now, &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            self.now = self.now.after(Span::from_us(10));
            channel.poll(self.now, &mut completions);
        }
        assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS);
    }
}

fn advance_time(time: &mut Instant) -> Instant {
    *time = time.after(Span::from_us(10));
    *time
}

#[test]
fn leg_written_without_the_others_is_not_rejoined() {
    for was_apart in [false, true] {
        let mut bench = ReturnedLegsFixture::new(2);
        let mirror = bench.open(&[0, 1]).unwrap();
        bench.disks[1].fail_all_requests();
        bench.write(&mirror, 5, 1);
        assert_eq!(
            mirror.in_sync_mask_and_remaining_regions().0,
            0b01,
            "the write was answered without it"
        );
        if was_apart {
            // Meanwhile, another process has it open alone.
            bench.disks[1].end_failure(false);
            bench.disks[0].fail_all_requests();
            let alone = bench.open_with_degraded(&[1], true).unwrap();
            bench.write(&alone, 300, 2);
            bench.run_request(&alone, 100);
            drop(alone);
            bench.disks[0].end_failure(false);
        } else {
            bench.disks[1].end_failure(false);
        }
        bench.run_request(&mirror, 2_000);
        let expected = if was_apart { 0b01 } else { 0b11 };
        assert_eq!(
            mirror.in_sync_mask_and_remaining_regions().0,
            expected,
            "was apart: {was_apart}"
        );
        let theirs = bench.disks[1].read_block(FIRST + 300);
        assert_eq!(
            theirs == versioned_contents(300, 2),
            was_apart,
            "it is left alone, with what was written"
        );
    }
}

#[test]
fn stale_leg_does_not_start_alone() {
    let mut bench = ReturnedLegsFixture::new(2);
    let mirror = bench.open(&[0, 1]).unwrap();
    bench.disks[1].fail_all_requests();
    bench.write(&mirror, 5, 1);
    drop(mirror);
    bench.disks[1].end_failure(false);
    let refused = bench.open(&[1]).unwrap_err();
    assert!(refused.text.starts_with("leg 0 is absent"), "{refused}");
    let bugs = InjectedBugs { starts_without_legs: true, ..InjectedBugs::default() };
    let options = MirrorOptions { bugs, ..MirrorOptions::with_resync_policy(POLICY) };
    let legs = bench.legs(&[1]);
    Mirror::open(&bench.regions, &legs, &options, &mut || advance_time(&mut bench.now)).unwrap();
    assert!(
        bench.disks[1].read_block(FIRST + 5) != versioned_contents(5, 1),
        "it serves what is older"
    );
    let refused = bench.open(&[0, 1]).unwrap_err();
    assert!(refused.text.starts_with("split brain: legs "), "{refused}");
}

#[test]
fn monitor_reports_resync_progress() {
    let mut bench = ReturnedLegsFixture::new(2);
    let mirror = bench.open(&[0, 1]).unwrap();
    let handle = mirror.progress_monitor();
    let states = |handle: &MirrorMonitor| {
        let legs = handle.progress().unwrap().legs;
        legs.into_iter().map(|leg| leg.state).collect::<Vec<_>>()
    };
    assert_eq!(states(&handle), [LegState::InSync; 2]);
    bench.disks[1].fail_all_requests();
    for region in 0..8 {
        bench.write(&mirror, 128 * region, 1);
    }
    assert_eq!(states(&handle), [LegState::InSync, LegState::Stale]);
    assert_eq!(handle.progress().unwrap().dirty_regions, 8);
    bench.disks[1].end_failure(false);
    let (mut lefts, mut places) = (Vec::new(), Vec::new());
    bench.run_until(&mirror, || {
        let now = handle.progress().unwrap();
        if lefts.last() != Some(&now.left_regions) {
            lefts.push(now.left_regions);
        }
        places.extend(now.copying_at_bytes);
        assert!(now.left_regions == 0 || now.legs[1].state == LegState::Resyncing, "{now:?}");
        states(&handle) == [LegState::InSync; 2]
    });
    assert_eq!(lefts, [0, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    assert!(places.is_sorted() && places.len() > 1, "{places:?}");
    assert!(*places.last().unwrap() >= 7 * handle.progress().unwrap().region_bytes);
    let alone = bench.open_with_degraded(&[0], true).unwrap().progress_monitor();
    assert_eq!(alone.progress(), None, "to look at it does not keep it open");
    drop(mirror);
    assert_eq!(handle.progress(), None);
    let mirror = bench.open(&[0]).expect("it has recorded that the other one is stale");
    assert_eq!(states(&mirror.progress_monitor()), [LegState::InSync, LegState::Missing]);
}

#[test]
fn unreadable_superblock_copy_is_not_replaced_by_another_legs_contents() {
    let mut opened = 0;
    for copy in COPIES_AT {
        let mut bench = ReturnedLegsFixture::new(3);
        let mirror = bench.open(&[0, 1, 2]).unwrap();
        bench.disks[2].fail_all_requests();
        // Dirty regions recorded by two legs make their superblocks newer than that of the third.
        for version in 1..5 {
            bench.write(&mirror, 128 * u64::from(version), version);
            bench.run_request(&mirror, 200);
        }
        drop(mirror);
        bench.disks[2].end_failure(false);
        bench.disks[2].make_unreadable(copy / BLOCK as u64);
        match bench.open(&[0, 1, 2]) {
            Ok(mirror) => {
                assert_eq!(
                    mirror.in_sync_mask_and_remaining_regions().0,
                    0b011,
                    "the third has missed something"
                );
                opened += 1;
            }
            // What remains of it is older than what the others have recorded.
            Err(refused) => {
                assert!(refused.text.contains("disk2 is leg 2 of generation"), "{refused}")
            }
        }
    }
    assert!(opened > 0, "one of its copies is as good as both");
}

#[test]
fn new_leg_is_copied_and_other_legs_written_only_where_dirty() {
    for is_added in [true, false] {
        let mut bench = ReturnedLegsFixture::new(3);
        let mirror = bench.open(&[0, 1, 2]).unwrap();
        bench.write(&mirror, 5, 1);
        bench.run_until(&mirror, || {
            mirror.progress_monitor().progress().unwrap().dirty_regions == 0
        });
        bench.write(&mirror, 5, 1);
        drop(mirror);
        // Not a write of the mirror: these contents of the second leg show whether it is written.
        bench.disks[1].overwrite_block(FIRST + 900, versioned_contents(900, 3));
        bench.disks[1].overwrite_block(FIRST + 6, versioned_contents(6, 3));
        let (legs, regions) = (bench.legs(&[0, 1, 2]), bench.regions.clone());
        bench.disks.push(SimulatedDisk::new(&regions, FIRST + BLOCKS, Random::new(9)));
        let new = bench.legs(&[3]).remove(0);
        let mut now = || advance_time(&mut bench.now);
        let mut members =
            OfflineMirror::assemble(&regions, &legs, DegradedStartPolicy::Complete, &mut now)
                .unwrap();
        let made = match is_added {
            true => members.add_leg(&new, &mut now),
            false => members.replace_leg(2, &new, &mut now),
        };
        made.unwrap();
        let which: &[usize] = if is_added { &[0, 1, 2, 3] } else { &[0, 1, 3] };
        let all = if is_added { 0b1111 } else { 0b111 };
        // It is closed in the middle of the copy, and copied from the start when it is opened again.
        let mirror = bench.open(which).unwrap();
        let said = mirror.description().to_owned();
        assert!(said.contains("; 8 regions (100.0 %) are copied, from leg 0"), "{said}");
        let mut most = 0;
        bench.run_until(&mirror, || {
            most = most.max(mirror.in_sync_mask_and_remaining_regions().1);
            most == 8 && mirror.in_sync_mask_and_remaining_regions().1 == 4
        });
        assert_ne!(mirror.in_sync_mask_and_remaining_regions().0, all);
        drop(mirror);
        let mirror = bench.open(which).unwrap();
        bench.run_until(&mirror, || mirror.in_sync_mask_and_remaining_regions() == (all, 0));
        let held = |disk: usize, lba: u64| bench.disks[disk].read_block(FIRST + lba);
        assert!(held(1, 900) == versioned_contents(900, 3), "nothing was dirty there");
        assert_eq!(held(3, 900), held(0, 900), "it has what is read");
        assert_eq!(held(3, 5), versioned_contents(5, 1));
        assert_eq!((held(1, 6), held(3, 6)), (held(0, 6), held(0, 6)), "there they may differ");
    }
}

#[test]
fn read_source_of_unequal_regions_is_stable() {
    let mut bench = ReturnedLegsFixture::new(2);
    let mirror = bench.open(&[0, 1]).unwrap();
    bench.write(&mirror, 5, 1);
    drop(mirror);
    let (legs, regions) = (bench.legs(&[0, 1]), bench.regions.clone());
    let new = SimulatedDisk::new(&regions, FIRST + BLOCKS, Random::new(9));
    let new = MirrorLegDevice { name: "new".into(), medium: Ok(Arc::new(new)) };
    let mut replace = |number| {
        let mut now = || advance_time(&mut bench.now);
        OfflineMirror::assemble(&regions, &legs, DegradedStartPolicy::Complete, &mut now)
            .unwrap()
            .replace_leg(number, &new, &mut now)
    };
    let refused = replace(0).unwrap_err();
    assert!(
        refused.text.contains("leg 0 is the one that is read where legs may differ"),
        "{refused}"
    );
    replace(1).unwrap();
}

#[test]
fn unreachable_leg_can_be_replaced() {
    let mut bench = ReturnedLegsFixture::new(2);
    let (legs, regions) = (bench.legs(&[0, 1]), bench.regions.clone());
    let new = SimulatedDisk::new(&regions, FIRST + BLOCKS, Random::new(9));
    let new = MirrorLegDevice { name: "new".into(), medium: Ok(Arc::new(new)) };
    let mut now = || advance_time(&mut bench.now);
    let mut members =
        OfflineMirror::assemble(&regions, &legs, DegradedStartPolicy::Complete, &mut now).unwrap();
    bench.disks[1].fail_all_requests();
    let text = members.replace_leg(1, &new, &mut now).unwrap();
    assert!(text.contains("leg 1 is new; it is copied to"), "{text}");
    assert!(text.contains("; disk1 is still labeled leg 1: "), "{text}");
    bench.disks[1].end_failure(false);
    let refused = bench.open(&[0, 1]).unwrap_err();
    assert!(refused.text.contains("an old copy, or another device has its place now"), "{refused}");
}
