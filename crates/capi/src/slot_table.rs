//! I/Os in flight of a queue: the token of the program, and the memory that each uses.
//!
//! ```text
//!   slots   | token | memory |   written by the thread of the queue, read by a thread that frees memory
//!   free    numbers of free slots, a stack; the first `free_count` are valid
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// I/Os in flight, by the token of their request.
pub(crate) struct SlotTable {
    slots: Arc<[Slot]>,
    free: Box<[u32]>,
    free_count: usize,
    /// Memory of I/Os with several segments, by slot.
    several: Box<[Vec<MemoryIndex>]>,
    counters: Arc<[AtomicU32]>,
}

/// I/O in flight. Only the thread of the queue writes it.
struct Slot {
    token: AtomicU64,
    /// Index of its memory, or [`FREE`], [`NO_MEMORY`] or [`SEVERAL`].
    memory: AtomicU32,
}

const _: () = assert!(size_of::<Slot>() == 16);

/// The memory that the I/Os in flight of a queue use, as other threads see it.
#[derive(Clone)]
pub(crate) struct MemoryInFlight {
    slots: Arc<[Slot]>,
    /// Number of segments in flight by index of their memory, of I/Os with several.
    counters: Arc<[AtomicU32]>,
}

/// Index of memory: of a page of the buffers, or of a piece of registered memory.
pub(crate) type MemoryIndex = u32;

/// The slot is free. Greater than every index.
const FREE: MemoryIndex = u32::MAX;
/// The I/O has no memory.
pub(crate) const NO_MEMORY: MemoryIndex = u32::MAX - 1;
/// The memory is that of each of its segments.
const SEVERAL: MemoryIndex = u32::MAX - 2;

impl SlotTable {
    /// Creates free slots, for memory of `memory_count` indices.
    pub(crate) fn new(depth: usize, memory_count: usize) -> Self {
        let count = u32::try_from(depth).unwrap_or(u32::MAX);
        let slot = |_| Slot { token: AtomicU64::new(0), memory: AtomicU32::new(FREE) };
        Self {
            slots: (0..count).map(slot).collect(),
            free: (0..count).rev().collect(),
            free_count: depth,
            several: vec![Vec::new(); depth].into_boxed_slice(),
            counters: (0..memory_count).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// What other threads see of it.
    pub(crate) fn memory_in_flight(&self) -> MemoryInFlight {
        MemoryInFlight { slots: Arc::clone(&self.slots), counters: Arc::clone(&self.counters) }
    }

    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free_count
    }

    /// Calls `fill` with the slots that are used next, in order, until it returns None or no slot is free.
    /// Takes a slot for each token and memory index that it returned. Returns their number.
    #[inline(always)]
    pub(crate) fn take_each(
        &mut self,
        mut fill: impl FnMut(u32) -> Option<(u64, MemoryIndex)>,
    ) -> usize {
        let Self { slots, free, free_count, .. } = self;
        let mut count = 0;
        for number in free[..*free_count].iter().rev() {
            let Some((token, memory)) = fill(*number) else { break };
            slots[*number as usize].start(token, memory);
            count += 1;
        }
        *free_count -= count;
        count
    }

    /// Takes a slot for an I/O without memory or with one piece. The caller has checked that one is free.
    pub(crate) fn take(&mut self, token: u64, memory: MemoryIndex) -> u32 {
        let Some(number) = self.free[..self.free_count].last().copied() else {
            unreachable!("the caller has checked it")
        };
        self.slots[number as usize].start(token, memory);
        self.free_count -= 1;
        number
    }

    /// Takes a slot for an I/O with several segments, whose memory is in `indices`.
    pub(crate) fn take_several(
        &mut self,
        token: u64,
        indices: impl Iterator<Item = MemoryIndex>,
    ) -> u32 {
        let number = self.take(token, SEVERAL);
        let list = &mut self.several[number as usize];
        list.clear();
        list.extend(indices);
        list.iter().for_each(|index| add_to(&self.counters[*index as usize], 1));
        number
    }

    /// Releases the slots of requests that have ended, by their tokens, and calls `ended` with the token of the
    /// program of each.
    ///
    /// # Panics
    ///
    /// If an I/O is not in flight: a channel completes every request once.
    #[inline(always)]
    pub(crate) fn release_each(
        &mut self,
        tokens: impl ExactSizeIterator<Item = u64>,
        mut ended: impl FnMut(u64),
    ) {
        let Self { slots, free, free_count, several, counters } = self;
        let count = tokens.len();
        let freed = &mut free[*free_count..][..count];
        for (number, free) in tokens.map(number_of).zip(freed) {
            let slot = &slots[number as usize];
            let memory = slot.memory.load(Ordering::Relaxed);
            if memory >= SEVERAL {
                release_uncommon(memory, &several[number as usize], counters);
            }
            slot.memory.store(FREE, Ordering::Relaxed);
            *free = number;
            ended(slot.token.load(Ordering::Relaxed));
        }
        *free_count += count;
    }
}

impl Slot {
    #[inline]
    fn start(&self, token: u64, memory: MemoryIndex) {
        self.token.store(token, Ordering::Relaxed);
        self.memory.store(memory, Ordering::Relaxed);
    }
}

impl MemoryInFlight {
    /// Number of I/Os in flight with memory of these indices. Called by any thread: exact if the program has
    /// ordered its submissions before the call, as it must before it frees the memory.
    pub(crate) fn count(&self, first: MemoryIndex, count: u32) -> usize {
        let range = first..first + count;
        let is_used = |slot: &&Slot| range.contains(&slot.memory.load(Ordering::Relaxed));
        let of_segments = &self.counters[first as usize..][..count as usize];
        let of_segments = of_segments.iter().map(|one| one.load(Ordering::Relaxed) as usize);
        self.slots.iter().filter(is_used).count() + of_segments.sum::<usize>()
    }

    /// Whether the queue has been closed, so that nothing else refers to its slots.
    pub(crate) fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.slots) == 1
    }
}

/// What is rare at the end of an I/O: no memory, or several segments.
#[cold]
fn release_uncommon(memory: MemoryIndex, several: &[MemoryIndex], counters: &[AtomicU32]) {
    assert_ne!(memory, FREE, "one completion for a request");
    if memory == SEVERAL {
        several.iter().for_each(|index| add_to(&counters[*index as usize], u32::MAX));
    }
}

/// Number of the slot of a request.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "tokens of requests are numbers of slots")]
fn number_of(token: u64) -> u32 {
    token as u32
}

/// Adds to a counter, modulo 2^32. A load and a store are enough: there is no other writer.
fn add_to(counter: &AtomicU32, change: u32) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(change), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::{NO_MEMORY, SlotTable};

    fn release(table: &mut SlotTable, number: u32) -> u64 {
        let mut found = 0;
        table.release_each(std::iter::once(number.into()), |token| found = token);
        found
    }

    #[test]
    fn memory_is_in_flight_until_the_slot_is_released() {
        let mut table = SlotTable::new(4, 8);
        let memory = table.memory_in_flight();
        let one = table.take(100, 3);
        let none = table.take(101, NO_MEMORY);
        let several = table.take_several(102, [3, 5, 3].into_iter());
        assert_eq!((memory.count(3, 1), memory.count(4, 4), memory.count(0, 3)), (3, 1, 0));
        assert_eq!(table.free_count(), 1);
        for (number, token) in [(several, 102), (none, 101), (one, 100)] {
            assert_eq!(release(&mut table, number), token);
        }
        assert_eq!((memory.count(0, 8), table.free_count(), table.depth()), (0, 4, 4));
        assert!(!memory.is_abandoned());
        drop(table);
        assert!(memory.is_abandoned());
    }

    #[test]
    fn slots_are_taken_until_the_first_refusal_and_reused_in_order() {
        let mut table = SlotTable::new(4, 1);
        let mut seen = Vec::new();
        let mut take_two = |table: &mut SlotTable| {
            seen.clear();
            table.take_each(|number| {
                seen.push(number);
                (seen.len() <= 2).then_some((7, 0))
            });
            seen.clone()
        };
        assert_eq!(take_two(&mut table), [0, 1, 2], "the third is refused");
        assert_eq!(take_two(&mut table), [2, 3], "no more are free");
        assert!(take_two(&mut table).is_empty(), "none is");
        table.release_each([1, 0].into_iter(), |token| assert_eq!(token, 7));
        assert_eq!(take_two(&mut table), [0, 1]);
    }

    #[test]
    #[should_panic(expected = "one completion for a request")]
    fn second_release_panics() {
        let mut table = SlotTable::new(2, 1);
        table.take(2, 0);
        let number = table.take(1, 0);
        release(&mut table, number);
        release(&mut table, number);
    }
}
