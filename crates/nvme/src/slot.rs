//! The commands in flight on one queue pair: a dense table of sixteen-byte slots.
//!
//! ```text
//!   0           8       12                 16          four slots to a cache line
//!   | token     | tick  | key              |
//!               |       '-- CID 15:0 | in flight 16 | why it is special 23:17
//!               '-- when it was sent; of a free slot: the next free one
//! ```
//!
//! The low bits of a command identifier (CID) are the index of its slot, so a completion finds its
//! slot without a search. The bits above are a lap counter that moves on with each use of the slot:
//! a completion that arrives twice, or from before a reset, then does not fit the slot any more,
//! even if the slot is in use again. One comparison of the key checks both.
//!
//! PRP lists do not live here: they need 4 KiB of DMA memory each, and slots 4 KiB apart would all
//! fall into the same set of the level-1 cache. The list of a slot is found by its index.

use base::Instant;

/// A fixed-size table of the commands in flight. Nothing is allocated after construction.
#[derive(Debug)]
pub(crate) struct SlotTable {
    slots: Box<[Slot]>,
    /// The slot that is used next: last freed, first used. [`NONE`] if there is none, or if the
    /// table is closed.
    free: u32,
    /// All ones in the bits of a command identifier that are an index.
    index_mask: u16,
    /// Commands sent and commands ended since the table was made.
    sent: u64,
    ended: u64,
    /// Where the free list begins while the table is closed.
    behind_the_gate: Option<u32>,
}

/// One command in flight, or one link of the free list.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Slot {
    /// The caller's own number for this command, returned unread.
    token: u64,
    /// When it was sent; see [`tick_of`]. Of a free slot: the next free one.
    tick: u32,
    /// What identifies the command, and what is special about it.
    key: u32,
}

const _: () = assert!(size_of::<Slot>() == 16, "four to a cache line");

/// A completion that cannot be: the controller has broken its contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nonsense {
    /// It names a command identifier that does not exist.
    UnknownIdentifier {
        /// The identifier as the controller gave it.
        cid: u16,
    },
    /// It names a command that is not in flight: never sent, or completed already.
    NotInFlight {
        /// The identifier as the controller gave it.
        cid: u16,
    },
    /// It says that commands were fetched which were not sent, or takes back that they were.
    SubmissionHead {
        /// The SQHD field as the controller gave it.
        head: u16,
    },
}

/// What is special about a command; zero for most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(u32);

impl Mark {
    /// Nothing.
    pub(crate) const NONE: Self = Self(0);
    /// Its token is for whoever split a request into several commands.
    pub(crate) const CHILD: Self = Self(1 << 17);
    /// It has a time limit of its own.
    pub(crate) const TIMED: Self = Self(1 << 18);
    /// It has missed its deadline, and the controller was told.
    pub(crate) const OVERDUE: Self = Self(1 << 19);
    /// An Abort names its identifier.
    pub(crate) const NAMED: Self = Self(1 << 20);
    /// It is to end with an injected error.
    pub(crate) const INJECTED: Self = Self(1 << 21);

    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A table during a loop over completions.
pub(crate) struct Completing<'a> {
    slots: &'a mut [Slot],
    free_before: &'a mut u32,
    ended: &'a mut u64,
    free: u32,
    index_mask: u32,
}

/// A table during a loop that takes slots.
pub(crate) struct Taking<'a> {
    slots: &'a mut [Slot],
    free_before: &'a mut u32,
    sent: &'a mut u64,
    free: u32,
}

/// What the table knew about a command that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) token: u64,
    pub(crate) mark: Mark,
}

const IN_FLIGHT: u32 = 1 << 16;
const CID: u32 = 0xffff;
const NONE: u32 = u32::MAX;

/// Time in slots counts in steps of 2^16 ns, so that 32 bits last for three days. Differences are
/// taken modulo 2^32, so nothing happens when they wrap.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "only differences count")]
pub(crate) const fn tick_of(now: Instant) -> u32 {
    (now.ns >> 16) as u32
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half of a key is the identifier")]
const fn cid_in(key: u32) -> u16 {
    key as u16
}

impl SlotTable {
    /// A table for `count` commands, all free.
    ///
    /// # Panics
    ///
    /// If `count` is zero or 65 535. An index with all bits set is never used, so no identifier is
    /// ever FFFFh, which the specification keeps for itself (Base 2.1 §4.1.1).
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
            index_mask: u16::MAX >> count.leading_zeros(),
            sent: 0,
            ended: 0,
            behind_the_gate: None,
        }
    }

    /// Takes a free slot and returns the command identifier to send; `None` if there is no free
    /// slot or the table is closed.
    #[inline(always)]
    pub(crate) fn take(&mut self, token: u64, tick: u32, mark: Mark) -> Option<u16> {
        let slot = self.slots.get_mut(self.free as usize)?;
        self.free = slot.tick;
        self.sent += 1;
        let key = slot.key | IN_FLIGHT | mark.0;
        *slot = Slot { token, tick, key };
        Some(cid_in(key))
    }

    /// The table with what changes on the way of a submission in registers, for a loop over many.
    #[inline(always)]
    pub(crate) fn take_many(&mut self) -> Taking<'_> {
        let Self { slots, free, sent, .. } = self;
        Taking { slots, sent, free: *free, free_before: free }
    }

    /// The table with what changes on the way of a completion in registers, for a loop over many.
    #[inline(always)]
    pub(crate) fn complete_many(&mut self) -> Completing<'_> {
        let Self { slots, free, index_mask, ended, .. } = self;
        let index_mask = u32::from(*index_mask);
        Completing { slots, ended, index_mask, free: *free, free_before: free }
    }

    /// Ends a command and frees its slot, unless an Abort still names it.
    ///
    /// `cid` was written by the controller, so it is checked and not believed.
    pub(crate) fn complete(&mut self, cid: u16) -> Result<Ended, Nonsense> {
        let index = cid & self.index_mask;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(Nonsense::UnknownIdentifier { cid });
        };
        let key = slot.key;
        if key & (IN_FLIGHT | CID) != IN_FLIGHT | u32::from(cid) {
            return Err(Nonsense::NotInFlight { cid });
        }
        let ended = Ended { token: slot.token, mark: Mark(key & !(IN_FLIGHT | CID)) };
        self.ended += 1;
        if ended.mark.has(Mark::NAMED) {
            slot.key = u32::from(cid) | Mark::NAMED.0;
            return Ok(ended);
        }
        slot.key = u32::from(next_lap(cid, self.index_mask));
        slot.tick = self.free;
        self.free = u32::from(index);
        Ok(ended)
    }

    /// The index in a command identifier.
    #[inline]
    pub(crate) const fn index(&self, cid: u16) -> usize {
        (cid & self.index_mask) as usize
    }

    /// The slot that the next command gets, whether the table is closed or not.
    #[inline]
    pub(crate) fn next_index(&self) -> Option<usize> {
        let index = self.behind_the_gate.unwrap_or(self.free) as usize;
        (index < self.slots.len()).then_some(index)
    }

    /// The slots that the next two commands get.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        let first = self.next_index()?;
        let second = self.slots[first].tick as usize;
        (second < self.slots.len()).then_some([first, second])
    }

    /// How many slots there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many commands the controller still owes us.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most as many as there are slots")]
    pub(crate) fn in_flight(&self) -> u32 {
        (self.sent - self.ended) as u32
    }

    /// How many commands were ever sent.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// How many commands have ended, one way or another.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Makes [`take`](Self::take) find nothing, at no cost to it while the table is open.
    pub(crate) fn close(&mut self) {
        if self.behind_the_gate.is_none() {
            self.behind_the_gate = Some(core::mem::replace(&mut self.free, NONE));
        }
    }

    /// Undoes [`close`](Self::close). Slots may be freed only while the table is open.
    pub(crate) fn open(&mut self) {
        if let Some(free) = self.behind_the_gate.take() {
            self.free = free;
        }
    }

    /// Whether [`close`](Self::close) is in force.
    pub(crate) fn is_closed(&self) -> bool {
        self.behind_the_gate.is_some()
    }

    /// The identifier of the command in slot `index`, if there is one in flight.
    pub(crate) fn in_flight_at(&self, index: usize) -> Option<u16> {
        let key = self.slots.get(index)?.key;
        (key & IN_FLIGHT != 0).then(|| cid_in(key))
    }

    /// What is special about `cid`, and how many ticks it has been in flight.
    pub(crate) fn age(&self, cid: u16, tick: u32) -> (Mark, u32) {
        let slot = &self.slots[self.index(cid)];
        (Mark(slot.key & !(IN_FLIGHT | CID)), tick.wrapping_sub(slot.tick))
    }

    /// Begins a second time limit for `cid`, which has exceeded its first and is being aborted.
    pub(crate) fn mark_overdue(&mut self, cid: u16, tick: u32) {
        let slot = &mut self.slots[usize::from(cid & self.index_mask)];
        slot.key |= Mark::OVERDUE.0 | Mark::NAMED.0;
        slot.tick = tick;
    }

    /// No Abort names `cid` any more: if the command has ended meanwhile, its slot is free.
    pub(crate) fn abort_ended(&mut self, cid: u16) {
        let index = cid & self.index_mask;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return };
        if slot.key & (CID | Mark::NAMED.0) != u32::from(cid) | Mark::NAMED.0 {
            return;
        }
        slot.key &= !Mark::NAMED.0;
        if slot.key & IN_FLIGHT == 0 {
            let was_closed = self.is_closed();
            self.open();
            let slot = &mut self.slots[usize::from(index)];
            slot.key = u32::from(next_lap(cid, self.index_mask));
            slot.tick = self.free;
            self.free = u32::from(index);
            if was_closed {
                self.close();
            }
        }
    }

    /// Forgets that Aborts name any command, as a reset of the controller does.
    pub(crate) fn forget_aborts(&mut self) {
        for index in 0..self.slots.len() {
            let key = self.slots[index].key;
            if key & Mark::NAMED.0 != 0 {
                self.abort_ended(cid_in(key));
            }
        }
    }
}

impl Taking<'_> {
    /// As [`SlotTable::take`], for a command of which nothing is special. The identifier is the low
    /// half of what is returned; the high half is zero.
    #[inline(always)]
    pub(crate) fn take_plain(&mut self, token: u64, tick: u32) -> Option<u32> {
        let slot = self.slots.get_mut(self.free as usize)?;
        self.free = slot.tick;
        let cid = slot.key;
        *slot = Slot { token, tick, key: cid | IN_FLIGHT };
        Some(cid)
    }

    /// The end of the loop, in which `count` slots were taken.
    #[inline(always)]
    pub(crate) fn finish(self, count: usize) {
        *self.free_before = self.free;
        *self.sent += count as u64;
    }
}

impl Completing<'_> {
    /// Ends a command of which nothing is special, frees its slot and returns its token. `None` for
    /// everything else: see [`SlotTable::complete`]. The identifier is the low half of `dword3`.
    #[inline(always)]
    pub(crate) fn complete_plain(&mut self, dword3: u32) -> Option<u64> {
        let index = dword3 & self.index_mask;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.key != IN_FLIGHT | dword3 & CID {
            return None;
        }
        // As `next_lap` does it.
        slot.key = dword3.wrapping_add(self.index_mask + 1) & CID;
        slot.tick = self.free;
        self.free = index;
        Some(slot.token)
    }

    /// Loads the slot of `cid`, so that it is in the cache when its completion is worked on.
    #[inline]
    pub(crate) fn touch(&self, dword3: u32) {
        let slot = self.slots.get((dword3 & self.index_mask) as usize);
        core::hint::black_box(slot.map(|slot| slot.key));
    }

    /// The end of the loop, in which `count` commands ended.
    #[inline(always)]
    pub(crate) fn finish(self, count: usize) {
        *self.free_before = self.free;
        *self.ended += count as u64;
    }
}

/// The identifier that the slot of `cid` has next.
#[inline]
const fn next_lap(cid: u16, index_mask: u16) -> u16 {
    // An index that fills all sixteen bits leaves no lap counter: the sum wraps to `cid` itself.
    cid.wrapping_add(index_mask).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use base::Instant;

    use super::{Mark, Nonsense, SlotTable, tick_of};

    fn take(table: &mut SlotTable, token: u64) -> u16 {
        table.take(token, 0, Mark::NONE).unwrap()
    }

    /// Fills the table and empties it, in every order there is: every slot must be handed out
    /// exactly once each time, and a full table must refuse rather than reuse.
    #[test]
    fn each_slot_is_out_at_most_once() {
        let mut table = SlotTable::new(4);
        let orders = (0..4_usize.pow(4)).map(|n| [n % 4, n / 4 % 4, n / 16 % 4, n / 64]);
        for order in orders.filter(|order| (0..4).all(|index| order.contains(&index))) {
            let cids: Vec<u16> = (0..4).map(|token| take(&mut table, token)).collect();
            assert_eq!(table.take(99, 0, Mark::NONE), None);
            assert_eq!(table.in_flight(), 4);
            for (token, index) in order.into_iter().enumerate() {
                let expected = u64::try_from(index).unwrap();
                assert_eq!(table.complete(cids[index]).unwrap().token, expected, "{token}");
            }
            let mut indexes: Vec<usize> = cids.iter().map(|cid| table.index(*cid)).collect();
            indexes.sort_unstable();
            assert_eq!((table.in_flight(), indexes), (0, vec![0, 1, 2, 3]));
        }
    }

    #[test]
    fn every_identifier_that_is_not_in_flight_is_refused() {
        for count in [1, 2, 3, 4, 127, 128, 255] {
            let mut table = SlotTable::new(count);
            let out = take(&mut table, 7);
            for cid in (0..=u16::MAX).filter(|cid| *cid != out) {
                let refused = table.complete(cid).unwrap_err();
                let expected = match table.index(cid) < usize::from(count) {
                    true => Nonsense::NotInFlight { cid },
                    false => Nonsense::UnknownIdentifier { cid },
                };
                assert_eq!(refused, expected);
            }
            assert_eq!(table.in_flight(), 1);
            assert_eq!(table.complete(out).unwrap().token, 7);
            assert_eq!(table.complete(out), Err(Nonsense::NotInFlight { cid: out }), "twice");
        }
    }

    #[test]
    fn a_late_duplicate_does_not_end_the_next_command_in_its_slot() {
        let mut table = SlotTable::new(127);
        let mut seen = Vec::new();
        for token in 0..512 {
            let cid = take(&mut table, token);
            assert!(!seen.contains(&cid), "an identifier comes back only after 512 uses");
            for old in &seen {
                assert_eq!(table.complete(*old), Err(Nonsense::NotInFlight { cid: *old }));
            }
            assert_eq!(table.complete(cid).unwrap().token, token);
            seen.push(cid);
        }
        assert_eq!(take(&mut table, 0), seen[0]);
    }

    #[test]
    fn the_identifier_that_is_kept_for_the_specification_is_never_used() {
        for count in [1, 3, 127, 128, 4095, 32_768, 65_534] {
            let mut table = SlotTable::new(count);
            for _ in 0..2 * 65_536 / u32::from(count) + 2 {
                let cids: Vec<u16> = (0..count).map(|_| take(&mut table, 0)).collect();
                assert!(!cids.contains(&u16::MAX));
                cids.into_iter().rev().for_each(|cid| assert!(table.complete(cid).is_ok()));
            }
        }
    }

    #[test]
    fn a_closed_table_hands_out_nothing_and_opens_as_it_was() {
        let mut table = SlotTable::new(2);
        let first = take(&mut table, 1);
        table.close();
        table.close();
        assert_eq!(table.take(2, 0, Mark::NONE), None);
        assert!(table.next_index().is_some(), "closed is not full");
        assert_eq!(table.next_two_indexes(), None);
        table.open();
        table.complete(first).unwrap();
        let next = table.next_two_indexes().unwrap();
        let taken = [take(&mut table, 3), take(&mut table, 4)];
        assert_eq!(taken.map(|cid| table.index(cid)), next);
        assert_eq!(table.next_index(), None);
    }

    #[test]
    fn an_identifier_that_an_abort_names_is_not_used_again_before_the_abort_has_ended() {
        for closed in [false, true] {
            let mut table = SlotTable::new(1);
            let cid = take(&mut table, 1);
            table.mark_overdue(cid, 0);
            assert!(table.complete(cid).unwrap().mark.has(Mark::OVERDUE));
            assert_eq!(table.take(2, 0, Mark::NONE), None);
            assert_eq!(table.complete(cid), Err(Nonsense::NotInFlight { cid }));

            if closed {
                table.close();
            }
            table.abort_ended(cid ^ 2);
            assert_eq!(table.next_index(), None, "that was another one's abort");
            table.abort_ended(cid);
            assert_eq!(table.take(3, 0, Mark::NONE).is_some(), !closed);
            table.open();
            assert_eq!(table.in_flight(), u32::from(!closed));
        }
    }

    #[test]
    fn a_command_still_in_flight_after_its_abort_ends_like_any_other() {
        let mut table = SlotTable::new(1);
        let cid = take(&mut table, 1);
        table.mark_overdue(cid, 100);
        assert_eq!(table.age(cid, 130).1, 30);
        table.abort_ended(cid);
        assert_eq!(table.in_flight_at(0), Some(cid));
        assert_eq!(table.complete(cid).unwrap().mark, Mark::OVERDUE);
        assert!(table.next_index().is_some());
    }

    #[test]
    fn a_reset_forgets_all_aborts() {
        let mut table = SlotTable::new(2);
        let [ended, flying] = [take(&mut table, 1), take(&mut table, 2)];
        table.mark_overdue(ended, 0);
        table.mark_overdue(flying, 0);
        table.complete(ended).unwrap();
        table.forget_aborts();
        assert_eq!(table.next_index(), Some(table.index(ended)));
        table.complete(flying).unwrap();
        assert!(table.next_two_indexes().is_some());
    }

    #[test]
    fn ages_are_right_across_the_wrap_of_the_clock() {
        let mut table = SlotTable::new(1);
        let sent = Instant { ns: (1 << 48) - 1 };
        let cid = table.take(0, tick_of(sent), Mark::NONE).unwrap();
        let later = Instant { ns: sent.ns + (5 << 16) };
        assert_eq!(table.age(cid, tick_of(later)).1, 5);
    }
}
