//! Job driver: executes the steps of multi-request commands, at once or after a host access or a request
//! has completed.

use tenmil_base::{
    AccessCompletion, AccessId, AccessProgress, HostMemory, Instant, IoStatus, Operation, Request,
    Segment,
};
use tenmil_wire::Status;

use super::command_context::{CommandContext, CopyTarget, WaitReason};
use super::job::{DataLocation, Job, JobEvent, JobStep, SubRequest};
use super::{CommandData, Executor, TICKET_LIST};
use crate::bounce::BouncePool;
use crate::queue::QueueEvent;
use crate::transfer::{CopyState, DataPointerWalk, Direction, LocalBuffer, WalkStep};

/// Result of a step.
enum StepResult {
    /// Finished, with the event for the job.
    Now(JobEvent),
    /// Deferred: the context waits.
    Later,
    /// Failed with this status.
    Failed(Status),
}

impl<H: HostMemory> Executor<H> {
    /// Advances the job of a context after `event` until it waits or ends.
    pub(super) fn drive(&mut self, now: Instant, index: u16, mut event: JobEvent) {
        loop {
            let area = self.areas.get(index);
            area.wait = WaitReason::Nothing;
            // An aborted job ends at its next event, with the status of the abort.
            let step = match area.cancelled {
                Some(status) => JobStep::End(status, 0),
                None => area.job.next(event, &area.command, &area.bytes),
            };
            let did = match step {
                JobStep::Walk { len_bytes, direction } => self.walk(index, len_bytes, direction),
                JobStep::ResolveDirect => self.reach(index),
                JobStep::TakeBuffer { is_zeroed } => self.take_buffer(index, is_zeroed),
                JobStep::FromHost(len) | JobStep::ToHost(len) => {
                    self.begin_move(index, CopyTarget::Buffer, len)
                }
                JobStep::Check(len) => self.begin_move(index, CopyTarget::Check, len),
                JobStep::ReadParameters(len) => {
                    area.bytes.clear();
                    area.bytes.resize(len as usize, 0);
                    self.begin_move(index, CopyTarget::Bytes, len)
                }
                JobStep::WriteResult(len) => {
                    let len = area.pad_result(len);
                    self.begin_move(index, CopyTarget::Bytes, len)
                }
                JobStep::Submit(work) => self.submit_work(now, index, work),
                JobStep::FlushFrom(channel) => self.flush_from(now, index, channel),
                JobStep::Forward => self.forward(index),
                JobStep::End(status, result) => {
                    self.finish(now, index, status, result);
                    return;
                }
            };
            event = match did {
                StepResult::Now(event) => event,
                StepResult::Later => return,
                StepResult::Failed(status) => {
                    self.finish(now, index, status, 0);
                    return;
                }
            };
        }
    }

    /// Handles the completion of a request that belongs to a context.
    pub(super) fn answered(&mut self, now: Instant, index: u16, outcome: IoStatus) {
        let area = self.areas.get(index);
        if area.wait == WaitReason::Backend {
            let event = match area.job {
                Job::FlushAll(_) => JobEvent::Flushed(Some((area.channel, outcome))),
                _ => JobEvent::Answered(outcome),
            };
            self.drive(now, index, event);
        }
    }

    /// Retries contexts that wait for a buffer, for space in a block device, or for exclusivity.
    pub fn retry_waiting(&mut self, now: Instant) {
        while let Some(&index) = self.want_buffer.front() {
            let WaitReason::Buffer { is_zeroed } = self.areas.get(index).wait else {
                self.want_buffer.pop_front();
                continue;
            };
            let Some(event) = allocate_bounce(&self.buffers, self.areas.get(index), is_zeroed)
            else {
                break;
            };
            self.want_buffer.pop_front();
            self.drive(now, index, event);
        }
        for _ in 0..self.want_room.len() {
            let Some(index) = self.want_room.pop_front() else { break };
            if let WaitReason::BackendFull(request) = self.areas.get(index).wait {
                self.try_submit(now, index, request);
            }
        }
        self.try_pair(now);
    }

    /// Completes the command of a context whose memory is not accessed anymore.
    pub(super) fn finish(&mut self, now: Instant, index: u16, status: Status, result: u32) {
        let area = self.areas.get(index);
        let slot = area.slot;
        if let Some(buffer) = area.buffer.take() {
            self.buffers.release(buffer);
        }
        self.areas.release(index);
        self.complete(slot, status, result);
        self.pair_ended(now, index, status);
    }

    /// Handles the completion of a host access that belongs to a context.
    pub(crate) fn host_ended(&mut self, now: Instant, ended: AccessCompletion) {
        let Some((index, area)) = self.areas.find(ended.id.0 >> 4) else { return };
        let did = match (area.wait, ended.id.0 & 0xf) {
            (WaitReason::List { len_bytes }, TICKET_LIST) => {
                area.wait = WaitReason::Nothing;
                match ended.result {
                    Ok(()) => {
                        let list = &mut self.scratch[..len_bytes as usize];
                        self.host.take_data(ended.id, list);
                        // A cancelled command starts no further access.
                        match (area.cancelled, area.walk.feed(list, &mut area.pieces)) {
                            (None, Ok(next)) => self.follow(index, next),
                            (Some(status), _) | (None, Err(status)) => StepResult::Failed(status),
                        }
                    }
                    Err(_) => StepResult::Failed(Status::DATA_TRANSFER_ERROR),
                }
            }
            (WaitReason::Host(aim), _) => {
                let (mover, direction) = (&mut area.mover, area.direction);
                let mut target =
                    target(&self.buffers, aim, area.buffer, &mut area.bytes, &mut area.differs);
                mover.end(&mut self.host, ended, direction, &mut target, &mut self.scratch);
                self.go_on_moving(index, aim)
            }
            _ => return,
        };
        match did {
            StepResult::Now(event) => self.drive(now, index, event),
            StepResult::Later => {}
            StepResult::Failed(status) => {
                let status = self.areas.get(index).cancelled.unwrap_or(status);
                self.finish(now, index, status, 0);
            }
        }
    }

    /// Determines the host ranges of the data.
    fn walk(&mut self, index: u16, len_bytes: u32, direction: Direction) -> StepResult {
        let area = self.areas.get(index);
        area.direction = direction;
        let started = match area.data {
            CommandData::Pointers => DataPointerWalk::start(
                &area.command,
                len_bytes,
                direction,
                self.page_shift,
                &mut area.pieces,
            ),
            CommandData::Segment(segment) => {
                let is_exact = matches!(area.job, Job::Transfer(_));
                DataPointerWalk::of_segment(segment, len_bytes, is_exact, &mut area.pieces)
            }
        };
        match started {
            Ok((walk, next)) => {
                area.walk = walk;
                self.follow(index, next)
            }
            Err(status) => StepResult::Failed(status),
        }
    }

    /// Supplies the lists that the data pointer walk needs.
    fn follow(&mut self, index: u16, mut next: WalkStep) -> StepResult {
        let area = self.areas.get(index);
        loop {
            let WalkStep::List { iova, len_bytes } = next else {
                return StepResult::Now(JobEvent::Walked);
            };
            let list = &mut self.scratch[..len_bytes as usize];
            match self.host.read(AccessId(u32::from(index) << 4 | TICKET_LIST), iova, list) {
                Ok(AccessProgress::Done) => match area.walk.feed(list, &mut area.pieces) {
                    Ok(following) => next = following,
                    Err(status) => return StepResult::Failed(status),
                },
                Ok(AccessProgress::Pending) => {
                    area.wait = WaitReason::List { len_bytes };
                    return StepResult::Later;
                }
                Err(_) => return StepResult::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
    }

    /// Resolves the host ranges to segments. Every range is resolved before any data moves, so that a
    /// command with a partly inaccessible buffer fails without effect.
    fn reach(&mut self, index: u16) -> StepResult {
        let CommandContext { pieces, segments, .. } = self.areas.get(index);
        segments.clear();
        let mut is_reached = true;
        for piece in pieces.as_slice() {
            if piece.is_bucket {
                is_reached = false;
                continue;
            }
            match self.host.resolve(piece.iova, piece.len_bytes) {
                Ok(Some(segment)) => append(segments, segment),
                Ok(None) => is_reached = false,
                Err(_) => return StepResult::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
        StepResult::Now(JobEvent::Reached(is_reached.then_some(segments.len())))
    }

    fn take_buffer(&mut self, index: u16, is_zeroed: bool) -> StepResult {
        if self.buffers.count() == 0 {
            return StepResult::Failed(Status::DATA_TRANSFER_ERROR);
        }
        let area = self.areas.get(index);
        if self.want_buffer.is_empty()
            && let Some(event) = allocate_bounce(&self.buffers, area, is_zeroed)
        {
            return StepResult::Now(event);
        }
        area.wait = WaitReason::Buffer { is_zeroed };
        self.want_buffer.push_back(index);
        StepResult::Later
    }

    fn begin_move(&mut self, index: u16, aim: CopyTarget, len_bytes: u32) -> StepResult {
        self.areas.get(index).mover.begin(len_bytes);
        self.go_on_moving(index, aim)
    }

    fn go_on_moving(&mut self, index: u16, aim: CopyTarget) -> StepResult {
        let area = self.areas.get(index);
        let (tickets, direction) = (u32::from(index) << 4, area.direction);
        let mut target =
            target(&self.buffers, aim, area.buffer, &mut area.bytes, &mut area.differs);
        let moved = area.mover.run(
            &mut self.host,
            tickets,
            &area.pieces,
            direction,
            &mut target,
            &mut self.scratch,
        );
        match moved {
            CopyState::Whole => StepResult::Now(JobEvent::Moved { differs: area.differs }),
            CopyState::Waiting => {
                area.wait = WaitReason::Host(aim);
                StepResult::Later
            }
            CopyState::Failed => StepResult::Failed(Status::DATA_TRANSFER_ERROR),
        }
    }

    fn submit_work(&mut self, now: Instant, index: u16, work: SubRequest) -> StepResult {
        let area = self.areas.get(index);
        let is_there = match work.data {
            DataLocation::Nowhere => {
                area.part.clear();
                true
            }
            DataLocation::Reached { at_bytes, len_bytes } => area.cut(at_bytes, len_bytes),
            DataLocation::Buffer { len_bytes } => {
                area.part.clear();
                area.part.extend(area.buffer.and_then(|buffer| buffer.slice(0, len_bytes)));
                !area.part.is_empty()
            }
        };
        if !is_there {
            return StepResult::Failed(Status::INTERNAL_ERROR);
        }
        let request = Request {
            token: area.slot.into(),
            lba: work.lba,
            operand: work.operand,
            blocks: work.blocks,
            segment_first: 0,
            segment_count: u16::try_from(area.part.len()).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation: work.operation,
            flags: work.flags,
        };
        self.try_submit(now, index, request);
        StepResult::Later
    }

    fn try_submit(&mut self, now: Instant, index: u16, request: Request) {
        let area = self.areas.get(index);
        let channel = self.directory.channel(area.channel);
        if channel.is_some_and(|channel| channel.submit_one(now, &request, &area.part)) {
            area.wait = WaitReason::Backend;
        } else {
            area.wait = WaitReason::BackendFull(request);
            self.want_room.push_back(index);
        }
    }

    /// Flushes the next block device, from channel `from` on, that has a volatile cache or supports
    /// Flush.
    fn flush_from(&mut self, now: Instant, index: u16, from: u16) -> StepResult {
        let found = self.directory.open_channels().find(|(number, channel)| {
            *number >= from && (channel.can_flush() || channel.must_flush())
        });
        let Some((number, channel)) = found else {
            return StepResult::Now(JobEvent::Flushed(None));
        };
        if !channel.can_flush() {
            return StepResult::Now(JobEvent::Flushed(Some((number, IoStatus::INVALID_OPCODE))));
        }
        self.areas.get(index).channel = number;
        let flags = tenmil_base::RequestFlags::NONE;
        let (operation, data) = (Operation::Flush, DataLocation::Nowhere);
        self.submit_work(
            now,
            index,
            SubRequest { operation, flags, lba: 0, operand: 0, blocks: 0, data },
        )
    }

    fn forward(&mut self, index: u16) -> StepResult {
        let area = self.areas.get(index);
        area.wait = WaitReason::Controller;
        let (command, bytes) = (area.command, area.bytes.clone());
        self.write(QueueEvent::Reservation { ticket: index.into(), command, bytes });
        StepResult::Later
    }
}

/// Appends a segment, or extends the last one if they are adjacent.
fn append(segments: &mut Vec<Segment>, segment: Segment) {
    match segments.last_mut() {
        Some(last)
            if last.region == segment.region
                && last.offset + u64::from(last.len_bytes) == segment.offset =>
        {
            last.len_bytes += segment.len_bytes;
        }
        _ => segments.push(segment),
    }
}

/// Allocates a bounce buffer for a context.
fn allocate_bounce(
    buffers: &BouncePool,
    area: &mut CommandContext,
    is_zeroed: bool,
) -> Option<JobEvent> {
    let buffer = buffers.take()?;
    if is_zeroed && buffers.memory().fill(buffer, 0).is_err() {
        // The pool refers to memory that does not exist: the block device will reject the segment.
        debug_assert!(false, "a buffer outside its memory");
    }
    area.buffer = Some(buffer);
    Some(JobEvent::Buffered(buffer.len_bytes))
}

/// Controller-side buffer of a copy.
fn target<'a>(
    buffers: &'a BouncePool,
    aim: CopyTarget,
    buffer: Option<Segment>,
    bytes: &'a mut [u8],
    differs: &'a mut bool,
) -> LocalBuffer<'a> {
    let segment = buffer.unwrap_or_default();
    match aim {
        CopyTarget::Bytes => LocalBuffer::Bytes(bytes),
        CopyTarget::Buffer => LocalBuffer::Buffer(buffers.memory(), segment),
        CopyTarget::Check => LocalBuffer::Expected { memory: buffers.memory(), segment, differs },
    }
}
