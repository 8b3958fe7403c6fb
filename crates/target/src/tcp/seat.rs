//! How a connection is called by others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reactor::Handle;

/// What others have of a connection: a bell.
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// Somebody has rung. Stored with release order after what there is to see.
    is_called: AtomicBool,
    home: Mutex<Option<Handle>>,
    shown: Mutex<Shown>,
}

/// What a connection is, as it is shown.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// What it became with Connect.
    pub(super) queue: Option<ShownQueue>,
}

/// Whose queue of what.
#[derive(Clone, Debug)]
pub(super) struct ShownQueue {
    pub(super) host: String,
    pub(super) subsystem: String,
    pub(super) cntlid: u16,
    pub(super) qid: u16,
}

impl Seat {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// There is something to be looked at.
    pub(super) fn ring(&self) {
        self.is_called.store(true, Ordering::Release);
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(home) = home {
            home.ring();
        }
    }

    /// Whether somebody has rung since this was last asked.
    #[inline]
    pub(super) fn answer(&self) -> bool {
        self.is_called.load(Ordering::Relaxed) && self.is_called.swap(false, Ordering::Acquire)
    }

    /// Whether somebody has rung.
    #[inline]
    pub(super) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Acquire)
    }

    /// What it is, to be read or changed.
    pub(super) fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// On which reactor it lives, if on one.
    pub(super) fn reactor(&self) -> Option<u32> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        home.as_ref().map(|home| home.home().0)
    }

    /// Where it lives.
    pub(super) fn settle(&self, home: Handle) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(home.clone());
        // For what was rung before anybody could be woken.
        home.ring();
    }
}
