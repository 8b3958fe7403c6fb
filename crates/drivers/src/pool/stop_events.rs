//! Notification that a pool has stopped, and why, and that it has recovered.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use tenmil_block::uri::short_form_for_terminal;
use tenmil_volume::PoolError;

/// Event: a pool has stopped or recovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStopEvent {
    /// Device of the pool.
    pub device: String,
    /// Name of the pool.
    pub store: String,
    /// Cause.
    pub why: PoolError,
    /// The generation that it has recovered to, if it has.
    pub recovered: Option<u64>,
}

type Subscriber = Box<dyn Fn(&PoolStopEvent) + Send>;

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());

/// Subscribes to stops and recoveries: `subscriber` is called within a second when a pool of this process stops
/// (a metadata write or a flush failed, or another process owns it) and when it recovers, on the pool's
/// metadata thread.
pub fn subscribe_stops(subscriber: impl Fn(&PoolStopEvent) + Send + 'static) {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(subscriber));
}

impl PoolStopEvent {
    pub(super) fn emit(&self) {
        let hearers = SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner);
        hearers.iter().for_each(|subscriber| subscriber(self));
    }
}

impl fmt::Display for PoolStopEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, store, why, recovered } = self;
        let device = short_form_for_terminal(device);
        if let Some(generation) = recovered {
            return write!(
                out,
                "pool `{store}` on {device} has recovered and goes on from generation {generation}; \
                 writes that were not flushed before it stopped may be lost ({why})"
            );
        }
        write!(out, "pool `{store}` on {device} takes no changes any more: {why}")
    }
}
