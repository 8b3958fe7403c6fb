//! How a connection is called by others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use reactor::Handle;

/// What others have of a connection: a bell.
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// Somebody has rung. Stored with release order after what there is to see.
    is_called: AtomicBool,
    home: Mutex<Option<Handle>>,
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

    /// Where it lives.
    pub(super) fn settle(&self, home: Handle) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(home.clone());
        // For what was rung before anybody could be woken.
        home.ring();
    }
}
