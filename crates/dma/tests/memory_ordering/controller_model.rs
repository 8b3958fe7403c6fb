//! Controller side of the models.

pub(super) mod sync {
    pub(crate) use super::super::model_atomics::{AtomicU32, AtomicU64, Ordering};

    pub(crate) fn fence(order: Ordering) {
        super::super::model_atomics::fence("controller", order);
    }
}

#[path = "../../src/barrier.rs"]
#[allow(dead_code, reason = "a model needs a part of it")]
#[allow(unreachable_pub, reason = "the crate exports it, the models do not")]
#[allow(clippy::duplicate_mod, reason = "that is the point of it")]
mod barrier;
#[path = "../../src/completion_order.rs"]
#[allow(dead_code, reason = "this is the half that stores")]
#[allow(clippy::duplicate_mod, reason = "that is the point of it")]
pub(super) mod order;
#[path = "../../../nvme-controller/src/queue/shadow_doorbell.rs"]
#[allow(dead_code, reason = "a model needs a part of it")]
mod shadow_doorbell;

use tenmil_base::RingEntries;

/// Shadow doorbell as read by the controller.
pub(super) struct ControllerShadowDoorbell<E>(shadow_doorbell::ShadowDoorbell<E>);

impl<E: RingEntries> ControllerShadowDoorbell<E> {
    pub(super) fn new(doorbell: E, event_index: E) -> Self {
        Self(shadow_doorbell::ShadowDoorbell::new(doorbell, event_index))
    }

    pub(super) fn load_tail(&self) -> u32 {
        self.0.load().unwrap()
    }

    pub(super) fn arm(&mut self, seen: u32) -> Option<u32> {
        self.0.publish_event_index(seen)
    }
}
