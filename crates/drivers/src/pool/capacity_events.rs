//! Capacity events of the pools of this process.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tenmil_volume::{CapacityNotice, CapacityState};

use super::PAGE_BYTES;
use tenmil_block::uri::short_form_for_terminal;

/// A capacity event of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapacityEvent {
    /// Device of the pool.
    pub device: String,
    /// Name of the pool.
    pub store: String,
    /// The new capacity state.
    pub fill: CapacityState,
    /// Allocated bytes.
    pub used_bytes: u64,
    /// Capacity in bytes.
    pub capacity_bytes: u64,
}

type Subscriber = Box<dyn Fn(&CapacityEvent) + Send>;

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());
/// Whether there is a subscriber; no event is created before.
static HAS_SUBSCRIBER: AtomicBool = AtomicBool::new(false);

/// Subscribes to capacity events. `subscriber` is called within a second when a pool of this process crosses a
/// threshold, or rejects a request because it is full, on the pool's metadata thread, for as long as the
/// process runs.
pub fn subscribe_capacity(subscriber: impl Fn(&CapacityEvent) + Send + 'static) {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(subscriber));
    // Relaxed: a reader that sees it takes the lock.
    HAS_SUBSCRIBER.store(true, Ordering::Relaxed);
}

/// Whether there is a subscriber.
pub(super) fn has_subscriber() -> bool {
    HAS_SUBSCRIBER.load(Ordering::Relaxed)
}

impl CapacityEvent {
    pub(super) fn new(device: &str, store: String, notice: &CapacityNotice) -> Self {
        let bytes = |blocks: u64| blocks * u64::from(PAGE_BYTES);
        let (used_bytes, capacity_bytes) = (bytes(notice.taken), bytes(notice.room));
        Self { device: device.into(), store, fill: notice.fill, used_bytes, capacity_bytes }
    }

    pub(super) fn emit(&self) {
        let hearers = SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner);
        hearers.iter().for_each(|subscriber| subscriber(self));
    }
}

impl fmt::Display for CapacityEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, store, fill, used_bytes, capacity_bytes } = self;
        write!(out, "pool `{store}` on {}: ", short_form_for_terminal(device))?;
        match fill {
            CapacityState::Above(percent) => write!(out, "{percent} % of its capacity are used: ")?,
            CapacityState::Below(percent) => {
                write!(out, "less than {percent} % of its capacity are used: ")?
            }
            CapacityState::Full => write!(out, "it is full and has refused a write or a change: ")?,
        }
        write!(out, "{used_bytes} of {capacity_bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use tenmil_volume::{CapacityNotice, CapacityState};

    use super::CapacityEvent;

    #[test]
    fn capacity_event_names_the_pool_and_its_usage() {
        let text = |fill| {
            let notice = CapacityNotice { fill, taken: 2, room: 4 };
            CapacityEvent::new("ram:1g", "pool".into(), &notice).to_string()
        };
        let expected = "pool `pool` on ram:1g: 80 % of its capacity are used: 8192 of 16384 bytes";
        assert_eq!(text(CapacityState::Above(80)), expected);
        assert!(text(CapacityState::Below(80)).contains(": less than 80 % of"));
        assert!(text(CapacityState::Full).contains("it is full"));
    }
}
