//! The requests of a channel: a table in which an index is a tag. It has room for as many as were ever
//! in flight together, since most channels never have many.
//!
//! ```text
//!   slots    | 0 | 1 | 2 | 3 | 4 | …        what each tag stands for; 32 bytes, two to a line
//!   free     | 3 | 0 | 4 |                  a stack: the tags at its top were used last
//! ```

use core::ops::Range;

use base::{Answer, Instant, Operation, Outcome, Request};

use super::WRITING;
use crate::lock::Touched;
use crate::statistics::Meter;

/// The tags of one channel.
#[derive(Debug)]
pub(super) struct Tags {
    slots: Box<[Slot]>,
    /// A place for each tag; those below `room` hold the free ones.
    free: Box<[u32]>,
    room: usize,
    /// How many tags there may be.
    count_max: usize,
}

/// What a tag stands for while it is in flight.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Slot {
    token: u64,
    /// Of a flush, losses that its client had been told.
    lba: u64,
    /// When it was submitted, in nanoseconds, and its kind below that: what two answers have in
    /// common if they are of one run.
    mark: u64,
    blocks: u32,
}

const _: () = assert!(size_of::<Slot>() == 32, "two to a line, and none across two");

/// How many tags there are at first.
const COUNT_MIN: usize = 8;

/// Bits of a mark that hold the kind of a request. Those above hold a time that wraps after three
/// days; differences stay right.
const KIND_BITS: u32 = 16;
const KIND_MASK: u64 = (1 << KIND_BITS) - 1;

/// What the requests of a batch have in common, or do not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// All kinds, one upon the other: see [`kind_of`].
    pub(super) kinds: u16,
    /// The end of the one that reaches furthest, unless the sum overflowed.
    pub(super) end: u64,
    /// All block numbers, one upon the other: if one is so large that the sum could overflow, it
    /// shows.
    pub(super) lbas: u64,
}

/// Answers in a row that were submitted together and are of one kind: only where a run ends is there
/// anything to count.
#[derive(Clone, Copy)]
struct Run {
    mark: u64,
    count: usize,
    blocks: u64,
}

/// What it takes to count a run.
#[derive(Clone, Copy)]
struct Counting<'a> {
    meter: &'a Meter,
    /// The time now, as it is in a mark.
    stamp: u64,
    block_shift: u32,
}

impl Tags {
    /// A few, and later up to `count_max`.
    pub(super) fn new(count_max: u32) -> Self {
        let count_max = count_max as usize;
        let (slots, free) = (Box::default(), Box::default());
        let mut tags = Self { slots, free, room: 0, count_max };
        tags.grow(COUNT_MIN);
        tags
    }

    /// Makes more tags, so that so many are free, or as many as there may be.
    #[cold]
    pub(super) fn grow(&mut self, wanted: usize) {
        let before = self.slots.len();
        let after = (self.in_flight() + wanted).max(2 * before).min(self.count_max);
        if wanted <= self.room || after <= before {
            return;
        }
        let mut slots = std::mem::take(&mut self.slots).into_vec();
        slots.resize(after, Slot::default());
        self.slots = slots.into();
        // Those that were used last stay at the top.
        let used = self.free[..self.room].iter().copied();
        let mut free: Vec<u32> = (before..after).rev().map(number_of).chain(used).collect();
        self.room = free.len();
        free.resize(after, 0);
        self.free = free.into();
    }

    /// Whether there may be more than there are.
    #[inline]
    pub(super) fn may_grow(&self) -> bool {
        self.slots.len() < self.count_max
    }

    /// How many are free.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// How many are not.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.room
    }

    /// Gives the requests tags, the topmost of the stack, and puts them into `outgoing` with these as
    /// their tokens. The tags stay free until they are [taken](Self::take). The caller has looked at
    /// [`room`](Self::room).
    ///
    /// Not inlined: with its loop for itself, more of what the loop needs fits into registers.
    #[inline(never)]
    pub(super) fn lend(
        &mut self,
        now: Instant,
        requests: &[Request],
        outgoing: &mut Vec<Request>,
    ) -> Traits {
        let Self { slots, free, room, .. } = self;
        let tags = &free[*room - requests.len()..*room];
        let stamp = now.ns << KIND_BITS;
        let Traits { mut kinds, mut end, mut lbas } = Traits::default();
        outgoing.clear();
        outgoing.extend(requests.iter().zip(tags).map(|(request, tag)| {
            let Request { token, lba, blocks, .. } = *request;
            let kind = kind_of(request);
            kinds |= kind;
            lbas |= lba;
            end = end.max(lba.wrapping_add(u64::from(blocks)));
            slots[*tag as usize] = Slot { token, lba, mark: stamp | u64::from(kind), blocks };
            // As a whole and not by fields: three loads and stores, and none for a byte.
            let mut sent = *request;
            sent.token = u64::from(*tag);
            sent
        }));
        Traits { kinds, end, lbas }
    }

    /// [`lend`](Self::lend) for a request that comes alone: no loop to set up.
    #[inline]
    pub(super) fn lend_one(&mut self, now: Instant, request: &Request) -> Request {
        let tag = self.free[self.room - 1];
        let Request { token, lba, blocks, .. } = *request;
        let mark = now.ns << KIND_BITS | u64::from(kind_of(request));
        self.slots[tag as usize] = Slot { token, lba, mark, blocks };
        // As a whole, as in `lend`.
        let mut sent = *request;
        sent.token = u64::from(tag);
        sent
    }

    /// The tag that was [lent](Self::lend_one) to one request is in flight now.
    #[inline]
    pub(super) fn take_one(&mut self) {
        self.room -= 1;
    }

    /// Of `lent` tags the first `taken` are in flight now.
    #[inline]
    pub(super) fn take(&mut self, lent: usize, taken: usize) {
        // Those that were not taken move down, for which there is no need if all were.
        if taken < lent {
            self.free.copy_within(self.room - lent + taken..self.room, self.room - lent);
        }
        self.room -= taken;
    }

    /// Puts the tokens of their requests into answers, and gives the tags back. Counts what has
    /// ended.
    #[inline(never)]
    pub(super) fn give_back(
        &mut self,
        now: Instant,
        answers: &mut [Answer],
        block_shift: u32,
        meter: &Meter,
    ) {
        let Self { slots, free, room, .. } = self;
        let counting = Counting { meter, stamp: now.ns << KIND_BITS, block_shift };
        let (first, count) = (*room, answers.len());
        assert!(count <= slots.len() - first, "a backend answered a request twice");
        let mut places = &mut free[first..first + count];
        *room += count;
        let mut answers = answers;
        while let Some(answer) = answers.first() {
            let mark = slots[tag_of(answer)].mark;
            let mut run = Run { mark, blocks: 0, count: 0 };
            let mut outcomes = 0;
            for (answer, place) in answers.iter_mut().zip(places.iter_mut()) {
                let tag = tag_of(answer);
                let slot = &slots[tag];
                if slot.mark != mark {
                    break;
                }
                (answer.token, *place) = (slot.token, number_of(tag));
                run.blocks += u64::from(slot.blocks);
                outcomes |= answer.outcome.0;
                run.count += 1;
            }
            let (ended, rest) = answers.split_at_mut(run.count);
            let (tags, rest_of_places) = places.split_at_mut(run.count);
            if outcomes != 0 {
                run = counting.without_failed(run, ended, tags, slots);
            }
            if run.count > 0 {
                counting.count(run);
            }
            (answers, places) = (rest, rest_of_places);
        }
    }

    /// [`give_back`](Self::give_back) for an answer that comes alone.
    #[inline(always)]
    pub(super) fn give_back_one(
        &mut self,
        now: Instant,
        answer: &mut Answer,
        block_shift: u32,
        meter: &Meter,
    ) {
        let Self { slots, free, room, .. } = self;
        let tag = tag_of(answer);
        let slot = &slots[tag];
        answer.token = slot.token;
        let counting = Counting { meter, stamp: now.ns << KIND_BITS, block_shift };
        if answer.outcome.is_success() {
            counting.count(Run { mark: slot.mark, count: 1, blocks: u64::from(slot.blocks) });
        } else {
            meter.failed(operation_of(slot.mark));
        }
        assert!(*room < free.len(), "a backend answered a request twice");
        free[*room] = number_of(tag);
        *room += 1;
    }

    /// Keeps how many losses the client of a flush that was [lent](Self::lend) a tag has been told.
    pub(super) fn set_told(&mut self, sent: &Request, told: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "a tag")]
        let tag = sent.token as u32 as usize;
        self.slots[tag].lba = told;
    }

    /// What was kept so, if an answer that came with a tag is to a flush.
    pub(super) fn told_of(&self, answer: &Answer) -> Option<u64> {
        let slot = &self.slots[tag_of(answer)];
        (operation_of(slot.mark) == Operation::Flush as usize).then_some(slot.lba)
    }

    /// What the requests in flight touch.
    pub(super) fn touched(&self) -> impl Iterator<Item = Touched> + '_ {
        let slots = self.flying().into_iter().map(|tag| &self.slots[tag as usize]);
        slots.map(Slot::touched)
    }

    /// The blocks that requests in flight write: neither the sources of copies, nor what a flush is for.
    pub(super) fn written(&self) -> Vec<Range<u64>> {
        let slots = self.flying().into_iter().map(|tag| &self.slots[tag as usize]);
        let writes = slots.filter(|slot| WRITING.bits() >> operation_of(slot.mark) & 1 != 0);
        writes.map(|slot| slot.lba..slot.lba.saturating_add(slot.blocks.into())).collect()
    }

    /// Ends everything in flight: the answers to that, and the operations they were.
    pub(super) fn abandon(&mut self, outcome: Outcome) -> impl Iterator<Item = (Answer, usize)> {
        let flying = self.flying();
        self.free[self.room..].copy_from_slice(&flying);
        self.room = self.free.len();
        flying.into_iter().map(move |tag| {
            let slot = &self.slots[tag as usize];
            (Answer { token: slot.token, outcome, result: 0 }, operation_of(slot.mark))
        })
    }

    /// The tags in flight. Not on the way of an I/O.
    fn flying(&self) -> Vec<u32> {
        let mut is_free = vec![false; self.slots.len()];
        self.free[..self.room].iter().for_each(|tag| is_free[*tag as usize] = true);
        (0..).zip(is_free).filter(|(_, is_free)| !is_free).map(|(tag, _)| tag).collect()
    }
}

impl Traits {
    /// Those of a request that comes alone.
    #[inline]
    pub(super) fn of(request: &Request) -> Self {
        let Request { lba, blocks, .. } = *request;
        let end = lba.wrapping_add(u64::from(blocks));
        Self { kinds: kind_of(request), end, lbas: lba }
    }
}

impl Slot {
    fn touched(&self) -> Touched {
        let Self { lba, blocks, .. } = *self;
        let operation = operation_of(self.mark);
        // Where the source of a copy lies is not kept: it is taken to be anywhere.
        if operation == Operation::Flush as usize || operation == Operation::Copy as usize {
            Touched::EVERYTHING
        } else {
            Touched { first: lba, blocks: u64::from(blocks) }
        }
    }
}

impl Counting<'_> {
    /// What is left of a run without the answers that are bad, which are counted as such.
    #[cold]
    fn without_failed(self, mut run: Run, answers: &[Answer], tags: &[u32], slots: &[Slot]) -> Run {
        for (answer, tag) in answers.iter().zip(tags) {
            if !answer.outcome.is_success() {
                self.meter.failed(operation_of(run.mark));
                run.blocks -= u64::from(slots[*tag as usize].blocks);
                run.count -= 1;
            }
        }
        run
    }

    /// Counts a run.
    #[inline]
    fn count(self, Run { mark, count, blocks }: Run) {
        let took = self.stamp.wrapping_sub(mark & !KIND_MASK);
        // Two turns may have read their clocks in the wrong order.
        let took_ns = if took >> 63 == 0 { took >> KIND_BITS } else { 0 };
        let bytes = blocks << self.block_shift;
        self.meter.succeeded(operation_of(mark), count as u64, bytes, took_ns);
    }
}

/// The tag that an answer came with.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a tag")]
fn tag_of(answer: &Answer) -> usize {
    answer.token as u32 as usize
}

/// The number of a tag, which indexes a table.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a tag")]
fn number_of(tag: usize) -> u32 {
    tag as u32
}

/// The operation of a request, and its flags above.
#[inline]
fn kind_of(request: &Request) -> u16 {
    u16::from(request.operation as u8) | u16::from(request.flags.0) << 8
}

/// The index of the operation in a mark.
#[inline]
fn operation_of(mark: u64) -> usize {
    usize::from(mark.to_le_bytes()[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use base::{Instant, Outcome, Request};

    use super::{COUNT_MIN, Tags};

    #[test]
    fn there_are_as_many_tags_as_were_ever_wanted_and_each_is_given_once() {
        let mut tags = Tags::new(100);
        assert_eq!(tags.room(), COUNT_MIN);
        let mut given = BTreeSet::new();
        for token in 0..100 {
            if tags.room() == 0 {
                tags.grow(1);
            }
            assert!(tags.room() > 0 && tags.in_flight() == given.len(), "{token}");
            let sent = tags.lend_one(Instant::default(), &Request { token, ..Request::NOTHING });
            tags.take_one();
            assert!(given.insert(sent.token), "tag {} is in flight", sent.token);
        }
        assert_eq!((tags.room(), tags.may_grow(), given.last()), (0, false, Some(&99)));
        tags.grow(1);
        assert_eq!(tags.room(), 0, "there are no more");
        let mut tokens: Vec<u64> =
            tags.abandon(Outcome::ABORTED).map(|(answer, _)| answer.token).collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..100));
        assert_eq!((tags.room(), tags.in_flight()), (100, 0));
        let mut some = Tags::new(100);
        some.grow(30);
        assert_eq!((some.room(), some.may_grow()), (30, true));
        assert_eq!(Tags::new(3).room(), 3);
    }
}
