//! What is known about the legs and the regions of a mirror, and who may write where. No I/O.

use base::{Instant, Interrupts};
use host::EventVectors;

use super::assemble::Assembly;
use super::bits::Bits;
use super::commit::legs_of;
use super::copy::Copying;
use super::events::{MirrorEvent, Unannounced};
use super::fence::Fence;
use super::options::{InjectedBugs, MirrorOptions};
use super::shared::{Load, Masks, Seat, Shared};
use super::superblock::{LEGS_MAX, Shape};
use super::tend::{Phase, Times};

/// The state of a mirror, behind its lock.
pub(super) struct Meta {
    pub(super) uuid: u128,
    pub(super) shape: Shape,
    pub(super) legs: u8,
    /// Numbers that have no leg any more.
    pub(super) gone: u8,
    pub(super) generation: u64,
    /// The generation that each leg's superblock is known to have.
    pub(super) known: [u64; LEGS_MAX],
    pub(super) sequences: [Sequence; LEGS_MAX],
    /// Who has the mirror open.
    pub(super) fence: Fence,

    /// Legs that have a medium.
    pub(super) present: u8,
    /// Legs that hold every block that was ever answered for.
    pub(super) in_sync: u8,
    /// Legs that are told, in their own superblock, that they are stale, before anything is copied.
    pub(super) joining: u8,
    /// Legs that get every write and are not read yet.
    pub(super) returning: u8,
    /// Legs that are not in sync and never were: every region is copied to them.
    pub(super) fresh: u8,
    /// Legs that the next superblocks will call in sync.
    pub(super) promoting: u8,
    /// Legs of which some superblock may say that they are in sync.
    pub(super) claimed: u8,

    /// Regions in which legs may differ, as the next superblocks will say.
    pub(super) dirty: Bits,
    /// The same as all superblocks of legs in sync say now.
    pub(super) durable: Bits,
    /// Dirty regions that nobody has written for a while.
    pub(super) quiet: Bits,
    /// Those of them that have been flushed since: the next superblocks will call them clean.
    pub(super) clearing: Bits,
    /// Regions in which legs in sync may differ.
    pub(super) unequal: Bits,
    /// Regions that are still to be copied.
    pub(super) todo: Bits,

    /// Counts changes that have to become durable, and how many of them are.
    pub(super) wanted: u64,
    pub(super) settled: u64,
    pub(super) commit: Option<Commit>,
    /// No leg could take a superblock: nothing is tried again until a request asks for it.
    pub(super) stalled: bool,
    /// Counts how often that happened.
    pub(super) failures: u64,

    /// The channels that are open.
    pub(super) members: Vec<Member>,
    /// What wakes the thread that looks after the mirror, while it has one.
    pub(super) owner: Option<EventVectors>,
    /// Writes in the region under copy.
    pub(super) registered: Vec<Registered>,
    pub(super) copying: Option<Copying>,
    pub(super) repairs: Vec<(u64, u32)>,
    pub(super) phase: Phase,
    pub(super) times: Times,
    /// Blocks that are copied at once.
    pub(super) chunk_blocks: u32,
    pub(super) bugs: InjectedBugs,
    pub(super) events: Unannounced,
    #[cfg(test)]
    pub(super) planted: Option<Planted>,
}

/// A bug that tests plant to see it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    /// A write is answered although a leg that missed it is still called in sync.
    AnswersBeforeRecording,
    /// A region is written before it is marked dirty.
    WritesBeforeMarking,
    /// A region becomes clean although its blocks may not be stable.
    ClearsBeforeFlushing,
    /// A leg is read while it is copied to.
    ReadsReturningLegs,
    /// A leg is called in sync before what it missed has been copied.
    PromotesBeforeCopying,
    /// Blocks are copied over a leg in sync from one that may have lost them.
    CopiesBeforeFlushing,
}

/// Superblocks on their way.
pub(super) struct Commit {
    pub(super) version: u64,
    pub(super) generation: u64,
    pub(super) targets: u8,
    pub(super) in_sync: u8,
    pub(super) promoting: u8,
    pub(super) dirty: Bits,
}

/// The numbers of a leg's superblocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sequence {
    /// Of the newest one that is whole.
    pub(super) good: u64,
    /// The highest that was ever used.
    pub(super) used: u64,
}

/// A channel, as the others know it.
pub(super) struct Member {
    pub(super) seat: Seat,
    /// Counts what it was asked.
    pub(super) load: Load,
    pub(super) bell: EventVectors,
}

/// A write in the region under copy.
pub(super) struct Registered {
    pub(super) seat: Seat,
    pub(super) slot: u32,
    pub(super) lba: u64,
    pub(super) blocks: u64,
    pub(super) epoch: u64,
}

/// Whether a write may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It may, and is one of its channel's writes.
    Go,
    /// It may, and is in the list of writes in the region under copy.
    Registered,
    /// Not before there is news.
    Wait,
    /// It may not: somebody else has the mirror.
    Refused,
}

/// How a write ended, legs and all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It may be answered.
    Good,
    /// It may be answered once superblocks have been written.
    Wait,
    /// No leg in sync has it.
    Bad,
}

/// Most repairs that wait for their turn; a read that fails again asks again.
const REPAIRS_MAX: usize = 64;

impl Sequence {
    /// The next number, for the copy that is not the newest whole one.
    pub(super) fn draw(&mut self) -> u64 {
        let next = self.used.max(self.good) + 1;
        self.used = if next % 2 == self.good % 2 { next + 1 } else { next };
        self.used
    }
}

impl Meta {
    /// What is known when a mirror is opened.
    pub(super) fn new(assembly: &Assembly, options: &MirrorOptions, chunk_blocks: u32) -> Self {
        let Assembly { shape, in_sync, dirty, .. } = assembly;
        let none = Bits::new(shape.regions());
        // After a power cut legs in sync may differ wherever somebody was writing.
        let unequal = if in_sync.count_ones() > 1 { dirty.clone() } else { none.clone() };
        let mut events = Unannounced::default();
        let all = u8::MAX >> (8 - assembly.legs) & !assembly.gone;
        legs_of(all & !in_sync).for_each(|leg| events.push(MirrorEvent::Degraded { leg }));
        Self {
            uuid: assembly.uuid,
            shape: *shape,
            legs: assembly.legs,
            gone: assembly.gone,
            generation: assembly.generation,
            sequences: assembly.sequences,
            fence: Fence::new(assembly.owner, assembly.first, !options.bugs.ignores_fence),
            present: assembly.present(),
            in_sync: *in_sync,
            joining: 0,
            returning: 0,
            fresh: assembly.fresh,
            promoting: 0,
            claimed: assembly.claimed,
            dirty: dirty.clone(),
            // As recorded when it was opened.
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
            phase: Phase::Rest,
            times: Times::new(options.policy()),
            chunk_blocks,
            bugs: options.bugs,
            events,
            #[cfg(test)]
            planted: None,
        }
    }

    /// Whether a test has planted this bug.
    #[cfg(test)]
    pub(super) fn has(&self, bug: Planted) -> bool {
        self.planted == Some(bug)
    }

    /// There are no planted bugs outside tests.
    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "it is asked as the other one is")]
    pub(super) const fn has(&self, _: Planted) -> bool {
        false
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    pub(super) fn unequal_regions(&self) -> Vec<u64> {
        self.unequal.iter().collect()
    }

    pub(super) fn masks(&self) -> Masks {
        let too_early = if self.has(Planted::ReadsReturningLegs) { self.returning } else { 0 };
        Masks {
            read: self.in_sync | too_early,
            write: self.in_sync | self.returning,
            claimed: self.claimed,
            unequal: !self.unequal.is_empty(),
        }
    }

    /// Whether every leg is in sync.
    pub(super) fn is_whole(&self) -> bool {
        u32::from(self.legs) == (self.in_sync | self.gone).count_ones()
    }

    /// How many legs the mirror has.
    pub(super) fn members_count(&self) -> u32 {
        u32::from(self.legs) - self.gone.count_ones()
    }

    /// Something has to become durable.
    pub(super) fn want(&mut self) {
        self.wanted += 1;
        self.stalled = false;
    }

    /// Sees to it that this region becomes dirty on all legs.
    pub(super) fn mark(&mut self, region: u64) {
        let is_on_its_way = self.wanted != self.settled || self.durable.has(region);
        if self.dirty.set(region) || !is_on_its_way {
            self.want();
        }
    }

    /// Whether a write may go, and if it may not, sees to it that it will.
    pub(super) fn admit(
        &mut self,
        shared: &Shared,
        seat: &Seat,
        slot: u32,
        (lba, blocks): (u64, u64),
    ) -> Admission {
        if self.fence.is_lost() {
            return Admission::Refused;
        }
        let (first, count) = self.shape.regions_of(lba, blocks);
        let mut may_go = !self.is_locked(lba, blocks);
        for region in first..first + count {
            // Whoever is about to clear it must not, and a superblock on its way that says it is
            // clean has taken it out of `durable`.
            self.quiet.clear(region);
            self.clearing.clear(region);
            self.mark(region);
            may_go &= self.durable.has(region) || self.has(Planted::WritesBeforeMarking);
        }
        if !may_go {
            self.stalled = false;
            return Admission::Wait;
        }
        let under_copy = self.copying.as_ref().map(|copying| copying.region);
        if under_copy.is_some_and(|region| (first..first + count).contains(&region)) {
            let (seat, epoch) = (seat.clone(), shared.epoch());
            self.registered.push(Registered { seat, slot, lba, blocks, epoch });
            return Admission::Registered;
        }
        shared.closed.clear(first, count);
        Admission::Go
    }

    /// A write in the region under copy has ended.
    pub(super) fn unregister(&mut self, seat: &Seat, slot: u32) {
        self.registered.retain(|one| one.slot != slot || !one.seat.is(seat));
    }

    /// Whether all writes that began before `epoch` have ended.
    pub(super) fn is_past(&self, epoch: u64) -> bool {
        self.members.iter().all(|member| member.seat.is_past(epoch))
            && self.registered.iter().all(|write| write.epoch >= epoch)
    }

    fn is_locked(&self, lba: u64, blocks: u64) -> bool {
        self.copying
            .as_ref()
            .and_then(|copying| copying.locked)
            .is_some_and(|(first, count)| overlaps((first, u64::from(count)), (lba, blocks)))
    }

    /// Whether a registered write lies in these blocks.
    pub(super) fn is_being_written(&self, range: (u64, u64)) -> bool {
        self.registered.iter().any(|one| overlaps((one.lba, one.blocks), range))
    }

    /// Judges a write or a flush that `failed` on some legs and was `done` on the others.
    pub(super) fn judge(&mut self, shared: &Shared, done: u8, failed: u8) -> Verdict {
        if self.in_sync & !failed == 0 {
            return Verdict::Bad;
        }
        self.drop_legs(shared, failed);
        if self.claimed & !done == 0 || self.has(Planted::AnswersBeforeRecording) {
            return Verdict::Good;
        }
        if self.wanted == self.settled && self.commit.is_none() {
            self.want();
        }
        self.stalled = false;
        Verdict::Wait
    }

    /// Legs have lost completed writes, as their answer to a flush says. Those that others in sync can
    /// stand in for are dropped. True if there is none that can: then legs differ in any region that
    /// was written since the last flush, and nobody knows which one is right.
    pub(super) fn have_lost(&mut self, shared: &Shared, lost: u8) -> bool {
        if lost == 0 || self.bugs.ignores_failed_flush {
            return false;
        }
        if self.in_sync & !lost != 0 {
            self.drop_legs(shared, lost);
            return false;
        }
        if self.in_sync == 0 {
            return false;
        }
        if (self.in_sync | self.returning).count_ones() > 1 {
            let dirty = self.dirty.clone();
            dirty.iter().for_each(|region| self.suspect_region(shared, region));
            shared.publish(self);
            shared.tend_again_at(Instant::default());
        }
        self.events.push(MirrorEvent::WritesLost);
        true
    }

    /// Wakes the thread that looks after the mirror, if it sleeps: something is to be done.
    pub(super) fn call_owner(&mut self) {
        if let Some(bell) = &mut self.owner {
            bell.raise(0);
        }
    }

    /// Legs have failed: they are neither read nor written any more. There must be others in sync.
    pub(super) fn drop_legs(&mut self, shared: &Shared, failed: u8) {
        let lost = failed & self.in_sync;
        let sent_away = failed & (self.returning | self.joining | self.promoting);
        if lost == 0 && sent_away == 0 {
            return;
        }
        self.in_sync &= !failed;
        self.returning &= !failed;
        self.joining &= !failed;
        self.promoting &= !failed;
        legs_of(lost).for_each(|leg| self.events.push(MirrorEvent::LegLost { leg }));
        if lost != 0 {
            self.want();
            // What is not clean on a leg that is gone must not become so.
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
        shared.publish(self);
        shared.tell();
    }

    /// Legs in sync may differ in the regions of these blocks: a write was carried out by some of
    /// them, or by none, and nobody knows how far.
    pub(super) fn suspect(&mut self, shared: &Shared, lba: u64, blocks: u64) {
        if (self.in_sync | self.returning).count_ones() < 2 {
            return;
        }
        let (first, count) = self.shape.regions_of(lba, blocks);
        (first..first + count).for_each(|region| self.suspect_region(shared, region));
        shared.publish(self);
        shared.tend_again_at(Instant::default());
    }

    fn suspect_region(&mut self, shared: &Shared, region: u64) {
        self.todo.set(region);
        self.doubt(shared, region);
        if let Some(copying) = self.copying.as_mut().filter(|one| one.region == region) {
            copying.again = true;
        }
    }

    /// Reads of this region have to come from one leg until it has been copied.
    pub(super) fn doubt(&mut self, shared: &Shared, region: u64) {
        if self.in_sync.count_ones() > 1 {
            self.unequal.set(region);
            shared.unequal.set(region, 1);
        }
    }

    /// Some leg could not read these blocks, another one could.
    pub(super) fn repair(&mut self, shared: &Shared, lba: u64, blocks: u32) {
        shared.tend_again_at(Instant::default());
        if self.repairs.len() < REPAIRS_MAX && !self.repairs.contains(&(lba, blocks)) {
            self.repairs.push((lba, blocks));
        }
    }

    /// The same, and somebody waits for it, so that there is always room.
    pub(super) fn repair_now(&mut self, shared: &Shared, lba: u64, blocks: u32) {
        shared.tend_again_at(Instant::default());
        if !self.repairs.contains(&(lba, blocks)) {
            self.repairs.push((lba, blocks));
        }
    }

    /// Whether some of these blocks are still to be repaired.
    pub(super) fn is_repairing(&self, range: (u64, u64)) -> bool {
        let under_copy = self.copying.as_ref().and_then(Copying::repair);
        let waiting = self.repairs.iter().chain(&under_copy);
        waiting.into_iter().any(|(lba, blocks)| overlaps((*lba, u64::from(*blocks)), range))
    }
}

/// Whether two ranges of blocks have a block in common.
fn overlaps((first, count): (u64, u64), (lba, blocks): (u64, u64)) -> bool {
    lba < first + count && first < lba + blocks
}

#[cfg(test)]
mod tests {
    use super::Sequence;

    #[test]
    fn the_next_superblock_never_overwrites_the_last_whole_one() {
        let mut sequence = Sequence { good: 6, used: 6 };
        assert_eq!(sequence.draw(), 7);
        // It was never heard of again, and may be torn.
        assert_eq!(sequence.draw(), 9);
        sequence.good = 9;
        assert_eq!(sequence.draw(), 10);
    }
}
