//! Slot table: the commands that an executor has begun and not finished.
//!
//! ```text
//!   0        8    10        12       14       15      16        18       20        24
//!   | lba    | id | channel | stream | opcode | state | context | blocks | started |
//!            |<------------ one word: the key ------->|<- one word: the details -->|
//! ```
//!
//! The index of a slot is the token of its requests. `id` and `stream` are the command's tag.

use super::completion_counter::{CountReleases, StartTime};

/// Slot table.
#[derive(Debug)]
pub(crate) struct SlotTable {
    slots: Box<[Slot]>,
    /// First free slot: the one freed last, which is still in the cache. A free slot stores the index of
    /// the next free one in `context`.
    free: u16,
    allocated_count: u32,
}

/// One command.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Slot {
    /// First block, for the error log.
    pub(super) lba: u64,
    /// Fields of the fast path, loaded and stored as one word.
    key: u64,
    /// Context, number of blocks and start time, loaded and stored as one word.
    details: u64,
}

const _: () = assert!(size_of::<Slot>() == 24, "as drawn");

/// State of a loop that allocates slots, with the changing values in registers.
pub(super) struct AllocCursor<'a> {
    slots: &'a mut [Slot],
    free_before: &'a mut u16,
    taken_before: &'a mut u32,
    free: u16,
}

/// State of a loop that frees slots of [`SlotState::Fast`] commands.
pub(crate) struct ReleaseCursor<'a, C> {
    slots: &'a mut [Slot],
    free_before: &'a mut u16,
    taken_before: &'a mut u32,
    free: u16,
    counting: C,
}

/// End of the free list: no table is that long.
const NONE: u16 = u16::MAX;

const CHANNEL: u32 = 16;
const STREAM: u32 = 32;
const OPCODE: u32 = 48;
const STATE: u32 = 56;
const BLOCKS: u32 = 16;
const STARTED: u32 = 32;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SlotState {
    Free,
    /// The command has one request, whose completion completes it.
    Fast,
    /// The command has a context.
    Slow,
    /// First command of a fused pair whose second has not arrived.
    AwaitingSecond,
}

impl Slot {
    /// A command without a context.
    #[inline]
    pub(super) const fn new(lba: u64, id: u16, channel: u16, stream: u16, opcode: u8) -> Self {
        let key = id as u64
            | (channel as u64) << CHANNEL
            | (stream as u64) << STREAM
            | (opcode as u64) << OPCODE;
        Self { lba, key, details: 0 }
    }

    /// Sets the number of blocks, 0's based, and the start time, which are for statistics.
    #[inline]
    pub(super) const fn with_blocks_and_start(mut self, blocks: u16, started: StartTime) -> Self {
        self.details |= (blocks as u64) << BLOCKS | (started.0 as u64) << STARTED;
        self
    }

    /// [`SlotState::Slow`]: index of the command context. [`SlotState::Fast`]: block size as a power of
    /// two if the request has the flag [`IN_PLACE`](tenmil_base::RequestFlags::IN_PLACE), else 0.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "sixteen bits are the part")]
    pub(super) const fn context(&self) -> u16 {
        self.details as u16
    }

    #[inline]
    pub(super) const fn set_context(&mut self, context: u16) {
        self.details = self.details & !0xffff | context as u64;
    }

    /// Word with the number of blocks and the start time.
    #[inline]
    pub(super) const fn details(&self) -> u64 {
        self.details
    }

    /// Number of blocks in [`details`](Self::details).
    #[inline]
    pub(super) const fn blocks_of(details: u64) -> u32 {
        (details >> BLOCKS & 0xffff) as u32 + 1
    }

    /// Start time in [`details`](Self::details).
    #[inline]
    pub(super) const fn start_of(details: u64) -> StartTime {
        StartTime((details >> STARTED) as u32)
    }

    /// Sets the state.
    #[inline]
    pub(super) const fn with_state(mut self, state: SlotState) -> Self {
        self.set_state(state);
        self
    }

    /// Sets the stream.
    #[inline]
    pub(super) const fn with_stream(mut self, stream: u16) -> Self {
        self.set_stream(stream);
        self
    }

    /// Copies this template, whose identifier is zero, with a first block and an identifier.
    #[inline]
    pub(super) const fn with_lba_and_id(mut self, lba: u64, id: u16) -> Self {
        self.lba = lba;
        self.key |= id as u64;
        self
    }

    /// Identifier of the command within its stream.
    #[inline]
    pub(super) const fn id(&self) -> u16 {
        self.key_field(0)
    }

    /// Channel index.
    #[inline]
    pub(super) const fn channel(&self) -> u16 {
        self.key_field(CHANNEL)
    }

    /// Stream of the command.
    #[inline]
    pub(super) const fn stream(&self) -> u16 {
        self.key_field(STREAM)
    }

    pub(super) const fn opcode(&self) -> u8 {
        self.key_field(OPCODE).to_le_bytes()[0]
    }

    /// Whether this is the command that the slot held then, whatever has become of it.
    pub(super) fn is_same_command(&self, then: &Self) -> bool {
        let of = |slot: &Self| (slot.lba, slot.id(), slot.opcode(), slot.channel());
        of(self) == of(then)
    }

    #[inline]
    pub(super) const fn state(&self) -> SlotState {
        match self.key >> STATE {
            0 => SlotState::Free,
            1 => SlotState::Fast,
            2 => SlotState::Slow,
            _ => SlotState::AwaitingSecond,
        }
    }

    #[inline]
    pub(super) const fn set_state(&mut self, state: SlotState) {
        self.key = self.key & !(0xff << STATE) | (state as u64) << STATE;
    }

    pub(super) const fn set_channel(&mut self, channel: u16) {
        self.key = self.key & !(0xffff << CHANNEL) | (channel as u64) << CHANNEL;
    }

    pub(super) const fn set_stream(&mut self, stream: u16) {
        self.key = self.key & !(0xffff << STREAM) | (stream as u64) << STREAM;
    }

    /// Frees the slot and puts it at the head of the free list.
    #[inline]
    const fn add_to_free_list(&mut self, first: &mut u16, index: u16) {
        self.key = 0;
        self.details = *first as u64;
        *first = index;
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "sixteen bits are the part")]
    const fn key_field(&self, at: u32) -> u16 {
        (self.key >> at) as u16
    }
}

impl SlotTable {
    /// Creates a table for `count` commands. This is the only allocation.
    pub(super) fn new(count: u16) -> Self {
        let slots = (0..count).map(|index| {
            let next = if index + 1 < count { index + 1 } else { NONE };
            Slot { details: next.into(), ..Slot::new(0, 0, 0, 0, 0) }
        });
        Self { slots: slots.collect(), free: 0, allocated_count: 0 }
    }

    /// Number of slots.
    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Number of slots in use.
    #[inline]
    pub(super) fn allocated_count(&self) -> usize {
        self.allocated_count as usize
    }

    /// Number of free slots.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.slots.len() - self.allocated_count as usize
    }

    /// Allocates a slot for a command.
    #[inline]
    pub(super) fn allocate(&mut self, command: Slot) -> Option<u16> {
        let index = self.free;
        let slot = self.slots.get_mut(usize::from(index))?;
        self.free = slot.context();
        self.allocated_count += 1;
        *slot = command;
        Some(index)
    }

    /// Starts a loop that allocates many slots.
    #[inline(always)]
    pub(super) fn allocate_cursor(&mut self) -> AllocCursor<'_> {
        let Self { slots, free, allocated_count: taken } = self;
        AllocCursor { slots, free: *free, free_before: free, taken_before: taken }
    }

    /// Starts a loop that frees many slots.
    #[inline(always)]
    pub(crate) fn release_cursor<C: CountReleases>(&mut self, counting: C) -> ReleaseCursor<'_, C> {
        let Self { slots, free, allocated_count: taken } = self;
        ReleaseCursor { slots, free: *free, free_before: free, taken_before: taken, counting }
    }

    /// Command with this token, if there is one.
    #[inline]
    pub(super) fn get(&self, token: u64) -> Option<&Slot> {
        let slot = self.slots.get(usize::try_from(token).ok()?)?;
        (slot.state() != SlotState::Free).then_some(slot)
    }

    pub(super) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// Frees a slot and returns its command. Freeing a free slot has no effect.
    pub(super) fn release(&mut self, index: u16) -> Slot {
        let slot = &mut self.slots[usize::from(index)];
        let command = *slot;
        if command.state() != SlotState::Free {
            slot.add_to_free_list(&mut self.free, index);
            self.allocated_count -= 1;
        }
        command
    }

    /// All commands in the table, with their slot indices.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, &Slot)> {
        (0..).zip(self.slots.iter()).filter(|(_, slot)| slot.state() != SlotState::Free)
    }
}

impl AllocCursor<'_> {
    /// Allocates a slot, like [`SlotTable::allocate`].
    #[inline(always)]
    pub(super) fn allocate(&mut self, command: Slot) -> Option<u16> {
        let index = self.free;
        let slot = self.slots.get_mut(usize::from(index))?;
        self.free = slot.context();
        *slot = command;
        Some(index)
    }

    /// Ends the loop, in which `count` slots were allocated.
    #[inline(always)]
    pub(super) fn finish(self, count: u32) {
        *self.free_before = self.free;
        *self.taken_before += count;
    }
}

impl<C: CountReleases> ReleaseCursor<'_, C> {
    /// Frees the slot with this token if it is [`SlotState::Fast`]. Returns the command's identifier.
    #[inline(always)]
    pub(crate) fn release(&mut self, token: u64) -> Option<u16> {
        let slot = self.slots.get_mut(usize::try_from(token).ok()?)?;
        let kind = slot.key_field(OPCODE);
        if kind >> (STATE - OPCODE) != SlotState::Fast as u16 {
            return None;
        }
        self.counting.count(kind, slot.details);
        let id = slot.id();
        #[expect(clippy::cast_possible_truncation, reason = "an index of the table")]
        slot.add_to_free_list(&mut self.free, token as u16);
        Some(id)
    }

    /// Ends the loop, in which `count` slots were freed.
    #[inline(always)]
    pub(crate) fn finish(self, count: u32) {
        *self.free_before = self.free;
        *self.taken_before -= count;
        self.counting.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::super::completion_counter::{NotCounted, StartTime};
    use super::{Slot, SlotState, SlotTable};

    #[test]
    fn full_slot_table_allocates_nothing_and_indexes_are_unique() {
        let mut slots = SlotTable::new(2);
        let command = |id| Slot::new(0, id, 0, 0, 2).with_state(SlotState::Fast);
        let (first, second) =
            (slots.allocate(command(7)).unwrap(), slots.allocate(command(8)).unwrap());
        assert_ne!(first, second);
        assert_eq!(slots.allocate(command(9)), None);
        assert_eq!((slots.allocated_count(), slots.free_count()), (2, 0));
        assert_eq!(slots.get(u64::from(second)).unwrap().id(), 8);
        assert_eq!(slots.release(first).id(), 7);
        assert!(slots.get(u64::from(first)).is_none(), "a free slot holds no command");
        assert!(slots.get(99).is_none() && slots.get(u64::MAX).is_none());
        assert_eq!(slots.iter().map(|(_, slot)| slot.id()).collect::<Vec<_>>(), [8]);
        assert_eq!(slots.allocate(command(9)), Some(first), "the one used last comes first");
        let mut releasing = slots.release_cursor(NotCounted);
        assert_eq!(releasing.release(second.into()), Some(8));
        assert_eq!(releasing.release(second.into()), None, "once");
        assert_eq!(releasing.release(u64::MAX), None);
        releasing.finish(1);
        assert_eq!((slots.allocated_count(), slots.free_count()), (1, 1));
        let mut taking = slots.allocate_cursor();
        assert_eq!(taking.allocate(command(3)), Some(second));
        assert_eq!(taking.allocate(command(4)), None, "full");
        taking.finish(1);
        assert_eq!((slots.allocated_count(), slots.free_count()), (2, 0));
    }

    #[test]
    fn slot_fields_round_trip_independently() {
        let mut slot =
            Slot::new(u64::MAX, 0xabcd, 0x1234, 0xf00f, 0x9e).with_state(SlotState::Slow);
        let parts =
            |slot: &Slot| (slot.id(), slot.channel(), slot.stream(), slot.opcode(), slot.state());
        assert_eq!(parts(&slot), (0xabcd, 0x1234, 0xf00f, 0x9e, SlotState::Slow));
        slot.set_channel(0xffff);
        slot.set_stream(1);
        slot.set_state(SlotState::AwaitingSecond);
        assert_eq!(parts(&slot), (0xabcd, 0xffff, 1, 0x9e, SlotState::AwaitingSecond));
        slot.set_context(0xbeef);
        let slot = slot.with_blocks_and_start(0x7fff, StartTime(0xfedc_ba98));
        assert_eq!(slot.context(), 0xbeef);
        assert_eq!(Slot::blocks_of(slot.details()), 0x8000);
        assert_eq!(Slot::start_of(slot.details()), StartTime(0xfedc_ba98));
        assert_eq!(parts(&slot), (0xabcd, 0xffff, 1, 0x9e, SlotState::AwaitingSecond));
    }
}
