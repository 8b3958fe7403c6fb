//! A queue's doorbell: a register, or a word in memory that spares most writes to the register.
//!
//! With shadow doorbells (Doorbell Buffer Config, Base 2.1 §5.2.5) the driver stores each new value
//! in memory, and rings the register only if it passes the value that the controller has left in
//! the event index beside it. An emulated controller that is awake reads the word by itself; one
//! that goes to sleep sets the event index first.

use base::{Dma, Doorbell, Segment};

pub use super::shadow::{ShadowDoorbell, ShadowPlace};

/// One doorbell of a queue pair.
#[derive(Debug)]
pub enum QueueDoorbell<D, B> {
    /// The register itself.
    Register(B),
    /// A shadow in memory, and the register for when the controller sleeps.
    Shadow(ShadowDoorbell<D, B>),
}

impl ShadowPlace {
    /// The place of a queue's doorbell in the two buffers, which are laid out as the doorbell
    /// registers are (Base 2.1 §3.1.2, §5.2.5). `stride` is CAP.DSTRD. `None` if it lies past their
    /// end.
    pub fn of(
        shadows: Segment,
        event_indexes: Segment,
        queue_id: u16,
        side: Side,
        stride: u32,
    ) -> Option<Self> {
        let number = 2 * u32::from(queue_id) + side as u32;
        let offset = number.checked_mul(4_u32.checked_shl(stride)?)?;
        let place = |buffer: Segment| buffer.slice(offset, 4);
        Some(Self { doorbell: place(shadows)?, event_index: place(event_indexes)? })
    }
}

/// Which of a queue pair's two doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Side {
    /// The submission queue's tail.
    Submission = 0,
    /// The completion queue's head.
    Completion = 1,
}

impl<D: Dma, B: Doorbell> QueueDoorbell<D, B> {
    /// A doorbell that is rung through memory at `place`, and at `register` only if need be. It begins
    /// at zero, whatever a queue of the same number has left there: a controller that finds that in
    /// its new queue takes what lies in the ring for commands.
    pub fn shadow(dma: &D, register: B, place: ShadowPlace) -> Self {
        Self::Shadow(ShadowDoorbell::new(dma.clone(), register, place))
    }

    #[inline]
    pub(crate) fn ring(&mut self, value: u32) {
        match self {
            Self::Register(register) => register.ring(value),
            Self::Shadow(shadow) => shadow.ring(value),
        }
    }

    /// Begins again at zero, for a queue that is created anew.
    pub(crate) fn restart(&mut self) {
        if let Self::Shadow(shadow) = self {
            shadow.restart();
        }
    }
}

impl<D, B> QueueDoorbell<D, B> {
    /// How many of `rings` were written to the register.
    pub(crate) fn writes(&self, rings: u64) -> u64 {
        match self {
            Self::Register(_) => rings,
            Self::Shadow(shadow) => shadow.writes(),
        }
    }

    /// The same doorbell with what `wrap` makes of its register.
    pub(crate) fn map<C>(self, wrap: &mut impl FnMut(B) -> C) -> QueueDoorbell<D, C> {
        match self {
            Self::Register(register) => QueueDoorbell::Register(wrap(register)),
            Self::Shadow(shadow) => QueueDoorbell::Shadow(shadow.map(wrap)),
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Memory, RegionId, Segment};

    use super::super::shadow::need_event;
    use super::{QueueDoorbell, ShadowPlace, Side};
    use crate::fake::{FakeDma, FakeDoorbell};

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
    fn a_shadow_lies_where_its_register_would() {
        let buffer = Segment { region: RegionId(1), offset: 8192, len_bytes: 4096 };
        let place =
            |queue_id, side, stride| ShadowPlace::of(buffer, buffer, queue_id, side, stride);
        let offset = |queue_id, side, stride| {
            place(queue_id, side, stride).map(|place| place.doorbell.offset - 8192)
        };
        assert_eq!(offset(1, Side::Submission, 0), Some(8));
        assert_eq!(offset(1, Side::Completion, 0), Some(12));
        assert_eq!(offset(3, Side::Completion, 2), Some(7 * 16));
        assert_eq!(offset(511, Side::Completion, 0), Some(4092));
        assert_eq!(offset(512, Side::Submission, 0), None, "past the end of the buffer");
        assert_eq!(offset(1, Side::Submission, 40), None);
    }

    #[test]
    fn a_controller_that_is_awake_is_told_by_memory_alone() {
        let dma = FakeDma::new(2);
        let doorbell = Segment { region: RegionId(0), offset: 64, len_bytes: 4 };
        let event_index = Segment { offset: 128, ..doorbell };
        let register = FakeDoorbell::default();
        let place = ShadowPlace { doorbell, event_index };
        let mut bell = QueueDoorbell::shadow(&dma, register.clone(), place);

        dma.store_u32(event_index, 0).unwrap();
        bell.ring(1);
        assert_eq!((register.value(), register.rings()), (1, 1), "it slept at zero");
        dma.store_u32(event_index, 40).unwrap();
        bell.ring(2);
        bell.ring(39);
        assert_eq!((register.rings(), dma.load_u32(doorbell)), (1, Ok(39)));
        bell.ring(41);
        assert_eq!((register.value(), register.rings()), (41, 2), "past the event index");

        bell.restart();
        assert_eq!((dma.load_u32(doorbell), dma.load_u32(event_index)), (Ok(0), Ok(0)));
        dma.store_u32(event_index, 50).unwrap();
        bell.ring(1);
        assert_eq!(register.rings(), 2, "from zero to one passes nothing");
        dma.store_u32(event_index, 1).unwrap();
        bell.ring(2);
        assert_eq!(register.rings(), 3);
        assert_eq!(bell.writes(7), 3, "of seven rings");
        assert_eq!(bell.map(&mut |register| register).writes(7), 3);
        assert_eq!(QueueDoorbell::<FakeDma, _>::Register(register).writes(7), 7, "each of them");
    }

    #[test]
    fn what_an_earlier_queue_of_the_same_number_has_left_is_not_found_by_the_next() {
        let dma = FakeDma::new(2);
        let doorbell = Segment { region: RegionId(0), offset: 64, len_bytes: 4 };
        let event_index = Segment { offset: 128, ..doorbell };
        let place = ShadowPlace { doorbell, event_index };
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
        let place = ShadowPlace { doorbell: nowhere, event_index: nowhere };
        let mut bell = QueueDoorbell::shadow(&FakeDma::new(1), register.clone(), place);
        bell.ring(1);
        bell.ring(2);
        assert_eq!((register.value(), register.rings()), (2, 2));
    }
}
