//! All data of a store, read to see whether they can be, and are what was written.

use std::ops::Range;
use std::sync::Arc;

use base::{Outcome, Span};
use volume::{Answer, Ask, VolumeInfo};

use super::carrier::Carrier;
use super::pace::Pace;
use super::raw::StorePages;
use super::send::Watch;
use super::{OpenStore, PAGE_BYTES};
use crate::MediumError;

/// What a scrub has seen of a volume.
#[derive(Clone, Debug)]
pub struct Scrubbed {
    /// The volume.
    pub info: VolumeInfo,
    /// Blocks that were read: all that it has but those of what it was made from, which are read
    /// there, and those of its parent, which are another's.
    pub blocks: u64,
    /// How many of them are damaged, or described by what is.
    pub bad_blocks: u64,
    /// Which those are: the first thousand runs of them.
    pub bad: Vec<Bad>,
}

/// Blocks that are damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bad {
    /// The first one.
    pub block: u64,
    /// How many follow one another, in the volume and in the store.
    pub blocks: u64,
    /// The block of the store in which the first one lies.
    pub at: u64,
    /// What is wrong.
    pub cause: Cause,
    /// Other volumes and snapshots that have them.
    pub shared_with: Vec<String>,
}

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The device does not give it.
    Unread,
    /// It does not have its checksum.
    Checksum,
    /// What describes it is damaged: a check of the store names it.
    Metadata,
}

/// Runs of damaged blocks that are kept of a volume.
const BAD_MAX: usize = 1000;
/// Blocks that are read at once while others have I/O under way: 256 KiB.
pub(super) const POLITE_BLOCKS: u32 = 64;
/// How long others may keep a piece waiting.
pub(super) const POLITE_MAX: Span = Span::from_ms(20);
/// How long they may keep a piece of a stream waiting, for which somebody else waits: 64 MB/s are left.
pub(super) const STREAM_WAIT_MAX: Span = Span::from_ms(4);
const POLITE_REST: Span = Span::from_us(500);

/// One scrub.
struct Scrub<'a, 'b> {
    open: &'a Arc<OpenStore>,
    infos: Vec<VolumeInfo>,
    watch: &'a mut Watch<'b>,
    pace: Pace,
    done: u64,
    total: u64,
}

/// What came of a way through a volume.
enum Way {
    /// It was gone to the end.
    Whole,
    /// What describes it cannot be read from a block on.
    Lost(u64),
}

impl OpenStore {
    /// Reads all data of all volumes and snapshots, each block once, while others go on: at most so
    /// many bytes in a second, and a piece only when nobody else has I/O under way, or has had it for
    /// 20 ms. Where there are checksums, they are compared. What is deleted meanwhile is left out.
    ///
    /// # Errors
    ///
    /// If the volumes cannot be listed, memory is short, or `watch` says no.
    pub fn scrub(
        self: &Arc<Self>,
        rate: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Scrubbed>, MediumError> {
        let infos = self.list()?;
        let pace = Pace { rate, clock: self.clock };
        let mut scrub = Scrub { open: self, infos, watch, pace, done: 0, total: 0 };
        let infos = scrub.infos.clone();
        for info in &infos {
            scrub.total += scrub.blocks_of(info);
        }
        infos.iter().filter_map(|info| scrub.volume(info).transpose()).collect()
    }

    /// Waits while others have I/O under way, but not for ever. Returns how many blocks may be moved at
    /// once now.
    pub(super) fn let_others_go_first(&self, wait_max: Span) -> u32 {
        let until = self.clock.now().after(wait_max);
        while self.shared.lock().is_busy() {
            if self.clock.now() > until {
                return POLITE_BLOCKS;
            }
            host::thread::rest(POLITE_REST);
        }
        u32::MAX
    }
}

impl Scrub<'_, '_> {
    /// How many blocks a volume has that what it was made from has not, as far as that can be told.
    fn blocks_of(&self, info: &VolumeInfo) -> u64 {
        let mut blocks = 0;
        // What is damaged is named when it is come upon.
        let _ = self.open.differences(self.base_of(info), info, &mut |piece| {
            blocks += if piece.is_mapped { piece.blocks } else { 0 };
            Ok(())
        });
        blocks
    }

    /// What a volume was made from, if that is there.
    fn base_of(&self, info: &VolumeInfo) -> Option<&VolumeInfo> {
        self.infos.iter().find(|one| one.id == info.origin)
    }

    /// Reads a volume. `None` if it has been deleted meanwhile.
    fn volume(&mut self, info: &VolumeInfo) -> Result<Option<Scrubbed>, MediumError> {
        let mut seen = Scrubbed { info: info.clone(), blocks: 0, bad_blocks: 0, bad: Vec::new() };
        let mut from = 0;
        loop {
            let base = self.base_of(info).cloned();
            let Way::Lost(block) = self.go_through(base.as_ref(), from, &mut seen)? else {
                return Ok(Some(seen));
            };
            self.infos = self.open.list()?;
            let Some(now) = self.infos.iter().find(|one| one.id == info.id).cloned() else {
                return Ok(None);
            };
            let is_changed = now.origin != seen.info.origin
                || self.base_of(&now).map(|base| base.id) != base.map(|base| base.id);
            seen.info = now;
            if !is_changed {
                let blocks = info.blocks - block.min(info.blocks);
                let (at, cause) = (0, Cause::Metadata);
                seen.note(Bad { block, blocks, at, cause, shared_with: Vec::new() });
                return Ok(Some(seen));
            }
            // What it was made from went, and was the other side of the comparison.
            from = block;
        }
    }

    /// Reads what a volume has, from a block on, that its base has not.
    fn go_through(
        &mut self,
        base: Option<&VolumeInfo>,
        from: u64,
        seen: &mut Scrubbed,
    ) -> Result<Way, MediumError> {
        // Others may write to it meanwhile.
        let read_only = VolumeInfo { is_read_only: true, ..seen.info.clone() };
        let mut carrier = Carrier::open(self.open, &read_only, None)?;
        let (open, mut end, mut halt) = (Arc::clone(self.open), from, None);
        let whole = open.differences(base, &read_only, &mut |piece| {
            // What it has gained since is not looked at.
            let last = (piece.block + piece.blocks).min(read_only.blocks);
            let first = piece.block.max(from).min(last);
            if piece.is_mapped
                && let Err(error) = self.read(&mut carrier, first..last, seen)
            {
                halt = Some(error.clone());
                return Err(error);
            }
            end = last.max(end);
            Ok(())
        });
        match (halt, whole) {
            (Some(error), _) => Err(error),
            (None, Err(_)) => Ok(Way::Lost(end)),
            (None, Ok(())) => Ok(Way::Whole),
        }
    }

    /// Reads some blocks of a volume.
    fn read(
        &mut self,
        carrier: &mut Carrier,
        blocks: Range<u64>,
        seen: &mut Scrubbed,
    ) -> Result<(), MediumError> {
        let (mut at, page) = (blocks.start, u64::from(PAGE_BYTES));
        while at < blocks.end {
            let left = u32::try_from(blocks.end - at).unwrap_or(u32::MAX);
            let polite = self.open.let_others_go_first(POLITE_MAX);
            let count = left.min(polite).min(carrier.blocks_max());
            let began = self.open.clock.now();
            if carrier.verify(at, count).is_err() {
                self.look(carrier, (at, count), seen)?;
            }
            at += u64::from(count);
            self.done += u64::from(count);
            seen.blocks += u64::from(count);
            // Volumes grow while they are read.
            let progress = (self.done * page, self.total.max(self.done) * page);
            let goes_on = &mut || (self.watch)(progress);
            if !(goes_on() && self.pace.rest(u64::from(count) * page, began, goes_on)) {
                return Err(self.open.interrupted());
            }
        }
        Ok(())
    }

    /// Finds out which blocks of some are damaged.
    fn look(
        &self,
        carrier: &mut Carrier,
        (first, count): (u64, u32),
        seen: &mut Scrubbed,
    ) -> Result<(), MediumError> {
        let info = &seen.info.clone();
        for block in first..first + u64::from(count) {
            if carrier.verify(block, 1).is_ok() {
                continue;
            }
            let place = self.place(info, block);
            // Somebody may have trimmed it meanwhile, or deleted the volume or its end.
            if place == Ok(None) || (place.is_err() && !self.has(info, block)?) {
                continue;
            }
            let (at, cause) = match place {
                Ok(Some(at)) => (at, self.cause(at)),
                _ => (0, Cause::Metadata),
            };
            let others = self.infos.iter().filter(|other| other.id != info.id);
            let has_it = |other: &&VolumeInfo| at > 0 && self.place(other, block) == Ok(Some(at));
            let shared_with: Vec<String> =
                others.filter(has_it).map(|other| other.name.clone()).collect();
            seen.note(Bad { block, blocks: 1, at, cause, shared_with });
        }
        Ok(())
    }

    /// Whether a volume is there and has a block.
    fn has(&self, info: &VolumeInfo, block: u64) -> Result<bool, MediumError> {
        let volumes = self.open.list()?;
        Ok(volumes.iter().any(|one| one.id == info.id && block < one.blocks))
    }

    /// Where a block of a volume lies; `Err` if nobody can tell.
    fn place(&self, info: &VolumeInfo, block: u64) -> Result<Option<u64>, ()> {
        match self.open.ask(Ask::Extent { volume: info.id, block }) {
            Ok(Answer::Extent { at, .. }) => Ok(at),
            _ => Err(()),
        }
    }

    /// What is wrong with a block of the store, that cannot be read or does not have its checksum.
    fn cause(&self, at: u64) -> Cause {
        let pages = StorePages::open(self.open, 1).map_err(|_| Outcome::INTERNAL_ERROR);
        match pages.and_then(|mut pages| pages.up_to(at)?.read(at, &mut [0; 4096])) {
            Ok(()) => Cause::Checksum,
            Err(_) => Cause::Unread,
        }
    }
}

impl Scrubbed {
    /// Blocks are damaged: as many as follow those that were noted last, or more.
    fn note(&mut self, bad: Bad) {
        self.bad_blocks += bad.blocks;
        let has_room = self.bad.len() < BAD_MAX;
        let last = self.bad.last_mut().filter(|last| {
            last.block + last.blocks == bad.block
                && (bad.at == 0 || last.at + last.blocks == bad.at)
                && last.cause == bad.cause
                && last.shared_with == bad.shared_with
        });
        match last {
            Some(last) => last.blocks += bad.blocks,
            None if has_room => self.bad.push(bad),
            None => {}
        }
    }
}
