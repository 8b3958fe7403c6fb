//! Whether a process serves what it was started for, for `/readyz`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_linux::signal::is_stop_requested;

/// Readiness of a process. Cheap to clone; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Creates the readiness of a process that is starting.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that the process serves.
    pub fn set_ready(&self) {
        // Relaxed: the flag publishes nothing else.
        self.0.store(true, Ordering::Relaxed);
    }

    /// State of the process: `starting`, `serving` or `ending`.
    pub(crate) fn state_text(&self) -> &'static str {
        if is_stop_requested() {
            "ending"
        } else if self.0.load(Ordering::Relaxed) {
            "serving"
        } else {
            "starting"
        }
    }
}
