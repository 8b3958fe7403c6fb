//! Scrub: reads all data of a pool to verify that it is readable and matches its checksums.

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{IoStatus, Span};
use tenmil_volume::{PoolRequest, PoolResponse, VolumeInfo};

use super::blocking_volume_io::BlockingVolumeIo;
use super::page_io::GrowablePoolPageIo;
use super::send_stream::ProgressFn;
use super::throttle::RateThrottle;
use super::{OpenPool, PAGE_BYTES};
use tenmil_base::Error;

/// Result of a scrub of one volume.
#[derive(Clone, Debug)]
pub struct VolumeScrubReport {
    /// The volume.
    pub info: VolumeInfo,
    /// Blocks read: all of its own. Blocks of its origin are read there, and those of its parent are
    /// external.
    pub blocks: u64,
    /// Number of damaged blocks, or blocks with damaged metadata.
    pub bad_blocks: u64,
    /// The first thousand runs of them.
    pub bad: Vec<DamagedRun>,
}

/// A run of damaged blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedRun {
    /// The first block.
    pub block: u64,
    /// Number of blocks that are consecutive in the volume and in the pool.
    pub blocks: u64,
    /// Pool block of the first one.
    pub at: u64,
    /// Cause.
    pub cause: DamageCause,
    /// Other volumes and snapshots that share them.
    pub shared_with: Vec<String>,
}

/// Cause of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamageCause {
    /// The device cannot read it.
    Unread,
    /// Its checksum is wrong.
    Checksum,
    /// Its metadata is damaged; a check of the pool reports it.
    Metadata,
}

/// Maximum number of damaged runs kept per volume.
const BAD_MAX: usize = 1000;
/// Blocks per read while there is foreground I/O: 256 KiB.
pub(super) const BACKGROUND_BLOCKS: u32 = 64;
/// Maximum wait for foreground I/O per read.
pub(super) const BACKGROUND_WAIT_MAX: Span = Span::from_ms(20);
/// The same for a stream, whose consumer waits: leaves at least 64 MB/s.
pub(super) const STREAM_WAIT_MAX: Span = Span::from_ms(4);
const POLITE_REST: Span = Span::from_us(500);

/// A scrub in progress.
struct ScrubJob<'a, 'b> {
    open: &'a Arc<OpenPool>,
    infos: Vec<VolumeInfo>,
    watch: &'a mut ProgressFn<'b>,
    pace: RateThrottle,
    done: u64,
    total: u64,
}

/// Result of one pass over a volume.
enum ScanResult {
    /// Completed.
    Whole,
    /// Its map is unreadable from this block on.
    Lost(u64),
}

impl OpenPool {
    /// Reads all data of all volumes and snapshots, each block once, while the pool is in use: at most
    /// `rate` bytes per second, and only when there is no foreground I/O, or after a wait of 20 ms.
    /// Checksums are verified where they exist. Volumes that are deleted meanwhile are omitted.
    ///
    /// # Errors
    ///
    /// If the volumes cannot be listed, memory is exhausted, or `watch` returns false.
    pub fn scrub(
        self: &Arc<Self>,
        rate: Option<u64>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<Vec<VolumeScrubReport>, Error> {
        let infos = self.list_volumes()?;
        let pace = RateThrottle { rate, clock: self.clock };
        let mut scrub = ScrubJob { open: self, infos, watch, pace, done: 0, total: 0 };
        let infos = scrub.infos.clone();
        for info in &infos {
            scrub.total += scrub.block_count(info);
        }
        infos.iter().filter_map(|info| scrub.scrub_volume(info).transpose()).collect()
    }

    /// Waits while there is foreground I/O, at most `wait_max`. Returns how many blocks may be
    /// transferred at once now.
    pub(super) fn wait_for_foreground_idle(&self, wait_max: Span) -> u32 {
        let until = self.clock.now().after(wait_max);
        while self.shared.lock().has_foreground_io() {
            if self.clock.now() > until {
                return BACKGROUND_BLOCKS;
            }
            tenmil_linux::named_thread::sleep(POLITE_REST);
        }
        u32::MAX
    }
}

impl ScrubJob<'_, '_> {
    /// Number of own blocks of a volume, as far as the maps are readable.
    fn block_count(&self, info: &VolumeInfo) -> u64 {
        let mut blocks = 0;
        // Damage is reported when it is read.
        let _ = self.open.for_each_difference(self.origin_of(info), info, &mut |piece| {
            blocks += if piece.is_mapped { piece.blocks } else { 0 };
            Ok(())
        });
        blocks
    }

    /// The origin of a volume, if it exists.
    fn origin_of(&self, info: &VolumeInfo) -> Option<&VolumeInfo> {
        self.infos.iter().find(|one| one.id == info.origin)
    }

    /// Reads a volume. `None` if it has been deleted meanwhile.
    fn scrub_volume(&mut self, info: &VolumeInfo) -> Result<Option<VolumeScrubReport>, Error> {
        let mut seen =
            VolumeScrubReport { info: info.clone(), blocks: 0, bad_blocks: 0, bad: Vec::new() };
        let mut from = 0;
        loop {
            let base = self.origin_of(info).cloned();
            let ScanResult::Lost(block) =
                self.scrub_own_blocks_from(base.as_ref(), from, &mut seen)?
            else {
                return Ok(Some(seen));
            };
            self.infos = self.open.list_volumes()?;
            let Some(now) = self.infos.iter().find(|one| one.id == info.id).cloned() else {
                return Ok(None);
            };
            let is_changed = now.origin != seen.info.origin
                || self.origin_of(&now).map(|base| base.id) != base.map(|base| base.id);
            seen.info = now;
            if !is_changed {
                let blocks = info.blocks - block.min(info.blocks);
                let (at, cause) = (0, DamageCause::Metadata);
                seen.add_damage(DamagedRun { block, blocks, at, cause, shared_with: Vec::new() });
                return Ok(Some(seen));
            }
            // Its origin, which was compared with, has been deleted: continue with the new one.
            from = block;
        }
    }

    /// Reads the blocks that a volume has and its base has not, from a block on.
    fn scrub_own_blocks_from(
        &mut self,
        base: Option<&VolumeInfo>,
        from: u64,
        seen: &mut VolumeScrubReport,
    ) -> Result<ScanResult, Error> {
        // Opened read-only, because it may be open for writing elsewhere.
        let read_only = VolumeInfo { is_read_only: true, ..seen.info.clone() };
        let mut carrier = BlockingVolumeIo::open(self.open, &read_only, None)?;
        let (open, mut end, mut halt) = (Arc::clone(self.open), from, None);
        let whole = open.for_each_difference(base, &read_only, &mut |piece| {
            // Growth since the start is not scrubbed.
            let last = (piece.block + piece.blocks).min(read_only.blocks);
            let first = piece.block.max(from).min(last);
            if piece.is_mapped
                && let Err(error) = self.read_and_verify(&mut carrier, first..last, seen)
            {
                halt = Some(error.clone());
                return Err(error);
            }
            end = last.max(end);
            Ok(())
        });
        match (halt, whole) {
            (Some(error), _) => Err(error),
            (None, Err(_)) => Ok(ScanResult::Lost(end)),
            (None, Ok(())) => Ok(ScanResult::Whole),
        }
    }

    /// Reads some blocks of a volume.
    fn read_and_verify(
        &mut self,
        carrier: &mut BlockingVolumeIo,
        blocks: Range<u64>,
        seen: &mut VolumeScrubReport,
    ) -> Result<(), Error> {
        let (mut at, page) = (blocks.start, u64::from(PAGE_BYTES));
        while at < blocks.end {
            let left = u32::try_from(blocks.end - at).unwrap_or(u32::MAX);
            let polite = self.open.wait_for_foreground_idle(BACKGROUND_WAIT_MAX);
            let count = left.min(polite).min(carrier.blocks_max());
            let began = self.open.clock.now();
            if carrier.verify(at, count).is_err() {
                self.record_damaged_blocks(carrier, (at, count), seen)?;
            }
            at += u64::from(count);
            self.done += u64::from(count);
            seen.blocks += u64::from(count);
            // Volumes may grow while they are read.
            let progress = (self.done * page, self.total.max(self.done) * page);
            let continues = &mut || (self.watch)(progress);
            if !(continues() && self.pace.sleep_to_rate(u64::from(count) * page, began, continues))
            {
                return Err(self.open.interrupted_error());
            }
        }
        Ok(())
    }

    /// Finds the damaged blocks in a range.
    fn record_damaged_blocks(
        &self,
        carrier: &mut BlockingVolumeIo,
        (first, count): (u64, u32),
        seen: &mut VolumeScrubReport,
    ) -> Result<(), Error> {
        let info = &seen.info.clone();
        for block in first..first + u64::from(count) {
            if carrier.verify(block, 1).is_ok() {
                continue;
            }
            let place = self.pool_block(info, block);
            // It may have been trimmed, or the volume deleted or shrunk, meanwhile.
            if place == Ok(None) || (place.is_err() && !self.is_block_in_volume(info, block)?) {
                continue;
            }
            let (at, cause) = match place {
                Ok(Some(at)) => (at, self.damage_cause(at)),
                _ => (0, DamageCause::Metadata),
            };
            let others = self.infos.iter().filter(|other| other.id != info.id);
            let has_it =
                |other: &&VolumeInfo| at > 0 && self.pool_block(other, block) == Ok(Some(at));
            let shared_with: Vec<String> =
                others.filter(has_it).map(|other| other.name.clone()).collect();
            seen.add_damage(DamagedRun { block, blocks: 1, at, cause, shared_with });
        }
        Ok(())
    }

    /// Whether a volume exists and has a block.
    fn is_block_in_volume(&self, info: &VolumeInfo, block: u64) -> Result<bool, Error> {
        let volumes = self.open.list_volumes()?;
        Ok(volumes.iter().any(|one| one.id == info.id && block < one.blocks))
    }

    /// The pool block of a volume block; `Err` if it is unknown.
    fn pool_block(&self, info: &VolumeInfo, block: u64) -> Result<Option<u64>, ()> {
        match self.open.request_and_wait(PoolRequest::Extent { volume: info.id, block }) {
            Ok(PoolResponse::Extent { at, .. }) => Ok(at),
            _ => Err(()),
        }
    }

    /// Cause of damage of a pool block that failed verification.
    fn damage_cause(&self, at: u64) -> DamageCause {
        let pages = GrowablePoolPageIo::open(self.open, 1).map_err(|_| IoStatus::INTERNAL_ERROR);
        match pages.and_then(|mut pages| pages.page_io_up_to(at)?.read(at, &mut [0; 4096])) {
            Ok(()) => DamageCause::Checksum,
            Err(_) => DamageCause::Unread,
        }
    }
}

impl VolumeScrubReport {
    /// Records damaged blocks; extends the last run if they continue it.
    fn add_damage(&mut self, bad: DamagedRun) {
        self.bad_blocks += bad.blocks;
        let has_space = self.bad.len() < BAD_MAX;
        let last = self.bad.last_mut().filter(|last| {
            last.block + last.blocks == bad.block
                && (bad.at == 0 || last.at + last.blocks == bad.at)
                && last.cause == bad.cause
                && last.shared_with == bad.shared_with
        });
        match last {
            Some(last) => last.blocks += bad.blocks,
            None if has_space => self.bad.push(bad),
            None => {}
        }
    }
}
