//! Sub-requests: building the parts of a parent, and handling their completion.

use tenmil_base::{Instant, IoChannel, IoStatus, Operation, Request, RequestFlags, Segment};

use super::constraints::{AdaptationPlan, DeviceConstraints, changes_blocks};
use super::split_request::{
    BounceChunk, ChunkStep, FlushState, SplitRequest, SplitStage, trim_slices,
};
use super::{AdaptedChannel, BounceBuffers, RangeLock};
use crate::internal_token::internal_token;

/// The next action of a parent.
enum ParentAction {
    /// None, until a part completes.
    Rest,
    /// Re-evaluate: the stage has changed.
    Again,
    /// Complete the parent.
    End,
    /// Send a request, whose memory is in `slices`.
    Send(Request, SubRequestKind),
}

/// What a sub-request is to its parent.
#[derive(Clone, Copy)]
enum SubRequestKind {
    Flush,
    Chunk,
    /// A part of so many blocks and data bytes.
    Part {
        blocks: u32,
        bytes: u64,
    },
}

/// Bit in the index of a part, above the index of its parent: the data is in the bounce buffer.
const IS_CHUNK: u32 = 1 << 16;

/// The parent of a part, and whether the part is a chunk.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the parent")]
pub(super) fn parent_and_is_chunk_of(number: u32) -> (u16, bool) {
    (number as u16, number & IS_CHUNK != 0)
}

impl<B: IoChannel, L: RangeLock> AdaptedChannel<B, L> {
    /// Sends the parts of a parent that can go. Returns whether any was sent, and whether the channel
    /// below is full.
    pub(super) fn submit_parts_of(&mut self, now: Instant, index: u16) -> (bool, bool) {
        let mut has_sent = false;
        loop {
            match self.next_parent_action(index) {
                ParentAction::Rest => return (has_sent, false),
                ParentAction::Again => {}
                ParentAction::End => {
                    self.complete_parent(index);
                    return (has_sent, false);
                }
                ParentAction::Send(request, sent) => {
                    if self.below.submit(now, &[request], &self.slices) == 0 {
                        return (has_sent, true);
                    }
                    has_sent = true;
                    self.record_submitted(index, sent);
                }
            }
        }
    }

    fn next_parent_action(&mut self, index: u16) -> ParentAction {
        let alone = self.passed == 0 && self.parents_in_flight() == 1;
        let parent = &mut self.parents[usize::from(index)];
        let Request { lba, blocks, .. } = parent.request;
        match parent.stage {
            SplitStage::Draining if !alone => ParentAction::Rest,
            SplitStage::Draining => {
                parent.stage = SplitStage::Locking;
                ParentAction::Again
            }
            SplitStage::Locking if !self.lock.acquire(lba..lba + u64::from(blocks)) => {
                ParentAction::Rest
            }
            SplitStage::Locking => {
                parent.stage = SplitStage::Moving;
                ParentAction::Again
            }
            SplitStage::SyncingBefore(_) | SplitStage::SyncingAfter(_) if parent.under_way > 0 => {
                ParentAction::Rest
            }
            SplitStage::SyncingBefore(FlushState::Due)
            | SplitStage::SyncingAfter(FlushState::Due) => {
                self.slices.clear();
                let flush = Request {
                    flags: RequestFlags::NONE,
                    ..parent.sub_request(Operation::Flush, 0, 0)
                };
                ParentAction::Send(
                    Request { lba: 0, token: internal_token(index.into()), ..flush },
                    SubRequestKind::Flush,
                )
            }
            SplitStage::SyncingBefore(FlushState::Sent) if parent.status.is_success() => {
                parent.stage = SplitStage::Moving;
                ParentAction::Again
            }
            SplitStage::SyncingBefore(FlushState::Sent)
            | SplitStage::SyncingAfter(FlushState::Sent) => ParentAction::End,
            SplitStage::Moving | SplitStage::Writing => self.next_part_action(index),
        }
    }

    /// The next action of a parent that moves data.
    fn next_part_action(&mut self, index: u16) -> ParentAction {
        let parent = &self.parents[usize::from(index)];
        let is_idle = parent.under_way == 0;
        if !parent.status.is_success() {
            return if is_idle { ParentAction::End } else { ParentAction::Rest };
        }
        match parent.chunk.map(|chunk| chunk.step) {
            Some(ChunkStep::WaitsForBuffer) if parent.buffer.is_some() => {
                self.load_chunk_for_write(index);
                return ParentAction::Again;
            }
            Some(ChunkStep::ToFetch | ChunkStep::ToStore) => return self.action_for_chunk(index),
            Some(_) if !parent.is_direct_transfer() => return ParentAction::Rest,
            _ => {}
        }
        // A request that is sent whole may have zero blocks.
        let all_given = match parent.plan {
            AdaptationPlan::Whole => parent.next > 0,
            _ => parent.next == parent.request.blocks,
        };
        if all_given {
            let done = is_idle && parent.chunk.is_none();
            return if done { self.next_stage_action(index) } else { ParentAction::Rest };
        }
        if parent.under_way >= self.children_max {
            return ParentAction::Rest;
        }
        match parent.plan {
            AdaptationPlan::Whole => self.action_for_whole_request(index),
            _ if parent.is_direct_transfer() => self.action_for_direct_part(index),
            _ => self.reserve_chunk(index, u32::MAX),
        }
    }

    /// All blocks of the stage have been processed.
    fn next_stage_action(&mut self, index: u16) -> ParentAction {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        if parent.plan == AdaptationPlan::CompareAndWrite && parent.stage == SplitStage::Moving {
            parent.begin_write_half(block_size);
            return ParentAction::Again;
        }
        if self.rules.must_emulate_fua(&parent.request) && changes_blocks(parent.request.operation)
        {
            parent.stage = SplitStage::SyncingAfter(FlushState::Due);
            return ParentAction::Again;
        }
        ParentAction::End
    }

    fn action_for_whole_request(&mut self, index: u16) -> ParentAction {
        let parent = &self.parents[usize::from(index)];
        self.slices.clear();
        self.slices.extend_from_slice(&parent.segments);
        let flags = inherited_flags(&self.rules, parent.request.flags);
        let token = internal_token(index.into());
        let request = Request { token, flags, segment_first: 0, ..parent.request };
        ParentAction::Send(
            request,
            SubRequestKind::Part { blocks: parent.request.blocks.max(1), bytes: 0 },
        )
    }

    /// A part transferred directly between the device and memory, or a chunk if the memory is unaligned.
    fn action_for_direct_part(&mut self, index: u16) -> ParentAction {
        let parent = &self.parents[usize::from(index)];
        let operation = parent.part_operation();
        let lba = parent.request.lba + u64::from(parent.next);
        let left = parent.request.blocks - parent.next;
        let most = left.min(self.rules.blocks_max).min(self.rules.blocks_to_boundary(lba));
        self.slices.clear();
        let blocks = if parent.plan == AdaptationPlan::Zeroes {
            append_zero_segments(&self.rules, &self.buffers, most, &mut self.slices)
        } else {
            data_slices(&self.rules, parent, most, &mut self.slices)
        };
        // A write within the atomic size must not be split: a bounce buffer joins its segments.
        let is_cut = parent.request.blocks <= self.rules.atomic_blocks && blocks < left;
        if blocks == 0
            || (is_cut && operation == Operation::Write && parent.plan == AdaptationPlan::Parts)
        {
            return self.reserve_chunk(index, most);
        }
        let mut request = parent.sub_request(operation, parent.next, blocks);
        request.segment_count = slice_count(&self.slices);
        let metadata_bytes = u64::from(blocks) * u64::from(self.rules.metadata_size);
        if parent.plan == AdaptationPlan::Parts && metadata_bytes > 0 {
            append_metadata_segments(parent, metadata_bytes, &mut self.slices, &mut request);
        }
        request.flags = inherited_flags(&self.rules, parent.request.flags);
        if parent.plan == AdaptationPlan::Zeroes {
            request.flags.0 &= !RequestFlags::DEALLOCATE.0;
        }
        request.token = internal_token(index.into());
        let bytes = u64::from(blocks) * u64::from(self.rules.block_size);
        ParentAction::Send(request, SubRequestKind::Part { blocks, bytes })
    }

    /// Reserves the next blocks, at most `most`, for a chunk, and a buffer for them.
    fn reserve_chunk(&mut self, index: u16, most: u32) -> ParentAction {
        let parent = &mut self.parents[usize::from(index)];
        if parent.chunk.is_some() {
            return ParentAction::Rest;
        }
        let room = self.buffers.chunk_bytes() / self.rules.block_size;
        let most = most.min(room).min(self.rules.blocks_max);
        let (first, blocks) = next_chunk_range(&self.rules, parent, most);
        parent.chunk = Some(BounceChunk { first, blocks, step: ChunkStep::WaitsForBuffer });
        parent.next += blocks;
        let bytes = u64::from(blocks) * u64::from(self.rules.block_size);
        advance_cursors(parent, blocks, bytes, self.rules.metadata_size);
        parent.buffer = self.buffers.take_buffer_or_wait(index);
        if parent.buffer.is_some() { ParentAction::Again } else { ParentAction::Rest }
    }

    /// The chunk has its buffer: fills it if it is to be written.
    fn load_chunk_for_write(&mut self, index: u16) {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        let (Some(mut chunk), Some(buffer)) = (parent.chunk, parent.buffer) else { return };
        chunk.step = parent.first_chunk_step();
        parent.chunk = Some(chunk);
        if chunk.step == ChunkStep::ToStore {
            let own = self.buffers.buffer_segment(buffer, chunk.blocks * block_size);
            let skip = parent.data_offset(chunk.first, block_size);
            if let Err(status) =
                self.buffers.copy_request_to_buffer(parent.data_segments(), skip, own)
            {
                parent.status = status;
                self.end_chunk(index);
            }
        }
    }

    /// The request that transfers a chunk between the device and its buffer.
    fn action_for_chunk(&mut self, index: u16) -> ParentAction {
        let parent = &self.parents[usize::from(index)];
        let (Some(chunk), Some(buffer)) = (parent.chunk, parent.buffer) else {
            return ParentAction::Rest;
        };
        let BounceChunk { first, blocks, step } = chunk;
        let stores = step == ChunkStep::ToStore;
        let operation = if stores { Operation::Write } else { Operation::Read };
        let mut request = parent.sub_request(operation, first, blocks);
        if parent.plan == AdaptationPlan::Copy && !stores {
            request.lba = parent.request.operand + u64::from(first);
        }
        self.slices.clear();
        self.slices.push(self.buffers.buffer_segment(buffer, blocks * self.rules.block_size));
        request.segment_count = 1;
        let flags = inherited_flags(&self.rules, parent.request.flags);
        let is_own = parent.request.operation == operation || stores;
        request.flags =
            if is_own { flags } else { RequestFlags(flags.0 & RequestFlags::LIMITED_RETRY.0) };
        let metadata_bytes = u64::from(blocks) * u64::from(self.rules.metadata_size);
        if metadata_bytes > 0 {
            // The cursor is already past the chunk; the metadata offset follows from the chunk's first
            // block.
            let mut at = super::split_request::SegmentListCursor::default();
            let skip = u64::from(first) * u64::from(self.rules.metadata_size);
            at.advance(parent.metadata_segments(), skip);
            metadata_slices(parent, at, metadata_bytes, &mut self.slices, &mut request);
        }
        request.token = internal_token(IS_CHUNK | u32::from(index));
        ParentAction::Send(request, SubRequestKind::Chunk)
    }

    /// Records that a sub-request was submitted.
    fn record_submitted(&mut self, index: u16, sent: SubRequestKind) {
        let metadata_size = self.rules.metadata_size;
        let parent = &mut self.parents[usize::from(index)];
        parent.under_way += 1;
        match sent {
            SubRequestKind::Flush => {
                parent.stage = match parent.stage {
                    SplitStage::SyncingBefore(_) => SplitStage::SyncingBefore(FlushState::Sent),
                    _ => SplitStage::SyncingAfter(FlushState::Sent),
                }
            }
            SubRequestKind::Chunk => {
                if let Some(chunk) = &mut parent.chunk {
                    let stores = chunk.step == ChunkStep::ToStore;
                    chunk.step = if stores { ChunkStep::Storing } else { ChunkStep::Fetching };
                }
            }
            SubRequestKind::Part { blocks, bytes } => {
                parent.next += blocks;
                advance_cursors(parent, blocks, bytes, metadata_size);
            }
        }
    }

    /// Handles the completion of a chunk's read or write.
    pub(super) fn handle_chunk_completion(&mut self, index: u16) {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        let (Some(chunk), Some(buffer)) = (&mut parent.chunk, parent.buffer) else { return };
        if parent.status.is_success() && chunk.step == ChunkStep::Fetching {
            let BounceChunk { first, blocks, .. } = *chunk;
            if parent.plan == AdaptationPlan::Copy {
                chunk.step = ChunkStep::ToStore;
                return;
            }
            let own = self.buffers.buffer_segment(buffer, blocks * block_size);
            let skip = parent.data_offset(first, block_size);
            let data = parent.data_segments();
            let moved = match parent.request.operation {
                Operation::Read => self.buffers.copy_buffer_to_request(own, data, skip),
                Operation::Verify => Ok(()),
                _ => self.buffers.compare_with_memory(own, data, skip),
            };
            parent.status = moved.err().unwrap_or(IoStatus::SUCCESS);
        }
        self.end_chunk(index);
    }

    fn end_chunk(&mut self, index: u16) {
        self.parents[usize::from(index)].chunk = None;
        self.release_buffer(index);
    }

    /// Frees a parent's buffer, or passes it to the parent that has waited longest.
    pub(super) fn release_buffer(&mut self, index: u16) {
        let Some(buffer) = self.parents[usize::from(index)].buffer.take() else { return };
        if let Some(next) = self.buffers.release_buffer(buffer) {
            self.parents[usize::from(next)].buffer = Some(buffer);
            self.queue_parent(next);
        }
    }
}

/// The blocks of the next chunk, relative to the first block of the request.
fn next_chunk_range(rules: &DeviceConstraints, parent: &SplitRequest, most: u32) -> (u32, u32) {
    let Request { lba, operand, blocks, .. } = parent.request;
    let left = blocks - parent.next;
    let is_copy = parent.plan == AdaptationPlan::Copy;
    if parent.copies_backwards() {
        let (target, source) = (lba + u64::from(left), operand + u64::from(left));
        let most =
            most.min(rules.blocks_since_boundary(target)).min(rules.blocks_since_boundary(source));
        let count = left.min(most);
        return (left - count, count);
    }
    let at = u64::from(parent.next);
    let source = if is_copy { operand } else { lba };
    let most =
        most.min(rules.blocks_to_boundary(lba + at)).min(rules.blocks_to_boundary(source + at));
    (parent.next, left.min(most))
}

/// Advances a parent's cursors past blocks that were sent directly or became a chunk.
fn advance_cursors(parent: &mut SplitRequest, blocks: u32, bytes: u64, metadata_size: u16) {
    if parent.plan != AdaptationPlan::Parts && parent.stage != SplitStage::Writing {
        return;
    }
    let mut data = parent.data;
    data.advance(parent.data_segments(), bytes);
    let mut metadata = parent.metadata;
    let metadata_bytes = u64::from(blocks) * u64::from(metadata_size);
    metadata.advance(parent.metadata_segments(), metadata_bytes);
    (parent.data, parent.metadata) = (data, metadata);
}

/// Fills `slices` with the memory of at most `most` whole blocks, and returns their number.
fn data_slices(
    rules: &DeviceConstraints,
    parent: &SplitRequest,
    most: u32,
    slices: &mut Vec<Segment>,
) -> u32 {
    let block_size = u64::from(rules.block_size);
    let wanted = u64::from(most) * block_size;
    let count_max = usize::from(rules.segments_max);
    let suits = |slice| rules.alignment.is_aligned(slice);
    let bytes = parent.data.peek_slices(parent.data_segments(), wanted, count_max, suits, slices);
    let blocks = bytes / block_size;
    trim_slices(slices, bytes, blocks * block_size);
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// Fills `slices` with zeroes for at most `most` blocks, and returns their number.
fn append_zero_segments(
    rules: &DeviceConstraints,
    buffers: &BounceBuffers,
    most: u32,
    slices: &mut Vec<Segment>,
) -> u32 {
    let zeroes = buffers.zero_segment();
    let whole = buffers.chunk_bytes() / rules.block_size;
    let mut blocks = 0;
    while blocks < most && slices.len() < usize::from(rules.segments_max) {
        let count = whole.min(most - blocks);
        slices.push(Segment { len_bytes: count * rules.block_size, ..zeroes });
        blocks += count;
    }
    blocks
}

/// Appends the metadata of the next part.
fn append_metadata_segments(
    parent: &SplitRequest,
    bytes: u64,
    slices: &mut Vec<Segment>,
    request: &mut Request,
) {
    metadata_slices(parent, parent.metadata, bytes, slices, request);
}

fn metadata_slices(
    parent: &SplitRequest,
    at: super::split_request::SegmentListCursor,
    bytes: u64,
    slices: &mut Vec<Segment>,
    request: &mut Request,
) {
    let before = slices.len();
    at.peek_slices(parent.metadata_segments(), bytes, usize::MAX, |_| true, slices);
    request.metadata_count = slice_count(&slices[before..]);
}

fn slice_count(slices: &[Segment]) -> u16 {
    u16::try_from(slices.len()).unwrap_or(u16::MAX)
}

/// The flags that a part inherits. A hole in one part says nothing about the others, nor does a part
/// that stays in the medium's memory.
fn inherited_flags(rules: &DeviceConstraints, flags: RequestFlags) -> RequestFlags {
    let flags = flags.without(RequestFlags::HOLES.union(RequestFlags::IN_PLACE));
    match rules.force {
        super::FuaMode::Native => flags,
        super::FuaMode::Flush => flags.without(RequestFlags::FUA),
    }
}
