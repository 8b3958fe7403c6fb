//! Handle by which other threads wake a connection and read its properties.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_reactor::ThreadHandle;

use super::audit::{AuthenticationAudit, TlsKeyAudit};

/// Shared part of a connection: wake-up flag, reactor and properties.
#[derive(Debug, Default)]
pub(super) struct ConnectionHandle {
    /// Whether a wake-up is pending. The release store in `wake` pairs with the acquire operations
    /// in `take_wakeup` and `is_wakeup_pending`, which makes the caller's earlier writes visible.
    is_wakeup_pending: AtomicBool,
    thread: Mutex<Option<ThreadHandle>>,
    info: Mutex<ConnectionInfo>,
}

/// Properties of a connection for management.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionInfo {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// Queue that Connect created.
    pub(super) queue: Option<QueueInfo>,
    /// Cipher suite of the secure channel.
    pub(super) cipher_suite: Option<&'static str>,
    /// Key of the secure channel.
    pub(super) tls_key: Option<TlsKeyAudit>,
    /// Last authentication.
    pub(super) authentication: Option<AuthenticationAudit>,
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
    pub(super) fn wake_connection(&self) {
        self.is_wakeup_pending.store(true, Ordering::Release);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(thread) = thread {
            thread.notify_reactor();
        }
    }

    /// Consumes a pending wake-up. Returns whether there was one.
    #[inline]
    pub(super) fn take_wakeup(&self) -> bool {
        self.is_wakeup_pending.load(Ordering::Relaxed)
            && self.is_wakeup_pending.swap(false, Ordering::Acquire)
    }

    /// Whether a wake-up is pending.
    #[inline]
    pub(super) fn is_wakeup_pending(&self) -> bool {
        self.is_wakeup_pending.load(Ordering::Acquire)
    }

    /// Locked properties, for reading and writing.
    pub(super) fn lock_info(&self) -> MutexGuard<'_, ConnectionInfo> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reactor that runs the connection, if any.
    pub(super) fn reactor(&self) -> Option<u32> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().map(|thread| thread.reactor().0)
    }

    /// Sets the light thread of the connection.
    pub(super) fn set_thread(&self, thread: ThreadHandle) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.clone());
        // Deliver wake-ups that were requested before the light thread was known.
        thread.notify_reactor();
    }
}
