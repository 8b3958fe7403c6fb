//! State of the legs and regions of a mirror, and admission of writes. No I/O.

use tenmil_base::{Instant, Interrupts};
use tenmil_linux::EventFdVectors;

use super::assembly::MirrorAssembly;
use super::events::{MirrorEvent, PendingEvents};
use super::maintenance::{MaintenancePhase, MaintenanceSchedule};
use super::mirror_shared::{LegMasks, MirrorShared, OldestWriteEpoch, SubmittedRequestCount};
use super::options::{InjectedBugs, MirrorOptions};
use super::ownership::OwnershipFence;
use super::resync::RegionResync;
use super::superblock_commit::leg_numbers_in;
use tenmil_volume::mirror::RegionBitmap;
use tenmil_volume::mirror::{LEGS_MAX, MirrorGeometry};

/// State of a mirror, behind its lock.
pub(super) struct MirrorState {
    pub(super) uuid: u128,
    pub(super) geometry: MirrorGeometry,
    pub(super) legs: u8,
    /// Leg numbers that were removed.
    pub(super) gone: u8,
    pub(super) generation: u64,
    /// Known generation of each leg's superblock.
    pub(super) known: [u64; LEGS_MAX],
    pub(super) sequences: [SuperblockSequenceNumbers; LEGS_MAX],
    /// Ownership of the mirror.
    pub(super) fence: OwnershipFence,

    /// Legs that have a device.
    pub(super) present: u8,
    /// Legs that have every completed write.
    pub(super) in_sync: u8,
    /// Legs whose own superblock is being marked stale before anything is copied to them.
    pub(super) joining: u8,
    /// Legs that receive every write and are not read yet.
    pub(super) returning: u8,
    /// Legs that are not in sync and never were: every region is copied to them.
    pub(super) fresh: u8,
    /// Legs that the next superblocks will state to be in sync.
    pub(super) promoting: u8,
    /// Legs that some superblock may state to be in sync.
    pub(super) claimed: u8,

    /// Regions in which legs may differ, as the next superblocks will state.
    pub(super) dirty: RegionBitmap,
    /// The same, as the superblocks of all in-sync legs state now.
    pub(super) durable: RegionBitmap,
    /// Dirty regions without recent writes.
    pub(super) quiet: RegionBitmap,
    /// Quiet regions that have been flushed since: the next superblocks will state them clean.
    pub(super) clearing: RegionBitmap,
    /// Regions in which in-sync legs may differ.
    pub(super) unequal: RegionBitmap,
    /// Regions to resynchronize.
    pub(super) todo: RegionBitmap,

    /// Number of changes that have to become durable; `settled` of them are.
    pub(super) wanted: u64,
    pub(super) settled: u64,
    pub(super) commit: Option<InFlightCommit>,
    /// No leg accepted a superblock: no retry until a request needs one.
    pub(super) stalled: bool,
    /// Number of failed commits.
    pub(super) failures: u64,

    /// Open channels.
    pub(super) members: Vec<ChannelEntry>,
    /// Waker of the maintenance thread, if there is one.
    pub(super) owner: Option<EventFdVectors>,
    /// Tracked writes in the region being copied.
    pub(super) registered: Vec<WriteUnderCopy>,
    pub(super) copying: Option<RegionResync>,
    pub(super) repairs: Vec<(u64, u32)>,
    pub(super) phase: MaintenancePhase,
    pub(super) times: MaintenanceSchedule,
    /// Blocks that are copied at once.
    pub(super) chunk_blocks: u32,
    pub(super) bugs: InjectedBugs,
    pub(super) events: PendingEvents,
    #[cfg(test)]
    pub(super) planted: Option<InjectedBug>,
}

/// A bug that tests inject to prove that it is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedBug {
    /// A write completes although a leg without it is still stated to be in sync.
    CompletesBeforeRecording,
    /// A region is written before it is marked dirty.
    WritesBeforeMarking,
    /// A region becomes clean although its blocks may not be durable.
    ClearsBeforeFlushing,
    /// A leg is read while it is resynchronized.
    ReadsReturningLegs,
    /// A leg is stated to be in sync before the writes it missed have been copied.
    PromotesBeforeCopying,
    /// Blocks are copied over an in-sync leg from one that may have lost them.
    CopiesBeforeFlushing,
}

/// Superblock writes in flight.
pub(super) struct InFlightCommit {
    pub(super) version: u64,
    pub(super) generation: u64,
    pub(super) targets: u8,
    pub(super) in_sync: u8,
    pub(super) promoting: u8,
    pub(super) dirty: RegionBitmap,
}

/// Superblock sequence numbers of a leg.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SuperblockSequenceNumbers {
    /// Of the newest complete one.
    pub(super) good: u64,
    /// The highest one ever used.
    pub(super) used: u64,
}

/// A channel, as seen by others.
pub(super) struct ChannelEntry {
    pub(super) write_epoch: OldestWriteEpoch,
    /// Counts its requests.
    pub(super) load: SubmittedRequestCount,
    pub(super) waker: EventFdVectors,
}

/// A write in the region being copied.
pub(super) struct WriteUnderCopy {
    pub(super) write_epoch: OldestWriteEpoch,
    pub(super) slot: u32,
    pub(super) lba: u64,
    pub(super) blocks: u64,
    pub(super) epoch: u64,
}

/// Whether a write may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteAdmission {
    /// It may, counted in its channel's write epochs.
    Go,
    /// It may, and is tracked as a write in the region being copied.
    Registered,
    /// Not before the state changes.
    Wait,
    /// Rejected: another owner has the mirror.
    Refused,
}

/// Result of a write over all legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteVerdict {
    /// It may complete.
    Good,
    /// It may complete after a commit.
    Wait,
    /// No in-sync leg has it.
    Bad,
}

/// Maximum number of queued repairs; a read that fails again requests it again.
const REPAIRS_MAX: usize = 64;

impl SuperblockSequenceNumbers {
    /// The next number, for the copy that is not the newest complete one.
    pub(super) fn next_for_older_copy(&mut self) -> u64 {
        let next = self.used.max(self.good) + 1;
        self.used = if next % 2 == self.good % 2 { next + 1 } else { next };
        self.used
    }
}

impl MirrorState {
    /// State of a newly opened mirror.
    pub(super) fn new(
        assembly: &MirrorAssembly,
        options: &MirrorOptions,
        chunk_blocks: u32,
    ) -> Self {
        let MirrorAssembly { geometry, in_sync, dirty, .. } = assembly;
        let none = RegionBitmap::new(geometry.regions());
        // After a power loss, in-sync legs may differ wherever writes were in flight.
        let unequal = if in_sync.count_ones() > 1 { dirty.clone() } else { none.clone() };
        let mut events = PendingEvents::default();
        let all = u8::MAX >> (8 - assembly.legs) & !assembly.gone;
        leg_numbers_in(all & !in_sync)
            .for_each(|leg| events.count_and_queue(MirrorEvent::Degraded { leg }));
        Self {
            uuid: assembly.uuid,
            geometry: *geometry,
            legs: assembly.legs,
            gone: assembly.gone,
            generation: assembly.generation,
            sequences: assembly.sequences,
            fence: OwnershipFence::new(assembly.owner, assembly.first, !options.bugs.ignores_fence),
            present: assembly.present_mask(),
            in_sync: *in_sync,
            joining: 0,
            returning: 0,
            fresh: assembly.fresh,
            promoting: 0,
            claimed: assembly.claimed,
            dirty: dirty.clone(),
            // As recorded at open.
            durable: dirty.clone(),
            known: assembly.known,
            quiet: none.clone(),
            clearing: none,
            todo: unequal.clone(),
            unequal,
            wanted: 0,
            settled: 0,
            commit: None,
            stalled: false,
            failures: 0,
            members: Vec::new(),
            owner: None,
            registered: Vec::new(),
            copying: None,
            repairs: Vec::new(),
            phase: MaintenancePhase::Rest,
            times: MaintenanceSchedule::new(options.resync_policy()),
            chunk_blocks,
            bugs: options.bugs,
            events,
            #[cfg(test)]
            planted: None,
        }
    }

    /// Whether a test has injected this bug.
    #[cfg(test)]
    pub(super) fn has_bug(&self, bug: InjectedBug) -> bool {
        self.planted == Some(bug)
    }

    /// There are no injected bugs outside tests.
    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "it is asked as the other one is")]
    pub(super) const fn has_bug(&self, _: InjectedBug) -> bool {
        false
    }

    pub(super) fn geometry(&self) -> MirrorGeometry {
        self.geometry
    }

    pub(super) fn unequal_regions(&self) -> Vec<u64> {
        self.unequal.iter().collect()
    }

    pub(super) fn masks(&self) -> LegMasks {
        let too_early =
            if self.has_bug(InjectedBug::ReadsReturningLegs) { self.returning } else { 0 };
        LegMasks {
            read: self.in_sync | too_early,
            write: self.in_sync | self.returning,
            claimed: self.claimed,
            unequal: !self.unequal.is_empty(),
        }
    }

    /// Whether every leg is in sync.
    pub(super) fn are_all_legs_in_sync(&self) -> bool {
        u32::from(self.legs) == (self.in_sync | self.gone).count_ones()
    }

    /// Number of legs of the mirror.
    pub(super) fn leg_count(&self) -> u32 {
        u32::from(self.legs) - self.gone.count_ones()
    }

    /// Requests a commit: a change has to become durable.
    pub(super) fn request_commit(&mut self) {
        self.wanted += 1;
        self.stalled = false;
    }

    /// Requests that this region becomes dirty on all legs.
    pub(super) fn request_dirty(&mut self, region: u64) {
        let is_on_its_way = self.wanted != self.settled || self.durable.has(region);
        if self.dirty.set(region) || !is_on_its_way {
            self.request_commit();
        }
    }

    /// Whether a write may start; if not, requests what it waits for.
    pub(super) fn admit_write(
        &mut self,
        shared: &MirrorShared,
        write_epoch: &OldestWriteEpoch,
        slot: u32,
        (lba, blocks): (u64, u64),
    ) -> WriteAdmission {
        if self.fence.is_ownership_lost() {
            return WriteAdmission::Refused;
        }
        let (first, count) = self.geometry.regions_of(lba, blocks);
        let mut may_go = !self.is_range_held_for_copy(lba, blocks);
        for region in first..first + count {
            // The region must not be cleared. A commit in flight that clears it has removed it from
            // `durable`.
            self.quiet.clear(region);
            self.clearing.clear(region);
            self.request_dirty(region);
            may_go &= self.durable.has(region) || self.has_bug(InjectedBug::WritesBeforeMarking);
        }
        if !may_go {
            self.stalled = false;
            return WriteAdmission::Wait;
            // During a copy of the region its writes are tracked one by one, so that the copy can wait for
            // those in its chunk.
        }
        let under_copy = self.copying.as_ref().map(|copying| copying.region);
        if under_copy.is_some_and(|region| (first..first + count).contains(&region)) {
            let (write_epoch, epoch) = (write_epoch.clone(), shared.current_write_epoch());
            self.registered.push(WriteUnderCopy { write_epoch, slot, lba, blocks, epoch });
            return WriteAdmission::Registered;
        }
        shared.closed.clear(first, count);
        WriteAdmission::Go
    }

    /// A write in the region being copied has ended.
    pub(super) fn unregister_channel(&mut self, write_epoch: &OldestWriteEpoch, slot: u32) {
        self.registered
            .retain(|one| one.slot != slot || !one.write_epoch.is_same_channel(write_epoch));
    }

    /// Whether all writes that began before `epoch` have ended.
    pub(super) fn are_writes_before_ended(&self, epoch: u64) -> bool {
        self.members.iter().all(|member| member.write_epoch.are_writes_before_ended(epoch))
            && self.registered.iter().all(|write| write.epoch >= epoch)
    }

    fn is_range_held_for_copy(&self, lba: u64, blocks: u64) -> bool {
        self.copying
            .as_ref()
            .and_then(|copying| copying.locked)
            .is_some_and(|(first, count)| ranges_overlap((first, u64::from(count)), (lba, blocks)))
    }

    /// Whether a tracked write overlaps these blocks.
    pub(super) fn has_tracked_write_in(&self, range: (u64, u64)) -> bool {
        self.registered.iter().any(|one| ranges_overlap((one.lba, one.blocks), range))
    }

    /// Judges a write or a flush that `failed` on some legs and was `done` on others.
    pub(super) fn conclude_write(
        &mut self,
        shared: &MirrorShared,
        done: u8,
        failed: u8,
    ) -> WriteVerdict {
        if self.in_sync & !failed == 0 {
            return WriteVerdict::Bad;
        }
        self.fail_legs(shared, failed);
        if self.claimed & !done == 0 || self.has_bug(InjectedBug::CompletesBeforeRecording) {
            return WriteVerdict::Good;
        }
        if self.wanted == self.settled && self.commit.is_none() {
            self.request_commit();
        }
        self.stalled = false;
        WriteVerdict::Wait
    }

    /// Handles a loss of completed writes that legs reported to a flush. Legs that other in-sync ones can
    /// replace are failed. Returns true if there are none: then legs may differ in any region written
    /// since the last flush, and the correct data is unknown.
    pub(super) fn handle_leg_losses(&mut self, shared: &MirrorShared, lost: u8) -> bool {
        if lost == 0 || self.bugs.ignores_failed_flush {
            return false;
        }
        if self.in_sync & !lost != 0 {
            self.fail_legs(shared, lost);
            return false;
        }
        if self.in_sync == 0 {
            return false;
        }
        if (self.in_sync | self.returning).count_ones() > 1 {
            let dirty = self.dirty.clone();
            dirty.iter().for_each(|region| self.queue_region_resync(shared, region));
            shared.publish_leg_masks(self);
            shared.set_maintenance_due(Instant::default());
        }
        self.events.count_and_queue(MirrorEvent::WritesLost);
        true
    }

    /// Wakes the maintenance thread.
    pub(super) fn wake_maintenance(&mut self) {
        if let Some(waker) = &mut self.owner {
            waker.raise(0);
        }
    }

    /// Fails legs: they are neither read nor written any more. Other in-sync legs must remain.
    pub(super) fn fail_legs(&mut self, shared: &MirrorShared, failed: u8) {
        let lost = failed & self.in_sync;
        let sent_away = failed & (self.returning | self.joining | self.promoting);
        if lost == 0 && sent_away == 0 {
            return;
        }
        self.in_sync &= !failed;
        self.returning &= !failed;
        self.joining &= !failed;
        self.promoting &= !failed;
        leg_numbers_in(lost)
            .for_each(|leg| self.events.count_and_queue(MirrorEvent::LegLost { leg }));
        if lost != 0 {
            self.request_commit();
            // A region that is not clean on a failed leg must not become clean.
            self.quiet.clear_all();
            self.clearing.clear_all();
        }
        if self.in_sync.count_ones() == 1 {
            for region in self.unequal.iter() {
                shared.unequal.clear(region, 1);
            }
            self.unequal.clear_all();
        }
        if self.returning == 0 {
            self.todo = self.unequal.clone();
        }
        shared.publish_leg_masks(self);
        shared.wake_all();
    }

    /// Marks the regions of these blocks as differing on in-sync legs: a write was executed by some of
    /// them or by none.
    pub(super) fn mark_divergent(&mut self, shared: &MirrorShared, lba: u64, blocks: u64) {
        if (self.in_sync | self.returning).count_ones() < 2 {
            return;
        }
        let (first, count) = self.geometry.regions_of(lba, blocks);
        (first..first + count).for_each(|region| self.queue_region_resync(shared, region));
        shared.publish_leg_masks(self);
        shared.set_maintenance_due(Instant::default());
    }

    fn queue_region_resync(&mut self, shared: &MirrorShared, region: u64) {
        self.todo.set(region);
        self.read_region_from_one_leg(shared, region);
        if let Some(copying) = self.copying.as_mut().filter(|one| one.region == region) {
            copying.again = true;
        }
    }

    /// Makes reads of this region use one leg until it has been copied.
    pub(super) fn read_region_from_one_leg(&mut self, shared: &MirrorShared, region: u64) {
        if self.in_sync.count_ones() > 1 {
            self.unequal.set(region);
            shared.unequal.set(region, 1);
        }
    }

    /// Queues a repair of blocks that one leg could not read and another could.
    pub(super) fn queue_repair(&mut self, shared: &MirrorShared, lba: u64, blocks: u32) {
        shared.set_maintenance_due(Instant::default());
        if self.repairs.len() < REPAIRS_MAX && !self.repairs.contains(&(lba, blocks)) {
            self.repairs.push((lba, blocks));
        }
    }

    /// The same for a waiting request; not limited by [`REPAIRS_MAX`].
    pub(super) fn queue_required_repair(&mut self, shared: &MirrorShared, lba: u64, blocks: u32) {
        shared.set_maintenance_due(Instant::default());
        if !self.repairs.contains(&(lba, blocks)) {
            self.repairs.push((lba, blocks));
        }
    }

    /// Whether any of these blocks is queued for repair or being repaired.
    pub(super) fn is_repairing(&self, range: (u64, u64)) -> bool {
        let under_copy = self.copying.as_ref().and_then(RegionResync::rest_of_repair_range);
        let waiting = self.repairs.iter().chain(&under_copy);
        waiting.into_iter().any(|(lba, blocks)| ranges_overlap((*lba, u64::from(*blocks)), range))
    }
}

/// Whether two block ranges overlap.
fn ranges_overlap((first, count): (u64, u64), (lba, blocks): (u64, u64)) -> bool {
    lba < first + count && first < lba + blocks
}

#[cfg(test)]
mod tests {
    use super::SuperblockSequenceNumbers;

    #[test]
    fn superblock_write_never_overwrites_the_last_valid_copy() {
        let mut sequence = SuperblockSequenceNumbers { good: 6, used: 6 };
        assert_eq!(sequence.next_for_older_copy(), 7);
        // The write of number 7 did not complete, and may be torn.
        assert_eq!(sequence.next_for_older_copy(), 9);
        sequence.good = 9;
        assert_eq!(sequence.next_for_older_copy(), 10);
    }
}
