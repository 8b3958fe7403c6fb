//! Doorbell of a queue: a register, or a shadow doorbell that saves most register writes.
//!
//! With shadow doorbells (Doorbell Buffer Config, Base 2.1 §5.2.5), the driver stores each new value in
//! memory, and writes the register only if the value passes the event index that the controller has
//! stored beside it. An active emulated controller reads the memory by itself; before it goes idle, it
//! sets the event index.

use tenmil_base::{Dma, Doorbell, Segment};

pub use super::shadow_doorbell::{ShadowDoorbell, ShadowSlot};

/// One doorbell of a queue pair.
#[derive(Debug)]
pub enum QueueDoorbell<D, B> {
    /// Register.
    Register(B),
    /// Shadow doorbell in memory, with the register for an idle controller.
    Shadow(ShadowDoorbell<D, B>),
}

impl ShadowSlot {
    /// Location of a queue's doorbell in the two buffers, which have the layout of the doorbell registers
    /// (Base 2.1 §3.1.2, §5.2.5). `stride` is CAP.DSTRD. `None` if it is past their end.
    pub fn of(
        shadows: Segment,
        event_indexes: Segment,
        queue_id: u16,
        side: DoorbellSide,
        stride: u32,
    ) -> Option<Self> {
        let number = 2 * u32::from(queue_id) + side as u32;
        let offset = number.checked_mul(4_u32.checked_shl(stride)?)?;
        let place = |buffer: Segment| buffer.slice(offset, 4);
        Some(Self { doorbell: place(shadows)?, event_index: place(event_indexes)? })
    }
}

/// Doorbell of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DoorbellSide {
    /// Tail of the submission queue.
    Submission = 0,
    /// Head of the completion queue.
    Completion = 1,
}

impl<D: Dma, B: Doorbell> QueueDoorbell<D, B> {
    /// Creates a shadow doorbell at `place` with its `register`. It starts at zero, whatever a previous
    /// queue with the same identifier has left there: a controller that finds an old value for its new
    /// queue takes the ring's contents for commands.
    pub fn shadow(dma: &D, register: B, place: ShadowSlot) -> Self {
        Self::Shadow(ShadowDoorbell::new(dma.clone(), register, place))
    }

    #[inline]
    pub(crate) fn ring(&mut self, value: u32) {
        match self {
            Self::Register(register) => register.ring(value),
            Self::Shadow(shadow) => shadow.ring(value),
        }
    }

    /// Restarts at zero, for a queue that is created anew.
    pub(crate) fn reset_to_zero(&mut self) {
        if let Self::Shadow(shadow) = self {
            shadow.reset_to_zero();
        }
    }
}

impl<D, B> QueueDoorbell<D, B> {
    /// Number of `rings` that were written to the register.
    pub(crate) fn register_write_count(&self, rings: u64) -> u64 {
        match self {
            Self::Register(_) => rings,
            Self::Shadow(shadow) => shadow.register_write_count(),
        }
    }

    /// Replaces the register by the result of `wrap`.
    pub(crate) fn map<C>(self, wrap: &mut impl FnMut(B) -> C) -> QueueDoorbell<D, C> {
        match self {
            Self::Register(register) => QueueDoorbell::Register(wrap(register)),
            Self::Shadow(shadow) => QueueDoorbell::Shadow(shadow.map(wrap)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Memory, RegionId, Segment};

    use super::super::shadow_doorbell::need_event;
    use super::{DoorbellSide, QueueDoorbell, ShadowSlot};
    use crate::fake_device::{FakeDma, FakeDoorbell};

    #[test]
    fn the_register_is_rung_just_when_the_event_index_is_passed() {
        for old in 0..32_u32 {
            for step in 1..16 {
                let new = old + step;
                for event_index in 0..64 {
                    let passed = (old..=new).contains(&event_index);
                    assert_eq!(need_event(event_index, new, old), passed);
                    let far = 0xffe0;
                    let (event, new, old) = (event_index + far, new + far, old + far);
                    assert_eq!(need_event(event & 0xffff, new & 0xffff, old & 0xffff), passed);
                }
            }
        }
    }

    #[test]
    fn shadow_doorbell_has_the_offset_of_its_register() {
        let buffer = Segment { region: RegionId(1), offset: 8192, len_bytes: 4096 };
        let place = |queue_id, side, stride| ShadowSlot::of(buffer, buffer, queue_id, side, stride);
        let offset = |queue_id, side, stride| {
            place(queue_id, side, stride).map(|place| place.doorbell.offset - 8192)
        };
        assert_eq!(offset(1, DoorbellSide::Submission, 0), Some(8));
        assert_eq!(offset(1, DoorbellSide::Completion, 0), Some(12));
        assert_eq!(offset(3, DoorbellSide::Completion, 2), Some(7 * 16));
        assert_eq!(offset(511, DoorbellSide::Completion, 0), Some(4092));
        assert_eq!(offset(512, DoorbellSide::Submission, 0), None, "past the end of the buffer");
        assert_eq!(offset(1, DoorbellSide::Submission, 40), None);
    }

    #[test]
    fn polling_controller_is_notified_by_shadow_doorbell_alone() {
        let dma = FakeDma::new(2);
        let doorbell = Segment { region: RegionId(0), offset: 64, len_bytes: 4 };
        let event_index = Segment { offset: 128, ..doorbell };
        let register = FakeDoorbell::default();
        let place = ShadowSlot { doorbell, event_index };
        let mut bell = QueueDoorbell::shadow(&dma, register.clone(), place);

        dma.store_u32(event_index, 0).unwrap();
        bell.ring(1);
        assert_eq!((register.value(), register.write_count()), (1, 1), "it slept at zero");
        dma.store_u32(event_index, 40).unwrap();
        bell.ring(2);
        bell.ring(39);
        assert_eq!((register.write_count(), dma.load_u32(doorbell)), (1, Ok(39)));
        bell.ring(41);
        assert_eq!((register.value(), register.write_count()), (41, 2), "past the event index");

        bell.reset_to_zero();
        assert_eq!((dma.load_u32(doorbell), dma.load_u32(event_index)), (Ok(0), Ok(0)));
        dma.store_u32(event_index, 50).unwrap();
        bell.ring(1);
        assert_eq!(register.write_count(), 2, "from zero to one passes nothing");
        dma.store_u32(event_index, 1).unwrap();
        bell.ring(2);
        assert_eq!(register.write_count(), 3);
        assert_eq!(bell.register_write_count(7), 3, "of seven rings");
        assert_eq!(bell.map(&mut |register| register).register_write_count(7), 3);
        assert_eq!(
            QueueDoorbell::<FakeDma, _>::Register(register).register_write_count(7),
            7,
            "each of them"
        );
    }

    #[test]
    fn shadow_doorbell_of_a_reused_queue_id_is_cleared() {
        let dma = FakeDma::new(2);
        let doorbell = Segment { region: RegionId(0), offset: 64, len_bytes: 4 };
        let event_index = Segment { offset: 128, ..doorbell };
        let place = ShadowSlot { doorbell, event_index };
        let register = FakeDoorbell::default();
        let mut bell = QueueDoorbell::shadow(&dma, register.clone(), place);
        bell.ring(127);
        dma.store_u32(event_index, 127).unwrap();
        drop(bell);
        let _next = QueueDoorbell::shadow(&dma, register, place);
        assert_eq!((dma.load_u32(doorbell), dma.load_u32(event_index)), (Ok(0), Ok(0)));
    }

    #[test]
    fn without_its_memory_a_shadow_doorbell_rings_the_register() {
        let nowhere = Segment { region: RegionId(9), offset: 0, len_bytes: 4 };
        let register = FakeDoorbell::default();
        let place = ShadowSlot { doorbell: nowhere, event_index: nowhere };
        let mut bell = QueueDoorbell::shadow(&FakeDma::new(1), register.clone(), place);
        bell.ring(1);
        bell.ring(2);
        assert_eq!((register.value(), register.write_count()), (2, 2));
    }
}
