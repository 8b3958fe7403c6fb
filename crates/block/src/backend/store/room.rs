//! Telling how full the stores of this process are, whoever has them open.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use volume::{Fill, Notice};

use super::PAGE_BYTES;

/// What is told of the room of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomNews {
    /// The device that the store is on.
    pub device: String,
    /// The store's name.
    pub store: String,
    /// What has come about.
    pub fill: Fill,
    /// Bytes that are taken.
    pub taken_bytes: u64,
    /// Bytes that can be, with those that are.
    pub room_bytes: u64,
}

type Hearer = Box<dyn Fn(&RoomNews) + Send>;

static HEARERS: Mutex<Vec<Hearer>> = Mutex::new(Vec::new());
/// Whether there is one; nothing is news before.
static IS_HEARD: AtomicBool = AtomicBool::new(false);

/// Has `hear` be called whenever a store of this process passes one of its thresholds, or refuses
/// something because it is full: within a second, on the store's own thread. For as long as the
/// process lives.
pub fn hear_of_room(hear: impl Fn(&RoomNews) + Send + 'static) {
    HEARERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(hear));
    // Whoever sees it takes the lock.
    IS_HEARD.store(true, Ordering::Relaxed);
}

/// Whether anybody would be told.
pub(super) fn is_heard() -> bool {
    IS_HEARD.load(Ordering::Relaxed)
}

impl RoomNews {
    pub(super) fn new(device: &str, store: String, notice: &Notice) -> Self {
        let bytes = |blocks: u64| blocks * u64::from(PAGE_BYTES);
        let (taken_bytes, room_bytes) = (bytes(notice.taken), bytes(notice.room));
        Self { device: device.into(), store, fill: notice.fill, taken_bytes, room_bytes }
    }

    pub(super) fn tell(&self) {
        let hearers = HEARERS.lock().unwrap_or_else(PoisonError::into_inner);
        hearers.iter().for_each(|hear| hear(self));
    }
}

impl fmt::Display for RoomNews {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, store, fill, taken_bytes, room_bytes } = self;
        write!(out, "store `{store}` on {device}: ")?;
        match fill {
            Fill::Above(percent) => write!(out, "{percent} % of its room are taken: ")?,
            Fill::Below(percent) => write!(out, "less than {percent} % of its room are taken: ")?,
            Fill::Full => write!(out, "it is full and has refused a write or a change: ")?,
        }
        write!(out, "{taken_bytes} of {room_bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use volume::{Fill, Notice};

    use super::RoomNews;

    #[test]
    fn what_is_told_says_which_store_and_how_much() {
        let text = |fill| {
            let notice = Notice { fill, taken: 2, room: 4 };
            RoomNews::new("ram:1g", "pool".into(), &notice).to_string()
        };
        let expected = "store `pool` on ram:1g: 80 % of its room are taken: 8192 of 16384 bytes";
        assert_eq!(text(Fill::Above(80)), expected);
        assert!(text(Fill::Below(80)).contains(": less than 80 % of"));
        assert!(text(Fill::Full).contains("it is full"));
    }
}
