//! Making the parts of a parent, and what their ends lead to.

use base::{Backend, Flags, Instant, Operation, Outcome, Request, Segment};

use super::parent::{Chunk, Parent, Stage, Step, Sync, trim};
use super::rules::{Plan, Rules, changes};
use super::{BounceBuffers, RangeLock, Shaper};
use crate::own::own_token;

/// What a parent does next.
enum Next {
    /// Nothing, until something ends.
    Rest,
    /// It has come to another stage.
    Again,
    /// It is answered.
    End,
    /// Sends a request, whose memory is in the slices.
    Send(Request, Sent),
}

/// What a request that has gone below is to its parent.
#[derive(Clone, Copy)]
enum Sent {
    Flush,
    Chunk,
    /// So many more blocks, whose data are so many more bytes.
    Part {
        blocks: u32,
        bytes: u64,
    },
}

/// In the number of a part, above the number of its parent: its data is in the buffer.
const IS_CHUNK: u32 = 1 << 16;

/// The parent of a part, and whether the part is a chunk.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the parent")]
pub(super) fn read_number(number: u32) -> (u16, bool) {
    (number as u16, number & IS_CHUNK != 0)
}

impl<B: Backend, L: RangeLock> Shaper<B, L> {
    /// Sends what a parent may send. Returns whether that was anything, and whether there was no
    /// more room below.
    pub(super) fn send_parts(&mut self, now: Instant, index: u16) -> (bool, bool) {
        let mut has_sent = false;
        loop {
            match self.next(index) {
                Next::Rest => return (has_sent, false),
                Next::Again => {}
                Next::End => {
                    self.end(index);
                    return (has_sent, false);
                }
                Next::Send(request, sent) => {
                    if self.below.submit(now, &[request], &self.slices) == 0 {
                        return (has_sent, true);
                    }
                    has_sent = true;
                    self.has_gone(index, sent);
                }
            }
        }
    }

    fn next(&mut self, index: u16) -> Next {
        let alone = self.passed == 0 && self.parents_under_way() == 1;
        let parent = &mut self.parents[usize::from(index)];
        let Request { lba, blocks, .. } = parent.request;
        match parent.stage {
            Stage::Draining if !alone => Next::Rest,
            Stage::Draining => {
                parent.stage = Stage::Locking;
                Next::Again
            }
            Stage::Locking if !self.lock.acquire(lba..lba + u64::from(blocks)) => Next::Rest,
            Stage::Locking => {
                parent.stage = Stage::Moving;
                Next::Again
            }
            Stage::SyncingBefore(_) | Stage::SyncingAfter(_) if parent.under_way > 0 => Next::Rest,
            Stage::SyncingBefore(Sync::Due) | Stage::SyncingAfter(Sync::Due) => {
                self.slices.clear();
                let flush = Request { flags: Flags::NONE, ..parent.child(Operation::Flush, 0, 0) };
                Next::Send(Request { lba: 0, token: own_token(index.into()), ..flush }, Sent::Flush)
            }
            Stage::SyncingBefore(Sync::Sent) if parent.outcome.is_success() => {
                parent.stage = Stage::Moving;
                Next::Again
            }
            Stage::SyncingBefore(Sync::Sent) | Stage::SyncingAfter(Sync::Sent) => Next::End,
            Stage::Moving | Stage::Writing => self.next_part(index),
        }
    }

    /// The next part of a parent that moves data.
    fn next_part(&mut self, index: u16) -> Next {
        let parent = &self.parents[usize::from(index)];
        let is_idle = parent.under_way == 0;
        if !parent.outcome.is_success() {
            return if is_idle { Next::End } else { Next::Rest };
        }
        match parent.chunk.map(|chunk| chunk.step) {
            Some(Step::WaitsForBuffer) if parent.buffer.is_some() => {
                self.fill_chunk(index);
                return Next::Again;
            }
            Some(Step::ToFetch | Step::ToStore) => return self.chunk_request(index),
            Some(_) if !parent.goes_straight() => return Next::Rest,
            _ => {}
        }
        // What is sent whole may have no blocks at all.
        let all_given = match parent.plan {
            Plan::Whole => parent.next > 0,
            _ => parent.next == parent.request.blocks,
        };
        if all_given {
            let done = is_idle && parent.chunk.is_none();
            return if done { self.stage_done(index) } else { Next::Rest };
        }
        if parent.under_way >= self.children_max {
            return Next::Rest;
        }
        match parent.plan {
            Plan::Whole => self.whole(index),
            _ if parent.goes_straight() => self.straight_part(index),
            _ => self.begin_chunk(index, u32::MAX),
        }
    }

    /// All blocks have been dealt with.
    fn stage_done(&mut self, index: u16) -> Next {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        if parent.plan == Plan::CompareAndWrite && parent.stage == Stage::Moving {
            parent.turn_to_writing(block_size);
            return Next::Again;
        }
        if self.rules.must_sync(&parent.request) && changes(parent.request.operation) {
            parent.stage = Stage::SyncingAfter(Sync::Due);
            return Next::Again;
        }
        Next::End
    }

    fn whole(&mut self, index: u16) -> Next {
        let parent = &self.parents[usize::from(index)];
        self.slices.clear();
        self.slices.extend_from_slice(&parent.segments);
        let flags = flags_below(&self.rules, parent.request.flags);
        let token = own_token(index.into());
        let request = Request { token, flags, segment_first: 0, ..parent.request };
        Next::Send(request, Sent::Part { blocks: parent.request.blocks.max(1), bytes: 0 })
    }

    /// A part whose data goes straight between the device and memory, or a chunk if the memory does
    /// not suit.
    fn straight_part(&mut self, index: u16) -> Next {
        let parent = &self.parents[usize::from(index)];
        let operation = parent.part_operation();
        let lba = parent.request.lba + u64::from(parent.next);
        let left = parent.request.blocks - parent.next;
        let most = left.min(self.rules.blocks_max).min(self.rules.to_boundary(lba));
        self.slices.clear();
        let blocks = if parent.plan == Plan::Zeroes {
            zero_slices(&self.rules, &self.buffers, most, &mut self.slices)
        } else {
            data_slices(&self.rules, parent, most, &mut self.slices)
        };
        let is_cut = parent.request.blocks <= self.rules.atomic_blocks && blocks < left;
        if blocks == 0 || (is_cut && operation == Operation::Write && parent.plan == Plan::Parts) {
            return self.begin_chunk(index, most);
        }
        let mut request = parent.child(operation, parent.next, blocks);
        request.segment_count = count_of(&self.slices);
        let metadata_bytes = u64::from(blocks) * u64::from(self.rules.metadata_size);
        if parent.plan == Plan::Parts && metadata_bytes > 0 {
            add_metadata(parent, metadata_bytes, &mut self.slices, &mut request);
        }
        request.flags = flags_below(&self.rules, parent.request.flags);
        if parent.plan == Plan::Zeroes {
            request.flags.0 &= !Flags::DEALLOCATE.0;
        }
        request.token = own_token(index.into());
        let bytes = u64::from(blocks) * u64::from(self.rules.block_size);
        Next::Send(request, Sent::Part { blocks, bytes })
    }

    /// Takes the next blocks for a chunk, at most `most`, and a buffer for them.
    fn begin_chunk(&mut self, index: u16, most: u32) -> Next {
        let parent = &mut self.parents[usize::from(index)];
        if parent.chunk.is_some() {
            return Next::Rest;
        }
        let room = self.buffers.chunk_bytes() / self.rules.block_size;
        let most = most.min(room).min(self.rules.blocks_max);
        let (first, blocks) = chunk_range(&self.rules, parent, most);
        parent.chunk = Some(Chunk { first, blocks, step: Step::WaitsForBuffer });
        parent.next += blocks;
        let bytes = u64::from(blocks) * u64::from(self.rules.block_size);
        advance(parent, blocks, bytes, self.rules.metadata_size);
        parent.buffer = self.buffers.take(index);
        if parent.buffer.is_some() { Next::Again } else { Next::Rest }
    }

    /// The chunk has its buffer: fills it, if it is to be written.
    fn fill_chunk(&mut self, index: u16) {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        let (Some(mut chunk), Some(buffer)) = (parent.chunk, parent.buffer) else { return };
        chunk.step = parent.first_step();
        parent.chunk = Some(chunk);
        if chunk.step == Step::ToStore {
            let own = self.buffers.part(buffer, chunk.blocks * block_size);
            let skip = parent.data_offset(chunk.first, block_size);
            if let Err(outcome) = self.buffers.gather(parent.data_segments(), skip, own) {
                parent.outcome = outcome;
                self.end_chunk(index);
            }
        }
    }

    /// The request that moves a chunk between the device and its buffer.
    fn chunk_request(&mut self, index: u16) -> Next {
        let parent = &self.parents[usize::from(index)];
        let (Some(chunk), Some(buffer)) = (parent.chunk, parent.buffer) else { return Next::Rest };
        let Chunk { first, blocks, step } = chunk;
        let stores = step == Step::ToStore;
        let operation = if stores { Operation::Write } else { Operation::Read };
        let mut request = parent.child(operation, first, blocks);
        if parent.plan == Plan::Copy && !stores {
            request.lba = parent.request.operand + u64::from(first);
        }
        self.slices.clear();
        self.slices.push(self.buffers.part(buffer, blocks * self.rules.block_size));
        request.segment_count = 1;
        let flags = flags_below(&self.rules, parent.request.flags);
        let is_own = parent.request.operation == operation || stores;
        request.flags = if is_own { flags } else { Flags(flags.0 & Flags::LIMITED_RETRY.0) };
        let metadata_bytes = u64::from(blocks) * u64::from(self.rules.metadata_size);
        if metadata_bytes > 0 {
            // The cursor has gone past the chunk already; its metadata lies where its blocks do.
            let mut at = super::parent::Cursor::default();
            let skip = u64::from(first) * u64::from(self.rules.metadata_size);
            at.advance(parent.metadata_segments(), skip);
            metadata_slices(parent, at, metadata_bytes, &mut self.slices, &mut request);
        }
        request.token = own_token(IS_CHUNK | u32::from(index));
        Next::Send(request, Sent::Chunk)
    }

    /// Notes that a request has gone below.
    fn has_gone(&mut self, index: u16, sent: Sent) {
        let metadata_size = self.rules.metadata_size;
        let parent = &mut self.parents[usize::from(index)];
        parent.under_way += 1;
        match sent {
            Sent::Flush => {
                parent.stage = match parent.stage {
                    Stage::SyncingBefore(_) => Stage::SyncingBefore(Sync::Sent),
                    _ => Stage::SyncingAfter(Sync::Sent),
                }
            }
            Sent::Chunk => {
                if let Some(chunk) = &mut parent.chunk {
                    let stores = chunk.step == Step::ToStore;
                    chunk.step = if stores { Step::Storing } else { Step::Fetching };
                }
            }
            Sent::Part { blocks, bytes } => {
                parent.next += blocks;
                advance(parent, blocks, bytes, metadata_size);
            }
        }
    }

    /// What comes after a chunk has been fetched or stored.
    pub(super) fn chunk_ended(&mut self, index: u16) {
        let block_size = self.rules.block_size;
        let parent = &mut self.parents[usize::from(index)];
        let (Some(chunk), Some(buffer)) = (&mut parent.chunk, parent.buffer) else { return };
        if parent.outcome.is_success() && chunk.step == Step::Fetching {
            let Chunk { first, blocks, .. } = *chunk;
            if parent.plan == Plan::Copy {
                chunk.step = Step::ToStore;
                return;
            }
            let own = self.buffers.part(buffer, blocks * block_size);
            let skip = parent.data_offset(first, block_size);
            let data = parent.data_segments();
            let moved = match parent.request.operation {
                Operation::Read => self.buffers.scatter(own, data, skip),
                Operation::Verify => Ok(()),
                _ => self.buffers.compare(own, data, skip),
            };
            parent.outcome = moved.err().unwrap_or(Outcome::SUCCESS);
        }
        self.end_chunk(index);
    }

    fn end_chunk(&mut self, index: u16) {
        self.parents[usize::from(index)].chunk = None;
        self.give_buffer_back(index);
    }

    /// Gives a parent's buffer back, to whoever has waited longest for one.
    pub(super) fn give_buffer_back(&mut self, index: u16) {
        let Some(buffer) = self.parents[usize::from(index)].buffer.take() else { return };
        if let Some(next) = self.buffers.give_back(buffer) {
            self.parents[usize::from(next)].buffer = Some(buffer);
            self.stand_in_row(next);
        }
    }
}

/// The blocks of the next chunk, counted from the first of the request.
fn chunk_range(rules: &Rules, parent: &Parent, most: u32) -> (u32, u32) {
    let Request { lba, operand, blocks, .. } = parent.request;
    let left = blocks - parent.next;
    let is_copy = parent.plan == Plan::Copy;
    if parent.goes_backwards() {
        let (target, source) = (lba + u64::from(left), operand + u64::from(left));
        let most = most.min(rules.since_boundary(target)).min(rules.since_boundary(source));
        let count = left.min(most);
        return (left - count, count);
    }
    let at = u64::from(parent.next);
    let source = if is_copy { operand } else { lba };
    let most = most.min(rules.to_boundary(lba + at)).min(rules.to_boundary(source + at));
    (parent.next, left.min(most))
}

/// Moves a parent's cursors past blocks that have gone straight or have become a chunk.
fn advance(parent: &mut Parent, blocks: u32, bytes: u64, metadata_size: u16) {
    if parent.plan != Plan::Parts && parent.stage != Stage::Writing {
        return;
    }
    let mut data = parent.data;
    data.advance(parent.data_segments(), bytes);
    let mut metadata = parent.metadata;
    let metadata_bytes = u64::from(blocks) * u64::from(metadata_size);
    metadata.advance(parent.metadata_segments(), metadata_bytes);
    (parent.data, parent.metadata) = (data, metadata);
}

/// Fills `slices` with the memory of at most `most` whole blocks, and returns how many they are.
fn data_slices(rules: &Rules, parent: &Parent, most: u32, slices: &mut Vec<Segment>) -> u32 {
    let block_size = u64::from(rules.block_size);
    let wanted = u64::from(most) * block_size;
    let count_max = usize::from(rules.segments_max);
    let suits = |slice| rules.alignment.suits(slice);
    let bytes = parent.data.slices(parent.data_segments(), wanted, count_max, suits, slices);
    let blocks = bytes / block_size;
    trim(slices, bytes, blocks * block_size);
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// Fills `slices` with the memory of at most `most` blocks of zeroes, and returns how many they are.
fn zero_slices(
    rules: &Rules,
    buffers: &BounceBuffers,
    most: u32,
    slices: &mut Vec<Segment>,
) -> u32 {
    let zeroes = buffers.zeroes();
    let whole = buffers.chunk_bytes() / rules.block_size;
    let mut blocks = 0;
    while blocks < most && slices.len() < usize::from(rules.segments_max) {
        let count = whole.min(most - blocks);
        slices.push(Segment { len_bytes: count * rules.block_size, ..zeroes });
        blocks += count;
    }
    blocks
}

/// Adds the metadata of the part that comes next.
fn add_metadata(parent: &Parent, bytes: u64, slices: &mut Vec<Segment>, request: &mut Request) {
    metadata_slices(parent, parent.metadata, bytes, slices, request);
}

fn metadata_slices(
    parent: &Parent,
    at: super::parent::Cursor,
    bytes: u64,
    slices: &mut Vec<Segment>,
    request: &mut Request,
) {
    let before = slices.len();
    at.slices(parent.metadata_segments(), bytes, usize::MAX, |_| true, slices);
    request.metadata_count = count_of(&slices[before..]);
}

fn count_of(slices: &[Segment]) -> u16 {
    u16::try_from(slices.len()).unwrap_or(u16::MAX)
}

/// The flags that a part keeps.
fn flags_below(rules: &Rules, flags: Flags) -> Flags {
    match rules.force {
        super::ForceUnitAccess::Below => flags,
        super::ForceUnitAccess::ByFlush => Flags(flags.0 & !Flags::FUA.0),
    }
}
