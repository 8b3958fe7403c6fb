//! Volumes of a store of which metadata are destroyed, copied to another store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Blame, Outcome, Span};
use volume::format::Record;
use volume::rescue::{Found, Lost, Moved, Rescue, Rescued, Walk, checksum_of, differences};
use volume::{Change, Damage, Parent, VolumeInfo, checksum};

use super::carrier::Carrier;
use super::left::Left;
use super::raw::Raw;
use super::receive::incomplete;
use super::{OpenStore, PAGE_BYTES, Place, Watch, refusal};
use crate::MediumError;
use crate::open::Opener;
use crate::uri::Uri;

/// What has been rescued.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Which store it was.
    pub uuid: u128,
    /// Its name; nothing if that was destroyed.
    pub name: String,
    /// Whether every block had to be looked at.
    pub was_scanned: bool,
    /// What is damaged of what leads to volumes.
    pub damaged: Vec<String>,
    /// The volumes that were found.
    pub volumes: Vec<SavedVolume>,
}

/// A volume that has been rescued.
#[derive(Clone, Debug)]
pub struct SavedVolume {
    /// What it was.
    pub info: VolumeInfo,
    /// Blocks of it that could not be found or read, or do not have their checksums: they read as
    /// zeroes, or as those of what it was made from.
    pub lost_blocks: u64,
    /// What is damaged of what describes it.
    pub damaged: Vec<String>,
    /// What it is read from where nothing was written: the volume in the target is, too. None if it had
    /// no parent, or the block that says what it is was destroyed; what was the parent's is lost then.
    pub parent: Option<Parent>,
    /// Whether it had been rescued already, and nothing was done.
    pub was_there: bool,
    /// Why nothing of it is in the target, if it could not be put there.
    pub failed: Option<String>,
}

/// What is rescued, and where to.
struct Rescuer<'a> {
    raw: Raw<'a>,
    /// Pages that were read ahead, and where they lie.
    ahead: (u64, Vec<u8>),
    target: &'a Arc<OpenStore>,
    watch: &'a mut Watch<'a>,
    /// Somebody has seen enough.
    is_interrupted: bool,
    /// Where blocks of volumes lie that others were made from; none of them has lost anything.
    maps: BTreeMap<u64, (Found, Vec<Record>)>,
}

/// Pages that are read at once.
const PAGES: u32 = 64;
/// How long the room of what was left behind may take to be given back.
const GIVING_BACK_MAX: Span = Span::from_secs(30);

/// Copies what can be found of all volumes at `place`, and on other devices that are named where the
/// first one is lost or does not say which there are, into another store. Nothing is written to the
/// one that they are in. What was rescued already is left as it is; what cannot be put into the target,
/// for want of room perhaps, is left out, and the others are copied.
///
/// # Errors
///
/// If the device cannot be had, is of a newer version, or there is nothing of a store on it; if the
/// target has other volumes of these names.
pub fn rescue(
    opener: &Opener<'_>,
    (place, others): (&Place, &[Uri]),
    target: &Arc<OpenStore>,
    watch: &mut Watch<'_>,
) -> Result<Saved, MediumError> {
    let device = place.store.clone().to_read();
    let Left { ground, rescue, missing } = Left::open(opener, place, others)?;
    let raw = Raw::wide(opener.regions, &opener.clock, &*ground.medium, &ground.shape, PAGES)
        .map_err(|problem| MediumError::new(Blame::Machine, format!("{device}: {problem}")))?;
    let ahead = (0, Vec::new());
    let mut watch = |progress: (u64, u64)| watch(progress);
    let (is_interrupted, maps) = (false, BTreeMap::new());
    let mut rescuer = Rescuer { raw, ahead, target, watch: &mut watch, is_interrupted, maps };
    let name = device.to_string();
    let rescued = rescuer.look(rescue, &name)?;
    if rescued.volumes.is_empty() && rescued.name.is_empty() {
        let text = format!("{name}: no volume of any store was found");
        return Err(MediumError::new(Blame::Caller, text));
    }
    rescuer.refuse_taken(&rescued)?;
    let parents: BTreeSet<u64> = rescued.volumes.iter().map(|found| found.info.origin).collect();
    let total: u64 = rescued.volumes.iter().map(|found| found.info.mapped).sum();
    let (mut done, mut volumes) = (0, Vec::new());
    for found in &rescued.volumes {
        let is_parent = parents.contains(&found.info.id);
        volumes.push(match rescuer.save(found, is_parent, (done, total)) {
            Err(why) if !rescuer.is_interrupted => rescuer.leave_out(&found.info, &why),
            saved => saved?,
        });
        done += found.info.mapped;
    }
    let damaged = rescued.damaged.iter().map(ToString::to_string);
    Ok(Saved {
        uuid: rescued.store,
        name: rescued.name,
        was_scanned: rescued.was_scanned,
        damaged: missing.into_iter().chain(damaged).collect(),
        volumes,
    })
}

impl Rescuer<'_> {
    /// Looks for volumes.
    fn look(&mut self, mut rescue: Rescue, name: &str) -> Result<Rescued, MediumError> {
        while let Some(at) = rescue.next_read().map_err(|error| refusal(name, &error))? {
            let read_ahead = rescue.scanned().is_some();
            let page = self.page(at, read_ahead);
            rescue.handle_read(page.as_ref().map_err(|outcome| *outcome));
            if let Some((done, total)) = rescue.scanned() {
                self.tell(done, total)?;
            }
        }
        Ok(rescue.finish())
    }

    /// A page, of many that are read at once if those behind it will be wanted.
    fn page(&mut self, at: u64, read_ahead: bool) -> Result<[u8; 4096], Outcome> {
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
                return known(&self.ahead).ok_or(Outcome::INTERNAL_ERROR);
            }
        }
        self.raw.read(at, &mut bytes).map(|()| bytes)
    }

    /// Other volumes have names that are needed.
    fn refuse_taken(&self, rescued: &Rescued) -> Result<(), MediumError> {
        let there = self.target.list()?;
        let is_other = |found: &&Found| {
            let mut same = there.iter().filter(|one| one.name == found.info.name);
            same.any(|one| one.uuid != found.info.uuid)
        };
        let Some(found) = rescued.volumes.iter().find(is_other) else { return Ok(()) };
        let (store, name) = (self.target.name(), &found.info.name);
        let text = format!("rescue `{name}`: store `{store}` has another volume of that name");
        let hint = "Rescue to a store of its own: `tenmil store create` makes one.";
        Err(MediumError::new(Blame::Caller, text).with_hint(hint))
    }

    /// Copies one volume.
    fn save(
        &mut self,
        found: &Found,
        is_parent: bool,
        (done, total): (u64, u64),
    ) -> Result<SavedVolume, MediumError> {
        let info = found.info.clone();
        let (records, lost) = self.walk(found.walk());
        let (sums, unsummed) = self.walk(found.walk_checksums());
        let ends = |lost: &std::ops::Range<u64>| lost.end.min(info.blocks);
        let missing = |keys: &std::ops::Range<u64>| ends(keys).saturating_sub(keys.start);
        let mut lost_blocks: u64 = lost.iter().map(|lost| missing(&lost.keys)).sum();
        let known = lost.iter().chain(&unsummed).map(|lost| lost.damage.to_string());
        let mut damaged: Vec<String> = known.collect();
        let parent = self.parent_of(found).unwrap_or_else(|damage| {
            lost_blocks += unmapped(&records, &lost, info.reach);
            damaged.push(damage.to_string());
            None
        });
        let was_there = self.target.find(&info.name).is_ok();
        if !was_there {
            let base = self.maps.get(&info.origin);
            let base = base.filter(|(base, map)| found.can_follow(base, map, &records));
            let part =
                self.begin(&info, parent.as_ref(), base.map(|(base, _)| &*base.info.name))?;
            let base = base.map_or(&[][..], |(_, map)| map);
            let moved = differences(base, &records, info.blocks);
            let mut carrier = Carrier::open(self.target, &self.target.find(&part)?, None)?;
            let mut copied = 0;
            for piece in moved {
                lost_blocks += self.copy(&mut carrier, piece, &sums)?;
                copied += piece.blocks;
                let at = (done + copied).min(total);
                self.tell(at, total)?;
            }
            drop(carrier);
            let (to, uuid) = (info.name.clone(), info.uuid);
            self.target.change(match info.is_read_only {
                true => Change::Seal { name: part, to, uuid },
                false => Change::Rename { name: part, to },
            })?;
        }
        if is_parent && lost_blocks == 0 && !was_there {
            self.maps.insert(info.id, (found.clone(), records));
        }
        Ok(SavedVolume { info, lost_blocks, damaged, parent, was_there, failed: None })
    }

    /// Takes back what was copied of a volume that cannot be put into the target, so that others have
    /// its room.
    fn leave_out(&self, info: &VolumeInfo, why: &MediumError) -> SavedVolume {
        // Where that cannot be done either, the room is missed by the next one.
        let _ = self.discard(&incomplete(&info.name, info.uuid), info);
        SavedVolume {
            info: info.clone(),
            lost_blocks: info.mapped,
            damaged: Vec::new(),
            parent: None,
            was_there: false,
            failed: Some(why.to_string()),
        }
    }

    /// Deletes what was begun of a volume, if anything was.
    fn discard(&self, part: &str, info: &VolumeInfo) -> Result<(), MediumError> {
        if self.target.find(part).is_ok_and(|left| left.uuid == info.uuid) {
            self.target.change(Change::Delete { name: part.to_owned(), orphan: false })?;
            self.target.settle(GIVING_BACK_MAX);
        }
        Ok(())
    }

    /// The parent of a volume, if it has one.
    fn parent_of(&mut self, found: &Found) -> Result<Option<Parent>, Damage> {
        let Some(at) = found.parent_at() else { return Ok(None) };
        let page = self.page(at, false);
        found.parent(page.as_ref().map_err(|outcome| *outcome)).map(Some)
    }

    /// Makes the volume to be written to: a clone of what it was made from, if that has just been
    /// rescued and has nothing that it has not; else an empty one, over the same parent if it has one.
    fn begin(
        &self,
        info: &VolumeInfo,
        parent: Option<&Parent>,
        base: Option<&str>,
    ) -> Result<String, MediumError> {
        let (part, target) = (incomplete(&info.name, info.uuid), self.target);
        self.discard(&part, info)?;
        let (name, blocks) = (part.clone(), info.blocks);
        let (unit, uuid, checksums) = (info.unit, info.uuid, info.has_checksums);
        match (base, parent.cloned()) {
            (Some(from), _) => target.change(Change::Clone { from: from.into(), name, uuid })?,
            (None, Some(parent)) => {
                // It reaches as far as it did, and no further when it is longer.
                let blocks = info.reach;
                target.change(Change::CreateOver { name, blocks, unit, uuid, checksums, parent })?
            }
            (None, None) => {
                target.change(Change::Create { name, blocks, unit, uuid, checksums })?
            }
        };
        target.change(Change::Resize { name: part.clone(), blocks })?;
        Ok(part)
    }

    /// Reads a tree, as much of it as can be read.
    fn walk(&mut self, mut walk: Walk) -> (Vec<Record>, Vec<Lost>) {
        while let Some(at) = walk.next_read() {
            let page = self.page(at, false);
            walk.handle_read(page.as_ref().map_err(|outcome| *outcome));
        }
        walk.finish()
    }

    /// Copies blocks. Returns how many could not be read, or are not what was written.
    fn copy(
        &mut self,
        carrier: &mut Carrier,
        moved: Moved,
        sums: &[Record],
    ) -> Result<u64, MediumError> {
        let Moved { block, blocks, at: Some(at) } = moved else {
            return carrier.trim(moved.block, moved.blocks).map(|()| 0);
        };
        let (mut done, mut lost) = (0, 0);
        let mut bytes = Vec::new();
        while done < blocks {
            let count = (blocks - done).min(self.raw.pages_max().into());
            bytes.resize(usize::try_from(count).unwrap_or(0) * PAGE_BYTES as usize, 0);
            let is_read = self.raw.read_run(at + done, &mut bytes).is_ok();
            let mut pages = (block + done..).zip(bytes.as_chunks::<4096>().0);
            if is_read && pages.all(|(block, page)| is_right(sums, block, page)) {
                carrier.write(block + done, &bytes)?;
            } else {
                lost += self.copy_each(carrier, (block + done, at + done, count), sums)?;
            }
            done += count;
        }
        Ok(lost)
    }

    /// The same where not all is right.
    fn copy_each(
        &mut self,
        carrier: &mut Carrier,
        (block, at, count): (u64, u64, u64),
        sums: &[Record],
    ) -> Result<u64, MediumError> {
        let mut lost = 0;
        for index in 0..count {
            match self.page(at + index, false) {
                Ok(page) if is_right(sums, block + index, &page) => {
                    carrier.write(block + index, &page)?;
                }
                _ => lost += 1,
            }
        }
        Ok(lost)
    }

    /// Says how many pages of how many are done.
    fn tell(&mut self, done: u64, total: u64) -> Result<(), MediumError> {
        let page = u64::from(PAGE_BYTES);
        match (self.watch)((done * page, total * page)) {
            true => Ok(()),
            false => {
                self.is_interrupted = true;
                Err(self.target.interrupted())
            }
        }
    }
}

/// How many blocks before one are neither in what was found of a map nor in what is lost of it.
fn unmapped(records: &[Record], lost: &[Lost], reach: u64) -> u64 {
    let found = records.iter().map(|run| run.key..run.key + run.extra);
    let known = found.chain(lost.iter().map(|lost| lost.keys.clone()));
    let known = known.map(|keys| keys.end.min(reach).saturating_sub(keys.start)).sum();
    reach.saturating_sub(known)
}

/// Whether a block is what was written to it, as far as its checksum is known.
fn is_right(sums: &[Record], block: u64, page: &[u8; 4096]) -> bool {
    checksum_of(sums, block).is_none_or(|expected| checksum(page) == expected)
}
