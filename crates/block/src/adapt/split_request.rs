//! Parent: a request being adapted, and its stages.
//!
//! ```text
//!   [Draining ─ Locking]  [SyncingBefore]  Moving  [Writing]  [SyncingAfter]
//!    compare-and-write      FUA read               second     FUA write
//!                                                  half of it
//! ```
//!
//! Stages in brackets occur only if the request needs them. In a stage that moves data, several parts go
//! directly between the device and the request's memory; beside them at most one chunk goes through a
//! bounce buffer.

use tenmil_base::{IoStatus, Operation, Request, Segment};

use super::constraints::AdaptationPlan;

/// A request being split or emulated.
#[derive(Debug)]
pub(super) struct SplitRequest {
    pub(super) request: Request,
    /// The segments of the request, data first. Copied, because the caller's table is only valid during
    /// submit.
    pub(super) segments: Vec<Segment>,
    pub(super) plan: AdaptationPlan,
    pub(super) stage: SplitStage,
    /// Blocks assigned to parts or to the chunk in this stage.
    pub(super) next: u32,
    /// Position of the next part in the data and in the metadata.
    pub(super) data: SegmentListCursor,
    pub(super) metadata: SegmentListCursor,
    /// Parts, chunks and flushes in flight.
    pub(super) under_way: u16,
    pub(super) chunk: Option<BounceChunk>,
    pub(super) buffer: Option<u16>,
    /// The parent is in the queue of those with something to send.
    pub(super) is_queued: bool,
    pub(super) status: IoStatus,
    pub(super) result: u32,
}

/// Stage of a parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SplitStage {
    /// Waits until no other request is in flight.
    Draining,
    /// Waits for the lock on its range of blocks.
    Locking,
    /// Flushes, so that the data it reads is persistent.
    SyncingBefore(FlushState),
    /// Moves data; the first half of a compare-and-write compares.
    Moving,
    /// Writes the second half of a compare-and-write.
    Writing,
    /// Flushes, so that the data it has written is persistent.
    SyncingAfter(FlushState),
}

/// State of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushState {
    Due,
    Sent,
}

/// Blocks passing through a bounce buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BounceChunk {
    /// The first block, relative to the first of the request.
    pub(super) first: u32,
    pub(super) blocks: u32,
    pub(super) step: ChunkStep,
}

/// The next or current step of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkStep {
    WaitsForBuffer,
    ToFetch,
    Fetching,
    ToStore,
    Storing,
}

/// A position in a list of segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SegmentListCursor {
    index: usize,
    skip_bytes: u32,
}

impl SplitRequest {
    /// A free entry with capacity for `segments_max` segments of data and as many of metadata.
    pub(super) fn free_entry(segments_max: u16) -> Self {
        Self {
            request: Request::PLACEHOLDER,
            segments: Vec::with_capacity(2 * usize::from(segments_max)),
            plan: AdaptationPlan::Whole,
            stage: SplitStage::Moving,
            next: 0,
            data: SegmentListCursor::default(),
            metadata: SegmentListCursor::default(),
            under_way: 0,
            chunk: None,
            buffer: None,
            is_queued: false,
            status: IoStatus::SUCCESS,
            result: 0,
        }
    }

    /// Starts a request.
    pub(super) fn init(
        &mut self,
        request: &Request,
        own: &[Segment],
        plan: AdaptationPlan,
        syncs: bool,
    ) {
        self.request = *request;
        self.segments.clear();
        self.segments.extend_from_slice(own);
        (self.plan, self.next, self.result) = (plan, 0, 0);
        (self.data, self.metadata) = (SegmentListCursor::default(), SegmentListCursor::default());
        self.status = IoStatus::SUCCESS;
        self.stage = match request.operation {
            _ if plan == AdaptationPlan::CompareAndWrite => SplitStage::Draining,
            Operation::Read | Operation::Compare | Operation::Verify if syncs => {
                SplitStage::SyncingBefore(FlushState::Due)
            }
            _ => SplitStage::Moving,
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

    /// The operation of the parts in this stage.
    pub(super) fn part_operation(&self) -> Operation {
        match (self.plan, self.stage) {
            (AdaptationPlan::Zeroes, _) | (_, SplitStage::Writing) => Operation::Write,
            _ => self.request.operation,
        }
    }

    /// Whether parts go directly to or from memory in this stage.
    pub(super) fn is_direct_transfer(&self) -> bool {
        matches!(self.plan, AdaptationPlan::Parts | AdaptationPlan::Zeroes)
            || self.stage == SplitStage::Writing
    }

    /// The first step of a chunk once it has a buffer.
    pub(super) fn first_chunk_step(&self) -> ChunkStep {
        if self.is_direct_transfer() && self.part_operation() == Operation::Write {
            ChunkStep::ToStore
        } else {
            ChunkStep::ToFetch
        }
    }

    /// Offset of a chunk in the data: the new data of a compare-and-write follows the expected data.
    pub(super) fn data_offset(&self, first: u32, block_size: u32) -> u64 {
        let half = if self.stage == SplitStage::Writing { self.request.blocks } else { 0 };
        (u64::from(half) + u64::from(first)) * u64::from(block_size)
    }

    /// Whether a copy must start at its end: the target is behind the source, so that where they overlap a
    /// forward copy would overwrite blocks still to be read.
    pub(super) fn copies_backwards(&self) -> bool {
        self.plan == AdaptationPlan::Copy && self.request.operand < self.request.lba
    }

    /// A sub-request for some of the blocks, without segments.
    pub(super) fn sub_request(&self, operation: Operation, first: u32, blocks: u32) -> Request {
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

    /// Starts the second half of a compare-and-write.
    pub(super) fn begin_write_half(&mut self, block_size: u32) {
        (self.stage, self.next) = (SplitStage::Writing, 0);
        let half = self.data_offset(0, block_size);
        let mut data = SegmentListCursor::default();
        data.advance(self.data_segments(), half);
        self.data = data;
    }
}

impl SegmentListCursor {
    /// Copies the next segments to `into`: at most `bytes_max` in at most `count_max` slices, up to the
    /// first unaligned one. Returns the number of bytes.
    pub(super) fn peek_slices(
        mut self,
        segments: &[Segment],
        bytes_max: u64,
        count_max: usize,
        suits: impl Fn(Segment) -> bool,
        into: &mut Vec<Segment>,
    ) -> u64 {
        let mut bytes = 0;
        for _ in 0..count_max {
            let Some(slice) =
                self.take_segment(segments, bytes_max - bytes).filter(|slice| suits(*slice))
            else {
                break;
            };
            bytes += u64::from(slice.len_bytes);
            into.push(slice);
        }
        bytes
    }

    /// Advances by `bytes`.
    pub(super) fn advance(&mut self, segments: &[Segment], mut bytes: u64) {
        while let Some(slice) = self.take_segment(segments, bytes) {
            bytes -= u64::from(slice.len_bytes);
        }
    }

    /// Takes at most `bytes_max` bytes, not beyond the end of a segment. `None` at the end of the list,
    /// or if `bytes_max` is zero.
    fn take_segment(&mut self, segments: &[Segment], bytes_max: u64) -> Option<Segment> {
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

/// Trims slices with a total of `bytes` to `wanted` bytes.
pub(super) fn trim_slices(slices: &mut Vec<Segment>, mut bytes: u64, wanted: u64) {
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
    use tenmil_base::{RegionId, Segment};

    use super::{SegmentListCursor, trim_slices};

    fn sample_segments() -> [Segment; 4] {
        [(0, 5), (100, 0), (200, 3), (300, 4)].map(|(offset, len_bytes)| Segment {
            region: RegionId(0),
            offset,
            len_bytes,
        })
    }

    fn byte_offsets(slices: &[Segment]) -> Vec<u64> {
        let of = |slice: &Segment| slice.offset..slice.offset + u64::from(slice.len_bytes);
        slices.iter().flat_map(of).collect()
    }

    #[test]
    fn slices_from_any_position_cover_the_segments() {
        let list = sample_segments();
        let whole = byte_offsets(&list);
        for first in 0..=12 {
            for most in 0..=13 {
                let mut cursor = SegmentListCursor::default();
                cursor.advance(&list, first);
                let mut slices = Vec::new();
                let count = cursor.peek_slices(&list, most, 9, |_| true, &mut slices);
                let (from, to) = (usize::try_from(first).unwrap(), most.min(12 - first));
                let expected = &whole[from..from + usize::try_from(to).unwrap()];
                assert_eq!(
                    (byte_offsets(&slices), count),
                    (expected.to_vec(), to),
                    "{first} {most}"
                );
                for wanted in 0..=to {
                    let mut trimmed = slices.clone();
                    trim_slices(&mut trimmed, to, wanted);
                    assert_eq!(
                        byte_offsets(&trimmed),
                        &expected[..usize::try_from(wanted).unwrap()]
                    );
                    assert!(trimmed.iter().all(|slice| slice.len_bytes > 0));
                }
            }
        }
    }

    #[test]
    fn slices_end_at_the_count_limit_or_an_unaligned_segment() {
        let (list, mut slices) = (sample_segments(), Vec::new());
        assert_eq!(
            SegmentListCursor::default().peek_slices(&list, 99, 2, |_| true, &mut slices),
            8
        );
        slices.clear();
        let even = |slice: Segment| slice.offset != 300;
        assert_eq!(SegmentListCursor::default().peek_slices(&list, 99, 9, even, &mut slices), 8);
        assert_eq!(slices.len(), 2);
    }
}
