//! Making a volume thick: room for all of its blocks is promised at once, and then given to it a
//! stretch at a time, while others read and write.
//!
//! What the volume has from its parent is copied first, and what lies where a snapshot or a clone has it too. Writes to the volume wait for the
//! stretch that is being copied; reads wait for nothing.

use std::sync::Arc;

use base::{Blame, Outcome};
use volume::{Action, Answer, Ask, VolumeInfo};

use super::pace::Pace;
use super::raw::StorePages;
use super::send::Watch;
use super::{Copied, OpenStore, PAGE_BYTES};
use crate::MediumError;
use crate::open::Opener;

/// What has come of making a volume thick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inflated {
    /// The volume.
    pub info: VolumeInfo,
    /// Whether it was so already; nothing was written.
    pub was_there: bool,
}

/// Blocks that are copied at once: 1 MiB.
const COPY_BLOCKS: u32 = 256;

/// What copies go through.
struct Mover<'a> {
    store: StorePages<'a>,
    pages: Vec<u8>,
    /// Bytes that were copied.
    copied: u64,
}

impl OpenStore {
    /// Makes a volume thick, or goes on with one for which that was begun, or whose promise a snapshot
    /// has taken back. What has to be copied is, at most so many bytes in a second.
    ///
    /// # Errors
    ///
    /// If there is no room, in which case nothing was taken; if there is no such volume, it is a
    /// snapshot or has checksums, blocks cannot be copied, or `watch` says no.
    pub fn inflate(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<Inflated, MediumError> {
        self.copy_parent(opener, name, rate, watch)?;
        let before = self.account(name)?;
        let was_thick = self.find(name)?.is_thick;
        let Answer::Volume(info) = self.ask(Ask::Thicken(name.into()))? else {
            return Err(self.refuse(&volume::StoreError::NoVolume(name.into())));
        };
        if was_thick && before.own() == info.blocks {
            return Ok(Inflated { info, was_there: true });
        }
        let machine = |problem: String| {
            MediumError::new(Blame::Machine, format!("{}: inflate `{name}`: {problem}", self.name))
        };
        let store = StorePages::open(self, COPY_BLOCKS).map_err(machine)?;
        let pages = vec![0; (COPY_BLOCKS * PAGE_BYTES) as usize];
        let mut mover = Mover { store, pages, copied: 0 };
        let pace = Pace { rate, clock: self.clock };
        let (volume, page) = (info.id, u64::from(PAGE_BYTES));
        let mut block = 0;
        while block < info.blocks {
            let (began, before) = (self.clock.now(), mover.copied);
            let own = Ask::Own { volume, block, blocks: COPY_BLOCKS.into() };
            match self.converse(own, &mut |action| mover.carry(action))? {
                Answer::Owned(to) if to > block => block = to,
                _ => return Err(machine("it made no progress, expected some".into())),
            }
            let progress = (block.min(info.blocks) * page, info.blocks * page);
            let goes_on = &mut || watch(progress);
            if !(goes_on() && pace.rest(mover.copied - before, began, goes_on)) {
                return Err(machine("interrupted; say it again to go on".into()));
            }
        }
        // It may have taken units itself meanwhile, and is not owed those any more.
        self.ask(Ask::Thicken(name.into()))?;
        self.ask(Ask::Flush)?;
        Ok(Inflated { info: self.find(name)?, was_there: false })
    }
}

impl Mover<'_> {
    /// Moves blocks from the device, or to it.
    fn carry(&mut self, action: &Action) -> Result<Copied, Outcome> {
        let page = PAGE_BYTES as usize;
        let (is_read, offset, at, blocks) = match *action {
            Action::ReadData { offset, at, blocks, .. } => (true, offset, at, blocks),
            Action::WriteData { offset, at, blocks, .. } => (false, offset, at, blocks),
            _ => return Err(Outcome::INTERNAL_ERROR),
        };
        let index = |blocks: u64| usize::try_from(blocks).unwrap_or(usize::MAX);
        let Some(pages) = self.pages.get_mut(index(offset) * page..index(offset + blocks) * page)
        else {
            return Err(Outcome::INTERNAL_ERROR);
        };
        let raw = self.store.up_to(at + blocks)?;
        let step = raw.pages_max() as usize * page;
        for (at, part) in (at..).step_by(step / page).zip(pages.chunks_mut(step)) {
            match is_read {
                true => raw.read_run(at, part)?,
                false => raw.write_run(at, part)?,
            }
        }
        self.copied += if is_read { 0 } else { pages.len() as u64 };
        Ok(Copied::Data)
    }
}
