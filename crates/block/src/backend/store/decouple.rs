//! Copying into a volume what it has from its parent, so that it needs the parent no more.
//!
//! What holds nothing but zeroes there takes no room here.
//!
//! It goes on from the end of the volume, a megabyte at a time at most. What was copied stays so if it is
//! stopped. Writes to the volume wait for the stretch that is being copied; reads wait for nothing.

use std::sync::Arc;

use base::{Blame, Outcome};
use volume::{Action, Answer, Ask, Change, VolumeInfo, checksum};

use super::outside::Outside;
use super::pace::Pace;
use super::raw::{Raw, StorePages};
use super::send::Watch;
use super::{Copied, OpenStore, PAGE_BYTES};
use crate::MediumError;
use crate::open::Opener;

/// What has come of having a volume stand on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoupled {
    /// The volume.
    pub info: VolumeInfo,
    /// Blocks that its parent was looked at for; zero if it had none.
    pub blocks: u64,
}

/// Blocks that are copied at once: 1 MiB.
const COPY_BLOCKS: u32 = 256;

/// What copies go through: to the device of the store, and from the parent.
struct Mover<'a> {
    store: StorePages<'a>,
    parent: Raw<'a>,
    pages: Vec<u8>,
    /// Bytes that were copied.
    copied: u64,
}

impl OpenStore {
    /// Has a volume stand on its own: it no longer says what it was made from, and needs no parent; what
    /// it has from there is copied, at most so many bytes in a second.
    ///
    /// # Errors
    ///
    /// If there is no such volume or it is a snapshot; if its parent cannot be opened or read, there is no
    /// room, or `watch` says no, in which case what was copied stays, and the rest is the parent's still.
    pub fn decouple(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<Decoupled, MediumError> {
        let blocks = self.copy_parent(opener, name, rate, watch)?;
        let decoupled = self.change(Change::Decouple { name: name.into() })?;
        let info = decoupled.map_or_else(|| self.find(name), Ok)?;
        Ok(Decoupled { info, blocks })
    }

    /// Copies into a volume what it has from its parent. Returns how far that reached.
    pub(super) fn copy_parent(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<u64, MediumError> {
        let info = self.find(name)?;
        if info.is_read_only {
            return Err(self.refuse(&volume::StoreError::ReadOnly(name.into())));
        }
        let Some(parent) = self.open_parent(opener, &info)? else { return Ok(0) };
        let machine = |problem: String| {
            MediumError::new(Blame::Machine, format!("{}: decouple `{name}`: {problem}", self.name))
        };
        let mut mover = Mover::new(self, &parent).map_err(machine)?;
        let (volume, page, mut left) = (info.id, u64::from(PAGE_BYTES), info.reach);
        let pace = Pace { rate, clock: self.clock };
        while left > 0 {
            let (began, before) = (self.clock.now(), mover.copied);
            let fill = Ask::Fill { volume, blocks: COPY_BLOCKS.into() };
            match self.converse(fill, &mut |action| mover.carry(action))? {
                Answer::Filled(to) if to < left => left = to,
                _ => return Err(machine("it made no progress, expected some".into())),
            }
            let progress = ((info.reach - left) * page, info.reach * page);
            let goes_on = &mut || watch(progress);
            if !(goes_on() && pace.rest(mover.copied - before, began, goes_on)) {
                return Err(machine("interrupted; say it again to go on".into()));
            }
        }
        self.ask(Ask::Flush)?;
        Ok(info.reach)
    }
}

impl<'a> Mover<'a> {
    fn new(open: &'a OpenStore, parent: &'a Outside) -> Result<Self, String> {
        let (regions, clock) = (&open.regions, &open.clock);
        let store = StorePages::open(open, COPY_BLOCKS)?;
        let parent = Raw::wide(regions, clock, &*parent.opened.medium, &parent.shape, COPY_BLOCKS)?;
        let pages = vec![0; (COPY_BLOCKS * PAGE_BYTES) as usize];
        Ok(Self { store, parent, pages, copied: 0 })
    }

    /// Moves blocks from the parent, or to the device.
    fn carry(&mut self, action: &Action) -> Result<Copied, Outcome> {
        let (is_read, offset, at, blocks, is_summed) = match *action {
            Action::ReadParent { offset, block, blocks, .. } => {
                (true, offset, block, blocks, false)
            }
            Action::WriteData { offset, at, blocks, is_summed, .. } => {
                (false, offset, at, blocks, is_summed)
            }
            _ => return Err(Outcome::INTERNAL_ERROR),
        };
        let page = PAGE_BYTES as usize;
        let index = |blocks: u64| usize::try_from(blocks).unwrap_or(usize::MAX);
        let range = index(offset).saturating_mul(page)..index(offset + blocks).saturating_mul(page);
        let pages = self.pages.get_mut(range).ok_or(Outcome::INTERNAL_ERROR)?;
        let raw = if is_read { &mut self.parent } else { self.store.up_to(at + blocks)? };
        let step = raw.pages_max() as usize * page;
        for (at, part) in (at..).step_by(step / page).zip(pages.chunks_mut(step)) {
            match is_read {
                true => raw.read_run(at, part)?,
                false => raw.write_run(at, part)?,
            }
        }
        self.copied += if is_read { 0 } else { pages.len() as u64 };
        let pages = pages.as_chunks::<4096>().0.iter();
        Ok(match (is_read, is_summed) {
            (true, _) => Copied::Contents(pages.map(|page| page != &[0; 4096]).collect()),
            (false, true) => Copied::Sums(pages.map(checksum).collect()),
            (false, false) => Copied::Data,
        })
    }
}
