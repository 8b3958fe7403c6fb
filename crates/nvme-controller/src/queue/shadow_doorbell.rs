//! Shadow doorbell: controller side of a doorbell in host memory.
//!
//! `crates/dma/tests/orders` checks this file, together with the driver's half, in a model
//! checker.

use tenmil_base::{AccessFault, RingEntries, RingMemory};

use super::sync::{Ordering, fence};

/// Shadow doorbell and its event index (Base 2.1 §5.2.5).
#[derive(Debug)]
pub(crate) struct ShadowDoorbell<E> {
    doorbell: E,
    event_index: E,
    /// Current value of the event index.
    published: Option<u32>,
}

impl<E: RingEntries> ShadowDoorbell<E> {
    /// Opens the shadow of one doorbell. Returns `None` if its memory is not shared.
    pub(crate) fn open<H: RingMemory<Entries = E>>(
        host: &mut H,
        doorbell: u64,
        event_index: u64,
    ) -> Result<Option<Self>, AccessFault> {
        let doorbell = host.resolve_ring(doorbell, 8)?;
        let event_index = host.resolve_ring(event_index, 8)?;
        let both = doorbell.zip(event_index);
        Ok(both.map(|(doorbell, event_index)| Self::new(doorbell, event_index)))
    }

    pub(super) fn new(doorbell: E, event_index: E) -> Self {
        Self { doorbell, event_index, published: None }
    }

    /// Current doorbell value, if the memory is accessible.
    #[inline]
    pub(super) fn load(&self) -> Option<u32> {
        self.doorbell.load_u32(0).ok()
    }

    /// Publishes the event index before the queue goes idle. Returns a doorbell value that differs from
    /// `seen`, if there is one.
    pub(super) fn publish_event_index(&mut self, seen: u32) -> Option<u32> {
        if self.published != Some(seen) {
            self.published = Some(seen);
            if self.event_index.store_u32(0, seen).is_err() {
                return None;
            }
            // Pairs with the driver: it stores the doorbell, then loads the event index; this code stores
            // the event index, then loads the doorbell. With a full barrier on both sides, at least one
            // sees the other's store.
            fence(Ordering::SeqCst);
        }
        self.load().filter(|value| *value != seen)
    }
}
