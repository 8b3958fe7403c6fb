//! Background maintenance of a mirror: clears the dirty bitmap, probes and returns legs, resynchronizes.
//! No I/O: a channel calls [`MirrorState::next_maintenance_io`], executes the task and reports its result.
//!
//! ```text
//!   rest ─┬─ quiet ── flush ──────────────────────────────────▶ rest     regions become clean
//!         ├─ probe ── joining ── entering ────────────────────▶ rest     a leg has returned
//!         ├─ draining ── locking ── reading ── writing ─┬─────▶ rest     a region is copied
//!         │                 ▲────────── pacing ◀────────┘   flush of the leg that was read, before
//!         │                                                   other in-sync legs are written
//!         └─ flush ── promoting ──────────────────────────────▶ rest     a leg is in sync
//! ```

use tenmil_base::{Instant, Span};

use super::events::MirrorEvent;
use super::mirror_shared::MirrorShared;
use super::mirror_state::{InjectedBug, MirrorState};
use super::resync::{RegionResync, lowest_leg_mask};
use tenmil_volume::mirror::{MirrorSuperblock, SuperblockError};

/// Delays and rate of background work.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResyncPolicy {
    /// A region becomes clean after this time without writes.
    pub(super) clear_after: Span,
    /// Interval of probes of a failed leg.
    pub(super) probe_every: Span,
    /// Resync rate in bytes per second.
    pub(super) copy_rate: u64,
}

/// When tasks are due.
#[derive(Debug)]
pub(super) struct MaintenanceSchedule {
    pub(super) policy: ResyncPolicy,
    clear_at: Instant,
    pub(super) probe_at: Instant,
    pub(super) copy_at: Instant,
    /// Request count of all channels at the last chunk.
    load: u64,
}

/// State of maintenance, named for what it awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaintenancePhase {
    /// The next due time.
    Rest,
    /// That the quiet regions stay unwritten until then, and that older writes end.
    Quiet { until: Instant, epoch: u64 },
    /// A flush, after which the quiet regions are clean.
    FlushedToClear,
    /// The superblock of a failed leg.
    Probed { leg: u8 },
    /// That the superblock of a leg records it as stale.
    Joined { leg: u8, version: u64 },
    /// The end of all writes that were not sent to this leg.
    Entered { epoch: u64 },
    /// The end of all untracked writes to the region.
    Drained { epoch: u64 },
    /// The end of tracked writes to the chunk.
    Locked,
    /// A chunk from this leg; the legs in `tried` could not read it.
    Read { leg: u8, tried: u8 },
    /// A flush of the leg that the chunk was read from; the legs in `tried` could not read it.
    FlushedToCopy { leg: u8, tried: u8 },
    /// The write of the chunk to the other legs.
    Written,
    /// The time of the next chunk.
    Paced,
    /// A flush, after which a leg is in sync.
    FlushedToPromote,
    /// That all superblocks record it as in sync.
    Promoted,
}

/// I/O for the calling channel to perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaintenanceIo {
    /// Flush these legs.
    Flush { legs: u8 },
    /// Read both superblock copies of this leg.
    Probe { leg: u8 },
    /// Read these blocks of the mirror from this leg into the chunk buffer.
    Read { leg: u8, lba: u64, blocks: u32 },
    /// Write the chunk buffer to these legs.
    Write { legs: u8, lba: u64, blocks: u32 },
}

impl MaintenanceIo {
    /// Whether it can report a loss of completed writes.
    pub(super) const fn is_flush(self) -> bool {
        matches!(self, Self::Flush { .. })
    }
}

/// The resync rate is divided by this while clients use the mirror.
const BUSY_SHARE: u64 = 4;

/// Next background step.
pub(super) enum MaintenanceStep {
    Again,
    At(Instant),
    Do(MaintenanceIo),
}

/// Poll interval for conditions that other threads satisfy shortly.
const POLL_INTERVAL: Span = Span::from_us(50);

impl MaintenanceSchedule {
    pub(super) const fn new(policy: ResyncPolicy) -> Self {
        let now = Instant { ns: 0 };
        Self { policy, clear_at: Instant::NEVER, probe_at: now, copy_at: now, load: 0 }
    }
}

impl MirrorState {
    /// The task to perform now; otherwise sets when to call again.
    pub(super) fn next_maintenance_io(
        &mut self,
        shared: &MirrorShared,
        now: Instant,
    ) -> Option<MaintenanceIo> {
        if self.fence.is_ownership_lost() {
            self.phase = MaintenancePhase::Rest;
            shared.set_maintenance_due(Instant::NEVER);
            return None;
        }
        loop {
            match self.step_maintenance(shared, now) {
                MaintenanceStep::Again => {}
                MaintenanceStep::At(at) => {
                    shared.set_maintenance_due(at);
                    return None;
                }
                MaintenanceStep::Do(task) => {
                    shared.set_maintenance_due(Instant::NEVER);
                    return Some(task);
                }
            }
        }
    }

    fn step_maintenance(&mut self, shared: &MirrorShared, now: Instant) -> MaintenanceStep {
        match self.phase {
            MaintenancePhase::Rest => self.choose_next_work(shared, now),
            MaintenancePhase::Quiet { until, epoch } => {
                self.step_awaiting_quiet_regions(shared, until, epoch, now)
            }
            MaintenancePhase::Joined { leg, version } => {
                self.step_awaiting_join_commit(shared, leg, version, now)
            }
            MaintenancePhase::Entered { epoch } => self.step_awaiting_old_writes(epoch, now),
            MaintenancePhase::Drained { epoch } => self.handle_region_writes_ended(epoch, now),
            MaintenancePhase::Locked => self.handle_chunk_writes_held(now),
            MaintenancePhase::Paced if now < self.times.copy_at => {
                MaintenanceStep::At(self.times.copy_at)
            }
            MaintenancePhase::Paced => self.set_phase_and_repeat(MaintenancePhase::Locked),
            MaintenancePhase::Promoted if self.promoting == 0 => {
                self.set_phase_and_repeat(MaintenancePhase::Rest)
            }
            MaintenancePhase::Promoted => self.step_poll_again_later(now),
            MaintenancePhase::FlushedToClear
            | MaintenancePhase::Probed { .. }
            | MaintenancePhase::Read { .. }
            | MaintenancePhase::FlushedToCopy { .. }
            | MaintenancePhase::Written
            | MaintenancePhase::FlushedToPromote => MaintenanceStep::At(Instant::NEVER),
        }
    }

    pub(super) fn set_phase_and_repeat(&mut self, phase: MaintenancePhase) -> MaintenanceStep {
        self.phase = phase;
        MaintenanceStep::Again
    }

    /// Pause of the resync after so many bytes.
    pub(super) fn resync_pause(&mut self, bytes: u64) -> Span {
        let load = self.members.iter().fold(0, |sum: u64, one| sum.wrapping_add(one.load.count()));
        let is_busy = std::mem::replace(&mut self.times.load, load) != load;
        let share = if is_busy { BUSY_SHARE } else { 1 };
        let rate = u128::from(self.times.policy.copy_rate.max(1));
        let ns = u128::from(bytes) * u128::from(share) * 1_000_000_000 / rate;
        Span { ns: u64::try_from(ns).unwrap_or(u64::MAX) }
    }

    /// Waits for a commit, or for writes to end.
    pub(super) fn step_poll_again_later(&mut self, now: Instant) -> MaintenanceStep {
        if std::mem::take(&mut self.stalled) {
            return MaintenanceStep::At(now.after(self.times.policy.probe_every));
        }
        MaintenanceStep::At(now.after(POLL_INTERVAL))
    }

    fn choose_next_work(&mut self, shared: &MirrorShared, now: Instant) -> MaintenanceStep {
        let pairs = self.in_sync.count_ones() > 1;
        // Priority: repairs of unreadable blocks, resync, promotion, probes, clearing of the dirty
        // bitmap.
        if !pairs {
            self.repairs.clear();
        }
        if let Some((lba, blocks)) = self.repairs.pop() {
            return self.begin_repair(shared, lba, blocks);
        }
        let todo = self.todo.first().filter(|_| pairs || self.returning != 0);
        if let Some(region) = todo
            && now >= self.times.copy_at
        {
            let (first, count) = self.geometry.blocks_of(region);
            return self.begin_copy(shared, region, first, first + count, true);
        }
        if self.returning != 0 && todo.is_none() {
            self.phase = MaintenancePhase::FlushedToPromote;
            return MaintenanceStep::Do(MaintenanceIo::Flush { legs: self.returning });
        }
        let stale = self.present & !self.in_sync & !self.returning;
        if stale != 0 && now >= self.times.probe_at {
            // One leg per interval.
            self.times.probe_at = now.after(self.times.policy.probe_every);
            let leg = lowest_leg_mask(stale);
            self.phase = MaintenancePhase::Probed { leg };
            return MaintenanceStep::Do(MaintenanceIo::Probe { leg });
        }
        let may_clear = self.are_all_legs_in_sync() && todo.is_none() && !self.durable.is_empty();
        if !may_clear {
            self.times.clear_at = Instant::NEVER;
        } else if self.times.clear_at == Instant::NEVER {
            self.times.clear_at = now.after(self.times.policy.clear_after);
        }
        if now >= self.times.clear_at {
            return self.begin_clearing_dirty_bitmap(shared, now);
        }
        let probe_at = if stale != 0 { self.times.probe_at } else { Instant::NEVER };
        let copy_at = if todo.is_some() { self.times.copy_at } else { Instant::NEVER };
        MaintenanceStep::At(probe_at.min(copy_at).min(self.times.clear_at))
    }

    /// Closes every dirty region. A write opens its region again; regions that are still closed after
    /// `clear_after` have not been written.
    fn begin_clearing_dirty_bitmap(
        &mut self,
        shared: &MirrorShared,
        now: Instant,
    ) -> MaintenanceStep {
        self.quiet = self.durable.clone();
        self.quiet.iter().for_each(|region| shared.closed.set(region, 1));
        let until = now.after(self.times.policy.clear_after);
        self.set_phase_and_repeat(MaintenancePhase::Quiet {
            until,
            epoch: shared.advance_write_epoch(),
        })
    }

    fn step_awaiting_quiet_regions(
        &mut self,
        shared: &MirrorShared,
        until: Instant,
        epoch: u64,
        now: Instant,
    ) -> MaintenanceStep {
        let other_work = !self.todo.is_empty() || !self.repairs.is_empty();
        if !self.are_all_legs_in_sync() || other_work || self.quiet.is_empty() {
            self.quiet.clear_all();
            self.times.clear_at = now.max(until);
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        }
        if now < until {
            return MaintenanceStep::At(until);
        }
        if !self.are_writes_before_ended(epoch) {
            return self.step_poll_again_later(now);
        }
        // The regions are durable on all legs only after this flush; clearing before it could lose a
        // write.
        if self.has_bug(InjectedBug::ClearsBeforeFlushing) {
            return self.handle_flush_before_clear(shared, 0);
        }
        self.phase = MaintenancePhase::FlushedToClear;
        MaintenanceStep::Do(MaintenanceIo::Flush { legs: self.in_sync })
    }

    fn step_awaiting_join_commit(
        &mut self,
        shared: &MirrorShared,
        leg: u8,
        version: u64,
        now: Instant,
    ) -> MaintenanceStep {
        if self.joining & leg == 0 || self.stalled {
            self.joining = 0;
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        }
        if self.settled < version {
            return self.step_poll_again_later(now);
        }
        self.joining = 0;
        self.returning |= leg;
        let number = leg.trailing_zeros().try_into().unwrap_or(0);
        self.events.count_and_queue(MirrorEvent::LegReturned { leg: number });
        shared.publish_leg_masks(self);
        shared.count_leg_return();
        self.set_phase_and_repeat(MaintenancePhase::Entered { epoch: shared.advance_write_epoch() })
    }

    fn step_awaiting_old_writes(&mut self, epoch: u64, now: Instant) -> MaintenanceStep {
        if self.returning != 0 {
            if !self.are_writes_before_ended(epoch) {
                return self.step_poll_again_later(now);
            }
            if self.has_bug(InjectedBug::PromotesBeforeCopying) {
                return self.set_phase_and_repeat(MaintenancePhase::Rest);
            }
            if self.returning & self.fresh != 0 {
                self.todo.fill();
            } else {
                let dirty = self.dirty.clone();
                self.todo.add(&dirty);
            }
        }
        self.set_phase_and_repeat(MaintenancePhase::Rest)
    }

    /// Ends a task, which failed on the legs of `failed`. Returns the next one if it is due at once.
    pub(super) fn handle_maintenance_io_end(
        &mut self,
        shared: &MirrorShared,
        now: Instant,
        failed: u8,
    ) -> Option<MaintenanceIo> {
        let next = match self.phase {
            MaintenancePhase::FlushedToClear => self.handle_flush_before_clear(shared, failed),
            MaintenancePhase::FlushedToPromote => self.handle_flush_before_promote(shared, failed),
            MaintenancePhase::Read { leg, tried } if failed != 0 => {
                self.handle_chunk_unreadable(shared, tried | leg)
            }
            MaintenancePhase::Read { leg, tried } => self.handle_chunk_read(shared, leg, tried),
            MaintenancePhase::FlushedToCopy { leg, tried } => {
                self.handle_source_flushed(shared, leg, tried, failed)
            }
            MaintenancePhase::Written => self.handle_chunk_written(shared, now, failed),
            _ => self.set_phase_and_repeat(MaintenancePhase::Rest),
        };
        match next {
            MaintenanceStep::Do(task) => Some(task),
            _ => self.next_maintenance_io(shared, now),
        }
    }

    fn handle_flush_before_clear(&mut self, shared: &MirrorShared, failed: u8) -> MaintenanceStep {
        let failed = if self.bugs.ignores_failed_flush { 0 } else { failed };
        if self.in_sync & !failed != 0 {
            self.fail_legs(shared, failed);
        }
        let quiet = self.quiet.clone();
        self.quiet.clear_all();
        if failed == 0 && self.are_all_legs_in_sync() && !quiet.is_empty() {
            self.clearing.add(&quiet);
            self.request_commit();
        }
        self.times.clear_at = Instant::NEVER;
        self.set_phase_and_repeat(MaintenancePhase::Rest)
    }

    fn handle_flush_before_promote(
        &mut self,
        shared: &MirrorShared,
        failed: u8,
    ) -> MaintenanceStep {
        if self.in_sync & !failed != 0 {
            self.fail_legs(shared, failed);
        }
        if self.returning == 0 || !self.todo.is_empty() {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        }
        self.promoting = self.returning;
        self.request_commit();
        self.set_phase_and_repeat(MaintenancePhase::Promoted)
    }

    /// Ends a probe with the superblock found on the leg.
    pub(super) fn handle_probe_result(
        &mut self,
        shared: &MirrorShared,
        now: Instant,
        found: Option<Result<MirrorSuperblock, SuperblockError>>,
    ) -> Option<MaintenanceIo> {
        if let MaintenancePhase::Probed { leg } = self.phase {
            self.phase = MaintenancePhase::Rest;
            match found {
                // It does not respond yet.
                None => {}
                Some(Ok(superblock)) if self.is_returned_leg_unchanged(leg, &superblock) => {
                    let index = leg.trailing_zeros() as usize;
                    self.sequences[index].good = superblock.sequence;
                    self.fence.first[index] = superblock.sequence + 1;
                    self.known[index] = superblock.generation;
                    // Regions with writes in flight when it was last updated.
                    self.dirty.add(&superblock.dirty);
                    self.joining = leg;
                    self.request_commit();
                    self.phase = MaintenancePhase::Joined { leg, version: self.wanted };
                }
                // Another device is in its place; it is not touched.
                Some(_) => self.present &= !leg,
            }
        }
        self.next_maintenance_io(shared, now)
    }

    /// Whether a returned leg is what it was, or older. A leg that was written without the others records
    /// that one of them is stale, which none of them knows.
    fn is_returned_leg_unchanged(&self, leg: u8, found: &MirrorSuperblock) -> bool {
        let is_event = found.generation > self.known[usize::from(found.leg)];
        let was_apart = is_event && found.is_leg_in_sync() && self.in_sync & !found.in_sync != 0;
        !was_apart
            && self.is_leg_not_claimed_by_other(found)
            && found.uuid == self.uuid
            && 1_u8.checked_shl(found.leg.into()) == Some(leg)
            && found.geometry == self.geometry
            && found.generation <= self.generation
            && found.generation >= self.known[usize::from(found.leg)]
    }

    /// The channel that performed the task is closed.
    pub(super) fn abandon_maintenance_io(&mut self, shared: &MirrorShared) {
        self.quiet.clear_all();
        self.times.clear_at = Instant::NEVER;
        self.repairs.extend(self.copying.as_ref().and_then(RegionResync::rest_of_repair_range));
        self.stop_copy(shared);
        shared.set_maintenance_due(Instant::default());
    }
}
