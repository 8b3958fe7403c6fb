//! How the background copies a region, or repairs a few blocks: chunk by chunk, while nobody writes
//! the chunk. No I/O.

use base::Instant;

use super::meta::{Meta, Planted};
use super::shared::Shared;
use super::tend::{Next, Phase, Task};

/// A region under copy.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) region: u64,
    /// The next block, and the end.
    next: u64,
    end: u64,
    /// The chunk that nobody may write now.
    pub(super) locked: Option<(u64, u32)>,
    /// Block by block up to here, because no leg can read it in one piece.
    single_until: u64,
    /// The whole region, and not only what a leg could not read.
    whole: bool,
    /// Something has happened to the region since it was begun.
    pub(super) again: bool,
}

impl Copying {
    /// The next block.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// What is left of it, if it is a repair.
    pub(super) fn repair(&self) -> Option<(u64, u32)> {
        let left = u32::try_from(self.end - self.next).ok()?;
        (!self.whole).then_some((self.next, left))
    }
}

impl Meta {
    pub(super) fn begin_repair(&mut self, shared: &Shared, lba: u64, blocks: u32) -> Next {
        let region = self.shape.region_of(lba);
        let (first, count) = self.shape.blocks_of(region);
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
        shared: &Shared,
        region: u64,
        next: u64,
        end: u64,
        whole: bool,
    ) -> Next {
        let (locked, single_until, again) = (None, 0, false);
        self.copying = Some(Copying { region, next, end, locked, single_until, whole, again });
        shared.closed.set(region, 1);
        if self.writes_sound_legs() {
            self.mark(region);
        }
        self.go(Phase::Drained { epoch: shared.advance() })
    }

    /// Whether the copy is written to legs that are in sync: then the region is marked first.
    fn writes_sound_legs(&self) -> bool {
        self.copying.as_ref().is_some_and(|one| !one.whole || self.unequal.has(one.region))
    }

    pub(super) fn drained(&mut self, epoch: u64, now: Instant) -> Next {
        let Some(region) = self.copying.as_ref().map(|one| one.region) else {
            return self.go(Phase::Rest);
        };
        let is_marked = self.durable.has(region) || !self.writes_sound_legs();
        if !is_marked || !self.is_past(epoch) {
            return self.wait(now);
        }
        self.go(Phase::Locked)
    }

    pub(super) fn locked(&mut self, now: Instant) -> Next {
        let chunk_blocks = self.chunk_blocks;
        let Some(copying) = &mut self.copying else { return self.go(Phase::Rest) };
        let (lba, left) = (copying.next, copying.end - copying.next);
        let most = if lba < copying.single_until { 1 } else { u64::from(chunk_blocks) };
        let blocks = u32::try_from(left.min(most)).unwrap_or(1);
        // First nobody new may write it, then those who do must end.
        copying.locked = Some((lba, blocks));
        if self.is_being_written((lba, u64::from(blocks))) {
            return self.wait(now);
        }
        self.read_chunk(0)
    }

    /// Reads the chunk from a leg that has not failed to yet.
    fn read_chunk(&mut self, tried: u8) -> Next {
        let Some((lba, blocks)) = self.copying.as_ref().and_then(|one| one.locked) else {
            return self.go(Phase::Rest);
        };
        let leg = lowest(self.in_sync & !tried);
        self.phase = Phase::Read { leg, tried };
        Next::Do(Task::Read { leg, lba, blocks })
    }

    /// The chunk was read. Where legs in sync are written, the leg is flushed first: if it has lost
    /// completed writes, what was read may be older than what the others hold, and the flush says so.
    pub(super) fn read(&mut self, shared: &Shared, leg: u8, tried: u8) -> Next {
        if self.writes_sound_legs() && !self.has(Planted::CopiesBeforeFlushing) {
            self.phase = Phase::FlushedToCopy { leg, tried };
            return Next::Do(Task::Flush { legs: leg });
        }
        self.write_chunk(shared, leg, tried)
    }

    pub(super) fn flushed_to_copy(
        &mut self,
        shared: &Shared,
        leg: u8,
        tried: u8,
        failed: u8,
    ) -> Next {
        if failed == 0 {
            return self.write_chunk(shared, leg, tried);
        }
        if self.in_sync & !failed != 0 {
            self.drop_legs(shared, failed);
        }
        self.stop_copy(shared)
    }

    fn write_chunk(&mut self, shared: &Shared, leg: u8, tried: u8) -> Next {
        let Some(copying) = &self.copying else { return self.go(Phase::Rest) };
        let Some((lba, blocks)) = copying.locked else { return self.go(Phase::Rest) };
        let (region, tried) = (copying.region, tried & self.in_sync);
        let others = if self.writes_sound_legs() {
            self.in_sync
        } else if self.durable.has(region) {
            tried
        } else {
            // Legs in sync differ in no block of a region that is not marked: not while it is torn.
            if tried != 0 {
                self.repair(shared, lba, blocks);
            }
            0
        };
        let legs = (others | self.returning) & !leg;
        if legs == 0 {
            return self.stop_copy(shared);
        }
        self.phase = Phase::Written;
        Next::Do(Task::Write { legs, lba, blocks })
    }

    /// No leg of `tried` could read the chunk.
    pub(super) fn not_read(&mut self, shared: &Shared, tried: u8) -> Next {
        // Where legs differ, what the first could have read must not come from another one: it may
        // have been read before.
        let is_one_by_one = self.copying.as_ref().is_some_and(|one| {
            !self.unequal.has(one.region) || one.locked.is_none_or(|(_, blocks)| blocks == 1)
        });
        if is_one_by_one && self.in_sync & !tried != 0 {
            return self.read_chunk(tried);
        }
        let returning = self.returning;
        let Some(copying) = &mut self.copying else { return self.go(Phase::Rest) };
        match copying.locked.take() {
            Some((lba, blocks)) if blocks > 1 => {
                copying.single_until = lba + u64::from(blocks);
                shared.tell();
                self.go(Phase::Locked)
            }
            _ if returning != 0 => {
                // What nobody can read cannot be brought to the leg, so it cannot be in sync.
                self.drop_legs(shared, returning);
                self.stop_copy(shared)
            }
            // All legs are alike in that they cannot read it.
            Some((lba, _)) => self.advance_copy(shared, lba + 1),
            None => self.stop_copy(shared),
        }
    }

    pub(super) fn written(&mut self, shared: &Shared, now: Instant, failed: u8) -> Next {
        if self.in_sync & !failed != 0 {
            self.drop_legs(shared, failed);
        }
        let Some((lba, blocks)) = self.copying.as_ref().and_then(|one| one.locked) else {
            return self.stop_copy(shared);
        };
        let bytes = u64::from(blocks) * u64::from(self.shape.block_size);
        self.times.copy_at = now.after(self.pace(bytes));
        self.advance_copy(shared, lba + u64::from(blocks))
    }

    fn advance_copy(&mut self, shared: &Shared, next: u64) -> Next {
        shared.tell();
        let Some(copying) = &mut self.copying else { return self.go(Phase::Rest) };
        (copying.locked, copying.next) = (None, next);
        if next < copying.end {
            return self.go(Phase::Paced);
        }
        let (region, is_done) = (copying.region, copying.whole && !copying.again);
        if is_done {
            self.todo.clear(region);
            self.unequal.clear(region);
            shared.unequal.clear(region, 1);
        }
        self.stop_copy(shared)
    }

    pub(super) fn stop_copy(&mut self, shared: &Shared) -> Next {
        self.copying = None;
        shared.publish(self);
        shared.tell();
        self.go(Phase::Rest)
    }
}

/// The lowest leg of a mask, as a mask.
pub(super) const fn lowest(legs: u8) -> u8 {
    legs & legs.wrapping_neg()
}
