//! Shadow doorbell: driver side of a doorbell in memory.
//!
//! `crates/dma/tests/orders` checks this file, together with the controller's half, in a model checker.

use tenmil_base::{Doorbell, Memory, Segment};

use super::sync::{Ordering, fence};

/// Doorbell with a shadow.
#[derive(Debug)]
pub struct ShadowDoorbell<D, B> {
    dma: D,
    register: B,
    place: ShadowSlot,
    last: u32,
    /// Number of writes to the register.
    writes: u64,
}

/// Addresses of a shadow doorbell and its event index: four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShadowSlot {
    /// Written by the driver.
    pub doorbell: Segment,
    /// Written by the controller.
    pub event_index: Segment,
}

impl<D: Memory, B: Doorbell> ShadowDoorbell<D, B> {
    pub(super) fn new(dma: D, register: B, place: ShadowSlot) -> Self {
        let mut bell = Self { dma, register, place, last: 0, writes: 0 };
        bell.reset_to_zero();
        bell
    }

    /// Restarts at zero.
    pub(super) fn reset_to_zero(&mut self) {
        self.last = 0;
        // If the memory is not accessible, the next ring detects it and uses the register.
        let _ = self.dma.store_u32(self.place.doorbell, 0);
        let _ = self.dma.store_u32(self.place.event_index, 0);
    }

    pub(super) fn ring(&mut self, value: u32) {
        let old = core::mem::replace(&mut self.last, value);
        let stored = self.dma.store_u32(self.place.doorbell, value);
        // Pairs with the controller: it stores its event index, then loads the doorbell; this code stores
        // the doorbell, then loads the event index. With a full barrier on both sides, at least one of
        // the two sees the other's store.
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
    /// Number of writes to the register.
    pub(super) fn register_write_count(&self) -> u64 {
        self.writes
    }

    /// Replaces the register by the result of `wrap`.
    pub(super) fn map<C>(self, wrap: &mut impl FnMut(B) -> C) -> ShadowDoorbell<D, C> {
        let Self { dma, register, place, last, writes } = self;
        ShadowDoorbell { dma, register: wrap(register), place, last, writes }
    }
}

/// Whether going from `old` to `new` passes `event_index` (Base 2.1, Annex B.5), computed in sixteen
/// bits.
#[expect(clippy::cast_possible_truncation, reason = "the formula counts in sixteen bits")]
pub(super) const fn need_event(event_index: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event_index) as u16 <= new.wrapping_sub(old) as u16
}
