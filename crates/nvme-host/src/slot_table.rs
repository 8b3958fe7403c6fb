//! Slot table: the commands in flight on one queue pair, in slots of sixteen bytes.
//!
//! ```text
//!   0           8       12                 16          four slots to a cache line
//!   | token     | tick  | key              |
//!               |       '-- CID 15:0 | in flight 16 | flags 23:17
//!               '-- time of submission; in a free slot: the next free one
//! ```
//!
//! The low bits of a command identifier (CID) are the index of its slot, so a completion finds its slot
//! without a search. The bits above are a lap counter that advances with each use of the slot: a
//! completion that arrives twice, or from before a reset, does not match the slot anymore, even if the
//! slot is in use again. One comparison of the key checks both.
//!
//! PRP lists are not part of the slot: they need 4 KiB of DMA memory each, and slots 4 KiB apart would
//! all map to the same set of the level-1 cache. The list of a slot is found by its index.

use tenmil_base::Instant;

/// Fixed-size table of the commands in flight. Nothing is allocated after construction.
#[derive(Debug)]
pub(crate) struct SlotTable {
    slots: Box<[Slot]>,
    /// Next free slot, the one freed last. [`NONE`] if there is none, or if the table is closed.
    free: u32,
    /// Mask of the index bits of a command identifier.
    index_mask: u16,
    /// Commands sent and commands ended since the table was created.
    sent: u64,
    ended: u64,
    /// Head of the free list while the table is closed.
    gated_free: Option<u32>,
}

/// One command in flight, or one link of the free list.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Slot {
    /// Caller's number for this command, returned unchanged.
    token: u64,
    /// Time of submission; see [`tick_of`]. In a free slot: the next free one.
    tick: u32,
    /// Identifier and flags of the command.
    key: u32,
}

const _: () = assert!(size_of::<Slot>() == 16, "four to a cache line");

/// Invalid completion: the controller has violated the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidCompletion {
    /// Its command identifier does not exist.
    UnknownIdentifier {
        /// Identifier from the controller.
        cid: u16,
    },
    /// Its command is not in flight: never sent, or already completed.
    NotInFlight {
        /// Identifier from the controller.
        cid: u16,
    },
    /// Its submission head covers commands that were not sent, or has moved backward.
    SubmissionHead {
        /// SQHD field from the controller.
        head: u16,
    },
}

/// Special handling of a command; zero for most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotFlags(u32);

impl SlotFlags {
    /// No flag.
    pub(crate) const NONE: Self = Self(0);
    /// The token belongs to the tracker of a split request.
    pub(crate) const CHILD: Self = Self(1 << 17);
    /// The command has an individual timeout.
    pub(crate) const TIMED: Self = Self(1 << 18);
    /// The command is past its deadline, and the controller object was notified.
    pub(crate) const OVERDUE: Self = Self(1 << 19);
    /// An Abort refers to its identifier.
    pub(crate) const NAMED: Self = Self(1 << 20);
    /// The command ends with an injected error.
    pub(crate) const INJECTED: Self = Self(1 << 21);

    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    #[must_use]
    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// State of a loop over completions, with the changing values in registers.
pub(crate) struct CompleteCursor<'a> {
    slots: &'a mut [Slot],
    free_before: &'a mut u32,
    ended: &'a mut u64,
    free: u32,
    index_mask: u32,
}

/// State of a loop that allocates slots, with the changing values in registers.
pub(crate) struct AllocCursor<'a> {
    slots: &'a mut [Slot],
    free_before: &'a mut u32,
    sent: &'a mut u64,
    free: u32,
}

/// Slot contents of an ended command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedCommand {
    pub(crate) token: u64,
    pub(crate) mark: SlotFlags,
}

const IN_FLIGHT: u32 = 1 << 16;
const CID: u32 = 0xffff;
const NONE: u32 = u32::MAX;

/// Converts a time to ticks of 2^16 ns, so that 32 bits last for three days. Differences are computed
/// modulo 2^32, so a wrap-around has no effect.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "only differences count")]
pub(crate) const fn tick_of(now: Instant) -> u32 {
    (now.ns >> 16) as u32
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half of a key is the identifier")]
const fn cid_of_key(key: u32) -> u16 {
    key as u16
}

impl SlotTable {
    /// Creates a table for `count` commands, all free.
    ///
    /// # Panics
    ///
    /// `count` is zero or 65 535. An index with all bits set is never used, so no identifier is ever
    /// FFFFh, which is reserved by the specification (Base 2.1 §4.1.1).
    pub(crate) fn new(count: u16) -> Self {
        assert!(count > 0 && count < u16::MAX, "{count} slots");
        let slots = (0..u32::from(count)).map(|index| Slot {
            token: 0,
            tick: if index + 1 < u32::from(count) { index + 1 } else { NONE },
            key: index,
        });
        Self {
            slots: slots.collect(),
            free: 0,
            index_mask: slot_mask(count),
            sent: 0,
            ended: 0,
            gated_free: None,
        }
    }

    /// Allocates a slot and returns the command identifier to send; `None` if there is no free slot or
    /// the table is closed.
    #[inline(always)]
    pub(crate) fn allocate(&mut self, token: u64, tick: u32, mark: SlotFlags) -> Option<u16> {
        let slot = self.slots.get_mut(self.free as usize)?;
        self.free = slot.tick;
        self.sent += 1;
        let key = slot.key | IN_FLIGHT | mark.0;
        *slot = Slot { token, tick, key };
        Some(cid_of_key(key))
    }

    /// Starts a loop over submissions.
    #[inline(always)]
    pub(crate) fn alloc_cursor(&mut self) -> AllocCursor<'_> {
        let Self { slots, free, sent, .. } = self;
        AllocCursor { slots, sent, free: *free, free_before: free }
    }

    /// Starts a loop over completions.
    #[inline(always)]
    pub(crate) fn complete_cursor(&mut self) -> CompleteCursor<'_> {
        let Self { slots, free, index_mask, ended, .. } = self;
        let index_mask = u32::from(*index_mask);
        CompleteCursor { slots, ended, index_mask, free: *free, free_before: free }
    }

    /// Ends a command and frees its slot, unless an Abort still refers to it.
    ///
    /// `cid` comes from the controller and is checked.
    pub(crate) fn complete(&mut self, cid: u16) -> Result<EndedCommand, InvalidCompletion> {
        let index = cid & self.index_mask;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(InvalidCompletion::UnknownIdentifier { cid });
        };
        let key = slot.key;
        if key & (IN_FLIGHT | CID) != IN_FLIGHT | u32::from(cid) {
            return Err(InvalidCompletion::NotInFlight { cid });
        }
        let ended = EndedCommand { token: slot.token, mark: SlotFlags(key & !(IN_FLIGHT | CID)) };
        self.ended += 1;
        if ended.mark.has(SlotFlags::NAMED) {
            slot.key = u32::from(cid) | SlotFlags::NAMED.0;
            return Ok(ended);
        }
        slot.key = u32::from(next_cid_of_slot(cid, self.index_mask));
        slot.tick = self.free;
        self.free = u32::from(index);
        Ok(ended)
    }

    /// Ends a command without flags, frees its slot and returns its token. `None` for everything else:
    /// see [`complete`](Self::complete).
    #[inline(always)]
    pub(crate) fn complete_simple(&mut self, cid: u16) -> Option<u64> {
        let mut cursor = self.complete_cursor();
        let token = cursor.complete_simple(u32::from(cid))?;
        cursor.finish(1);
        Some(token)
    }

    /// Slot index in a command identifier.
    #[inline]
    pub(crate) const fn slot_index(&self, cid: u16) -> usize {
        (cid & self.index_mask) as usize
    }

    /// Slot of the next command, whether the table is closed or not.
    #[inline]
    pub(crate) fn next_index(&self) -> Option<usize> {
        let index = self.gated_free.unwrap_or(self.free) as usize;
        (index < self.slots.len()).then_some(index)
    }

    /// Slots of the next two commands.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        let first = self.next_index()?;
        let second = self.slots[first].tick as usize;
        (second < self.slots.len()).then_some([first, second])
    }

    /// Number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Commands that the controller has not completed.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most as many as there are slots")]
    pub(crate) fn in_flight(&self) -> u32 {
        (self.sent - self.ended) as u32
    }

    /// Total number of commands sent.
    pub(crate) fn sent_count(&self) -> u64 {
        self.sent
    }

    /// Total number of commands ended, with any result.
    pub(crate) fn ended_count(&self) -> u64 {
        self.ended
    }

    /// Makes [`allocate`](Self::allocate) find no free slot; costs `allocate` nothing while the table is open.
    pub(crate) fn close(&mut self) {
        if self.gated_free.is_none() {
            self.gated_free = Some(core::mem::replace(&mut self.free, NONE));
        }
    }

    /// Undoes [`close`](Self::close). Slots may be freed only while the table is open.
    pub(crate) fn open(&mut self) {
        if let Some(free) = self.gated_free.take() {
            self.free = free;
        }
    }

    /// Whether the table is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.gated_free.is_some()
    }

    /// Identifier of the command in slot `index`, if one is in flight.
    pub(crate) fn in_flight_at(&self, index: usize) -> Option<u16> {
        let key = self.slots.get(index)?.key;
        (key & IN_FLIGHT != 0).then(|| cid_of_key(key))
    }

    /// Flags of `cid`, and its age in ticks.
    pub(crate) fn age(&self, cid: u16, tick: u32) -> (SlotFlags, u32) {
        let slot = &self.slots[self.slot_index(cid)];
        (SlotFlags(slot.key & !(IN_FLIGHT | CID)), tick.wrapping_sub(slot.tick))
    }

    /// Starts a second timeout for `cid`, which has exceeded its first and is being aborted.
    pub(crate) fn mark_overdue(&mut self, cid: u16, tick: u32) {
        let slot = &mut self.slots[usize::from(cid & self.index_mask)];
        slot.key |= SlotFlags::OVERDUE.0 | SlotFlags::NAMED.0;
        slot.tick = tick;
    }

    /// Records that no Abort refers to `cid` anymore: if the command has ended meanwhile, its slot is
    /// freed.
    pub(crate) fn note_abort_completed(&mut self, cid: u16) {
        let index = cid & self.index_mask;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return };
        if slot.key & (CID | SlotFlags::NAMED.0) != u32::from(cid) | SlotFlags::NAMED.0 {
            return;
        }
        slot.key &= !SlotFlags::NAMED.0;
        if slot.key & IN_FLIGHT == 0 {
            let was_closed = self.is_closed();
            self.open();
            let slot = &mut self.slots[usize::from(index)];
            slot.key = u32::from(next_cid_of_slot(cid, self.index_mask));
            slot.tick = self.free;
            self.free = u32::from(index);
            if was_closed {
                self.close();
            }
        }
    }

    /// Drops all references by Aborts, for a controller reset.
    pub(crate) fn forget_aborts(&mut self) {
        for index in 0..self.slots.len() {
            let key = self.slots[index].key;
            if key & SlotFlags::NAMED.0 != 0 {
                self.note_abort_completed(cid_of_key(key));
            }
        }
    }
}

impl AllocCursor<'_> {
    /// Like [`SlotTable::allocate`], for a command without flags. The identifier is the low half of the
    /// result; the high half is zero.
    #[inline(always)]
    pub(crate) fn reserve_simple(&mut self, token: u64, tick: u32) -> Option<u32> {
        let slot = self.slots.get_mut(self.free as usize)?;
        self.free = slot.tick;
        let cid = slot.key;
        *slot = Slot { token, tick, key: cid | IN_FLIGHT };
        Some(cid)
    }

    /// Ends the loop, in which `count` slots were allocated.
    #[inline(always)]
    pub(crate) fn finish(self, count: usize) {
        *self.free_before = self.free;
        *self.sent += count as u64;
    }
}

impl CompleteCursor<'_> {
    /// Ends a command without flags, frees its slot and returns its token. `None` for everything else:
    /// see [`SlotTable::complete`]. The identifier is the low half of `dword3`.
    #[inline(always)]
    pub(crate) fn complete_simple(&mut self, dword3: u32) -> Option<u64> {
        let index = dword3 & self.index_mask;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.key != IN_FLIGHT | dword3 & CID {
            return None;
        }
        // Same as `next_cid_of_slot`.
        slot.key = dword3.wrapping_add(self.index_mask + 1) & CID;
        slot.tick = self.free;
        self.free = index;
        Some(slot.token)
    }

    /// Ends the loop, in which `count` commands ended.
    #[inline(always)]
    pub(crate) fn finish(self, count: usize) {
        *self.free_before = self.free;
        *self.ended += count as u64;
    }
}

/// The bits of a command identifier that are its slot, on a queue with `count` slots.
pub const fn slot_mask(count: u16) -> u16 {
    u16::MAX >> count.leading_zeros()
}

/// Next identifier of the slot of `cid`.
#[inline]
const fn next_cid_of_slot(cid: u16, index_mask: u16) -> u16 {
    // An index of sixteen bits leaves no lap counter: the sum wraps to `cid` itself.
    cid.wrapping_add(index_mask).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{InvalidCompletion, SlotFlags, SlotTable, tick_of};

    fn allocate(table: &mut SlotTable, token: u64) -> u16 {
        table.allocate(token, 0, SlotFlags::NONE).unwrap()
    }

    /// Fills the table and empties it, in every order: every slot must be allocated exactly once each
    /// time, and a full table must reject an allocation rather than reuse a slot.
    #[test]
    fn each_slot_is_allocated_at_most_once() {
        let mut table = SlotTable::new(4);
        let orders = (0..4_usize.pow(4)).map(|n| [n % 4, n / 4 % 4, n / 16 % 4, n / 64]);
        for order in orders.filter(|order| (0..4).all(|index| order.contains(&index))) {
            let cids: Vec<u16> = (0..4).map(|token| allocate(&mut table, token)).collect();
            assert_eq!(table.allocate(99, 0, SlotFlags::NONE), None);
            assert_eq!(table.in_flight(), 4);
            for (token, index) in order.into_iter().enumerate() {
                let expected = u64::try_from(index).unwrap();
                assert_eq!(table.complete(cids[index]).unwrap().token, expected, "{token}");
            }
            let mut indexes: Vec<usize> = cids.iter().map(|cid| table.slot_index(*cid)).collect();
            indexes.sort_unstable();
            assert_eq!((table.in_flight(), indexes), (0, vec![0, 1, 2, 3]));
        }
    }

    #[test]
    fn cid_not_in_flight_is_rejected() {
        for count in [1, 2, 3, 4, 127, 128, 255] {
            let mut table = SlotTable::new(count);
            let out = allocate(&mut table, 7);
            for cid in (0..=u16::MAX).filter(|cid| *cid != out) {
                let refused = table.complete(cid).unwrap_err();
                let expected = match table.slot_index(cid) < usize::from(count) {
                    true => InvalidCompletion::NotInFlight { cid },
                    false => InvalidCompletion::UnknownIdentifier { cid },
                };
                assert_eq!(refused, expected);
            }
            assert_eq!(table.in_flight(), 1);
            assert_eq!(table.complete(out).unwrap().token, 7);
            assert_eq!(
                table.complete(out),
                Err(InvalidCompletion::NotInFlight { cid: out }),
                "twice"
            );
        }
    }

    #[test]
    fn late_duplicate_cid_does_not_match_the_next_command_in_its_slot() {
        let mut table = SlotTable::new(127);
        let mut seen = Vec::new();
        for token in 0..512 {
            let cid = allocate(&mut table, token);
            assert!(!seen.contains(&cid), "an identifier comes back only after 512 uses");
            for old in &seen {
                assert_eq!(table.complete(*old), Err(InvalidCompletion::NotInFlight { cid: *old }));
            }
            assert_eq!(table.complete(cid).unwrap().token, token);
            seen.push(cid);
        }
        assert_eq!(allocate(&mut table, 0), seen[0]);
    }

    #[test]
    fn reserved_cid_is_never_used() {
        for count in [1, 3, 127, 128, 4095, 32_768, 65_534] {
            let mut table = SlotTable::new(count);
            for _ in 0..2 * 65_536 / u32::from(count) + 2 {
                let cids: Vec<u16> = (0..count).map(|_| allocate(&mut table, 0)).collect();
                assert!(!cids.contains(&u16::MAX));
                cids.into_iter().rev().for_each(|cid| assert!(table.complete(cid).is_ok()));
            }
        }
    }

    #[test]
    fn closed_table_allocates_nothing_and_reopens_unchanged() {
        let mut table = SlotTable::new(2);
        let first = allocate(&mut table, 1);
        table.close();
        table.close();
        assert_eq!(table.allocate(2, 0, SlotFlags::NONE), None);
        assert!(table.next_index().is_some(), "closed is not full");
        assert_eq!(table.next_two_indexes(), None);
        table.open();
        table.complete(first).unwrap();
        let next = table.next_two_indexes().unwrap();
        let taken = [allocate(&mut table, 3), allocate(&mut table, 4)];
        assert_eq!(taken.map(|cid| table.slot_index(cid)), next);
        assert_eq!(table.next_index(), None);
    }

    #[test]
    fn cid_named_by_an_abort_is_not_reused_before_the_abort_completes() {
        for closed in [false, true] {
            let mut table = SlotTable::new(1);
            let cid = allocate(&mut table, 1);
            table.mark_overdue(cid, 0);
            assert!(table.complete(cid).unwrap().mark.has(SlotFlags::OVERDUE));
            assert_eq!(table.allocate(2, 0, SlotFlags::NONE), None);
            assert_eq!(table.complete(cid), Err(InvalidCompletion::NotInFlight { cid }));

            if closed {
                table.close();
            }
            table.note_abort_completed(cid ^ 2);
            assert_eq!(table.next_index(), None, "that was another one's abort");
            table.note_abort_completed(cid);
            assert_eq!(table.allocate(3, 0, SlotFlags::NONE).is_some(), !closed);
            table.open();
            assert_eq!(table.in_flight(), u32::from(!closed));
        }
    }

    #[test]
    fn command_in_flight_after_its_abort_completes_normally() {
        let mut table = SlotTable::new(1);
        let cid = allocate(&mut table, 1);
        table.mark_overdue(cid, 100);
        assert_eq!(table.age(cid, 130).1, 30);
        table.note_abort_completed(cid);
        assert_eq!(table.in_flight_at(0), Some(cid));
        assert_eq!(table.complete(cid).unwrap().mark, SlotFlags::OVERDUE);
        assert!(table.next_index().is_some());
    }

    #[test]
    fn reset_clears_all_abort_references() {
        let mut table = SlotTable::new(2);
        let [ended, flying] = [allocate(&mut table, 1), allocate(&mut table, 2)];
        table.mark_overdue(ended, 0);
        table.mark_overdue(flying, 0);
        table.complete(ended).unwrap();
        table.forget_aborts();
        assert_eq!(table.next_index(), Some(table.slot_index(ended)));
        table.complete(flying).unwrap();
        assert!(table.next_two_indexes().is_some());
    }

    #[test]
    fn ages_are_correct_across_tick_wrap() {
        let mut table = SlotTable::new(1);
        let sent = Instant { ns: (1 << 48) - 1 };
        let cid = table.allocate(0, tick_of(sent), SlotFlags::NONE).unwrap();
        let later = Instant { ns: sent.ns + (5 << 16) };
        assert_eq!(table.age(cid, tick_of(later)).1, 5);
    }
}
