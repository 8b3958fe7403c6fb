//! Copies a region, or repairs a few blocks: chunk by chunk, with writes to the chunk held. No I/O.

use tenmil_base::Instant;

use super::maintenance::{MaintenanceIo, MaintenancePhase, MaintenanceStep};
use super::mirror_shared::MirrorShared;
use super::mirror_state::{InjectedBug, MirrorState};

/// A region being copied.
#[derive(Debug)]
pub(super) struct RegionResync {
    pub(super) region: u64,
    /// The next block and the end.
    next_chunk: u64,
    end: u64,
    /// The chunk whose writes are held.
    pub(super) locked: Option<(u64, u32)>,
    /// Up to here the copy goes block by block, because no leg can read the chunk as a whole.
    single_until: u64,
    /// The whole region is copied, rather than a repair of unreadable blocks.
    whole: bool,
    /// The region has to be copied again: it was affected by a failure since the start.
    pub(super) again: bool,
}

impl RegionResync {
    /// The next block.
    pub(super) fn next_block(&self) -> u64 {
        self.next_chunk
    }

    /// The rest of a repair.
    pub(super) fn rest_of_repair_range(&self) -> Option<(u64, u32)> {
        let left = u32::try_from(self.end - self.next_chunk).ok()?;
        (!self.whole).then_some((self.next_chunk, left))
    }
}

impl MirrorState {
    pub(super) fn begin_repair(
        &mut self,
        shared: &MirrorShared,
        lba: u64,
        blocks: u32,
    ) -> MaintenanceStep {
        let region = self.geometry.region_of(lba);
        let (first, count) = self.geometry.blocks_of(region);
        // A repair that crosses the end of the region continues as another one.
        let end = lba + u64::from(blocks);
        if let Ok(left) = u32::try_from(end.saturating_sub(first + count))
            && left > 0
        {
            self.repairs.push((first + count, left));
        }
        self.begin_copy(shared, region, lba, end.min(first + count), false)
    }

    pub(super) fn begin_copy(
        &mut self,
        shared: &MirrorShared,
        region: u64,
        next: u64,
        end: u64,
        whole: bool,
    ) -> MaintenanceStep {
        let (locked, single_until, again) = (None, 0, false);
        self.copying = Some(RegionResync {
            region,
            next_chunk: next,
            end,
            locked,
            single_until,
            whole,
            again,
        });
        shared.closed.set(region, 1);
        if self.must_mark_dirty_before_copy() {
            self.request_dirty(region);
        }
        self.set_phase_and_repeat(MaintenancePhase::Drained { epoch: shared.advance_write_epoch() })
    }

    /// Whether the copy writes to in-sync legs: then the region is marked dirty first.
    fn must_mark_dirty_before_copy(&self) -> bool {
        self.copying.as_ref().is_some_and(|one| !one.whole || self.unequal.has(one.region))
    }

    pub(super) fn handle_region_writes_ended(
        &mut self,
        epoch: u64,
        now: Instant,
    ) -> MaintenanceStep {
        let Some(region) = self.copying.as_ref().map(|one| one.region) else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        let is_marked = self.durable.has(region) || !self.must_mark_dirty_before_copy();
        if !is_marked || !self.are_writes_before_ended(epoch) {
            return self.step_poll_again_later(now);
        }
        self.set_phase_and_repeat(MaintenancePhase::Locked)
    }

    pub(super) fn handle_chunk_writes_held(&mut self, now: Instant) -> MaintenanceStep {
        let chunk_blocks = self.chunk_blocks;
        let Some(copying) = &mut self.copying else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        let (lba, left) = (copying.next_chunk, copying.end - copying.next_chunk);
        let most = if lba < copying.single_until { 1 } else { u64::from(chunk_blocks) };
        let blocks = u32::try_from(left.min(most)).unwrap_or(1);
        // First new writes are held, then those in flight must end.
        copying.locked = Some((lba, blocks));
        if self.has_tracked_write_in((lba, u64::from(blocks))) {
            return self.step_poll_again_later(now);
        }
        self.step_read_chunk(0)
    }

    /// Reads the chunk from a leg that has not failed to read it.
    fn step_read_chunk(&mut self, tried: u8) -> MaintenanceStep {
        let Some((lba, blocks)) = self.copying.as_ref().and_then(|one| one.locked) else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        let leg = lowest_leg_mask(self.in_sync & !tried);
        self.phase = MaintenancePhase::Read { leg, tried };
        MaintenanceStep::Do(MaintenanceIo::Read { leg, lba, blocks })
    }

    /// The chunk was read. If in-sync legs are to be written, the source is flushed first: if it has lost
    /// completed writes, the data read may be older than that of the others, and the flush reports it.
    pub(super) fn handle_chunk_read(
        &mut self,
        shared: &MirrorShared,
        leg: u8,
        tried: u8,
    ) -> MaintenanceStep {
        if self.must_mark_dirty_before_copy() && !self.has_bug(InjectedBug::CopiesBeforeFlushing) {
            self.phase = MaintenancePhase::FlushedToCopy { leg, tried };
            return MaintenanceStep::Do(MaintenanceIo::Flush { legs: leg });
        }
        self.step_write_chunk(shared, leg, tried)
    }

    pub(super) fn handle_source_flushed(
        &mut self,
        shared: &MirrorShared,
        leg: u8,
        tried: u8,
        failed: u8,
    ) -> MaintenanceStep {
        if failed == 0 {
            return self.step_write_chunk(shared, leg, tried);
        }
        if self.in_sync & !failed != 0 {
            self.fail_legs(shared, failed);
        }
        self.stop_copy(shared)
    }

    fn step_write_chunk(&mut self, shared: &MirrorShared, leg: u8, tried: u8) -> MaintenanceStep {
        let Some(copying) = &self.copying else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        let Some((lba, blocks)) = copying.locked else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        let (region, tried) = (copying.region, tried & self.in_sync);
        let others = if self.must_mark_dirty_before_copy() {
            self.in_sync
        } else if self.durable.has(region) {
            tried
        } else {
            // In a region that is not marked dirty, in-sync legs must not differ, not even during a torn
            // write.
            if tried != 0 {
                self.queue_repair(shared, lba, blocks);
            }
            0
        };
        let legs = (others | self.returning) & !leg;
        if legs == 0 {
            return self.stop_copy(shared);
        }
        self.phase = MaintenancePhase::Written;
        MaintenanceStep::Do(MaintenanceIo::Write { legs, lba, blocks })
    }

    /// No leg of `tried` could read the chunk.
    pub(super) fn handle_chunk_unreadable(
        &mut self,
        shared: &MirrorShared,
        tried: u8,
    ) -> MaintenanceStep {
        // Where legs differ, blocks that the first leg could read must not come from another one: a
        // client may have read them before.
        let is_one_by_one = self.copying.as_ref().is_some_and(|one| {
            !self.unequal.has(one.region) || one.locked.is_none_or(|(_, blocks)| blocks == 1)
        });
        if is_one_by_one && self.in_sync & !tried != 0 {
            return self.step_read_chunk(tried);
        }
        let returning = self.returning;
        let Some(copying) = &mut self.copying else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        match copying.locked.take() {
            Some((lba, blocks)) if blocks > 1 => {
                copying.single_until = lba + u64::from(blocks);
                shared.wake_all();
                self.set_phase_and_repeat(MaintenancePhase::Locked)
            }
            _ if returning != 0 => {
                // Blocks that no leg can read cannot be copied, so the returning leg cannot be in sync.
                self.fail_legs(shared, returning);
                self.stop_copy(shared)
            }
            // All legs are equal in that they cannot read it.
            Some((lba, _)) => self.release_chunk_and_continue(shared, lba + 1),
            None => self.stop_copy(shared),
        }
    }

    pub(super) fn handle_chunk_written(
        &mut self,
        shared: &MirrorShared,
        now: Instant,
        failed: u8,
    ) -> MaintenanceStep {
        if self.in_sync & !failed != 0 {
            self.fail_legs(shared, failed);
        }
        let Some((lba, blocks)) = self.copying.as_ref().and_then(|one| one.locked) else {
            return self.stop_copy(shared);
        };
        let bytes = u64::from(blocks) * u64::from(self.geometry.block_size);
        self.times.copy_at = now.after(self.resync_pause(bytes));
        self.release_chunk_and_continue(shared, lba + u64::from(blocks))
    }

    fn release_chunk_and_continue(&mut self, shared: &MirrorShared, next: u64) -> MaintenanceStep {
        shared.wake_all();
        let Some(copying) = &mut self.copying else {
            return self.set_phase_and_repeat(MaintenancePhase::Rest);
        };
        (copying.locked, copying.next_chunk) = (None, next);
        if next < copying.end {
            return self.set_phase_and_repeat(MaintenancePhase::Paced);
        }
        let (region, is_done) = (copying.region, copying.whole && !copying.again);
        if is_done {
            self.todo.clear(region);
            self.unequal.clear(region);
            shared.unequal.clear(region, 1);
        }
        self.stop_copy(shared)
    }

    pub(super) fn stop_copy(&mut self, shared: &MirrorShared) -> MaintenanceStep {
        self.copying = None;
        shared.publish_leg_masks(self);
        shared.wake_all();
        self.set_phase_and_repeat(MaintenancePhase::Rest)
    }
}

/// Isolates the lowest leg of a mask.
pub(super) const fn lowest_leg_mask(legs: u8) -> u8 {
    legs & legs.wrapping_neg()
}
