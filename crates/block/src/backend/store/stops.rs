//! Notification that a store has stopped, and why, and that it has recovered.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use volume::StoreError;

/// What is told of a store that has stopped, or goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopNews {
    /// The device that the store is on.
    pub device: String,
    /// The store's name.
    pub store: String,
    /// Why.
    pub why: StoreError,
    /// The generation from which it goes on, if it does.
    pub recovered: Option<u64>,
}

type Hearer = Box<dyn Fn(&StopNews) + Send>;

static HEARERS: Mutex<Vec<Hearer>> = Mutex::new(Vec::new());

/// Calls `hear` when a store of this process stops (a metadata write or a flush failed, or another process
/// owns it) and when it recovers: within a second, on the store's own thread.
pub fn hear_of_stops(hear: impl Fn(&StopNews) + Send + 'static) {
    HEARERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(hear));
}

impl StopNews {
    pub(super) fn tell(&self) {
        let hearers = HEARERS.lock().unwrap_or_else(PoisonError::into_inner);
        hearers.iter().for_each(|hear| hear(self));
    }
}

impl fmt::Display for StopNews {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, store, why, recovered } = self;
        if let Some(generation) = recovered {
            return write!(
                out,
                "store `{store}` on {device} has recovered and goes on from generation {generation}; \
                 writes that were not flushed before it stopped may be lost ({why})"
            );
        }
        write!(out, "store `{store}` on {device} takes no changes any more: {why}")
    }
}
