//! Changes of the legs of a closed mirror, with a power failure at every write.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoStatus, Memory, Operation, Request,
    RequestFlags, Span,
};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use super::block_model::versioned_contents;
use crate::conformance::PowerLossDeviceType;
use crate::mirror::assembly::DegradedStartPolicy;
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::membership::OfflineMirror;
use crate::mirror::{Mirror, MirrorLegDevice, MirrorOptions};
use tenmil_block::Opener;

/// A change of a mirror on the first legs of four.
#[derive(Clone, Copy, Debug)]
enum MembershipChange {
    Add,
    Replace {
        number: u8,
    },
    Remove {
        number: u8,
    },
    /// The number of a leg that was removed is assigned to another one.
    AddAgain,
}

/// Four devices, and a mirror on some of them.
struct MembershipFixture {
    power: PowerLossDeviceType,
    regions: RegionTable,
    now: Instant,
    legs: Vec<MirrorLegDevice>,
}

const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_us(40),
    probe_every: Span::from_us(20),
    copy_rate: 4 << 30,
};
/// Blocks of the mirror that are written: some in each region.
const WRITTEN: [u64; 5] = [0, 1, 70, 127, 200];

impl MembershipChange {
    /// The legs before and after the change.
    fn legs_before_and_after(self) -> (&'static [usize], &'static [usize]) {
        match self {
            Self::Add => (&[0, 1], &[0, 1, 3]),
            Self::Replace { number: 0 } => (&[0, 1], &[3, 1]),
            Self::Replace { .. } => (&[0, 1, 2], &[0, 3, 2]),
            Self::Remove { number: 0 } => (&[0, 1, 2], &[1, 2]),
            Self::Remove { .. } => (&[0, 1, 2], &[0, 1]),
            Self::AddAgain => (&[0, 2], &[0, 3, 2]),
        }
    }

    /// Whether the removed leg is the one that is read where legs may differ.
    fn removes_read_source(self) -> bool {
        matches!(self, Self::Replace { number: 0 } | Self::Remove { number: 0 })
    }

    fn run(self, bench: &mut MembershipFixture) -> Result<String, Error> {
        let legs = bench.legs_at(self.legs_before_and_after().0);
        let (new, regions) = (bench.legs[3].clone(), bench.regions.clone());
        let mut now = || advance_time(&mut bench.now);
        let mut members =
            OfflineMirror::assemble(&regions, &legs, DegradedStartPolicy::Complete, &mut now)?;
        match self {
            Self::Add | Self::AddAgain => members.add_leg(&new, &mut now),
            Self::Replace { number } => members.replace_leg(number, &new, &mut now),
            Self::Remove { number } => members.remove_leg(number, &mut now),
        }
    }
}

/// Superblock writes take time; a device without power is not waited for.
fn advance_time(time: &mut Instant) -> Instant {
    *time = time.after(Span::from_ms(20));
    *time
}

impl MembershipFixture {
    fn new(change: MembershipChange, seed: u64) -> Self {
        let (power, regions) = (PowerLossDeviceType::default(), RegionTable::new(100));
        let legs = open(&power, &regions, seed);
        let mut bench = Self { power, regions, now: Instant { ns: 1 }, legs };
        let before = match change {
            MembershipChange::AddAgain => &[0, 1, 2],
            _ => change.legs_before_and_after().0,
        };
        let (legs, regions) = (bench.legs_at(before), bench.regions.clone());
        format_mirror(&regions, &legs, 7, &mut || advance_time(&mut bench.now)).unwrap();
        let mirror = bench.open(before).unwrap();
        bench.run_until_idle(&mirror);
        for lba in WRITTEN {
            bench.write_or_check_block(&mirror, Operation::Write, lba);
        }
        if change.removes_read_source() {
            bench.run_until_idle(&mirror);
        }
        drop(mirror);
        if matches!(change, MembershipChange::AddAgain) {
            let mut now = || advance_time(&mut bench.now);
            let mut members =
                OfflineMirror::assemble(&regions, &legs, DegradedStartPolicy::Complete, &mut now)
                    .unwrap();
            members.remove_leg(1, &mut now).unwrap();
        }
        bench
    }

    fn legs_at(&self, which: &[usize]) -> Vec<MirrorLegDevice> {
        which.iter().map(|index| self.legs[*index].clone()).collect()
    }

    fn open(&mut self, which: &[usize]) -> Result<Mirror, Error> {
        let (legs, regions) = (self.legs_at(which), self.regions.clone());
        Mirror::open(&regions, &legs, &MirrorOptions::with_resync_policy(POLICY), &mut || {
            advance_time(&mut self.now)
        })
    }

    /// Simulates a power cycle.
    fn power_cycle(&mut self, seed: u64) {
        self.power.lose_power();
        self.legs.clear();
        self.power.restore_power();
        self.legs = open(&self.power, &self.regions, seed);
    }

    /// Waits until all present legs are in sync.
    fn run_until_idle(&mut self, mirror: &Mirror) {
        let mut channel = mirror.channel().unwrap();
        for _ in 0..100_000 {
            self.now = self.now.after(Span::from_us(1));
            channel.poll(self.now, &mut CompletionBatch::with_capacity(1));
            let meta = mirror.shared.lock();
            let is_clean = meta.dirty.is_empty() || !meta.are_all_legs_in_sync();
            if meta.in_sync == meta.present && meta.todo.is_empty() && is_clean {
                return;
            }
        }
        panic!("{:?} is all there is", mirror.in_sync_mask_and_remaining_regions());
    }

    /// Writes a block with its expected contents, or reads it and compares.
    fn write_or_check_block(&mut self, medium: &dyn BlockDevice, operation: Operation, lba: u64) {
        let memory = self.regions.allocate_region(1024).unwrap();
        let segment = memory.segment().slice(0, 1024).unwrap();
        let bytes = versioned_contents(lba, 1).repeat(2);
        if operation == Operation::Write {
            self.regions.store(segment, &bytes).unwrap();
        }
        let flags = RequestFlags::FUA;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, flags, ..Request::PLACEHOLDER };
        let mut channel = medium.channel().unwrap();
        assert_eq!(channel.submit(self.now, &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while completions.as_slice().is_empty() {
            self.now = self.now.after(Span::from_us(1));
            channel.poll(self.now, &mut completions);
        }
        assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS);
        let mut held = vec![0; 1024];
        self.regions.load(segment, &mut held).unwrap();
        assert!(held == bytes, "block {lba}");
    }

    /// Opens the mirror with these legs, and checks that it holds what was written and that all legs
    /// become in sync.
    fn check_contents(&mut self, which: &[usize]) -> Result<(), Error> {
        let mirror = self.open(which)?;
        WRITTEN.iter().for_each(|lba| self.write_or_check_block(&mirror, Operation::Read, *lba));
        self.run_until_idle(&mirror);
        WRITTEN.iter().for_each(|lba| self.write_or_check_block(&mirror, Operation::Read, *lba));
        let first = mirror.shared.geometry.first;
        drop(mirror);
        for leg in self.legs_at(which) {
            let medium = leg.medium.unwrap();
            for lba in WRITTEN {
                let memory = self.regions.allocate_region(1024).unwrap();
                let held = self.read_raw(&*medium, first + lba, memory.segment());
                assert!(held == versioned_contents(lba, 1).repeat(2), "{} block {lba}", leg.name);
            }
        }
        Ok(())
    }

    fn read_raw(
        &mut self,
        medium: &dyn BlockDevice,
        lba: u64,
        segment: tenmil_base::Segment,
    ) -> Vec<u8> {
        let segment = segment.slice(0, 1024).unwrap();
        let operation = Operation::Read;
        let request =
            Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
        let mut channel = medium.channel().unwrap();
        assert_eq!(channel.submit(self.now, &[request], &[segment]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        while channel.poll(self.now, &mut completions) == 0 {}
        let mut held = vec![0; 1024];
        self.regions.load(segment, &mut held).unwrap();
        held
    }
}

fn open(power: &PowerLossDeviceType, regions: &RegionTable, seed: u64) -> Vec<MirrorLegDevice> {
    let opener = Opener {
        regions,
        clock: Clock::start(),
        seed,
        kinds: &crate::tests::device_types_with(&[("power", power)]),
    };
    let uri = "power:cached?size=1280k".parse().unwrap();
    let leg = |number| MirrorLegDevice {
        name: format!("leg{number}"),
        medium: Ok(Arc::clone(&opener.open(&uri).unwrap().medium)),
    };
    (0..4).map(leg).collect()
}

const CHANGES: [MembershipChange; 6] = [
    MembershipChange::Add,
    MembershipChange::Replace { number: 0 },
    MembershipChange::Replace { number: 1 },
    MembershipChange::Remove { number: 0 },
    MembershipChange::Remove { number: 2 },
    MembershipChange::AddAgain,
];

#[test]
fn membership_change_is_atomic_across_power_loss() {
    for change in CHANGES {
        let (before, after) = change.legs_before_and_after();
        for cut in 0.. {
            // One run opens the legs of before the change, the next one those of after it.
            let (mut ended, mut opened) = (false, 0);
            for (run, which) in [before, after].into_iter().enumerate() {
                let mut bench = MembershipFixture::new(change, cut);
                bench.power.arm_power_loss_after(cut);
                let result = change.run(&mut bench);
                let is_cut = result.is_err();
                assert!(!is_cut || bench.power.has_power_failed(), "{change:?} {cut}: {result:?}");
                bench.power_cycle(cut);
                let found = bench.check_contents(which);
                let must = if is_cut { cut == 0 && run == 0 } else { run == 1 };
                assert!(found.is_ok() || !must, "{change:?} {cut} {which:?}: {found:?}");
                ended |= !is_cut;
                opened += usize::from(found.is_ok());
            }
            assert!(opened > 0, "{change:?} {cut}: it opens neither as before nor as after");
            if ended {
                assert!(cut > 6, "{change:?} ended after {cut}");
                break;
            }
        }
    }
}
