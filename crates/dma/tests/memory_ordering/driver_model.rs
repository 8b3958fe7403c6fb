//! Driver side of the models.

pub(super) mod sync {
    pub(crate) use super::super::model_atomics::{AtomicU64, Ordering};

    pub(crate) fn fence(order: Ordering) {
        super::super::model_atomics::fence("driver", order);
    }
}

#[path = "../../src/barrier.rs"]
#[allow(dead_code, reason = "a model needs a part of it")]
#[allow(unreachable_pub, reason = "the crate exports it, the models do not")]
pub(super) mod barrier;
#[path = "../../src/completion_order.rs"]
#[allow(dead_code, reason = "this is the half that loads")]
pub(super) mod order;
#[path = "../../../nvme-host/src/queue_pair/shadow_doorbell.rs"]
#[allow(dead_code, reason = "a model needs a part of it")]
#[allow(unreachable_pub, reason = "the crate exports it, the models do not")]
mod shadow;

use tenmil_base::{Doorbell, Memory, Segment};

/// Shadow doorbell, initially zero.
pub(super) struct DriverShadowDoorbell<D, B>(shadow::ShadowDoorbell<D, B>);

impl<D: Memory, B: Doorbell> DriverShadowDoorbell<D, B> {
    pub(super) fn new(memory: D, register: B, doorbell: Segment, event_index: Segment) -> Self {
        let place = shadow::ShadowSlot { doorbell, event_index };
        Self(shadow::ShadowDoorbell::new(memory, register, place))
    }

    pub(super) fn ring_doorbell(&mut self, value: u32) {
        self.0.ring(value);
    }
}
