//! The commands that a queue has taken and not yet answered: a dense table.
//!
//! ```text
//!   0        8     10        12     14           16       17     18        24
//!   | lba    | cid | channel | area | submission | opcode | state | spare  |
//! ```
//!
//! The index of a slot is the token of its requests. Every slot that is taken holds a place in the
//! completion queue too, so a command that was taken can always be answered.

/// The table.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Box<[Slot]>,
    /// Free slots, the one used last on top: its line is still in the cache.
    free: Vec<u16>,
}

/// One command.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Slot {
    /// First block, for the error log.
    pub(super) lba: u64,
    /// Command identifier.
    pub(super) cid: u16,
    /// Which channel it goes to.
    pub(super) channel: u16,
    /// Which work area it has. Means something only while [`State::Slow`].
    pub(super) area: u16,
    /// From which of the queue's submission queues it came.
    pub(super) submission: u16,
    pub(super) opcode: u8,
    pub(super) state: State,
}

const _: () = assert!(size_of::<Slot>() == 24, "as drawn");

/// What a command in a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Free,
    /// One request, and its answer ends the command.
    Fast,
    /// It has a work area.
    Slow,
    /// It is the first half of a fused pair, and the second has not come.
    Parked,
}

impl Slots {
    /// A table for `count` commands. Allocates here and never again.
    pub(super) fn new(count: u16) -> Self {
        let slot = Slot {
            lba: 0,
            cid: 0,
            channel: 0,
            area: 0,
            submission: 0,
            opcode: 0,
            state: State::Free,
        };
        Self { slots: vec![slot; usize::from(count)].into(), free: (0..count).rev().collect() }
    }

    /// How many commands are in the table.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// How many more would fit.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Puts a command into the table.
    #[inline]
    pub(super) fn take(&mut self, slot: Slot) -> Option<u16> {
        let index = self.free.pop()?;
        self.slots[usize::from(index)] = slot;
        Some(index)
    }

    /// The command under this number, if there is one.
    #[inline]
    pub(super) fn get(&self, token: u64) -> Option<&Slot> {
        let slot = self.slots.get(usize::try_from(token).ok()?)?;
        (slot.state != State::Free).then_some(slot)
    }

    pub(super) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// Takes a command out of the table.
    #[inline]
    pub(super) fn release(&mut self, index: u16) -> Slot {
        let slot = &mut self.slots[usize::from(index)];
        debug_assert!(slot.state != State::Free, "a command ends once");
        let taken = *slot;
        slot.state = State::Free;
        self.free.push(index);
        taken
    }

    /// Every command in the table, with its number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, &Slot)> {
        (0..).zip(self.slots.iter()).filter(|(_, slot)| slot.state != State::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::{Slot, Slots, State};

    #[test]
    fn a_full_table_takes_nothing_and_a_number_is_out_once() {
        let mut slots = Slots::new(2);
        let command = |cid| Slot {
            lba: 0,
            cid,
            channel: 0,
            area: 0,
            submission: 0,
            opcode: 2,
            state: State::Fast,
        };
        let (first, second) = (slots.take(command(7)).unwrap(), slots.take(command(8)).unwrap());
        assert_ne!(first, second);
        assert_eq!(slots.take(command(9)), None);
        assert_eq!((slots.taken(), slots.room()), (2, 0));
        assert_eq!(slots.get(u64::from(second)).unwrap().cid, 8);
        assert_eq!(slots.release(first).cid, 7);
        assert!(slots.get(u64::from(first)).is_none(), "a free slot holds no command");
        assert!(slots.get(99).is_none() && slots.get(u64::MAX).is_none());
        assert_eq!(slots.iter().map(|(_, slot)| slot.cid).collect::<Vec<_>>(), [8]);
        assert_eq!(slots.take(command(9)), Some(first), "the one used last comes first");
    }
}
