//! Handle by which other threads wake a connection and read its properties.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_reactor::ThreadHandle;

/// Shared part of a connection: wake-up flag, reactor and properties.
#[derive(Debug, Default)]
pub(super) struct ConnectionHandle {
    /// Whether a wake-up is pending. The release store in `ring` pairs with the acquire operations
    /// in `answer` and `is_called`, which makes the caller's earlier writes visible.
    is_called: AtomicBool,
    home: Mutex<Option<ThreadHandle>>,
    shown: Mutex<ConnectionInfo>,
}

/// Properties of a connection for management.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionInfo {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// Queue that Connect created.
    pub(super) queue: Option<QueueInfo>,
}

/// Identity of a connected queue.
#[derive(Clone, Debug)]
pub(super) struct QueueInfo {
    pub(super) host: String,
    pub(super) subsystem: String,
    pub(super) cntlid: u16,
    pub(super) qid: u16,
}

impl ConnectionHandle {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Wakes the connection.
    pub(super) fn ring(&self) {
        self.is_called.store(true, Ordering::Release);
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(home) = home {
            home.notify();
        }
    }

    /// Consumes a pending wake-up. Returns whether there was one.
    #[inline]
    pub(super) fn take_wakeup(&self) -> bool {
        self.is_called.load(Ordering::Relaxed) && self.is_called.swap(false, Ordering::Acquire)
    }

    /// Whether a wake-up is pending.
    #[inline]
    pub(super) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Acquire)
    }

    /// Locked properties, for reading and writing.
    pub(super) fn shown(&self) -> MutexGuard<'_, ConnectionInfo> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reactor that runs the connection, if any.
    pub(super) fn reactor(&self) -> Option<u32> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        home.as_ref().map(|home| home.reactor().0)
    }

    /// Sets the light thread of the connection.
    pub(super) fn set_reactor(&self, home: ThreadHandle) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(home.clone());
        // Deliver wake-ups that were requested before the light thread was known.
        home.notify();
    }
}
