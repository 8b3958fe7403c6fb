//! Path states shared by the managing thread and the queue threads.
//!
//! ```text
//!   managing thread  ANA state of each path ── a message to the inbox of each queue
//!   queue            message pending? reads the states, takes new queue pairs
//!                    status: inaccessible on this path ── a message to the managing thread
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use tenmil_base::Mailbox;

use super::path_selector::PathAnaState;
use crate::cache_tracker::{CacheScope, CacheTracker};
use crate::fabrics_queue_pair::FabricsQueuePair;
use crate::options::InjectedBugs;
use crate::path_table::PathCounters;

/// Published states of all paths.
pub(crate) struct PathStates {
    access: Box<[AtomicU8]>,
    /// The device is gone: no path is connected any more.
    has_ended: AtomicBool,
    /// Bit mask of paths whose ANA state was found to be stale, for the managing thread.
    pub(super) stale_states: Mailbox<u32>,
    caches: Arc<CacheTracker>,
    counters: Arc<PathCounters>,
}

/// New queue pairs for a queue, by path. It lives as long as the queue. A message without any announces
/// changed path states.
pub(crate) type QueueInbox = Mailbox<Vec<(usize, FabricsQueuePair)>>;

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
            access: (0..count).map(|_| unknown()).collect(),
            has_ended: AtomicBool::new(false),
            stale_states: Mailbox::default(),
            caches: CacheTracker::new(cache, bugs),
            counters: Arc::new(PathCounters::new(count)),
        }
    }

    /// Cache state of all controllers.
    #[inline]
    pub(super) fn caches(&self) -> &Arc<CacheTracker> {
        &self.caches
    }

    /// Counters of the device's requests.
    pub(crate) fn counters(&self) -> &Arc<PathCounters> {
        &self.counters
    }

    pub(crate) fn ana_state(&self, path: usize) -> PathAnaState {
        let code = self.access[path].load(Ordering::Relaxed);
        ALL.into_iter().find(|access| *access as u8 == code).unwrap_or_default()
    }

    /// Sets a state. A message to the inbox of each queue publishes it.
    pub(crate) fn set_ana_state(&self, path: usize, access: PathAnaState) {
        self.access[path].store(access as u8, Ordering::Relaxed);
    }

    pub(crate) fn is_device_gone(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Records that the device is gone. A message to the inbox of each queue publishes it.
    pub(crate) fn record_device_gone(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Reports that the state of `path` is stale.
    pub(crate) fn report_stale(&self, path: usize) {
        self.stale_states.send(|stale_states| *stale_states |= 1 << path);
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, CacheScope, InjectedBugs, PathStates};

    #[test]
    fn stored_path_state_is_read_back() {
        let states = PathStates::new(3, CacheScope::Shared, InjectedBugs::default());
        for access in ALL {
            states.set_ana_state(1, access);
            assert_eq!(states.ana_state(1), access);
        }
        assert!(!states.stale_states.is_pending());
        states.report_stale(2);
        states.report_stale(0);
        assert_eq!((states.stale_states.take(), states.stale_states.take()), (Some(0b101), None));
    }
}
