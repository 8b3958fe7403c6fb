//! A doorbell that is a word in the host's memory, as the controller looks at it.
//!
//! `crates/dma/tests/orders` has this file under a model checker, together with the driver's half.

use base::{Fault, HostEntries, HostMemory};

use super::sync::{Ordering, fence};

/// A shadow doorbell and its event index (Base 2.1 §5.2.5).
#[derive(Debug)]
pub(crate) struct Shadow<E> {
    doorbell: E,
    event_index: E,
    /// What the event index holds.
    told: Option<u32>,
}

impl<E: HostEntries> Shadow<E> {
    /// The shadow of one doorbell, if its memory is shared.
    pub(crate) fn open<H: HostMemory<Entries = E>>(
        host: &mut H,
        doorbell: u64,
        event_index: u64,
    ) -> Result<Option<Self>, Fault> {
        let doorbell = host.entries(doorbell, 8)?;
        let event_index = host.entries(event_index, 8)?;
        let both = doorbell.zip(event_index);
        Ok(both.map(|(doorbell, event_index)| Self::new(doorbell, event_index)))
    }

    pub(super) fn new(doorbell: E, event_index: E) -> Self {
        Self { doorbell, event_index, told: None }
    }

    /// What was rung, if its memory is there.
    #[inline]
    pub(super) fn load(&self) -> Option<u32> {
        self.doorbell.load_u32(0).ok()
    }

    /// Tells the host what has been seen. What it has rung since, if it has.
    pub(super) fn rest(&mut self, seen: u32) -> Option<u32> {
        if self.told != Some(seen) {
            self.told = Some(seen);
            if self.event_index.store_u32(0, seen).is_err() {
                return None;
            }
            // The host stores its doorbell and then looks at the event index; we store the event
            // index and then look at the doorbell. With a full barrier on both sides one of us sees
            // the other.
            fence(Ordering::SeqCst);
        }
        self.load().filter(|rung| *rung != seen)
    }
}
