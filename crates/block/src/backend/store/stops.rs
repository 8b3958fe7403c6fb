//! Telling that a store takes no changes any more, and why, whoever has it open.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use volume::StoreError;

/// What is told of a store that has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopNews {
    /// The device that the store is on.
    pub device: String,
    /// The store's name.
    pub store: String,
    /// Why.
    pub why: StoreError,
}

type Hearer = Box<dyn Fn(&StopNews) + Send>;

static HEARERS: Mutex<Vec<Hearer>> = Mutex::new(Vec::new());

/// Has `hear` be called whenever a store of this process stops: a write of metadata or a flush has failed, or
/// somebody else owns it. Within a second, on the store's own thread. For as long as the process lives.
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
        let Self { device, store, why } = self;
        write!(out, "store `{store}` on {device} takes no changes any more: {why}")
    }
}
