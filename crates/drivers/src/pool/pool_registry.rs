//! Registry of open pools: a pool is open once in a process, because two instances would not see each
//! other's changes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_dma::RegionTable;

use super::{CLOSING_MAX, OpenPool, VolumeRef};
use tenmil_base::Error;
use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// An open pool, or one being opened, by its device URI and its memory regions.
struct OpenPoolEntry {
    device: Uri,
    identity: DeviceIdentity,
    regions: RegionTable,
    /// `None` while it is being opened.
    open: Option<Weak<OpenPool>>,
}

/// Removes the entry if the open fails.
struct RegistryEntryGuard<'a>(&'a Opener<'a>, &'a VolumeRef);

/// The lock is not held during an open, which may open another pool below.
static OPEN: Mutex<Vec<OpenPoolEntry>> = Mutex::new(Vec::new());
/// Signaled when an open has ended.
static SETTLED: Condvar = Condvar::new();

/// Opens a pool, or returns the open instance with the same memory regions.
pub(super) fn open_or_share_pool(
    opener: &Opener<'_>,
    place: &VolumeRef,
) -> Result<Arc<OpenPool>, Error> {
    let identity = DeviceIdentity::of_uri(&place.store);
    let mut known = lock_registry();
    loop {
        known.retain(|entry| !entry.is_closed());
        let found = known.iter().find(|entry| entry.is_on_same_device(opener, place, &identity));
        match found.map(|entry| entry.open.as_ref().map(Weak::upgrade)) {
            None => break,
            Some(None) => known = SETTLED.wait(known).unwrap_or_else(PoisonError::into_inner),
            Some(Some(Some(open))) => return Ok(open),
            // It was closed just now; its entry is removed in the next pass.
            Some(Some(None)) => {}
        }
    }
    let (device, regions) = (place.store.clone(), opener.regions.clone());
    known.push(OpenPoolEntry { device, identity, regions, open: None });
    drop(known);
    let attempt = RegistryEntryGuard(opener, place);
    let below = opener.open(&place.store)?;
    // Now the identity of the device is known.
    if let Some(open) = find_or_record_identity(opener, place, &below) {
        return Ok(open);
    }
    let open = Arc::new(OpenPool::open_on_device(opener, place, below, CLOSING_MAX)?);
    if let Some(entry) =
        lock_registry().iter_mut().find(|entry| entry.has_same_uri_and_regions(opener, place))
    {
        entry.open = Some(Arc::downgrade(&open));
    }
    drop(attempt);
    Ok(open)
}

/// Finds the open pool on the device `below` under another URI. If there is none, sets the identity of
/// the entry of `place`.
fn find_or_record_identity(
    opener: &Opener<'_>,
    place: &VolumeRef,
    below: &OpenedDevice,
) -> Option<Arc<OpenPool>> {
    let identity = DeviceIdentity::of_opened(&place.store, below);
    let mut known = lock_registry();
    loop {
        let others = known.iter().filter(|entry| !entry.has_same_uri_and_regions(opener, place));
        let mut same = others.filter(|entry| entry.is_on_same_device(opener, place, &identity));
        match same.next().map(|entry| entry.open.as_ref().map(Weak::upgrade)) {
            // No deadlock: the other open started first, and does not wait for this one, whose identity
            // is not set yet.
            Some(None) => known = SETTLED.wait(known).unwrap_or_else(PoisonError::into_inner),
            Some(Some(Some(open))) => return Some(open),
            Some(Some(None)) => known.retain(|entry| !entry.is_closed()),
            None => break,
        }
    }
    if let Some(entry) =
        known.iter_mut().find(|entry| entry.has_same_uri_and_regions(opener, place))
    {
        entry.identity = identity;
    }
    None
}

/// All pools open in this process.
pub fn list_open_pools() -> Vec<Arc<OpenPool>> {
    // A reference that turns out to be the last one is dropped with the list, not under the lock.
    lock_registry().iter().filter_map(|entry| entry.open.as_ref()?.upgrade()).collect()
}

fn lock_registry() -> MutexGuard<'static, Vec<OpenPoolEntry>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenPoolEntry {
    fn is_closed(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.strong_count() == 0)
    }

    /// Whether it is on the same device, regardless of spelling.
    fn is_on_same_device(
        &self,
        opener: &Opener<'_>,
        place: &VolumeRef,
        identity: &DeviceIdentity,
    ) -> bool {
        let is_same =
            self.identity.is_same_device(identity) && self.regions.is_same_table(opener.regions);
        is_same || self.has_same_uri_and_regions(opener, place)
    }

    fn has_same_uri_and_regions(&self, opener: &Opener<'_>, place: &VolumeRef) -> bool {
        self.device == place.store && self.regions.is_same_table(opener.regions)
    }
}

impl Drop for RegistryEntryGuard<'_> {
    fn drop(&mut self) {
        lock_registry().retain(|entry| {
            entry.open.is_some() || !entry.has_same_uri_and_regions(self.0, self.1)
        });
        SETTLED.notify_all();
    }
}
