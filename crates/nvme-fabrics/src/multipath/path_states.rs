//! Path states shared by the managing thread and the queue threads.
//!
//! ```text
//!   managing thread  ANA state of each path, queue pairs in inboxes ── word + 1 ── wakers
//!   queue            word unchanged? no: reads the states
//!                    status: inaccessible on this path ── doubt ── waker of the managing thread
//! ```

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Wake;

use super::path_selector::PathAnaState;
use crate::caches::{CacheScope, CacheTracker};
use crate::fabrics_queue_pair::FabricsQueuePair;
use crate::options::InjectedBugs;

/// Published states of all paths.
pub(crate) struct PathStates {
    /// Change count.
    word: AtomicU32,
    access: Box<[AtomicU8]>,
    /// Bit mask of paths whose ANA state was found to be stale.
    doubts: AtomicU32,
    caches: Arc<CacheTracker>,
    tender: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

/// Inbox of new queue pairs for a queue. It lives as long as the queue.
#[derive(Default)]
pub(crate) struct QueueInbox {
    mailbox: Mutex<Vec<(usize, FabricsQueuePair)>>,
    bell: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

const ALL: [PathAnaState; 5] = [
    PathAnaState::Optimized,
    PathAnaState::NonOptimized,
    PathAnaState::Inaccessible,
    PathAnaState::PersistentLoss,
    PathAnaState::Change,
];

impl PathStates {
    /// States of `count` paths, initially unknown.
    pub(crate) fn new(count: usize, cache: CacheScope, bugs: InjectedBugs) -> Self {
        let unknown = || AtomicU8::new(PathAnaState::default() as u8);
        Self {
            word: AtomicU32::new(0),
            access: (0..count).map(|_| unknown()).collect(),
            doubts: AtomicU32::new(0),
            caches: CacheTracker::new(cache, bugs),
            tender: Mutex::default(),
        }
    }

    /// Cache state of all controllers.
    #[inline]
    pub(super) fn caches(&self) -> &Arc<CacheTracker> {
        &self.caches
    }

    #[inline]
    pub(crate) fn word(&self) -> u32 {
        // Pairs with the release in `notify`.
        self.word.load(Ordering::Acquire)
    }

    pub(crate) fn access(&self, path: usize) -> PathAnaState {
        let code = self.access[path].load(Ordering::Relaxed);
        ALL.into_iter().find(|access| *access as u8 == code).unwrap_or_default()
    }

    /// Sets a state; [`notify`](Self::notify) publishes it.
    pub(crate) fn set_access(&self, path: usize, access: PathAnaState) {
        self.access[path].store(access as u8, Ordering::Relaxed);
    }

    /// Publishes changes, and wakes the queues of these inboxes.
    pub(crate) fn notify<'a>(&self, desks: impl Iterator<Item = &'a QueueInbox>) {
        self.word.fetch_add(1, Ordering::Release);
        desks.for_each(QueueInbox::ring);
    }

    /// Reports that the state of `path` is stale.
    pub(crate) fn doubt(&self, path: usize) {
        self.doubts.fetch_or(1 << path, Ordering::Release);
        if let Some(tender) = &*lock(&self.tender) {
            tender.wake();
        }
    }

    /// Takes the paths reported as stale.
    pub(crate) fn take_doubts(&self) -> u32 {
        match self.doubts.load(Ordering::Acquire) {
            0 => 0,
            _ => self.doubts.swap(0, Ordering::AcqRel),
        }
    }

    pub(crate) fn has_doubts(&self) -> bool {
        self.doubts.load(Ordering::Acquire) != 0
    }

    /// Sets the waker for reports of stale states.
    pub(crate) fn wakes(&self, tender: Arc<dyn Wake + Send + Sync>) {
        *lock(&self.tender) = Some(tender);
    }
}

impl QueueInbox {
    /// Adds a queue pair; [`notify`](PathStates::notify) publishes it.
    pub(crate) fn put(&self, path: usize, way: FabricsQueuePair) {
        lock(&self.mailbox).push((path, way));
    }

    pub(crate) fn take(&self) -> Vec<(usize, FabricsQueuePair)> {
        core::mem::take(&mut lock(&self.mailbox))
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.mailbox).is_empty()
    }

    /// Sets the waker for changes.
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
    use super::{ALL, CacheScope, InjectedBugs, PathStates};

    #[test]
    fn what_is_told_of_a_path_is_what_is_found() {
        let standings = PathStates::new(3, CacheScope::Shared, InjectedBugs::default());
        for access in ALL {
            let before = standings.word();
            standings.set_access(1, access);
            standings.notify(core::iter::empty());
            assert_eq!(standings.access(1), access);
            assert_ne!(standings.word(), before);
        }
        assert!(!standings.has_doubts());
        standings.doubt(2);
        assert!(standings.has_doubts());
        assert_eq!((standings.take_doubts(), standings.take_doubts()), (0b100, 0));
    }
}
