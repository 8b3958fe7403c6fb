//! One request on its way through a shaper, and the parts that it is sent in.
//!
//! ```text
//!   [Draining ─ Locking]  [SyncingBefore]  Moving  [Writing]  [SyncingAfter]
//!    compare and write      forced read             the second   forced write
//!                                                   half of it
//! ```
//!
//! In brackets: only if the request needs it. While data moves, parts go straight between the device
//! and the request's memory, several at a time; beside them at most one chunk takes the detour
//! through a buffer.

use base::{Operation, Outcome, Request, Segment};

use super::rules::Plan;

/// A request that is being shaped.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) request: Request,
    /// The memory of the request, data first; the table it was named in is gone.
    pub(super) segments: Vec<Segment>,
    pub(super) plan: Plan,
    pub(super) stage: Stage,
    /// Blocks that have been given to parts or to the chunk, in this stage.
    pub(super) next: u32,
    /// Where in the data, and in the metadata, the next part begins.
    pub(super) data: Cursor,
    pub(super) metadata: Cursor,
    /// Parts, chunks and flushes that are not answered yet.
    pub(super) under_way: u16,
    pub(super) chunk: Option<Chunk>,
    pub(super) buffer: Option<u16>,
    /// Whether it stands in the row of those that have something to send.
    pub(super) is_queued: bool,
    pub(super) outcome: Outcome,
    pub(super) result: u32,
}

/// What a parent is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits until nothing else is under way.
    Draining,
    /// Waits for its range of blocks.
    Locking,
    /// Flushes, so that what it reads is stable.
    SyncingBefore(Sync),
    /// Moves data, or has a compare and write compare.
    Moving,
    /// Writes what a compare and write is to write.
    Writing,
    /// Flushes, so that what it has written is stable.
    SyncingAfter(Sync),
}

/// How far a flush is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sync {
    Due,
    Sent,
}

/// Some blocks on their way through a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The first block, counted from the first of the request.
    pub(super) first: u32,
    pub(super) blocks: u32,
    pub(super) step: Step,
}

/// What happens to a chunk next, or is happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    WaitsForBuffer,
    ToFetch,
    Fetching,
    ToStore,
    Storing,
}

/// A place in a list of segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    index: usize,
    skip_bytes: u32,
}

impl Parent {
    /// A place for a parent with room for `segments_max` segments of data and as many of metadata.
    pub(super) fn idle(segments_max: u16) -> Self {
        Self {
            request: Request::NOTHING,
            segments: Vec::with_capacity(2 * usize::from(segments_max)),
            plan: Plan::Whole,
            stage: Stage::Moving,
            next: 0,
            data: Cursor::default(),
            metadata: Cursor::default(),
            under_way: 0,
            chunk: None,
            buffer: None,
            is_queued: false,
            outcome: Outcome::SUCCESS,
            result: 0,
        }
    }

    /// Begins with a request.
    pub(super) fn begin(&mut self, request: &Request, own: &[Segment], plan: Plan, syncs: bool) {
        self.request = *request;
        self.segments.clear();
        self.segments.extend_from_slice(own);
        (self.plan, self.next, self.result) = (plan, 0, 0);
        (self.data, self.metadata) = (Cursor::default(), Cursor::default());
        self.outcome = Outcome::SUCCESS;
        self.stage = match request.operation {
            _ if plan == Plan::CompareAndWrite => Stage::Draining,
            Operation::Read | Operation::Compare | Operation::Verify if syncs => {
                Stage::SyncingBefore(Sync::Due)
            }
            _ => Stage::Moving,
        };
    }

    /// The data segments.
    pub(super) fn data_segments(&self) -> &[Segment] {
        &self.segments[..usize::from(self.request.segment_count)]
    }

    /// The metadata segments.
    pub(super) fn metadata_segments(&self) -> &[Segment] {
        &self.segments[usize::from(self.request.segment_count)..]
    }

    /// What the parts of this stage do to the device.
    pub(super) fn part_operation(&self) -> Operation {
        match (self.plan, self.stage) {
            (Plan::Zeroes, _) | (_, Stage::Writing) => Operation::Write,
            _ => self.request.operation,
        }
    }

    /// Whether parts go straight to or from memory in this stage.
    pub(super) fn goes_straight(&self) -> bool {
        matches!(self.plan, Plan::Parts | Plan::Zeroes) || self.stage == Stage::Writing
    }

    /// What a chunk begins with once it has a buffer.
    pub(super) fn first_step(&self) -> Step {
        if self.goes_straight() && self.part_operation() == Operation::Write {
            Step::ToStore
        } else {
            Step::ToFetch
        }
    }

    /// How far into the data a chunk's bytes lie: the new bytes of a compare and write follow the
    /// expected ones.
    pub(super) fn data_offset(&self, first: u32, block_size: u32) -> u64 {
        let half = if self.stage == Stage::Writing { self.request.blocks } else { 0 };
        (u64::from(half) + u64::from(first)) * u64::from(block_size)
    }

    /// Whether a copy has to begin at its end, because there the target does not yet overwrite what
    /// is still to be read.
    pub(super) fn goes_backwards(&self) -> bool {
        self.plan == Plan::Copy && self.request.operand < self.request.lba
    }

    /// A child of this request over some of its blocks, with the memory to be filled in.
    pub(super) fn child(&self, operation: Operation, first: u32, blocks: u32) -> Request {
        Request {
            lba: self.request.lba + u64::from(first),
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: 0,
            metadata_count: 0,
            operation,
            ..self.request
        }
    }

    /// Takes up the second half of a compare and write.
    pub(super) fn turn_to_writing(&mut self, block_size: u32) {
        (self.stage, self.next) = (Stage::Writing, 0);
        let half = self.data_offset(0, block_size);
        let mut data = Cursor::default();
        data.advance(self.data_segments(), half);
        self.data = data;
    }
}

impl Cursor {
    /// Copies to `into` what of `segments` comes next: at most `bytes_max`, in at most `count_max`
    /// slices, and none from the first on that does not suit. Returns how many bytes that are.
    pub(super) fn slices(
        mut self,
        segments: &[Segment],
        bytes_max: u64,
        count_max: usize,
        suits: impl Fn(Segment) -> bool,
        into: &mut Vec<Segment>,
    ) -> u64 {
        let mut bytes = 0;
        for _ in 0..count_max {
            let Some(slice) = self.take(segments, bytes_max - bytes).filter(|slice| suits(*slice))
            else {
                break;
            };
            bytes += u64::from(slice.len_bytes);
            into.push(slice);
        }
        bytes
    }

    /// Goes `bytes` on.
    pub(super) fn advance(&mut self, segments: &[Segment], mut bytes: u64) {
        while let Some(slice) = self.take(segments, bytes) {
            bytes -= u64::from(slice.len_bytes);
        }
    }

    /// Takes at most `bytes_max`, without crossing the end of a segment. `None` at the end of the
    /// list, or if nothing is wanted.
    fn take(&mut self, segments: &[Segment], bytes_max: u64) -> Option<Segment> {
        if bytes_max == 0 {
            return None;
        }
        loop {
            let segment = segments.get(self.index)?;
            let left = segment.len_bytes - self.skip_bytes;
            let len_bytes = left.min(u32::try_from(bytes_max).unwrap_or(u32::MAX));
            let slice = segment.slice(self.skip_bytes, len_bytes)?;
            if len_bytes == left {
                (self.index, self.skip_bytes) = (self.index + 1, 0);
            } else {
                self.skip_bytes += len_bytes;
            }
            if len_bytes > 0 {
                return Some(slice);
            }
        }
    }
}

/// Cuts slices that are `bytes` long in all down to `wanted`.
pub(super) fn trim(slices: &mut Vec<Segment>, mut bytes: u64, wanted: u64) {
    while bytes > wanted
        && let Some(last) = slices.last_mut()
    {
        let len_bytes = u64::from(last.len_bytes);
        match u32::try_from(len_bytes - len_bytes.min(bytes - wanted)) {
            Ok(left) if left > 0 => {
                last.len_bytes = left;
                return;
            }
            _ => slices.pop(),
        };
        bytes -= len_bytes;
    }
}

#[cfg(test)]
mod tests {
    use base::{RegionId, Segment};

    use super::{Cursor, trim};

    fn list() -> [Segment; 4] {
        [(0, 5), (100, 0), (200, 3), (300, 4)].map(|(offset, len_bytes)| Segment {
            region: RegionId(0),
            offset,
            len_bytes,
        })
    }

    fn bytes(slices: &[Segment]) -> Vec<u64> {
        let of = |slice: &Segment| slice.offset..slice.offset + u64::from(slice.len_bytes);
        slices.iter().flat_map(of).collect()
    }

    #[test]
    fn the_slices_from_anywhere_are_what_lies_there() {
        let list = list();
        let whole = bytes(&list);
        for first in 0..=12 {
            for most in 0..=13 {
                let mut cursor = Cursor::default();
                cursor.advance(&list, first);
                let mut slices = Vec::new();
                let count = cursor.slices(&list, most, 9, |_| true, &mut slices);
                let (from, to) = (usize::try_from(first).unwrap(), most.min(12 - first));
                let expected = &whole[from..from + usize::try_from(to).unwrap()];
                assert_eq!((bytes(&slices), count), (expected.to_vec(), to), "{first} {most}");
                for wanted in 0..=to {
                    let mut trimmed = slices.clone();
                    trim(&mut trimmed, to, wanted);
                    assert_eq!(bytes(&trimmed), &expected[..usize::try_from(wanted).unwrap()]);
                    assert!(trimmed.iter().all(|slice| slice.len_bytes > 0));
                }
            }
        }
    }

    #[test]
    fn slices_end_where_their_number_or_one_that_does_not_suit_ends_them() {
        let (list, mut slices) = (list(), Vec::new());
        assert_eq!(Cursor::default().slices(&list, 99, 2, |_| true, &mut slices), 8);
        slices.clear();
        let even = |slice: Segment| slice.offset != 300;
        assert_eq!(Cursor::default().slices(&list, 99, 9, even, &mut slices), 8);
        assert_eq!(slices.len(), 2);
    }
}
