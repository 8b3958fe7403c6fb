//! Rescue: copies volumes of a pool with destroyed metadata to another pool.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::{ErrorCategory, IoStatus, Span};
use tenmil_volume::format::Record;
use tenmil_volume::rescue::{
    FileExtent, FoundVolume, LostRange, PoolRescue, RescueResult, TreeWalk, block_checksum_in,
    changed_extents,
};
use tenmil_volume::{Corruption, ParentInfo, VolumeInfo, VolumeOp, block_checksum};

use super::blocking_volume_io::BlockingVolumeIo;
use super::page_io::BlockingPageIo;
use super::receive_stream::incomplete_name;
use super::surviving_devices::SurvivingDevices;
use super::{OpenPool, PAGE_BYTES, ProgressFn, VolumeRef, pool_error};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;

/// Result of a rescue.
#[derive(Clone, Debug)]
pub struct RescueReport {
    /// UUID of the damaged pool.
    pub uuid: u128,
    /// Its name; empty if that was destroyed.
    pub name: String,
    /// Whether every block had to be scanned.
    pub was_scanned: bool,
    /// Damaged metadata on the way to volumes.
    pub damaged: Vec<String>,
    /// The volumes that were found.
    pub volumes: Vec<RescuedVolumeReport>,
}

/// Result for one volume.
#[derive(Clone, Debug)]
pub struct RescuedVolumeReport {
    /// The volume.
    pub info: VolumeInfo,
    /// Blocks that could not be found or read, or have a wrong checksum: they read as zeroes, or as those
    /// of the volume's origin.
    pub lost_blocks: u64,
    /// Damaged metadata of the volume.
    pub damaged: Vec<String>,
    /// The parent image, which the rescued volume uses as well. `None` if there was no parent, or its
    /// record was destroyed; then the parent's blocks are lost.
    pub parent: Option<ParentInfo>,
    /// It had been rescued already, and nothing was done.
    pub was_there: bool,
    /// Why it could not be stored in the target, if so.
    pub failed: Option<String>,
}

/// A rescue in progress.
struct RescueJob<'a> {
    raw: BlockingPageIo<'a>,
    /// Pages that were read ahead, and their location.
    ahead: (u64, Vec<u8>),
    target: &'a Arc<OpenPool>,
    watch: &'a mut ProgressFn<'a>,
    /// The progress callback has returned false.
    is_interrupted: bool,
    /// Block maps of volumes that are origins of others, and have lost nothing.
    maps: BTreeMap<u64, (FoundVolume, Vec<Record>)>,
}

/// Pages per read.
const PAGES: u32 = 64;
/// Maximum wait for the space of leftovers to be freed.
const GIVING_BACK_MAX: Span = Span::from_secs(30);

/// Copies everything that can be found of all volumes into another pool, from the pool at `place` and
/// from other given devices, if the first device is lost or does not list them. Nothing is written to the
/// damaged pool. Volumes that have been rescued already are left alone; a volume that cannot be stored in
/// the target, for lack of space, is omitted, and the others are copied.
///
/// # Errors
///
/// If the device cannot be opened, has a newer version, or nothing of a pool is on it; or if the target
/// has other volumes of these names.
pub fn rescue_pool(
    opener: &Opener<'_>,
    (place, others): (&VolumeRef, &[Uri]),
    target: &Arc<OpenPool>,
    watch: &mut ProgressFn<'_>,
) -> Result<RescueReport, Error> {
    let device = place.store.clone().read_only();
    let SurvivingDevices { pool_devices, rescue, missing } =
        SurvivingDevices::open(opener, place, others)?;
    let raw = BlockingPageIo::open_with_pages_max(
        opener.regions,
        &opener.clock,
        &*pool_devices.medium,
        &pool_devices.geometry,
        PAGES,
    )
    .map_err(|problem| Error::new(ErrorCategory::Environment, format!("{device:#}: {problem}")))?;
    let ahead = (0, Vec::new());
    let mut watch = |progress: (u64, u64)| watch(progress);
    let (is_interrupted, maps) = (false, BTreeMap::new());
    let mut rescuer = RescueJob { raw, ahead, target, watch: &mut watch, is_interrupted, maps };
    let name = format!("{device:#}");
    let rescued = rescuer.search_volumes(rescue, &name)?;
    if rescued.volumes.is_empty() && rescued.name.is_empty() {
        let text = format!("{name}: no volume of any pool was found");
        return Err(Error::new(ErrorCategory::Usage, text));
    }
    rescuer.check_target_names(&rescued)?;
    let parents: BTreeSet<u64> = rescued.volumes.iter().map(|found| found.info.origin).collect();
    let total: u64 = rescued.volumes.iter().map(|found| found.info.mapped).sum();
    let (mut done, mut volumes) = (0, Vec::new());
    for found in &rescued.volumes {
        let is_parent = parents.contains(&found.info.id);
        volumes.push(match rescuer.rescue_volume(found, is_parent, (done, total)) {
            Err(why) if !rescuer.is_interrupted => {
                rescuer.delete_copy_and_report(&found.info, &why)
            }
            saved => saved?,
        });
        done += found.info.mapped;
    }
    let damaged = rescued.damaged.iter().map(ToString::to_string);
    Ok(RescueReport {
        uuid: rescued.store,
        name: rescued.name,
        was_scanned: rescued.was_scanned,
        damaged: missing.into_iter().chain(damaged).collect(),
        volumes,
    })
}

impl RescueJob<'_> {
    /// Searches for volumes.
    fn search_volumes(
        &mut self,
        mut rescue: PoolRescue,
        name: &str,
    ) -> Result<RescueResult, Error> {
        while let Some(at) = rescue.next_read().map_err(|error| pool_error(name, &error))? {
            let read_ahead = rescue.scan_progress().is_some();
            let page = self.read_page(at, read_ahead);
            rescue.handle_read(page.as_ref().map_err(|status| *status));
            if let Some((done, total)) = rescue.scan_progress() {
                self.report_progress(done, total)?;
            }
        }
        Ok(rescue.into_result())
    }

    /// Reads a page; with `read_ahead`, together with the following ones.
    fn read_page(&mut self, at: u64, read_ahead: bool) -> Result<[u8; 4096], IoStatus> {
        let page = PAGE_BYTES as usize;
        let mut bytes = [0; 4096];
        let known = |(first, run): &(u64, Vec<u8>)| {
            let from = usize::try_from(at.checked_sub(*first)?).ok()?.checked_mul(page)?;
            run.get(from..)?.first_chunk::<4096>().copied()
        };
        if let Some(known) = known(&self.ahead) {
            return Ok(known);
        }
        if read_ahead {
            let mut run = std::mem::take(&mut self.ahead.1);
            run.resize(self.raw.pages_max() as usize * page, 0);
            if self.raw.read_run(at, &mut run).is_ok() {
                self.ahead = (at, run);
                return known(&self.ahead).ok_or(IoStatus::INTERNAL_ERROR);
            }
        }
        self.raw.read(at, &mut bytes).map(|()| bytes)
    }

    /// Rejects a target in which other volumes use the names.
    fn check_target_names(&self, rescued: &RescueResult) -> Result<(), Error> {
        let there = self.target.list_volumes()?;
        let is_other = |found: &&FoundVolume| {
            let mut same = there.iter().filter(|one| one.name == found.info.name);
            same.any(|one| one.uuid != found.info.uuid)
        };
        let Some(found) = rescued.volumes.iter().find(is_other) else { return Ok(()) };
        let (store, name) = (self.target.name(), &found.info.name);
        let text = format!("rescue `{name}`: pool `{store}` has another volume of that name");
        let hint = "Rescue to a pool of its own: `tenmil pool create` makes one.";
        Err(Error::new(ErrorCategory::Usage, text).with_hint(hint))
    }

    /// Copies one volume.
    fn rescue_volume(
        &mut self,
        found: &FoundVolume,
        is_parent: bool,
        (done, total): (u64, u64),
    ) -> Result<RescuedVolumeReport, Error> {
        let info = found.info.clone();
        let (records, lost) = self.walk_map(found.map_walk());
        let (sums, unsummed) = self.walk_map(found.checksum_walk());
        let ends = |lost: &std::ops::Range<u64>| lost.end.min(info.blocks);
        let missing = |keys: &std::ops::Range<u64>| ends(keys).saturating_sub(keys.start);
        let mut lost_blocks: u64 = lost.iter().map(|lost| missing(&lost.keys)).sum();
        let known = lost.iter().chain(&unsummed).map(|lost| lost.damage.to_string());
        let mut damaged: Vec<String> = known.collect();
        let parent = self.read_parent_info(found).unwrap_or_else(|damage| {
            lost_blocks += unknown_block_count(&records, &lost, info.reach);
            damaged.push(damage.to_string());
            None
        });
        let was_there = self.target.find_volume(&info.name).is_ok();
        if !was_there {
            // A volume whose origin was rescued without loss becomes a clone of it again, if it can.
            let base = self.maps.get(&info.origin);
            let base = base.filter(|(base, map)| found.can_be_clone_of(base, map, &records));
            let part = self.create_target_volume(
                &info,
                parent.as_ref(),
                base.map(|(base, _)| &*base.info.name),
            )?;
            let base = base.map_or(&[][..], |(_, map)| map);
            let moved = changed_extents(base, &records, info.blocks);
            let mut carrier =
                BlockingVolumeIo::open(self.target, &self.target.find_volume(&part)?, None)?;
            let mut copied = 0;
            for piece in moved {
                lost_blocks += self.copy_blocks(&mut carrier, piece, &sums)?;
                copied += piece.blocks;
                let at = (done + copied).min(total);
                self.report_progress(at, total)?;
            }
            drop(carrier);
            let (to, uuid) = (info.name.clone(), info.uuid);
            self.target.execute_volume_op(match info.is_read_only {
                true => VolumeOp::ConvertToSnapshot { name: part, to, uuid },
                false => VolumeOp::Rename { name: part, to },
            })?;
        }
        if is_parent && lost_blocks == 0 && !was_there {
            self.maps.insert(info.id, (found.clone(), records));
        }
        Ok(RescuedVolumeReport { info, lost_blocks, damaged, parent, was_there, failed: None })
    }

    /// Deletes the copied part of a volume that cannot be stored in the target, so that others can use
    /// its space.
    fn delete_copy_and_report(&self, info: &VolumeInfo, why: &Error) -> RescuedVolumeReport {
        // If that fails as well, the next volume has less space.
        let _ = self.delete_incomplete_copy(&incomplete_name(&info.name, info.uuid), info);
        RescuedVolumeReport {
            info: info.clone(),
            lost_blocks: info.mapped,
            damaged: Vec::new(),
            parent: None,
            was_there: false,
            failed: Some(why.to_string()),
        }
    }

    /// Deletes the leftovers of an incomplete copy, if any.
    fn delete_incomplete_copy(&self, part: &str, info: &VolumeInfo) -> Result<(), Error> {
        if self.target.find_volume(part).is_ok_and(|left| left.uuid == info.uuid) {
            self.target
                .execute_volume_op(VolumeOp::Delete { name: part.to_owned(), orphan: false })?;
            self.target.wait_for_reclaim(GIVING_BACK_MAX);
        }
        Ok(())
    }

    /// The parent of a volume, if it has one.
    fn read_parent_info(&mut self, found: &FoundVolume) -> Result<Option<ParentInfo>, Corruption> {
        let Some(at) = found.parent_address() else { return Ok(None) };
        let page = self.read_page(at, false);
        found.decode_parent(page.as_ref().map_err(|status| *status)).map(Some)
    }

    /// Creates the volume to write to: a clone of its origin, if that was just rescued and has no block
    /// that the volume lacks; otherwise an empty one, over the same parent if it has one.
    fn create_target_volume(
        &self,
        info: &VolumeInfo,
        parent: Option<&ParentInfo>,
        base: Option<&str>,
    ) -> Result<String, Error> {
        let (part, target) = (incomplete_name(&info.name, info.uuid), self.target);
        self.delete_incomplete_copy(&part, info)?;
        let (name, blocks) = (part.clone(), info.blocks);
        let (unit, uuid, checksums) = (info.unit, info.uuid, info.has_checksums);
        match (base, parent.cloned()) {
            (Some(from), _) => {
                target.execute_volume_op(VolumeOp::Clone { from: from.into(), name, uuid })?
            }
            (None, Some(parent)) => {
                // It covers the parent as before; the rest of a longer volume is added by the resize.
                let blocks = info.reach;
                target.execute_volume_op(VolumeOp::CreateOver {
                    name,
                    blocks,
                    unit,
                    uuid,
                    checksums,
                    parent,
                })?
            }
            (None, None) => target.execute_volume_op(VolumeOp::Create {
                name,
                blocks,
                unit,
                uuid,
                checksums,
            })?,
        };
        target.execute_volume_op(VolumeOp::Resize { name: part.clone(), blocks })?;
        Ok(part)
    }

    /// Reads a tree as far as it is readable.
    fn walk_map(&mut self, mut walk: TreeWalk) -> (Vec<Record>, Vec<LostRange>) {
        while let Some(at) = walk.next_read() {
            let page = self.read_page(at, false);
            walk.handle_read(page.as_ref().map_err(|status| *status));
        }
        walk.into_records_and_lost_ranges()
    }

    /// Copies blocks. Returns how many could not be read, or have a wrong checksum.
    fn copy_blocks(
        &mut self,
        carrier: &mut BlockingVolumeIo,
        moved: FileExtent,
        sums: &[Record],
    ) -> Result<u64, Error> {
        let FileExtent { block, blocks, at: Some(at) } = moved else {
            return carrier.deallocate(moved.block, moved.blocks).map(|()| 0);
        };
        let (mut done, mut lost) = (0, 0);
        let mut bytes = Vec::new();
        while done < blocks {
            let count = (blocks - done).min(self.raw.pages_max().into());
            bytes.resize(usize::try_from(count).unwrap_or(0) * PAGE_BYTES as usize, 0);
            let is_read = self.raw.read_run(at + done, &mut bytes).is_ok();
            let mut pages = (block + done..).zip(bytes.as_chunks::<4096>().0);
            if is_read && pages.all(|(block, page)| matches_checksum(sums, block, page)) {
                carrier.write(block + done, &bytes)?;
            } else {
                lost +=
                    self.copy_block_by_block(carrier, (block + done, at + done, count), sums)?;
            }
            done += count;
        }
        Ok(lost)
    }

    /// Copies block by block, where some are damaged.
    fn copy_block_by_block(
        &mut self,
        carrier: &mut BlockingVolumeIo,
        (block, at, count): (u64, u64, u64),
        sums: &[Record],
    ) -> Result<u64, Error> {
        let mut lost = 0;
        for index in 0..count {
            match self.read_page(at + index, false) {
                Ok(page) if matches_checksum(sums, block + index, &page) => {
                    carrier.write(block + index, &page)?;
                }
                _ => lost += 1,
            }
        }
        Ok(lost)
    }

    /// Reports progress in pages.
    fn report_progress(&mut self, done: u64, total: u64) -> Result<(), Error> {
        let page = u64::from(PAGE_BYTES);
        match (self.watch)((done * page, total * page)) {
            true => Ok(()),
            false => {
                self.is_interrupted = true;
                Err(self.target.interrupted_error())
            }
        }
    }
}

/// The number of blocks below `reach` that are neither in the found records of a map nor in its lost
/// ranges.
fn unknown_block_count(records: &[Record], lost: &[LostRange], reach: u64) -> u64 {
    let found = records.iter().map(|run| run.key..run.key + run.extra);
    let known = found.chain(lost.iter().map(|lost| lost.keys.clone()));
    let known = known.map(|keys| keys.end.min(reach).saturating_sub(keys.start)).sum();
    reach.saturating_sub(known)
}

/// Whether a block matches its checksum, if that is known.
fn matches_checksum(sums: &[Record], block: u64, page: &[u8; 4096]) -> bool {
    block_checksum_in(sums, block).is_none_or(|expected| block_checksum(page) == expected)
}
