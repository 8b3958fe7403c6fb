//! Who has volumes of a store open, and what is not done to a volume meanwhile.
//!
//! A volume that is served, or read by whoever was given its name, stays what it is for him: it is not
//! deleted, not made smaller, and not taken back to what it was. All else may happen to it: it is
//! snapshot, cloned, renamed, made larger, thick or independent of its parent while he reads and writes.

use base::Blame;
use volume::{Answer, Ask, Change, VolumeInfo};

use super::shared::State;
use super::{OpenStore, PAGE_BYTES};
use crate::open::{Kind, Opener};
use crate::{MediumError, notice_sizes};

/// A volume that somebody reads who expects it to stay what it is. It is nobody's again when this is
/// dropped.
pub(super) struct Held<'a> {
    open: &'a OpenStore,
    id: u64,
}

impl OpenStore {
    /// Sees to it that a volume is not taken away before the value is dropped.
    pub(super) fn hold(&self, info: &VolumeInfo) -> Result<Held<'_>, MediumError> {
        self.shared.lock().used.push(info.id);
        let held = Held { open: self, id: info.id };
        // It may have gone before.
        match self.find(&info.name)? {
            now if now.id == info.id => Ok(held),
            _ => Err(self.refuse(&volume::StoreError::NoVolume(info.name.clone()))),
        }
    }

    /// What other devices are opened with that go with this store.
    pub fn opener(&self, more: &'static [(&'static str, &'static dyn Kind)]) -> Opener<'_> {
        let seed = host::random_seed();
        Opener { regions: &self.regions, clock: self.clock, seed, more }
    }

    /// Which device the store is on, however it was spelled: [`identity`](fn@super::identity) of its name
    /// when it was opened.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The device that the store is on, by the name that it was opened by.
    pub fn device(&self) -> &str {
        &self.name
    }

    /// How often a volume, or a snapshot, is open in this process, for somebody outside the store.
    pub fn users(&self, info: &VolumeInfo) -> usize {
        let state = self.shared.lock();
        state.used.iter().filter(|id| **id == info.id).count()
    }

    /// Has all block devices of this process look how long they are, and says how many of those who have
    /// a volume of this store open were told by that.
    pub fn tell_of_growth(&self) -> usize {
        let before = self.shared.lock().told;
        notice_sizes();
        usize::try_from(self.shared.lock().told - before).unwrap_or(usize::MAX)
    }

    /// The volume from which a change would take something that it has.
    pub(super) fn at_stake(&self, change: &Change) -> Result<Option<VolumeInfo>, MediumError> {
        let (Change::Delete { name, .. }
        | Change::Revert { volume: name, .. }
        | Change::Resize { name, .. }) = change
        else {
            return Ok(None);
        };
        match self.ask(Ask::Find(name.clone()))? {
            Answer::Volume(info) => Ok(Some(info)),
            _ => Ok(None),
        }
    }

    /// Refuses a change that would take something from a volume that somebody has open.
    pub(super) fn admit(
        &self,
        state: &State,
        change: &Change,
        at_stake: Option<&VolumeInfo>,
    ) -> Result<(), MediumError> {
        let Some(info) = at_stake else { return Ok(()) };
        if !state.used.contains(&info.id) && !state.written.contains(&info.id) {
            return Ok(());
        }
        let name = &info.name;
        let (doing, lost) = match change {
            Change::Resize { blocks, .. } if *blocks >= info.blocks => return Ok(()),
            Change::Resize { blocks, .. } => {
                let page = u64::from(PAGE_BYTES);
                let (found, asked) = (info.blocks * page, blocks * page);
                let lost = "what reads behind the new end would fail";
                (format!("resize `{name}` from {found} to {asked} bytes"), lost)
            }
            Change::Revert { snapshot, .. } => {
                let lost = "whoever has it open would find other blocks than he wrote";
                (format!("revert `{name}` to `{snapshot}`"), lost)
            }
            _ => (format!("delete `{name}`"), "whoever has it open would lose it"),
        };
        let text = format!(
            "{}: {doing}: it is open in process {}, and {lost}; expected nobody who has it open",
            self.name,
            std::process::id()
        );
        let hint = "End what serves or uses it, and say the same again; a snapshot can be made of it \
                    at any time.";
        Err(MediumError::new(Blame::Caller, text).with_hint(hint))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let used = &mut self.open.shared.lock().used;
        if let Some(place) = used.iter().position(|id| *id == self.id) {
            used.swap_remove(place);
        }
    }
}
