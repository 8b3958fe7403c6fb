//! What the thread that looks after the paths and the threads of the queues tell each other.
//!
//! ```text
//!   tending thread   access of each path, ways in mailboxes ── word + 1 ── bells
//!   queue            word as it was? no: takes what there is
//!                    answered that a path does not lead there ── doubt ── bell of the tending thread
//! ```

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Wake;

use super::route::Access;
use crate::caches::{Cache, Caches};
use crate::options::InjectedBugs;
use crate::way::Way;

/// What is known of all paths.
pub(crate) struct Standings {
    /// Another number for each piece of news.
    word: AtomicU32,
    access: Box<[AtomicU8]>,
    /// Paths, by bits, that are not what they are said to be.
    doubts: AtomicU32,
    caches: Arc<Caches>,
    tender: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

/// Where a queue gets its ways. It goes with the queue.
#[derive(Default)]
pub(crate) struct Desk {
    mailbox: Mutex<Vec<(usize, Way)>>,
    bell: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

const ALL: [Access; 5] = [
    Access::Optimized,
    Access::NonOptimized,
    Access::Inaccessible,
    Access::PersistentLoss,
    Access::Change,
];

impl Standings {
    /// So many paths, of which nothing is known.
    pub(crate) fn new(count: usize, cache: Cache, bugs: InjectedBugs) -> Self {
        let unknown = || AtomicU8::new(Access::default() as u8);
        Self {
            word: AtomicU32::new(0),
            access: (0..count).map(|_| unknown()).collect(),
            doubts: AtomicU32::new(0),
            caches: Caches::new(cache, bugs),
            tender: Mutex::default(),
        }
    }

    /// What controllers may have in their caches.
    #[inline]
    pub(super) fn caches(&self) -> &Arc<Caches> {
        &self.caches
    }

    #[inline]
    pub(crate) fn word(&self) -> u32 {
        // Pairs with the release in `tell`.
        self.word.load(Ordering::Acquire)
    }

    pub(crate) fn access(&self, path: usize) -> Access {
        let code = self.access[path].load(Ordering::Relaxed);
        ALL.into_iter().find(|access| *access as u8 == code).unwrap_or_default()
    }

    /// To be [told](Self::tell).
    pub(crate) fn set_access(&self, path: usize, access: Access) {
        self.access[path].store(access as u8, Ordering::Relaxed);
    }

    /// There is news, for whoever has one of `desks`.
    pub(crate) fn tell<'a>(&self, desks: impl Iterator<Item = &'a Desk>) {
        self.word.fetch_add(1, Ordering::Release);
        desks.for_each(Desk::ring);
    }

    /// A queue has found that `path` does not lead where it is said to.
    pub(crate) fn doubt(&self, path: usize) {
        self.doubts.fetch_or(1 << path, Ordering::Release);
        if let Some(tender) = &*lock(&self.tender) {
            tender.wake();
        }
    }

    /// The paths that were doubted since this was last asked.
    pub(crate) fn take_doubts(&self) -> u32 {
        match self.doubts.load(Ordering::Acquire) {
            0 => 0,
            _ => self.doubts.swap(0, Ordering::AcqRel),
        }
    }

    pub(crate) fn has_doubts(&self) -> bool {
        self.doubts.load(Ordering::Acquire) != 0
    }

    /// Who is woken by doubts.
    pub(crate) fn wakes(&self, tender: Arc<dyn Wake + Send + Sync>) {
        *lock(&self.tender) = Some(tender);
    }
}

impl Desk {
    /// To be [told](Standings::tell).
    pub(crate) fn put(&self, path: usize, way: Way) {
        lock(&self.mailbox).push((path, way));
    }

    pub(crate) fn take(&self) -> Vec<(usize, Way)> {
        core::mem::take(&mut lock(&self.mailbox))
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.mailbox).is_empty()
    }

    /// Who is woken by news.
    pub(crate) fn wakes(&self, bell: Arc<dyn Wake + Send + Sync>) {
        *lock(&self.bell) = Some(bell);
    }

    fn ring(&self) {
        if let Some(bell) = &*lock(&self.bell) {
            bell.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::{ALL, Cache, InjectedBugs, Standings};

    #[test]
    fn what_is_told_of_a_path_is_what_is_found() {
        let standings = Standings::new(3, Cache::Shared, InjectedBugs::default());
        for access in ALL {
            let before = standings.word();
            standings.set_access(1, access);
            standings.tell(core::iter::empty());
            assert_eq!(standings.access(1), access);
            assert_ne!(standings.word(), before);
        }
        assert!(!standings.has_doubts());
        standings.doubt(2);
        assert!(standings.has_doubts());
        assert_eq!((standings.take_doubts(), standings.take_doubts()), (0b100, 0));
    }
}
