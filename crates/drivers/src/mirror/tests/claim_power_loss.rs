//! The power goes between any two writes of a claim, a commit, a release or a takeover: afterwards the mirror
//! opens, has one owner or none, and no epoch is older.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Limits, Memory,
    Operation, Random, Request, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::simulated_disk::{BLOCK, SimulatedDisk};
use crate::mirror::assembly::{LegCandidate, LegReadResult};
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::ownership::{is_owner_record_superseded, other_owner};
use crate::mirror::{Mirror, MirrorLegDevice, MirrorOptions, read_leg_candidates};
use crate::owner_identity;

const BLOCKS: u64 = 1024;
const FIRST: u64 = (1 << 20) / BLOCK as u64;
const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_us(40),
    probe_every: Span::from_us(20),
    copy_rate: 4 << 30,
};
const LEGS: usize = 2;
/// More than anything here writes.
const NEVER: u32 = u32::MAX;
const TURNS: u32 = 400;

/// Disks of one machine: their power goes at a write.
struct PowerLossFixture {
    regions: RegionTable,
    disks: Vec<SimulatedDisk>,
    /// How many writes are left until then.
    left: Arc<AtomicU32>,
    now: Instant,
}

struct PowerCountingDisk {
    disk: SimulatedDisk,
    all: Vec<SimulatedDisk>,
    left: Arc<AtomicU32>,
}

struct PowerCountingChannel {
    below: Box<dyn IoChannel>,
    all: Vec<SimulatedDisk>,
    left: Arc<AtomicU32>,
}

/// Who has the mirror before, and how it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FormerOwner {
    None,
    Gone,
    /// It is there, and the mirror is taken by force.
    There,
}

impl PowerLossFixture {
    fn new(seed: u64) -> Self {
        let regions = RegionTable::new(200);
        let mut random = Random::new(seed);
        let disk = |_| SimulatedDisk::new(&regions, FIRST + BLOCKS, random.fork());
        let disks = (0..LEGS).map(disk).collect();
        let left = Arc::new(AtomicU32::new(NEVER));
        let mut machine = Self { regions, disks, left, now: Instant { ns: 1 } };
        let legs = machine.legs();
        format_mirror(&machine.regions, &legs, 7, &mut || advance_time(&mut machine.now)).unwrap();
        machine
    }

    fn legs(&self) -> Vec<MirrorLegDevice> {
        let leg = |(number, disk): (usize, &SimulatedDisk)| {
            let (disk, all) = (disk.clone(), self.disks.clone());
            let medium = PowerCountingDisk { disk, all, left: Arc::clone(&self.left) };
            MirrorLegDevice { name: format!("disk{number}"), medium: Ok(Arc::new(medium)) }
        };
        self.disks.iter().enumerate().map(leg).collect()
    }

    fn open(&mut self, options: &MirrorOptions) -> Result<Mirror, Error> {
        let legs = self.legs();
        Mirror::open(&self.regions, &legs, options, &mut || advance_time(&mut self.now))
    }

    fn read_leg_candidates(&mut self) -> Vec<LegCandidate> {
        let legs = self.legs();
        read_leg_candidates(&self.regions, &legs, &mut || advance_time(&mut self.now)).unwrap()
    }

    /// Opens the mirror, writes to two regions, and gives it up; as far as it comes.
    fn open_write_and_close(&mut self, options: &MirrorOptions) {
        let Ok(mirror) = self.open(options) else { return };
        let Ok(mut channel) = mirror.channel() else { return };
        let memory = self
            .regions
            .add_mapping(MemoryMapping::new(BLOCK, MemoryBacking::Private).unwrap())
            .unwrap();
        let segment = memory.slice(0, u32::try_from(BLOCK).unwrap()).unwrap();
        self.regions.store(segment, &[7; BLOCK]).unwrap();
        for lba in [0, 700] {
            let operation = Operation::Write;
            let request =
                Request { lba, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER };
            channel.submit(self.now, &[request], &[segment]);
            self.poll_channel(&mut *channel);
        }
        mirror.shared.lock().release_ownership();
        self.poll_channel(&mut *channel);
    }

    fn poll_channel(&mut self, channel: &mut dyn IoChannel) {
        let mut completions = CompletionBatch::with_capacity(4);
        for _ in 0..TURNS {
            self.now = self.now.after(Span::from_us(10));
            channel.poll(self.now, &mut completions);
        }
    }
}

impl BlockDevice for PowerCountingDisk {
    fn limits(&self) -> Limits {
        self.disk.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (all, left) = (self.all.clone(), Arc::clone(&self.left));
        Ok(Box::new(PowerCountingChannel { below: self.disk.channel()?, all, left }))
    }
}

impl IoChannel for PowerCountingChannel {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken = self.below.submit(now, requests, segments);
        for request in &requests[..taken] {
            if request.operation == Operation::Write
                && self.left.load(Ordering::Relaxed) != NEVER
                && self.left.fetch_sub(1, Ordering::Relaxed) == 1
            {
                // From now on nothing is answered as done, this one included.
                self.all.iter().for_each(SimulatedDisk::fail_all_requests);
                self.left.store(NEVER, Ordering::Relaxed);
            }
        }
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.below.poll(now, completions)
    }
}

impl ChannelWakeup for PowerCountingChannel {
    fn wake_at(&self) -> Instant {
        self.below.wake_at()
    }
}

fn advance_time(time: &mut Instant) -> Instant {
    *time = time.after(Span::from_us(10));
    *time
}

/// The newest epoch that a superblock names.
fn newest_owner_epoch(candidates: &[LegCandidate]) -> u64 {
    let epoch = |candidate: &LegCandidate| match &candidate.found {
        LegReadResult::Leg(leg) => leg.owner.epoch,
        other => panic!("{}: {other:?}", candidate.name),
    };
    candidates.iter().map(epoch).max().unwrap()
}

/// The owners that superblocks name which no other superblock has superseded.
fn owners_of(candidates: &[LegCandidate]) -> Vec<u128> {
    let owner = |candidate: &LegCandidate| match &candidate.found {
        LegReadResult::Leg(leg)
            if leg.owner.id != 0 && !is_owner_record_superseded(leg, candidates) =>
        {
            Some(leg.owner.id)
        }
        _ => None,
    };
    let mut owners: Vec<u128> = candidates.iter().filter_map(owner).collect();
    owners.dedup();
    owners
}

/// Whether the power went before it came to its end.
fn power_failed_during_claim(former: FormerOwner, at: u32, seed: u64) -> bool {
    let mut machine = PowerLossFixture::new(seed);
    let first = owner_identity::RegisteredOwner::for_this_process();
    if former != FormerOwner::None {
        let opener = Some(first.owner_record());
        machine
            .open(&MirrorOptions { opener, ..MirrorOptions::with_resync_policy(POLICY) })
            .unwrap();
    }
    // A mirror that is dropped takes its owner along, unless that is kept here.
    let kept = (former == FormerOwner::There)
        .then(|| owner_identity::RegisteredOwner::from_record(first.owner_record()));
    let before = machine.read_leg_candidates();
    let was = other_owner(&before, None).map(|owner| owner.id);
    let second = owner_identity::RegisteredOwner::for_this_process();
    let (opener, force) = (Some(second.owner_record()), former == FormerOwner::There);
    machine.left.store(at, Ordering::Relaxed);
    machine.open_write_and_close(&MirrorOptions {
        opener,
        force,
        ..MirrorOptions::with_resync_policy(POLICY)
    });
    let is_cut = machine.left.swap(NEVER, Ordering::Relaxed) == NEVER;
    machine.disks.iter().for_each(SimulatedDisk::power_cycle);
    drop((first, second, kept));

    let what = format!("{former:?}, power lost at write {at}, seed {seed}");
    let after = machine.read_leg_candidates();
    let owners = owners_of(&after);
    assert!(owners.len() <= 1, "{what}: owners {owners:x?}");
    assert!(
        newest_owner_epoch(&after) >= newest_owner_epoch(&before),
        "{what}: the epoch went back"
    );
    if newest_owner_epoch(&after) > newest_owner_epoch(&before) {
        assert!(
            !owners.iter().any(|owner| Some(*owner) == was),
            "{what}: the former owner is back"
        );
    }
    let third = owner_identity::RegisteredOwner::for_this_process();
    let options = MirrorOptions {
        opener: Some(third.owner_record()),
        ..MirrorOptions::with_resync_policy(POLICY)
    };
    let mirror = machine.open(&options).unwrap_or_else(|why| panic!("{what}: {why}"));
    // A leg whose answer did not come before the end may be recorded as stale by the other one.
    assert_ne!(mirror.in_sync_mask_and_remaining_regions().0, 0, "{what}: no leg is in sync");
    let now = machine.read_leg_candidates();
    assert_eq!(owners_of(&now), [third.owner_record().id], "{what}");
    assert!(
        newest_owner_epoch(&now) > newest_owner_epoch(&after),
        "{what}: a claim is a new epoch"
    );
    is_cut
}

#[test]
fn power_loss_during_a_claim_leaves_at_most_one_owner() {
    for former in [FormerOwner::None, FormerOwner::Gone, FormerOwner::There] {
        let mut at = 1;
        while (0..8)
            .fold(false, |was_cut, seed| power_failed_during_claim(former, at, seed) | was_cut)
        {
            at += 1;
            assert!(at < 200, "it writes without an end");
        }
        assert!(at > 8, "{former:?}: a claim and a release are eight writes at least, not {at}");
    }
}
