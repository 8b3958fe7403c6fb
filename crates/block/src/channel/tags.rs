//! The requests of a channel: a table that is made once, in which an index is a tag.
//!
//! ```text
//!   slots    | 0 | 1 | 2 | 3 | 4 | …        what each tag stands for; 32 bytes, two to a line
//!   free     | 3 | 0 | 4 |                  a stack: the tags at its top were used last
//! ```

use base::{Answer, Instant, Operation, Outcome, Request};

use crate::lock::Touched;
use crate::statistics::Meter;

/// The tags of one channel.
#[derive(Debug)]
pub(super) struct Tags {
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

/// What a tag stands for while it is in flight.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Slot {
    token: u64,
    /// When it was submitted, in nanoseconds, and its operation below that: what two answers have in
    /// common if they are of one run.
    mark: u64,
    lba: u64,
    blocks: u32,
}

const _: () = assert!(size_of::<Slot>() == 32, "two to a line, and none across two");

/// Bits of a mark that hold the operation. Above them there is room for two years.
const OPERATION_BITS: u32 = 8;
const OPERATION_MASK: u64 = (1 << OPERATION_BITS) - 1;

/// What all requests of a batch have in common, or do not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// Operations, as the bits of a [`base::Support`].
    pub(super) operations: u32,
    /// Their flags.
    pub(super) flags: u8,
    /// The end of the one that reaches furthest, unless the sum overflowed.
    pub(super) end: u64,
    /// All block numbers: if one is so large that the sum could overflow, it shows.
    pub(super) lbas: u64,
}

/// Answers of one batch, cut into runs: only where one ends is there anything to count.
struct Runs<'a> {
    meter: &'a Meter,
    now_ns: u64,
    block_shift: u32,
    /// The index in its batch of the answer that the present run began with.
    first: usize,
    mark: u64,
    blocks: u64,
}

/// The mark of no request.
const NO_MARK: u64 = u64::MAX;

impl Tags {
    pub(super) fn new(count: u32) -> Self {
        Self {
            slots: (0..count).map(|_| Slot::default()).collect(),
            free: (0..count).rev().collect(),
        }
    }

    /// How many are free.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// How many are not.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
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
        let Self { slots, free } = self;
        let tags = &free[free.len() - requests.len()..];
        let stamp = now.ns << OPERATION_BITS;
        let mut traits = Traits::default();
        outgoing.clear();
        outgoing.extend(requests.iter().zip(tags).map(|(request, tag)| {
            let Request { token, lba, blocks, operation, flags, .. } = *request;
            traits.flags |= flags.0;
            traits.operations |= 1 << operation as u32;
            traits.lbas |= lba;
            traits.end = traits.end.max(lba.wrapping_add(u64::from(blocks)));
            let mark = stamp | u64::from(operation as u8);
            slots[*tag as usize] = Slot { token, mark, lba, blocks };
            Request { token: u64::from(*tag), ..*request }
        }));
        traits
    }

    /// Of `lent` tags the first `taken` are in flight now.
    #[inline]
    pub(super) fn take(&mut self, lent: usize, taken: usize) {
        let first = self.free.len() - lent;
        if taken == lent {
            self.free.truncate(first);
        } else {
            self.free.drain(first..first + taken);
        }
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
        let Self { slots, free } = self;
        let mut runs =
            Runs { meter, now_ns: now.ns, block_shift, first: 0, mark: NO_MARK, blocks: 0 };
        free.extend(answers.iter_mut().enumerate().map(|(index, answer)| {
            #[expect(clippy::cast_possible_truncation, reason = "a tag")]
            let tag = answer.token as u32;
            let slot = &slots[tag as usize];
            answer.token = slot.token;
            // Something has changed or gone wrong: both in one comparison.
            if slot.mark ^ runs.mark | u64::from(answer.outcome.0) != 0 {
                runs.turn(index, slot, answer.outcome);
            }
            runs.blocks = runs.blocks.wrapping_add(u64::from(slot.blocks));
            tag
        }));
        runs.end(answers.len());
        assert!(free.len() <= slots.len(), "a backend answered a request twice");
    }

    /// What the requests in flight touch.
    pub(super) fn touched(&self) -> impl Iterator<Item = Touched> + '_ {
        let slots = self.flying().into_iter().map(|tag| &self.slots[tag as usize]);
        slots.map(Slot::touched)
    }

    /// Ends everything in flight: the answers to that, and the operations they were.
    pub(super) fn abandon(&mut self, outcome: Outcome) -> impl Iterator<Item = (Answer, usize)> {
        let flying = self.flying();
        self.free.extend(&flying);
        flying.into_iter().map(move |tag| {
            let slot = &self.slots[tag as usize];
            (Answer { token: slot.token, outcome, result: 0 }, operation_of(slot.mark))
        })
    }

    /// The tags in flight. Not on the way of an I/O.
    fn flying(&self) -> Vec<u32> {
        let mut is_free = vec![false; self.slots.len()];
        self.free.iter().for_each(|tag| is_free[*tag as usize] = true);
        (0..).zip(is_free).filter(|(_, is_free)| !is_free).map(|(tag, _)| tag).collect()
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

impl Runs<'_> {
    /// The answer with this index begins another run, or is bad and in none.
    #[inline(never)]
    fn turn(&mut self, index: usize, slot: &Slot, outcome: Outcome) {
        self.end(index);
        if outcome.is_success() {
            (self.first, self.mark, self.blocks) = (index, slot.mark, 0);
        } else {
            self.meter.failed(operation_of(slot.mark));
            // Its blocks are added next, and do not count.
            let blocks = 0_u64.wrapping_sub(u64::from(slot.blocks));
            (self.first, self.mark, self.blocks) = (index + 1, NO_MARK, blocks);
        }
    }

    /// Counts the present run, which ends before the answer with this index.
    #[inline]
    fn end(&self, index: usize) {
        let count = (index - self.first) as u64;
        if count > 0 {
            let took_ns = self.now_ns.saturating_sub(self.mark >> OPERATION_BITS);
            let bytes = self.blocks << self.block_shift;
            self.meter.succeeded(operation_of(self.mark), count, bytes, took_ns);
        }
    }
}

/// The index of the operation in a mark.
#[inline]
fn operation_of(mark: u64) -> usize {
    (mark & OPERATION_MASK) as usize
}
