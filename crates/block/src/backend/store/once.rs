//! A store is open once in a process, whoever asks for it: two who write to one know nothing of each
//! other's changes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use dma::Regions;

use super::{CLOSING_MAX, OpenStore, Place};
use crate::MediumError;
use crate::identity::DeviceIdentity;
use crate::open::{Opened, Opener};
use crate::uri::Uri;

/// A store that is open, or being opened, by the device that was named and the memory that it uses.
struct Entry {
    device: Uri,
    identity: DeviceIdentity,
    regions: Regions,
    /// Nothing while it is opened.
    open: Option<Weak<OpenStore>>,
}

/// Takes the entry away if the store could not be opened.
struct Attempt<'a>(&'a Opener<'a>, &'a Place);

/// Opening one may open another that it stands on, so the lock is not held meanwhile.
static OPEN: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
/// Some store is no longer being opened.
static SETTLED: Condvar = Condvar::new();

/// The store at a place: the one that is open, if it uses the same memory.
pub(super) fn open(opener: &Opener<'_>, place: &Place) -> Result<Arc<OpenStore>, MediumError> {
    let identity = DeviceIdentity::of_uri(&place.store);
    let mut known = lock();
    loop {
        known.retain(|entry| !entry.is_closed());
        let found = known.iter().find(|entry| entry.is_same(opener, place, &identity));
        match found.map(|entry| entry.open.as_ref().map(Weak::upgrade)) {
            None => break,
            Some(None) => known = SETTLED.wait(known).unwrap_or_else(PoisonError::into_inner),
            Some(Some(Some(open))) => return Ok(open),
            // It went just now, and its entry goes at the next look.
            Some(Some(None)) => {}
        }
    }
    let (device, regions) = (place.store.clone(), opener.regions.clone());
    known.push(Entry { device, identity, regions, open: None });
    drop(known);
    let attempt = Attempt(opener, place);
    let below = opener.open(&place.store)?;
    // By now it is known which device that is.
    if let Some(open) = opened_otherwise(opener, place, &below) {
        return Ok(open);
    }
    let open = Arc::new(OpenStore::over(opener, place, below, CLOSING_MAX)?);
    if let Some(entry) = lock().iter_mut().find(|entry| entry.is(opener, place)) {
        entry.open = Some(Arc::downgrade(&open));
    }
    drop(attempt);
    Ok(open)
}

/// The store that is open on the device `below`, though that was named in another way. If there is none, the
/// device is from now on that of the entry of `place`.
fn opened_otherwise(opener: &Opener<'_>, place: &Place, below: &Opened) -> Option<Arc<OpenStore>> {
    let identity = DeviceIdentity::of_opened(&place.store, below);
    let mut known = lock();
    loop {
        let others = known.iter().filter(|entry| !entry.is(opener, place));
        let mut same = others.filter(|entry| entry.is_same(opener, place, &identity));
        match same.next().map(|entry| entry.open.as_ref().map(Weak::upgrade)) {
            // Whoever came first does not wait for this one, whose device is not known yet.
            Some(None) => known = SETTLED.wait(known).unwrap_or_else(PoisonError::into_inner),
            Some(Some(Some(open))) => return Some(open),
            Some(Some(None)) => known.retain(|entry| !entry.is_closed()),
            None => break,
        }
    }
    if let Some(entry) = known.iter_mut().find(|entry| entry.is(opener, place)) {
        entry.identity = identity;
    }
    None
}

/// All stores that this process has open.
pub fn all_open() -> Vec<Arc<OpenStore>> {
    // Whoever turns out to be the last to have one closes it when the list goes, not under the lock.
    lock().iter().filter_map(|entry| entry.open.as_ref()?.upgrade()).collect()
}

fn lock() -> MutexGuard<'static, Vec<Entry>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    fn is_closed(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.strong_count() == 0)
    }

    /// Whether it is on the same device, however that was spelled.
    fn is_same(&self, opener: &Opener<'_>, place: &Place, identity: &DeviceIdentity) -> bool {
        let is_same = self.identity.is_same(identity) && self.regions.is(opener.regions);
        is_same || self.is(opener, place)
    }

    fn is(&self, opener: &Opener<'_>, place: &Place) -> bool {
        self.device == place.store && self.regions.is(opener.regions)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        lock().retain(|entry| entry.open.is_some() || !entry.is(self.0, self.1));
        SETTLED.notify_all();
    }
}
