//! A doorbell that is a word in memory, as the driver rings it.
//!
//! `crates/dma/tests/orders` has this file under a model checker, together with the controller's
//! half.

use base::{Doorbell, Memory, Segment};

use super::sync::{Ordering, fence};

/// A doorbell with a shadow.
#[derive(Debug)]
pub struct ShadowDoorbell<D, B> {
    dma: D,
    register: B,
    place: ShadowPlace,
    last: u32,
    /// How often the register was rung.
    writes: u64,
}

/// Where a shadow doorbell and its event index are: four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShadowPlace {
    /// Written by the driver.
    pub doorbell: Segment,
    /// Written by the controller.
    pub event_index: Segment,
}

impl<D: Memory, B: Doorbell> ShadowDoorbell<D, B> {
    pub(super) fn new(dma: D, register: B, place: ShadowPlace) -> Self {
        let mut bell = Self { dma, register, place, last: 0, writes: 0 };
        bell.restart();
        bell
    }

    /// Begins again at zero.
    pub(super) fn restart(&mut self) {
        self.last = 0;
        // Memory that has gone away is found out by the next ring, which then uses the register.
        let _ = self.dma.store_u32(self.place.doorbell, 0);
        let _ = self.dma.store_u32(self.place.event_index, 0);
    }

    pub(super) fn ring(&mut self, value: u32) {
        let old = core::mem::replace(&mut self.last, value);
        let stored = self.dma.store_u32(self.place.doorbell, value);
        // The controller stores its event index and then looks at the doorbell once more; we store
        // the doorbell and then look at the event index. With a full barrier on both sides, at least
        // one of the two sees the other.
        fence(Ordering::SeqCst);
        let event_index = self.dma.load_u32(self.place.event_index);
        let needed = match (stored, event_index) {
            (Ok(()), Ok(event_index)) => need_event(event_index, value, old),
            _ => true,
        };
        if needed {
            self.writes += 1;
            self.register.ring(value);
        }
    }
}

impl<D, B> ShadowDoorbell<D, B> {
    /// How often the register was rung.
    pub(super) fn writes(&self) -> u64 {
        self.writes
    }

    /// The same doorbell with what `wrap` makes of its register.
    pub(super) fn map<C>(self, wrap: &mut impl FnMut(B) -> C) -> ShadowDoorbell<D, C> {
        let Self { dma, register, place, last, writes } = self;
        ShadowDoorbell { dma, register: wrap(register), place, last, writes }
    }
}

/// Whether going from `old` to `new` passes `event_index` (Base 2.1, Annex B.5), counted in sixteen
/// bits.
#[expect(clippy::cast_possible_truncation, reason = "the formula counts in sixteen bits")]
pub(super) const fn need_event(event_index: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event_index) as u16 <= new.wrapping_sub(old) as u16
}
