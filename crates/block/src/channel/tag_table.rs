//! Tags of a channel: a request table whose index is the tag. It grows to the highest queue depth
//! reached, since most channels never reach a high one.
//!
//! ```text
//!   slots    | 0 | 1 | 2 | 3 | 4 | …        entry of each tag; 32 bytes, two per cache line
//!   free     | 3 | 0 | 4 |                  a stack: the tags at its top were used last
//! ```

use core::ops::Range;

use tenmil_base::{Instant, IoCompletion, IoCounters, IoStatus, Operation, Request};

use super::WRITING;
use crate::quiesce::RequestRanges;

/// The tags of one channel.
#[derive(Debug)]
pub(super) struct TagTable {
    slots: Box<[TagEntry]>,
    /// Stack of free tags, in the first `room` elements.
    free: Box<[u32]>,
    free_count: usize,
    /// Maximum number of tags.
    count_max: usize,
}

/// The request that a tag stands for.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct TagEntry {
    token: u64,
    /// LBA; for a flush, the losses reported to its client before.
    lba: u64,
    /// Time of submission in nanoseconds, above the kind of the request. Completions of one run have
    /// equal marks.
    mark: u64,
    blocks: u32,
}

const _: () = assert!(size_of::<TagEntry>() == 32, "two to a line, and none across two");

/// Initial number of tags.
const COUNT_MIN: usize = 8;

/// Bits of a mark for the kind of a request. The bits above hold a time that wraps after three days;
/// differences stay correct.
const KIND_BITS: u32 = 16;
const KIND_MASK: u64 = (1 << KIND_BITS) - 1;

/// Properties of a batch, combined over its requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BatchTraits {
    /// Bitwise or of all kinds: see [`operation_and_flags`].
    pub(super) kinds: u16,
    /// The highest end of a request, unless the sum overflowed.
    pub(super) end: u64,
    /// Bitwise or of all LBAs: shows whether any is large enough for an overflow.
    pub(super) lbas: u64,
}

/// A run of consecutive completions that were submitted together and have the same kind. Statistics are
/// updated once per run.
#[derive(Clone, Copy)]
struct CompletionRun {
    mark: u64,
    count: usize,
    blocks: u64,
}

/// Statistics of completed runs.
#[derive(Clone, Copy)]
struct RunCounter<'a> {
    meter: &'a IoCounters,
    /// The current time, in the format of a mark.
    stamp: u64,
    block_shift: u32,
}

impl TagTable {
    /// Creates an initial set of tags, which grows up to `count_max`.
    pub(super) fn new(count_max: u32) -> Self {
        let count_max = count_max as usize;
        let (slots, free) = (Box::default(), Box::default());
        let mut tags = Self { slots, free, free_count: 0, count_max };
        tags.grow(COUNT_MIN);
        tags
    }

    /// Adds tags until `wanted` are free, or the maximum is reached.
    #[cold]
    pub(super) fn grow(&mut self, wanted: usize) {
        let before = self.slots.len();
        let after = (self.in_flight() + wanted).max(2 * before).min(self.count_max);
        if wanted <= self.free_count || after <= before {
            return;
        }
        let mut slots = std::mem::take(&mut self.slots).into_vec();
        slots.resize(after, TagEntry::default());
        self.slots = slots.into();
        // Recently used tags stay at the top of the stack.
        let used = self.free[..self.free_count].iter().copied();
        let mut free: Vec<u32> = (before..after).rev().map(index_to_tag).chain(used).collect();
        self.free_count = free.len();
        free.resize(after, 0);
        self.free = free.into();
    }

    /// Whether more tags can be added.
    #[inline]
    pub(super) fn may_grow(&self) -> bool {
        self.slots.len() < self.count_max
    }

    /// Number of free tags.
    #[inline]
    pub(super) fn free_tag_count(&self) -> usize {
        self.free_count
    }

    /// Number of tags in use.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free_count
    }

    /// Assigns the topmost tags of the stack to requests, and puts them into `outgoing` with the tags as
    /// tokens. The tags stay free until they are [taken](Self::mark_in_use). The caller has checked
    /// [`free_tag_count`](Self::free_tag_count).
    ///
    /// Not inlined: in a function of its own, more of the loop's state stays in registers.
    #[inline(never)]
    pub(super) fn assign_tags(
        &mut self,
        now: Instant,
        requests: &[Request],
        outgoing: &mut Vec<Request>,
    ) -> BatchTraits {
        let Self { slots, free, free_count: room, .. } = self;
        let tags = &free[*room - requests.len()..*room];
        let stamp = now.ns << KIND_BITS;
        let BatchTraits { mut kinds, mut end, mut lbas } = BatchTraits::default();
        outgoing.clear();
        outgoing.extend(requests.iter().zip(tags).map(|(request, tag)| {
            let Request { token, lba, blocks, .. } = *request;
            let kind = operation_and_flags(request);
            kinds |= kind;
            lbas |= lba;
            end = end.max(lba.wrapping_add(u64::from(blocks)));
            slots[*tag as usize] = TagEntry { token, lba, mark: stamp | u64::from(kind), blocks };
            // Copied as a whole rather than by fields: three loads and stores, none of them for a single
            // byte.
            let mut sent = *request;
            sent.token = u64::from(*tag);
            sent
        }));
        BatchTraits { kinds, end, lbas }
    }

    /// [`assign_tags`](Self::assign_tags) for a single request, without a loop.
    #[inline]
    pub(super) fn assign_tag(&mut self, now: Instant, request: &Request) -> Request {
        let tag = self.free[self.free_count - 1];
        let Request { token, lba, blocks, .. } = *request;
        let mark = now.ns << KIND_BITS | u64::from(operation_and_flags(request));
        self.slots[tag as usize] = TagEntry { token, lba, mark, blocks };
        // Copied as a whole, as in `assign_tags`.
        let mut sent = *request;
        sent.token = u64::from(tag);
        sent
    }

    /// Marks the tag from [`assign_tag`](Self::assign_tag) as in use.
    #[inline]
    pub(super) fn mark_one_in_use(&mut self) {
        self.free_count -= 1;
    }

    /// Marks the first `taken` of `leased` assigned tags as in use.
    #[inline]
    pub(super) fn mark_in_use(&mut self, leased: usize, taken: usize) {
        // Unused tags move down. If all are used, there is nothing to move.
        if taken < leased {
            self.free.copy_within(
                self.free_count - leased + taken..self.free_count,
                self.free_count - leased,
            );
        }
        self.free_count -= taken;
    }

    /// Restores the original tokens of completions, frees their tags, and updates the statistics.
    #[inline(never)]
    pub(super) fn release_tags(
        &mut self,
        now: Instant,
        completions: &mut [IoCompletion],
        block_shift: u32,
        meter: &IoCounters,
    ) {
        let Self { slots, free, free_count: room, .. } = self;
        let counting = RunCounter { meter, stamp: now.ns << KIND_BITS, block_shift };
        let (first, count) = (*room, completions.len());
        assert!(count <= slots.len() - first, "a backend completed a request twice");
        let mut places = &mut free[first..first + count];
        *room += count;
        let mut completions = completions;
        while let Some(completion) = completions.first() {
            // One pass of this loop handles one run: completions with equal marks.
            let mark = slots[completion_tag(completion)].mark;
            let mut run = CompletionRun { mark, blocks: 0, count: 0 };
            let mut statuses = 0;
            for (completion, place) in completions.iter_mut().zip(places.iter_mut()) {
                let tag = completion_tag(completion);
                let slot = &slots[tag];
                if slot.mark != mark {
                    break;
                }
                (completion.token, *place) = (slot.token, index_to_tag(tag));
                run.blocks += u64::from(slot.blocks);
                statuses |= completion.status.0;
                run.count += 1;
            }
            let (ended, rest) = completions.split_at_mut(run.count);
            let (tags, rest_of_places) = places.split_at_mut(run.count);
            if statuses != 0 {
                run = counting.count_failed(run, ended, tags, slots);
            }
            if run.count > 0 {
                counting.count(run);
            }
            (completions, places) = (rest, rest_of_places);
        }
    }

    /// [`release_tags`](Self::release_tags) for a single completion.
    #[inline(always)]
    pub(super) fn release_one(
        &mut self,
        now: Instant,
        completion: &mut IoCompletion,
        block_shift: u32,
        meter: &IoCounters,
    ) {
        let Self { slots, free, free_count: room, .. } = self;
        let tag = completion_tag(completion);
        let slot = &slots[tag];
        completion.token = slot.token;
        let counting = RunCounter { meter, stamp: now.ns << KIND_BITS, block_shift };
        if completion.status.is_success() {
            counting.count(CompletionRun {
                mark: slot.mark,
                count: 1,
                blocks: u64::from(slot.blocks),
            });
        } else {
            meter.count_failure(operation_of_mark(slot.mark), completion.status);
        }
        assert!(*room < free.len(), "a backend completed a request twice");
        free[*room] = index_to_tag(tag);
        *room += 1;
    }

    /// Stores the losses reported to the client of a flush with an [assigned](Self::assign_tags) tag.
    pub(super) fn set_reported_losses(&mut self, sent: &Request, reported_values: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "a tag")]
        let tag = sent.token as u32 as usize;
        self.slots[tag].lba = reported_values;
    }

    /// The losses stored for a flush; `None` if the completion is not of a flush.
    pub(super) fn reported_losses(&self, completion: &IoCompletion) -> Option<u64> {
        let slot = &self.slots[completion_tag(completion)];
        (operation_of_mark(slot.mark) == Operation::Flush as usize).then_some(slot.lba)
    }

    /// The block ranges accessed by requests in flight.
    pub(super) fn ranges_in_flight(&self) -> impl Iterator<Item = RequestRanges> + '_ {
        let slots = self.tags_in_flight().into_iter().map(|tag| &self.slots[tag as usize]);
        slots.map(TagEntry::ranges)
    }

    /// The blocks written by requests in flight, without the sources of copies and without flushes.
    pub(super) fn written_ranges(&self) -> Vec<Range<u64>> {
        let slots = self.tags_in_flight().into_iter().map(|tag| &self.slots[tag as usize]);
        let writes = slots.filter(|slot| WRITING.bits() >> operation_of_mark(slot.mark) & 1 != 0);
        writes.map(|slot| slot.lba..slot.lba.saturating_add(slot.blocks.into())).collect()
    }

    /// Completes everything in flight with `status`. Returns the completions and their operations.
    pub(super) fn fail_all_in_flight(
        &mut self,
        status: IoStatus,
    ) -> impl Iterator<Item = (IoCompletion, usize)> {
        let flying = self.tags_in_flight();
        self.free[self.free_count..].copy_from_slice(&flying);
        self.free_count = self.free.len();
        flying.into_iter().map(move |tag| {
            let slot = &self.slots[tag as usize];
            (IoCompletion { token: slot.token, status, result: 0 }, operation_of_mark(slot.mark))
        })
    }

    /// The tags in use. Not on the I/O path.
    fn tags_in_flight(&self) -> Vec<u32> {
        let mut is_free = vec![false; self.slots.len()];
        self.free[..self.free_count].iter().for_each(|tag| is_free[*tag as usize] = true);
        (0..).zip(is_free).filter(|(_, is_free)| !is_free).map(|(tag, _)| tag).collect()
    }
}

impl BatchTraits {
    /// The properties of a single request.
    #[inline]
    pub(super) fn from_requests(request: &Request) -> Self {
        let Request { lba, blocks, .. } = *request;
        let end = lba.wrapping_add(u64::from(blocks));
        Self { kinds: operation_and_flags(request), end, lbas: lba }
    }
}

impl TagEntry {
    fn ranges(&self) -> RequestRanges {
        let Self { lba, blocks, .. } = *self;
        let operation = operation_of_mark(self.mark);
        // The source of a copy is not stored: it counts as every block.
        if operation == Operation::Flush as usize || operation == Operation::Copy as usize {
            RequestRanges::EVERYTHING
        } else {
            RequestRanges { first: lba, blocks: u64::from(blocks) }
        }
    }
}

impl RunCounter<'_> {
    /// Counts the failed completions of a run, and returns the run without them.
    #[cold]
    fn count_failed(
        self,
        mut run: CompletionRun,
        completions: &[IoCompletion],
        tags: &[u32],
        slots: &[TagEntry],
    ) -> CompletionRun {
        for (completion, tag) in completions.iter().zip(tags) {
            if !completion.status.is_success() {
                self.meter.count_failure(operation_of_mark(run.mark), completion.status);
                run.blocks -= u64::from(slots[*tag as usize].blocks);
                run.count -= 1;
            }
        }
        run
    }

    /// Counts a run.
    #[inline]
    fn count(self, CompletionRun { mark, count, blocks }: CompletionRun) {
        let took = self.stamp.wrapping_sub(mark & !KIND_MASK);
        // Clock readings of two iterations may be out of order.
        let took_ns = if took >> 63 == 0 { took >> KIND_BITS } else { 0 };
        let bytes = blocks << self.block_shift;
        self.meter.count_success(operation_of_mark(mark), count as u64, bytes, took_ns);
    }
}

/// The tag of a completion.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a tag")]
fn completion_tag(completion: &IoCompletion) -> usize {
    completion.token as u32 as usize
}

/// A table index as a tag.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a tag")]
fn index_to_tag(tag: usize) -> u32 {
    tag as u32
}

/// The operation of a request, with its flags in the upper byte.
#[inline]
fn operation_and_flags(request: &Request) -> u16 {
    u16::from(request.operation as u8) | u16::from(request.flags.0) << 8
}

/// The index of the operation in a mark.
#[inline]
fn operation_of_mark(mark: u64) -> usize {
    usize::from(mark.to_le_bytes()[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tenmil_base::{Instant, IoStatus, Request};

    use super::{COUNT_MIN, TagTable};

    #[test]
    fn tag_table_grows_on_demand_and_tags_are_unique() {
        let mut tags = TagTable::new(100);
        assert_eq!(tags.free_tag_count(), COUNT_MIN);
        let mut given = BTreeSet::new();
        for token in 0..100 {
            if tags.free_tag_count() == 0 {
                tags.grow(1);
            }
            assert!(tags.free_tag_count() > 0 && tags.in_flight() == given.len(), "{token}");
            let sent =
                tags.assign_tag(Instant::default(), &Request { token, ..Request::PLACEHOLDER });
            tags.mark_one_in_use();
            assert!(given.insert(sent.token), "tag {} is in flight", sent.token);
        }
        assert_eq!((tags.free_tag_count(), tags.may_grow(), given.last()), (0, false, Some(&99)));
        tags.grow(1);
        assert_eq!(tags.free_tag_count(), 0, "there are no more");
        let mut tokens: Vec<u64> = tags
            .fail_all_in_flight(IoStatus::ABORTED)
            .map(|(completion, _)| completion.token)
            .collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..100));
        assert_eq!((tags.free_tag_count(), tags.in_flight()), (100, 0));
        let mut some = TagTable::new(100);
        some.grow(30);
        assert_eq!((some.free_tag_count(), some.may_grow()), (30, true));
        assert_eq!(TagTable::new(3).free_tag_count(), 3);
    }
}
