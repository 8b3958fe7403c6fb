//! Volumes in use, and the changes that are rejected meanwhile.
//!
//! A volume that is served or read keeps its contents: it is not deleted, shrunk or rolled back. All
//! other changes are permitted while it is in use: snapshot, clone, rename, grow, inflate, decouple.

use tenmil_base::ErrorCategory;
use tenmil_volume::{PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

use super::pool_shared::PoolSharedState;
use super::{OpenPool, PAGE_BYTES};
use tenmil_base::Error;
use tenmil_block::refresh_sizes;
use tenmil_block::{NamedDeviceType, Opener};

/// Pins a volume against changes that would lose data, until it is dropped.
pub(super) struct VolumePin<'a> {
    open: &'a OpenPool,
    id: u64,
}

impl OpenPool {
    /// Pins a volume.
    pub(super) fn pin_volume(&self, info: &VolumeInfo) -> Result<VolumePin<'_>, Error> {
        self.shared.lock().used.push(info.id);
        let held = VolumePin { open: self, id: info.id };
        // It may have been deleted before.
        match self.find_volume(&info.name)? {
            now if now.id == info.id => Ok(held),
            _ => Err(self.pool_error(&tenmil_volume::PoolError::NoVolume(info.name.clone()))),
        }
    }

    /// An opener for other devices in the memory of this pool.
    pub fn opener_with_regions(&self, kinds: &'static [NamedDeviceType<'static>]) -> Opener<'_> {
        let seed = tenmil_linux::random_seed();
        Opener { regions: &self.regions, clock: self.clock, seed, kinds }
    }

    /// Identity of the pool's device, independent of its spelling: [`device_key`](fn@super::device_key) of
    /// its URI at open.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The URI of the pool's device at open.
    pub fn device_uri(&self) -> &str {
        &self.device
    }

    /// How many times a volume or a snapshot is open in this process for users outside the pool.
    pub fn user_count(&self, info: &VolumeInfo) -> usize {
        let state = self.shared.lock();
        state.used.iter().filter(|id| **id == info.id).count()
    }

    /// Makes all block devices of this process re-read their size. Returns the number of open volumes of
    /// this pool whose users were notified.
    pub fn refresh_all_device_sizes(&self) -> usize {
        let before = self.shared.lock().reported;
        refresh_sizes();
        usize::try_from(self.shared.lock().reported - before).unwrap_or(usize::MAX)
    }

    /// The volume that would lose data by a change.
    pub(super) fn volume_losing_data(
        &self,
        change: &VolumeOp,
    ) -> Result<Option<VolumeInfo>, Error> {
        let (VolumeOp::Delete { name, .. }
        | VolumeOp::Rollback { volume: name, .. }
        | VolumeOp::Resize { name, .. }) = change
        else {
            return Ok(None);
        };
        match self.request_and_wait(PoolRequest::Find(name.clone()))? {
            PoolResponse::Volume(info) => Ok(Some(info)),
            _ => Ok(None),
        }
    }

    /// Rejects a change by which an open volume would lose data.
    pub(super) fn check_change_allowed(
        &self,
        state: &PoolSharedState,
        change: &VolumeOp,
        at_stake: Option<&VolumeInfo>,
    ) -> Result<(), Error> {
        let Some(info) = at_stake else { return Ok(()) };
        if !state.used.contains(&info.id) && !state.written.contains(&info.id) {
            return Ok(());
        }
        let name = &info.name;
        let (doing, lost) = match change {
            VolumeOp::Resize { blocks, .. } if *blocks >= info.blocks => return Ok(()),
            VolumeOp::Resize { blocks, .. } => {
                let page = u64::from(PAGE_BYTES);
                let (found, asked) = (info.blocks * page, blocks * page);
                let lost = "what reads behind the new end would fail";
                (format!("resize `{name}` from {found} to {asked} bytes"), lost)
            }
            VolumeOp::Rollback { snapshot, .. } => {
                let lost = "its users would read other blocks than they wrote";
                (format!("roll back `{name}` to `{snapshot}`"), lost)
            }
            _ => (format!("delete `{name}`"), "its users would lose it"),
        };
        let text = format!(
            "{}: {doing}: it is open in process {}, and {lost}; expected it not open",
            self.name,
            std::process::id()
        );
        let hint = "End what serves or uses it, and repeat the command; a snapshot can be made of it \
                    at any time.";
        Err(Error::new(ErrorCategory::Usage, text).with_hint(hint))
    }
}

impl Drop for VolumePin<'_> {
    fn drop(&mut self) {
        let used = &mut self.open.shared.lock().used;
        if let Some(place) = used.iter().position(|id| *id == self.id) {
            used.swap_remove(place);
        }
    }
}
